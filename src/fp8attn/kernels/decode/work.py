"""The work of a launch: a list of the tiles of all heads of all sequences, cut into one range for each worker, of equal
lengths.

Every CTA computes its own range from the lengths of the sequences. The host does not read them, and there is no launch
before this one.
"""

from __future__ import annotations

from ..gluon import aggregate, gl, gluon


@aggregate
class DecodeSequence:
    """One sequence: its queries, its keys, and the tiles that a row tile must read."""

    length: gl.tensor  # keys
    query: gl.tensor  # index of the first query token
    num_q: gl.tensor  # query tokens
    pad: gl.tensor  # padding tokens, before the others
    first_tile: gl.tensor  # that some row sees
    num_tiles: gl.tensor  # from that one on
    places: gl.tensor  # of each head in the list of work


@aggregate
class DecodeBatch:
    """The sequences, and the places of their heads in the list of work."""

    lengths: gl.tensor  # pointers to int32: keys, bounds of the queries, keys of padding
    bounds: gl.tensor
    leftpad: gl.tensor
    num_seqs: gl.tensor
    heads: gl.tensor  # KV heads
    max_q: gl.tensor
    window: gl.tensor
    row0: gl.tensor  # first query row of this row tile
    OPTIONS: gl.constexpr  # `plan.DecodeOptions`

    @gluon.jit
    def tiles(self, length, num_q, pad):
        """The first tile that some row sees, and the number of tiles from it on. Scalars or vectors.

        A sequence without rows has no tiles. One with rows has at least one tile, even if it is empty, because its
        zeros must be written.
        """
        TILE: gl.constexpr = self.OPTIONS.tile
        last = gl.maximum(length - 1, 0) // TILE
        first = last * 0
        if self.OPTIONS.window:
            first = gl.maximum(length - num_q - self.window + 1, 0) // TILE
        if self.OPTIONS.leftpad:
            first = gl.maximum(first, pad // TILE)
        first = gl.minimum(first, last)
        return first, gl.where(num_q * self.OPTIONS.group > self.row0, last + 1 - first, 0)

    @gluon.jit
    def places(self, tiles):
        """The places of a head of `tiles` in the list of work: its tiles. A short head has more, for the time of its
        beginning and end.
        """
        return gl.where((tiles > 0) & (tiles <= self.OPTIONS.whole_tiles), tiles + self.OPTIONS.head_tiles, tiles)

    @gluon.jit
    def inside(self, row, seq):
        """Whether rows are queries of a sequence."""
        return row < seq.num_q * self.OPTIONS.group

    @gluon.jit
    def sequence(self, seq):
        """The sequence of an index."""
        length = gl.load(self.lengths + seq)
        query = seq * self.max_q
        num_q = self.max_q
        if self.OPTIONS.ragged:
            query = gl.load(self.bounds + seq)
            num_q = gl.load(self.bounds + seq + 1) - query
        pad = length * 0
        if self.OPTIONS.leftpad:
            pad = gl.load(self.leftpad + seq)
        first, tiles = self.tiles(length, num_q, pad)
        return DecodeSequence(length, query, num_q, pad, first, tiles, self.places(tiles))

    @gluon.jit
    def counts(self, base):
        """Numbers of places (of one head) of the sequences `[base, base + block)`, all of them in every warp."""
        BLOCK: gl.constexpr = self.OPTIONS.block
        seq = base + gl.arange(0, BLOCK, gl.BlockedLayout([BLOCK // 32], [32], [gl.num_warps()], [0]))
        inside = seq < self.num_seqs
        length = gl.load(self.lengths + seq, mask=inside, other=0)
        num_q = length * 0 + self.max_q
        pad = length * 0
        if self.OPTIONS.ragged:
            num_q = gl.load(self.bounds + seq + 1, mask=inside, other=0)
            num_q -= gl.load(self.bounds + seq, mask=inside, other=0)
        if self.OPTIONS.leftpad:
            pad = gl.load(self.leftpad + seq, mask=inside, other=0)
        _, tiles = self.tiles(length, num_q, pad)
        return gl.where(inside, self.places(tiles), 0)

    @gluon.jit
    def after(self, place, count, base, before):
        """Find a place among the sequences `[base, base + block)`, with `count` places each and `before` places before
        them.

        Returns the number of sequences that end at or before `place`, the place at which the last of these ends, and
        the number of places of all.
        """
        end = (gl.associative_scan(count, 0, _add) + before) * self.heads
        passed = (end <= place) & (base + gl.arange(0, self.OPTIONS.block, count.type.layout) < self.num_seqs)
        return gl.sum(passed.to(gl.int32), 0), gl.max(gl.where(passed, end, 0), 0), gl.sum(count, 0)

    @gluon.jit
    def portion(self, begin, seq, work):
        """The tiles `[i, j)` of a head of `seq`, whose places begin at `begin`, that belong to the range of `work`.

        A short head belongs completely to the range that contains its middle.
        """
        tiles = seq.num_tiles
        middle = begin + seq.places // 2
        mine = gl.where((work.low <= middle) & (middle < work.high), tiles, 0)
        short = tiles <= self.OPTIONS.whole_tiles
        first = gl.where(short, 0, gl.maximum(work.low - begin, 0))
        return first, gl.where(short, mine, gl.minimum(work.high - begin, tiles))

    @gluon.jit
    def following(self, seq, head, tiles):
        """The sequence and the head after `head` of `seq`, which has `tiles`."""
        last = (head + 1 == self.heads) | (tiles == 0)
        return gl.where(last, seq + 1, seq), gl.where(last, 0, head + 1)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _divide(a, b):
    """Floor division of numbers that are not negative: unsigned division takes half the instructions."""
    return (a.to(gl.uint32) // b.to(gl.uint32)).to(gl.int32)


@aggregate
class DecodeWork:
    """The places of all heads in one list, cut into a range for each worker; and the range of this worker.

    The cuts, and so the order of every sum, depend only on the lengths. A worker without work has an empty range.
    """

    worker: gl.tensor
    workers: gl.tensor  # that have work
    share: gl.tensor  # places of a range, one more for the first `rest` of them
    rest: gl.tensor
    low: gl.tensor  # this worker's range
    high: gl.tensor
    seq: gl.tensor  # the head that `low` is in, and the place at which this head begins
    head: gl.tensor
    begin: gl.tensor

    @gluon.jit
    def worker_of(self, place):
        """The worker whose range contains a place."""
        longer = self.rest * (self.share + 1)
        return gl.where(
            place < longer,
            _divide(place, self.share + 1),
            self.rest + _divide(place - longer, gl.maximum(self.share, 1)),
        )


@gluon.jit
def assign(batch, worker, workers):
    """The work of `worker`."""
    BLOCK: gl.constexpr = batch.OPTIONS.block
    count = batch.counts(0)
    total = gl.sum(count, 0)
    if BLOCK > 32:  # else there are no more sequences
        for base in range(BLOCK, batch.num_seqs, BLOCK):
            total += gl.sum(batch.counts(base), 0)
    total *= batch.heads
    workers = gl.maximum(gl.minimum(workers, total), 1)
    share = _divide(total, workers)
    rest = total - share * workers
    low = worker * share + gl.minimum(worker, rest)
    high = gl.where(worker < workers, low + share + (worker < rest).to(gl.int32), low)
    seq, begin, before = batch.after(low, count, 0, 0)
    if BLOCK > 32:
        for base in range(BLOCK, batch.num_seqs, BLOCK):
            more, end, places = batch.after(low, batch.counts(base), base, before)
            seq += more
            begin = gl.maximum(begin, end)
            before += places
    seq = gl.minimum(seq, batch.num_seqs - 1)  # without work it is past the last
    places = batch.sequence(seq).places
    head = gl.where(low < high, _divide(low - begin, gl.maximum(places, 1)), 0)
    begin = gl.where(low < high, begin + head * places, high)
    return DecodeWork(worker, workers, share, rest, low, high, seq, head, begin)
