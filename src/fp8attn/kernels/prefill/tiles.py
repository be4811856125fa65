"""The loops over tiles: of two warpgroups at head_dim up to 128, and of three, of rows that see few keys, and of wider
heads.

Each returns `(acc, m, sums, place)`: the output before the division `[rows, width]`, at head_dim 192 and 256 as a tuple
of slices `[rows, width / 4]`; the rows' maxima and sums of weights `[rows]`; and the position in the ring after the
last tile. The order of tiles is from the last to the first: `n_hi` tiles that end after some row's last key, then
`n_free` tiles that all rows see completely, then `n_lo` tiles with keys left of a window or in padding.
"""

from __future__ import annotations

from ..gluon import gl, gluon, warpgroup_mma, warpgroup_mma_wait
from ..ptx import delay_second, pin, rest_to_fp8, split_to_fp8, to_fp8
from .registers import accumulator, as_operand, join, scores_layout, split
from .ring import K_EMPTY, K_FULL, V_EMPTY, V_FULL
from .softmax import (
    begin_scores,
    end_scores,
    mask_scores,
    no_maximum,
    no_sums,
    rescale_sums,
    row_sum_mma,
    scores_of_both,
    softmax_tile,
    sum_of_rows,
)


@gluon.jit
def tile_weights(rows, ring, tile, m, place, P: gl.constexpr, MASK: gl.constexpr, TWICE: gl.constexpr):
    """A tile's weights in FP8 as operands of P V; their rounding errors, likewise; the factors of the sums and of the
    output so far; the rows' new maxima.

    With TWICE, scores include the rounding errors of queries if there is `PrefillQueries.REST`. Without, there are no
    rounding errors of weights.
    """
    options: gl.constexpr = rows.OPTIONS
    INT: gl.constexpr = ring.k.dtype == gl.int8
    ring.wait(K_FULL, place)
    factor = rows.factor * ring.k_scale(place)
    v_ratio = ring.v_ratio(place)
    if TWICE and rows.queries.REST:
        # ptxas: `tile >> 30` is zero, which it cannot know. Descriptors that it kept would leave no uniform registers
        # to the ring's place.
        rest = rows.queries.rest.index(2 * rows.PARTITION + (tile >> 30))
        s = scores_of_both(rows.q, rest, ring.k.index(place.stage + (tile >> 30)), options)
    else:
        s = end_scores(begin_scores(rows.q, ring.k.index(place.stage), m, options))
    ring.release(K_EMPTY, place)
    s = mask_scores(s, factor, rows, tile, options, MASK, INT)
    p, alpha, m = softmax_tile(s, factor, m, options, INT)
    # ptxas: volatile, it stays before the next wait, and without what it cuts off the FP32 weights end there.
    p = as_operand(p, P)
    if options.batch_invariant and TWICE:  # rounded as in the other loops, which `split_to_fp8` does by way of FP16
        p8 = to_fp8(p, False)
        rest = rows.rest_of_few(rest_to_fp8(p))
    elif TWICE:
        p8, rest = split_to_fp8(p)
    else:
        p8 = to_fp8(p, False)
        rest = p8
    return p8, rest, alpha, alpha * v_ratio, m


# Two warpgroups: the next tile's Q K is computed during this tile's softmax

DELAY = gl.constexpr(600)  # cycles that the second begins later: one's exponentials run under the other's products


