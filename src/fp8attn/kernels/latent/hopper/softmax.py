"""The weights of a tile: one warpgroup multiplies queries and tokens, and rounds the softmax's weights to INT8 digits.

Scores are exact: `INT8 x INT8` sums in INT32, and the RoPE part in FP16 if it is not in codes. A row's scores are in
units of its queries' factor, which is applied in the exponent. A weight, `exp2(score - max) * token scale`, is an
integer of its row's unit:

- one digit, 0 to 255: the unit is the tile's, its largest weight and its largest scale. `change` of a row is the unit
  of the tile before in units of this one, FP32.
- two digits, 256 high + low, both of them signed: the unit is a power of two that grows when a row's maximum or the
  tokens' scales outgrow it. `change` is the number of binades by which it grew, INT32, mostly zero.

Before rounding, four constant offsets are added in turn, so that fewer weights below a half of the unit are lost: their
loss is a bias where latents have a mean.
"""

from __future__ import annotations

from ...common import HIDDEN, HIDDEN_FINITE, UNSEEN
from ...gluon import aggregate, fence_async_shared, gdc_wait, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from ...ptx import meet_and_arrive_at, pin, uniform, uniform_zero, wait_at
from .load import (
    BLOCK,
    FIRST,
    LEFT,
    MORE,
    PAD,
    PART,
    QUERIES,
    QUERIES_EMPTY,
    ROWS,
    SUMS_FULL,
    TILE,
    WEIGHTS_EMPTY,
    WEIGHTS_FULL,
    scales_of,
)

HEADROOM = gl.constexpr(1.0)  # binades between a row's maximum and its unit, with two digits
# With one digit, the lowest unit of a tile in which a row sees little: in binades below the row's maximum, times the
# scale of the tile before; and the lowest scale.
LOWER_UNIT = gl.constexpr(40.0)
LOWER_SCALE = gl.constexpr(2.0**-40)
SMALLEST_SCALE = gl.constexpr(2.0**-100)

# A weight times a factor is added to 2^15 + 1/2 plus an offset of -3/8, 1/8, -1/8 or 3/8, in turn. The sum has 8 bits
# behind the point, so the integer is in bits 8 to 22. (Two offsets are 2^-8 less: the sum is rounded to nearest before
# these bits are cut off.)
# Four such integers as bytes, and the sum of the bytes (in the first of four numbers).
ONE_DIGIT = gl.constexpr("""{ .reg .f32 x; .reg .b32 a, b, m, n;
fma.rn.f32 x, $5, $9, 0f4700001F; mov.b32 m, x; fma.rn.f32 x, $6, $10, 0f470000A0; mov.b32 n, x;
prmt.b32 a, m, n, 0x0051;
fma.rn.f32 x, $7, $11, 0f47000060; mov.b32 m, x; fma.rn.f32 x, $8, $12, 0f470000DF; mov.b32 n, x;
prmt.b32 b, m, n, 0x0051;
prmt.b32 a, a, b, 0x5410; mov.b32 $0, a; dp4a.u32.u32 $1, a, 0x01010101, 0;
mov.b32 $2, 0; mov.b32 $3, 0; mov.b32 $4, 0; }""")
# Four such integers as high and low bytes, both of them signed.
TWO_DIGITS = gl.constexpr("""{ .reg .f32 x; .reg .b32 a, b, c, d, m, n;
fma.rn.f32 x, $2, $6, 0f4700001F; mov.b32 m, x; fma.rn.f32 x, $3, $7, 0f470000A0; mov.b32 n, x;
prmt.b32 a, m, n, 0x0051; add.u32 m, m, 0x8000; add.u32 n, n, 0x8000; prmt.b32 c, m, n, 0x0062;
fma.rn.f32 x, $4, $8, 0f47000060; mov.b32 m, x; fma.rn.f32 x, $5, $9, 0f470000DF; mov.b32 n, x;
prmt.b32 b, m, n, 0x0051; add.u32 m, m, 0x8000; add.u32 n, n, 0x8000; prmt.b32 d, m, n, 0x0062;
prmt.b32 $0, c, d, 0x5410; prmt.b32 $1, a, b, 0x5410; }""")
ANY = gl.constexpr("{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.any.pred p, p, -1; selp.s32 $0, 1, 0, p; }")


@gluon.constexpr_function
def _largest_weight(digits):
    """As an integer."""
    return 255.0 if digits == 1 else 127.0 * 256 + 127


