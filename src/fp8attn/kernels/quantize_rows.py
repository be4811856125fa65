"""Dense tensors to FP8 as they lie, one scale a sequence and group of heads: for attention kernels that know no pages.

Such a scale needs all of a head before anything is written, so a tensor is read twice: `_amax_kernel`, then `_write_kernel`; a program of
either holds 128 tokens of a head. Rows are loaded, turned and centred as `append` does it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..layout import FP8, PAGE_SIZE
from .append import (
    _BYTES,
    _finite,
    _inverse,
    _k_mean,
    _load_angles,
    _load_pairs,
    _power_of_two_scale,
    _rotate,
    _rotation,
    _sampled_rows,
    _store_k_mean,
    _store_pairs,
)
from .fp8 import is_native, to_e4m3
from .launch import constants, launch

_BLOCK = tl.constexpr(PAGE_SIZE)


@triton.jit(do_not_specialize=["length", "num_heads"])
def _mean_kernel(
    x_ptr, mean_ptr, cos_ptr, sin_ptr, stride_b, stride_t, stride_h, cos_stride_b, cos_stride, sin_stride_b, sin_stride, length, num_heads,
    D: tl.constexpr, HP: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    head, seq = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    if HALF > 0:
        cos_ptr += seq * cos_stride_b
        sin_ptr += seq * sin_stride_b
    a, b = _k_mean(
        x_ptr + seq * stride_b + head * stride_h, stride_t, _sampled_rows(0, length, length - 1), length, cos_ptr, sin_ptr, cos_stride,
        sin_stride, D, HP, HALF, INTERLEAVED, STEP,
    )  # fmt: skip
    _store_k_mean(mean_ptr + (seq * num_heads + head) * D, a, b, D, HP, HALF, INTERLEAVED)


@triton.jit
def _rows(
    x_ptr, mean_ptr, cos_ptr, sin_ptr, stride_b, stride_t, stride_h, cos_stride_b, cos_stride, sin_stride_b, sin_stride, length, num_heads,
    D: tl.constexpr, HP: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """This program's sequence, head and tokens, and their rows as pairs; past the end the last token again."""
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    token = (tl.program_id(0) // num_heads).to(tl.int64) * _BLOCK + tl.arange(0, _BLOCK)
    row = tl.minimum(token, length - 1)[:, None]
    seq = tl.program_id(1).to(tl.int64)
    a, b = _load_pairs(x_ptr + seq * stride_b + head * stride_h + row * stride_t, D, HP, HALF, INTERLEAVED)
    if HALF > 0:
        cos, sin = _load_angles(cos_ptr + seq * cos_stride_b, sin_ptr + seq * sin_stride_b, row, cos_stride, sin_stride, HP, HALF, STEP)
        a, b = _rotate(a, b, cos, sin, D, HP, HALF)
    if mean_ptr is not None:
        at = mean_ptr + (seq * num_heads + head) * D
        mean_a, mean_b = _load_pairs(at + tl.zeros((1, 1), tl.int32), D, HP, HALF, INTERLEAVED)
        a -= mean_a
        b -= mean_b
    return seq, head, token, a, b


@triton.jit(do_not_specialize=["length", "num_heads", "group"])
def _amax_kernel(
    x_ptr, amax_ptr, mean_ptr, cos_ptr, sin_ptr, stride_b, stride_t, stride_h, cos_stride_b, cos_stride, sin_stride_b, sin_stride, length,
    num_heads, group, D: tl.constexpr, HP: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    seq, head, _, a, b = _rows(
        x_ptr, mean_ptr, cos_ptr, sin_ptr, stride_b, stride_t, stride_h, cos_stride_b, cos_stride, sin_stride_b, sin_stride, length,
        num_heads, D, HP, HALF, INTERLEAVED, STEP,
    )  # fmt: skip
    amax = tl.max(tl.maximum(_finite(a), _finite(b)))
    # Magnitudes are in the order of their bits.
    tl.atomic_max(amax_ptr + (seq * num_heads + head) // group, amax.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit(do_not_specialize=["length", "num_heads", "group"])
def _write_kernel(
    x_ptr, out_ptr, scale_ptr, amax_ptr, mean_ptr, cos_ptr, sin_ptr, stride_b, stride_t, stride_h, cos_stride_b, cos_stride, sin_stride_b,
    sin_stride, out_stride_b, out_stride_t, out_stride_h, length, num_heads, group,
    D: tl.constexpr, HP: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, STEP: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    seq, head, token, a, b = _rows(
        x_ptr, mean_ptr, cos_ptr, sin_ptr, stride_b, stride_t, stride_h, cos_stride_b, cos_stride, sin_stride_b, sin_stride, length,
        num_heads, D, HP, HALF, INTERLEAVED, STEP,
    )  # fmt: skip
    at = (seq * num_heads + head) // group
    scale = _power_of_two_scale(tl.load(amax_ptr + at).to(tl.float32, bitcast=True))
    if (tl.program_id(0) < num_heads) & (head % group == 0):
        tl.store(scale_ptr + at, scale)
    factor = _inverse(scale)
    out = out_ptr.to(_BYTES) + seq * out_stride_b + head * out_stride_h + token[:, None] * out_stride_t
    _store_pairs(out, to_e4m3(a * factor, NATIVE), to_e4m3(b * factor, NATIVE), (token < length)[:, None], D, HP, HALF, INTERLEAVED)


def quantize_rows(
    x: torch.Tensor, *, rope_cos: torch.Tensor | None, rope_sin: torch.Tensor | None, rope_interleaved: bool, means: bool,
    heads_per_scale: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """`reference.quantize_rows`, bit for bit (NaN may lose its sign); but for means, whose sums are taken in another order."""
    device = x.device
    batch, heads, length, head_dim = x.shape
    row, angles, (cos_strides, sin_strides) = _rotation(head_dim, rope_cos, rope_sin, rope_interleaved)
    stride_b, stride_h, stride_t, _ = x.stride()
    strides = (stride_b, stride_t, stride_h, *cos_strides, *sin_strides)
    groups = batch, heads // heads_per_scale
    out = torch.empty_like(x, dtype=FP8)
    out_b, out_h, out_t, _ = out.stride()
    scale = torch.empty(groups, dtype=torch.float32, device=device)
    amax = torch.zeros(groups, dtype=torch.int32, device=device)
    mean = torch.empty(batch, heads, head_dim, dtype=torch.float32, device=device) if means else None
    warps = row["HP"] // 8
    if means:
        given = constants("row means", device, **row, num_warps=warps)
        launch(_mean_kernel, (heads, batch), (x, mean, *angles, *strides, length, heads), given)
    grid = (heads * -(-length // PAGE_SIZE), batch)
    given = constants("row maxima", device, **row, num_warps=warps)
    launch(_amax_kernel, grid, (x, amax, mean, *angles, *strides, length, heads, heads_per_scale), given)
    args = x, out, scale, amax, mean, *angles, *strides, out_b, out_t, out_h, length, heads, heads_per_scale
    launch(_write_kernel, grid, args, constants("rows", device, **row, NATIVE=is_native(device), num_warps=warps))
    return out, scale, mean
