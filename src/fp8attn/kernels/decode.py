"""Attention of a few query tokens over the cache, on Hopper: bound by memory, and exact.

The arithmetic is 16-bit with FP32 accumulation, all of it on the tensor cores, and the operands stand the other way round from what is
usual: a tile's tokens (then V's channels) are the MMA's 16 rows, and the query rows (query tokens x GQA group) its 8 columns. So eight
query rows cost nothing in padding, and the accumulator of a warp is `[head_dim, 8]`.

    S^T [tokens, rows] = K [tokens, d] Q^T [d, rows]        O^T [d, rows] += V [d, tokens] P^T [tokens, rows]

Each of four warps owns 32 of a page's 128 tokens, with its own running maximum, sum and output, so the loop has no exchange between
warps. E4M3 becomes FP16 in registers. INT8 keys stay as they are: the queries are rounded to 16-bit integers, each row with its own scale,
and the two bytes of these are multiplied apart and summed exactly in INT32, with no conversion of K at all. V is transposed and in
`V_ORDER`: four bytes of a channel are the four tokens that one thread's A fragment wants. P^T's fragments are the scores' accumulators
transposed 8x8, which `movmatrix` does.

Work is cut flat over (sequence, head, page): every CTA finds its range from `cache_seqlens` by itself. A head that several ranges share
is combined, in order, by the last of them to finish.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from ..layout import KVPages
from .gluon import aggregate, arrive_with_words, fetch_words, gl, gluon, mbarrier, mma_v2, sync, tensor_descriptor
from .launch import Constants, Counters, constants, launch, num_sms
from .pages import PAGE, allocate_k, fetch_k, fetch_v, page_bytes, tiles, v_layout
from .rotation import block_size, negative

WARPS = 4  # that consume; the producer's warp counts as four more, for warps are given registers by fours
MAX_ROWS = 128  # query tokens x GQA group that this kernel is meant for

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
MASKED = gl.constexpr(-1e30)  # a score that is masked; finite, so that no inf - inf can arise
NO_SCORE = gl.constexpr(-1e28)  # the maximum of no scores: far above MASKED, so that masked weights are exactly zero
WEIGHT_BITS = gl.constexpr(14)  # weights are 2^14 times what they stand for, out of FP16's subnormals
WHOLE = gl.constexpr(4)  # heads of up to so many pages are not shared between ranges: combining would cost more
LARGEST_QUERY = gl.constexpr(127 * 256.0)  # as an integer of two bytes, each of them in [-128, 127]
LEAST = gl.constexpr(2)  # pages that a range has at least, when there is little work
PRODUCER_REGISTERS = gl.constexpr(40)


@aggregate
class Batch:
    """The sequences, and which of their pages a row tile has to read."""

    lengths: gl.tensor  # pointers to int32: tokens held, bounds of the queries, tokens of padding
    bounds: gl.tensor
    leftpad: gl.tensor
    num_seqs: gl.tensor
    heads: gl.tensor  # KV heads
    max_q: gl.tensor
    window: gl.tensor
    row0: gl.tensor  # first query row of this row tile
    GROUP: gl.constexpr
    RAGGED: gl.constexpr  # bounds are given; else every sequence has max_q queries
    WINDOW: gl.constexpr
    LEFTPAD: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, lengths, bounds, leftpad, num_seqs, heads, max_q, window, row0, GROUP, RAGGED, WINDOW, LEFTPAD):
        self.lengths = lengths
        self.bounds = bounds
        self.leftpad = leftpad
        self.num_seqs = num_seqs
        self.heads = heads
        self.max_q = max_q
        self.window = window
        self.row0 = row0
        self.GROUP = gl.constexpr(GROUP)
        self.RAGGED = gl.constexpr(RAGGED)
        self.WINDOW = gl.constexpr(WINDOW)
        self.LEFTPAD = gl.constexpr(LEFTPAD)

    @gluon.jit
    def pages(self, length, num_q, pad):
        """First page that some row sees and how many there are from it on; scalars or vectors.

        None without rows. With rows one at least, even of an empty sequence: its zeros have to be written.
        """
        last = gl.maximum(length - 1, 0) // PAGE
        first = last * 0
        if self.WINDOW:
            first = gl.maximum(length - num_q - self.window + 1, 0) // PAGE
        if self.LEFTPAD:
            first = gl.maximum(first, pad // PAGE)
        first = gl.minimum(first, last)
        return first, gl.where(num_q * self.GROUP > self.row0, last + 1 - first, 0)

    @gluon.jit
    def sequence(self, seq):
        """Length, first query, queries, padding, first page and pages of one sequence."""
        length = gl.load(self.lengths + seq)
        query = seq * self.max_q
        num_q = self.max_q
        if self.RAGGED:
            query = gl.load(self.bounds + seq)
            num_q = gl.load(self.bounds + seq + 1) - query
        pad = length * 0
        if self.LEFTPAD:
            pad = gl.load(self.leftpad + seq)
        first, count = self.pages(length, num_q, pad)
        return length, query, num_q, pad, first, count

    @gluon.jit
    def counts(self, base, BLOCK: gl.constexpr):
        """Pages (of one head) of the sequences `[base, base + BLOCK)`; every warp holds them all."""
        seq = base + gl.arange(0, BLOCK, gl.BlockedLayout([BLOCK // 32], [32], [gl.num_warps()], [0]))
        inside = seq < self.num_seqs
        length = gl.load(self.lengths + seq, mask=inside, other=0)
        num_q = length * 0 + self.max_q
        pad = length * 0
        if self.RAGGED:
            num_q = gl.load(self.bounds + seq + 1, mask=inside, other=0) - gl.load(self.bounds + seq, mask=inside, other=0)
        if self.LEFTPAD:
            pad = gl.load(self.leftpad + seq, mask=inside, other=0)
        _, count = self.pages(length, num_q, pad)
        return gl.where(inside, count, 0)

    @gluon.jit
    def after(self, page, count, base, before, BLOCK: gl.constexpr):
        """Of the sequences `[base, base + BLOCK)` with `before` pages in front and `count` pages each: how many end by the flat index
        `page`, the flat index at which the last of these ends, and the pages of all."""
        end = (gl.associative_scan(count, 0, _add) + before) * self.heads
        passed = (end <= page) & (base + gl.arange(0, BLOCK, count.type.layout) < self.num_seqs)
        return gl.sum(passed.to(gl.int32), 0), gl.max(gl.where(passed, end, 0), 0), gl.sum(count, 0)

    @gluon.jit
    def following(self, seq, head, count):
        """The next head."""
        last = (head + 1 == self.heads) | (count == 0)
        return gl.where(last, seq + 1, seq), gl.where(last, 0, head + 1)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _divide(a, b):
    """Floor division of what is not negative, in half the instructions."""
    return (a.to(gl.uint32) // b.to(gl.uint32)).to(gl.int32)


@aggregate
class Work:
    """The flat work, cut into equal ranges, one a worker; and one worker's range. A worker without work begins at its end.

    Where the cuts lie depends on the lengths alone, and so does the order of every sum.
    """

    worker: gl.tensor
    workers: gl.tensor  # that have work
    share: gl.tensor  # pages of a range, one more for the first `rest` of them
    rest: gl.tensor
    low: gl.tensor  # the worker's range
    high: gl.tensor
    seq: gl.tensor  # the head that `low` is in, and the flat index at which that head begins
    head: gl.tensor
    begin: gl.tensor

    @gluon.constexpr_function
    def __init__(self, worker, workers, share, rest, low, high, seq, head, begin):
        self.worker = worker
        self.workers = workers
        self.share = share
        self.rest = rest
        self.low = low
        self.high = high
        self.seq = seq
        self.head = head
        self.begin = begin

    @gluon.jit
    def holder(self, page):
        """The worker whose range a page is in."""
        longer = self.rest * (self.share + 1)
        return gl.where(page < longer, _divide(page, self.share + 1), self.rest + _divide(page - longer, gl.maximum(self.share, 1)))


@gluon.jit
def assign(batch, count, worker, workers, BLOCK: gl.constexpr):
    """The work of `worker`; `count` are the pages of the first `BLOCK` sequences."""
    total = gl.sum(count, 0)
    if BLOCK > 32:  # else there are no more: no loop
        for base in range(BLOCK, batch.num_seqs, BLOCK):
            total += gl.sum(batch.counts(base, BLOCK), 0)
    total *= batch.heads
    workers = gl.maximum(gl.minimum(workers, total // LEAST), 1)
    share = _divide(total, workers)
    rest = total - share * workers
    low = worker * share + gl.minimum(worker, rest)
    high = gl.where(worker < workers, low + share + (worker < rest).to(gl.int32), low)
    seq, begin, before = batch.after(low, count, 0, 0, BLOCK)
    if BLOCK > 32:
        for base in range(BLOCK, batch.num_seqs, BLOCK):
            more, end, pages = batch.after(low, batch.counts(base, BLOCK), base, before, BLOCK)
            seq += more
            begin = gl.maximum(begin, end)
            before += pages
    seq = gl.minimum(seq, batch.num_seqs - 1)  # without work it would be past the last
    _, _, _, _, _, pages = batch.sequence(seq)
    head = gl.where(low < high, _divide(low - begin, gl.maximum(pages, 1)), 0)
    begin = gl.where(low < high, begin + head * pages, high)
    return Work(worker, workers, share, rest, low, high, seq, head, begin)


@gluon.jit
def portion(begin, count, low, high):
    """Which pages `[i, j)` of a head, whose flat indices are `[begin, begin + count)`, the range `[low, high)` does.

    A short head goes whole to the range that holds its middle.
    """
    middle = begin + count // 2
    mine = gl.where((low <= middle) & (middle < high), count, 0)
    short = count <= WHOLE
    return gl.where(short, 0, gl.maximum(low - begin, 0)), gl.where(short, mine, gl.minimum(high - begin, count))


@aggregate
class Pipe:
    """Shared memory between the producer and the consumer: stages of a K and a V page each, and their scales."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor  # K's and V's
    k_full: gl.shared_memory_descriptor  # and the scales
    v_full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, k, v, scales, k_full, v_full, empty, STAGES):
        self.k = k
        self.v = v
        self.scales = scales
        self.k_full = k_full
        self.v_full = v_full
        self.empty = empty
        self.STAGES = gl.constexpr(STAGES)

    @gluon.jit
    def open(self, FROM: gl.constexpr, TO: gl.constexpr):
        """Makes the barriers of stages."""
        for stage in gl.static_range(FROM, TO):
            mbarrier.init(self.k_full.index(stage), 1)
            mbarrier.init(self.v_full.index(stage), 1)
            mbarrier.init(self.empty.index(stage), 1)


