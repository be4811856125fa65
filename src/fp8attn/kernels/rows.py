"""Rows of channels in Triton kernels: loaded in FP32, with RoPE, and stored.

A row of `head_dim` (D) channels is in their order, padded with zeros to C, a power of two. If RoPE rotates all channels of a row, both
halves are loaded separately. Then the two channels of a pair are in one thread, and so are those of the last step of `hadamard`.

Rows that registers cannot hold are loaded in parts of equal numbers of channels: part p of P has the p-th run of C / 2P channels of each
half of a row. So it has whole pairs, and whole blocks of the rotation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from ..formats.rope import Rope
from .codec import from_e4m3
from .common import power_of_two
from .launch import ConstexprFields


@dataclass(frozen=True)
class Row(ConstexprFields):
    """The compile-time options of rows, a constexpr parameter. The host makes it (`row_of`)."""

    head_dim: int
    width: int  # head_dim, padded to a power of two
    rope_pairs: int  # number of channels that RoPE rotates; 0 without RoPE
    rope_interleaved: bool  # pairs are neighbors
    rope_step: int  # stride of the tables' last dimension
    parts: int = 1  # in which rows are loaded; with several, head_dim is a power of two

    @property
    def held(self) -> int:
        """The channels of a part, padded."""
        return self.width // self.parts


@triton.jit
def _load(rows, at, inside, WHOLE: tl.constexpr):
    """Elements `at [M]` of the rows at pointers `[N, 1]` in FP32; zero if not `inside [M]`. WHOLE: all are inside."""
    x = tl.load(rows + at) if WHOLE else tl.load(rows + at, mask=inside & tl.full(rows.shape, 1, tl.int1), other=0.0)
    if x.dtype == tl.uint8:  # E4M3 where that is not native
        return from_e4m3(x, False).to(tl.float32)
    else:
        return x.to(tl.float32)


@triton.jit
def channels(part, ROW: tl.constexpr):
    """The channels of a part of a row."""
    HALF: tl.constexpr = ROW.held // 2
    c = tl.arange(0, ROW.held)
    if ROW.parts > 1:
        c = _together(tl.where(c < HALF, c, c + (ROW.width // 2 - HALF)) + part * HALF, HALF)
    return c


@triton.jit
def load_rows(rows, ROW: tl.constexpr, part=0):
    """`[N, C]` of the rows at pointers `[N, 1]`, or their part `[N, C / parts]`."""
    c = channels(part, ROW)
    return _load(rows, c, c < ROW.head_dim, ROW.width == ROW.head_dim)


@triton.jit
def load_lanes(row, ROW: tl.constexpr):
    """The row at a pointer as `[32, C / 32]`. Each warp has the whole row."""
    EACH: tl.constexpr = ROW.width // 32
    c = tl.arange(0, 32)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    return _load(row + tl.zeros((1, 1), tl.int32), c, c < ROW.head_dim, ROW.width == ROW.head_dim)


@triton.jit
def store_rows(rows, x, valid, ROW: tl.constexpr):
    """Store rows in the form that `load_rows` returns, where `valid [N, 1]`."""
    c = tl.arange(0, ROW.width)
    tl.store(rows + c, x, mask=valid & (c < ROW.head_dim))


@triton.jit
def _together(c, HALF: tl.constexpr):
    """Channels `c`, marked as contiguous in groups of eight where HALF is a multiple of eight: accesses are then 16 bytes wide."""
    N: tl.constexpr = 8 if HALF % 8 == 0 else 1
    return tl.max_contiguous(tl.multiple_of(c, N), N)


@triton.jit
def _rotate(a, b, cos, sin):
    """`rope.apply_rope` on pairs. Every product and sum is rounded, as in torch (launches disable FMA contraction)."""
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _load_pairs(first, rows, cos, sin, M: tl.constexpr, ROW: tl.constexpr):
    """M channels from `first` on and the channels C / 2 after them, each `[N, M]`, after RoPE."""
    STEP: tl.constexpr = ROW.rope_step
    i = first + tl.arange(0, M)
    a = _load(rows, i, i >= 0, True)
    b = _load(rows + ROW.width // 2, i, i >= 0, True)
    if ROW.rope_pairs > 0:
        a, b = _rotate(a, b, _load(cos, i * STEP, i >= 0, True), _load(sin, i * STEP, i >= 0, True))
    return a, b


@triton.jit
def quarters(x):
    """Rows `x [N, C]` as four tiles of C / 4 channels each, as `load_rotated` loads many rows."""
    a, b = tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, 2, x.shape[1] // 4)), (0, 3, 2, 1)))
    x0, x1 = tl.split(a)
    x2, x3 = tl.split(b)
    return x0, x1, x2, x3


@triton.jit
def load_rotated(rows, cos, sin, ROW: tl.constexpr, part=0):
    """`load_rows` and RoPE by the angles of the rows at `cos` and `sin [N, 1]`."""
    N: tl.constexpr = rows.shape[0]
    D: tl.constexpr = ROW.head_dim
    C: tl.constexpr = ROW.held
    HALF: tl.constexpr = ROW.rope_pairs
    INTERLEAVED: tl.constexpr = ROW.rope_interleaved
    STEP: tl.constexpr = ROW.rope_step
    if ROW.width == D and not INTERLEAVED and (HALF == 0 or 2 * HALF == D):
        base = part * (C // 2)
        if N >= 64:
            a, b = _load_pairs(base, rows, cos, sin, C // 4, ROW)
            c, d = _load_pairs(base + C // 4, rows, cos, sin, C // 4, ROW)
            return tl.reshape(tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), (0, 3, 2, 1)), (N, C))
        else:
            a, b = _load_pairs(base, rows, cos, sin, C // 2, ROW)
            return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (N, C))
    x = load_rows(rows, ROW, part)
    if HALF > 0:
        # Triton 3.6 compiles the pairs of 256 channels for minutes.
        if INTERLEAVED and C <= 128:
            i = tl.arange(0, C // 2)
            a, b = tl.split(tl.reshape(x, (N, C // 2, 2)))
            ALL: tl.constexpr = 2 * HALF == C
            rotated_a, rotated_b = _rotate(a, b, _load(cos, i * STEP, i < HALF, ALL), _load(sin, i * STEP, i < HALF, ALL))
            if 2 * HALF < C:
                rotated_a = tl.where(i < HALF, rotated_a, a)
                rotated_b = tl.where(i < HALF, rotated_b, b)
            x = tl.reshape(tl.join(rotated_a, rotated_b), (N, C))
        else:  # each channel's partner by a second load
            c = channels(part, ROW)
            turns = c < 2 * HALF
            if INTERLEAVED:
                first = c % 2 == 0
                partner = tl.where(turns, c ^ 1, c)
                i = tl.where(turns, c // 2, 0) * STEP
            else:
                first = c < HALF
                partner = _together(tl.where(first, c + HALF, tl.where(turns, c - HALF, c)), HALF)
                i = _together(tl.where(first, c, tl.where(turns, c - HALF, 0)), HALF) * STEP
            other = _load(rows, partner, c < D, ROW.width == D)
            cosine = _load(cos, i, turns, False)
            sine = _load(sin, i, turns, False)
            x = tl.where(turns, x * cosine + other * tl.where(first, -sine, sine), x)
    return x


def row_of(
    head_dim: int, rope: Rope | None
) -> tuple[Row, tuple[torch.Tensor | None, torch.Tensor | None], tuple[tuple[int, ...], tuple[int, ...]]]:
    """A kernel's arguments about a row and its RoPE: the row, the tables, and the tables' strides except the last."""
    if rope is None:
        return _row(head_dim, 0, False, 1), (None, None), ((0, 0), (0, 0))
    cos, sin, interleaved = rope
    if cos.stride(-1) != sin.stride(-1):
        cos, sin = cos.contiguous(), sin.contiguous()
    half = cos.shape[-1]
    return _row(head_dim, half, interleaved and half > 0, cos.stride(-1)), (cos, sin), (cos.stride()[:-1], sin.stride()[:-1])


@cache  # making one takes a microsecond
def _row(head_dim: int, rope_pairs: int, rope_interleaved: bool, rope_step: int) -> Row:
    return Row(head_dim, power_of_two(head_dim), rope_pairs, rope_interleaved, rope_step)
