"""Device code: absorbed queries as the operand of products, and attention of a block of rows to a part of the keys."""

import triton
import triton.language as tl

from ...formats import latent
from ..codec import from_int8
from ..common import HIDDEN, LOG2E, PAGE, UNSEEN, new_tokens
from ..rotation import hadamard

_BLOCK = tl.constexpr(latent.BLOCK)
_Q_BITS = tl.constexpr(8)  # a row of Q is scaled so that its largest value is in [2^8, 2^9)
_WEIGHT = tl.constexpr(2.0**15)  # weights are multiplied by it: at most 32768 in FP16
_SHRINK = tl.constexpr(2.0**-24)  # how much smaller the unit of a tile may be than that of the tile before it
_LEAST = tl.constexpr(2.0**-60)  # the first unit


@triton.jit(do_not_specialize=["num_rows", "num_q_heads"])
def queries_kernel(
    q_ptr, mean_ptr, factor_ptr, out_ptr, factors_ptr, q_stride_t, q_stride_h, num_rows, num_q_heads, softmax_scale,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """Rotate absorbed queries and round them to FP16 `[num_rows, rank + rope]`, with the factors of their scores, which
    become exponents of two, and with the scores of the mean. A program has some rows.
    """
    RANK: tl.constexpr = OPTIONS.rank
    ROPE: tl.constexpr = OPTIONS.rope
    row = tl.program_id(0) * OPTIONS.rows + tl.arange(0, OPTIONS.rows)
    real = row < num_rows
    row = tl.minimum(row, num_rows - 1).to(tl.int64)
    kv_head = (row % num_q_heads // OPTIONS.group)[:, None]
    q_ptr += (row // num_q_heads * q_stride_t + row % num_q_heads * q_stride_h)[:, None]
    out_ptr += (row * (RANK + ROPE))[:, None]
    c = tl.arange(0, RANK)[None, :]
    scale_log2 = tl.abs(softmax_scale) * LOG2E
    negative = softmax_scale < 0
    q = tl.load(q_ptr + c).to(tl.float32)
    q = tl.where(negative, -q, q)
    mean_score = tl.zeros((OPTIONS.rows,), tl.float32)
    if mean_ptr is not None:
        mean_score = tl.sum(q * tl.load(mean_ptr + kv_head * RANK + c), 1) * scale_log2
    if factor_ptr is not None:
        q *= tl.load(factor_ptr + kv_head * (RANK // _BLOCK) + c // _BLOCK)
    q = hadamard(q, RANK)
    largest = tl.max(tl.abs(q), 1)
    if ROPE > 0:
        i = tl.arange(0, ROPE)[None, :]
        key = tl.load(q_ptr + RANK + i).to(tl.float32)
        key = tl.where(negative, -key, key)
        if OPTIONS.rope_in_codes:
            key = hadamard(key, ROPE)
        largest = tl.maximum(largest, tl.max(tl.abs(key), 1))
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, _Q_BITS + 1), 254)
    grow = ((254 - exponent + _Q_BITS) << 23).to(tl.float32, bitcast=True)[:, None]
    shrink = ((exponent - _Q_BITS) << 23).to(tl.float32, bitcast=True)
    tl.store(out_ptr + c, (q * grow).to(tl.float16), mask=real[:, None])
    if ROPE > 0:
        tl.store(out_ptr + RANK + i, (key * grow).to(tl.float16), mask=real[:, None])
    # Above zero, so that -inf keeps its meaning: scores this small are zero whatever the factor.
    tl.store(factors_ptr + row, tl.maximum(shrink * scale_log2, 1e-25), mask=real)
    tl.store(factors_ptr + num_rows + row, mean_score, mask=real)


@triton.jit(
    do_not_specialize=[
        "table_stride", "max_seqlen_q", "num_kv_heads", "blocks", "num_splits", "num_rows", "window",
    ]
)  # fmt: skip
def attention_kernel(
    q_ptr, factors_ptr, pool_ptr, table_ptr, seqlens_ptr, cu_seqlens_ptr, leftpad_ptr, out_ptr, lse_ptr,
    table_stride, max_seqlen_q, num_kv_heads, blocks, num_splits, num_rows, window, OPTIONS: tl.constexpr,
):  # fmt: skip
    """The kernel. A program has a block of rows of a sequence and KV head, and a part of the keys. It writes the sums
    of stored latents, divided by those of the weights, and their LSE to base 2, as `combine` takes them.
    """
    LAYOUT: tl.constexpr = OPTIONS.layout
    RANK: tl.constexpr = OPTIONS.rank
    ROPE: tl.constexpr = OPTIONS.rope
    ROWS: tl.constexpr = OPTIONS.rows
    TILE: tl.constexpr = OPTIONS.tile
    GROUP: tl.constexpr = OPTIONS.group
    TILES: tl.constexpr = PAGE // TILE
    program = tl.program_id(0)
    split = program % num_splits
    block = program // num_splits % blocks
    kv_head = program // num_splits // blocks % num_kv_heads
    seq = program // num_splits // blocks // num_kv_heads
    start, queries = new_tokens(cu_seqlens_ptr, seqlens_ptr, seq, max_seqlen_q, True)
    if block * ROWS >= queries * GROUP:
        return
    length = tl.load(seqlens_ptr + seq)

    row = block * ROWS + tl.arange(0, ROWS)
    real = row < queries * GROUP
    token = tl.minimum(row // GROUP, queries - 1)
    position = length - queries + token
    offset = (start + token).to(tl.int64) * (GROUP * num_kv_heads) + kv_head * GROUP + row % GROUP
    c = tl.arange(0, RANK)
    i = tl.arange(0, ROPE) if ROPE > 0 else 0
    q_ptrs = q_ptr + (offset * (RANK + ROPE))[:, None]
    q = tl.load(q_ptrs + c[None, :])
    if ROPE > 0:
        q_rope = tl.load(q_ptrs + RANK + i[None, :])
    factor = tl.load(factors_ptr + offset)

    # The keys `[first, end)` that each row sees, and those that some row sees.
    first = tl.zeros((ROWS,), tl.int32)
    end = tl.zeros((ROWS,), tl.int32) + length
    if leftpad_ptr is not None:
        first += tl.load(leftpad_ptr + seq)
    if OPTIONS.causal:
        end = tl.minimum(end, position + 1)
    if OPTIONS.window:
        first = tl.maximum(first, position - window + 1)
    any_first = tl.maximum(tl.min(first, 0), 0)
    any_end = tl.max(end, 0)
    first_tile = any_first // TILE
    tiles = tl.maximum(tl.cdiv(any_end, TILE) - first_tile, 0)
    end_tile = first_tile + (tiles * (split + 1)) // num_splits
    first_tile += (tiles * split) // num_splits

    acc = tl.zeros((ROWS, RANK), tl.float32)  # in `unit`
    denom = tl.zeros((ROWS,), tl.float32)
    m = tl.full((ROWS,), UNSEEN, tl.float32)
    unit = tl.full((), _LEAST, tl.float32)
    table_ptr += seq.to(tl.int64) * table_stride
    for tile in range(first_tile, end_tile):
        page = tl.load(table_ptr + tile // TILES).to(tl.int64)
        page_ptr = pool_ptr + (page * num_kv_heads + kv_head) * LAYOUT.nbytes
        place = (tile * TILE - tile // TILES * PAGE) + tl.arange(0, TILE)
        key = tile * TILE + tl.arange(0, TILE)
        codes = from_int8(tl.load(page_ptr + LAYOUT.k_offset + place[:, None] * RANK + c[None, :]))
        scale = tl.load((page_ptr + LAYOUT.header_offset).to(tl.pointer_type(tl.float32)) + place)
        s = tl.dot(q, tl.trans(codes))
        if OPTIONS.rope_in_codes:
            rope = from_int8(tl.load(page_ptr + LAYOUT.v_offset + place[:, None] * ROPE + i[None, :]))
            s = tl.dot(q_rope, tl.trans(rope), s)
        s *= scale[None, :]
        if ROPE > 0 and not OPTIONS.rope_in_codes:
            rope_ptrs = (page_ptr + LAYOUT.v_offset).to(tl.pointer_type(tl.float16)) + place[:, None] * ROPE
            s += tl.dot(q_rope, tl.trans(tl.load(rope_ptrs + i[None, :])))
        # What is past the end may be NaN, and so may the scale of a token that only some rows see.
        seen = (key[None, :] >= first[:, None]) & (key[None, :] < end[:, None])
        s = tl.where(seen, s * factor[:, None], HIDDEN)
        new_m = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - new_m[:, None])
        alpha = tl.exp2(m - new_m)
        denom = denom * alpha + tl.sum(p, 1)
        largest = tl.max(tl.where((scale == scale) & (key < any_end) & (key >= any_first), scale, 0.0), 0)
        new_unit = tl.maximum(largest, unit * _SHRINK)
        weights = tl.where(seen, p * (scale * (_WEIGHT / new_unit))[None, :], 0.0).to(tl.float16)
        # As in `portable`: a tensor core truncates when it accumulates.
        rescale = tl.broadcast_to((alpha * (unit / new_unit))[:, None], acc.shape)
        acc = tl.fma(acc, rescale, tl.dot(weights, codes))
        unit = new_unit
        m = new_m

    saw = real & (denom != 0.0)
    out = acc * (unit / _WEIGHT / tl.where(denom == 0.0, 1.0, denom))[:, None]
    at = split.to(tl.int64) * num_rows + offset
    tl.store(out_ptr + at[:, None] * RANK + c[None, :], out, mask=saw[:, None])
    tl.store(lse_ptr + at, m + tl.log2(denom), mask=saw)
    mean_score = tl.load(factors_ptr + num_rows + offset)
    tl.store(lse_ptr + num_splits.to(tl.int64) * num_rows + at, mean_score, mask=saw)
