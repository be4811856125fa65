"""The pages of each sequence: the bookkeeping that all layers of a cache share.

The host has the lengths, page tables and reference counts. The device has one page table for all layers. It has the
lengths of each layer separately, because each layer's append advances its own. Sequences that were copied share pages
until one of them writes (copy-on-write).

With a window, `reserve` gives back pages that no later query sees. Positions stay absolute: the entry of such a page is
-1 on the host. On the device it is 0, a valid page, and kernels read no column left of the window.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch

from ..checks import LARGEST
from ..formats.page_layout import PAGE_SIZE
from .layer import LayerPages, lasting

MOST_SEQUENCES = 2**20  # each has lists on the host
# tokens of a sequence with a window that can be dropped besides those of the last step: transformers drafts 20 by
# default
SLACK = 64
LARGER = "make it with a larger max_seqlen (FP8Cache: a larger max_cache_len)"


class OutOfPagesError(RuntimeError):
    """A cache of fixed size has too few free pages. Nothing was changed."""


def num_pages_of(length: int) -> int:
    """Pages that `length` tokens fill or begin."""
    return -(-length // PAGE_SIZE)


def first_column(length: int, window: int | None) -> int:
    """The first column that a query at position `length` sees."""
    return 0 if window is None else max(0, length - window + 1) // PAGE_SIZE


def pages_of_window(window: int) -> int:
    """The most pages of a sequence that decodes with this window: of the window, of `SLACK`, and the page that is being
    filled.
    """
    return num_pages_of(window + SLACK - 1) + 1


class PageTable:
    """Lengths, pages and reference counts of `num_seqs` sequences, whose tokens are in the pools of all layers.

    In the static form each sequence always has the pages of `max_seqlen` tokens, so steps can be compiled, or replayed
    in a CUDA graph, without the host. Appends that run on the host are counted there, for each sequence, and one that
    does not fit raises an error before anything is written. The host does not see the steps of compiled code and of
    CUDA graphs. From then on the device compares its own lengths of each sequence, until they are read back.

    Args:
        layers: the layers that share the table. Their pools grow with it.
        num_pages: pages of each layer's pool, which never grows. None: it grows.
        window: tokens that a query sees, its own included; None: all.
        max_seqlen: tokens that each sequence of the static form has pages for. None: not static.
    Attributes:
        lengths: tokens of each sequence.
        tables: the pages of each sequence, in order; -1 for a page left of the window that was given back.
        references: the number of sequences that have each page.
        tails: sequences whose last page may have tokens past their length, of a draft or of the sequence that they are
            a copy of. `reserve` drops these: a NaN in V would reach the sequence, because 0 * NaN is NaN.
        recording: whether `truncate` gives back pages left of the window, and `reserve` does not, so that any token
            since the last `truncate` can be dropped.
        counted: whether `lengths` are right.
        captured: whether a CUDA graph contains an append. It can be replayed at any time, so the host never counts
            again.
        headroom: tokens that every sequence can append without new pages or copies.
        free: pages that no sequence has. The last one is used first.
        page_table: `[num_seqs, max_pages]` int32, `tables` on the device; entries past a sequence's last page are zero.
        cache_seqlens: `[num_seqs]` int32 for each layer, each in its own memory. Compiled code writes to them in place,
            and torch does not support that for views of one tensor.
    """

    def __init__(
        self,
        layers: list[LayerPages],
        num_seqs: int,
        num_pages: int | None,
        device: torch.device,
        window: int | None = None,
        max_seqlen: int | None = None,
    ) -> None:
        self.layers, self.device, self.window, self.max_seqlen = layers, device, window, max_seqlen
        self.recording, self.counted, self.captured = False, True, False
        self.lengths = [0] * num_seqs
        self.tables: list[list[int]] = [[] for _ in range(num_seqs)]
        self.references = [0] * (num_pages or 0)
        self.free = list(reversed(range(num_pages or 0)))
        self.tails: set[int] = set()
        self.grows = num_pages is None
        self.headroom = 0
        self.page_table = torch.zeros(num_seqs, 1, dtype=torch.int32, device=device)
        self.cache_seqlens = [torch.zeros(num_seqs, dtype=torch.int32, device=device) for _ in layers]
        self._full = (  # made once, because compiled code has it as a constant
            f"the cache is full: a sequence would have more than max_seqlen={max_seqlen} tokens; {LARGER}. If other "
            f"code than `append` wrote its lengths, call sync() on the PagedKVCache"
        )
        if max_seqlen is not None:
            self.reserve([max_seqlen] * num_seqs)

    @property
    def num_seqs(self) -> int:
        return len(self.lengths)

    @property
    def num_pages(self) -> int:
        """Pages of every layer's pool."""
        return len(self.references)

    def pages_of(self, seq: int) -> list[int]:
        """The pages of a sequence's tokens, in order. Those that the next `reserve` may give back are -1, too."""
        length = self.lengths[seq]
        behind = first_column(length - SLACK, self.window)
        return [-1] * behind + self.tables[seq][behind : num_pages_of(length)]

    # Appending tokens

    @lasting
    def reserve(self, lengths: list[int]) -> None:
        """Allocate pages for `lengths` tokens of each sequence, and copies of shared pages that the sequence will write
        to or of which it has only the first tokens. Give back pages left of the window.

        Raises:
            OutOfPagesError: the pool has a fixed size and is too small. Nothing was changed.
            torch.OutOfMemoryError: there is no memory for a larger pool of a layer. Every sequence still has its
                tokens.
        """
        added = [max(0, num_pages_of(length) - len(pages)) for pages, length in zip(self.tables, lengths, strict=True)]
        copied: list[tuple[int, int]] = []  # (sequence, column of its table)
        # The number of copies of each shared page: the last sequence that writes to it keeps the page.
        leaving: Counter[int] = Counter()
        # Of sequences that share a page, one with tails leaves it to a longer one, and to one without.
        for seq in sorted(range(self.num_seqs), key=lambda seq: self.lengths[seq] if seq in self.tails else math.inf):
            pages, old, length = self.tables[seq], self.lengths[seq], max(lengths[seq], self.lengths[seq])
            end = num_pages_of(length) if length > old or seq in self.tails else 0
            for column in range(old // PAGE_SIZE, min(len(pages), end)):
                page = pages[column]
                if self.references[page] - leaving[page] > 1:
                    leaving[page] += 1
                    copied.append((seq, column))
        behind = [] if self.window is None or self.recording else self._behind()
        if any(added) or copied or self.tails or behind:
            self._assign(added, copied, behind)
        self.headroom = min(
            num_pages_of(length) * PAGE_SIZE - old if length > old else 0
            for old, length in zip(self.lengths, lengths, strict=True)
        )
        if self.window is not None:
            self.compact()

    @lasting
    def fill(self, lengths: list[int], tables: list[list[int]], pools: list[torch.Tensor]) -> None:
        """Fill a table with the tokens of other pools, instead of its own.

        Args:
            lengths: number of tokens of each sequence.
            tables: the pages of each sequence, as indices into `pools`, or -1 for pages left of the window. Sharing
                stays the same.
            pools: `[num_pages, num_kv_heads, page_bytes]` uint8, for each layer.
        """
        for pages in self.tables:  # the static form has all pages already
            self._release(pages)
        new = self._free_pages(len(pools[0]))
        index = self.to_device(new, torch.long)
        for layer, pool in zip(self.layers, pools, strict=True):
            layer.fit(self.num_pages)[index] = pool.to(self.device)
        del self.free[len(self.free) - len(new) :]
        self.tables = [[new[page] if page >= 0 else -1 for page in pages] for pages in tables]
        for pages in self.tables:
            self._share(pages)
        self.lengths = list(lengths)
        self.tails = {seq for seq, length in enumerate(lengths) if length % PAGE_SIZE}  # not known of another pool
        self._write_table([(seq, 0, len(pages)) for seq, pages in enumerate(self.tables)])
        self._moved()

    def check_room(self, new: list[int], cu_seqlens: torch.Tensor | None) -> None:
        """Raise RuntimeError if `new` tokens of each sequence do not fit into the static form.

        Args:
            cu_seqlens: `[num_seqs + 1]` int32, cumulative `new` on the device. None: all sequences have the same
                number.
        """
        most = self.max_seqlen
        assert most is not None
        self.captured = self.captured or is_capturing(self.device)
        self.counted = self.counted and not self.captured
        if not self.counted:
            self.assert_room(new[0] if cu_seqlens is None else cu_seqlens.diff())
            return
        for seq, (old, n) in enumerate(zip(self.lengths, new, strict=True)):
            if old + n > most:
                raise RuntimeError(
                    f"the cache is full: sequence {seq} holds {old} tokens, {n} more were given, and max_seqlen is "
                    f"{most}; {LARGER}"
                )

    def assert_room(self, new: int | torch.Tensor) -> None:
        """Raise RuntimeError, on a GPU later, if `new` tokens of each sequence exceed the static form's pages. They
        would overwrite other tokens.
        """
        lengths, most = self.cache_seqlens[0], self.max_seqlen  # all layers have the same lengths
        assert most is not None
        fits = (lengths + new).max() <= most if isinstance(new, torch.Tensor) else lengths.max() <= most - new
        torch._assert_async(fits, self._full)

    def advance(self, new: list[int], longest: int) -> None:
        """Add `new` tokens to the host's length of each sequence. The layers append them on the device. `longest` is
        the largest number.
        """
        self.lengths = [old + n for old, n in zip(self.lengths, new, strict=True)]
        # After a long step the next one reserves, which gives back pages left of the window.
        self.headroom = 0 if self.window is not None and longest > PAGE_SIZE else max(0, self.headroom - longest)

    # Dropping tokens, moving sequences

    def truncate(self, lengths: list[int]) -> None:
        """Keep the first `lengths` tokens of each sequence, or all if it has fewer, and release the pages after them.

        Raises:
            RuntimeError: as `check_held`. Nothing was changed.
        """
        self.know_lengths()
        lengths = list(map(min, self.lengths, lengths))
        self._shorten(lengths)
        for pages, length in zip(self.tables, lengths, strict=True):
            self._release(pages[num_pages_of(length) :])
            del pages[num_pages_of(length) :]
        if self.recording:
            self._give_back(behind := self._behind())
            self._write_table(behind)
        self._moved()

    def check_held(self, seq: int, length: int) -> None:
        """Raise RuntimeError if a sequence cannot go back to `length` tokens: a page that its next query would see was
        given back.
        """
        pages, column = self.tables[seq], first_column(length, self.window)
        if length and column < len(pages) and pages[column] < 0:
            raise RuntimeError(
                f"sequence {seq} of {self.lengths[seq]} tokens cannot go back to {length}: pages of the {self.window} "
                f"tokens before were given back. Drop all tokens (reset), or only those of the last step and up to "
                f"{SLACK} more. FP8Cache: call activate_past_recording() before tokens that may be cropped"
            )

    def first_held(self, seq: int, length: int) -> int:
        """The first of the last tokens of a sequence of `length`: as many as the window has, or one less if its page
        was given back.
        """
        first = 0 if self.window is None else max(0, length - self.window)
        return first + (first < length and self.tables[seq][first // PAGE_SIZE] < 0)

    @lasting
    def select(self, chosen: list[int]) -> None:
        """Replace the sequences with copies of the `chosen` ones. Copies share pages."""
        self.know_lengths()
        tables = [list(self.tables[i]) for i in chosen]
        for pages in tables:
            self._share(pages)
        for pages in self.tables:
            self._release(pages)
        self.tables = tables
        self.tails = {seq for seq, i in enumerate(chosen) if i in self.tails}
        in_place = len(chosen) == len(self.lengths)  # compiled code and CUDA graphs hold these tensors
        self.lengths = [self.lengths[i] for i in chosen]
        index = torch.tensor(chosen, device=self.device)
        if in_place:
            self.page_table.copy_(self.page_table[index])
        else:
            self.page_table = self.page_table[index]
            self.cache_seqlens = [torch.empty_like(index, dtype=torch.int32) for _ in self.cache_seqlens]
        self._moved()

    def copy(self, source: int, target: int, length: int) -> None:
        """Make sequence `target` a copy of the first `length` tokens of `source`. The two share pages.

        Raises:
            RuntimeError: as `check_held`. Nothing was changed.
        """
        self.know_lengths()
        self.check_held(source, length)
        pages = self.tables[source][: num_pages_of(length)]
        self._share(pages)
        self._release(self.tables[target])
        self._note_tail(target, length, length < self.lengths[source] or source in self.tails)
        self.tables[target] = pages
        self.lengths[target] = length
        self._write_table([(target, 0, len(pages))])
        self._moved()

    def _shorten(self, lengths: list[int]) -> None:
        """Set the lengths. A sequence that gets shorter has tokens past its end. Raises as `check_held`."""
        for seq, length in enumerate(lengths):
            self.check_held(seq, length)
        for seq, (old, new) in enumerate(zip(self.lengths, lengths, strict=True)):
            if new < old:
                self._note_tail(seq, new, True)
        self.lengths, self.headroom = lengths, 0

    def _moved(self) -> None:
        """Write the lengths to the device, for every layer, after the host has moved sequences. In the static form,
        also give each sequence all its pages again, and no shared page where it writes.
        """
        self.headroom = 0
        on_device = self.to_device(self.lengths, torch.int32)
        for lengths in self.cache_seqlens:
            lengths.copy_(on_device)
        self.counted = not self.captured
        if self.max_seqlen is not None:
            self.reserve([self.max_seqlen] * self.num_seqs)

    # Lengths that other code wrote

    def know_lengths(self, complete: bool = True) -> None:
        """Read the lengths back from the device if the host does not know them, which waits for the GPU. It does not
        know them for longer if layers have not appended the tokens of a step yet (not `complete`).
        """
        if not self.counted:
            self._read_lengths()
            self.counted = complete and not self.captured

    def sync(self) -> None:
        """Read the lengths back, and drop tokens that only some layers have. Raises as `check_held`."""
        self._read_lengths()
        self._moved()

    def _read_lengths(self) -> None:
        """Read back from the device the number of tokens that every layer has, which waits for the GPU."""
        self._shorten(torch.stack(self.cache_seqlens).amin(0).tolist())

    # Arguments

    def sequences(self, numbers: list[Any]) -> list[int]:
        """Check numbers of sequences. Negative numbers are errors."""
        try:
            indices = [operator.index(number) for number in numbers]
        except TypeError:  # no integer
            indices = [-1]
        if not all(0 <= index < self.num_seqs for index in indices):
            raise ValueError(
                f"the cache has the sequences 0 to {self.num_seqs - 1}; got {', '.join(map(repr, numbers))}"
            )
        return indices

    def indices(self, selection: Iterable[int] | torch.Tensor) -> list[int]:
        """The numbers of the sequences in `selection`. It has numbers, or is a mask with a bool for each sequence."""
        if isinstance(selection, str) or not (hasattr(selection, "tolist") or isinstance(selection, Iterable)):
            raise ValueError(f"indices must be numbers of sequences, or a mask with a bool for each; got {selection!r}")
        chosen = selection.tolist() if hasattr(selection, "tolist") else list(selection)
        chosen = chosen if isinstance(chosen, list) else [chosen]
        if chosen and all(isinstance(i, bool) for i in chosen):
            if len(chosen) != self.num_seqs:
                raise ValueError(
                    f"a mask of sequences must have {self.num_seqs} entries, one for each; got {len(chosen)}"
                )
            chosen = [i for i, chooses in enumerate(chosen) if chooses]
        if len(chosen) > MOST_SEQUENCES:
            raise ValueError(f"a cache has at most {MOST_SEQUENCES:,} sequences; got {len(chosen):,} indices")
        if not chosen:
            raise ValueError(f"indices must name at least one of the sequences 0 to {self.num_seqs - 1}; got none")
        return self.sequences(chosen)

    def counts(self, lengths: int | Sequence[int]) -> list[int]:
        """A number of tokens for each sequence. If one number is given, it is the same for all."""
        values = lengths.tolist() if hasattr(lengths, "tolist") else lengths
        try:
            counts = (
                [operator.index(count) for count in values]
                if isinstance(values, Iterable)
                else [operator.index(values)] * self.num_seqs
            )
        except TypeError:  # no integer
            counts = [-1]
        if len(counts) != self.num_seqs or min(counts) < 0 or max(counts) > LARGEST:
            raise ValueError(
                f"lengths must be one count of tokens >= 0, or {self.num_seqs} of them, one for each sequence; got "
                f"{values!r} (the most: {LARGEST:,})"
            )
        return counts

    def to_device(self, values: list | torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Copy `values` to the device, without waiting for earlier work of the GPU."""
        return torch.as_tensor(values, dtype=dtype).to(self.device, non_blocking=True)

    # Pages

    @lasting
    def compact(self) -> None:
        """Make the pools of a table with a window smaller if more than a third of their pages are free, as after a long
        prompt.

        Raises:
            torch.OutOfMemoryError: there is no memory for the smaller pools beside the larger ones. Nothing was
                changed.
        """
        if not self.grows or 3 * len(self.free) <= len(self.references):
            return
        used = [page for page, number in enumerate(self.references) if number]
        index = self.to_device(used, torch.long)
        pools = [None if layer.pool is None else layer.pool[index] for layer in self.layers]
        for layer, pool in zip(self.layers, pools, strict=True):
            layer.replace(pool)
        number_of = {page: i for i, page in enumerate(used)} | {-1: -1}
        self.tables = [[number_of[page] for page in pages] for pages in self.tables]
        self.references, self.free = [self.references[page] for page in used], []
        # Entries past the lengths name pages that are no more.
        self.page_table = self.page_table.new_zeros(self.num_seqs, max(1, *map(len, self.tables)))
        self._write_table([(seq, 0, len(pages)) for seq, pages in enumerate(self.tables)])

    def _assign(self, added: list[int], copied: list[tuple[int, int]], behind: list[tuple[int, int, int]]) -> None:
        """Add this many pages to each sequence, replace the page of each (sequence, column) in `copied` with a copy,
        drop the tokens past the ends of sequences, and give back pages `behind` the window (`_behind`).

        Pools are changed before the table, and only where no sequence has tokens.
        """
        needed = sum(added) + len(copied)
        if behind:
            leaving = Counter(page for seq, start, stop in behind for page in self.tables[seq][start:stop])
            released = sum(self.references[page] == leaves for page, leaves in leaving.items())
            if self.grows or needed <= len(self.free) + released:
                self._give_back(behind)
        new = self._free_pages(needed)
        sources, targets = [self.tables[seq][column] for seq, column in copied], new[: len(copied)]
        copy_of = dict(zip(copied, targets, strict=True))
        ends = [(seq, *divmod(self.lengths[seq], PAGE_SIZE)) for seq in self.tails]
        tails = [(copy_of.get((seq, column), self.tables[seq][column]), length) for seq, column, length in ends]
        copies = self.to_device([targets, sources]) if targets else None
        ends_on_device = self.to_device(tails).unbind(1) if tails else None
        for layer in self.layers:
            pool = layer.fit(self.num_pages)
            if copies is not None:
                pool[copies[0]] = pool[copies[1]]
            if ends_on_device is not None:
                layer.drop_tails(*ends_on_device)
        self.tails.clear()
        del self.free[len(self.free) - needed :]
        for page in new:
            self.references[page] = 1
        for (seq, column), page in copy_of.items():
            self._release([self.tables[seq][column]])
            self.tables[seq][column] = page
        written, rest = [*behind, *((seq, column, column + 1) for seq, column in copied)], iter(new[len(copied) :])
        for seq, (pages, number) in enumerate(zip(self.tables, added, strict=True)):
            written.append((seq, len(pages), len(pages) + number))
            pages += islice(rest, number)
        self._write_table(written)

    def _free_pages(self, needed: int) -> list[int]:
        """The `needed` last pages of `free`, in the order of their use. Growing pools grow if there are too few."""
        size, short = len(self.references), needed - len(self.free)
        if short > 0:
            if not self.grows:
                raise OutOfPagesError(
                    f"the cache needs {needed} more pages of {PAGE_SIZE} tokens and has {len(self.free)} of {size} "
                    f"free; truncate or drop sequences, or make it with a larger num_pages (None grows without limit)"
                )
            num_pages = size + max(short, size // 64)  # 1/64: a long decode rarely copies its pool, and wastes little
            for layer in self.layers:
                layer.fit(num_pages)
            self.references += [0] * (num_pages - size)
            self.free = [*reversed(range(size, num_pages)), *self.free]
        return self.free[len(self.free) - needed :][::-1]

    def _share(self, pages: list[int]) -> None:
        """One more sequence has these pages."""
        for page in pages:
            if page >= 0:
                self.references[page] += 1

    def _release(self, pages: list[int]) -> None:
        """A sequence no longer has these pages."""
        for page in pages:
            if page >= 0:
                self.references[page] -= 1
                if not self.references[page]:
                    self.free.append(page)

    def _behind(self) -> list[tuple[int, int, int]]:
        """Columns with pages that no later query sees, also after `SLACK` tokens are dropped, as (sequence, start,
        stop).
        """
        behind = []
        for seq, (pages, length) in enumerate(zip(self.tables, self.lengths, strict=True)):
            start = stop = first_column(length - SLACK, self.window)
            while start and pages[start - 1] >= 0:
                start -= 1
            if start < stop:
                behind.append((seq, start, stop))
        return behind

    def _give_back(self, behind: list[tuple[int, int, int]]) -> None:
        for seq, start, stop in behind:
            self._release(self.tables[seq][start:stop])
            self.tables[seq][start:stop] = [-1] * (stop - start)

    def _note_tail(self, seq: int, length: int, longer: bool) -> None:
        """A sequence gets `length` tokens. `longer`: its last page has others after them, unless they fill it."""
        self.tails.discard(seq)
        if longer and length % PAGE_SIZE:
            self.tails.add(seq)

    def _write_table(self, written: list[tuple[int, int, int]]) -> None:
        """Copy columns of the tables, given as (sequence, start, stop), to the device. Make the device's table wider if
        necessary.
        """
        table, width = self.page_table, max(map(len, self.tables))
        if width > table.shape[1]:
            # Entries past a sequence's length must name a valid page: zero does.
            if sum(stop - start for _, start, stop in written) == sum(map(len, self.tables)):  # all there are
                rows = [[max(page, 0) for page in pages] + [0] * (width - len(pages)) for pages in self.tables]
                self.page_table = self.to_device(rows, torch.int32)
                return
            self.page_table = table = torch.nn.functional.pad(table, (0, width - table.shape[1]))
        places = [seq * table.shape[1] + column for seq, start, stop in written for column in range(start, stop)]
        if places:
            pages = [max(page, 0) for seq, start, stop in written for page in self.tables[seq][start:stop]]
            on_device = self.to_device([places, pages])
            table.view(-1)[on_device[0]] = on_device[1].int()


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph captures the kernels that are launched now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
