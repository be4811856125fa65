"""In which order items are taken: sequence by sequence, of a ragged batch those of many keys first."""

from __future__ import annotations

from ..gluon import aggregate, gl, gluon


@aggregate
class Batch:
    """The sequences. Pointers may be None: no bounds is a dense batch, no padding is none."""

    bounds: gl.tensor | gl.constexpr  # int32 [num_seqs + 1], of the queries of a ragged batch
    lengths: gl.tensor  # int32 [num_seqs]: keys
    padding: gl.tensor | gl.constexpr  # int32 [num_seqs]: keys on the left that are masked
    num_tokens: gl.tensor
    num_seqs: gl.tensor
    num_q_heads: gl.tensor
    window: gl.tensor
    BLOCK: gl.constexpr  # query rows of an item


@aggregate
class Search:
    """Where the search for a sequence of a ragged batch goes on, which takes no item before it."""

    exponent: gl.tensor  # of the sequences that are taken now
    below: gl.tensor  # the largest exponent below it that was met since
    first: gl.tensor  # the first of the 32 sequences that are looked at
    before: gl.tensor  # items before them


@aggregate
class Sequence:
    """The sequence that a claim is of: a dense batch is one, of all sequences' heads."""

    index: gl.tensor
    base: gl.tensor  # items before it
    start: gl.tensor  # its first query
    search: Search
    q_len: gl.tensor  # its queries
    blocks: gl.tensor  # and their blocks


@gluon.jit
def claim_next(counter_ptr):
    """The next number of the launch's counter, taken by one lane."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    ticket = gl.atomic_add(counter_ptr + lane, gl.full([32], 1, gl.int32, lane.type.layout), mask=lane == 0, sem="relaxed")
    return gl.sum(gl.where(lane == 0, ticket, 0), 0)


@gluon.jit
def scheduler_init(q_len, BLOCK: gl.constexpr):
    """The sequence that `advance_to` begins with; `q_len` is 0 in a ragged batch, where the first one is searched for."""
    index = 0
    base = 0
    start = 0
    exponent = 255  # no sequence has a float's largest exponent
    below = -1
    first = 0
    before = 0
    return Sequence(index, base, start, Search(exponent, below, first, before), q_len, (q_len + BLOCK - 1) // BLOCK)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def seek(search, claim, batch):
    """The sequence of a ragged batch that item `claim` is of, and where the next claim's search begins.

    Sequences go by the power of two below the keys that their longest items see, largest first, in order where it is the same: a launch
    ends when its last item does. 32 of them are looked at together; those without queries have no items.

    Returns:
        The search; the sequence, or `num_seqs + 1` behind the last item; the items before it; its first query; its queries.
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
    while (index > num_seqs) & (exponent >= 0):
        one = first + gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
        begin = gl.load(batch.bounds + one, mask=one <= num_seqs, other=batch.num_tokens)
        queries = gl.load(batch.bounds + one + 1, mask=one < num_seqs, other=batch.num_tokens) - begin
        keys = gl.minimum(gl.load(batch.lengths + one, mask=one < num_seqs, other=0), batch.window + BLOCK)
        items = (queries + BLOCK - 1) // BLOCK * batch.num_q_heads
        own = gl.where(items > 0, gl.maximum(keys, 0).to(gl.float32).to(gl.int32, bitcast=True) >> 23, -1)
        items = gl.where(own == exponent, items, 0)
        end = before + gl.associative_scan(items, 0, add)
        here = (claim < end) & (claim >= end - items)
        base = gl.max(end, 0)
        if claim < base:
            index = gl.max(gl.where(here, one, 0), 0)
            base = gl.max(gl.where(here, end - items, 0), 0)
            start = gl.max(gl.where(here, begin, 0), 0)
            q_len = gl.max(gl.where(here, queries, 0), 0)
        else:
            before = base
            below = gl.maximum(below, gl.max(gl.where(own < exponent, own, -1), 0))
            first += 32
            if first > num_seqs:
                exponent = below
                below = -1
                first = 0
    return Search(exponent, below, first, before), index, base, start, q_len


@gluon.jit
def advance_to(claim, sequence, seqs, heads, batch):
    """The sequence that item `claim` is of, from that of the claim before.

    Args:
        seqs: sequences, and the index behind the last item.
        heads: of a sequence.
    """
    search = sequence.search
    index = sequence.index
    base = sequence.base
    start = sequence.start
    q_len = sequence.q_len
    blocks = sequence.blocks
    while (index < seqs) & (claim >= base + blocks * heads):
        if batch.bounds is None:
            base += blocks * heads
            index += 1
        else:
            search, index, base, start, q_len = seek(search, claim, batch)
            blocks = (q_len + batch.BLOCK - 1) // batch.BLOCK
    return Sequence(index, base, start, search, q_len, blocks)
