"""The results of a head, from one range's sums or from the partial results of several ranges."""

from __future__ import annotations

from ..common import LN2, LOG2E, UNSEEN
from ..gluon import aggregate, gl, gluon
from .queries import load_mean


@aggregate
class DecodeOutput:
    """Pointers to the outputs, and to the inputs that results need besides keys and values."""

    out: gl.tensor  # [tokens, heads, head_dim]
    lse: gl.tensor  # [tokens, heads]
    v_mean: gl.tensor | gl.constexpr  # [KV heads, head_dim], or None
    sinks: gl.tensor  # [heads]; not read without `DecodeOptions.sinks`


@aggregate
class Parts:
    """Partial results `[2 * workers, rows]` of heads that several ranges share.

    Part r is from range r, of the head that began before it. Part workers + r is from range r, of the head that ends
    after it.
    """

    o: gl.tensor  # pointers; [..., width]
    sums: gl.tensor  # [..., 2]: row_max and row_sum
    mean_scores: gl.tensor  # [...], with MEAN_SCORES
    tiles: gl.tensor  # [workers], by the range that a head begins in: how many of its tiles are done
    MEAN_SCORES: gl.constexpr  # K has a mean

    @gluon.jit
    def store(self, part, o, row_max, row_sum, mean_score, batch, seq, channel, PAIR: gl.constexpr):
        """Stores `o [width, rows]`, whose channels are `channel`, and by row the sums and `mean_score`. PAIR: the
        layout of the sums.
        """
        options: gl.constexpr = batch.OPTIONS
        first = part * options.rows
        row = gl.arange(0, options.rows, gl.SliceLayout(0, o.type.layout))
        inside = batch.inside(batch.row0 + row, seq)
        mask = inside[None, :] & (channel < options.head_dim)[:, None]
        gl.store(self.o + (first + row)[None, :] * options.width + channel[:, None], o, mask=mask)
        if self.MEAN_SCORES:
            gl.store(self.mean_scores + first + row, gl.convert_layout(mean_score, row.type.layout), mask=inside)
        row = gl.arange(0, options.rows, gl.SliceLayout(1, PAIR))
        inside = batch.inside(batch.row0 + row, seq)
        in_sums = (first + row)[:, None] * 2 + gl.arange(0, 2, gl.SliceLayout(0, PAIR))[None, :]
        gl.store(self.sums + in_sums, gl.convert_layout(gl.join(row_max, row_sum), PAIR), mask=inside[:, None])


