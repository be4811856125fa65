"""Device code: the loop over tiles of keys, and how pages are read."""

import triton
import triton.language as tl

from ..codec import from_e4m3, to_fp16
from ..common import GROUP, HIDDEN, K_SCALE_WORD, PAGE, V_SCALE_WORD, header_of, slot_of

WEIGHT_BITS = tl.constexpr(15)  # P is multiplied by 2^15: at most 32768 in FP16


@triton.jit
def _scales(page_ptr, mask, LAYOUT: tl.constexpr):
    """k_scale and v_scale of a page, or 1 if `mask` is False."""
    header_ptr = header_of(page_ptr, LAYOUT)
    k_scale = tl.load(header_ptr + K_SCALE_WORD, mask=mask, other=1.0)
    return k_scale, tl.load(header_ptr + V_SCALE_WORD, mask=mask, other=1.0)


@triton.jit
def _add_values(acc, p, rescale, v_ptrs, v_mask, OPTIONS: tl.constexpr):
    """`acc * rescale + P V`, for each part of the channels. `v_ptrs` are those of the first part."""
    if OPTIONS.block.parts == 1:
        return (_add_part(acc[0], p, rescale, v_ptrs, v_mask, OPTIONS),)
    else:
        low = _add_part(acc[0], p, rescale, v_ptrs, v_mask, OPTIONS)
        return low, _add_part(acc[1], p, rescale, v_ptrs + OPTIONS.channels * GROUP, v_mask, OPTIONS)


