"""Times of kernels: prefill, decode, append, scaled_dot_product_attention."""

from __future__ import annotations

import re

from benchmarks import engine as engine_benchmark
from benchmarks import wide as wide_benchmark
from benchmarks.peers import CALLS
from benchmarks.problem import KEYS

from ..rows import latest, lengths, over
from .writing import Cell, beside, block, number, span, table, tokens, value

PREFILL = {
    "D128-full-S4096": "4 x 4k full", "D128-full-S16384": "16k full", "D128-full-S65536": "64k full",
    "D128-causal-S16384": "16k causal", "D128-causal-S1024": "16 x 1k causal",
    "D128-causal-S4096": "4 x 4k causal", "D128-causal-S8192": "2 x 8k causal", "D128-causal-S65536": "64k causal",
    "gqa-causal-S16384": "16k causal, 32/8 heads", "gqa-causal-S131072": "128k causal, 32/8 heads",
    "chunked-2k-on-128k": "2k on 128k, 32/8 heads", "varlen-mix": "ragged, 32/8 heads",
    **{f"mha-causal-S{n * 1024}": f"{n}k causal, 32 heads" for n in (2, 4, 8)},
    "D64-full-S16384": "16k full, head_dim 64",
    "D64-causal-S16384": "16k causal, head_dim 64", "D256-full-S16384": "16k full, head_dim 256",
    "D256-causal-S16384": "16k causal, head_dim 256", "D192-causal-S16384": "16k causal, head_dim 192",
}  # fmt: skip
FP8 = {
    impl: call.title for impl, call in CALLS.items() if call.prefill and call.levels
}  # peers in prompts, and their names in tables
SINGLE_LEVEL = tuple(impl for impl in FP8 if CALLS[impl].levels == 1)
BF16 = {impl: call.title for impl, call in CALLS.items() if call.prefill and not call.levels}
STEP = {impl: call.title for impl, call in CALLS.items() if call.decode and call.levels}
# Ways to compute an engine's step: a kernel over pages in one call or, as `-split`, in two; kernels for decode steps
# and for prompts.
ENGINE = {
    impl.removesuffix("-paged")
    + end: f"{CALLS[impl].title.removesuffix(', paged')}{' FP8' if CALLS[impl].levels else ''}{calls}"
    for impl in engine_benchmark.WHOLE
    for end, calls in (("", ", one call"), ("-split", ", two calls"))
} | {impl: f"{CALLS[impl].title} FP8" for impl in engine_benchmark.PAIRS}
PREFILL_IMPLS = (*KEYS, "fp8attn-q8")  # queries in 16 bits, and in FP8


def over_peer(impl: str) -> Cell:
    return lambda here, case: number(over(here, case, "fp8attn", impl))


@block("decode")
def decode() -> str:
    cases = {case: case.replace("-", ", ") for case, _ in latest("decode")[1]}
    return beside("decode", "batch x context", cases, {
        "GB/s": lambda here, case: value(here, case, "fp8attn", "gbps", ".0f"),
        **{f"over {title}": over_peer(impl) for impl, title in STEP.items()},
        "of the ceiling": lambda here, case: number(over(here, case, "fp8attn", "stream-ceiling"), ".0%"),
    })  # fmt: skip


@block("decode")
def decode_error() -> str:
    found = latest("decode")[1].values()
    ours = max(row["rel_err"] for row in found if row["impl"] in KEYS)
    even = [row for row in found if "ragged" not in row["case"]]  # whose last sequence is one token
    theirs = [row["rel_err"] for row in even if row["impl"].startswith("vllm-fa3-fp8")]
    return f"at most {ours:.1e} off; vLLM's FP8, which rounds Q and the weights, {span(theirs, '.1e')}"


@block("prefill")
def prefill() -> str:
    """TFLOPS of ours and of every peer."""
    title, here = latest("prefill")
    queries = {
        impl: "16-bit queries" + (f", {keys.upper()} keys" if impl != "fp8attn" else "") for impl, keys in KEYS.items()
    }
    impls = {"fp8attn-q8": f"{title}: queries in FP8", **queries, "fp8attn-exact": "exact"} | FP8 | BF16
    body = [[label, *(value(here, case, impl, "tflops", ".0f") for impl in impls)] for case, label in PREFILL.items()]
    return table(["tokens", *impls.values()], body)


@block("engine")
def engine() -> str:
    """A step of an engine: our time, and over it the others'."""
    title, here = latest("engine")
    cases = dict.fromkeys(case for case, _ in here)
    body = [
        [
            step_of(case),
            value(here, case, "fp8attn", "ms", ".0f", 1e3),
            *(over_peer(impl)(here, case) for impl in ENGINE),
        ]
        for case in cases
    ]
    return table(["a chunk beside decode steps", f"{title}: us", *(f"over {name}" for name in ENGINE.values())], body)


