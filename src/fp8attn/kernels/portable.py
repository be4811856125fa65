"""Attention over 8-bit pages in plain Triton, for prefill and decode: 8-bit storage, 16-bit arithmetic, FP32 accumulation.

Only the cache is rounded to 8 bits. K, in INT8 or E4M3, and V are exact in FP16. If K is rotated, Q is rotated in FP32. Q is rounded to
FP16 after a power of two for each row brings it into range. The weights P are multiplied by 2^15, so that FP16 keeps all its digits down to
weights of 2^-29. The denominator sums the rounded weights, so that their errors cancel where V is constant.

Means cost nothing per key: `q . (k + k_mean)` is `q . k` plus one constant per row. A softmax does not depend on that constant; the LSE,
sinks and a softcap do. v_mean is added to the normalized output. A page's k_scale is a part of the row's factor. Its v_scale is the
accumulator's unit, which changes from page to page in the rescaling by the running maximum (FlashAttention-2, arXiv:2307.08691).

The query heads of one KV head are packed into the rows of a tile (row r: token r // G, head r % G), so that decode shares each K and V
byte between them. Long sequences are split over programs (Flash-Decoding). Each program computes its share of the pages on the device, and
`combine` adds the parts. If a tile has so few rows that warps can share it only by splitting keys, each warp gets a quarter of the keys,
with its own maximum, denominator and accumulator (a batched matrix product whose batch is the warp). Then the loop has no exchange between
warps, and their results are combined once, at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..layout import HEADER, PAGE_SIZE, V_GROUP, KVPages
from ..params import AttentionParams
from .combine import combine, finish, num_splits
from .constexpr import ConstexprFields
from .fp8 import from_e4m3, from_int8, is_native, round_to
from .launch import constants, launch
from .machine import machine
from .rotation import hadamard

CLEARING = 64  # programs that write zeros after the last sequence of a ragged batch

_PAGE = tl.constexpr(PAGE_SIZE)
_GROUP = tl.constexpr(V_GROUP)
_HEADER = tl.constexpr(HEADER)
_LOG2E = tl.constexpr(1.4426950408889634)
_P_BITS = tl.constexpr(15)  # P is multiplied by 2^15: at most 32768 in FP16
_Q_BITS = tl.constexpr(8)  # a row of Q is scaled so that its largest value is in [2^8, 2^9)
_NOTHING = tl.constexpr(-1e28)  # the running maximum before the first key: finite, so that scores of -inf make no NaN


@dataclass(frozen=True)
class Options(ConstexprFields):
    """The compile-time options of the kernel. The host makes them, and device code reads them."""

    int8: bool  # keys; or else E4M3
    rotate: bool  # queries, as the keys are
    head_dim: int
    width: int  # head_dim, padded to a power of two
    group: int  # query heads of a KV head
    rows: int  # of a program
    tile: int  # keys of a tile
    warps: int  # that split a tile's keys; 1: none does
    causal: bool
    window: bool
    softcap: bool
    split: bool  # the keys are divided among programs
    native: bool  # the target converts E4M3 by itself (`fp8.is_native`)


@triton.jit
def _page(pool_ptr, page, num_kv_heads, kv_head, D: tl.constexpr):
    """Pointers to the parts of one head's page: K `[128, D]`, V `[8, D, 16]`, and the header with their scales."""
    return pool_ptr + (page.to(tl.int64) * num_kv_heads + kv_head) * (2 * _PAGE * D + _HEADER)


@triton.jit
def _scales(page_ptr, mask, D: tl.constexpr):
    """k_scale and v_scale of a page, or 1 if `mask` is False."""
    scale_ptr = (page_ptr + 2 * _PAGE * D).to(tl.pointer_type(tl.float32))
    return tl.load(scale_ptr, mask=mask, other=1.0), tl.load(scale_ptr + 1, mask=mask, other=1.0)


