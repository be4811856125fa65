"""The loop over tiles at head_dim 192 and 256, like those in `tiles`. The output is a tuple of three or four slices of
channels, `[rows, width / 4]` each."""

from __future__ import annotations

from ..gluon import gl, gluon, warpgroup_mma, warpgroup_mma_wait
from ..ptx import pin
from .registers import accumulator
from .softmax import no_maximum, no_sums, rescale_sums, row_sum_mma, sum_of_rows
from .tiles import multiply_both, tile_weights


@gluon.jit
def wide_tile(
    rows, ring, queries, tile, m, sums, acc, place, options: gl.constexpr, MASK: gl.constexpr, TWICE: gl.constexpr
):
    """Compute a whole tile. P V is in slices of channels, because registers are scarce. Meanwhile the other warpgroup
    uses the tensor core.

    With TWICE, P and Q are multiplied twice, as in `tiles.tile_twice`.

    ptxas: d256. It would overlap the slices and spill. The volatile moves, and waits that have already been passed
    (each ends a basic block), keep the life of one slice's partial apart from the next but one.
    """
    OUT: gl.constexpr = accumulator(options.rows, options.width // 4)
    a0, a1, a2 = acc[0], acc[1], acc[2]
    p8, rest, alpha, shrink, m = tile_weights(
        rows, ring, queries, tile, m, place, options, gl.DotOperandLayout(0, OUT, 4), MASK, TWICE)  # fmt: skip
    shrink = gl.convert_layout(shrink, gl.SliceLayout(1, OUT), assert_trivial=True)[:, None]
    zero = gl.zeros([options.rows, options.width // 4], gl.float32, OUT)
    ring.wait_v(place)
    none, _ = no_sums(options.rows)
    if TWICE:
        total = row_sum_mma(p8, ring.ones, row_sum_mma(rest, ring.ones, none, False), True)
        sums = rescale_sums(sums, alpha, warpgroup_mma_wait(0, deps=[total]))
        new = ()
        for i in gl.static_range(len(acc)):
            if i > 0:
                ring.wait_v(place)
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
        ring.wait_v(place)
        t2 = warpgroup_mma(p8, ring.v.index(4 * place.stage + 2).permute([1, 0]), zero, use_acc=False, is_async=True)
        t1 = warpgroup_mma_wait(1, deps=[t1])
        a1 = pin(a1 * shrink + t1)
        if len(acc) == 4:
            ring.wait_v(place)
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
    ring.release_v(place)
    return m, sums, new, ring.next(place)


@gluon.jit
def attend_wide(rows, ring, queries, top, n_hi, n_free, n_lo, place, options: gl.constexpr, TWICE: gl.constexpr):
    OUT: gl.constexpr = accumulator(options.rows, options.width // 4)
    acc = ()
    for _ in gl.static_range(options.head_dim // (options.width // 4)):
        acc += (gl.zeros([options.rows, options.width // 4], gl.float32, OUT),)
    m = no_maximum(options)
    _, sums = no_sums(options.rows)
    tile = top
    ALL_MASKED: gl.constexpr = TWICE and not options.exact  # as in `tiles.attend_twice`
    if ALL_MASKED:
        n_hi += n_free + n_lo
    for _ in range(n_hi + 1 if TWICE else gl.maximum(n_hi + 1, 1)):  # ptxas: as in `tiles.attend_in_turn`
        m, sums, acc, place = wide_tile(rows, ring, queries, tile, m, sums, acc, place, options, True, TWICE)
        tile -= 1
    if not ALL_MASKED:
        for _ in range(n_free):
            m, sums, acc, place = wide_tile(rows, ring, queries, tile, m, sums, acc, place, options, False, TWICE)
        if options.mask_left:
            tile -= n_free
            for _ in range(n_lo):
                m, sums, acc, place = wide_tile(rows, ring, queries, tile, m, sums, acc, place, options, True, TWICE)
                tile -= 1
    return acc, m, sum_of_rows(sums, options), place
