"""The order of items: by sequence, in a ragged batch those with many keys first; and in a sequence some heads at a
time.
"""

from __future__ import annotations

from ..common import PAGE
from ..gluon import aggregate, gl, gluon

# The number of heads of Q in a wave, whose items are in one order: as many as have their K and V in L2, up to
# MAX_HEADS. (GQA groups share K and V, but the number is the same.) Causal items differ in length, and the longest are
# first. This balances the SMs if each has CLAIMS items, or if the wave has MIN_HEADS heads. The numbers are measured.
MAX_HEADS = gl.constexpr(32)
MIN_HEADS = gl.constexpr(8)
CLAIMS = 10


@aggregate
class PrefillBatch:
    """The sequences. Pointers may be None: without bounds the batch is dense, and without padding no key is masked on
    the left.

    Without lengths each sequence has `new_keys` keys. A wave of a dense batch has `wave` heads; in a ragged batch each
    sequence has its own number, which follows from `wave_rows` and `wave_pages` (`heads_in_wave`).
    """

    bounds: gl.tensor | gl.constexpr  # int32 [num_seqs + 1], of the queries of a ragged batch
    lengths: gl.tensor | gl.constexpr  # int32 [num_seqs]: keys
    new_keys: gl.tensor
    padding: gl.tensor | gl.constexpr  # int32 [num_seqs]: keys on the left that are masked
    num_tokens: gl.tensor
    num_seqs: gl.tensor
    num_q_heads: gl.tensor
    window: gl.tensor
    wave: gl.tensor
    wave_rows: gl.tensor  # queries with which each SM has CLAIMS items; 0 if items have one length
    wave_pages: gl.tensor  # pages of one head in L2
    BLOCK: gl.constexpr  # query rows of an item


@aggregate
class Search:
    """The state of the search for a sequence of a ragged batch."""

    exponent: gl.tensor  # the exponent of the sequences that are taken now
    below: gl.tensor  # the largest exponent below it that was found so far
    first: gl.tensor  # the first of the 32 sequences that are searched
    before: gl.tensor  # items before them


@aggregate
class PrefillSequence:
    """The sequence of a claim. A dense batch is one sequence with the heads of all sequences."""

    search: Search
    index: gl.tensor
    base: gl.tensor  # items before it
    start: gl.tensor  # its first query
    q_len: gl.tensor  # its queries
    blocks: gl.tensor  # blocks of its queries
    wave: gl.tensor  # heads in one order


@gluon.jit
def draw(counter_ptr, wanted):
    """If `wanted`, one lane takes the next number of the launch's counter. `claimed` waits for it."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    return gl.atomic_add(
        counter_ptr + lane, gl.full([32], 1, gl.int32, lane.type.layout), mask=(lane == 0) & wanted, sem="relaxed"
    )


@gluon.jit
def claimed(ticket):
    """The claim after a program's first one."""
    lane = gl.arange(0, 32, ticket.type.layout)
    return gl.num_programs(0) + gl.sum(gl.where(lane == 0, ticket, 0), 0)


@gluon.jit
def heads_in_wave(q_len, pages, batch):
    """Number of heads in a wave of a sequence of `q_len` queries, the longest of whose items reads `pages`;
    `cut.heads_in_wave` is the same on the host."""
    heads = gl.minimum((batch.wave_rows + q_len - 1) // gl.maximum(q_len, 1), MIN_HEADS)
    return gl.minimum(gl.maximum(gl.maximum(heads, batch.wave_pages // gl.maximum(pages, 1)), 1), MAX_HEADS)


@gluon.jit
def scheduler_init(q_len, batch):
    """The sequence that `advance_to` begins with; `q_len` is 0 in a ragged batch, where the first one is
    searched for.
    """
    index = 0
    base = 0
    start = 0
    exponent = 255  # the largest exponent of a float, which no sequence has
    below = -1
    first = 0
    before = 0
    blocks = (q_len + batch.BLOCK - 1) // batch.BLOCK
    search = Search(exponent, below, first, before)
    return PrefillSequence(search, index, base, start, q_len, blocks, batch.wave)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def seek(search, claim, batch):
    """Find the sequence of item `claim` in a ragged batch.

    Sequences are sorted by the power of two below the number of keys that their longest items see, largest first, and
    then by their number. So no long item begins last. 32 sequences are searched at a time. Those without queries have
    no items.

    Returns:
        The sequence, whose index is `num_seqs + 1` after the last item.
    """
    BLOCK: gl.constexpr = batch.BLOCK
    num_seqs = batch.num_seqs
    exponent = search.exponent
    below = search.below
    first = search.first
    before = search.before
    index = num_seqs + 1
    base = before
    start = 0
    q_len = 0
    pages = 0
    while (index > num_seqs) & (exponent >= 0):
        one = first + gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
        begin = gl.load(batch.bounds + one, mask=one <= num_seqs, other=batch.num_tokens)
        queries = gl.load(batch.bounds + one + 1, mask=one < num_seqs, other=batch.num_tokens) - begin
        keys = gl.minimum(gl.load(batch.lengths + one, mask=one < num_seqs, other=0), batch.window + BLOCK)
        items = (queries + BLOCK - 1) // BLOCK * batch.num_q_heads
        longest = gl.where(items > 0, gl.maximum(keys, 0).to(gl.float32).to(gl.int32, bitcast=True) >> 23, -1)
        items = gl.where(longest == exponent, items, 0)
        end = before + gl.associative_scan(items, 0, add)
        here = (claim < end) & (claim >= end - items)
        base = gl.max(end, 0)
        if claim < base:
            index = gl.max(gl.where(here, one, 0), 0)
            base = gl.max(gl.where(here, end - items, 0), 0)
            start = gl.max(gl.where(here, begin, 0), 0)
            q_len = gl.max(gl.where(here, queries, 0), 0)
            pages = (gl.max(gl.where(here, keys, 0), 0) + PAGE - 1) // PAGE
        else:
            before = base
            below = gl.maximum(below, gl.max(gl.where(longest < exponent, longest, -1), 0))
            first += 32
            if first > num_seqs:
                exponent = below
                below = -1
                first = 0
    blocks = (q_len + BLOCK - 1) // BLOCK
    wave = heads_in_wave(q_len, pages, batch)
    search = Search(exponent, below, first, before)
    return PrefillSequence(search, index, base, start, q_len, blocks, wave)


@gluon.jit
def advance_to(claim, sequence, seqs, heads, batch):
    """The sequence of item `claim`, from the sequence of the previous claim.

    Args:
        seqs: number of sequences, and the index after the last item.
        heads: number of heads of a sequence.
    """
    while (sequence.index < seqs) & (claim >= sequence.base + sequence.blocks * heads):
        if batch.bounds is None:
            sequence = PrefillSequence(
                index=sequence.index + 1, base=sequence.base + sequence.blocks * heads, start=sequence.start,
                search=sequence.search, q_len=sequence.q_len, blocks=sequence.blocks, wave=sequence.wave,
            )  # fmt: skip
        else:
            sequence = seek(sequence.search, claim, batch)
    return sequence