@gluon.jit
def store_head(o, row_max, row_sum, mean_score, mean, batch, seq, head, output):
    """Stores a head's output and LSE, from the sums over all its keys: `o [width, rows]`; by row, `row_max` and
    `mean_score`, which are exponents of two, and `row_sum`; by channel, V's `mean`."""
    options: gl.constexpr = batch.OPTIONS
    ROW: gl.constexpr = gl.SliceLayout(0, o.type.layout)
    COLUMN: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    row = batch.row0 + gl.arange(0, o.shape[1], ROW)
    d = gl.arange(0, o.shape[0], COLUMN)
    q_head = head * options.group + row % options.group
    out_row = (seq.query + row // options.group) * (batch.heads * options.group) + q_head
    inside = batch.inside(row, seq)
    row_max = gl.convert_layout(row_max, ROW)
    row_sum = gl.convert_layout(row_sum, ROW)
    mean_score = gl.convert_layout(mean_score, ROW)
    if options.softcap:
        mean_score = mean_score * 0.0  # the scores have it already
    total = row_sum
    weight = row_sum * 0.0 + 1.0
    if options.sinks:
        sink = gl.load(output.sinks + q_head, mask=inside, other=0.0).to(gl.float32) * LOG2E - mean_score
        top = gl.maximum(row_max, sink)
        weight = gl.exp2(row_max - top)
        total = row_sum * weight + gl.exp2(sink - top)
        row_max = top
    weight = weight / total
    result = o * weight[None, :]
    if output.v_mean is not None:
        result += gl.convert_layout(mean, COLUMN)[:, None] * (row_sum * weight)[None, :]
    result = gl.where((row_sum == 0)[None, :], 0.0, result)  # for a row that sees no key; a NaN stays
    mask = inside[None, :] & (d < options.head_dim)[:, None]
    gl.store(
        output.out + out_row.to(gl.int64)[None, :] * options.head_dim + d[:, None],
        result.to(output.out.dtype.element_ty),
        mask=mask,
    )
    gl.store(output.lse + out_row, (row_max + gl.log2(total) + mean_score) * LN2, mask=inside)


@gluon.jit
def combine_ranges(start, last, batch, seq, head, workers, parts, output):
    """Compute the results of one head from the parts of the ranges `[start, last]`, in this order, so that equal inputs
    give equal bits.

    Only `used_rows` of `rows` exist. Layouts are such that what a thread loads is at constant distances from one
    address.
    """
    options: gl.constexpr = batch.OPTIONS
    ROWS: gl.constexpr = options.rows
    USED: gl.constexpr = options.used_rows
    WIDTH: gl.constexpr = options.width
    WARPS: gl.constexpr = gl.num_warps()
    BY_ROW: gl.constexpr = min(USED, WARPS)
    CHANNELS: gl.constexpr = max(1, min(4, WIDTH * BY_ROW // (32 * WARPS)))
    AT_ONCE: gl.constexpr = max(2, min(32, 8192 // (WIDTH * USED)))  # parts in flight: up to 64 registers
    ALL: gl.constexpr = gl.BlockedLayout([AT_ONCE, CHANNELS, 1], [1, 32, 1], [1, WARPS // BY_ROW, BY_ROW], [1, 2, 0])
    SUM: gl.constexpr = gl.SliceLayout(1, ALL)  # [parts, rows]
    ROW: gl.constexpr = gl.SliceLayout(0, SUM)
    # [parts, rows, 2]
    PAIRS: gl.constexpr = gl.SliceLayout(
        1, gl.BlockedLayout([AT_ONCE, CHANNELS, 1, 2], [1, 32, 1, 1], [1, WARPS // BY_ROW, BY_ROW, 1], [3, 1, 2, 0])
    )
    PAIR: gl.constexpr = gl.SliceLayout(0, PAIRS)
    d = gl.arange(0, WIDTH, gl.SliceLayout(1, gl.SliceLayout(0, ALL)))
    row = gl.arange(0, USED, gl.SliceLayout(0, gl.SliceLayout(0, ALL)))
    in_o = row[None, :] * WIDTH + d[:, None]
    inside_o = batch.inside(batch.row0 + row, seq)[None, :] & (d < options.head_dim)[:, None]
    row = gl.arange(0, USED, gl.SliceLayout(1, PAIR))
    in_sums = row[:, None] * 2 + gl.arange(0, 2, gl.SliceLayout(0, PAIR))[None, :]
    inside_sums = batch.inside(batch.row0 + row, seq)[:, None]
    row = gl.arange(0, USED, ROW)
    part = gl.arange(0, AT_ONCE, gl.SliceLayout(1, SUM))[:, None]
    part_o = gl.arange(0, AT_ONCE, gl.SliceLayout(1, gl.SliceLayout(2, ALL)))[:, None, None]
    part_sums = gl.arange(0, AT_ONCE, gl.SliceLayout(1, gl.SliceLayout(2, PAIRS)))[:, None, None]
    mean = load_mean(output.v_mean, head, d, options.head_dim)
    # The head ends after the range in which it begins, and began before the others.
    first = (workers + start) * ROWS
    row_max, row_sum = gl.split(gl.load(parts.sums + 2 * first + in_sums, mask=inside_sums, other=0.0))
    row_max = gl.convert_layout(row_max, ROW)
    row_sum = gl.convert_layout(row_sum, ROW)
    mean_score = row_sum * 0.0
    if parts.MEAN_SCORES:
        inside = batch.inside(batch.row0 + row, seq)
        mean_score = gl.load(parts.mean_scores + first + row, mask=inside, other=0.0)
    o = gl.load(parts.o + first * WIDTH + in_o, mask=inside_o, other=0.0)
    for base in range(start + 1, last + 1, AT_ONCE):
        left = last + 1 - base
        at = base * ROWS
        some_o = gl.load(
            parts.o + at * WIDTH + part_o * (ROWS * WIDTH) + in_o[None, :, :],
            mask=(part_o < left) & inside_o[None, :, :],
            other=0.0,
        )
        some_max, some_sum = gl.split(
            gl.load(
                parts.sums + 2 * at + part_sums * (2 * ROWS) + in_sums[None, :, :],
                mask=(part_sums < left) & inside_sums[None, :, :],
                other=UNSEEN,
            )
        )
        some_max = gl.convert_layout(some_max, SUM)
        some_sum = gl.where(part < left, gl.convert_layout(some_sum, SUM), 0.0)
        new_max = gl.maximum(row_max, gl.max(some_max, 0))
        rescale = gl.exp2(row_max - new_max)
        weight = gl.exp2(some_max - new_max[None, :])
        row_sum = row_sum * rescale + gl.sum(some_sum * weight, 0)
        o = o * gl.convert_layout(rescale, gl.SliceLayout(0, o.type.layout))[None, :] + gl.sum(
            some_o * weight[:, None, :], 0
        )
        row_max = new_max
    store_head(o, row_max, row_sum, mean_score, mean, batch, seq, head, output)


@gluon.jit
def clear_rest(batch, num_tokens, output):
    """Write zeros to the output, and -inf to the LSE, of tokens after the last sequence's."""
    options: gl.constexpr = batch.OPTIONS
    d = gl.arange(0, options.width, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    heads = batch.heads * options.group
    rest = gl.load(batch.bounds + batch.num_seqs) * heads
    for row in range(rest + gl.program_id(0), num_tokens * heads, gl.num_programs(0)):
        first = row.to(gl.int64) * options.head_dim
        gl.store(output.out + first + d, gl.zeros_like(d).to(output.out.dtype.element_ty), mask=d < options.head_dim)
        gl.store(output.lse + row, float("-inf"))