@gluon.jit
def make_pipe(k_desc, WIDTH: gl.constexpr, STAGES: gl.constexpr):
    """`WIDTH` is the head dimension, padded to a power of two."""
    k = allocate_k(k_desc, STAGES)
    v = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, WIDTH, PAGE], v_layout(WIDTH))
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, 2], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    return Pipe(k, v, scales, k_full, v_full, empty, STAGES)


@aggregate
class Source:
    """Where the pages and their scales are."""

    k_desc: tensor_descriptor
    v_desc: tensor_descriptor
    pool: gl.tensor  # pointers
    table: gl.tensor
    table_stride: gl.tensor
    D: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, k_desc, v_desc, pool, table, table_stride, D):
        self.k_desc = k_desc
        self.v_desc = v_desc
        self.pool = pool
        self.table = table
        self.table_stride = table_stride
        self.D = gl.constexpr(D)

    @gluon.jit
    def request(self, pipe, stage, slot):
        """Starts K and V of `slot` (page x heads + head), and their scales, on their way to a stage that is free."""
        header = self.pool + slot.to(gl.int64) * page_bytes(self.D) + 2 * PAGE * self.D
        two = gl.arange(0, 2, gl.BlockedLayout([2], [32], [gl.num_warps()], [0]))
        fetch_words(pipe.scales.index(stage), header.to(gl.pointer_type(gl.float32), bitcast=True) + two)
        arrive_with_words(pipe.k_full.index(stage))
        mbarrier.expect(pipe.k_full.index(stage), self.k_desc.block_type.nbytes)
        fetch_k(self.k_desc, slot, pipe.k_full.index(stage), pipe.k.index(stage))
        mbarrier.expect(pipe.v_full.index(stage), self.k_desc.block_type.nbytes)
        fetch_v(self.v_desc, slot, pipe.v_full.index(stage), pipe.v, stage, pipe.STAGES)


