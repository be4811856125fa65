"""The online softmax of a tile: scores, the mask, weights, and their sums."""

from __future__ import annotations

from ..common import HIDDEN, LOG2E, UNSEEN
from ..gluon import gl, gluon, warpgroup_mma, warpgroup_mma_wait
from ..ptx import MAGIC, MAGIC_BITS, exp2, fill_magic, logistic
from .items import LEFT
from .registers import accumulator, join, scores_layout, split

WEIGHT_BITS = gl.constexpr(8.0)  # weights are stored as 2^8 p, because E4M3 keeps 17 binades below this


# Scores


@gluon.jit
def begin_scores(q, k, m, options: gl.constexpr):
    """Begin Q K. `m` are the rows' maxima so far; only the fact that they are finite is used."""
    SCORES: gl.constexpr = scores_layout(options)
    if k.dtype == gl.int8:
        zero, _ = gl.broadcast((m * 0.0)[:, None], gl.zeros([options.rows, options.tile], gl.float32, SCORES))
        pieces = split(zero, options.tile // 32)  # of 16 registers
        s = ()
        for i in gl.static_range(len(pieces)):
            s += (fill_magic(pieces[i], i),)
        s = gl.convert_layout(join(s), SCORES, assert_trivial=True)
        s = multiply_channels(q, k, s, True, options)
    else:
        s = multiply_channels(q, k, gl.zeros([options.rows, options.tile], gl.float32, SCORES), False, options)
    return s


@gluon.jit
def multiply_channels(q, k, s, ACCUMULATE: gl.constexpr, options: gl.constexpr):
    """Begin `s` (+)= Q K. The channels of head_dim 192 are 128 and 64, because Triton's sizes are powers of two; zeros
    pad them to 256.
    """
    if options.head_dim == 192:
        s = warpgroup_mma(q.slice(0, 128, 1), k.slice(0, 128, 1).permute([1, 0]), s, use_acc=ACCUMULATE, is_async=True)
        s = warpgroup_mma(q.slice(128, 64, 1), k.slice(128, 64, 1).permute([1, 0]), s, use_acc=True, is_async=True)
    else:
        s = warpgroup_mma(q, k.permute([1, 0]), s, use_acc=ACCUMULATE, is_async=True)
    return s


@gluon.jit
def end_scores(s):
    """Wait for Q K, and return it in FP32; for INT8 keys it is `MAGIC + s`."""
    s = warpgroup_mma_wait(0, deps=[s])
    if s.dtype == gl.int32:
        s = s.to(gl.float32, bitcast=True)
    return s


@gluon.jit
def scores_of_both(q, rest, k, options: gl.constexpr):
    """Compute Q K in FP32, for Q and its rounding error together; for INT8 keys it is `MAGIC + s`, as in
    `end_scores`.
    """
    SCORES: gl.constexpr = scores_layout(options)
    if k.dtype == gl.int8:
        # The rest counts 1 / 256. Its product is rounded down to an integer: an error of at most one product of two
        # codes, far below what K's rounding costs, and the same on average for all keys.
        s = multiply_channels(rest, k, gl.zeros([options.rows, options.tile], gl.int32, SCORES), False, options)
        s = (warpgroup_mma_wait(0, deps=[s]) >> 8) + MAGIC_BITS
        s = warpgroup_mma_wait(0, deps=[multiply_channels(q, k, s, True, options)])
        s = s.to(gl.float32, bitcast=True)
    else:
        s = multiply_channels(rest, k, gl.zeros([options.rows, options.tile], gl.float32, SCORES), False, options)
        s = warpgroup_mma_wait(0, deps=[multiply_channels(q, k, s, True, options)])
    return s


@gluon.jit
def mask_scores(s, factor, rows, tile, options: gl.constexpr, MASK: gl.constexpr, INT: gl.constexpr):
    """Scores after the cap (then in powers of two, the factor and the mean_score applied) and, with MASK, the mask.

    With INT the scores are `MAGIC + s`.
    """
    if options.softcap and INT:
        s = s - MAGIC
    # cap * tanh(y / cap) = cap - 2 cap / (2^(2 y log2(e) / cap) + 1), which is exact enough where tanh.approx is not
    if options.softcap:
        y = s * (factor * (2.0 * LOG2E / rows.cap))[:, None] + (rows.mean_score * (2.0 * LOG2E / rows.cap))[:, None]
        s = rows.cap - 2.0 * rows.cap * logistic(y)
    if MASK:
        # ptxas: bounds are read here, or the loop of whole tiles would carry them in registers, and spill.
        last = rows.last_key(gl.SliceLayout(1, s.type.layout))
        key = gl.arange(0, options.tile, gl.SliceLayout(0, s.type.layout))[None, :]
        # ptxas: bits 1 and 2 of a thread's columns are its own, the others the same in all threads, and then constants.
        # Of whole column indices it would keep 64 in registers, and spill.
        bits = key & 6
        key = key & ~6
        visible = key <= (last - tile * options.tile)[:, None] - bits
        if options.mask_left:
            first = gl.maximum(last - rows.window + 1, rows.items.get(rows.slot, LEFT))
            visible = visible & (key >= (first - tile * options.tile)[:, None] - bits)
        s = gl.where(visible, s, HIDDEN)
    return s


# Weights


@gluon.jit
def softmax_tile(s, factor, m, options: gl.constexpr, INT: gl.constexpr):
    """Weights 2^8 p, the factor of sums that used the row's old maximum, and its new maximum. With INT the scores are
    `MAGIC + s`.

    Maxima ignore NaN. Weights keep it.
    """
    if options.softcap:
        m_new = gl.maximum(m, gl.max(s, 1))
        x = s - (m_new - WEIGHT_BITS)[:, None]
    elif INT:
        # Positive numbers compare as integers do, for which there is a maximum of three; a masked score is negative.
        top = gl.max(s.to(gl.int32, bitcast=True), 1).to(gl.float32, bitcast=True)
        m_new = gl.maximum(m, (top - MAGIC) * factor)
        x = s * factor[:, None] - (m_new - WEIGHT_BITS + MAGIC * factor)[:, None]
    else:
        m_new = gl.maximum(m, gl.max(s, 1) * factor)
        x = s * factor[:, None] - (m_new - WEIGHT_BITS)[:, None]
    alpha = gl.exp2(m - m_new)
    return exp2(x, options.cubics), alpha, m_new


# Sums of weights


@gluon.jit
def row_sum_mma(p8, ones, total, ACCUMULATE: gl.constexpr):
    """Begin `total` (+)= row sums of FP8 weights, eight times each: a product with ones takes less time than 64
    additions.

    The sums use the same rounded weights as P V, so a common rounding error cancels.
    """
    p8 = gl.convert_layout(p8, gl.DotOperandLayout(0, accumulator(p8.shape[0], 8), 4), assert_trivial=True)
    return warpgroup_mma(p8, ones.permute([1, 0]), total, use_acc=ACCUMULATE, is_async=True)


@gluon.jit
def rescale_sums(sums, alpha, total):
    """Add another tile's sums to the rows' sums. A thread keeps one of its two equal columns."""
    total, _ = total.reshape([total.shape[0], 4, 2]).split()
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout), assert_trivial=True)
    return sums * alpha[:, None] + gl.convert_layout(total, sums.type.layout, assert_trivial=True)


@gluon.jit
def no_sums(ROWS: gl.constexpr):
    """The initial sums of `row_sum_mma`, eight equal columns, and of `rescale_sums`."""
    total = gl.zeros([ROWS, 8], gl.float32, accumulator(ROWS, 8))
    sums, _ = total.reshape([ROWS, 4, 2]).split()
    return total, sums


@gluon.jit
def no_maximum(options: gl.constexpr):
    return gl.full([options.rows], UNSEEN, gl.float32, gl.SliceLayout(1, scores_layout(options)))


@gluon.jit
def sum_of_rows(sums, options: gl.constexpr):
    """The sums as `[rows]`, one for each row."""
    return gl.convert_layout(gl.max(sums, 1), gl.SliceLayout(1, scores_layout(options)), assert_trivial=True)
