"""Errors of kernels, by data and accumulation."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..rows import latest, lengths
from .kernels import PREFILL_IMPLS, SINGLE_LEVEL
from .writing import block, span, table

SYSTEMS = {
    "bf16": "BF16", "fp8attn": "fp8attn", "fp8attn-e4m3-keys": "fp8attn, E4M3 keys",
    "fa3-fp8": "FA3 FP8, scales of one",
    "fa3-fp8:calibrated": "FA3 FP8, calibrated", "fa3-fp8:calibrated+means": "FA3 FP8, calibrated, means off",
    "vllm-fa3-fp8:calibrated": "vLLM's FA3, calibrated",
}  # fmt: skip
STRESS = {"as trained": "niah_multikey_2-S131072"} | {
    f"stress {n}": f"niah_multikey_2-stress{n}-S131072" for n in (1, 2, 3)
}


def errors(rows: Iterable[dict], key: str) -> list[tuple[str, str, float]]:
    """Case, implementation and relative error of rows."""
    return [(row["case"], row["impl"], row[key]) for row in rows]


def ours_off(found: Iterable[tuple[str, str, float]]) -> str:
    return f"{max(error for _, impl, error in found if impl in PREFILL_IMPLS):.2%}"


def single_level_off(found: Iterable[tuple[str, str, float]], length: int) -> str:
    """The errors of single-level kernels over `length` tokens."""
    return span((error for case, impl, error in found if impl in SINGLE_LEVEL and case.endswith(f"S{length}")), ".0%")


@block("prefill", "accuracy")
def prefill_error() -> str:
    """The error for V of mean 1, from both benchmarks that measure it."""
    found = errors(latest("prefill")[1].values(), "rel_err_mean1")
    found += errors(
        (row for row in latest("accuracy")[1].values() if re.match("(causal|full)-mean1", row["case"])), "rel_err"
    )
    short, long = (single_level_off(found, n) for n in (16384, 131072))
    return (
        f"single-level kernels are {short} off at 16k tokens and {long} at 128k, ours at most {ours_off(found)} at any "
        f"length"
    )


@block("accumulation")
def accumulation() -> str:
    title, here = latest("accumulation")
    cases = lengths(here, r"S(\d+)")
    body = [
        [impl, *(f"{here[case, impl]['rel_err']:.1%}" for case in cases.values())]
        for impl in dict.fromkeys(impl for case, impl in here if case in cases.values())
    ]
    return table([f"{title}; keys", *(f"{n:,}" for n in cases)], body)


@block("needle")
def retrieval() -> str:
    """RULER's needles: how many answers are right."""
    title, found = latest("needle")

    def cell(row: dict | None) -> str:
        return "" if row is None else f"{100 * row['accuracy']:.4g} ({row['samples']})"

    body = [[label, *(cell(found.get((case, impl))) for case in STRESS.values())] for impl, label in SYSTEMS.items()]
    return table([f"131,072 tokens, % right (samples), {title}", *STRESS], body)