@gluon.jit
def request_first(pipe, batch, work, source):
    """Requests the first page of a range while the warps have not parted yet; whether there was one that could be."""
    length, _, _, _, first, count = batch.sequence(work.seq)
    i, j = portion(work.begin, count, work.low, work.high)
    requested = (work.begin < work.high) & (i < j) & (length > 0)
    if requested:
        source.request(pipe, 0, gl.load(source.table + work.seq * source.table_stride + first + i) * batch.heads + work.head)
    return requested


@gluon.jit
def produce(pipe, batch, work, requested, source):
    """One warp: requests the pages of a range, but for the first if it has been.

    That one is not waited for either. Its stage was free, and by the time that this warp comes here it may have been freed again: the wait
    would be for the time after that, and the second page would never be requested.
    """
    seq, head, begin = work.seq, work.head, work.begin
    done = requested.to(gl.int32)  # pages of the head
    tile = done
    while begin < work.high:
        length, _, _, _, first, count = batch.sequence(seq)
        i, j = portion(begin, count, work.low, work.high)
        for page in range(first + i + done, first + j):
            stage = tile % pipe.STAGES
            slot = gl.load(source.table + seq * source.table_stride + page) * batch.heads + head
            mbarrier.wait(pipe.empty.index(stage), ((tile // pipe.STAGES) & 1) ^ 1)
            if length > 0:
                source.request(pipe, stage, slot)
            else:  # an empty sequence's table may name any page, and any bytes may lie there
                mbarrier.arrive(pipe.k_full.index(stage), count=1)
                mbarrier.arrive(pipe.v_full.index(stage), count=1)
            tile += 1
        done = 0
        begin += count
        seq, head = batch.following(seq, head, count)


@aggregate
class Parts:
    """What ranges leave of the heads that they share, `[2 * workers, rows]`: range r of a head that began before it at r, and of one that
    ends after it at workers + r. And by the range that a head begins in, how many of its pages are done."""

    o: gl.tensor  # pointers; [..., width]
    sums: gl.tensor  # [..., 2]: m and mass
    offsets: gl.tensor
    pages: gl.tensor

    @gluon.constexpr_function
    def __init__(self, o, sums, offsets, pages):
        self.o = o
        self.sums = sums
        self.offsets = offsets
        self.pages = pages


@gluon.jit
def _transpose(p):
    """Each 8x8 of FP16 weights, one 32-bit register a thread, transposed."""
    return gl.inline_asm_elementwise("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [p], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def _weights_operand(p, OPERAND: gl.constexpr):
    """Weights `[warps, tokens, rows]` as they leave the softmax -> the B operand of V P^T, its tokens in V's order.

    After the 8x8 transposes, what stands at (8i + a, 8j + b) belongs to token 8i + b of row 8j + a; and position p of 16 in a V page holds
    token p1 p3 p2 p0 (in bits, highest first). No data moves here but in `_transpose`: the last conversion is asserted to be trivial.
    """
    WARPS: gl.constexpr = p.shape[0]
    TOKENS: gl.constexpr = p.shape[1]
    ROWS: gl.constexpr = p.shape[2]
    x = _transpose(p.to(gl.float16)).reshape([WARPS, TOKENS // 16, 2, 8, ROWS // 8, 4, 2])  # ..., t3, a, j, t2 t1, t0
    x = x.permute(0, 1, 5, 2, 6, 4, 3).reshape([WARPS, TOKENS, ROWS])
    return gl.convert_layout(x, OPERAND, assert_trivial=True)


@gluon.constexpr_function
def _mma_layout(warps):
    """Of [warp, tokens or channels, rows]."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@gluon.jit
def _load_mean(mean_ptr, head, d, D: gl.constexpr):
    """The mean of channels `d` of a KV head; zeros if there is none."""
    mean = (d * 0).to(gl.float32)
    if mean_ptr is not None:
        mean = gl.load(mean_ptr + head * D + d, mask=d < D, other=0.0)
    return mean


@gluon.jit
def _load_query(q_ptr, k_mean_ptr, batch, head, query, num_q, q_stride_t, q_stride_h, D: gl.constexpr, WIDTH: gl.constexpr,
                ROWS: gl.constexpr, OPERAND: gl.constexpr):  # fmt: skip
    """Q^T of a row tile, and K's mean."""
    WARPS: gl.constexpr = OPERAND.parent.warps_per_cta[0]
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, OPERAND)))[:, None, None]
    d = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(2, OPERAND)))[None, :, None]
    row = batch.row0 + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, OPERAND)))[None, None, :]
    token = query + row // batch.GROUP
    q_head = head * batch.GROUP + row % batch.GROUP
    inside = (row < num_q * batch.GROUP) & (d < D) & (warp >= 0)
    mean = _load_mean(k_mean_ptr, head, d, D)
    if k_mean_ptr is not None:
        sync()  # or ptxas would load it after it had waited for the queries
    return gl.load(q_ptr + token * q_stride_t + q_head * q_stride_h + d + warp * 0, mask=inside, other=0.0), mean


@gluon.constexpr_function
def _log2_block(head_dim):
    return block_size(head_dim).bit_length() - 1


