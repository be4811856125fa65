"""Dense tensors in FP8 as they lie, one scale a sequence and group of heads: for kernels that know no pages (`fa3.py`).

A scale needs the largest value of whole sequences, and that needs their mean: three launches. The first reads everything and leaves, of
each part of a sequence, every channel's sum, largest and smallest value; the second makes means and scales of them, for the largest
magnitude after a constant is taken off is that of the largest or the smallest value; the third reads everything again and writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..layout import FP8
from .append import _finite, _inverse, _load_angles, _load_pairs, _power_of_two_scale, _rotate, _rotation, _store_pairs
from .fp8 import is_native, to_e4m3
from .launch import constants, launch

ELEMENTS = 2048  # that a program holds of a tensor at a time
PARTS = 64  # of a sequence, at most

_PARTS = tl.constexpr(PARTS)
_INF = tl.constexpr(float("inf"))


@triton.jit
def _load_tokens(
    x_ptr, token, last, stride_t, cos_ptr, sin_ptr, cos_stride, sin_stride,
    D: tl.constexpr, HP: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Rotated tokens of a head, past the last one that again; both channels of their pairs, each `[T, HP]`."""
    rows = tl.minimum(token, last).to(tl.int64)[:, None]
    a, b = _load_pairs(x_ptr + rows * stride_t, D, HP, HALF, INTERLEAVED)
    if HALF > 0:
        i = tl.arange(0, HP)
        cos, sin = _load_angles(cos_ptr, sin_ptr, rows, cos_stride, sin_stride, i, HP, HALF, STEP)
        a, b = _rotate(a, b, cos, sin, i, D, HALF)
    return a, b


@triton.jit
def _extend(x, valid, total, largest, smallest):
    finite = tl.abs(x) < _INF
    return total + tl.where(valid, x, 0.0), tl.maximum(largest, tl.where(finite, x, -_INF)), tl.minimum(smallest, tl.where(finite, x, _INF))