@triton.jit
def _tiles(
    acc, denom, m, unit, q, factor, shift, cap, see_from, see_to, pool_ptr, table_ptr, num_kv_heads, kv_head, first, last,
    MASK_START: tl.constexpr, MASK_END: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Add the keys of tiles `[first, last)` to the softmax state `acc * unit, denom, m` of a block of rows.

    If several warps split the keys, every tensor has a first axis of warps. Each warp has a part of the tile's keys and its own state.
    """
    INT8: tl.constexpr = OPTIONS.int8
    D: tl.constexpr = OPTIONS.head_dim
    DP: tl.constexpr = OPTIONS.width
    TILE: tl.constexpr = OPTIONS.tile
    WARPS: tl.constexpr = OPTIONS.warps
    SOFTCAP: tl.constexpr = OPTIONS.softcap
    NATIVE: tl.constexpr = OPTIONS.native
    TILES: tl.constexpr = _PAGE // TILE
    AXIS: tl.constexpr = 2 if WARPS > 1 else 1  # of keys
    d = tl.arange(0, DP)
    # Columns are V's positions, so K's tokens are read in V's order: inside 16, [0, 1, 8, 9, 2, 3, 10, 11, ...].
    position = tl.arange(0, TILE)
    if WARPS > 1:  # a reshape would hide from the compiler that positions are contiguous
        position = tl.arange(0, WARPS)[:, None] * (TILE // WARPS) + tl.arange(0, TILE // WARPS)[None, :]
    token = (position & ~15) | (position & 1) | ((position & 2) << 2) | ((position >> 1) & 6)
    if WARPS > 1:
        k_offsets = token[:, :, None] * D + d[None, None, :]
        k_mask = (d < D)[None, None, :]
        key = token[:, None, :]
    else:
        k_offsets = token[:, None] * D + d[None, :]
        k_mask = (d < D)[None, :]
        key = token[None, :]
    in_group = tl.arange(0, DP * _GROUP)[None, :]  # [channel, token] of a group of V, in the order of memory
    v_offsets = tl.arange(0, TILE // _GROUP)[:, None] * (D * _GROUP) + in_group
    v_mask = in_group < D * _GROUP

    # A page's number and scales are loaded one tile ahead, because the pipeline does not hide their latency.
    some = first < last
    page_ptr = _page(pool_ptr, tl.load(table_ptr + first // TILES, mask=some, other=0), num_kv_heads, kv_head, D)
    k_scale, v_scale = _scales(page_ptr, some, D)
    ratio = unit / v_scale
    for tile in range(first, last):
        tile_ptr = page_ptr + (tile * TILE - tile // TILES * _PAGE) * D
        k_ptrs = tile_ptr + k_offsets
        v_ptrs = tile_ptr + _PAGE * D + v_offsets
        page_ptr = _page(pool_ptr, tl.load(table_ptr + tl.minimum(tile + 1, last - 1) // TILES), num_kv_heads, kv_head, D)
        next_k_scale, next_v_scale = _scales(page_ptr, True, D)

        k = tl.load(k_ptrs) if D == DP else tl.load(k_ptrs, mask=k_mask, other=0)
        k = from_int8(k) if INT8 else from_e4m3(k, NATIVE)
        s = tl.dot(q, tl.permute(k, (0, 2, 1)) if WARPS > 1 else tl.trans(k))
        f = factor * k_scale
        if SOFTCAP:
            # cap * tanh(x), from exp2(2 x log2(e)), whose factor is in f and shift
            s = cap - 2.0 * cap / (tl.exp2(s * tl.expand_dims(f, -1) + tl.expand_dims(shift, -1)) + 1.0)
        elif INT8 and (MASK_START or MASK_END):
            # A page with a NaN in a token has a NaN scale (`numerics.settle`). Only rows that see a key of the page become NaN.
            s += k_scale - k_scale
            f = tl.where(k_scale == k_scale, f, 1.0)
        if MASK_START and MASK_END:
            s = tl.where((tile * TILE + key < see_to) & (tile * TILE + key >= see_from), s, float("-inf"))
        elif MASK_END:
            s = tl.where(tile * TILE + key < see_to, s, float("-inf"))
        elif MASK_START:
            s = tl.where(tile * TILE + key >= see_from, s, float("-inf"))
        largest = tl.max(s, AXIS)
        if not SOFTCAP:
            largest = largest * f
        new_m = tl.maximum(m, largest)
        origin = tl.expand_dims(new_m - _P_BITS, -1)
        p = tl.exp2((s if SOFTCAP else s * tl.expand_dims(f, -1)) - origin).to(tl.float16)
        alpha = tl.exp2(m - new_m)
        denom = denom * alpha + tl.sum(p.to(tl.float32), AXIS)
        rescale = tl.broadcast_to(tl.expand_dims(alpha * ratio, -1), acc.shape)
        v = from_e4m3(tl.load(v_ptrs) if D == DP else tl.load(v_ptrs, mask=v_mask, other=0), NATIVE)
        v = tl.permute(tl.reshape(v, (TILE // _GROUP, DP, _GROUP)), (0, 2, 1))
        v = tl.reshape(v, (WARPS, TILE // WARPS, DP) if WARPS > 1 else (TILE, DP))
        # A tensor core truncates when it accumulates, always towards zero; an FP32 FMA per tile rounds. (The compiler would turn a product
        # and a sum into an accumulation of the tensor core.)
        acc = tl.fma(acc, rescale, tl.dot(p, v))
        m = new_m
        ratio = v_scale / next_v_scale
        k_scale = next_k_scale
        v_scale = next_v_scale
    return acc, denom, m, tl.where(some, v_scale, unit)


@triton.jit
def _clear_rest(out_ptr, lse_ptr, first, num_rows, num_splits, program, programs, OPTIONS: tl.constexpr):
    """Write zeros to the rows from `first` on, which belong to no sequence. In parts, write that they saw no key."""
    D: tl.constexpr = OPTIONS.head_dim
    DP: tl.constexpr = OPTIONS.width
    d = tl.arange(0, DP)
    for start in range(first + program, num_rows, programs):
        row = (start + tl.arange(0, 1)).to(tl.int64)
        if OPTIONS.split:
            for split in range(num_splits):
                tl.store(lse_ptr + row + num_rows.to(tl.int64) * split, tl.full((1,), float("-inf"), tl.float32))
        else:
            tl.store(out_ptr + row * D + d, tl.zeros((DP,), out_ptr.dtype.element_ty), mask=d < D)
            tl.store(lse_ptr + row, tl.full((1,), float("-inf"), tl.float32))


@triton.jit(
    do_not_specialize=["table_stride", "max_seqlen_q", "num_kv_heads", "num_seqs", "num_blocks", "num_splits", "num_rows", "window"]
)
def _attention_kernel(
    q_ptr, pool_ptr, k_mean_ptr, v_mean_ptr, table_ptr, seqlens_ptr, cu_seqlens_ptr, sinks_ptr, leftpad_ptr, out_ptr, lse_ptr, q_stride_t,
    q_stride_h, table_stride, max_seqlen_q, num_kv_heads, num_seqs, num_blocks, num_splits, num_rows, softmax_scale, softcap, window,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """The kernel. A program computes some rows of one KV head of a sequence over a part of the keys. The last programs clear other rows."""
    D: tl.constexpr = OPTIONS.head_dim
    DP: tl.constexpr = OPTIONS.width
    G: tl.constexpr = OPTIONS.group
    ROWS: tl.constexpr = OPTIONS.rows
    TILE: tl.constexpr = OPTIONS.tile
    WARPS: tl.constexpr = OPTIONS.warps
    CAUSAL: tl.constexpr = OPTIONS.causal
    WINDOW: tl.constexpr = OPTIONS.window
    SOFTCAP: tl.constexpr = OPTIONS.softcap
    SPLIT: tl.constexpr = OPTIONS.split
    # The last queries see the most keys and start first.
    split = tl.program_id(0) % num_splits
    item = tl.program_id(0) // num_splits
    block = num_blocks - 1 - item % num_blocks
    kv_head = item // num_blocks % num_kv_heads
    seq = item // num_blocks // num_kv_heads
    if cu_seqlens_ptr is not None and seq >= num_seqs:
        programs = num_seqs * num_kv_heads * num_blocks * num_splits
        first = tl.load(cu_seqlens_ptr + num_seqs) * (num_kv_heads * G)
        _clear_rest(out_ptr, lse_ptr, first, num_rows, num_splits, tl.program_id(0) - programs, tl.num_programs(0) - programs, OPTIONS)
        return
    if cu_seqlens_ptr is None:
        start = seq * max_seqlen_q
        q_len = max_seqlen_q
    else:
        start = tl.load(cu_seqlens_ptr + seq)
        q_len = tl.load(cu_seqlens_ptr + seq + 1) - start
    if block * ROWS >= q_len * G:
        return
    length = tl.load(seqlens_ptr + seq)
    row = block * ROWS + tl.arange(0, ROWS)
    query = row // G
    head = kv_head * G + row % G
    real = query < q_len
    first_position = length - q_len + block * ROWS // G
    last_position = length - q_len + tl.minimum((block * ROWS + ROWS - 1) // G, q_len - 1)
    # Offsets of rows in [T, num_q_heads] and, with splits, in [num_splits, T, num_q_heads]
    offset = (start + query).to(tl.int64) * (num_kv_heads * G) + head
    if SPLIT:
        offset += split.to(tl.int64) * num_rows

    # Keys that some row sees, [begin, end), and keys that every row sees, [all_begin, all_end)
    begin = 0
    if leftpad_ptr is not None:
        begin = tl.load(leftpad_ptr + seq)
    all_begin = begin
    end = length
    all_end = length
    if CAUSAL:
        end = tl.minimum(length, last_position + 1)
        all_end = tl.minimum(length, first_position + 1)
    if WINDOW:
        all_begin = tl.maximum(begin, last_position - window + 1)
        begin = tl.maximum(begin, first_position - window + 1)
    first_tile = tl.maximum(begin, 0) // TILE
    num_tiles = tl.maximum(tl.cdiv(end, TILE) - first_tile, 0)
    if SPLIT:
        last_tile = first_tile + num_tiles * (split + 1) // num_splits
        first_tile += num_tiles * split // num_splits
        if first_tile >= last_tile:
            tl.store(lse_ptr + offset, float("-inf"), mask=real)
            return
    else:
        last_tile = first_tile + num_tiles

    d = tl.arange(0, DP)
    q_offsets = (start + query).to(tl.int64) * q_stride_t + head.to(tl.int64) * q_stride_h
    q_mask = real[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + q_offsets[:, None] + d[None, :], mask=q_mask, other=0.0).to(tl.float32)
    if OPTIONS.rotate:
        q = hadamard(q, D)
    # factor * q16 = |softmax_scale| * log2(e) * q. q16 is q times the power of two that brings its largest value to 2^8.
    exponent = tl.minimum(tl.maximum(tl.max(tl.abs(q), 1).to(tl.int32, bitcast=True) >> 23, _Q_BITS + 1), 254)
    grow = ((254 - exponent + _Q_BITS) << 23).to(tl.float32, bitcast=True)
    shrink = ((exponent - _Q_BITS) << 23).to(tl.float32, bitcast=True)
    scale_log2 = tl.abs(softmax_scale) * _LOG2E
    q = tl.where(softmax_scale < 0, -q, q)
    # Above zero, so that -inf keeps its meaning: scores this small are zero whatever the factor.
    factor = tl.maximum(shrink * scale_log2, 1e-25)
    mean_score = tl.zeros_like(factor)  # to base 2, as all scores here
    if k_mean_ptr is not None:
        k_mean = tl.load(k_mean_ptr + kv_head * D + d, mask=d < D, other=0.0)
        mean_score = tl.sum(q * k_mean[None, :], 1) * scale_log2
    q = (q * grow[:, None]).to(tl.float16)
    cap = softcap * _LOG2E
    shift = mean_score
    if SOFTCAP:
        factor = factor * (2.0 / softcap)
        shift = shift * (2.0 / softcap)
        mean_score = tl.zeros_like(mean_score)

    see_from = tl.zeros_like(row) + tl.maximum(begin, 0)
    see_to = tl.zeros_like(row) + length
    position = length - q_len + query
    if CAUSAL:
        see_to = tl.minimum(see_to, position + 1)
    if WINDOW:
        see_from = tl.maximum(see_from, position - window + 1)

    if WARPS > 1:
        q = tl.broadcast_to(q[None, :, :], (WARPS, ROWS, DP))
        acc = tl.zeros((WARPS, ROWS, DP), tl.float32)
        denom = tl.zeros((WARPS, ROWS), tl.float32)
        m = tl.full((WARPS, ROWS), _NOTHING, tl.float32)
        factor = factor[None, :]
        shift = shift[None, :]
        see_from = see_from[None, :, None]
        see_to = see_to[None, :, None]
    else:
        acc = tl.zeros((ROWS, DP), tl.float32)
        denom = tl.zeros((ROWS,), tl.float32)
        m = tl.full((ROWS,), _NOTHING, tl.float32)
        see_from = see_from[:, None]
        see_to = see_to[:, None]
    unit = tl.full((), 1.0, tl.float32)
    table_ptr += seq.to(tl.int64) * table_stride
    HAS_START: tl.constexpr = WINDOW or leftpad_ptr is not None
    if WARPS > 1:
        # One loop: a mask over a few rows costs less than filling the pipeline twice.
        acc, denom, m, unit = _tiles(
            acc, denom, m, unit, q, factor, shift, cap, see_from, see_to, pool_ptr, table_ptr, num_kv_heads, kv_head, first_tile,
            last_tile, HAS_START, True, OPTIONS,
        )  # fmt: skip
    else:
        all_last = tl.minimum(tl.maximum(all_end // TILE, first_tile), last_tile)
        all_first = first_tile
        if HAS_START:
            all_first = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(all_begin, 0), TILE), first_tile), last_tile)
            all_last = tl.maximum(all_last, all_first)
            acc, denom, m, unit = _tiles(
                acc, denom, m, unit, q, factor, shift, cap, see_from, see_to, pool_ptr, table_ptr, num_kv_heads, kv_head, first_tile,
                all_first, True, True, OPTIONS,
            )  # fmt: skip
        acc, denom, m, unit = _tiles(
            acc, denom, m, unit, q, factor, shift, cap, see_from, see_to, pool_ptr, table_ptr, num_kv_heads, kv_head, all_first,
            all_last, False, False, OPTIONS,
        )  # fmt: skip
        acc, denom, m, unit = _tiles(
            acc, denom, m, unit, q, factor, shift, cap, see_from, see_to, pool_ptr, table_ptr, num_kv_heads, kv_head, all_last,
            last_tile, HAS_START, True, OPTIONS,
        )  # fmt: skip
    if WARPS > 1:
        top = tl.max(m, 0)
        weight = tl.exp2(m - top[None, :])
        denom = tl.sum(denom * weight, 0)
        acc = tl.sum(acc * weight[:, :, None], 0)
        m = top

    # Rows that see nothing have denom = 0; a NaN is not 0 and stays.
    nothing = denom == 0.0
    lse = tl.where(nothing, float("-inf"), tl.log2(denom) + (m - _P_BITS))
    out = acc * (unit / tl.where(nothing, 1.0, denom))[:, None]
    if v_mean_ptr is not None:
        out += tl.load(v_mean_ptr + kv_head * D + d, mask=d < D, other=0.0)[None, :]
    out = tl.where(nothing[:, None], 0.0, out)
    out_mask = real[:, None] & (d < D)[None, :]
    if SPLIT:
        tl.store(out_ptr + offset[:, None] * D + d[None, :], out, mask=out_mask & (nothing == 0)[:, None])
        tl.store(lse_ptr + offset, lse, mask=real)
        tl.store(lse_ptr + offset + num_splits.to(tl.int64) * num_rows, mean_score, mask=real)
    else:
        share, lse = finish(lse, mean_score, sinks_ptr, head)
        out = round_to(out * share[:, None], out_ptr.dtype.element_ty, OPTIONS.native)
        tl.store(out_ptr + offset[:, None] * D + d[None, :], out, mask=out_mask)
        tl.store(lse_ptr + offset, lse, mask=real)


class Config(NamedTuple):
    """How a block of rows is computed: numbers of its rows, of keys in a tile, of warps that split the keys (1: no split), of warps, of
    pipeline stages."""

    rows: int
    tile: int
    key_warps: int
    num_warps: int
    num_stages: int


@lru_cache
def config(head_dim: int, rows: int, shared_memory: int) -> Config:
    """The block for `rows` packed rows of each KV head (queries times group), if a program may have `shared_memory` bytes.

    The frequent cases do not spill registers (`test_compile.py` checks it). GPUs with much shared memory (Hopper, Blackwell) also have
    instructions that read operands from it. On other GPUs tiles are smaller, because operands need registers.
    """
    wide = head_dim > 128
    if shared_memory >= 200_000:
        if rows <= 16:
            return Config(16, 128, 4, 4, 2 if wide else 3)
        if rows <= 64:
            return Config(64, 64, 1, 8 if wide else 4, 2)
        return Config(128, 64, 1, 8, 2)
    if rows <= 16:
        return Config(16, 64, 1, 8, 3) if wide else Config(16, 128, 4, 4, 3)
    if rows <= 64 or wide:
        return Config(64, 32, 1, 8 if wide else 4, 2)
    return Config(128, 32, 1, 8, 3)


@lru_cache
def _device(device: torch.device) -> tuple[int, int]:
    """Number of multiprocessors, and bytes of shared memory that one program may have."""
    return machine(device)[:2]


def attention(
    q: torch.Tensor,
    pages: KVPages,
    params: AttentionParams,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.attention`, with a relative error of up to 3e-4 plus the rounding of the output's dtype."""
    cu_seqlens_q, max_seqlen_q, causal, softmax_scale, window, softcap, sinks, leftpad_k, *_ = params
    num_tokens, num_q_heads, head_dim = q.shape
    device = q.device
    if out is None:
        out = torch.empty((num_tokens, num_q_heads, head_dim), dtype=q.dtype, device=device)
    lse = torch.empty((num_tokens, num_q_heads), dtype=torch.float32, device=device)
    if not num_tokens:
        return out, lse
    group = num_q_heads // pages.num_kv_heads
    padded = 1 << (head_dim - 1).bit_length()
    sms, shared_memory = _device(device)
    rows, tile, key_warps, num_warps, num_stages = config(head_dim, max_seqlen_q * group, shared_memory)
    blocks = -(-max_seqlen_q * group // rows)
    max_pages = pages.page_table.shape[1]
    if window:
        max_pages = min(max_pages, (window + max_seqlen_q) // PAGE_SIZE + 2)
    splits = num_splits(blocks * pages.num_kv_heads * pages.num_seqs, max_pages, sms * (8 // num_warps))
    num_rows = num_tokens * num_q_heads
    if splits > 1:
        target = torch.empty((splits, num_rows, head_dim), dtype=torch.float32, device=device)
        target_lse = torch.empty((2, splits, num_rows), dtype=torch.float32, device=device)
    else:
        target, target_lse = out, lse
    args = (
        q, pages.pool, pages.k_mean, pages.v_mean, pages.page_table, pages.cache_seqlens, cu_seqlens_q, None if splits > 1 else sinks,
        leftpad_k, target, target_lse, q.stride(0), q.stride(1), pages.page_table.stride(0), max_seqlen_q, pages.num_kv_heads,
        pages.num_seqs, blocks, splits, num_rows, float(softmax_scale), float(softcap), window,
    )  # fmt: skip
    options = Options(
        int8=pages.key_dtype == torch.int8, rotate=pages.rotate_keys, head_dim=head_dim, width=padded, group=group, rows=rows, tile=tile,
        warps=key_warps, causal=causal, window=window > 0, softcap=softcap > 0, split=splits > 1, native=is_native(device),
    )  # fmt: skip
    given = constants("attend", device, OPTIONS=options, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=True)
    programs = pages.num_seqs * pages.num_kv_heads * blocks * splits
    launch(_attention_kernel, (programs + (CLEARING if cu_seqlens_q is not None else 0),), args, given)
    if splits > 1:
        combine(target, target_lse, sinks, out, lse)
    return out, lse
