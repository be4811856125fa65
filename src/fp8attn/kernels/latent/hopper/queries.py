"""The kernel before attention: it rotates the queries and rounds them to INT8 digits, with a factor for each row."""

from __future__ import annotations

from ...common import LOG2E
from ...gluon import gdc_launch_dependents, gdc_wait, gl, gluon, mma_v2
from ...prefill.queries import hadamard_blocks, larger, largest_magnitude
from ...rotation import HIGH_SIGNS, negative_in_step
from . import plan

SMALLEST = gl.constexpr(2.0**-60)  # a row of smaller values is rounded as if this were its largest
ROUND = gl.constexpr(1.5 * 2**23)  # a sum with it has the bits of this number plus the rounded integer
ROUND_BITS = gl.constexpr(0x4B400000)
BLOCK = gl.constexpr(plan.MAX_BLOCK)  # channels of a factor, of the rotation, and of a warp
MOST_ROPE = gl.constexpr(32768.0)  # of a query's RoPE part in FP16
N = gl.constexpr(plan.ROUNDED)  # rows of a program


@gluon.jit(do_not_specialize=["parts", "num_seqs", "max_q", "row_tiles"])  # strides: for wide loads
def latent_queries_kernel(q_ptr, stride_t, stride_h, bounds_ptr, mean_ptr, factor_ptr, codes_ptr, rope_ptr, numbers_ptr,
                          parts, num_seqs, max_q, row_tiles, scale, OPTIONS: gl.constexpr):  # fmt: skip
    """Rounds 16 rows `[rank + rope]` a program. A score is the integer product times the token's scale plus the RoPE
    product, times the row's factor: an exponent of two.

    One unit serves both parts of a row. It is the largest magnitude of the latent part by 127 or 127 * 128, or more if
    the RoPE part would not fit into FP16. A warp has a block of the rotation, of which the tensor core computes 16
    channels: its products with 1 and -1 are exact.
    """
    WARPS: gl.constexpr = gl.num_warps()
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, MMA))
    ROWS: gl.constexpr = OPTIONS.rows
    ROPE_IN_CODES: gl.constexpr = OPTIONS.rope > 0 and not OPTIONS.rope_in_16_bits
    TOP: gl.constexpr = 127.0 if OPTIONS.digits == 1 else 127.0 * 128
    k = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, RIGHT)))[None, :, None]
    negative = negative_in_step(k, gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, RIGHT)))[None, None, :])
    same = gl.zeros([WARPS, 1, 1], gl.int32, RIGHT)
    plus = gl.where(negative + same > 0, -1.0, 1.0).to(q_ptr.dtype.element_ty)
    gdc_wait()
    # Attention may begin now: from here on, it reads tokens, and memory that launches before this one use is free.
    gdc_launch_dependents()
    HEADS: gl.constexpr = OPTIONS.heads
    # Unsigned numbers: their divisions are shorter.
    program = gl.program_id(0).to(gl.uint32)
    of_place = (row_tiles * (ROWS // N)).to(gl.uint32)
    place = (program // of_place).to(gl.int32)
    first_row = (program % of_place * N).to(gl.int32)
    seq = place // HEADS
    kv_head = place % HEADS
    q_ptr += (kv_head * OPTIONS.group).to(gl.int64) * stride_h
    query = seq * max_q
    num_q = max_q
    if OPTIONS.ragged:
        query = gl.load(bounds_ptr + seq)
        num_q = gl.load(bounds_ptr + seq + 1) - query
    LOAD: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 2, 16], [WARPS, 1, 1], [2, 1, 0])
    at, inside = _rows(first_row, query, num_q, stride_t, stride_h, OPTIONS, gl.SliceLayout(0, gl.SliceLayout(2, LOAD)))
    channel = _channels(LOAD, BLOCK)
    q = gl.load(q_ptr + at[None, :, None] + channel, mask=inside[None, :, None] & (channel >= 0), other=0.0)
    if OPTIONS.rope_in_16_bits:  # before all else, so that it does not wait for memory once more
        FLAT: gl.constexpr = gl.BlockedLayout([1, 2], [2, 16], [WARPS, 1], [1, 0])
        rope_at, rope_inside = _rows(
            first_row, query, num_q, stride_t, stride_h, OPTIONS, gl.SliceLayout(1, FLAT)
        )  # fmt: skip
        rope_channel = gl.arange(0, OPTIONS.rope, gl.SliceLayout(0, FLAT))[None, :]
        rope_at = rope_at[:, None] + OPTIONS.rank + rope_channel
        rope = gl.load(q_ptr + rope_at, mask=rope_inside[:, None] & (rope_channel >= 0), other=0.0).to(gl.float32)
    # Of a row's block: what it is multiplied by when it is rotated.
    size = gl.full([WARPS, N], BLOCK**-0.5, gl.float32, gl.SliceLayout(2, MMA))
    rope_size = size
    if factor_ptr is not None:
        warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, MMA)))[:, None]
        size *= gl.load(factor_ptr + kv_head * WARPS + warp)
    rotated = _rotate(q, plus, MMA)
    largest = largest_magnitude(rotated) * size
    if ROPE_IN_CODES:  # one block, which every warp computes
        gl.static_assert(OPTIONS.rope == BLOCK)
        rope_channel = _channels(LOAD, 0)
        to_load = inside[None, :, None] & (rope_channel >= 0)
        rope = gl.load(q_ptr + at[None, :, None] + OPTIONS.rank + rope_channel, mask=to_load, other=0.0)
        rotated_rope = _rotate(rope, plus, MMA)
        largest = larger(largest, largest_magnitude(rotated_rope) * rope_size)
    largest = larger(gl.reduce(largest, 0, larger), SMALLEST)
    if OPTIONS.rope_in_16_bits:
        rope_largest = gl.reduce(gl.abs(rope), 1, larger) * (TOP / MOST_ROPE)
        largest = larger(largest, gl.convert_layout(rope_largest, ROW))
    inverse = gl.where(scale < 0, -TOP, TOP) / largest  # the sign of the scale is the queries'
    factor = larger(gl.abs(scale) * LOG2E * largest / TOP, 1e-37)  # times a hidden score it is no NaN
    row = first_row + gl.arange(0, N, ROW)
    factors_ptr = numbers_ptr + 2 * parts
    gl.store(factors_ptr + place * row_tiles * ROWS + row, factor)
    if mean_ptr is not None:
        scores_ptr = factors_ptr + num_seqs * HEADS * row_tiles * ROWS + (query * HEADS + kv_head) * OPTIONS.group
        mean = gl.load(mean_ptr + kv_head * OPTIONS.rank + channel)
        score = gl.convert_layout(gl.sum(gl.sum(q.to(gl.float32) * mean, 2), 0) * (scale * LOG2E), ROW)
        result = row + row // OPTIONS.group * ((HEADS - 1) * OPTIONS.group)  # rows of the output have all KV heads
        gl.store(scores_ptr + result, score, mask=row < num_q * OPTIONS.group)
    high, low = _digits(rotated, size * inverse[None, :], OPTIONS)
    STORE: gl.constexpr = gl.BlockedLayout([1, 1, 16], [1, 4, 8], [WARPS, 1, 1], [2, 1, 0])
    stored = first_row + gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, STORE)))
    stored = _stored(place * row_tiles, stored, OPTIONS)[None, :, None]
    to = codes_ptr + stored * OPTIONS.rank + _channels(STORE, BLOCK)
    gl.store(to, gl.convert_layout(_together(high), STORE))
    if OPTIONS.digits == 2:
        gl.store(to + 8 * OPTIONS.rank, gl.convert_layout(_together(low), STORE))
    if ROPE_IN_CODES:
        high, low = _digits(rotated_rope, rope_size * inverse[None, :], OPTIONS)
        to = rope_ptr + stored * OPTIONS.rope + _channels(STORE, 0)
        first_warp = (_channels(STORE, BLOCK) < BLOCK) & (stored >= 0)
        gl.store(to, gl.convert_layout(_together(high), STORE), mask=first_warp)
        if OPTIONS.digits == 2:
            gl.store(to + 8 * OPTIONS.rope, gl.convert_layout(_together(low), STORE), mask=first_warp)
    if OPTIONS.rope_in_16_bits:
        rope *= gl.convert_layout(inverse, gl.SliceLayout(1, FLAT))[:, None]
        row = first_row + gl.arange(0, N, gl.SliceLayout(1, FLAT))
        to = _stored(place * row_tiles, row, OPTIONS)[:, None] * OPTIONS.rope + rope_channel
        gl.store(rope_ptr + to, rope.to(gl.float16))


