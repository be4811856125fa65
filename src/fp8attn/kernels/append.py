"""Quantise-and-append: new tokens of K and V become FP8 bytes in pages, in one launch.

One program writes the part of one page and head that is new, of K or of V. It reads its tokens once, holds them in registers for
the page's largest value, and writes. A prompt fills whole pages (V transposed through shared memory, so that its writes coalesce); a
decode step writes single tokens and touches the older ones only where the page's scale grows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..layout import PAGE_SIZE, KVPages
from ..numerics import E4M3, MAX_SCALE_EXPONENT, MIN_SCALE_EXPONENT
from .fp8 import from_e4m3, is_native, to_e4m3
from .launch import constants, launch

MAX_TOKENS = 16  # appends of up to this many tokens go token by token, longer ones page by page

_PAGE = tl.constexpr(PAGE_SIZE)
_MAX_E4M3_EXPONENT = tl.constexpr(E4M3.max_exponent)
_MIN_SCALE_EXPONENT = tl.constexpr(MIN_SCALE_EXPONENT)
_MAX_SCALE_EXPONENT = tl.constexpr(MAX_SCALE_EXPONENT)


@triton.jit
def _v_position(token):
    """Where a token of a V page lies (`layout.V_POSITION`)."""
    return (token & ~15) | (token & 1) | ((token >> 2) & 2) | ((token << 1) & 12)


@triton.jit
def _v_token(position):
    """Which token lies at a position of a V page (`layout.V_ORDER`)."""
    return (position & ~15) | (position & 1) | ((position & 2) << 2) | ((position >> 1) & 6)


@triton.jit
def _power_of_two_scale(amax):
    """`numerics.power_of_two_scale`."""
    bits = amax.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 127 - _MAX_E4M3_EXPONENT + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, _MIN_SCALE_EXPONENT), _MAX_SCALE_EXPONENT)
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _rescale(codes, ratio, NATIVE: tl.constexpr):
    """`numerics.rescale` on bytes."""
    x = codes.to(tl.float8e4nv, bitcast=True) if NATIVE else codes
    return to_e4m3(from_e4m3(x, NATIVE).to(tl.float32) * ratio, NATIVE)


@triton.jit
def _rotate(
    x, x_ptrs, rows, d, valid, cos_ptr, sin_ptr, cos_stride, sin_stride,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, T: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """`rope.apply_rope`; every product and sum rounds by itself, as torch's do (the launch turns FMA contraction off)."""
    if INTERLEAVED:
        i = tl.arange(0, DP // 2)
        mask = valid[:, None] & (i < HALF)[None, :]
        cos = tl.load(cos_ptr + rows[:, None] * cos_stride + i[None, :], mask=mask, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + rows[:, None] * sin_stride + i[None, :], mask=mask, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, (T, DP // 2, 2)))
        rotated = tl.join(a * cos - b * sin, b * cos + a * sin)
        return tl.where((d < 2 * HALF)[None, :], tl.reshape(rotated, (T, DP)), x)
    else:
        # The other half of each pair is loaded again: it lies in another thread, and in the nearest cache.
        partner = tl.where(d < HALF, d + HALF, d - HALF)
        i = tl.where(d < HALF, d, d - HALF)
        if HALF % 8 == 0:  # eight channels never straddle the halves: say so, and the loads are 16 bytes wide
            partner = tl.max_contiguous(tl.multiple_of(partner, 8), 8)
            i = tl.max_contiguous(tl.multiple_of(i, 8), 8)
        mask = valid[:, None] & (d < 2 * HALF)[None, :]
        cos = tl.load(cos_ptr + rows[:, None] * cos_stride + i[None, :], mask=mask, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + rows[:, None] * sin_stride + i[None, :], mask=mask, other=0.0).to(tl.float32)
        other = tl.load(x_ptrs[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
        rotated = tl.where((d < HALF)[None, :], x * cos - other * sin, x * cos + other * sin)
        return tl.where((d < 2 * HALF)[None, :], rotated, x)


@triton.jit
def _write(
    x_ptr, x_stride, mean_ptr, pool_ptr, scale_ptr, cos_ptr, sin_ptr, cos_stride, sin_stride, row, old, end,
    D: tl.constexpr, DP: tl.constexpr, IS_V: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, STATIC: tl.constexpr,
    T: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Write tokens `[old, end)` of one page of one head; token 0 of the page is row `row` of `x` (before `x` begins, if old > 0)."""
    d = tl.arange(0, DP)
    if T < _PAGE:
        token = old + tl.arange(0, T)
        position = _v_position(token) if IS_V else token
    else:
        position = tl.arange(0, T)
        token = _v_token(position) if IS_V else position
    valid = (token >= old) & (token < end)
    rows = (row + token).to(tl.int64)
    x_ptrs = x_ptr + rows * x_stride
    x = tl.load(x_ptrs[:, None] + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    if HALF > 0 and not IS_V:
        x = _rotate(x, x_ptrs, rows, d, valid, cos_ptr, sin_ptr, cos_stride, sin_stride, HALF, INTERLEAVED, T, DP)
    mean = tl.load(mean_ptr + d, mask=d < D, other=0.0)
    x = tl.where(valid[:, None], x - mean[None, :], 0.0)

    scale = tl.load(scale_ptr)
    old_scale = scale
    if not STATIC:
        magnitude = tl.abs(x)
        scale = _power_of_two_scale(tl.max(tl.max(tl.where(magnitude < float("inf"), magnitude, 0.0), 1), 0))
        if old > 0:  # the page holds older tokens: its scale may only grow
            scale = tl.maximum(scale, old_scale)
        tl.store(scale_ptr, scale)
    # The inverse of a power of two is exact, and so is the product.
    codes = to_e4m3(x * tl.div_rn(1.0, scale), NATIVE)
    grown = (old > 0) & (scale > old_scale)

    if T < _PAGE:
        if grown:
            # Bytes in the order they lie in, 2048 at a time: few enough for registers, and a divisor of every page.
            for first in range(0, D * _PAGE, 2048):
                i = first + tl.arange(0, 2048)
                lies = _v_token(i % _PAGE) if IS_V else i // D
                older = tl.load(pool_ptr + i)
                tl.store(pool_ptr + i, tl.where(lies < old, _rescale(older, old_scale / scale, NATIVE), older))
            tl.debug_barrier()  # other threads' stores above cover the bytes that come now
        step_token, step_d = (1, _PAGE) if IS_V else (D, 1)
        tl.store(pool_ptr + position[:, None] * step_token + d[None, :] * step_d, codes, mask=valid[:, None] & (d < D)[None, :])
    elif IS_V:
        ptrs = pool_ptr + d[:, None] * _PAGE + position[None, :]
        codes = tl.trans(codes)
        if old > 0:
            older = tl.load(ptrs, mask=(d < D)[:, None], other=0)
            if grown:
                older = _rescale(older, old_scale / scale, NATIVE)
            codes = tl.where((token < old)[None, :], older, codes)
        tl.store(ptrs, codes, mask=(d < D)[:, None])
    else:
        ptrs = pool_ptr + position[:, None] * D + d[None, :]
        if old > 0:
            older = tl.load(ptrs, mask=(d < D)[None, :], other=0)
            if grown:
                older = _rescale(older, old_scale / scale, NATIVE)
            codes = tl.where((token < old)[:, None], older, codes)
        tl.store(ptrs, codes, mask=(d < D)[None, :])


@triton.jit(do_not_specialize=["table_stride", "max_seqlen", "num_kv_heads", "cos_stride", "sin_stride"])
def _append_kernel(
    k_ptr, v_ptr, k_pool_ptr, v_pool_ptr, k_scale_ptr, v_scale_ptr, k_mean_ptr, v_mean_ptr, table_ptr, seqlens_ptr, cu_seqlens_ptr,
    cos_ptr, sin_ptr, k_stride_t, k_stride_h, v_stride_t, v_stride_h, cos_stride, sin_stride, table_stride, max_seqlen, num_kv_heads,
    D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, STATIC: tl.constexpr, T: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    # Heads follow each other, so that programs that run together read memory that lies together.
    which = tl.program_id(0) % 2
    head = tl.program_id(0) // 2 % num_kv_heads
    seq = tl.program_id(1)
    if cu_seqlens_ptr is None:
        start = seq * max_seqlen
        new = max_seqlen
    else:
        start = tl.load(cu_seqlens_ptr + seq)
        new = tl.load(cu_seqlens_ptr + seq + 1) - start
    length = tl.load(seqlens_ptr + seq)
    column = length // _PAGE + tl.program_id(0) // (2 * num_kv_heads)
    first = column * _PAGE  # the page's first token
    old = tl.maximum(length - first, 0)
    end = tl.minimum(length + new - first, _PAGE)
    if old >= end:
        return
    row = start + first - length
    page = tl.load(table_ptr + seq.to(tl.int64) * table_stride + column).to(tl.int64) * num_kv_heads + head
    mean = (seq.to(tl.int64) * num_kv_heads + head) * D
    head = head.to(tl.int64)
    if which == 0:
        _write(
            k_ptr + head * k_stride_h, k_stride_t, k_mean_ptr + mean, k_pool_ptr + page * (D * _PAGE), k_scale_ptr + page,
            cos_ptr, sin_ptr, cos_stride, sin_stride, row, old, end,
            D, DP, False, HALF, INTERLEAVED, STATIC, T, NATIVE,
        )  # fmt: skip
    else:
        _write(
            v_ptr + head * v_stride_h, v_stride_t, v_mean_ptr + mean, v_pool_ptr + page * (D * _PAGE), v_scale_ptr + page,
            cos_ptr, sin_ptr, cos_stride, sin_stride, row, old, end,
            D, DP, True, HALF, INTERLEAVED, STATIC, T, NATIVE,
        )  # fmt: skip


def append(
    pages: KVPages,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int,
    rope_cos: torch.Tensor | None,
    rope_sin: torch.Tensor | None,
    rope_interleaved: bool,
    static_scales: bool,
) -> None:
    """`reference.append`, bit for bit (NaN may lose its sign)."""
    if not k.shape[0] or not max_seqlen:
        return
    head_dim = pages.head_dim
    padded = 1 << (head_dim - 1).bit_length()
    if max_seqlen <= MAX_TOKENS:
        tile, num_warps = 1 << (max_seqlen - 1).bit_length(), 4
    else:
        tile, num_warps = PAGE_SIZE, min(16, padded // 8)
    columns = (max_seqlen + PAGE_SIZE - 2) // PAGE_SIZE + 1  # the most pages that so many tokens can touch
    rope = rope_cos is not None
    args = (
        k, v, pages.k.view(torch.uint8), pages.v.view(torch.uint8), pages.k_scale, pages.v_scale, pages.k_mean, pages.v_mean,
        pages.page_table, pages.cache_seqlens, cu_seqlens, rope_cos, rope_sin,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), rope_cos.stride(0) if rope else 0, rope_sin.stride(0) if rope else 0,
        pages.page_table.stride(0), max_seqlen, pages.num_kv_heads,
    )  # fmt: skip
    given = constants(
        "append", k.device, D=head_dim, DP=padded, HALF=rope_cos.shape[1] if rope else 0, INTERLEAVED=rope_interleaved,
        STATIC=static_scales, T=tile, NATIVE=is_native(k.device), num_warps=num_warps, enable_fp_fusion=False,
    )  # fmt: skip
    launch(_append_kernel, (columns * pages.num_kv_heads * 2, pages.num_seqs), args, given)
