"""The program of the multiplying warps."""

from __future__ import annotations

from ..gluon import gl, gluon, mbarrier, send_wait
from .epilogue import store_item
from .items import LAST, LEFT, LENGTH, POSITION, TILES
from .queries import Rows, keep_rest, load_queries
from .registers import FEW
from .ring import K_EMPTY, K_FULL, V_EMPTY, V_FULL, Place
from .tiles import attend_in_turn, attend_overlapped

# Rows that see fewer keys are multiplied twice, because rounding errors of P, and of Q with `PrefillQueries.REST`, do
# not average out. The numbers are for prompts, whose other rows see more keys, and for queries that all see the same
# keys. With `PrefillOptions.batch_invariant` one number is for both, and the partition multiplies zeros for its rows
# that see more.
FEW_IN_ALL = gl.constexpr(640)


@gluon.jit
def multiply(
    PARTITION: gl.constexpr, options: gl.constexpr, queries, ring, items, means, output, causal, window, scale, cap
):
    """Compute the rows of a partition of every item that the producer announces."""
    FIRST_ROW: gl.constexpr = PARTITION * options.rows
    item = 0
    stage = 0
    phase = 0
    place = Place(stage, phase)
    mbarrier.wait(queries.full.index(PARTITION), 0)
    tiles = items.get(0, TILES)
    while tiles > 0:
        slot = item & 1
        last = items.get(slot, LAST)
        count = items.count(slot, FIRST_ROW)
        position = items.get(slot, POSITION)
        length = items.get(slot, LENGTH)
        # Of the keys that its rows see, the last ones (hi) and the first ones (lo).
        bottom = last - tiles + 1
        all_last = position + FIRST_ROW + ((1 - causal) << 30)
        any_last = gl.minimum(all_last + options.rows - 1, length - 1)
        all_last = gl.minimum(all_last, length - 1)
        if options.mask_left or options.split:  # noqa: SIM108 - no choice between values: they differ in type
            blind = None  # a row between others may see no key
        else:
            # The first row sees fewest. ptxas: d128-q8-long. Read again from shared memory at the end, it would spill
            # in the loop.
            blind = all_last < 0
        if options.exact:
            few: gl.constexpr = True
        elif options.batch_invariant:
            few = all_last < FEW
        else:
            few = all_last < gl.where(causal > 0, FEW, FEW_IN_ALL)
        if means.USES_K:
            k_mean = means.of_k(items, slot, options)
        else:
            k_mean: gl.constexpr = None
        q = queries.codes.index(PARTITION if queries.Q16 else slot * options.partitions + PARTITION)
        factor, mean_score = load_queries(queries, q, PARTITION, k_mean, scale, options)
        rows = Rows(
            PARTITION=PARTITION, first=FIRST_ROW, items=items, slot=slot, causal=causal, window=window, q=q,
            factor=factor, mean_score=mean_score, cap=cap, queries=queries, OPTIONS=options,
        )  # fmt: skip
        if means.USES_K and not options.softcap:
            # Loaded again at the end, because there are no registers for it until then.
            queries.mean_score.index(PARTITION).store(mean_score)
        place = attend(rows, ring, means, output, last, bottom, all_last, any_last, count, few, blind, place)
        item += 1
        mbarrier.wait(queries.full.index(PARTITION), item & 1)
        tiles = items.get(item & 1, TILES)
    if output.desc is not None:
        send_wait(0)  # a CTA's shared memory ends with it


@gluon.jit
def attend(rows, ring, means, output, last, bottom, all_last, any_last, count, few, blind, place):
    """Attention of a partition's rows, whose queries are rounded, over the tiles `bottom` to `last` of an item.

    `all_last` and `any_last` are the last keys that the first and the last row see, `count` is the number of rows that
    are queries.
    """
    options: gl.constexpr = rows.OPTIONS
    TILE: gl.constexpr = options.tile
    whole = gl.maximum(all_last + 1, 0) // TILE  # tiles before this one end where every row still sees
    top = gl.maximum(gl.minimum(gl.maximum(any_last, 0) // TILE, last), bottom)
    if count <= 0:
        top = bottom
    first_free = bottom
    if options.mask_left:
        all_first = gl.maximum(gl.maximum(any_last - rows.window + 1, rows.items.get(rows.slot, LEFT)), 0)
        first_free = gl.minimum(gl.maximum((all_first + TILE - 1) // TILE, bottom), last + 1)
    n_hi = gl.maximum(top - gl.maximum(whole, bottom), 0)
    n_free = gl.maximum(gl.minimum(top, whole) - first_free, 0)
    n_lo = top - bottom - n_hi - n_free

    # Tiles that only other partitions' rows see.
    for _ in range(last - top):
        ring.wait(K_FULL, place)
        # Before the barrier of K's release: no product joins the warps, and a late one would miss two phases.
        ring.wait(V_FULL, place)
        ring.release(K_EMPTY, place)
        ring.release(V_EMPTY, place)
        place = ring.next(place)
    queries = rows.queries
    if few:
        if queries.REST:
            keep_rest(rows)
        else:
            # The next item's FP8 rows have separate memory, 16-bit ones are rounded.
            queries.release(rows.PARTITION)
        acc, m, sums, place = attend_in_turn(rows, ring, top, n_hi, n_free, n_lo, place, True)
        if queries.REST:
            queries.release(rows.PARTITION)
    else:
        if options.partitions > 1 and queries.Q16:
            queries.factor.index(rows.PARTITION).store(rows.factor)
        queries.release(rows.PARTITION)
        if options.width == 256 or options.partitions > 1:
            acc, m, sums, place = attend_in_turn(rows, ring, top, n_hi, n_free, n_lo, place, False)
        else:
            acc, m, sums, place = attend_overlapped(rows, ring, top, n_hi, n_free, n_lo, place)
    store_item(rows, means, output, acc, m, sums, blind)
    return place