@gluon.jit
def _rotate(q, D: gl.constexpr):
    """`rotation.rotate` of Q^T `[warps, channels, rows]` in FP32, up to rounding. Padding is blocks of its own, and stays zero."""
    WARPS: gl.constexpr = q.shape[0]
    WIDTH: gl.constexpr = q.shape[1]
    ROWS: gl.constexpr = q.shape[2]
    OPERAND: gl.constexpr = q.type.layout
    STEPS: gl.constexpr = _log2_block(D)
    FACTOR: gl.constexpr = 2.0 ** (-0.5 * STEPS)
    d = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(2, OPERAND)))[None, :, None]
    q *= gl.where(negative(d), -FACTOR, FACTOR)
    for step in gl.static_range(STEPS):
        pairs = q.reshape([WARPS, WIDTH >> (step + 1), 2, ROWS << step])
        second = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, pairs.type.layout))))[None, None, :, None] > 0
        total = gl.sum(pairs, 2)[:, :, None, :]  # in registers, but for two steps, whose pairs are in neighboring lanes
        q = gl.where(second, total - 2 * pairs, total).reshape([WARPS, WIDTH, ROWS])
    return gl.convert_layout(q, OPERAND, assert_trivial=True)


@gluon.jit
def _query_operand(q, k_mean, k_mean_ptr, scale, VECTOR: gl.constexpr, D: gl.constexpr, ROTATE: gl.constexpr, INT8: gl.constexpr):
    """Q^T as the operand that `_scores` takes; what takes scores back, times log2(e); and the rows' q.k_mean.

    The softmax scale's sign goes into Q, so that the factor of the scores is positive and the largest score is found before it is applied.
    Rows of nothing but tiny values are scaled as if 2^-60 were the largest: no factor may underflow.
    """
    q = q.to(gl.float32)
    if ROTATE:
        q = _rotate(q, D)
    offset = gl.zeros([q.shape[0], q.shape[2]], gl.float32, gl.SliceLayout(1, q.type.layout))
    if k_mean_ptr is not None:
        offset = gl.sum(q * k_mean, 1) * (scale * LOG2E)
    largest = gl.maximum(gl.max(gl.abs(q).to(gl.int32, bitcast=True), 1), 67 << 23)  # NaN is the largest of all
    sign = gl.where(scale < 0, -1.0, 1.0)
    if INT8:
        largest = largest.to(gl.float32, bitcast=True)
        # The sum's last 16 bits are the integer nearest to the product, and these the two bytes; the lower one is signed, too.
        bits = (q * (sign * LARGEST_QUERY / largest)[:, None, :] + 1.5 * 2**23).to(gl.int32, bitcast=True)
        OPERAND: gl.constexpr = q.type.layout
        SHAPE: gl.constexpr = [q.shape[0], q.shape[1], 2 * q.shape[2]]
        high_low = gl.join(((bits + 128) >> 8).to(gl.int8), bits.to(gl.int8)).permute(0, 1, 3, 2)
        q = gl.convert_layout(high_low.reshape(SHAPE), OPERAND, assert_trivial=True)
        factor = largest * (gl.abs(scale) * (LOG2E / LARGEST_QUERY))
    else:
        # A power of two (exactly) that makes the row's largest value one in [2^14, 2^15): elements down to 2^-29 of it keep all their bits.
        exponent = largest >> 23
        up = ((268 - exponent) << 23).to(gl.float32, bitcast=True)
        down = ((exponent - 14) << 23).to(gl.float32, bitcast=True)
        q = (q * (sign * up)[:, None, :]).to(gl.float16)
        factor = down * (gl.abs(scale) * LOG2E)
    return q, gl.convert_layout(factor, VECTOR), gl.convert_layout(offset, VECTOR)


@gluon.jit
def _scores(k, q, ROWS: gl.constexpr, MMA: gl.constexpr):
    """K Q^T `[warps, tokens, rows]` in FP32, `q` as `_query_operand` makes it."""
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
    """tanh to 2e-7; `tanh.approx` has 5e-4, which a cap of 50 would make 2.5e-2."""
    return 1.0 - 2.0 / (1.0 + gl.exp2(x * (2 * LOG2E)))