@gluon.jit
def overlapped_tile(rows, ring, s, factor, v_ratio, tile, m, sums, acc, k_place, v_place, MASK: gl.constexpr):
    """Softmax and P V of the tile whose scores are `s`, while the next tile's Q K (masked as `tile`) is multiplied."""
    options: gl.constexpr = rows.OPTIONS
    OUT: gl.constexpr = accumulator(options.rows, options.width)
    INT: gl.constexpr = ring.k.dtype == gl.int8
    p, alpha, m = softmax_tile(s, factor, m, options, INT)
    p8 = to_fp8(as_operand(p, gl.DotOperandLayout(0, OUT, 4)))
    none, _ = no_sums(options.rows)
    ring.wait(V_FULL, v_place)
    total = row_sum_mma(p8, ring.ones, none, False)
    zero = gl.zeros([options.rows, options.width], gl.float32, OUT)
    t = warpgroup_mma(p8, ring.v.index(v_place.stage).permute([1, 0]), zero, use_acc=False, is_async=True)
    ring.wait(K_FULL, k_place)
    s_next = begin_scores(rows.q, ring.k.index(k_place.stage), m, options)
    shrink = gl.convert_layout(alpha * v_ratio, gl.SliceLayout(1, OUT), assert_trivial=True)
    k_scale = ring.k_scale(k_place)
    v_ratio = ring.v_ratio(k_place)
    t, total = warpgroup_mma_wait(1, deps=[t, total])
    ring.release(V_EMPTY, v_place)
    sums = rescale_sums(sums, alpha, total)
    acc = acc * shrink[:, None] + t
    factor = rows.factor * k_scale
    s = end_scores(s_next)
    ring.release(K_EMPTY, k_place)
    s = mask_scores(s, factor, rows, tile, options, MASK, INT)
    return s, factor, v_ratio, m, sums, acc, ring.next(k_place), ring.next(v_place)


@gluon.jit
def attend_overlapped(rows, ring, tile, n_hi, n_free, n_lo, place):
    """The loop over tiles, of which the next one's Q K is multiplied during the softmax of each."""
    options: gl.constexpr = rows.OPTIONS
    OUT: gl.constexpr = accumulator(options.rows, options.width)
    INT: gl.constexpr = ring.k.dtype == gl.int8
    k_place = place
    v_place = place
    acc = gl.zeros([options.rows, options.width], gl.float32, OUT)
    m = no_maximum(options)
    none, sums = no_sums(options.rows)
    ring.wait(K_FULL, k_place)
    s = begin_scores(rows.q, ring.k.index(k_place.stage), m, options)
    factor = rows.factor * ring.k_scale(k_place)
    v_ratio = ring.v_ratio(k_place)
    s = end_scores(s)
    ring.release(K_EMPTY, k_place)
    s = mask_scores(s, factor, rows, tile, options, True, INT)
    # Side by side, both would compute exponentials and then both wait for the tensor core, in all tiles.
    delay_second(DELAY)
    k_place = ring.next(k_place)
    tile -= 1
    for _ in range(n_hi):
        s, factor, v_ratio, m, sums, acc, k_place, v_place = overlapped_tile(
            rows, ring, s, factor, v_ratio, tile, m, sums, acc, k_place, v_place, True
        )
        tile -= 1
    for _ in range(n_free):
        s, factor, v_ratio, m, sums, acc, k_place, v_place = overlapped_tile(
            rows, ring, s, factor, v_ratio, tile, m, sums, acc, k_place, v_place, False
        )
    if options.mask_left:
        tile -= n_free
        for _ in range(n_lo):
            s, factor, v_ratio, m, sums, acc, k_place, v_place = overlapped_tile(
                rows, ring, s, factor, v_ratio, tile, m, sums, acc, k_place, v_place, True
            )
            tile -= 1
    p, alpha, m = softmax_tile(s, factor, m, options, INT)
    p8 = to_fp8(as_operand(p, gl.DotOperandLayout(0, OUT, 4)))
    ring.wait(V_FULL, v_place)
    total = row_sum_mma(p8, ring.ones, none, False)
    zero = gl.zeros([options.rows, options.width], gl.float32, OUT)
    t = warpgroup_mma(p8, ring.v.index(v_place.stage).permute([1, 0]), zero, use_acc=False, is_async=True)
    t, total = warpgroup_mma_wait(0, deps=[t, total])
    ring.release(V_EMPTY, v_place)
    acc = acc * gl.convert_layout(alpha * v_ratio, gl.SliceLayout(1, OUT), assert_trivial=True)[:, None] + t
    return acc, m, sum_of_rows(rescale_sums(sums, alpha, total), options), k_place


