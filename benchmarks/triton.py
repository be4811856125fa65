"""Our kernels under two versions of Triton, in turns on one GPU: prefill, decode, append, SDPA, and a cold warmup.

    FP8ATTN_SECOND_TRITON=FOLDER python -m benchmarks.run triton

FOLDER holds the second Triton, as `pip install --target FOLDER triton==3.9.0` leaves it; the first is the one that is installed. Each has a
process of its own. A case is one of another benchmark (`CASES`). Both processes prepare it, and check its outputs as that benchmark does,
on memory that was NaN. Then they take turns; each measures CUDA graphs, the L2 cache flushed before every run. `ms` is the median of the
turns' medians. `warmup` is the time in seconds of `fp8attn.warmup` for Llama-3.1-8B's shape, with an empty cache of Triton.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from typing import Any
from unittest import mock

import torch

from evidence.beside import Beside
from evidence.dry import compile_ahead
from evidence.fingerprint import digest

from .measure import checked, graph_of, interleaved, poisoned
from .problem import K, Shape, square

TURNS, TURN_MS, MOST_SAMPLES = 5, 12, 20
SECONDS = 120  # that a request to a process may take
WARMUP = "warmup"
MOST_ERROR = {"prefill": 0.04, "decode": 1e-3}  # on random data: 8-bit queries and weights; 16-bit ones
MOST_EXACT = 2.5e-3  # exact prompts; BF16's rounding alone is 1.6e-3
SAMPLED = 1 << 20  # elements of an output whose bits are compared
LLAMA = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}

# What other benchmarks do not have.
SHAPES = {f"D{dim}-causal-S16384": square(dim, True, 16 * K, q_heads=2048 // 128) for dim in (80, 96)}
PREFILL = ("fp8attn", "fp8attn-e4m3-keys", "fp8attn-q8", "fp8attn-exact")
CASES: dict[str, tuple[str, ...]] = {  # "benchmark case", and the implementations that are measured
    **dict.fromkeys((
        "prefill D64-causal-S16384", "prefill D80-causal-S16384", "prefill D96-causal-S16384", "prefill D128-causal-S1024",
        "prefill D128-causal-S4096", "prefill D128-causal-S16384", "prefill D128-full-S16384", "prefill D128-causal-S65536",
        "prefill chunked-2k-on-128k", "prefill varlen-mix", "prefill D192-causal-S16384", "prefill D256-causal-S16384",
        "prefill D256-full-S16384",
    ), PREFILL),
    **dict.fromkeys((
        "decode B1-S8192", "decode B1-S131072", "decode B64-S8192", "decode B64-S8192-ragged", "decode B16-S8192-D64",
        "decode B16-S8192-D256", "decode B16-S8192-q4",
    ), ("fp8attn", "fp8attn-e4m3-keys")),
    **dict.fromkeys(("append step-B1", "append step-B64", "append prompt-rope-B1-S65536", "append quantize-S16384"), ("fp8attn",)),
    **dict.fromkeys((f"sdpa causal-S{n * K}" for n in (1, 2, 4, 8, 16, 32, 64, 128)), ("fp8attn",)),
    **dict.fromkeys((f"sdpa full-S{n * K}" for n in (1, 4, 16, 128)), ("fp8attn",)),
    WARMUP: ("fp8attn",),
}  # fmt: skip


def calls(case: str) -> dict[str, Callable]:
    """For the dry run that compiles ahead."""
    if case == WARMUP:
        return {}
    name, inner = case.split()
    benchmark = import_module(f"benchmarks.{name}")
    if inner in SHAPES:
        shape = SHAPES[inner]
        found = {impl: run.call for impl, run in benchmark.runs_of_ours(shape, *shape.inputs()).items()}
    else:
        found = benchmark.calls(inner)
    return {impl: found[impl] for impl in CASES[case]}


# In the process of one Triton

_prepared: dict[str, Any] = {}


def serve(request: str, case: str = "") -> Any:
    """Answer a request: `about`, `ahead` (compile all cases), `prepare` (a case: the facts of each implementation), `turn` (milliseconds
    of each implementation of that case), `warmup` (seconds)."""
    if request == "about":
        return about()
    if request == "ahead":
        return compile_ahead("triton", case.split(",")) or "done"
    if request == "turn":
        with torch.inference_mode():
            return _prepared["turn"]()
    if request == WARMUP:
        return warmup_seconds()
    _prepared.clear()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    with torch.inference_mode():
        return prepare(case)


def about() -> dict[str, str]:
    import triton

    from fp8attn.kernels.compile import HOPPER, ptxas_version
    from fp8attn.kernels.operands import ptxas_release

    return {"triton": triton.__version__, "ptxas": ".".join(map(str, ptxas_release(ptxas_version(HOPPER))))}


def prepare(case: str) -> dict[str, dict]:
    """Check the outputs of a case. The graphs, and what they read, stay in `_prepared`."""
    name, inner = case.split()
    benchmark = import_module(f"benchmarks.{name}")
    restart: Callable = lambda: None  # noqa: E731
    if name in ("prefill", "decode"):
        shape: Shape = SHAPES.get(inner) or benchmark.CASES[inner]
        runs = benchmark.runs_of_ours(shape, *shape.inputs()) if name == "prefill" else benchmark.runs_of_ours(inner)
        runs = {impl: runs[impl] for impl in CASES[case]}
        with poisoned():
            rows, replays = checked(case, shape, runs, MOST_ERROR[name], graphs=True)
        assert rows.get("fp8attn-exact", {"rel_err": 0.0})["rel_err"] < MOST_EXACT, f"{case}: exact prompts are not"
        work = {"flops": shape.flops} if name == "prefill" else {"bytes": shape.kv_elements}
        facts = {impl: {"rel_err": rows[impl]["rel_err"], "bits": bits(runs[impl].call())} | work for impl in rows}
        kept: Any = runs
    elif name == "append":
        kept = benchmark.CASES[inner].prepare()
        kept.check()
        restart = kept.restart
        restart()
        replays = {impl: graph_of(kept.calls[impl])[0] for impl in CASES[case]}
        facts = {impl: {"bytes": kept.bytes} for impl in CASES[case]}
    else:
        here = benchmark.CASES[inner]
        kept = here.inputs()
        made = benchmark.calls(inner, (*kept, *benchmark.tables(here.length)))
        replays, facts = {}, {}
        for impl in CASES[case]:
            with poisoned():
                replays[impl], out = graph_of(made[impl])
            replays[impl]()
            decibels = round(benchmark.decibels(here, out, *kept), 2)
            assert decibels > benchmark.LEAST_DB, f"{case}: {impl} is wrong, {decibels} dB"
            facts[impl] = {"sqnr_db": decibels, "bits": bits(out), "flops": here.shape.flops}
    slowest = max(interleaved(replays, 3, flush=True, before=restart).values())
    samples = max(1, min(MOST_SAMPLES, int(TURN_MS / slowest)))
    _prepared["turn"] = lambda: interleaved(replays, samples, flush=True, before=restart)
    _prepared["kept"] = kept  # a graph does not keep alive what it reads
    return facts


def bits(out: torch.Tensor) -> str:
    """A digest of evenly spaced elements of a 16-bit output."""
    flat = out.flatten().view(torch.int16)
    return digest(flat[:: max(1, len(flat) // SAMPLED)].cpu().numpy().tobytes())


def warmup_seconds() -> float:
    import fp8attn

    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TRITON_CACHE_DIR=folder):
        begun = time.perf_counter()
        fp8attn.warmup(**LLAMA)
        return time.perf_counter() - begun


# In the process that measures


@cache
def sides() -> dict[str, Beside]:
    """A process for each Triton, by version; the installed one is first."""
    folder = os.environ.get("FP8ATTN_SECOND_TRITON")
    if not folder:
        raise SystemExit("FP8ATTN_SECOND_TRITON names no folder with a second Triton: pip install --target FOLDER triton==3.9.0")
    found = {}
    for where in ("", folder):
        with mock.patch.dict(os.environ, FP8ATTN_TRITON=where):
            side = Beside(serve, SECONDS)
            found[str(_ask(side, "about"))] = side  # the process begins, with this environment
    return {_ask(side, "about")["triton"]: side for side in found.values()}


def _ask(side: Beside, *request: str) -> Any:
    answer = side(*request)
    if answer is None:
        raise RuntimeError(f"{request}: the process of a Triton ended, and what it printed is above")
    return answer


def start(cases: list[str]) -> None:
    """Compile for both at once."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda side: _ask(side, "ahead", ",".join(cases)), sides().values()))


