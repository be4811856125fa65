"""Engines of vLLM: times, tokens that fit, equal answers, perplexity."""

from __future__ import annotations

import re

from ..rows import Rows, devices, latest, lengths, over, together
from .writing import beside, block, number, table, tokens, value

IMPLS = {"vllm-bf16": "BF16", "vllm-fp8": "vLLM's FP8", "fp8attn": "fp8attn"}
LOAD = {"fits": ("tokens that fit into the cache", "tokens"), "throughput": ("mixed load, tokens/s", "tokens_per_s")}
ANSWERING = IMPLS | {"fp8attn-exact": "fp8attn, exact", "fp8attn-static": "exact, static scales"}
WAYS = {
    "prefix-caching": "prefix caching, first request", "prefix-caching-hits": "prefix caching, the same prompts again",
    "chunks": "prompts in chunks of 256 tokens", "ngram": "n-gram speculation, 4 tokens", "draft": "a draft model (itself), 3 tokens",
    "eagle": "an EAGLE head (not trained), 3 tokens", "offload": "blocks offloaded to the CPU, first request",
    "offload-hits": "blocks offloaded to the CPU, the same prompts again", "connector": "blocks written to files, first request",
    "connector-hits": "blocks written to files, the same prompts again", "tp2": "tensor parallel, 2 processes",
    "pp2": "pipeline parallel, 2 processes",
}  # fmt: skip
MODELS = {"stdlib": "our model", "smollm2": "SmolLM2"}  # of perplexity
RATIO = "vLLM's FP8 over fp8attn"


@block("vllm")
def vllm_equal() -> str:
    """Answers that equal the plain engine's: fp8attn's fewest first."""
    body = []
    for title, here in devices("vllm", cpus=True).items():
        found = [(row["equal"], case) for (case, impl), row in here.items() if impl == "fp8attn" and case.startswith("equal-")]
        for _, case in sorted(found):
            rows = (here.get((case, impl)) for impl in ANSWERING)
            cells = ("" if row is None else f"{row['equal']} of {row['prompts']}" for row in rows)
            body.append([title, WAYS[case.removeprefix("equal-")], *cells])
    return table(["", "answers equal to those of the plain engine", *ANSWERING.values()], body)


@block("vllm")
def vllm_chunks() -> str:
    """What other chunks of a prompt change."""
    _, here = latest("vllm")
    ours, bf16 = (here["equal-chunks", impl] for impl in ("fp8attn", "vllm-bf16"))
    return f"{ours['equal']} of {ours['prompts']} stay equal (BF16: {bf16['equal']})"


@block("vllm")
def vllm_times() -> str:
    """Milliseconds of a user's calls: prompts, then decode steps."""
    found = dict.fromkeys(case for here in devices("vllm").values() for case, _ in here)
    lines = {case: f"first token, prompt of {tokens(n)}" for n, case in lengths(((case, "") for case in found), r"prefill-S(\d+)").items()}
    for case in found:
        if match := re.fullmatch(r"decode-B(\d+)-S(\d+)", case):
            lines[case] = f"decode step, {match[1]} x {tokens(int(match[2]))}"
    form = lambda case: ",.1f" if case.startswith("prefill") else ".2f"  # noqa: E731
    columns = {f"{label}, ms": lambda here, case, impl=impl: value(here, case, impl, "ms", form(case)) for impl, label in IMPLS.items()}
    return beside("vllm", "", lines, columns | {RATIO: lambda here, case: number(over(here, case, "fp8attn", "vllm-fp8"))})


@block("vllm")
def vllm_prompts() -> str:
    _, here = latest("vllm")
    speeds = {n: over(here, case, "fp8attn", "vllm-fp8") for n, case in lengths(here, r"prefill-S(\d+)").items()}
    return ", ".join(f"{number(speed)} at {tokens(n)}" for n, speed in speeds.items() if speed)


@block("vllm")
def vllm_load() -> str:
    lines = {case: label for case, (label, _) in LOAD.items()}
    columns = {label: lambda here, case, impl=impl: value(here, case, impl, LOAD[case][1], ",.0f") for impl, label in IMPLS.items()}
    return beside("vllm", "", lines, columns | {"fp8attn over vLLM's FP8": lambda here, case: more(here, case, LOAD[case][1])})


def more(here: Rows, case: str, key: str) -> str:
    """fp8attn's number over that of vLLM's FP8, if one run measured both."""
    ours, theirs = (here.get((case, impl)) for impl in ("fp8attn", "vllm-fp8"))
    return f"{ours[key] / theirs[key]:.3f}" if ours and theirs and together(ours, theirs) else ""


@block("vllm")
def vllm_perplexity() -> str:
    body = []
    for title, here in devices("vllm", cpus=True).items():
        for case in dict.fromkeys(case for case, _ in here):
            if match := re.fullmatch(r"perplexity-(\w+)-S(\d+)", case):
                cells = (perplexity(here, case, impl) for impl in IMPLS)
                body.append([title, f"{MODELS[match[1]]}, {tokens(int(match[2]))}", *cells])
    return table(["", "held-out code", *IMPLS.values()], body)


def perplexity(here: Rows, case: str, impl: str) -> str:
    """A perplexity, and how much larger it is than BF16's of the same run."""
    row, base = here.get((case, impl)), here.get((case, "vllm-bf16"))
    if row is None:
        return ""
    return f"{row['perplexity']:.3f}" + (f" ({row['over_bf16']:+.2%})" if base and row is not base and together(row, base) else "")
