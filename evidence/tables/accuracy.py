"""Errors of kernels, by data and accumulation."""

from __future__ import annotations

import re
from collections.abc import Iterable

from benchmarks.problem import KEYS

from ..rows import latest, lengths
from .kernels import PREFILL_IMPLS, SINGLE_LEVEL
from .writing import block, measured, span, table


@block("accuracy")
def prefill_rounding() -> str:
    """128 queries of 4,096 keys and more, by V's mean and implementation."""
    errors: dict[tuple[str, str], list[float]] = {}
    for row in latest("accuracy")[1].values():
        if (match := re.fullmatch(r"full-(mean\d)-D128-S(\d+)", row["case"])) and int(match[2]) >= 4096:
            errors.setdefault((match[1], row["impl"]), []).append(row["rel_err"])
    q8, plain = (span((100 * error for error in errors["mean0", impl]), ".1f") for impl in ("fp8attn-q8", "fp8attn"))
    most = max(error for (data, impl), found in errors.items() for error in found if data == "mean1" and impl in PREFILL_IMPLS)
    return f"normal V without a mean is {q8}% off ({plain}% with Q in 16 bits, whose rounding then counts), V of mean 1 at most {most:.2%}"


@block("decode")
def decode_by_keys() -> str:
    """The largest errors of decode, by the dtype of keys."""
    title, found = latest("decode")
    most = {name: max(row["rel_err"] for (_, impl), row in found.items() if impl == name) for name in KEYS}
    return f"{most.pop('fp8attn'):.1e} over INT8 keys and {max(most.values()):.1e} over E4M3 keys ({title})"


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
    found += errors((row for row in latest("accuracy")[1].values() if re.match("(causal|full)-mean1", row["case"])), "rel_err")
    short, long = (single_level_off(found, n) for n in (16384, 131072))
    return f"single-level kernels are {short} off at 16k tokens and {long} at 128k, ours at most {ours_off(found)} at any length"


@block("prefill")
def long_error() -> str:
    """The error of single-level kernels over 131,072 tokens, for V of mean 1."""
    title, found = latest("prefill")
    return f"{single_level_off(errors(found.values(), 'rel_err_mean1'), 131072)} off ({title}, values of mean 1)"


@block("real_model")
def cast_loss() -> str:
    """What a plain cast to E4M3 costs the public model, at 8,192 tokens."""
    title, found = latest("real_model")
    losses = [row["d_ppl_pct"] for (case, impl), row in found.items() if case.endswith("S8192") and impl.startswith("scale-1-")]
    return f"{span(losses, '.1f')}% of perplexity at 8,192 tokens (SmolLM2, {title})"


def sums() -> dict[str, dict[int, float]]:
    """The errors of `accumulation` by implementation and length."""
    _, here = latest("accumulation")
    cases = lengths(here, r"S(\d+)")
    return {impl: {n: here[case, impl]["rel_err"] for n, case in cases.items()} for impl in dict.fromkeys(impl for _, impl in here)}


@block("accumulation")
def accumulation_measured() -> str:
    return measured("accumulation")


@block("accumulation")
def accumulation() -> str:
    body = [[impl, *(f"{error:.1%}" for error in errors.values())] for impl, errors in sums().items()]
    return table([f"{latest('accumulation')[0]}; keys", *(f"{n:,}" for n in next(iter(sums().values())))], body)


@block("accumulation")
def doctor() -> str:
    from fp8attn_tools.diagnostics.accumulation import Accumulation

    found = {f"accumulation of {impl}": Accumulation(errors) for impl, errors in sums().items()}
    lines = [f"{'ok ' if x.levels == 2 else '!  '} {name:{max(map(len, found))}s}  {x}" for name, x in found.items()]
    return "\n".join(["```", *lines, "```"])