@triton.jit(do_not_specialize=["heads", "length", "size", "parts"])
def _statistics_kernel(
    x_ptr, part_ptr, cos_ptr, sin_ptr, stride_b, stride_h, stride_t, cos_stride_b, cos_stride, sin_stride_b, sin_stride,
    heads, length, size, parts,
    D: tl.constexpr, HP: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, STEP: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """`part [B * H, parts, 6, HP]`: sum, largest and smallest value of the pairs' first channels, and then of the second."""
    part = tl.program_id(0) % parts
    row = (tl.program_id(0) // parts).to(tl.int64)
    x_ptr += row // heads * stride_b + row % heads * stride_h
    if HALF > 0:
        cos_ptr += row // heads * cos_stride_b
        sin_ptr += row // heads * sin_stride_b
    total_a = tl.zeros((T, HP), tl.float32)
    total_b = tl.zeros((T, HP), tl.float32)
    largest_a = tl.full((T, HP), -_INF, tl.float32)
    largest_b = tl.full((T, HP), -_INF, tl.float32)
    smallest_a = tl.full((T, HP), _INF, tl.float32)
    smallest_b = tl.full((T, HP), _INF, tl.float32)
    first = part * size
    end = tl.minimum(first + size, length)
    for t in range(first, end, T):
        token = t + tl.arange(0, T)
        valid = (token < end)[:, None]
        a, b = _load_tokens(
            x_ptr, token, end - 1, stride_t, cos_ptr, sin_ptr, cos_stride, sin_stride, D, HP, HALF, INTERLEAVED, STEP,
        )  # fmt: skip
        total_a, largest_a, smallest_a = _extend(a, valid, total_a, largest_a, smallest_a)
        total_b, largest_b, smallest_b = _extend(b, valid, total_b, largest_b, smallest_b)
    part_ptr += (row * parts + part) * (6 * HP) + tl.arange(0, HP)
    tl.store(part_ptr, tl.sum(total_a, 0))
    tl.store(part_ptr + HP, tl.max(largest_a, 0))
    tl.store(part_ptr + 2 * HP, tl.min(smallest_a, 0))
    tl.store(part_ptr + 3 * HP, tl.sum(total_b, 0))
    tl.store(part_ptr + 4 * HP, tl.max(largest_b, 0))
    tl.store(part_ptr + 5 * HP, tl.min(smallest_b, 0))


@triton.jit
def _mean_and_amax(part_ptr, parts, length, HP: tl.constexpr, MEANS: tl.constexpr):
    """Of channels `[HP]`: the mean, and the largest magnitude without it."""
    i = tl.arange(0, HP)[None, :]
    part = tl.arange(0, _PARTS)[:, None]
    ptrs = part_ptr + part * (6 * HP) + i
    largest = tl.max(tl.load(ptrs + HP, mask=part < parts, other=-_INF), 0)
    smallest = tl.min(tl.load(ptrs + 2 * HP, mask=part < parts, other=_INF), 0)
    mean = tl.zeros((HP,), tl.float32)
    if MEANS:
        mean = tl.sum(tl.load(ptrs, mask=part < parts, other=0.0), 0) / length
        mean = tl.where(tl.abs(mean) < _INF, mean, 0.0)
    return mean, tl.max(_finite(tl.maximum(largest - mean, mean - smallest)), 0)


@triton.jit(do_not_specialize=["parts", "length", "heads_per_scale"])
def _scales_kernel(
    part_ptr, mean_ptr, scale_ptr, parts, length, heads_per_scale,
    D: tl.constexpr, HP: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, MEANS: tl.constexpr,
):  # fmt: skip
    """Means of a group's heads, and its scale."""
    amax = 0.0
    for i in range(heads_per_scale):
        row = tl.program_id(0).to(tl.int64) * heads_per_scale + i
        mean_a, amax_a = _mean_and_amax(part_ptr + row * parts * (6 * HP), parts, length, HP, MEANS)
        mean_b, amax_b = _mean_and_amax(part_ptr + row * parts * (6 * HP) + 3 * HP, parts, length, HP, MEANS)
        amax = tl.maximum(amax, tl.maximum(amax_a, amax_b))
        if MEANS:
            rows = mean_ptr + row * D + tl.zeros((1, 1), tl.int32)
            _store_pairs(rows, mean_a[None, :], mean_b[None, :], tl.full((1, 1), 1, tl.int1), D, HP, HALF, INTERLEAVED)
    tl.store(scale_ptr + tl.program_id(0), _power_of_two_scale(amax))


@triton.jit(do_not_specialize=["heads", "length", "heads_per_scale"])
def _rows_kernel(
    x_ptr, out_ptr, mean_ptr, scale_ptr, cos_ptr, sin_ptr, stride_b, stride_h, stride_t, out_stride_b, out_stride_h, out_stride_t,
    cos_stride_b, cos_stride, sin_stride_b, sin_stride, heads, length, heads_per_scale,
    D: tl.constexpr, HP: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, STEP: tl.constexpr, MEANS: tl.constexpr,
    NATIVE: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(length, T)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    batch = row // heads
    head = row % heads
    if HALF > 0:
        cos_ptr += batch * cos_stride_b
        sin_ptr += batch * sin_stride_b
    token = tl.program_id(0) % blocks * T + tl.arange(0, T)
    a, b = _load_tokens(
        x_ptr + batch * stride_b + head * stride_h, token, length - 1, stride_t, cos_ptr, sin_ptr, cos_stride, sin_stride,
        D, HP, HALF, INTERLEAVED, STEP,
    )  # fmt: skip
    if MEANS:
        mean_a, mean_b = _load_pairs(mean_ptr + row * D + tl.zeros((1, 1), tl.int32), D, HP, HALF, INTERLEAVED)
        a -= mean_a
        b -= mean_b
    factor = _inverse(tl.load(scale_ptr + row // heads_per_scale))
    rows = out_ptr + (batch * out_stride_b + head * out_stride_h + token.to(tl.int64) * out_stride_t)[:, None]
    _store_pairs(rows, to_e4m3(a * factor, NATIVE), to_e4m3(b * factor, NATIVE), (token < length)[:, None], D, HP, HALF, INTERLEAVED)


def quantize_rows(
    x: torch.Tensor, *, rope_cos: torch.Tensor | None, rope_sin: torch.Tensor | None, rope_interleaved: bool, means: bool,
    heads_per_scale: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """`reference.quantize_rows`, bit for bit (NaN may lose its sign); but for means, whose sums are taken in another order."""
    device = x.device
    batch, heads, length, head_dim = x.shape
    row, angles, (cos_strides, sin_strides) = _rotation(head_dim, rope_cos, rope_sin, rope_interleaved)
    pairs = row["HP"]
    tokens = ELEMENTS // (2 * pairs)
    size = -(-length // (PARTS * tokens)) * tokens  # of a part, in tokens
    parts = -(-length // size)
    part = torch.empty(batch * heads, parts, 6, pairs, dtype=torch.float32, device=device)
    scale = torch.empty(batch, heads // heads_per_scale, dtype=torch.float32, device=device)
    mean = torch.empty(batch, heads, head_dim, dtype=torch.float32, device=device) if means else None
    out = torch.empty_like(x, dtype=torch.uint8)
    strides, angle_strides = x.stride()[:3], (*cos_strides, *sin_strides)

    args = x, part, *angles, *strides, *angle_strides, heads, length, size, parts
    launch(_statistics_kernel, (parts * batch * heads,), args, constants("statistics", device, **row, T=tokens, num_warps=4))
    given = {name: row[name] for name in ("D", "HP", "HALF", "INTERLEAVED")}
    args = part, mean, scale, parts, length, heads_per_scale
    launch(_scales_kernel, (scale.numel(),), args, constants("scales", device, **given, MEANS=means, num_warps=4))
    args = x, out, mean, scale, *angles, *strides, *out.stride()[:3], *angle_strides, heads, length, heads_per_scale
    given = constants("rows", device, **row, MEANS=means, NATIVE=is_native(device), T=tokens, num_warps=4)
    launch(_rows_kernel, (-(-length // tokens) * batch * heads,), args, given)
    return out.view(FP8), scale, mean
