"""Device code: the rows of a program, the keys that they see, and their output."""

import triton
import triton.language as tl

from ..combine import share_and_lse
from ..common import HIDDEN, LOG2E, UNSEEN
from ..fp8 import round_to
from ..rotation import hadamard
from .tiles import WEIGHT_BITS, add_tiles

_Q_BITS = tl.constexpr(8)  # a row of Q is scaled so that its largest value is in [2^8, 2^9)


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
                tl.store(lse_ptr + row + num_rows.to(tl.int64) * split, tl.full((1,), HIDDEN, tl.float32))
        else:
            tl.store(out_ptr + row * D + d, tl.zeros((DP,), out_ptr.dtype.element_ty), mask=d < D)
            tl.store(lse_ptr + row, tl.full((1,), HIDDEN, tl.float32))


@triton.jit(
    do_not_specialize=["table_stride", "max_seqlen_q", "num_kv_heads", "num_seqs", "num_blocks", "num_splits", "num_rows", "window"]
)
def portable_kernel(
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
            tl.store(lse_ptr + offset, HIDDEN, mask=real)
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
    scale_log2 = tl.abs(softmax_scale) * LOG2E
    q = tl.where(softmax_scale < 0, -q, q)
    # Above zero, so that -inf keeps its meaning: scores this small are zero whatever the factor.
    factor = tl.maximum(shrink * scale_log2, 1e-25)
    mean_score = tl.zeros_like(factor)  # to base 2, as all scores here
    if k_mean_ptr is not None:
        k_mean = tl.load(k_mean_ptr + kv_head * D + d, mask=d < D, other=0.0)
        mean_score = tl.sum(q * k_mean[None, :], 1) * scale_log2
    q = (q * grow[:, None]).to(tl.float16)
    cap = softcap * LOG2E
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
        m = tl.full((WARPS, ROWS), UNSEEN, tl.float32)
        factor = factor[None, :]
        shift = shift[None, :]
        see_from = see_from[None, :, None]
        see_to = see_to[None, :, None]
    else:
        acc = tl.zeros((ROWS, DP), tl.float32)
        denom = tl.zeros((ROWS,), tl.float32)
        m = tl.full((ROWS,), UNSEEN, tl.float32)
        see_from = see_from[:, None]
        see_to = see_to[:, None]
    unit = tl.full((), 1.0, tl.float32)
    table_ptr += seq.to(tl.int64) * table_stride
    HAS_START: tl.constexpr = WINDOW or leftpad_ptr is not None
    if WARPS > 1:
        # One loop: a mask over a few rows costs less than filling the pipeline twice.
        acc, denom, m, unit = add_tiles(
            acc, denom, m, unit, q, factor, shift, cap, see_from, see_to, pool_ptr, table_ptr, num_kv_heads, kv_head, first_tile,
            last_tile, HAS_START, True, OPTIONS,
        )  # fmt: skip
    else:
        all_last = tl.minimum(tl.maximum(all_end // TILE, first_tile), last_tile)
        all_first = first_tile
        if HAS_START:
            all_first = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(all_begin, 0), TILE), first_tile), last_tile)
            all_last = tl.maximum(all_last, all_first)
            acc, denom, m, unit = add_tiles(
                acc, denom, m, unit, q, factor, shift, cap, see_from, see_to, pool_ptr, table_ptr, num_kv_heads, kv_head, first_tile,
                all_first, True, True, OPTIONS,
            )  # fmt: skip
        acc, denom, m, unit = add_tiles(
            acc, denom, m, unit, q, factor, shift, cap, see_from, see_to, pool_ptr, table_ptr, num_kv_heads, kv_head, all_first,
            all_last, False, False, OPTIONS,
        )  # fmt: skip
        acc, denom, m, unit = add_tiles(
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
    lse = tl.where(nothing, HIDDEN, tl.log2(denom) + (m - WEIGHT_BITS))
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
        share, lse = share_and_lse(lse, mean_score, sinks_ptr, head)
        out = round_to(out * share[:, None], out_ptr.dtype.element_ty, OPTIONS.native)
        tl.store(out_ptr + offset[:, None] * D + d[None, :], out, mask=out_mask)
        tl.store(lse_ptr + offset, lse, mask=real)
