"""Divides a problem into CTAs, items and parts of the keys, on the host (docs/kernels.md, "How a problem is cut")."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ..combine import MAX_SPLITS
from ..devices import Chip
from .options import ROWS, TILE


@dataclass(frozen=True)
class Shape:
    """The shape of a CTA for one (padded) head_dim, from measurements (docs/kernels.md)."""

    warpgroups: int
    parts: int  # number of parts of V's channels, each of them one product; more than one if registers are scarce
    stages: int
    cubics: int  # how many of 16 exponentials are computed on the FMA pipe
    registers: int  # registers of a multiplying thread; the producer's warp gets the rest of 64 K
    producer_registers: int

    @property
    def rows(self) -> int:
        """Query rows of an item."""
        return self.warpgroups * ROWS.value


SHAPES = {
    64: (Shape(3, 1, 3, 0, 160, 24),),
    128: (Shape(2, 1, 3, 1, 240, 24), Shape(3, 2, 3, 0, 160, 24)),
    256: (Shape(2, 4, 2, 0, 240, 24),),
}
PADDED = {64: 64, 80: 128, 96: 128, 128: 128, 192: 256, 256: 256}  # TMA pads with zeros
PART, LONG_PART = 8, 128  # the smallest number of tiles in a part: if items leave SMs idle, and otherwise
# The number of heads of Q whose items are in one order (a wave): as many as have their K and V in L2, up to MAX_HEADS. (GQA groups share K
# and V, but the number is the same.) Causal items differ in length, and the longest are first. This balances the SMs if each has CLAIMS
# items, or if the order has MIN_HEADS heads. The numbers are measured.
MAX_HEADS, MIN_HEADS, CLAIMS = 32, 8, 10
EXACT = 1.7  # a tile's time with Q and P multiplied twice, over its time without, measured


class Problem(NamedTuple):
    """What the host knows about a problem, from which it chooses a cut."""

    num_seqs: int
    num_q_heads: int
    head_dim: int
    tokens: int  # of a ragged batch, or 0
    max_seqlen_q: int
    tiles: int  # the largest number of tiles of keys that a query sees
    causal: bool  # and the first query of a sequence sees fewer
    exact: bool  # Q and P are multiplied twice


def best_cut(width: int, sms: int, problem: Problem, chip: Chip) -> tuple[Shape, int]:
    """The shape, and the parts of the keys, that take the least time."""
    return min(cuts(width, sms, problem), key=lambda cut: microseconds(*cut, sms, problem, chip))


def cuts(width: int, sms: int, problem: Problem) -> Iterable[tuple[Shape, int]]:
    """The ways to cut a problem: a shape, and a number of parts of the keys.

    If items fill the GPU, parts can only make the last wave fuller. Only the device knows the lengths of the sequences in a ragged batch,
    so their keys are not divided then.
    """
    for shape in SHAPES[width]:
        items = max(1, problem.num_seqs * problem.num_q_heads * -(-problem.max_seqlen_q // shape.rows))
        if items < sms:
            most = min(problem.tiles // PART, 4 * sms // items, MAX_SPLITS)
        else:
            most = 1 if problem.tokens else min(problem.tiles // LONG_PART, 4)
        for splits in range(1, max(1, most) + 1):
            yield shape, splits


def microseconds(shape: Shape, splits: int, sms: int, problem: Problem, chip: Chip) -> float:
    """The estimated time of a launch, in microseconds."""
    num_seqs, num_q_heads, head_dim, tokens, max_seqlen_q, tiles, causal, exact = problem
    tile, item = chip.prefill[PADDED[head_dim], shape.warpgroups]
    if exact:
        tile *= EXACT
    most = -(-max_seqlen_q // shape.rows)  # blocks of a sequence
    blocks = tokens / shape.rows + num_seqs / 2 if tokens else num_seqs * most
    items = num_q_heads * blocks * splits
    fewest = max(1, tiles - (most - 1) * shape.rows // TILE.value) if causal else tiles
    longest = item + tile * tiles / splits
    shortest = item + tile * fewest / splits
    # Long items are first. So CTAs that wait for the end of the last item have just computed a short one.
    time = max(longest, (items * (longest + shortest) / 2 + -items % sms * shortest) / sms)
    if splits > 1:
        once, byte = chip.combine
        time += once + byte * 4 * head_dim * num_q_heads * (tokens or num_seqs * max_seqlen_q) * splits
    return time


def min_tiles_per_split(items: int, splits: int, sms: int, tiles: int) -> int:
    """The smallest number of tiles in a part.

    It is larger if parts only make waves even, which does not help if there are far fewer keys than the table has pages.
    """
    return PART if items < sms else max(PART, tiles // splits // 2)


def heads_per_wave(rows: int, sms: int, max_seqlen_q: int, head_dim: int, tiles: int, causal: bool, chip: Chip) -> int:
    """Number of heads of Q whose items are in one order. `rows` is the number of rows of an item."""
    heads = min(MIN_HEADS, -(-CLAIMS * sms * rows // max(1, max_seqlen_q))) if causal else 1
    return min(max(heads, chip.l2 // (2 * head_dim * TILE.value * tiles)), MAX_HEADS)
