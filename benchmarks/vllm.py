"""fp8attn in vLLM beside vLLM's own caches in BF16 and FP8: times of a Llama-3.1-8B's shape, equal answers, perplexity.

Each implementation is an engine in a process of its own (`vllm_engine`), with the same options. Timed engines run one after another, each
alone on a GPU; others run at once (`at_once`).

| implementation | KV cache |
|---|---|
| `vllm-bf16` | BF16 |
| `vllm-fp8` | `--kv-cache-dtype fp8`, scales of one (FlashAttention-3 with two-level accumulation) |
| `fp8attn` | `--kv-cache-dtype fp8 --attention-backend CUSTOM` |
| `fp8attn-exact` | likewise, with `--additional-config '{"fp8attn": {"exact": true}}'`; in `equal` |
| `fp8attn-static` | likewise, and with calibrated scales, which do not grow (`"static_scales": true`); in `equal` |

| case | rows |
|---|---|
| `llama` | random weights: `decode-B1-S131072`, `ms` of a decode step of one sequence of 131,072 tokens; `prefill-S131072`, `ms` to the |
| | first token; `fits`, tokens that fit into the memory that vLLM gives the cache |
| `load` | random weights, a mixed load: prompts and answers of different lengths, all requested at once |
| `equal-chunks` ... | of 20 prompts, how many greedy answers are those of the plain engine: with prompts in chunks, prefix caching, |
| | speculation, blocks in the CPU's memory or in files (from a GPU), or the model on two GPUs or two cores |
| `perplexity-stdlib`, `-smollm2` | of held-out text, from the engine's own log-probabilities of prompts |

A time is that of a user's call, `LLM.generate`, with all that vLLM does around attention. The answers of random weights mean nothing, so
`equal-*` and `perplexity-*` check the same kernels with trained models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from fp8attn.errors import UsageError
from fp8attn_tools.evaluation.public import find

from .at_once import Engine, machine
from .measure import left_out
from .vllm_engine import PROMPTS

STORED = ("vllm-bf16", "vllm-fp8", "fp8attn")  # each way of storing K and V
ANSWERING = ("vllm-bf16", "fp8attn", "fp8attn-exact")
WAYS = ("prefix-caching", "chunks", "ngram", "draft", "eagle", "offload", "connector", "tp2", "pp2")  # of computing the same answers
OTHERS = ("vllm-fp8", "fp8attn-static")  # that answer in these ways, too:
STEPS = ("prefix-caching", "chunks", "ngram", "tp2")
AGAIN = ("prefix-caching", "offload", "connector")  # the same prompts again are read from blocks
WINDOWS = {"stdlib": (4096, 8), "smollm2": (2048, 8)}  # tokens of a window, windows
CASES = ("perplexity-smollm2", "load", *(f"equal-{way}" for way in WAYS), "perplexity-stdlib", "llama")


def start(cases: Iterable[str]) -> None:
    """Start the engines of these cases, as many at once as there are places for."""
    for case in cases:
        if missing(case) is not None:
            continue
        for wanted in engines(case).values():
            for engine in wanted:
                machine().submit(engine)


def measure(case: str) -> Iterator[dict]:
    name, _, of = case.partition("-")
    if (reason := missing(case)) is not None:
        left_out(case, reason)
        return
    values: dict[str, float] = {}  # perplexities
    for impl, wanted in engines(case).items():
        try:
            found = [machine().submit(engine).result() for engine in wanted]
        except RuntimeError as problem:
            print(problem, flush=True)
            left_out(f"{case} {impl}", problem)
            continue
        if name in ("llama", "load"):
            yield from found[0]
        elif name == "equal":
            yield from equal(of, impl, *(rows[0] for rows in found))
        else:
            length, count = WINDOWS[of]
            values[impl] = math.exp(-found[0][0]["mean"])
            over = {"over_bf16": round(values[impl] / values[STORED[0]] - 1, 6)} if STORED[0] in values else {}
            yield {
                "case": f"{case}-S{length}", "impl": impl, "perplexity": round(values[impl], 5),
                "tokens": found[0][0]["tokens"], **over, "windows": count,
            }  # fmt: skip


def engines(case: str) -> dict[str, list[Engine]]:
    """The engines of a case, by the implementation of its rows."""
    name, _, of = case.partition("-")
    if name in ("llama", "load"):
        return {impl: [Engine({"llama": "engine_times", "load": "throughput"}[name], (impl,), timed=True)] for impl in reversed(STORED)}
    if name == "equal":
        impls = (*ANSWERING, *OTHERS) if of in STEPS else ANSWERING
        return {impl: [answers(impl, "plain"), answers(impl, of)] for impl in impls}
    return {impl: [likelihood(impl, of)] for impl in STORED}


def missing(case: str) -> str | None:
    """What this machine lacks for a case, or None."""
    if case == "equal-offload" and machine().gpus == 0:
        return "vLLM offloads from GPUs only"
    if case in ("equal-tp2", "equal-pp2") and machine().gpus == 1:
        return "it needs two GPUs, or none"
    if case == "perplexity-smollm2":
        try:
            find("smollm2")
        except UsageError as problem:
            return str(problem)
    return None


def answers(impl: str, way: str, options: str = "{}") -> Engine:
    return Engine("answers", (impl, way, options), gpus=2 if way in ("tp2", "pp2") else 1)


def likelihood(impl: str, model: str) -> Engine:
    return Engine("log_likelihood", (impl, model, *map(str, WINDOWS[model])))


def equal(way: str, impl: str, plain: dict, found: dict) -> Iterator[dict]:
    """How many answers are those of `plain`."""
    for name in ("answers", "again") if way in AGAIN else ("answers",):
        same = sum(a == b for a, b in zip(found[name], plain["answers"], strict=True))
        case = f"equal-{way}" if name == "answers" else f"equal-{way}-hits"
        drafts = {"accepted_tokens": found["accepted"]} if found["accepted"] else {}
        yield {"case": case, "impl": impl, "equal": same, "prompts": PROMPTS, "cached_tokens": found["cached"], **drafts}
