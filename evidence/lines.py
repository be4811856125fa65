"""A decode step's milliseconds as a linear function of the context: its slope, and where ours becomes faster (`llama_decode`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from statistics import linear_regression

from .rows import Rows, together

OURS = "fp8attn"


@dataclass(frozen=True)
class Line:
    """Our steps compared with those of the faster BF16 system.

    Attributes:
        beside: the BF16 system that is faster at its longest context.
        slope_ratio: our growth with the context over its growth.
        break_even: the context from which on ours is faster; None if it is slower at the longest.
    """

    beside: str
    slope_ratio: float
    break_even: float | None


def batches(found: Rows) -> list[int]:
    return sorted({int(match[1]) for case, _ in found if (match := re.fullmatch(r"step-B(\d+)-S\d+", case))})


def steps(found: Rows, batch: int) -> dict[str, dict[int, float]]:
    """Milliseconds by implementation and context, of what was timed together with ours."""
    times: dict[str, dict[int, float]] = {}
    for (case, impl), row in found.items():
        if (match := re.fullmatch(rf"step-B{batch}-S(\d+)", case)) and together(row, found.get((case, OURS), {})):
            times.setdefault(impl, {})[int(match[1])] = row["ms"]
    return times


def line(found: Rows, batch: int) -> Line | None:
    """The comparison for one batch; None if fewer than two contexts were measured for ours or for every BF16 system."""
    times = {impl: by for impl, by in steps(found, batch).items() if len(by) > 1}
    others = [impl for impl in times if impl.startswith("bf16")]
    if OURS not in times or not others:
        return None
    best = min(others, key=lambda impl: times[impl][max(times[impl])])
    ours, theirs = (linear_regression(list(times[impl]), list(times[impl].values())).slope for impl in (OURS, best))
    return Line(best, ours / theirs, break_even(times[OURS], times[best]))


def break_even(ours: dict[int, float], theirs: dict[int, float]) -> float | None:
    """The context from which on ours is the faster, interpolated between measured ones.

    The shortest measured context if ours is faster already there; None if it is not at the longest.
    """
    lengths = sorted(ours.keys() & theirs.keys())
    ahead = [theirs[n] - ours[n] for n in lengths]
    if ahead[-1] <= 0:
        return None
    behind = [i for i, x in enumerate(ahead) if x <= 0]
    if not behind:
        return float(lengths[0])
    last = behind[-1]
    return lengths[last] + (lengths[last + 1] - lengths[last]) * ahead[last] / (ahead[last] - ahead[last + 1])
