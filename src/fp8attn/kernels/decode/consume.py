"""The consumer: four warps that attend over the tiles of their worker's range.

Each warp has a quarter of a tile's tokens, and its own online softmax. After the last tile of a head, the four results
are merged.
"""

from __future__ import annotations

from ..codec import ratio_of_powers
from ..common import HIDDEN_FINITE, LOG2E, UNSEEN
from ..gluon import aggregate, fence_async_shared, gl, gluon, mbarrier, mma_v2, sync
from ..ptx import transpose_8x8
from .combine import combine_ranges, store_head
from .queries import load_mean, mma_layout

WEIGHT_BITS = gl.constexpr(14)  # weights are multiplied by 2^14, so that small ones are not subnormals of FP16


@aggregate
class Mask:
    """The keys `[first, end)` that each row of a head sees, `[1, 1, rows]`; and those that every row sees,
    `[all_first, all_end)`.
    """

    first: gl.tensor
    end: gl.tensor
    all_first: gl.tensor
    all_end: gl.tensor
    token: gl.tensor  # [warps, tokens of a warp, 1]: the tokens of a tile
    TILE: gl.constexpr  # tokens of a tile

    @gluon.jit
    def cuts(self, tile):
        """Whether some row does not see some key of a tile."""
        return ((tile + 1) * self.TILE > self.all_end) | (tile * self.TILE < self.all_first)

    @gluon.jit
    def sees(self, tile):
        """Which rows see which keys of a tile."""
        key = tile * self.TILE + self.token
        return (key < self.end) & (key >= self.first)


@gluon.jit
def _mask(batch, seq, step, token):
    """The mask of rows whose query tokens are `step`."""
    end = seq.length + step * 0
    all_end = seq.length
    if batch.OPTIONS.causal:
        end = seq.length - seq.num_q + 1 + step
        all_end = seq.length - seq.num_q + 1
    first = seq.pad + step * 0
    all_first = seq.pad
    if batch.OPTIONS.window:
        first = gl.maximum(first, seq.length - seq.num_q + 1 + step - batch.window)
        all_first = gl.maximum(seq.pad, seq.length - batch.window)
    return Mask(first, end, all_first, all_end, token, batch.OPTIONS.tile)