@gluon.constexpr_function
def scores_layout(rows):
    """Of `[rows, 64]`, as the product returns them. The two digits of a row are in one thread, which then has one."""
    tokens, lanes = [[0, 8], [0, 16], [0, 32]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    if rows == 64:
        return gl.DistributedLinearLayout([[0, 1], [8, 0], *tokens], lanes, [[16, 0], [32, 0]], [], [64, 64])
    return gl.DistributedLinearLayout([[0, 1], *tokens], lanes, [[8, 0], [16, 0]], [], [32, 64])


@gluon.constexpr_function
def weights_layout(rows):
    """Of `[rows, 64]` in the order of positions: token bits t5 t4 t2 t1 t3 t0, as `page_layout.V_ORDER`."""
    tokens, lanes = [[0, 16], [0, 32]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    if rows == 64:
        return gl.DistributedLinearLayout([[0, 1], [0, 2], [8, 0], *tokens], lanes, [[16, 0], [32, 0]], [], [64, 64])
    return gl.DistributedLinearLayout([[0, 1], [0, 2], *tokens], lanes, [[8, 0], [16, 0]], [], [32, 64])


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _any(x):
    """Whether `x` holds in some row of the warp."""
    return gl.inline_asm_elementwise(ANY, "=r,r", [x.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1) != 0


@gluon.jit
def _in_order(x, options: gl.constexpr):
    """Values `[rows, 64]` of the scores' layout in that of the weights. No data move."""
    ROWS_: gl.constexpr = options.rows
    x = x.reshape([ROWS_, 4, 2, 4, 2]).permute(0, 1, 3, 2, 4).reshape([ROWS_, TILE])
    return gl.convert_layout(x, weights_layout(ROWS_), assert_trivial=True)


@gluon.jit
def _multiply(memory, tile, options: gl.constexpr):
    """Starts the products of the queries with a tile: those of the latents, and of the RoPE part."""
    stage = uniform(memory.stage(tile))
    memory.wait_tile(tile)
    # ptxas: else it computes the descriptors of 20 products before the loop, and moves them from threads' registers.
    zero_here = uniform_zero()
    zero = gl.zeros([64, TILE], gl.int32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 32]))
    s_rope = zero
    if options.rope_in_16_bits:
        s_rope = gl.zeros([64, TILE], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16]))
        keys = memory.rope.index(stage).permute([1, 0])
        s_rope = warpgroup_mma(memory.q_rope.index(zero_here), keys, s_rope, use_acc=False, is_async=True)
    s = zero
    BOTH: gl.constexpr = options.rope > 0 and not options.rope_in_16_bits  # in one sum
    if BOTH:
        keys = memory.rope.index(stage).permute([1, 0])
        s = warpgroup_mma(memory.q_rope.index(zero_here), keys, s, use_acc=False, is_async=True)
    s = warpgroup_mma(
        memory.q.index(zero_here), memory.codes.index(stage).permute([1, 0]), s, use_acc=BOTH, is_async=True
    )
    return s, s_rope


@gluon.jit
def _scores(memory, tile, s, s_rope, options: gl.constexpr):
    """Scores of a tile `[rows, 64]`, and the tokens' scales. The tile is released."""
    X: gl.constexpr = scores_layout(options.rows)
    scales = scales_of(memory, memory.stage(tile)).load(gl.SliceLayout(0, X))
    if options.rope_in_16_bits:
        s, s_rope = warpgroup_mma_wait(0, deps=[s, s_rope])
    else:
        s = warpgroup_mma_wait(0, deps=[s])
    if options.digits == 2:
        high, low = s.reshape([4, 2, 8, TILE]).permute(0, 2, 3, 1).split()
        s = (high * 128 + low).reshape([32, TILE])
        if options.rope_in_16_bits:
            s_rope, _ = s_rope.reshape([4, 2, 8, TILE]).permute(0, 2, 3, 1).split()
            s_rope = s_rope.reshape([32, TILE])
    y = gl.convert_layout(s.to(gl.float32), X, assert_trivial=True) * scales[None, :]
    if options.rope_in_16_bits:
        y += gl.convert_layout(s_rope, X, assert_trivial=True)
    y = pin(y)  # ptxas: read later, the accumulators would keep the next product from running
    memory.release_tile(tile)
    return y, scales


@gluon.jit
def _hide(memory, piece, y, scales, seen, LAST: gl.constexpr, options: gl.constexpr):
    """The scores of a tile, `HIDDEN` where a row does not see a token. `seen`: the tokens from the tile on that all
    rows see. LAST: the tile may be longer than the sequence."""
    X: gl.constexpr = scores_layout(options.rows)
    token, lane = _tokens(X)
    left = seen - lane
    if options.causal:
        first = memory.get(piece, FIRST)
        query = (first + gl.arange(0, options.rows, gl.SliceLayout(1, X))) // options.group - first // options.group
        end = left[None, :] + query[:, None]
        left += memory.get(piece, QUERIES) - 1
        end = gl.minimum(end, left[None, :])  # rows that do not exist see no more
        y = gl.where(token[None, :] < end, y, HIDDEN)
        scales = gl.where(scales == scales, scales, 0.0)  # a NaN is in the scores of the rows that see it, and no other
    else:
        y = gl.where((token < left)[None, :], y, HIDDEN)
    if LAST:
        scales = gl.where(token < left, scales, 0.0)
    return y, scales