def measure(case: str) -> Iterator[dict]:
    found = {version: _ask(side, "about") for version, side in sides().items()}
    if case == WARMUP:
        for version, side in sides().items():
            yield {"case": case, "impl": f"fp8attn-triton-{version}", "seconds": round(_ask(side, WARMUP), 1)} | found[version]
        return
    with ThreadPoolExecutor(2) as pool:
        facts = dict(zip(sides(), pool.map(lambda side: _ask(side, "prepare", case), sides().values()), strict=True))
    turns: dict[str, list[dict[str, float]]] = {version: [] for version in sides()}
    for _ in range(TURNS):
        for version in random.sample(list(turns), len(turns)):
            turns[version].append(_ask(sides()[version], "turn"))
    for impl in CASES[case]:
        outputs = {facts[version][impl].pop("bits", "") for version in turns}
        same = {"same_bits": len(outputs) == 1} if outputs != {""} else {}
        for version, taken in turns.items():
            ms = statistics.median(turn[impl] for turn in taken)
            about_it = dict(facts[version][impl])
            flops, moved = about_it.pop("flops", 0), about_it.pop("bytes", 0)
            speed = {"tflops": round(flops / ms * 1e-9, 1)} if flops else {"gbps": round(moved / ms * 1e-6, 1)}
            yield {"case": case, "impl": f"{impl}-triton-{version}", "ms": round(ms, 5)} | speed | about_it | same | found[version]
