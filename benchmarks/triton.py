"""Our kernels under two versions of Triton, which alternate on one GPU.

    FP8ATTN_SECOND_TRITON=FOLDER python -m benchmarks.run triton

FOLDER has the second Triton, as `pip install --target FOLDER triton==3.9.0` leaves it (default: that of
FP8ATTN_TRITON); the first is the installed one. A case is one of another benchmark (`CASES`). Each version prepares it
in a process of its own, and the outputs must agree. Both measure CUDA graphs, with the L2 cache flushed before every
run. `ms` is the median of the turns' medians.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from . import sides
from .beside import Beside

TURNS = 5
PROCESSES = True  # it measures in processes of its own
MOST_DIFFERENCE = 0.02  # of outputs: sums in another order
KEYS = ("fp8attn", "fp8attn-e4m3-keys")
PREFILL = (*KEYS, "fp8attn-q8", "fp8attn-exact")
CASES: dict[str, tuple[str, ...]] = {  # "benchmark case", and the implementations that are measured
    **dict.fromkeys((
        "prefill D64-causal-S16384", "prefill D128-causal-S4096", "prefill D128-causal-S16384",
        "prefill D256-causal-S16384", "prefill chunked-2k-on-128k",
    ), PREFILL),
    **dict.fromkeys(("decode B1-S8192", "decode B64-S8192"), KEYS),
    **dict.fromkeys(("append quantize-S16384", "sdpa causal-S4096"), KEYS[:1]),
}  # fmt: skip


_begun: dict[str, Beside] = {}


def versions() -> dict[str, Beside]:
    """A side for each Triton, by version; the installed one is first."""
    if _begun:
        return _begun
    folder = os.environ.get("FP8ATTN_SECOND_TRITON") or os.environ.get("FP8ATTN_TRITON")
    if not folder:
        raise SystemExit(
            "FP8ATTN_SECOND_TRITON names no folder with a second Triton: pip install --target FOLDER triton==3.9.0"
        )
    for where in ("", folder):
        side = sides.begin(FP8ATTN_TRITON=where)
        _begun[side("versions")[0]] = side
    return _begun


def start(cases: list[str]) -> None:
    """Compile the kernels of both versions at once."""
    wanted: dict[str, list[str]] = {}
    for case in cases:
        name, inner = case.split()
        wanted.setdefault(name, []).append(inner)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda side: side("ahead", wanted), versions().values()))


def end() -> None:
    """End the processes, which hold memory of the GPU."""
    for side in _begun.values():
        side.end()
    _begun.clear()


def measure(case: str) -> Iterator[dict]:
    found = sides.prepare(versions(), *case.split(), CASES[case])
    times = sides.alternate(versions(), TURNS)
    first = next(iter(found))
    for impl in CASES[case]:
        for version, side in versions().items():
            ms = statistics.median(turn[impl] for turn in times[version])
            row = {"case": case, "impl": f"{impl}-triton-{version}", "ms": round(ms, 5)}
            if (apart := sides.difference(found[version][impl], found[first][impl])) is not None:
                assert apart <= MOST_DIFFERENCE, f"{case}: outputs of {impl} differ by {apart:.1e}"
                row["difference"] = apart
            yield row | {"ptxas": side("versions")[1]}
