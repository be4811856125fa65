"""Rows of channels: loaded in FP32, with or without RoPE, and stored. CODES (`Codes`) says how wide they are.

A row of `head_dim` (D) channels is in their order, padded with zeros to C, a power of two. Without padding,
`load_halves` loads both halves separately. Then the two channels of a pair of RoPE are in one thread, and so are those
of the last step of `hadamard`.

Rows that registers cannot hold are loaded in parts of equal numbers of channels: part p of P has the p-th run of C / 2P
channels of each half of a row. So it has whole pairs, and whole blocks of the rotation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ...formats.rope import Rope
from ..codec import from_e4m3
from ..launch import ConstexprFields


@dataclass(frozen=True)
class RowRope(ConstexprFields):
    """RoPE of rows, a constexpr parameter (`rope_of`)."""

    pairs: int  # of channels
    interleaved: bool  # pairs are neighbors
    halves: bool  # pairs are the two halves of a row


@triton.jit
def _load(rows, at, inside):
    """Elements `at [M]` of the rows at pointers `[N, 1]` in FP32; zero if not `inside [M]`. None: all are inside."""
    if inside is None:
        x = tl.load(rows + at)
    else:
        x = tl.load(rows + at, mask=inside & tl.full(rows.shape, 1, tl.int1), other=0.0)
    if x.dtype == tl.uint8:  # E4M3 where that is not native
        return from_e4m3(x, False).to(tl.float32)
    else:
        return x.to(tl.float32)


@triton.jit
def channels(part, CODES: tl.constexpr):
    """The channels of a part of a row."""
    HALF: tl.constexpr = CODES.part_width // 2
    c = tl.arange(0, CODES.part_width)
    if CODES.parts > 1:
        c = _together(tl.where(c < HALF, c, c + (CODES.width // 2 - HALF)) + part * HALF, HALF)
    return c


@triton.jit
def load_rows(rows, CODES: tl.constexpr, part=0):
    """`[N, C]` of the rows at pointers `[N, 1]`, or their part `[N, C / parts]`."""
    c = channels(part, CODES)
    return _load(rows, c, None if CODES.width == CODES.head_dim else c < CODES.head_dim)


@triton.jit
def load_lanes(row, CODES: tl.constexpr):
    """The row at a pointer as `[32, C / 32]`. Each warp has the whole row."""
    EACH: tl.constexpr = CODES.width // 32
    c = tl.arange(0, 32)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    return _load(row + tl.zeros((1, 1), tl.int32), c, None if CODES.width == CODES.head_dim else c < CODES.head_dim)


@triton.jit
def store_rows(rows, x, valid, CODES: tl.constexpr):
    """Store rows in the form that `load_rows` returns, where `valid [N, 1]`."""
    c = tl.arange(0, CODES.width)
    tl.store(rows + c, x, mask=valid & (c < CODES.head_dim))


@triton.jit
def _together(c, HALF: tl.constexpr):
    """Channels `c`, marked as contiguous in groups of eight where HALF is a multiple of eight: accesses are then 16
    bytes wide.
    """
    N: tl.constexpr = 8 if HALF % 8 == 0 else 1
    return tl.max_contiguous(tl.multiple_of(c, N), N)


@triton.jit
def _load_pairs(first, rows, angles, M: tl.constexpr, CODES: tl.constexpr):
    """M channels from `first` on and the channels C / 2 after them, each `[N, M]`, after RoPE. Every product and sum is
    rounded, as in torch (launches disable FMA contraction)."""
    i = first + tl.arange(0, M)
    a = _load(rows, i, None)
    b = _load(rows + CODES.width // 2, i, None)
    if CODES.rope is not None:
        cos, sin = angles
        cos = _load(cos, i, None)
        sin = _load(sin, i, None)
        a, b = a * cos - b * sin, b * cos + a * sin
    return a, b


@triton.jit
def quarters(x):
    """Rows `x [N, C]` as four tiles of C / 4 channels each, as `load_halves` loads many rows."""
    a, b = tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, 2, x.shape[1] // 4)), (0, 3, 2, 1)))
    x0, x1 = tl.split(a)
    x2, x3 = tl.split(b)
    return x0, x1, x2, x3


@triton.jit
def load_halves(rows, CODES: tl.constexpr, part=0, angles=None):
    """`load_rows`, and with `CODES.rope` `rope.apply_rope`. `angles`: pointers `[N, 1]` to the rows of cos and sin."""
    ROPE: tl.constexpr = CODES.rope
    N: tl.constexpr = rows.shape[0]
    D: tl.constexpr = CODES.head_dim
    C: tl.constexpr = CODES.part_width
    if CODES.width == D and (ROPE is None or ROPE.halves):
        base = part * (C // 2)
        if N >= 64:
            a, b = _load_pairs(base, rows, angles, C // 4, CODES)
            c, d = _load_pairs(base + C // 4, rows, angles, C // 4, CODES)
            return tl.reshape(tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), (0, 3, 2, 1)), (N, C))
        else:
            a, b = _load_pairs(base, rows, angles, C // 2, CODES)
            return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (N, C))
    x = load_rows(rows, CODES, part)
    if ROPE is not None:  # each channel's partner by a second load
        HALF: tl.constexpr = ROPE.pairs
        c = channels(part, CODES)
        turns = c < 2 * HALF
        if ROPE.interleaved:
            first = c % 2 == 0
            partner = tl.where(turns, c ^ 1, c)
            i = tl.where(turns, c // 2, 0)
        else:
            first = c < HALF
            partner = _together(tl.where(first, c + HALF, tl.where(turns, c - HALF, c)), HALF)
            i = _together(tl.where(first, c, tl.where(turns, c - HALF, 0)), HALF)
        cos, sin = angles
        other = _load(rows, partner, None if CODES.width == D else c < D)
        sin = _load(sin, i, turns)
        x = tl.where(turns, x * _load(cos, i, turns) + other * tl.where(first, -sin, sin), x)
    return x


def rope_of(head_dim: int, rope: Rope) -> tuple[RowRope, tuple[torch.Tensor, torch.Tensor], tuple[int, int]]:
    """RoPE of dense rows as a kernel's arguments: the constexpr, the tables, and their strides but the last, which is
    1.
    """
    cos, sin, interleaved = rope
    if cos.stride() != sin.stride() or cos.stride(2) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    pairs = cos.shape[2]
    return (
        RowRope(pairs, interleaved, not interleaved and 2 * pairs == head_dim),
        (cos, sin),
        (cos.stride(0), cos.stride(1)),
    )
