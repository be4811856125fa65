"""Device code: the rows of a program, the keys that they see, and their output."""

import triton
import triton.language as tl

from ..codec import round_to
from ..combine import share_and_lse
from ..common import HIDDEN, LOG2E, UNSEEN, new_tokens
from ..rotation import hadamard
from .tiles import WEIGHT_BITS, add_tiles

_Q_BITS = tl.constexpr(8)  # a row of Q is scaled so that its largest value is in [2^8, 2^9)


@triton.jit
def _clear_rest(out_ptr, lse_ptr, first, num_rows, num_splits, program, programs, OPTIONS: tl.constexpr):
    """Write zeros to the rows from `first` on, which belong to no sequence. In parts, write that they saw no key."""
    D: tl.constexpr = OPTIONS.spec.k_dim
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


@triton.jit
def _keys_of(length, first_position, last_position, leftpad_ptr, seq, window, OPTIONS: tl.constexpr):
    """Keys that some row of a block sees, `[any_first, any_end)`, and keys that every row sees, `[all_first, all_end)`.

    `first_position` and `last_position` are those of the block's first and last query.
    """
    any_first = 0
    if leftpad_ptr is not None:
        any_first = tl.load(leftpad_ptr + seq)
    all_first = any_first
    any_end = length
    all_end = length
    if OPTIONS.causal:
        any_end = tl.minimum(length, last_position + 1)
        all_end = tl.minimum(length, first_position + 1)
    if OPTIONS.window:
        all_first = tl.maximum(any_first, last_position - window + 1)
        any_first = tl.maximum(any_first, first_position - window + 1)
    return any_first, any_end, all_first, all_end


@triton.jit
def _tiles_of(any_first, any_end, split, num_splits, OPTIONS: tl.constexpr):
    """The tiles of keys `[first_tile, end_tile)` of a part of the keys; an empty part's are none."""
    TILE: tl.constexpr = OPTIONS.block.tile
    first_tile = tl.maximum(any_first, 0) // TILE
    num_tiles = tl.maximum(tl.cdiv(any_end, TILE) - first_tile, 0)
    end_tile = first_tile + num_tiles
    if OPTIONS.split:
        end_tile = first_tile + num_tiles * (split + 1) // num_splits
        first_tile += num_tiles * split // num_splits
    return first_tile, end_tile


@triton.jit
def _load_queries(
    q_ptr, q_offsets, real, k_mean_ptr, kv_head, softmax_scale, scratch_ptr, scratch_offsets, OPTIONS: tl.constexpr
):
    """A block of queries as the operand of Q K, in FP16.

    Args:
        q_offsets: `[rows]`, of the first channel of each row; those that are `real [rows]` exist.
        scratch_ptr: FP16, of a copy of all queries, in which a row begins at `scratch_offsets [rows]`. Triton has only
            operands in shared memory that were loaded, and computed ones in registers. None: registers are enough.
    Returns:
        `q [rows, width]`; the factors of its scores, which become exponents of two; and the scores of K's mean.
    """
    D: tl.constexpr = OPTIONS.spec.k_dim
    d = tl.arange(0, OPTIONS.width)
    q_mask = real[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + q_offsets[:, None] + d[None, :], mask=q_mask, other=0.0).to(tl.float32)
    if OPTIONS.rotate:
        q = hadamard(q, D)
    # factor * q16 = |softmax_scale| * log2(e) * q. q16 is q times the power of two that brings its largest value to
    # 2^8.
    exponent = tl.minimum(tl.maximum(tl.max(tl.abs(q), 1).to(tl.int32, bitcast=True) >> 23, _Q_BITS + 1), 254)
    grow = ((254 - exponent + _Q_BITS) << 23).to(tl.float32, bitcast=True)
    shrink = ((exponent - _Q_BITS) << 23).to(tl.float32, bitcast=True)
    scale_log2 = tl.abs(softmax_scale) * LOG2E
    q = tl.where(softmax_scale < 0, -q, q)
    # Above zero, so that -inf keeps its meaning: scores this small are zero whatever the factor.
    factor = tl.maximum(shrink * scale_log2, 1e-25)
    mean_score = tl.zeros_like(factor)
    if k_mean_ptr is not None:
        k_mean = tl.load(k_mean_ptr + kv_head * D + d, mask=d < D, other=0.0)
        mean_score = tl.sum(q * k_mean[None, :], 1) * scale_log2
    q = (q * grow[:, None]).to(tl.float16)
    if scratch_ptr is not None:
        scratch = scratch_ptr + scratch_offsets[:, None] + d[None, :]
        tl.store(scratch, q, mask=q_mask)
        tl.debug_barrier()
        q = tl.load(scratch, mask=q_mask, other=0.0)
    return q, factor, mean_score


