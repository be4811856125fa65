"""A ring of pages for each sequence: the memory of a sliding window, whatever the number of tokens.

Positions stay absolute. Column `c` of sequence `s` is page `s * size + c % size`, so the page table never changes, and kernels read it like
any other: attention with a window reads no column left of the window. A page is used again for the tokens `size * 128` positions later.
Its first token sets its scales, as that of a new page does, and nothing of the older tokens remains.

A ring has room for a window and a step of up to `STEP` tokens. Longer steps are written to a run: a larger ring that exists for the step
alone. It begins with a copy of the ring's pages, and the last pages are copied back. This is work of the device only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..errors import UsageError
from ..formats.page_layout import PAGE_SIZE, scales_of
from ..pages import KVPages
from ..scales import LayerScales
from .page_table import Change, PageTable, num_pages_of

# New tokens of a sequence that a ring has room for beside its window: also a draft, all of which is dropped. transformers drafts 20 tokens
# by default, and verifies them with one more. In windows that are multiples of 128 a ring of 16 would be as large, and has room for 130.
STEP = 64
# Tokens of a window from which on its pages are smaller than the window in 16 bits: 84% of it, and half of long ones.
SHORTEST_WINDOW = 384
LOST = (
    "sequence {seq} cannot go back to {length} tokens: the pages of the {window} tokens before were used again. Drop all tokens (reset) or "
    "only those of the last step, of up to {room} tokens. {more}"
)
_STATIC = "A static cache never keeps more: use a growing one, or draft fewer tokens"
_GROWING = "FP8Cache: call activate_past_recording() before tokens that may be cropped"


def pages_of_run(window: int, new: int) -> int:
    """The most pages that `new` tokens and the windows of all of them touch, wherever the first one is in its page."""
    return -(-(window + new - 2) // PAGE_SIZE) + 1


def ring_size(window: int, max_seqlen: int | None = None) -> int:
    """Pages of a sequence and layer with this window, in a cache for up to `max_seqlen` tokens."""
    size = pages_of_run(window, STEP)
    return size if max_seqlen is None else min(size, num_pages_of(max_seqlen))


class RingTable(PageTable):
    """Lengths of sequences whose pages are rings.

    Args:
        num_layers, num_seqs, device: as `PageTable` takes them.
        window: tokens that a query sees, its own included.
        max_seqlen: tokens that the page table has columns for; they never grow. None: they grow.
    Attributes:
        size: pages of each sequence.
        recording: whether every token since the last `truncate` is kept, so that it can be dropped again: rings become larger.
        intact: of each sequence, the first column whose page was not used again.
    """

    def __init__(self, num_layers: int, num_seqs: int, window: int, max_seqlen: int | None, device: torch.device) -> None:
        super().__init__(num_layers, num_seqs, None, device)
        self.window, self.max_seqlen = window, max_seqlen
        self.size = ring_size(window, max_seqlen)
        self.grows = max_seqlen is None
        self.recording = False
        self.intact = [0] * num_seqs
        self._before: list[int] = []  # `intact` before the last step
        self._kept = [0] * num_seqs  # lengths at the last `truncate`
        self._lay_out(1 if max_seqlen is None else num_pages_of(max_seqlen))

    @property
    def num_pages(self) -> int:
        return self.num_seqs * self.size

    @property
    def width(self) -> int:
        """Columns of the page table."""
        return self.page_table.shape[1]

    @property
    def room(self) -> int:
        """New tokens of a sequence for which a ring has room beside its window: any number of those written last can be dropped."""
        return (self.size - 1) * PAGE_SIZE - self.window + 2

    def pages_of(self, seq: int) -> list[int]:
        # Pages that were used again, also by tokens that were dropped since, have the name of a page that is there: `fill` stops at it.
        columns = range(num_pages_of(self.lengths[seq]))
        return [seq * self.size + max(column, self.intact[seq]) % self.size for column in columns]

    def record(self, recording: bool) -> None:
        """Keep every token from now on until the next `truncate`, or no longer do so. Static rings never become larger."""
        self.recording = recording and self.grows
        self.headroom, self._kept = 0, list(self.lengths)

    # Appending tokens

    def reserve(self, lengths: list[int], apply: Callable[[Change], None]) -> None:
        size, columns = self.size, num_pages_of(max(*lengths, *self.lengths))
        if self.recording:
            for kept, length in zip(self._kept, lengths, strict=True):
                size = max(size, num_pages_of(length) - self._first_seen(kept))
        sources: list[int] = []
        targets: list[int] = []
        if size > self.size:
            for seq, length in enumerate(self.lengths):
                held = range(max(self.intact[seq], num_pages_of(length) - self.size), num_pages_of(length))
                sources += [seq * self.size + column % self.size for column in held]
                targets += [seq * size + column % size for column in held]
        tails = []
        for seq in self.tails:
            column, kept = divmod(self.lengths[seq], PAGE_SIZE)
            tails.append((seq * size + column % size, kept))
        if targets or tails:
            apply(Change(self.num_seqs * size, sources, targets, tails))
        self.tails.clear()
        if size > self.size or columns > self.width:
            self.size = size
            self._lay_out(self.width if columns <= self.width else columns + columns // 4)
        self.headroom = 0 if self.recording else max(0, min(self.width * PAGE_SIZE - length for length in self.lengths))

    def advance(self, new: list[int], longest: int) -> None:
        super().advance(new, longest)
        self._before = list(self.intact)
        self._note_written()

    def unwritten(self) -> None:
        """Forget the last `advance`: its first layer has failed before it changed a page."""
        self.intact = self._before

    def has_room(self, longest: int, counted: bool) -> bool:
        """Whether the rings have room for a step; see `run`."""
        return longest <= STEP or self._run_pages(longest, counted) <= self.size

    def run(self, ring: KVPages, longest: int, counted: bool, scales: LayerScales | None) -> Run | None:
        """Pages for a step of a layer that its rings have no room for; None if they do.

        Args:
            ring: the layer's pages.
            longest: the largest number of new tokens of a sequence.
            counted: whether the host knows the lengths, which count the new tokens already.
            scales: the layer's calibrated scales.
        """
        return None if self.has_room(longest, counted) else _begin_run(ring, self.size, self._run_pages(longest, counted), scales)

    def _run_pages(self, longest: int, counted: bool) -> int:
        return min(pages_of_run(self.window, longest), num_pages_of(max(self.lengths)) if counted else self.width)

    # Dropping tokens, moving sequences

    def truncate(self, lengths: list[int]) -> None:
        kept = [min(old, new) for old, new in zip(self.lengths, lengths, strict=True)]
        self.check_held(kept)
        self.headroom = 0
        for seq, (old, new) in enumerate(zip(self.lengths, kept, strict=True)):
            if new < old:
                self._note_tail(seq, new, True)
            if not new:
                self.intact[seq] = 0
        self.lengths = kept
        self._kept = list(kept)
        self.write_lengths()

    def check_held(self, lengths: list[int]) -> None:
        """Raise RuntimeError if a sequence cannot go back to so many tokens, because the window before them is lost."""
        for seq, (length, intact) in enumerate(zip(lengths, self.intact, strict=True)):
            if length and self._first_seen(length) < intact:
                more = _GROWING if self.grows else _STATIC
                raise RuntimeError(LOST.format(seq=seq, length=length, window=self.window, room=self.room, more=more))

    def select(self, chosen: list[int]) -> None:
        """Replace the sequences with the `chosen` ones. Their pages are copied by the caller (`pages_at`)."""
        in_place = len(chosen) == self.num_seqs
        self.headroom = 0
        self.tails = {seq for seq, i in enumerate(chosen) if i in self.tails}
        self.lengths, self.intact, self._kept = ([held[i] for i in chosen] for held in (self.lengths, self.intact, self._kept))
        if not in_place:
            self._lay_out(self.width)
            self.cache_seqlens = [torch.zeros(len(chosen), dtype=torch.int32, device=self.device) for _ in self.cache_seqlens]
        self.write_lengths()

    def copy(self, source: int, target: int, length: int) -> None:
        self.headroom = 0
        shorter = [length if seq == source else held for seq, held in enumerate(self.lengths)]
        self.check_held(shorter)
        self._note_tail(target, length, length < self.lengths[source] or source in self.tails)
        self.lengths[target], self.intact[target], self._kept[target] = length, self.intact[source] if length else 0, length
        self.write_lengths()

    def pages_at(self, chosen: list[int]) -> list[int]:
        """The pages of the `chosen` sequences, in order: what `select` and `copy` need a copy of."""
        return [i * self.size + slot for i in chosen for slot in range(self.size)]

    def fill(self, lengths: list[int], tables: list[list[int]]) -> tuple[list[int], list[int]]:
        """Set the lengths of an empty table. Of each sequence the last pages are taken, up to the first one that was used again.

        Raises:
            UsageError: the pages of a window are missing.
        """
        targets, sources = [], []
        self._lay_out(max(self.width, num_pages_of(max(lengths))))
        for seq, table in enumerate(tables):
            first, seen = len(table), set()
            while first and table[first - 1] not in seen and len(table) - first < self.size:
                first -= 1
                seen.add(table[first])
            self.intact[seq] = first
            targets += [seq * self.size + column % self.size for column in range(first, len(table))]
            sources += table[first:]
            if self._first_seen(lengths[seq]) < first:
                raise UsageError(
                    f"sequence {seq} has {lengths[seq]} tokens and its last {len(table) - first} pages, which do not hold a window of "
                    f"{self.window}: load it into a cache with the window that it was saved with"
                )
        self.lengths, self._kept = list(lengths), list(lengths)
        self.tails = {seq for seq, length in enumerate(lengths) if length % PAGE_SIZE}
        self.write_lengths()
        return targets, sources

    def sync(self) -> None:
        super().sync()
        self._note_written()

    def first_held(self, seq: int, length: int) -> int:
        """The first of the last tokens of a sequence of `length`, at most a window of them, whose pages were not used again."""
        return max(0, length - self.window, min(self.intact[seq], self._first_seen(length)) * PAGE_SIZE)

    def _first_seen(self, length: int) -> int:
        """The first column that a query at position `length` sees."""
        return max(0, length - self.window + 1) // PAGE_SIZE

    def _note_written(self) -> None:
        self.intact = [
            max(intact, num_pages_of(length) - self.size) for intact, length in zip(self.intact, self.lengths, strict=True)
        ]  # fmt: skip

    def _lay_out(self, width: int) -> None:
        self.page_table = _table(self.num_seqs, width, self.size, self.device)


def _table(num_seqs: int, width: int, size: int, device: torch.device) -> torch.Tensor:
    """The page table `[num_seqs, width]` int32 of rings of `size` pages."""
    slots = torch.arange(width, dtype=torch.int32, device=device) % size
    return slots + size * torch.arange(num_seqs, dtype=torch.int32, device=device)[:, None]


class Run(NamedTuple):
    """The pages of one layer for a step that its ring has no room for.

    Attributes:
        ring, size: the layer's pages, and the number of each sequence.
        pages, run: the pages to append to and to attend over, and the number of each sequence.
    """

    ring: KVPages
    size: int
    pages: KVPages
    run: int

    def end(self) -> None:
        """Copy the last pages to the ring, after the tokens were appended."""
        columns = _last_columns(self.ring.cache_seqlens, self.size)
        self.ring.pool[_slots(columns, self.size)] = self.pages.pool[_slots(columns, self.run)]


def _begin_run(ring: KVPages, size: int, run: int, scales: LayerScales | None) -> Run:
    """A run of `run` pages a sequence, with a copy of the pages of a ring of `size`. Its other pages are not initialized."""
    num_seqs, width = ring.page_table.shape
    device = ring.pool.device
    pool = torch.empty((num_seqs * run, *ring.pool.shape[1:]), dtype=torch.uint8, device=device)
    if scales is not None:
        held = scales_of(pool)
        for column, calibrated in enumerate(scales.page_scales):
            held[:, :, column] = calibrated.to(device, non_blocking=True)
    columns = _last_columns(ring.cache_seqlens, size)
    pool[_slots(columns, run)] = ring.pool[_slots(columns, size)]
    return Run(ring, size, KVPages.trusted(pool, _table(num_seqs, width, run, device), ring.cache_seqlens, ring.format), run)


def _last_columns(lengths: torch.Tensor, count: int) -> torch.Tensor:
    """The last `count` columns with tokens of each sequence, `[num_seqs, count]`. With fewer, the first one is repeated."""
    last = (lengths.long() - 1).clamp_min(0) // PAGE_SIZE
    return (last[:, None] - torch.arange(count, device=lengths.device)).clamp_min(0)


def _slots(columns: torch.Tensor, size: int) -> torch.Tensor:
    """The pages of columns `[num_seqs, n]` in rings of `size`, as one index."""
    return (columns % size + size * torch.arange(columns.shape[0], device=columns.device)[:, None]).flatten()