@gluon.jit
def _rotate(q, plus, MMA: gl.constexpr):
    """Rows `q [warps, N, 128]` rotated, without the factor `128 ** -0.5`: eight times 16 channels."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    left = gl.convert_layout(q, LEFT)
    none = gl.zeros([gl.num_warps(), N, 16], gl.float32, MMA)
    blocks = ()
    for j in gl.static_range(BLOCK // 16):
        x = mma_v2(_sixteen(left, j, LEFT), plus, none)
        blocks += (-x if (HIGH_SIGNS >> j) & 1 else x,)
    return hadamard_blocks(blocks, 1, BLOCK // 16)


@gluon.jit
def _digits(rotated, inverse, options: gl.constexpr):
    """The digits of rotated rows times `inverse [warps, N]`: eight times 16 channels of the high ones, and of the low
    ones."""
    high = ()
    low = ()
    for j in gl.static_range(BLOCK // 16):
        x = (rotated[j] * inverse[:, :, None] + ROUND).to(gl.int32, bitcast=True) - ROUND_BITS
        if options.digits == 2:
            digit = ((x + 64) & 127) - 64
            low += (digit.to(gl.int8),)
            x = (x - digit) >> 7
        high += (x.to(gl.int8),)
    return high, low


@gluon.jit
def _channels(LAYOUT: gl.constexpr, STEP: gl.constexpr):
    """`[warps, 1, 128]`: the channels of each warp's block, `STEP` after those of the warp before."""
    first = gl.arange(0, gl.num_warps(), gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None] * STEP
    return first + gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]