@gluon.jit
def _weights_operand(p, OPERAND: gl.constexpr):
    """Weights `[warps, tokens, rows]`, in the layout of the scores, as the B operand of V P^T, with tokens in V's
    order.

    After `transpose_8x8`, element (8i + a, 8j + b) belongs to token 8i + b of row 8j + a. Position p of 16 in V
    holds token p1 p3 p2 p0 (in bits, highest first). Data moves in `transpose_8x8` alone: the last conversion is
    asserted to be trivial.
    """
    WARPS: gl.constexpr = p.shape[0]
    TOKENS: gl.constexpr = p.shape[1]
    ROWS: gl.constexpr = p.shape[2]
    # ..., t3, a, j, t2 t1, t0
    x = transpose_8x8(p.to(gl.float16)).reshape([WARPS, TOKENS // 16, 2, 8, ROWS // 8, 4, 2])
    x = x.permute(0, 1, 5, 2, 6, 4, 3).reshape([WARPS, TOKENS, ROWS])
    return gl.convert_layout(x, OPERAND, assert_trivial=True)


@gluon.jit
def _scores(k, q, ROWS: gl.constexpr, MMA: gl.constexpr):
    """K Q^T `[warps, tokens, rows]` in FP32, with `q` from `DecodeQueries.operand`."""
    WARPS: gl.constexpr = k.shape[0]
    TOKENS: gl.constexpr = k.shape[1]
    if k.dtype == gl.int8:
        s = mma_v2(k, q, gl.zeros([WARPS, TOKENS, 2 * ROWS], gl.int32, MMA))
        high, low = gl.split(s.reshape([WARPS, TOKENS, 2, ROWS]).permute(0, 1, 3, 2))
        s = gl.convert_layout(((high << 8) + low).to(gl.float32), MMA, assert_trivial=True)  # the sum is below 2^31
    else:
        s = mma_v2(k.to(gl.float16), q, gl.zeros([WARPS, TOKENS, ROWS], gl.float32, MMA))
    return s


@gluon.jit
def _tanh(x):
    """tanh to 2e-7. `tanh.approx` errs by 5e-4, and a cap of 50 multiplies that to 2.5e-2."""
    return 1.0 - 2.0 / (1.0 + gl.exp2(x * (2 * LOG2E)))


@gluon.jit
def _load_v(ring, stage, phase, OPERAND: gl.constexpr):
    """V of a stage `[warps, channels, tokens]`; the stage is free afterwards.

    The fence waits until all loads from the stage have their data. A barrier does not: it orders loads with other loads
    and stores, but TMA writes through another path (PTX's async proxy), and could overwrite bytes whose load has begun.
    """
    WARPS: gl.constexpr = gl.num_warps()
    mbarrier.wait(ring.v_full.index(stage), phase)
    WIDTH: gl.constexpr = ring.v.shape[1]
    TILE: gl.constexpr = ring.v.shape[2]
    v = ring.v.index(stage).reshape([WIDTH, WARPS, TILE // WARPS]).permute([1, 0, 2]).load(OPERAND)
    fence_async_shared()
    mbarrier.arrive(ring.empty.index(stage), count=1)
    return v


@aggregate
class DecodeRows:
    """The query rows of one head: the inputs of their scores."""

    q: gl.tensor  # these three are of `DecodeQueries.operand`
    factor: gl.tensor
    mean_score: gl.tensor
    softcap: gl.tensor
    mask: Mask


@gluon.jit
def _attend(ring, count, tile, rows, acc, row_max, row_sum, v_unit, options: gl.constexpr):
    """Add tile `tile` of a sequence to the online softmax of a head, after `count` other tiles of the range.

    Returns the accumulator, in units of the page's scale of V, the rows' maxima and sums, and that unit.
    """
    factor, softcap, mask = rows.factor, rows.softcap, rows.mask
    WARPS: gl.constexpr = gl.num_warps()
    MMA: gl.constexpr = acc.type.layout
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 4)
    TWO: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [WARPS, 1], [1, 0])  # of two numbers that all threads have
    stage = count % ring.STAGES
    phase = (count // ring.STAGES) & 1
    mbarrier.wait(ring.k_full.index(stage), phase)
    k_scale, v_scale = gl.split(ring.scales.index(stage).reshape([1, 2]).load(TWO))
    c = gl.max(k_scale, 0) * factor
    v_scale = gl.max(v_scale, 0)
    k = ring.k.index(stage).reshape([WARPS, options.tile // WARPS, options.width]).load(A)
    if options.early_v:  # frees the stage before the arithmetic
        v = _load_v(ring, stage, phase, A)
    s = _scores(k, rows.q, options.rows, MMA)
    if options.softcap:
        s = _tanh((s * c[:, None, :] + rows.mean_score[:, None, :]) * (1.0 / softcap)) * softcap
        c = factor * 0.0 + 1.0
    if mask.cuts(tile):
        s = gl.where(mask.sees(tile), s * c[:, None, :], HIDDEN_FINITE)
        c = factor * 0.0 + 1.0
    new_max = gl.maximum(row_max, gl.max(s, 1) * c - WEIGHT_BITS)  # so weights are 2^14 times the softmax's
    rescale = gl.exp2(row_max - new_max)
    p = gl.exp2(s * c[:, None, :] - new_max[:, None, :])
    row_sum = row_sum * rescale + gl.sum(p, 1)
    rescale = rescale * ratio_of_powers(v_unit, v_scale)
    if not options.early_v:
        v = _load_v(ring, stage, phase, A)
    acc = mma_v2(v.to(gl.float16), _weights_operand(p, B), acc * rescale[:, None, :])
    return acc, new_max, row_sum, v_scale


@gluon.jit
def consume(ring, batch, work, parts, first_q, first_k_mean, queries, output, softcap):
    """Four warps: attention over the tiles of the range, and the combination of heads that ranges share."""
    options: gl.constexpr = batch.OPTIONS
    ROWS: gl.constexpr = options.rows
    WIDTH: gl.constexpr = options.width
    WARPS: gl.constexpr = gl.num_warps()
    TOKENS: gl.constexpr = options.tile // WARPS  # of a tile, for each warp
    MMA: gl.constexpr = mma_layout(WARPS)
    VECTOR: gl.constexpr = gl.SliceLayout(1, MMA)  # [warp, rows]
    INT8: gl.constexpr = ring.k.dtype == gl.int8
    # Channels over lanes, rows over warps, all warps' values in one thread.
    CHANNELS: gl.constexpr = min(WIDTH // 32, 4)
    MERGED: gl.constexpr = gl.BlockedLayout([WARPS, CHANNELS, 1], [1, 32, 1], [1, 1, WARPS], [1, 2, 0])
    SUMS: gl.constexpr = gl.SliceLayout(1, MERGED)
    PAIRS: gl.constexpr = gl.SliceLayout(
        1, gl.BlockedLayout([WARPS, CHANNELS, 1, 2], [1, 32, 1, 1], [1, 1, WARPS, 1], [3, 1, 2, 0])
    )
    PAIR: gl.constexpr = gl.SliceLayout(0, PAIRS)  # [rows, 2]
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, MMA)))
    token = (warp[:, None] * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(2, MMA)))[None, :])[
        :, :, None
    ]
    channel = gl.arange(0, WIDTH, gl.SliceLayout(1, gl.SliceLayout(0, MERGED)))
    step = (batch.row0 + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, MMA))))[
        None, None, :
    ] // options.group  # query of a row
    first_start = work.worker_of(work.begin)  # of the first head
    raw_q, k_mean = first_q, first_k_mean
    index, head, begin = work.seq, work.head, work.begin
    count = 0  # tiles of the range
    while begin < work.high:
        seq = batch.sequence(index)
        i, j = batch.portion(begin, seq, work)
        if i < j:
            if begin > work.begin:
                raw_q, k_mean = queries.load(batch, seq, head)
            q, factor, mean_score = queries.operand(raw_q, k_mean, VECTOR, INT8, options)
            rows = DecodeRows(q, factor, mean_score, softcap, _mask(batch, seq, step, token))
            acc = gl.zeros([WARPS, WIDTH, ROWS], gl.float32, MMA)
            row_max = gl.full([WARPS, ROWS], UNSEEN, gl.float32, VECTOR)
            row_sum = gl.zeros([WARPS, ROWS], gl.float32, VECTOR)
            mean_score_one = gl.zeros([ROWS], gl.float32, gl.SliceLayout(0, SUMS))
            if parts.MEAN_SCORES:
                mean_score_one = gl.max(gl.convert_layout(mean_score, SUMS), 0)
            v_unit = seq.length.to(gl.float32) * 0.0 + 1.0  # of an empty accumulator
            for tile in range(seq.first_tile + i, seq.first_tile + j):
                acc, row_max, row_sum, v_unit = _attend(ring, count, tile, rows, acc, row_max, row_sum, v_unit, options)
                count += 1

            # Merge the sums of the four warps.
            v_mean = load_mean(output.v_mean, head, channel, options.head_dim)
            o = gl.convert_layout(acc, MERGED)
            all_max, all_sum = gl.split(gl.convert_layout(gl.join(row_max, row_sum), PAIRS))
            all_max = gl.convert_layout(all_max, SUMS)
            all_sum = gl.convert_layout(all_sum, SUMS)
            max_one = gl.max(all_max, 0)
            weight = gl.exp2(all_max - max_one[None, :])
            sum_one = gl.sum(all_sum * weight, 0)
            o = gl.sum(o * (weight * v_unit)[:, None, :], 0)
            if i + seq.num_tiles == j:
                store_head(o, max_one, sum_one, mean_score_one, v_mean, batch, seq, head, output)
            else:
                part = work.worker + gl.where(i == 0, work.workers, 0)
                parts.store(part, o, max_one, sum_one, mean_score_one, batch, seq, channel, PAIR)
                start = gl.where(i > 0, first_start, work.worker)
                sync()
                done = gl.atomic_add(parts.tiles + start, j - i, sem="acq_rel", scope="gpu") + j - i
                sync()
                if done == seq.num_tiles:
                    gl.store(parts.tiles + start, 0)
                    last = work.worker_of(begin + seq.num_tiles - 1)
                    combine_ranges(start, last, batch, seq, head, work.workers, parts, output)
        begin += seq.places
        index, head = batch.following(index, head, seq.num_tiles)
