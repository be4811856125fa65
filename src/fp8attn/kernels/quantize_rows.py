"""Quantizes dense tensors in their own layout, with one scale for a sequence and group of heads, for kernels without pages (`fa3.py`).

A scale needs the largest magnitude of a whole sequence after its mean was subtracted, so there are three launches. The first reads the
tensor, and writes each channel's sum, largest and smallest value for every part of a sequence. The second computes means and scales from
these: after a constant was subtracted, the largest magnitude is at the largest or smallest value. The third reads the tensor again and
writes codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..formats.codec import Codec
from .codec import finite, inverse, is_native, needed_scale, to_codes
from .launch import ConstexprFields, launch, make_constants
from .rotation import hadamard
from .rows import Row, load_halves, load_rows, row_of, store_rows

ELEMENTS = 2048  # that a program holds of a tensor at a time
PARTS = 64  # of a sequence, at most

_PARTS = tl.constexpr(PARTS)
_INF = tl.constexpr(float("inf"))


@dataclass(frozen=True)
class QuantizeTokens(ConstexprFields):
    """How the kernels read the tensor."""

    row: Row
    rotate: bool  # by `rotation.hadamard`
    count: int  # that a program holds at a time


@dataclass(frozen=True)
class ScaleOptions(ConstexprFields):
    """How means and scales are made."""

    head_dim: int
    width: int  # head_dim, padded to a power of two
    means: bool  # are subtracted
    codec: Codec


@dataclass(frozen=True)
class QuantizeOptions(ConstexprFields):
    """How codes are made."""

    tokens: QuantizeTokens
    means: bool  # are subtracted
    codec: Codec
    native: bool  # the target converts E4M3 by itself (`codec.is_native`)


@triton.jit
def _load_tokens(x_ptr, token, last, stride_t, TOKENS: tl.constexpr):
    """Tokens of a head `[T, C]`, after the rotation. Rows past the last token repeat it."""
    ROW: tl.constexpr = TOKENS.row
    x = load_halves(x_ptr + tl.minimum(token, last).to(tl.int64)[:, None] * stride_t, ROW)
    return hadamard(x, ROW.head_dim) if TOKENS.rotate else x


@triton.jit(do_not_specialize=["heads", "length", "size", "parts"])
def _statistics_kernel(
    x_ptr, part_ptr, stride_b, stride_h, stride_t, heads, length, size, parts, TOKENS: tl.constexpr
):  # fmt: skip
    """`part [B * H, parts, 3, C]`: each channel's sum, largest and smallest value."""
    ROW: tl.constexpr = TOKENS.row
    T: tl.constexpr = TOKENS.count
    C: tl.constexpr = ROW.width
    part = tl.program_id(0) % parts
    row = (tl.program_id(0) // parts).to(tl.int64)
    x_ptr += row // heads * stride_b + row % heads * stride_h
    total = tl.zeros((T, C), tl.float32)
    largest = tl.full((T, C), -_INF, tl.float32)
    smallest = tl.full((T, C), _INF, tl.float32)
    first = part * size
    end = tl.minimum(first + size, length)
    for t in range(first, end, T):
        token = t + tl.arange(0, T)
        x = _load_tokens(x_ptr, token, end - 1, stride_t, TOKENS)
        total += tl.where((token < end)[:, None], x, 0.0)
        counts = tl.abs(x) < _INF
        largest = tl.maximum(largest, tl.where(counts, x, -_INF))
        smallest = tl.minimum(smallest, tl.where(counts, x, _INF))
    part_ptr += (row * parts + part) * (3 * C) + tl.arange(0, C)
    tl.store(part_ptr, tl.sum(total, 0))
    tl.store(part_ptr + C, tl.max(largest, 0))
    tl.store(part_ptr + 2 * C, tl.min(smallest, 0))


@triton.jit(do_not_specialize=["parts", "length", "heads_per_scale"])
def _scales_kernel(
    part_ptr,
    mean_ptr,
    scale_ptr,
    parts,
    length,
    heads_per_scale,
    OPTIONS: tl.constexpr,
):
    """Means of a group's heads, and its scale."""
    D: tl.constexpr = OPTIONS.head_dim
    C: tl.constexpr = OPTIONS.width
    CODEC: tl.constexpr = OPTIONS.codec
    amax = 0.0
    c = tl.arange(0, C)
    part = tl.arange(0, _PARTS)[:, None]
    for i in range(heads_per_scale):
        row = tl.program_id(0).to(tl.int64) * heads_per_scale + i
        ptrs = part_ptr + (row * parts + part) * (3 * C) + c
        largest = tl.max(tl.load(ptrs + C, mask=part < parts, other=-_INF), 0)
        smallest = tl.min(tl.load(ptrs + 2 * C, mask=part < parts, other=_INF), 0)
        mean = tl.zeros((C,), tl.float32)
        if OPTIONS.means:
            mean = tl.sum(tl.load(ptrs, mask=part < parts, other=0.0), 0) / length
            mean = tl.where(tl.abs(mean) < _INF, mean, 0.0)
            tl.store(mean_ptr + row * D + c, mean, mask=c < D)
        amax = tl.maximum(amax, tl.max(finite(tl.maximum(largest - mean, mean - smallest)), 0))
    tl.store(scale_ptr + tl.program_id(0), needed_scale(amax, CODEC))


@triton.jit(do_not_specialize=["heads", "length", "heads_per_scale"])
def _rows_kernel(
    x_ptr, out_ptr, mean_ptr, scale_ptr, stride_b, stride_h, stride_t, out_stride_b, out_stride_h, out_stride_t, heads, length,
    heads_per_scale, OPTIONS: tl.constexpr,
):  # fmt: skip
    """The kernel of the third launch. A program writes the codes of some tokens of a head."""
    CODEC: tl.constexpr = OPTIONS.codec
    TOKENS: tl.constexpr = OPTIONS.tokens
    ROW: tl.constexpr = TOKENS.row
    T: tl.constexpr = TOKENS.count
    blocks = tl.cdiv(length, T)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    batch = row // heads
    head = row % heads
    token = tl.program_id(0) % blocks * T + tl.arange(0, T)
    x_ptr += batch * stride_b + head * stride_h
    x = _load_tokens(x_ptr, token, length - 1, stride_t, TOKENS)
    if OPTIONS.means:
        x -= load_rows(mean_ptr + row * ROW.head_dim + tl.zeros((1, 1), tl.int32), ROW)
    factor = inverse(tl.load(scale_ptr + row // heads_per_scale), CODEC)
    rows = out_ptr + (batch * out_stride_b + head * out_stride_h + token.to(tl.int64) * out_stride_t)[:, None]
    store_rows(rows, to_codes(x * factor, CODEC, OPTIONS.native), (token < length)[:, None], ROW)


def quantize_rows(
    x: torch.Tensor, *, rotate_keys: bool, subtract_mean: bool, heads_per_scale: int, codec: Codec,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """`reference.quantize_rows` with the same bits, except for the sign of NaN, and for means, which are summed in another order."""
    device = x.device
    batch, heads, length, head_dim = x.shape
    row = row_of(head_dim)
    width = row.width
    tokens = ELEMENTS // width
    size = -(-length // (PARTS * tokens)) * tokens  # of a part, in tokens
    parts = -(-length // size)
    part = torch.empty(batch * heads, parts, 3, width, dtype=torch.float32, device=device)
    scale = torch.empty(batch, heads // heads_per_scale, dtype=torch.float32, device=device)
    mean = torch.empty(batch, heads, head_dim, dtype=torch.float32, device=device) if subtract_mean else None
    out = torch.empty_like(x, dtype=torch.uint8)
    strides = x.stride()[:3]
    each, options = QuantizeTokens(row, rotate_keys, tokens), {"num_warps": 4, "enable_fp_fusion": False}

    args = x, part, *strides, heads, length, size, parts
    launch(_statistics_kernel, (parts * batch * heads,), args, make_constants("statistics", device, TOKENS=each, **options))
    args = part, mean, scale, parts, length, heads_per_scale
    constants = make_constants("scales", device, OPTIONS=ScaleOptions(head_dim, width, subtract_mean, codec), num_warps=4)
    launch(_scales_kernel, (scale.numel(),), args, constants)
    args = x, out, mean, scale, *strides, *out.stride()[:3], heads, length, heads_per_scale
    constants = make_constants("rows", device, OPTIONS=QuantizeOptions(each, subtract_mean, codec, is_native(device)), **options)
    launch(_rows_kernel, (-(-length // tokens) * batch * heads,), args, constants)
    return out.view(codec.dtype), scale, mean
