"""How a problem is cut into CTAs, items and parts of the keys, from what the host knows: see docs/kernels.md, "How a problem is cut"."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ..combine import MAX_SPLITS
from ..devices import Chip
from .options import ROWS, TILE


@dataclass(frozen=True)
class Shape:
    """How the kernel is cut for one (padded) head_dim; measured, see docs/kernels.md."""

    warpgroups: int
    parts: int  # of V's channels, each of them one product: one to a half or a quarter where registers are short
    stages: int
    cubics: int  # of every 16 exponentials, how many run on the FMA pipe
    registers: int  # of a multiplying thread; what is left of 64 K goes to the feeding warp
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
PADDED = {64: 64, 80: 128, 96: 128, 128: 128, 192: 256, 256: 256}  # TMA fills up with zeros
PART, LONG_PART = 8, 128  # tiles of a part, at least: of items that leave SMs idle, and of others
# Heads of Q whose items are in one order (a wave): as many as L2 holds K and V of, up to MAX_HEADS. (Of groups, which share theirs, no
# more.) Causal items differ in length and go longest first, which balances SMs if each has CLAIMS of them, or the order MIN_HEADS heads.
# Measured.
MAX_HEADS, MIN_HEADS, CLAIMS = 32, 8, 10


class Problem(NamedTuple):
    """What decides how a launch is cut, of what the host knows."""

    num_seqs: int
    num_q_heads: int
    head_dim: int
    tokens: int  # of a ragged batch, or 0
    max_seqlen_q: int
    tiles: int  # of keys that a query sees, at most
    causal: bool  # and the first query of a sequence sees fewer


def best_cut(width: int, sms: int, problem: Problem, chip: Chip) -> tuple[Shape, int]:
    """The shape, and the parts of the keys, that take the least time."""
    return min(cuts(width, sms, problem), key=lambda cut: microseconds(*cut, sms, problem, chip))


def cuts(width: int, sms: int, problem: Problem) -> Iterable[tuple[Shape, int]]:
    """The ways to cut a problem: a shape, and into how many parts the keys.

    Of items that fill the GPU parts can only make the last wave fuller. How many keys each sequence of a ragged batch has only the device
    knows, so there they are left whole.
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
    """What a launch takes, about."""
    num_seqs, num_q_heads, head_dim, tokens, max_seqlen_q, tiles, causal = problem
    tile, item = chip.prefill[PADDED[head_dim], shape.warpgroups]
    most = -(-max_seqlen_q // shape.rows)  # blocks of a sequence
    blocks = tokens / shape.rows + num_seqs / 2 if tokens else num_seqs * most
    items = num_q_heads * blocks * splits
    fewest = max(1, tiles - (most - 1) * shape.rows // TILE.value) if causal else tiles
    longest = item + tile * tiles / splits
    shortest = item + tile * fewest / splits
    # Long items go first, so those that wait for the last of them have just done a short one.
    time = max(longest, (items * (longest + shortest) / 2 + -items % sms * shortest) / sms)
    if splits > 1:
        once, byte = chip.combine
        time += once + byte * 4 * head_dim * num_q_heads * (tokens or num_seqs * max_seqlen_q) * splits
    return time


def min_tiles_per_split(items: int, splits: int, sms: int, tiles: int) -> int:
    """Keys may be far fewer than the table has pages. Parts that only were to make waves even are then worth nothing."""
    return PART if items < sms else max(PART, tiles // splits // 2)


def heads_per_wave(rows: int, sms: int, max_seqlen_q: int, head_dim: int, tiles: int, causal: bool, chip: Chip) -> int:
    """Heads of Q whose items are in one order; `rows` are those of an item."""
    heads = min(MIN_HEADS, -(-CLAIMS * sms * rows // max(1, max_seqlen_q))) if causal else 1
    return min(max(heads, chip.l2 // (2 * head_dim * TILE.value * tiles)), MAX_HEADS)