@triton.jit
def _add_part(acc, p, rescale, v_ptrs, v_mask, OPTIONS: tl.constexpr):
    """`acc * rescale + P V`, for the channels of `acc`. V is read `[groups, channel and token in a group]`."""
    TILE: tl.constexpr = OPTIONS.block.tile
    WARPS: tl.constexpr = OPTIONS.block.key_warps
    CHANNELS: tl.constexpr = OPTIONS.channels
    rescale = tl.broadcast_to(tl.expand_dims(rescale, -1), acc.shape)
    v = tl.load(v_ptrs) if OPTIONS.spec.k_dim == OPTIONS.width else tl.load(v_ptrs, mask=v_mask, other=0)
    v = tl.permute(tl.reshape(from_e4m3(v, OPTIONS.native), (TILE // GROUP, CHANNELS, GROUP)), (0, 2, 1))
    v = tl.reshape(v, (WARPS, TILE // WARPS, CHANNELS) if WARPS > 1 else (TILE, CHANNELS))
    # A tensor core truncates when it accumulates, always towards zero; an FP32 FMA per tile rounds. (The compiler would
    # turn a product and a sum into an accumulation of the tensor core.)
    return tl.fma(acc, rescale, tl.dot(p, v))


@triton.jit
def add_tiles(
    state,
    queries,
    row_keys,
    pages,
    first_tile,
    end_tile,
    MASK_START: tl.constexpr,
    MASK_END: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """Add the keys of tiles `[first_tile, end_tile)` to the softmax state of a block of rows, and return it.

    If several warps split the keys, every tensor has a first axis of warps. Each warp has a part of the tile's keys and
    its own state.

    Args:
        state: `acc` in units of `v_unit`, a tuple of parts of the channels; denominators, maxima, and `v_unit`.
        queries: `q`; the factors of scores; what is added to them before the softcap; the cap.
        row_keys: the keys `[first, end)` that each row sees.
        pages: the pool, the sequence's row of the page table, the number of KV heads, the head, and the first channel
            of V.
        MASK_START, MASK_END: some row does not see some key on the left, or on the right.
    """
    acc, denom, m, v_unit = state
    q, factor, shift, cap = queries
    row_first, row_end = row_keys
    pool_ptr, table_ptr, num_kv_heads, kv_head, channel = pages
    CODEC: tl.constexpr = OPTIONS.spec.k
    LAYOUT: tl.constexpr = OPTIONS.layout
    D: tl.constexpr = OPTIONS.spec.k_dim
    DP: tl.constexpr = OPTIONS.width
    TILE: tl.constexpr = OPTIONS.block.tile
    WARPS: tl.constexpr = OPTIONS.block.key_warps
    SOFTCAP: tl.constexpr = OPTIONS.softcap
    NATIVE: tl.constexpr = OPTIONS.native
    TILES: tl.constexpr = PAGE // TILE
    AXIS: tl.constexpr = 2 if WARPS > 1 else 1  # of keys
    d = tl.arange(0, DP)
    # Columns are V's positions, so K's tokens are read in V's order: `common.v_token` in each group.
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
    in_group = tl.arange(0, OPTIONS.channels * GROUP)[None, :]  # [channel, token] of a group, in memory's order
    v_offsets = tl.arange(0, TILE // GROUP)[:, None] * (D * GROUP) + in_group
    v_mask = in_group < D * GROUP

    # A page's number and scales are loaded one tile ahead, because the pipeline does not hide their latency.
    some = first_tile < end_tile
    page = tl.load(table_ptr + first_tile // TILES, mask=some, other=0)
    page_ptr = slot_of(pool_ptr, page, num_kv_heads, kv_head, LAYOUT)
    k_scale, v_scale = _scales(page_ptr, some, LAYOUT)
    v_ratio = v_unit / v_scale
    for tile in range(first_tile, end_tile):
        tile_ptr = page_ptr + (tile * TILE - tile // TILES * PAGE) * D
        k_ptrs = tile_ptr + LAYOUT.k_offset + k_offsets
        v_ptrs = tile_ptr + (LAYOUT.v_offset + channel * GROUP) + v_offsets
        page = tl.load(table_ptr + tl.minimum(tile + 1, end_tile - 1) // TILES)
        page_ptr = slot_of(pool_ptr, page, num_kv_heads, kv_head, LAYOUT)
        next_k_scale, next_v_scale = _scales(page_ptr, True, LAYOUT)

        k = tl.load(k_ptrs) if D == DP else tl.load(k_ptrs, mask=k_mask, other=0)
        k = to_fp16(k, CODEC, NATIVE)
        s = tl.dot(q, tl.permute(k, (0, 2, 1)) if WARPS > 1 else tl.trans(k))
        f = factor * k_scale
        if SOFTCAP:
            # cap * tanh(x), from exp2(2 x log2(e)), whose factor is in f and shift
            s = cap - 2.0 * cap / (tl.exp2(s * tl.expand_dims(f, -1) + tl.expand_dims(shift, -1)) + 1.0)
        elif not CODEC.has_nan and (MASK_START or MASK_END):
            # A page with a NaN in a token has a NaN scale (`reference.append`). Only rows that see a key of the page
            # become NaN.
            s += k_scale - k_scale
            f = tl.where(k_scale == k_scale, f, 1.0)
        if MASK_START and MASK_END:
            s = tl.where((tile * TILE + key < row_end) & (tile * TILE + key >= row_first), s, HIDDEN)
        elif MASK_END:
            s = tl.where(tile * TILE + key < row_end, s, HIDDEN)
        elif MASK_START:
            s = tl.where(tile * TILE + key >= row_first, s, HIDDEN)
        largest = tl.max(s, AXIS)
        if not SOFTCAP:
            largest = largest * f
        new_m = tl.maximum(m, largest)
        origin = tl.expand_dims(new_m - WEIGHT_BITS, -1)
        p = tl.exp2((s if SOFTCAP else s * tl.expand_dims(f, -1)) - origin).to(tl.float16)
        alpha = tl.exp2(m - new_m)
        denom = denom * alpha + tl.sum(p.to(tl.float32), AXIS)
        acc = _add_values(acc, p, alpha * v_ratio, v_ptrs, v_mask, OPTIONS)
        m = new_m
        v_ratio = v_scale / next_v_scale
        k_scale = next_k_scale
        v_scale = next_v_scale
    return acc, denom, m, tl.where(some, v_scale, v_unit)