@gluon.jit
def _hide_padding(y, scales, pad, options: gl.constexpr):
    """The scores of a tile, `HIDDEN` of its first `pad` tokens."""
    token, lane = _tokens(scores_layout(options.rows))
    seen = token >= pad - lane
    return gl.where(seen[None, :], y, HIDDEN), gl.where(seen, scales, 0.0)


@gluon.jit
def _tokens(X: gl.constexpr):
    """Tokens of a tile: constants of a thread's registers, and what to add to all of them in its lane. (As sums, they
    would be in 16 registers over the loop.)"""
    token = gl.arange(0, TILE, gl.SliceLayout(0, X))
    return token & ~6, token & 6


@gluon.jit
def _publish(memory, tile, high, low, change, options: gl.constexpr):
    """Give the weights and the rows' changes of a tile to the warps that accumulate."""
    slot = tile & 1
    wait_at(memory.at(WEIGHTS_EMPTY, slot), ((tile >> 1) & 1) ^ 1)
    change = change.to(gl.int32, bitcast=True)
    if options.digits == 2:
        memory.weights.index(slot).slice(0, 32, 0).store(high)
        memory.weights.index(slot).slice(32, 32, 0).store(low)
        memory.change.index(slot).slice(0, 32, 0).store(change)
        memory.change.index(slot).slice(32, 32, 0).store(change)
    else:
        memory.weights.index(slot).store(low)
        memory.change.index(slot).store(change)
    fence_async_shared()
    meet_and_arrive_at(memory.at(WEIGHTS_FULL, slot))


@aggregate
class RowSums:
    """What the softmax knows of each row `[rows]`. The unit of its weights is `2^unit` times `scale`."""

    unit: gl.tensor
    top: gl.tensor  # the largest score, an exponent of two
    total: gl.tensor  # of the weights, in units of 2^unit
    codes: gl.tensor | gl.constexpr  # one digit: of the rounded weights
    scale: gl.tensor  # one number
    largest: gl.tensor  # with one digit, of all `scale`


@gluon.jit
def _start(tile, options: gl.constexpr):
    ROW: gl.constexpr = gl.SliceLayout(1, scores_layout(options.rows))
    R: gl.constexpr = options.rows
    zeros = gl.full([R], 0.0, gl.float32, ROW)
    scale = tile.to(gl.float32) * 0.0 + SMALLEST_SCALE
    return RowSums(zeros + UNSEEN, zeros + UNSEEN, zeros, zeros, scale, scale)