# Three warpgroups: each works sequentially, and the other two fill the pipes in that time


@gluon.jit
def tile_in_turn(rows, ring, tile, m, sums, acc, place, MASK: gl.constexpr):
    """Compute a whole tile."""
    options: gl.constexpr = rows.OPTIONS
    OUT: gl.constexpr = accumulator(options.rows, options.width)
    INT: gl.constexpr = ring.k.dtype == gl.int8
    ring.wait(K_FULL, place)
    s = begin_scores(rows.q, ring.k.index(place.stage), m, options)
    if rows.queries.Q16:
        factor = rows.queries.factor.index(rows.PARTITION).load(gl.SliceLayout(1, scores_layout(options)))
    else:
        factor = rows.factor
    factor = factor * ring.k_scale(place)
    v_ratio = ring.v_ratio(place)
    s = end_scores(s)
    ring.release(K_EMPTY, place)
    s = mask_scores(s, factor, rows, tile, options, MASK, INT)
    p, alpha, m = softmax_tile(s, factor, m, options, INT)
    # ptxas: volatile, it stays before the next wait, and the FP32 weights end there.
    p = as_operand(p, gl.DotOperandLayout(0, OUT, 4))
    p8 = to_fp8(p, False)
    ring.wait(V_FULL, place)
    total, _ = no_sums(options.rows)
    total = row_sum_mma(p8, ring.ones, total, False)
    if ring.v.shape[1] < options.width:  # in halves, as in `tile_twice`
        HALF: gl.constexpr = accumulator(options.rows, options.width // 2)
        zero = gl.zeros([options.rows, options.width // 2], gl.float32, HALF)
        p8 = gl.convert_layout(p8, gl.DotOperandLayout(0, HALF, 4), assert_trivial=True)
        t0 = warpgroup_mma(p8, ring.v.index(2 * place.stage).permute([1, 0]), zero, use_acc=False, is_async=True)
        t1 = warpgroup_mma(p8, ring.v.index(2 * place.stage + 1).permute([1, 0]), zero, use_acc=False, is_async=True)
        sums = rescale_sums(sums, alpha, warpgroup_mma_wait(2, deps=[total]))
        t0, t1 = warpgroup_mma_wait(0, deps=[t0, t1])
        t = gl.convert_layout(join((t0, t1)), OUT, assert_trivial=True)
    else:
        zero = gl.zeros([options.rows, options.width], gl.float32, OUT)
        t = warpgroup_mma(p8, ring.v.index(place.stage).permute([1, 0]), zero, use_acc=False, is_async=True)
        sums = rescale_sums(sums, alpha, warpgroup_mma_wait(1, deps=[total]))
        t = warpgroup_mma_wait(0, deps=[t])
    ring.release(V_EMPTY, place)
    acc = acc * gl.convert_layout(alpha * v_ratio, gl.SliceLayout(1, OUT), assert_trivial=True)[:, None] + t
    return m, sums, acc, ring.next(place)


# Both parts of Q and P


@gluon.jit
def multiply_both(rest, p8, v, zero):
    """Begin the products of both parts of P."""
    t = warpgroup_mma(rest, v.permute([1, 0]), zero, use_acc=False, is_async=True)
    return warpgroup_mma(p8, v.permute([1, 0]), t, use_acc=True, is_async=True)


@gluon.jit
def tile_twice(rows, ring, tile, m, sums, acc, place, MASK: gl.constexpr):
    """Compute a whole tile. P, and Q with `PrefillQueries.REST`, are multiplied twice: their 8-bit values, and what
    rounding cut off.
    """
    options: gl.constexpr = rows.OPTIONS
    OUT: gl.constexpr = accumulator(options.rows, options.width)
    p8, rest, alpha, shrink, m = tile_weights(rows, ring, tile, m, place, gl.DotOperandLayout(0, OUT, 4), MASK, True)
    ring.wait(V_FULL, place)
    none, _ = no_sums(options.rows)
    total = row_sum_mma(p8, ring.ones, row_sum_mma(rest, ring.ones, none, False), True)
    if ring.v.shape[1] < options.width:  # ptxas: d128-long. One half after the other, as `wide_tile` in quarters
        HALF: gl.constexpr = accumulator(options.rows, options.width // 2)
        zero = gl.zeros([options.rows, options.width // 2], gl.float32, HALF)
        shrink = gl.convert_layout(shrink, gl.SliceLayout(1, HALF), assert_trivial=True)[:, None]
        p8 = gl.convert_layout(p8, gl.DotOperandLayout(0, HALF, 4), assert_trivial=True)
        rest = gl.convert_layout(rest, gl.DotOperandLayout(0, HALF, 4), assert_trivial=True)
        a0, a1 = split(acc, 2)
        t = multiply_both(rest, p8, ring.v.index(2 * place.stage), zero)
        sums = rescale_sums(sums, alpha, warpgroup_mma_wait(2, deps=[total]))
        a0 = pin(gl.convert_layout(a0, HALF, assert_trivial=True) * shrink + warpgroup_mma_wait(0, deps=[t]))
        ring.wait(V_FULL, place)
        t = multiply_both(rest, p8, ring.v.index(2 * place.stage + 1), zero)
        a1 = pin(gl.convert_layout(a1, HALF, assert_trivial=True) * shrink + warpgroup_mma_wait(0, deps=[t]))
        acc = gl.convert_layout(join((a0, a1)), OUT, assert_trivial=True)
    else:
        shrink = gl.convert_layout(shrink, gl.SliceLayout(1, OUT), assert_trivial=True)[:, None]
        zero = gl.zeros([options.rows, options.width], gl.float32, OUT)
        t = multiply_both(rest, p8, ring.v.index(place.stage), zero)
        sums = rescale_sums(sums, alpha, warpgroup_mma_wait(2, deps=[total]))
        acc = pin(acc * shrink + warpgroup_mma_wait(0, deps=[t]))
    ring.release(V_EMPTY, place)
    return m, sums, acc, ring.next(place)


# head_dim 192 and 256


@gluon.jit
def wide_tile(rows, ring, tile, m, sums, acc, place, MASK: gl.constexpr, TWICE: gl.constexpr):
    """Compute a whole tile. P V is in three or four slices of channels, because registers are scarce, and `acc` is a
    tuple of them. Meanwhile the other warpgroup uses the tensor core.

    With TWICE, P and Q are multiplied twice, as in `tile_twice`.

    ptxas: d256. It would overlap the slices and spill. The volatile moves, and waits that have already been passed
    (each ends a basic block), keep the life of one slice's partial apart from the next but one.
    """
    options: gl.constexpr = rows.OPTIONS
    OUT: gl.constexpr = accumulator(options.rows, options.width // 4)
    a0, a1, a2 = acc[0], acc[1], acc[2]
    p8, rest, alpha, shrink, m = tile_weights(rows, ring, tile, m, place, gl.DotOperandLayout(0, OUT, 4), MASK, TWICE)
    shrink = gl.convert_layout(shrink, gl.SliceLayout(1, OUT), assert_trivial=True)[:, None]
    zero = gl.zeros([options.rows, options.width // 4], gl.float32, OUT)
    ring.wait(V_FULL, place)
    none, _ = no_sums(options.rows)
    if TWICE:
        total = row_sum_mma(p8, ring.ones, row_sum_mma(rest, ring.ones, none, False), True)
        sums = rescale_sums(sums, alpha, warpgroup_mma_wait(0, deps=[total]))
        new = ()
        for i in gl.static_range(len(acc)):
            if i > 0:
                ring.wait(V_FULL, place)
            t = multiply_both(rest, p8, ring.v.index(4 * place.stage + i), zero)
            new += (pin(acc[i] * shrink + warpgroup_mma_wait(0, deps=[t])),)
    else:
        total = row_sum_mma(p8, ring.ones, none, False)
        t0 = warpgroup_mma(p8, ring.v.index(4 * place.stage).permute([1, 0]), zero, use_acc=False, is_async=True)
        sums = pin(rescale_sums(sums, alpha, warpgroup_mma_wait(1, deps=[total])))
        t1 = warpgroup_mma(p8, ring.v.index(4 * place.stage + 1).permute([1, 0]), zero, use_acc=False, is_async=True)
        t0 = warpgroup_mma_wait(1, deps=[t0])
        t0 = warpgroup_mma_wait(1, deps=[t0])
        a0 = pin(a0 * shrink + t0)
        ring.wait(V_FULL, place)
        t2 = warpgroup_mma(p8, ring.v.index(4 * place.stage + 2).permute([1, 0]), zero, use_acc=False, is_async=True)
        t1 = warpgroup_mma_wait(1, deps=[t1])
        a1 = pin(a1 * shrink + t1)
        if len(acc) == 4:
            ring.wait(V_FULL, place)
            t3 = warpgroup_mma(
                p8, ring.v.index(4 * place.stage + 3).permute([1, 0]), zero, use_acc=False, is_async=True
            )
            t2 = warpgroup_mma_wait(1, deps=[t2])
            a2 = a2 * shrink + t2
            t3 = warpgroup_mma_wait(0, deps=[t3])
            new = (a0, a1, a2, acc[3] * shrink + t3)
        else:
            t2 = warpgroup_mma_wait(0, deps=[t2])
            new = (a0, a1, a2 * shrink + t2)
    ring.release(V_EMPTY, place)
    return m, sums, new, ring.next(place)


# The loop of all but `attend_overlapped`


@gluon.jit
def whole_tile(rows, ring, tile, m, sums, acc, place, MASK: gl.constexpr, TWICE: gl.constexpr):
    """Compute a whole tile, from its scores to the output, in the way of the head_dim and of TWICE."""
    options: gl.constexpr = rows.OPTIONS
    if options.width == 256:
        return wide_tile(rows, ring, tile, m, sums, acc, place, MASK, TWICE)
    elif TWICE:
        return tile_twice(rows, ring, tile, m, sums, acc, place, MASK)
    else:
        return tile_in_turn(rows, ring, tile, m, sums, acc, place, MASK)


@gluon.jit
def attend_in_turn(rows, ring, tile, n_hi, n_free, n_lo, place, TWICE: gl.constexpr):
    """The loop over tiles, one after the other. With TWICE, P and Q are multiplied twice (`tile_twice`)."""
    options: gl.constexpr = rows.OPTIONS
    if options.width == 256:
        OUT: gl.constexpr = accumulator(options.rows, options.width // 4)
        acc = ()
        for _ in gl.static_range(options.head_dim // (options.width // 4)):
            acc += (gl.zeros([options.rows, options.width // 4], gl.float32, OUT),)
    else:
        acc = gl.zeros([options.rows, options.width], gl.float32, accumulator(options.rows, options.width))
    m = no_maximum(options)
    _, sums = no_sums(options.rows)
    ALL_MASKED: gl.constexpr = TWICE and not options.exact  # few tiles, which are all masked: less code
    if ALL_MASKED:
        n_hi += n_free + n_lo
    # ptxas: `maximum` says that the loop is entered. What is read behind the loop is computed in it, in a uniform
    # register that would be unset otherwise (`unset` of `tests/kernels/prefill/compile_prefill.py`).
    for _ in range(n_hi + 1 if TWICE else gl.maximum(n_hi + 1, 1)):
        m, sums, acc, place = whole_tile(rows, ring, tile, m, sums, acc, place, True, TWICE)
        tile -= 1
    if not ALL_MASKED:
        for _ in range(n_free):
            m, sums, acc, place = whole_tile(rows, ring, tile, m, sums, acc, place, False, TWICE)
        if options.mask_left:
            tile -= n_free
            for _ in range(n_lo):
                m, sums, acc, place = whole_tile(rows, ring, tile, m, sums, acc, place, True, TWICE)
                tile -= 1
    return acc, m, sum_of_rows(sums, options), place