@triton.jit
def _with_warps(queries, row_keys, OPTIONS: tl.constexpr):
    """The queries and keys of rows with the axes that `add_tiles` takes: of keys, and of warps if several split the
    keys.
    """
    q, factor, shift, cap = queries
    first, end = row_keys
    if OPTIONS.block.key_warps > 1:
        q = tl.broadcast_to(q[None, :, :], (OPTIONS.block.key_warps, OPTIONS.block.rows, OPTIONS.width))
        return (q, factor[None, :], shift[None, :], cap), (first[None, :, None], end[None, :, None])
    else:
        return queries, (first[:, None], end[:, None])


@triton.jit
def _attend(queries, row_keys, pages, tiles, all_keys, HAS_START: tl.constexpr, OPTIONS: tl.constexpr):
    """The sums of a block of rows over tiles of keys.

    Args:
        queries, row_keys: of `_with_warps`.
        pages: as `add_tiles` takes them.
        tiles: the tiles of `_tiles_of`.
        all_keys: the keys that all rows see, `[all_first, all_end)`.
        HAS_START: keys on the left may be hidden.
    Returns:
        `acc`, a tuple of parts `[rows, channels]`; denominators and maxima `[rows]`; and the unit of `acc`.
    """
    ROWS: tl.constexpr = OPTIONS.block.rows
    CHANNELS: tl.constexpr = OPTIONS.channels
    TILE: tl.constexpr = OPTIONS.block.tile
    WARPS: tl.constexpr = OPTIONS.block.key_warps
    first_tile, end_tile = tiles
    v_unit = tl.full((), 1.0, tl.float32)
    if WARPS > 1:
        # One loop: a mask over a few rows costs less than filling the pipeline twice.
        state = (
            (tl.zeros((WARPS, ROWS, CHANNELS), tl.float32),),
            tl.zeros((WARPS, ROWS), tl.float32),
            tl.full((WARPS, ROWS), UNSEEN, tl.float32),
            v_unit,
        )
        acc, denom, m, v_unit = add_tiles(
            state, queries, row_keys, pages, first_tile, end_tile, HAS_START, True, OPTIONS
        )
        top = tl.max(m, 0)
        weight = tl.exp2(m - top[None, :])
        denom = tl.sum(denom * weight, 0)
        return (tl.sum(acc[0] * weight[:, :, None], 0),), denom, top, v_unit
    else:
        none = tl.zeros((ROWS, CHANNELS), tl.float32)
        state = (
            (none,) if OPTIONS.block.parts == 1 else (none, none),
            tl.zeros((ROWS,), tl.float32),
            tl.full((ROWS,), UNSEEN, tl.float32),
            v_unit,
        )
        all_first, all_end = all_keys
        # All rows see all keys of the tiles `[free_tile, masked_tile)`.
        masked_tile = tl.minimum(tl.maximum(all_end // TILE, first_tile), end_tile)
        free_tile = first_tile
        if HAS_START:
            free_tile = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(all_first, 0), TILE), first_tile), end_tile)
            masked_tile = tl.maximum(masked_tile, free_tile)
            state = add_tiles(state, queries, row_keys, pages, first_tile, free_tile, True, True, OPTIONS)
        state = add_tiles(state, queries, row_keys, pages, free_tile, masked_tile, False, False, OPTIONS)
        return add_tiles(state, queries, row_keys, pages, masked_tile, end_tile, HAS_START, True, OPTIONS)


NUMBERS = (
    "table_stride", "max_seqlen_q", "num_kv_heads", "num_seqs", "num_blocks", "num_splits", "num_rows", "window",
)  # fmt: skip