def step_of(case: str) -> str:
    """`C2k-at-32k-beside-32` in words."""
    chunk, *at, decodes = re.fullmatch(r"C(\w+)(?:-at-(\w+))?-beside-(\d+)", case).groups()
    return f"{chunk} tokens{f' on {at[0]}' if at[0] else ''}, {decodes} steps"


@block("sdpa")
def sdpa() -> str:
    """Kinds of calls by lengths: fp8attn, with RoPE in the call, and torchao."""
    kinds = {"full": "full", "causal": "causal", "gqa-full": "full, 8 KV heads", "gqa-causal": "causal, 8 KV heads"}
    impls = {"fp8attn": "", "fp8attn-rope": ", with RoPE", "torchao": ", torchao"}
    title, here = latest("sdpa")
    at = sorted(lengths(here, r"(?:gqa-)?(?:full|causal)-S(\d+)"))
    body = [
        [f"{title}, {what}{label}", *(number(over(here, f"{kind}-S{n}", impl, "fa3-bf16", "cudnn-bf16")) for n in at)]
        for kind, what in kinds.items() for impl, label in impls.items()
    ]  # fmt: skip
    return table(["over BF16, tokens", *map(tokens, at)], body)


VIDEO = {
    "fp8attn-call": "whole calls: fp8attn", "fp8attn-call-e4m3-keys": "fp8attn, E4M3 keys",
    "comfy-call": "Comfy Kitchen, INT8",
    "torchao": "torchao, FP8, single-level", "fa3-bf16": "FA3 BF16", "cudnn-bf16": "cuDNN BF16",
    "fp8attn": "kernels alone: fp8attn", "fp8attn-e4m3-keys": "fp8attn, E4M3 keys",
    "fp8attn-q8": "fp8attn, queries in FP8, too",
    "fp8attn-exact": "fp8attn, exact", "comfy": "Comfy Kitchen, INT8", "sage": "SageAttention, INT8 and FP8, two-level",
    "vllm-fa3-fp8": "vLLM's FA3, FP8, two-level", "fa3-fp8": "FA3, FP8, single-level",
    "cudnn-fp8": "cuDNN, FP8, single-level",
}  # fmt: skip
SHAPES = {"wan-720p-S75600": "Wan 720p, 75,600", "h3-1088p-S185640": "H3 1088p, 185,640"}


def of_shapes(key: str, form: str) -> list[list[str]]:
    _, here = latest("video")
    return [[label, *(value(here, case, impl, key, form) for case in SHAPES)] for impl, label in VIDEO.items()]


@block("video")
def video() -> str:
    """TFLOPS at the shapes of video models."""
    return table([f"{latest('video')[0]}: TFLOPS", *SHAPES.values()], of_shapes("tflops", ".0f"))


@block("video")
def video_noise() -> str:
    """The noise there, with V of mean 0 and of mean 1."""
    body = [
        [*zero, *one[1:]] for zero, one in zip(of_shapes("noise", ".1%"), of_shapes("noise_mean1", ".2%"), strict=True)
    ]
    return table(["noise", *SHAPES.values(), *(f"{label}; V of mean 1" for label in SHAPES.values())], body)


@block("wide")
def wide() -> str:
    """Attention at head_dim 512: keys that follow from values, and K and V, beside vLLM's."""
    ours = {"fp8attn-latents": "keys that follow from values", "fp8attn": "K and V"}
    columns = {}
    for impl, title in ours.items():
        columns[f"{title}: us"] = lambda here, case, impl=impl: value(here, case, impl, "ms", ".0f", 1e3)
        for peer in wide_benchmark.PEERS:
            columns[f"{title}: over {CALLS[peer].title}"] = lambda here, case, pair=(impl, peer): number(
                over(here, case, *pair)
            )
    cases = {case: case.replace("-", ", ") for case in dict.fromkeys(case for case, _ in latest("wide")[1])}
    return beside("wide", "head_dim 512", cases, columns)


@block("append")
def append() -> str:
    words = {"step": "a decode step's append", "prompt": "a prompt's append", "quantize": "dense tensors"}
    named = {"e4m3": "E4M3 keys"}
    found, lines = latest("append")[1], {}
    for case in dict.fromkeys(case for case, _ in found):
        for impl in (*KEYS, *(f"{impl}-rope" for impl in KEYS)):
            if (case, impl) in found:
                kind, *details = sorted(case.split("-"), key=lambda part: part not in words)
                details += [
                    named.get(part, part)
                    for part in impl.removeprefix("fp8attn").replace("-e4m3-keys", "-e4m3").split("-")[1:]
                ]
                lines[case, impl] = f"{words[kind]}: {', '.join(details)}"
    return beside("append", "", lines, {
        "us": lambda here, line: value(here, *line, "ms", ".1f", 1e3),
        "GB/s": lambda here, line: value(here, *line, "gbps", ".0f"),
        "of the ceiling": lambda here, line: number(over(here, *line, "ceiling"), ".0%"),
    })  # fmt: skip