@gluon.jit
def _finish(o, m, mass, offset, mean, v_mean_ptr, batch, head, query, num_q, sinks_ptr, out_ptr, lse_ptr, D: gl.constexpr,
            SINKS: gl.constexpr, SOFTCAP: gl.constexpr):  # fmt: skip
    """Outputs and LSE of one head from sums over all its keys: `o [width, rows]`; by row `m`, `mass` and `offset`, as exponents of two;
    by channel V's `mean`."""
    ROW: gl.constexpr = gl.SliceLayout(0, o.type.layout)
    COLUMN: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    row = batch.row0 + gl.arange(0, o.shape[1], ROW)
    d = gl.arange(0, o.shape[0], COLUMN)
    q_head = head * batch.GROUP + row % batch.GROUP
    out_row = (query + row // batch.GROUP) * (batch.heads * batch.GROUP) + q_head
    inside = row < num_q * batch.GROUP
    m = gl.convert_layout(m, ROW)
    mass = gl.convert_layout(mass, ROW)
    offset = gl.convert_layout(offset, ROW)
    if SOFTCAP:
        offset = offset * 0.0  # it is in the scores already
    total = mass
    weight = mass * 0.0 + 1.0
    if SINKS:
        sink = gl.load(sinks_ptr + q_head, mask=inside, other=0.0).to(gl.float32) * LOG2E - offset
        top = gl.maximum(m, sink)
        weight = gl.exp2(m - top)
        total = mass * weight + gl.exp2(sink - top)
        m = top
    weight = weight / total
    result = o * weight[None, :]
    if v_mean_ptr is not None:
        result += gl.convert_layout(mean, COLUMN)[:, None] * (mass * weight)[None, :]
    result = gl.where((mass == 0)[None, :], 0.0, result)  # a row that sees no key; NaN stays
    gl.store(out_ptr + out_row[None, :] * D + d[:, None], result.to(out_ptr.dtype.element_ty), mask=inside[None, :] & (d < D)[:, None])
    gl.store(lse_ptr + out_row, (m + gl.log2(total) + offset) * LN2, mask=inside)


@gluon.jit
def _consume(pipe, batch, work, parts, first_q, first_k_mean, q_ptr, q_stride_t, q_stride_h, k_mean_ptr, v_mean_ptr, sinks_ptr, out_ptr,
             lse_ptr, scale, softcap, D: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr, USED: gl.constexpr, CAUSAL: gl.constexpr,
             SOFTCAP: gl.constexpr, SINKS: gl.constexpr, ROTATE: gl.constexpr, EARLY_V: gl.constexpr):  # fmt: skip
    """Four warps: attention over the pages of the range, and the combination of heads that ranges share."""
    WARPS: gl.constexpr = gl.num_warps()
    TOKENS: gl.constexpr = PAGE // WARPS  # of a page, for each warp
    MMA: gl.constexpr = _mma_layout(WARPS)
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 4)
    VECTOR: gl.constexpr = gl.SliceLayout(1, MMA)  # [warp, rows]
    TWO: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [WARPS, 1], [1, 0])  # of two numbers that all threads have
    INT8: gl.constexpr = pipe.k.dtype == gl.int8
    # Channels over lanes, rows over warps, all warps' values in one thread.
    CHANNELS: gl.constexpr = min(WIDTH // 32, 4)
    MERGED: gl.constexpr = gl.BlockedLayout([WARPS, CHANNELS, 1], [1, 32, 1], [1, 1, WARPS], [1, 2, 0])
    SUMS: gl.constexpr = gl.SliceLayout(1, MERGED)
    PAIRS: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([WARPS, CHANNELS, 1, 2], [1, 32, 1, 1], [1, 1, WARPS, 1], [3, 1, 2, 0]))
    PAIR: gl.constexpr = gl.SliceLayout(0, PAIRS)  # [rows, 2]
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, MMA)))
    token = (warp[:, None] * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(2, MMA)))[None, :])[:, :, None]
    channel = gl.arange(0, WIDTH, gl.SliceLayout(1, gl.SliceLayout(0, MERGED)))
    step = (batch.row0 + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, MMA))))[None, None, :] // batch.GROUP  # query of a row
    first_start = work.holder(work.begin)  # where the first head began
    q, factor, offset = _query_operand(first_q, first_k_mean, k_mean_ptr, scale, VECTOR, D, ROTATE, INT8)
    seq, head, begin = work.seq, work.head, work.begin
    tile = 0
    while begin < work.high:
        length, query, num_q, pad, first, count = batch.sequence(seq)
        i, j = portion(begin, count, work.low, work.high)
        if i < j:
            if begin > work.begin:
                next_q, k_mean = _load_query(q_ptr, k_mean_ptr, batch, head, query, num_q, q_stride_t, q_stride_h, D, WIDTH, ROWS, B)
                q, factor, offset = _query_operand(next_q, k_mean, k_mean_ptr, scale, VECTOR, D, ROTATE, INT8)
            # Keys [from_, until) are seen by the row; pages before `clear` or past `full` have keys that some row does not see.
            until = length + step * 0
            full = length
            if CAUSAL:
                until = length - num_q + 1 + step
                full = length - num_q + 1
            from_ = pad + step * 0
            clear = pad
            if batch.WINDOW:
                from_ = gl.maximum(from_, length - num_q + 1 + step - batch.window)
                clear = gl.maximum(pad, length - batch.window)
            acc = gl.zeros([WARPS, WIDTH, ROWS], gl.float32, MMA)
            m = gl.full([WARPS, ROWS], NO_SCORE, gl.float32, VECTOR)
            mass = gl.zeros([WARPS, ROWS], gl.float32, VECTOR)
            offset_one = gl.max(gl.convert_layout(offset, SUMS), 0)
            v_scale = length.to(gl.float32) * 0.0 + 1.0  # of an empty accumulator
            for page in range(first + i, first + j):
                stage = tile % pipe.STAGES
                phase = (tile // pipe.STAGES) & 1
                last_v_scale = v_scale
                mbarrier.wait(pipe.k_full.index(stage), phase)
                k_scale, v_scale = gl.split(pipe.scales.index(stage).reshape([1, 2]).load(TWO))
                c = gl.max(k_scale, 0) * factor
                v_scale = gl.max(v_scale, 0)
                k = pipe.k.index(stage).reshape([WARPS, TOKENS, WIDTH]).load(A)
                if EARLY_V:  # frees the stage before the arithmetic
                    mbarrier.wait(pipe.v_full.index(stage), phase)
                    v = pipe.v.index(stage).reshape([WIDTH, WARPS, TOKENS]).permute([1, 0, 2]).load(A)
                    mbarrier.arrive(pipe.empty.index(stage), count=1)
                s = _scores(k, q, ROWS, MMA)
                if SOFTCAP:
                    s = _tanh((s * c[:, None, :] + offset[:, None, :]) * (1.0 / softcap)) * softcap
                    c = factor * 0.0 + 1.0
                if ((page + 1) * PAGE > full) | (page * PAGE < clear):
                    key = page * PAGE + token
                    s = gl.where((key < until) & (key >= from_), s * c[:, None, :], MASKED)
                    c = factor * 0.0 + 1.0
                # Weights are 2^14 times larger than m says they are.
                m_new = gl.maximum(m, gl.max(s, 1) * c - WEIGHT_BITS)
                shrink = gl.exp2(m - m_new)
                p = gl.exp2(s * c[:, None, :] - m_new[:, None, :])
                mass = mass * shrink + gl.sum(p, 1)
                m = m_new
                # acc is in units of v_scale. Scales differ by powers of two, so their ratio is a difference of exponents: exact.
                ratio = last_v_scale.to(gl.int32, bitcast=True) - v_scale.to(gl.int32, bitcast=True) + 0x3F800000
                shrink = shrink * ratio.to(gl.float32, bitcast=True)
                if not EARLY_V:
                    mbarrier.wait(pipe.v_full.index(stage), phase)
                    v = pipe.v.index(stage).reshape([WIDTH, WARPS, TOKENS]).permute([1, 0, 2]).load(A)
                    mbarrier.arrive(pipe.empty.index(stage), count=1)
                acc = mma_v2(v.to(gl.float16), _weights_operand(p, B), acc * shrink[:, None, :])
                tile += 1

            # The four warps' sums become one.
            v_mean = _load_mean(v_mean_ptr, head, channel, D)
            o = gl.convert_layout(acc, MERGED)
            m_all, mass_all = gl.split(gl.convert_layout(gl.join(m, mass), PAIRS))
            m_all = gl.convert_layout(m_all, SUMS)
            mass_all = gl.convert_layout(mass_all, SUMS)
            m_one = gl.max(m_all, 0)
            weight = gl.exp2(m_all - m_one[None, :])
            mass_one = gl.sum(mass_all * weight, 0)
            o = gl.sum(o * (weight * v_scale)[:, None, :], 0)
            if i + count == j:
                _finish(
                    o, m_one, mass_one, offset_one, v_mean, v_mean_ptr, batch, head, query, num_q, sinks_ptr, out_ptr, lse_ptr, D, SINKS,
                    SOFTCAP,
                )  # fmt: skip
            else:
                place = (work.worker + gl.where(i == 0, work.workers, 0)) * ROWS
                row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(0, MERGED)))
                inside = batch.row0 + row < num_q * batch.GROUP
                gl.store(parts.o + (place + row)[None, :] * WIDTH + channel[:, None], o, mask=inside[None, :] & (channel < D)[:, None])
                if k_mean_ptr is not None:
                    gl.store(parts.offsets + place + row, gl.convert_layout(offset_one, row.type.layout), mask=inside)
                row = gl.arange(0, ROWS, gl.SliceLayout(1, PAIR))
                inside = batch.row0 + row < num_q * batch.GROUP
                pair = (place + row)[:, None] * 2 + gl.arange(0, 2, gl.SliceLayout(0, PAIR))[None, :]
                gl.store(parts.sums + pair, gl.convert_layout(gl.join(m_one, mass_one), PAIR), mask=inside[:, None])
                start = gl.where(i > 0, first_start, work.worker)
                sync()
                done = gl.atomic_add(parts.pages + start, j - i, sem="acq_rel", scope="gpu") + j - i
                sync()
                if done == count:
                    gl.store(parts.pages + start, 0)
                    _combine(
                        start, work.holder(begin + count - 1), batch, work, parts, head, query, num_q, v_mean_ptr, sinks_ptr, out_ptr,
                        lse_ptr, D, WIDTH, ROWS, USED, k_mean_ptr is not None, SINKS, SOFTCAP,
                    )  # fmt: skip
        begin += count
        seq, head = batch.following(seq, head, count)


