"""Two sides of a comparison: revisions of our code, or versions of Triton, each in a process of its own on the same
GPU.

    python -m benchmarks.run prefill D128-causal-S16384 --base main    # prints how a revision compares; keeps nothing

Each side has these benchmarks and the same data. The sides alternate: in a turn, every implementation runs several
times as a CUDA graph, with the L2 cache flushed before each run. A ratio is the median over the turns; its interval
contains the true median with a probability of 95%.
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
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from evidence.results import ROOT

from .ahead import compile_ahead
from .beside import Beside

TURNS, TURN_MS, MOST_SAMPLES = 24, 20, 20
SECONDS = 900  # for one answer of a side
SAMPLED = 1 << 16  # elements of an output that are compared
Outputs = dict[str, list[float] | None]


def begin(**environment: str) -> Beside:
    """A side, whose process has these environment variables and the Triton of FP8ATTN_TRITON, if one is named."""
    ours = [os.path.abspath(folder) for folder in [os.environ.get("FP8ATTN_TRITON")] if folder]
    path = [folder for folder in sys.path if os.path.abspath(folder) not in ours]  # a process inherits it
    side = Beside(serve, SECONDS)
    with mock.patch.dict(os.environ, environment), mock.patch.object(sys, "path", path):
        side("ready")
    return side


def prepare(sides: Mapping[str, Beside], *request: Any) -> dict[str, Outputs]:
    """Prepare a case on all sides at once. Returns samples of the outputs.

    Raises:
        RuntimeError: a side cannot prepare it; the message begins with the side's name.
    """
    with ThreadPoolExecutor(len(sides)) as pool:
        found = dict(zip(sides, pool.map(lambda side: side("prepare", *request), sides.values()), strict=True))
    for name, outs in found.items():
        if not isinstance(outs, dict):
            raise RuntimeError(f"{name}: {outs or 'its process ended; what it printed is above'}")
    return found


def alternate(sides: Mapping[str, Beside], turns: int) -> dict[str, list[dict[str, float]]]:
    """The milliseconds of each implementation in each turn, by side."""
    times: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(turns):
        for name in random.sample(list(sides), len(sides)):
            taken = sides[name]("turn")
            if taken is None:
                raise RuntimeError(f"{name}: its process ended; what it printed is above")
            times[name].append(taken)
    return times


# Revisions


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
    """Print the times of this revision and of another, and their ratio, case by case."""
    with tempfile.TemporaryDirectory() as folder:
        sides = {}
        for side, src in (("now", ROOT / "src"), (base, source(base, folder))):
            sides[side] = begin(FP8ATTN_SRC=str(src), FP8ATTN_TRITON=os.environ.get("FP8ATTN_TRITON", ""))
            sides[side]("ahead", {name: cases})
        try:
            for case in cases:
                print_case(name, case, sides, base)
        except RuntimeError as problem:
            sys.exit(f"{name} {case} cannot be compared: {problem}")
        finally:
            for process in sides.values():
                process.end()


def print_case(name: str, case: str, sides: dict[str, Beside], base: str) -> None:
    found = prepare(sides, name, case)
    times = alternate(sides, TURNS)
    print(f"\n{case}")
    for impl in [impl for impl in found["now"] if impl in found[base]]:
        now, before = ([turn[impl] for turn in times[side]] for side in ("now", base))
        middle, low, high = median_and_interval([b / a for a, b in zip(now, before, strict=True)])
        apart = difference(found["now"][impl], found[base][impl])
        same = "" if apart is None else "  equal outputs" if apart == 0 else f"  outputs differ by {apart:.1e}"
        print(
            f"  {impl:22s} now {statistics.median(now):.5f} ms  base {statistics.median(before):.5f} ms  "
            f"base/now {middle:.4f} [{low:.4f}, {high:.4f}]{same}",
            flush=True,
        )
    for impl in found["now"].keys() ^ found[base].keys():
        print(f"  {impl:22s} only {'now' if impl in found['now'] else 'in the base'}")


def median_and_interval(values: list[float]) -> tuple[float, float, float]:
    """The median, and the order statistics between which the true one is with a probability of at least 95% (six values
    or more).
    """
    ordered, count = sorted(values), len(values)
    rank = max(1, int((count - 1.96 * count**0.5) / 2))
    return statistics.median(ordered), ordered[rank - 1], ordered[count - rank]


def difference(now: list[float] | None, before: list[float] | None) -> float | None:
    """The relative difference of two sampled outputs; None if there are none."""
    if now is None or before is None:
        return None
    wrong = sum((a - b) ** 2 for a, b in zip(now, before, strict=True)) / (sum(b**2 for b in before) or 1.0)
    return wrong**0.5


# In the process of a side

_prepared: dict[str, Any] = {}  # of the case that is prepared


def serve(request: str, *arguments: Any) -> Any:
    """Answer a request: `ready`; `versions` of Triton and ptxas; `ahead` (compile cases, by benchmark); `prepare` (a
    benchmark, a case,
    and implementations: default all of ours; the outputs, or why it cannot be prepared); `turn` (milliseconds of what
    is prepared).
    """
    import torch

    if request == "versions":
        return versions()
    if request == "ahead":
        return compile_ahead(*arguments) or "done"
    if request == "turn":
        with torch.inference_mode():
            return _prepared["turn"]()
    if request == "prepare":
        _prepared.clear()
        try:
            return _prepare(*arguments)
        except Exception as problem:  # of any type: the other revision's interface differs
            return f"{type(problem).__name__}: {problem}"
    return "ready"


def versions() -> tuple[str, str]:
    import triton
    from triton.backends.nvidia.compiler import get_ptxas_version

    from fp8attn.kernels.operands import ptxas_release

    return triton.__version__, ".".join(map(str, ptxas_release(get_ptxas_version(90))))


def _prepare(name: str, case: str, impls: tuple[str, ...] = ()) -> Outputs:
    import torch

    benchmark, measure = import_module(f"benchmarks.{name}"), import_module("benchmarks.measure")
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    with torch.inference_mode():
        calls = {
            impl: call
            for impl, call in benchmark.calls(case).items()
            if impl in impls or (not impls and impl.startswith("fp8attn"))
        }
        with measure.poisoned():
            outs = {impl: sampled(call()) for impl, call in calls.items()}
        replays = {impl: measure.graph_of(call)[0] for impl, call in calls.items()}
        slowest = max(measure.interleaved(replays, 3, flush=True).values())
    samples = max(1, min(MOST_SAMPLES, int(TURN_MS / slowest)))
    _prepared["turn"] = lambda: measure.interleaved(replays, samples, flush=True)
    _prepared["calls"] = calls  # a graph does not keep alive what it reads
    return outs


def sampled(out: Any) -> list[float] | None:
    """Evenly spaced elements of a tensor, or of the pages of a cache; None of anything else. A NaN raises
    AssertionError.
    """
    flat = getattr(out, "pool", out)
    if not hasattr(flat, "flatten"):
        return None
    flat = flat.flatten()
    found = flat[:: max(1, len(flat) // SAMPLED)].double()
    assert not found.isnan().any(), "an output has NaN"
    return found.tolist()
