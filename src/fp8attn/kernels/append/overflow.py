"""Counts of overflows (`ops.append`): a static scale's values that saturate, and scales of pages that grow."""

from __future__ import annotations

import triton
import triton.language as tl

from ...formats.codec import E4M3, INT8_MAX

_E4M3_MAX = tl.constexpr(E4M3.max)
_INT8_MAX = tl.constexpr(float(INT8_MAX))


@triton.jit
def saturated(x, valid, CODES: tl.constexpr):
    """How many values of the rows `valid [N, 1]` of `x [N, C]`, multiplied by the inverse of their scale, are larger than any code, or NaN,
    for which INT8 has none.

    Channels after the last one are zero.
    """
    over = tl.abs(x) > (_INT8_MAX if CODES.int8 else _E4M3_MAX)
    if CODES.int8:
        over = over | (x != x)
    return tl.sum((over & valid).to(tl.int32))


@triton.jit
def add_overflows(overflows_ptr, tokens, overflows, CODES: tl.constexpr):
    """Add a program's counts to those of K or V, with one atomic instruction; with none if all are zero."""
    i = tl.arange(0, 4)
    counted = tl.where(i == (1 if CODES.static else 2), overflows, 0)
    counted = tl.where(i == 0, tokens, counted).to(tl.int64)
    tl.atomic_add(overflows_ptr + (3 if CODES.is_v else 0) + i, counted, mask=counted != 0, sem="relaxed")