@gluon.jit
def _combine(start, last, batch, work, parts, head, query, num_q, v_mean_ptr, sinks_ptr, out_ptr, lse_ptr, D: gl.constexpr,
             WIDTH: gl.constexpr, ROWS: gl.constexpr, USED: gl.constexpr, OFFSETS: gl.constexpr, SINKS: gl.constexpr,
             SOFTCAP: gl.constexpr):  # fmt: skip
    """The parts of one head, from the ranges `[start, last]`, in this order whatever order they came in, and its output. Only `USED` of
    `ROWS` rows are real. What is loaded lies at constant distances from one address a thread."""
    WARPS: gl.constexpr = gl.num_warps()
    BY_ROW: gl.constexpr = min(USED, WARPS)
    CHANNELS: gl.constexpr = max(1, min(4, WIDTH * BY_ROW // (32 * WARPS)))
    AT_ONCE: gl.constexpr = max(2, min(32, 8192 // (WIDTH * USED)))  # parts in flight: up to 64 registers
    ALL: gl.constexpr = gl.BlockedLayout([AT_ONCE, CHANNELS, 1], [1, 32, 1], [1, WARPS // BY_ROW, BY_ROW], [1, 2, 0])
    SUM: gl.constexpr = gl.SliceLayout(1, ALL)  # [parts, rows]
    ROW: gl.constexpr = gl.SliceLayout(0, SUM)
    PAIRS: gl.constexpr = gl.SliceLayout(
        1, gl.BlockedLayout([AT_ONCE, CHANNELS, 1, 2], [1, 32, 1, 1], [1, WARPS // BY_ROW, BY_ROW, 1], [3, 1, 2, 0])
    )  # [parts, rows, 2]
    PAIR: gl.constexpr = gl.SliceLayout(0, PAIRS)
    d = gl.arange(0, WIDTH, gl.SliceLayout(1, gl.SliceLayout(0, ALL)))
    row = gl.arange(0, USED, gl.SliceLayout(0, gl.SliceLayout(0, ALL)))
    in_o = row[None, :] * WIDTH + d[:, None]
    inside_o = (batch.row0 + row < num_q * batch.GROUP)[None, :] & (d < D)[:, None]
    row = gl.arange(0, USED, gl.SliceLayout(1, PAIR))
    in_sums = row[:, None] * 2 + gl.arange(0, 2, gl.SliceLayout(0, PAIR))[None, :]
    inside_sums = (batch.row0 + row < num_q * batch.GROUP)[:, None]
    row = gl.arange(0, USED, ROW)
    part = gl.arange(0, AT_ONCE, gl.SliceLayout(1, SUM))[:, None]
    part_o = gl.arange(0, AT_ONCE, gl.SliceLayout(1, gl.SliceLayout(2, ALL)))[:, None, None]
    part_sums = gl.arange(0, AT_ONCE, gl.SliceLayout(1, gl.SliceLayout(2, PAIRS)))[:, None, None]
    mean = _load_mean(v_mean_ptr, head, d, D)
    # To the range that it begins in, the head is one that ends after it; to the others, one that began before.
    first = (work.workers + start) * ROWS
    m, mass = gl.split(gl.load(parts.sums + 2 * first + in_sums, mask=inside_sums, other=0.0))
    m = gl.convert_layout(m, ROW)
    mass = gl.convert_layout(mass, ROW)
    offset = mass * 0.0
    if OFFSETS:
        offset = gl.load(parts.offsets + first + row, mask=batch.row0 + row < num_q * batch.GROUP, other=0.0)
    o = gl.load(parts.o + first * WIDTH + in_o, mask=inside_o, other=0.0)
    for base in range(start + 1, last + 1, AT_ONCE):
        left = last + 1 - base
        at = base * ROWS
        some_o = gl.load(
            parts.o + at * WIDTH + part_o * (ROWS * WIDTH) + in_o[None, :, :], mask=(part_o < left) & inside_o[None, :, :], other=0.0
        )
        some_m, some_mass = gl.split(
            gl.load(
                parts.sums + 2 * at + part_sums * (2 * ROWS) + in_sums[None, :, :],
                mask=(part_sums < left) & inside_sums[None, :, :],
                other=NO_SCORE,
            )
        )
        some_m = gl.convert_layout(some_m, SUM)
        some_mass = gl.where(part < left, gl.convert_layout(some_mass, SUM), 0.0)
        m_new = gl.maximum(m, gl.max(some_m, 0))
        shrink = gl.exp2(m - m_new)
        weight = gl.exp2(some_m - m_new[None, :])
        mass = mass * shrink + gl.sum(some_mass * weight, 0)
        o = o * gl.convert_layout(shrink, gl.SliceLayout(0, o.type.layout))[None, :] + gl.sum(some_o * weight[:, None, :], 0)
        m = m_new
    _finish(o, m, mass, offset, mean, v_mean_ptr, batch, head, query, num_q, sinks_ptr, out_ptr, lse_ptr, D, SINKS, SOFTCAP)


@gluon.jit
def _clear_rest(batch, num_tokens, out_ptr, lse_ptr, D: gl.constexpr, WIDTH: gl.constexpr):
    """Zeros in tokens past the last sequence's: they belong to no sequence."""
    d = gl.arange(0, WIDTH, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    heads = batch.heads * batch.GROUP
    rest = gl.load(batch.bounds + batch.num_seqs) * heads
    for row in range(rest + gl.program_id(0), num_tokens * heads, gl.num_programs(0)):
        gl.store(out_ptr + row * D + d, gl.zeros_like(d).to(out_ptr.dtype.element_ty), mask=d < D)
        gl.store(lse_ptr + row, float("-inf"))


@gluon.jit(do_not_specialize=["table_stride", "num_seqs", "heads", "max_q", "num_tokens", "window", "workers", "plane"])
def decode(q_ptr, q_stride_t, q_stride_h, k_desc, v_desc, pool_ptr, k_mean_ptr, v_mean_ptr, table_ptr, table_stride, lengths_ptr,
           bounds_ptr, leftpad_ptr, sinks_ptr, out_ptr, lse_ptr, part_ptr, plane, state_ptr, num_seqs, heads, max_q, num_tokens, window,
           workers, scale, softcap, D: gl.constexpr, WIDTH: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, USED: gl.constexpr,
           TILES: gl.constexpr, STAGES: gl.constexpr, BLOCK: gl.constexpr, CAUSAL: gl.constexpr, RAGGED: gl.constexpr,
           WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr, LEFTPAD: gl.constexpr, ROTATE: gl.constexpr,
           EARLY_V: gl.constexpr):  # fmt: skip
    """`workers * TILES` CTAs. Neighbors read the same pages at the same time for different row tiles: memory is read once."""
    row_tile = gl.program_id(0) % TILES
    worker = gl.program_id(0) // TILES
    batch = Batch(
        lengths_ptr, bounds_ptr, leftpad_ptr, num_seqs, heads, max_q, window, row_tile * ROWS, GROUP, RAGGED, WINDOW, LEFTPAD
    )  # fmt: skip
    # Every row tile has its own parts, as its own ranges.
    first = row_tile * (2 * workers) * ROWS
    sums_ptr = part_ptr + plane * WIDTH
    parts = Parts(part_ptr + first * WIDTH, sums_ptr + 2 * first, sums_ptr + 2 * plane + first, state_ptr + row_tile * workers)
    source = Source(k_desc, v_desc, pool_ptr, table_ptr, table_stride, D)
    # Before the warps part, all that the first page has to wait for and nothing else; but for the first queries, which would otherwise
    # wait behind the pages that the SM has requested.
    count = batch.counts(0, BLOCK)
    pipe = make_pipe(k_desc, WIDTH, STAGES)
    pipe.open(0, 1)
    work = assign(batch, count, worker, workers, BLOCK)
    _, query, num_q, _, _, _ = batch.sequence(work.seq)
    first_q, first_k_mean = _load_query(
        q_ptr, k_mean_ptr, batch, work.head, query, num_q, q_stride_t, q_stride_h, D, WIDTH, ROWS,
        gl.DotOperandLayout(1, _mma_layout(gl.num_warps()), 4),
    )  # fmt: skip
    requested = request_first(pipe, batch, work, source)
    pipe.open(1, STAGES)
    gl.warp_specialize([
        (_consume, (pipe, batch, work, parts, first_q, first_k_mean, q_ptr, q_stride_t, q_stride_h, k_mean_ptr, v_mean_ptr, sinks_ptr,
                    out_ptr, lse_ptr, scale, softcap, D, WIDTH, ROWS, USED, CAUSAL, SOFTCAP, SINKS, ROTATE, EARLY_V)),
        (produce, (pipe, batch, work, requested, source)),
    ], [1], [PRODUCER_REGISTERS])  # fmt: skip
    if RAGGED:
        _clear_rest(batch, num_tokens, out_ptr, lse_ptr, D, WIDTH)


@dataclass(frozen=True)
class Launch:
    """How the kernel is laid out for one shape of problem: everything that is compiled in, and the number of CTAs."""

    head_dim: int
    group: int
    max_rows: int  # query tokens x group of the longest sequence
    num_seqs: int
    causal: bool = False  # among the query tokens
    ragged: bool = False
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    leftpad: bool = False
    rotate: bool = False  # the queries, as the keys are

    @property
    def width(self) -> int:
        return 1 << (self.head_dim - 1).bit_length()

    @property
    def rows(self) -> int:
        return 8 if self.max_rows <= 8 else 16

    @property
    def tiles(self) -> int:
        return -(-self.max_rows // self.rows)

    @property
    def stages(self) -> int:
        return {64: 4, 128: 2, 256: 3 if self.rows == 8 else 2}[self.width]

    @property
    def ctas_per_sm(self) -> int:
        """That there is room for."""
        return 1 if self.width == 256 else 2

    def workers(self, num_sms: int, heads: int) -> int:
        """Ranges that the work of one row tile is cut into: one an SM, or two if there are heads enough for all; or a few less, if then
        sequences of one length are cut alike. (Two are faster by 1% where no head is shared; else one is, with half the parts.)"""
        for ctas in range(self.ctas_per_sm, 0, -1):
            most = max(1, ctas * num_sms // self.tiles)
            even = [n for n in range(most - most // 16, most + 1) if n % heads == 0 or heads % n == 0]
            workers = max(even, key=lambda n: n & -n) if even else max(most // 32 * 32, min(most, 32))
            if workers <= heads:
                break
        return workers

    def constants(self) -> dict[str, object]:
        return {
            "D": self.head_dim, "WIDTH": self.width, "GROUP": self.group, "ROWS": self.rows, "TILES": self.tiles, "STAGES": self.stages,
            "USED": min(self.rows, 1 << (self.max_rows - 1).bit_length()), "BLOCK": 32 if self.num_seqs <= 32 else 128,
            "CAUSAL": self.causal, "RAGGED": self.ragged, "WINDOW": self.window, "SOFTCAP": self.softcap,
            "SINKS": self.sinks, "LEFTPAD": self.leftpad, "ROTATE": self.rotate, "EARLY_V": self.width * self.rows <= 2048,
        }  # fmt: skip

    def options(self) -> dict[str, int]:
        """Under warp specialization every register must be spoken for, so `maxnreg` is the SM's 65536 over all its threads."""
        return {"num_warps": WARPS, "maxnreg": min(65536 // (self.ctas_per_sm * 2 * WARPS * 32), 248)}


class Plan(NamedTuple):
    """What the host works out of a problem's shape, once."""

    workers: int
    grid: tuple[int]
    counters: Counters  # one for each range of each row tile
    plane: int  # rows of partial results: two a range at most, of a head that began before it and of one that ends after it
    width: int
    constants: Constants


@lru_cache(maxsize=4096)
def plan(device: torch.device, heads: int, *shape) -> Plan:
    """The plan for `Launch(*shape)` and `heads` heads of all sequences together."""
    how = Launch(*shape)
    workers = how.workers(num_sms(device), heads)
    given = constants("decode", device, **how.constants(), **how.options())
    return Plan(workers, (workers * how.tiles,), Counters(workers * how.tiles), 2 * workers * how.tiles * how.rows, how.width, given)


def unsupported_reason(q: torch.Tensor, pages: KVPages, max_seqlen_q: int) -> str | None:
    """Why this kernel does not take these queries; None if it does."""
    group = q.shape[-2] // pages.num_kv_heads
    if max_seqlen_q * group > MAX_ROWS:
        return f"{max_seqlen_q} query tokens x {group} heads of a group are more than the {MAX_ROWS} rows that decoding is made for"
    return None


def attention(
    q: torch.Tensor,
    pages: KVPages,
    *,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int,
    causal: bool,
    softmax_scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    leftpad_k: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.attention` for up to 128 rows (query tokens x GQA group) a sequence: one launch, nothing read back to the host."""
    device = q.device
    num_tokens, num_q_heads, head_dim = q.shape
    num_pages, heads, num_seqs = pages.num_pages, pages.num_kv_heads, pages.num_seqs
    out = torch.empty(num_tokens, num_q_heads, head_dim, dtype=q.dtype, device=device)
    lse = torch.empty(num_tokens, num_q_heads, dtype=torch.float32, device=device)
    if not num_tokens or not num_pages or not pages.page_table.shape[1]:
        return out.zero_(), lse.copy_(sinks if sinks is not None else torch.tensor(float("-inf")))
    group = num_q_heads // heads
    workers, grid, counters, plane, width, given = plan(
        device, heads * num_seqs, head_dim, group, max_seqlen_q * group, num_seqs, causal and max_seqlen_q > 1, cu_seqlens_q is not None,
        window > 0, softcap > 0, sinks is not None, leftpad_k is not None, pages.rotate_keys,
    )  # fmt: skip
    parts = torch.empty(plane * (width + 3), dtype=torch.float32, device=device)
    table, lengths = pages.page_table, pages.cache_seqlens
    stride_t, stride_h, _ = q.stride()
    args = (
        q, stride_t, stride_h,
        *tiles(pages, width, width),
        pages.pool, pages.k_mean, pages.v_mean, table, table.stride(0), lengths,
        # The lengths stand in for what is not given and not read.
        lengths if cu_seqlens_q is None else cu_seqlens_q, lengths if leftpad_k is None else leftpad_k, lengths if sinks is None else sinks,
        out, lse, parts, plane, counters, num_seqs, heads, max_seqlen_q, num_tokens, window, workers,
        float(softmax_scale), softcap * LOG2E.value,
    )  # fmt: skip
    launch(decode, grid, args, given)
    return out, lse