@gluon.jit
def _sixteen(x, j: gl.constexpr, LAYOUT: gl.constexpr):
    """Channels `[16 j, 16 j + 16)` of a left operand `[warps, N, 128]`, which are in the same threads."""
    x = x.reshape([x.shape[0], N, 2, 2, 2, 16]).permute(0, 1, 5, 4, 3, 2)
    for bit in gl.static_range(2, -1, -1):
        even, odd = x.split()
        x = odd if (j >> bit) & 1 else even
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def _together(blocks):
    """Eight times 16 channels `[warps, N, 16]` as `[warps, N, 128]`."""
    x = gl.join(
        gl.join(gl.join(blocks[0], blocks[1]), gl.join(blocks[2], blocks[3])),
        gl.join(gl.join(blocks[4], blocks[5]), gl.join(blocks[6], blocks[7])),
    )
    return x.permute(0, 1, 5, 4, 3, 2).reshape([x.shape[0], N, BLOCK])


@gluon.jit
def _rows(first_row, query, num_q, stride_t, stride_h, options: gl.constexpr, LAYOUT: gl.constexpr):
    """Where the program's rows of the queries begin, and whether they exist."""
    row = (first_row + gl.arange(0, N, LAYOUT)).to(gl.uint32)
    token = query.to(gl.int64) + row // options.group
    at = token * stride_t + (row % options.group).to(gl.int64) * stride_h
    return at, row.to(gl.int32) < num_q * options.group


@gluon.jit
def _stored(first_block, row, options: gl.constexpr):
    """The stored row of a sequence's rows. Low digits are 8 rows behind the high ones: in the same thread of a
    product."""
    if options.digits == 2:
        row += row & ~7
    return first_block.to(gl.int64) * plan.MMA_ROWS + row