@gluon.jit
def _weigh(memory, tile, sums, y, scales, factor, aged, options: gl.constexpr):
    """Round and publish the weights of a tile's scores. Returns the sums with it. `aged`: with two digits, every unit
    must grow."""
    ROW: gl.constexpr = sums.unit.type.layout
    LARGEST: gl.constexpr = _largest_weight(options.digits)
    largest = gl.max(scales, 0)
    tile_top = gl.max(y, 1) * factor
    top = gl.maximum(sums.top, tile_top)
    codes = sums.codes
    if options.digits == 2:
        over = _any((top > sums.unit) | (largest > sums.scale)) | aged
        unit = gl.where(over, gl.maximum(sums.unit + aged.to(gl.float32), gl.ceil(top + HEADROOM)), sums.unit)
        power = ((largest.to(gl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(gl.float32, bitcast=True)
        scale = gl.where(largest > sums.scale, power, sums.scale)
    else:
        unit = gl.maximum(tile_top, top - LOWER_UNIT)
        scale = gl.maximum(gl.maximum(largest, sums.scale * LOWER_SCALE), SMALLEST_SCALE)
    alpha = _exp2(sums.unit - unit)
    p = _exp2(y * factor[:, None] - unit[:, None])
    total = sums.total * alpha + gl.sum(p, 1)
    _, r = gl.broadcast(p, (scales * (LARGEST / scale))[None, :])
    p = _in_order(p, options)
    r = _in_order(r, options)
    if options.digits == 2:
        high, low = gl.inline_asm_elementwise(
            TWO_DIGITS, "=r,=r,f,f,f,f,f,f,f,f", [p, r], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
        )
        binades = (scale.to(gl.int32, bitcast=True) >> 23) - (sums.scale.to(gl.int32, bitcast=True) >> 23)
        change = gl.minimum(gl.minimum(unit - sums.unit, 64.0).to(gl.int32) + binades, 31)
    else:
        low, added = gl.inline_asm_elementwise(
            ONE_DIGIT, "=r,=r,=r,=r,=r,f,f,f,f,f,f,f,f", [p, r], dtype=(gl.int8, gl.int32), is_pure=True, pack=4
        )
        high = low
        change = alpha * (sums.scale / scale)
        codes = codes * change + gl.convert_layout(gl.sum(added, 1).to(gl.float32), ROW, assert_trivial=True)
    _publish(memory, tile, high, low, change, options)
    most = sums.largest
    if options.digits == 1:
        most = gl.maximum(most, scale)
    return RowSums(unit, top, total, codes, scale, most)


@gluon.jit
def _store(memory, piece, sums, lse_ptr, parts, more_ptr, next_part, options: gl.constexpr):
    """The end of a piece: the factors of its sums to the warps that accumulate; the LSE of its part, as an exponent of
    two, and with one digit its unit, so that FP16 holds it; and where the other parts of its rows are."""
    LARGEST: gl.constexpr = _largest_weight(options.digits)
    factor = gl.where(sums.total == 0.0, 0.0, sums.scale / (LARGEST * sums.total))  # a NaN stays
    slot = piece & 1
    # All numbers of the piece are read before the warps that accumulate can end it.
    row = gl.arange(0, options.rows, sums.total.type.layout)
    inside = row < memory.get(piece, ROWS)
    part = memory.get(piece, PART) + memory.parts_of(piece, row, options)
    more = memory.get(piece, MORE)
    if options.digits == 2:
        memory.sums.index(slot * 2).store(factor)
    else:
        factor /= sums.largest
        # The accumulators are numbers of subnormal bits, whose exponent this and 2^126 take away. Codes had 128 added.
        memory.sums.index(slot * 2).store(factor * 2.0**23)
        memory.sums.index(slot * 2 + 1).store(sums.codes * factor * 128.0)
    meet_and_arrive_at(memory.at(SUMS_FULL, slot))
    lse = gl.where(sums.total == 0.0, HIDDEN_FINITE, sums.unit + gl.log2(sums.total))
    gl.store(lse_ptr + part, lse, mask=inside)
    if options.digits == 1:
        gl.store(lse_ptr + parts + part, sums.largest + lse * 0.0, mask=inside)
    if more >= 0:
        gl.store(more_ptr + 2 * part, next_part + row, mask=inside)
        gl.store(more_ptr + 2 * part + 1, more + row * 0, mask=inside)


@gluon.jit
def weigh(memory, lse_ptr, parts, more_ptr, next_part, options: gl.constexpr):
    """The warpgroup that computes weights. `parts`: the number of rows of partial results; `next_part`: the first that
    other ranges have of the sequence which ends after this CTA's range."""
    ROW: gl.constexpr = gl.SliceLayout(1, scores_layout(options.rows))
    row = gl.arange(0, options.rows, ROW)
    gdc_wait()
    piece = 0
    tile = 0
    tiles = memory.tiles_of(piece)
    while tiles >= 0:
        factor = gl.load(lse_ptr + 2 * parts + memory.get(piece, BLOCK) * options.rows + row)
        seen = memory.get(piece, LEFT)
        if options.causal:
            seen -= memory.get(piece, QUERIES) - 1
        sums = _start(tile, options)
        pad = seen * 0
        if options.leftpad:
            pad = memory.get(piece, PAD)
        if tiles > 0:
            s, s_rope = _multiply(memory, tile, options)
            # The next tile's product runs while weights are computed. Behind the last tile there is none: it is behind
            # the loop. (ptxas: with a branch around the product, it serializes all.)
            for i in range(tiles - 1):
                y, scales = _scores(memory, tile, s, s_rope, options)
                if options.causal:
                    if seen < TILE:
                        y, scales = _hide(memory, piece, y, scales, seen, False, options)
                    seen -= TILE
                if options.leftpad:
                    if pad > 0:
                        y, scales = _hide_padding(y, scales, pad, options)
                    pad -= TILE
                s, s_rope = _multiply(memory, tile + 1, options)
                aged = (i & (options.most_tiles - 1)) == options.most_tiles - 1
                sums = _weigh(memory, tile, sums, y, scales, factor, aged, options)
                tile += 1
            y, scales = _scores(memory, tile, s, s_rope, options)
            meet_and_arrive_at(memory.at(QUERIES_EMPTY, 0))
            if not options.causal:
                seen -= (tiles - 1) * TILE
            y, scales = _hide(memory, piece, y, scales, seen, True, options)
            if options.leftpad:
                y, scales = _hide_padding(y, scales, pad, options)
            sums = _weigh(memory, tile, sums, y, scales, factor, tile < 0, options)
            tile += 1
        else:
            meet_and_arrive_at(memory.at(QUERIES_EMPTY, 0))
        _store(memory, piece, sums, lse_ptr, parts, more_ptr, next_part, options)
        piece += 1
        tiles = memory.tiles_of(piece)
