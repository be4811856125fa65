"""Times of a benchmark's cases in two revisions (`python -m benchmarks.run NAME --base REV`). Nothing is kept.

Each revision has its own process on the same GPU, with its own `src` and these benchmarks, on the same data. The processes alternate: each
time, every implementation runs several times, as a CUDA graph, the L2 cache flushed before each. A ratio is the median over the turns
of the base's time over ours; its interval holds the true median with a probability of 95%.
"""

from __future__ import annotations

import io
import os
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from evidence.dry import compile_ahead
from evidence.fingerprint import ROOT

from .beside import Beside

TURNS, TURN_MS, MOST_SAMPLES = 24, 20, 20
SECONDS = 900  # that a case may take to be prepared
SAMPLED = 1 << 16  # elements of an output that are compared


def source(base: str, folder: str) -> Path:
    """The `src` of a folder, or of a git revision, which is written below `folder`."""
    if (Path(base) / "src/fp8attn").is_dir():
        return Path(base).resolve() / "src"
    try:
        packed = subprocess.run(["git", "archive", base, "src"], cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as problem:
        why = getattr(problem, "stderr", b"").decode().strip() or problem
        sys.exit(f"--base takes a git revision, or a folder that holds src/fp8attn, and not {base!r}: {why}")
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return Path(folder) / "src"


def compare(name: str, cases: list[str], base: str) -> None:
    """Print the times of both revisions and their ratio, case by case."""
    with tempfile.TemporaryDirectory() as folder:
        sides = {}
        for side, src in (("now", ROOT / "src"), ("base", source(base, folder))):
            with mock.patch.dict(os.environ, FP8ATTN_SRC=str(src)):
                compile_ahead(name, cases)
                sides[side] = Beside(serve, SECONDS)
                sides[side]()  # the process begins, with this environment
        try:
            for case in cases:
                compare_case(name, case, sides, base)
        finally:
            for side in sides.values():
                side.end()


def compare_case(name: str, case: str, sides: dict[str, Beside], base: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(sides, pool.map(lambda side: side(name, case), sides.values()), strict=True))
    for side, outs in found.items():
        if not isinstance(outs, dict):
            reason = outs or "its process ended; what it printed is above"
            whose = f"{base} does not fit the benchmark {name} as it is now" if side == "base" else f"{name} does not run"
            sys.exit(f"{case}: {whose}: {reason}")
    impls = [impl for impl in found["now"] if impl in found["base"]]
    times: dict[str, list[dict[str, float]]] = {"now": [], "base": []}
    for _ in range(TURNS):
        for side in random.sample(list(sides), 2):
            times[side].append(sides[side]())
            if times[side][-1] is None:
                sys.exit(f"{case}: the process of {'this revision' if side == 'now' else base} ended; what it printed is above")
    print(f"\n{case}")
    for impl in impls:
        now, before = ([turn[impl] for turn in times[side]] for side in ("now", "base"))
        middle, low, high = median_and_interval([b / a for a, b in zip(now, before, strict=True)])
        same = difference(found["now"][impl], found["base"][impl])
        print(
            f"  {impl:22s} now {statistics.median(now):.5f} ms  base {statistics.median(before):.5f} ms  "
            f"base/now {middle:.4f} [{low:.4f}, {high:.4f}]{same}",
            flush=True,
        )
    for impl in found["now"].keys() ^ found["base"].keys():
        print(f"  {impl:22s} only {'now' if impl in found['now'] else 'in the base'}")


def median_and_interval(values: list[float]) -> tuple[float, float, float]:
    """The median, and the order statistics between which the true one is with a probability of at least 95% (six values or more)."""
    ordered, count = sorted(values), len(values)
    rank = max(1, int((count - 1.96 * count**0.5) / 2))
    return statistics.median(ordered), ordered[rank - 1], ordered[count - rank]


def difference(now: list[float] | None, before: list[float] | None) -> str:
    """How far two outputs are apart, in words; nothing where there are none."""
    if now is None or before is None:
        return ""
    if now == before:
        return "  equal outputs"
    wrong = sum((a - b) ** 2 for a, b in zip(now, before, strict=True)) / (sum(b**2 for b in before) or 1.0)
    return f"  outputs differ by {wrong**0.5:.1e}"


_prepared: dict[str, Any] = {}  # of the case that a process has prepared


def serve(name: str | None = None, case: str | None = None) -> dict | str | None:
    """In a revision's process: prepare a case and give samples of its outputs, or why it cannot be prepared. Without a case, take a turn
    with the one that is prepared and give its times in milliseconds; nothing where there is none."""
    if case is None:
        return _prepared["turn"]() if _prepared else "ready"
    _prepared.clear()
    try:
        return prepare(name, case)
    except Exception as problem:  # of any type: the other revision's interface is another
        return f"{type(problem).__name__}: {problem}"


def prepare(name: str, case: str) -> dict[str, list[float] | None]:
    import torch

    benchmark, measure = import_module(f"benchmarks.{name}"), import_module("benchmarks.measure")
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    with torch.inference_mode():
        calls = {impl: call for impl, call in benchmark.calls(case).items() if impl.startswith("fp8attn")}
        outs = {impl: sampled(call()) for impl, call in calls.items()}
        replays = {impl: measure.graph_of(call)[0] for impl, call in calls.items()}
        slowest = max(measure.interleaved(replays, 3, flush=True).values())
    samples = max(1, min(MOST_SAMPLES, int(TURN_MS / slowest)))
    _prepared["turn"] = lambda: measure.interleaved(replays, samples, flush=True)
    _prepared["calls"] = calls  # a graph does not keep alive what it reads
    return outs


def sampled(out: Any) -> list[float] | None:
    """Evenly spaced elements of a tensor, or of the pages of a cache; None of anything else."""
    flat = getattr(out, "pool", out)
    if not hasattr(flat, "flatten"):
        return None
    flat = flat.flatten()
    return flat[:: max(1, len(flat) // SAMPLED)].double().nan_to_num().tolist()