@triton.jit(do_not_specialize=NUMBERS)
def portable_kernel(
    q_ptr, pool_ptr, k_mean_ptr, v_mean_ptr, table_ptr, seqlens_ptr, cu_seqlens_ptr, sinks_ptr, leftpad_ptr,
    scratch_ptr, out_ptr, lse_ptr,
    q_stride_t, q_stride_h, table_stride, max_seqlen_q, num_kv_heads, num_seqs, num_blocks, num_splits, num_rows,
    softmax_scale, softcap,
    window, OPTIONS: tl.constexpr,
):  # fmt: skip
    """The kernel. A program computes some rows of one KV head of a sequence over a part of the keys. The last programs
    clear other rows.
    """
    D: tl.constexpr = OPTIONS.spec.k_dim
    G: tl.constexpr = OPTIONS.group
    ROWS: tl.constexpr = OPTIONS.block.rows
    # The last queries see the most keys and start first.
    SHARES: tl.constexpr = OPTIONS.block.shares
    first_channel = tl.program_id(0) % SHARES * (OPTIONS.width // SHARES)
    split = tl.program_id(0) // SHARES % num_splits
    item = tl.program_id(0) // SHARES // num_splits
    block = num_blocks - 1 - item % num_blocks
    kv_head = item // num_blocks % num_kv_heads
    seq = item // num_blocks // num_kv_heads
    if cu_seqlens_ptr is not None and seq >= num_seqs:
        programs = num_seqs * num_kv_heads * num_blocks * num_splits * SHARES
        rest = tl.load(cu_seqlens_ptr + num_seqs) * (num_kv_heads * G)
        program = tl.program_id(0) - programs
        _clear_rest(out_ptr, lse_ptr, rest, num_rows, num_splits, program, tl.num_programs(0) - programs, OPTIONS)
        return
    start, q_len = new_tokens(cu_seqlens_ptr, seqlens_ptr, seq, max_seqlen_q, True)
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
    scratch_offsets = offset * D
    if OPTIONS.split:
        offset += split.to(tl.int64) * num_rows
    any_first, any_end, all_first, all_end = _keys_of(
        length, first_position, last_position, leftpad_ptr, seq, window, OPTIONS
    )
    first_tile, end_tile = _tiles_of(any_first, any_end, split, num_splits, OPTIONS)
    if OPTIONS.split and first_tile >= end_tile:
        tl.store(lse_ptr + offset, HIDDEN, mask=real)
        return

    q_offsets = (start + query).to(tl.int64) * q_stride_t + head.to(tl.int64) * q_stride_h
    q, factor, mean_score = _load_queries(
        q_ptr, q_offsets, real, k_mean_ptr, kv_head, softmax_scale, scratch_ptr, scratch_offsets, OPTIONS
    )  # fmt: skip
    cap = softcap * LOG2E
    shift = mean_score
    if OPTIONS.softcap:  # its scores include K's mean
        factor = factor * (2.0 / softcap)
        shift = shift * (2.0 / softcap)
        mean_score = tl.zeros_like(mean_score)
    first = tl.zeros_like(row) + tl.maximum(any_first, 0)
    end = tl.zeros_like(row) + length
    position = length - q_len + query
    if OPTIONS.causal:
        end = tl.minimum(end, position + 1)
    if OPTIONS.window:
        first = tl.maximum(first, position - window + 1)
    queries, row_keys = _with_warps((q, factor, shift, cap), (first, end), OPTIONS)
    table_ptr += seq.to(tl.int64) * table_stride
    pages = pool_ptr, table_ptr, num_kv_heads, kv_head, first_channel
    HAS_START: tl.constexpr = OPTIONS.window or leftpad_ptr is not None
    acc, denom, m, v_unit = _attend(
        queries, row_keys, pages, (first_tile, end_tile), (all_first, all_end), HAS_START, OPTIONS
    )

    # Rows that see nothing have denom = 0; a NaN is not 0 and stays.
    nothing = denom == 0.0
    lse = tl.where(nothing, HIDDEN, tl.log2(denom) + (m - WEIGHT_BITS))
    inverse = v_unit / tl.where(nothing, 1.0, denom)
    share = inverse  # of its type; parts have no share
    if OPTIONS.split:
        tl.store(lse_ptr + offset, lse, mask=real)
        tl.store(lse_ptr + offset + num_splits.to(tl.int64) * num_rows, mean_score, mask=real)
    else:
        share, lse = share_and_lse(lse, mean_score, sinks_ptr, head)
        tl.store(lse_ptr + offset, lse, mask=real)
    PARTS: tl.constexpr = OPTIONS.block.parts
    CHANNELS: tl.constexpr = OPTIONS.channels
    for part in tl.static_range(PARTS):
        channel = first_channel + part * CHANNELS + tl.arange(0, CHANNELS)
        out = acc[part] * inverse[:, None]
        if v_mean_ptr is not None:
            out += tl.load(v_mean_ptr + kv_head * D + channel, mask=channel < D, other=0.0)[None, :]
        out = tl.where(nothing[:, None], 0.0, out)
        out_mask = real[:, None] & (channel < D)[None, :]
        out_ptrs = out_ptr + offset[:, None] * D + channel[None, :]
        if OPTIONS.split:
            tl.store(out_ptrs, out, mask=out_mask & (nothing == 0)[:, None])
        else:
            tl.store(out_ptrs, round_to(out * share[:, None], out_ptr.dtype.element_ty, OPTIONS.native), mask=out_mask)
