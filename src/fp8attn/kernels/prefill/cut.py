"""Divides a problem into CTAs, items and parts of the keys, on the host (docs/prefill.md, "How a problem is cut")."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ...formats.page_layout import PAGE_SIZE
from ..combine import MAX_SPLITS
from ..common import power_of_two
from ..devices import Chip
from .registers import ROWS
from .schedule import MAX_HEADS, MIN_HEADS


@dataclass(frozen=True)
class Shape:
    """The shape of a CTA for one (padded) head_dim, from measurements (docs/prefill.md)."""

    warpgroups: int
    parts: int  # number of parts of V's channels, each of them one product; more than one if registers are scarce
    stages: int
    cubics: int  # how many of 16 exponentials are computed on the FMA pipe, with 16-bit queries
    q8_cubics: int  # how many with FP8 queries
    registers: int  # registers of a multiplying thread; the producer's get `producer.PRODUCER_REGISTERS`
    tile: int = PAGE_SIZE  # keys of a tile, a part of a page

    @property
    def rows(self) -> int:
        """Query rows of an item."""
        return self.warpgroups * ROWS.value

    @property
    def partitions(self) -> int:
        """The warpgroups share one copy of the instructions, if a partition may have so many warps: a power of two."""
        return 1 if self.warpgroups == 2 else self.warpgroups

    def idle(self, rows: float) -> float:
        """The share of the partitions that have none of the first `rows` rows of a block."""
        return 1 - math.ceil(max(rows, 1) * self.partitions / self.rows) / self.partitions


SHAPES = {
    64: (Shape(3, 1, 3, 0, 0, 160),),
    128: (Shape(2, 1, 3, 1, 1, 240), Shape(3, 2, 3, 0, 1, 160)),
    256: (Shape(2, 4, 2, 0, 0, 240),),
}
# The shapes for `AttentionParams.batch_invariant`: one for any problem.
INVARIANT = {width: shapes[-1] for width, shapes in SHAPES.items()}
# Times and parts are counted in pages of keys, whatever the tile of a shape.
PART = 8  # the smallest number of pages in a part, if items leave SMs idle
LONG_PART = 128  # the smallest number otherwise
EXACT = 1.7  # the time of a page with Q and P multiplied twice, divided by its time without (measured)
PASSED_BY = 0.6  # the part of a page's time that shrinks with the partitions that have rows (measured: one of three)
Q8 = 0.5  # the time of an item with FP8 queries besides its pages, relative to 16-bit ones, which the kernel rounds
LAUNCH = 5.0  # microseconds that a second launch costs
GAIN = 0.98  # two launches are made if they take less than this share of the time of one


class Problem(NamedTuple):
    """What the host knows about a problem, from which it chooses a cut."""

    num_seqs: int
    num_q_heads: int
    head_dim: int
    tokens: int  # queries of all sequences
    max_seqlen_q: int
    pages: int  # the largest number of pages of keys that a query sees, by the width of the page table
    causal: bool  # the first query of a sequence sees fewer pages than the last
    ragged: bool  # only the device knows how many queries each sequence has
    exact: bool = False  # Q and P are multiplied twice
    q8: bool = False  # queries are in FP8

    def blocks(self, rows: int) -> list[tuple[float, float, float, float]]:
        """Blocks of `rows` queries of one head: how many there are, the pages of a sequence's last block, and those of
        its first; and the rows of a block that are queries, or all of them if blocks differ.

        In a ragged batch one sequence has the most queries. The others are taken to have equal shares of the rest, a
        first block that is half empty, and as many keys before their queries as that one.
        """
        most = -(-self.max_seqlen_q // rows)
        equal = self.num_seqs == 1 or self.tokens >= self.num_seqs * self.max_seqlen_q
        queries = self.max_seqlen_q if equal and most == 1 else rows
        groups = [((self.num_seqs if equal else 1) * most, self.pages, self._first(self.pages, most, rows), queries)]
        if not equal:
            mean = max(0, self.tokens - self.max_seqlen_q) / (self.num_seqs - 1)
            some = max(1.0, mean / rows + 0.5)
            pages = max(1.0, self.pages - (self.max_seqlen_q - mean) / PAGE_SIZE) if self.causal else self.pages
            groups.append(((self.num_seqs - 1) * some, pages, self._first(pages, some, rows), rows))
        return groups

    def _first(self, pages: float, blocks: float, rows: int) -> float:
        return max(1, pages - (blocks - 1) * rows // PAGE_SIZE) if self.causal else pages


def best_cut(width: int, sms: int, problem: Problem, chip: Chip) -> tuple[Shape, int]:
    """The shape, and the parts of the keys, that take the least time.

    Tables of serving engines are as wide as a sequence may become. So what is chosen for a ragged batch is good both if
    sequences fill the table and if there are no keys before their queries: it has the least product of both times.
    """
    fewest = -(-problem.max_seqlen_q // PAGE_SIZE) if problem.ragged else problem.pages
    lengths = {problem.pages, max(1, min(fewest, problem.pages))}
    return min(
        cuts(width, sms, problem),
        key=lambda cut: math.prod(microseconds(*cut, sms, problem._replace(pages=pages), chip) for pages in lengths),
    )


def cuts(width: int, sms: int, problem: Problem) -> Iterable[tuple[Shape, int]]:
    """The ways to cut a problem: a shape, and a number of parts of the keys.

    If items fill the GPU, parts can only make the last wave fuller. The keys of a ragged batch are not divided then,
    because most of them may be one sequence's.
    """
    for shape in SHAPES[width]:
        items = max(1, int(problem.num_q_heads * sum(blocks for blocks, *_ in problem.blocks(shape.rows))))
        if items < sms:
            most = min(problem.pages // PART, 4 * sms // items, MAX_SPLITS)
        else:
            most = 1 if problem.ragged else min(problem.pages // LONG_PART, 4)
        for splits in range(1, max(1, most) + 1):
            yield shape, splits


def microseconds(shape: Shape, splits: int, sms: int, problem: Problem, chip: Chip) -> float:
    """The estimated time of a launch, in microseconds."""
    page, item = chip.prefill[power_of_two(problem.head_dim), shape.warpgroups]
    if problem.exact:
        page *= EXACT
    if problem.q8:
        item *= Q8
    items = work = longest = shortest = 0.0
    for blocks, last, first, rows in problem.blocks(shape.rows):
        count = problem.num_q_heads * blocks * splits
        busy = page * (1 - PASSED_BY * shape.idle(rows)) / splits
        items += count
        work += count * (item + busy * (last + first) / 2)
        longest = max(longest, item + busy * last)
        shortest = item + busy * first
    # Long items are first. So CTAs that wait for the end of the last item have just computed a short one.
    time = max(longest, (work + -items % sms * shortest) / sms)
    if splits > 1:
        once, byte = chip.combine
        time += once + byte * 4 * problem.head_dim * problem.num_q_heads * problem.tokens * splits
    return time


def last_wave(width: int, sms: int, problem: Problem, chip: Chip) -> int:
    """How many queries of every sequence are computed by a second launch; 0: one launch computes all.

    If all items have the same length, the last wave may leave most SMs idle. Then the first launch has whole waves, and
    the second cuts keys into parts.
    """

    def time(queries: int) -> float:
        some = problem._replace(tokens=problem.num_seqs * queries, max_seqlen_q=queries)
        return min(microseconds(*cut, sms, some, chip) for cut in cuts(width, sms, some))

    most = problem.max_seqlen_q
    best, rest = GAIN * time(most), 0
    for shape in SHAPES[width]:
        row = problem.num_seqs * problem.num_q_heads  # items of one block of queries
        waves = -(-most // shape.rows) * row // sms
        first = waves * sms // row * shape.rows
        if 0 < first < most and (both := time(first) + time(most - first) + LAUNCH) < best:
            best, rest = both, most - first
    return rest


def min_pages_per_split(items: int, splits: int, sms: int, pages: int) -> int:
    """The smallest number of pages in a part.

    It is larger if parts only make waves even, which does not help if there are far fewer keys than the table has
    pages.
    """
    return PART if items < sms else max(PART, pages // splits // 2)


def heads_in_wave(q_len: int, pages: int, wave_rows: int, wave_pages: int) -> int:
    """Number of heads whose items are in one order in a dense batch; `schedule.PrefillBatch` has the arguments."""
    heads = min(-(-wave_rows // max(1, q_len)), MIN_HEADS.value)
    return min(max(heads, wave_pages // max(1, pages), 1), MAX_HEADS.value)
