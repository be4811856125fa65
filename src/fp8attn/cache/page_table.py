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
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from ..checks import LARGEST
from ..formats.page_layout import PAGE_SIZE

P = ParamSpec("P")
R = TypeVar("R")
MOST_SEQUENCES = 2**20  # each has lists on the host
# tokens of a sequence with a window that can be dropped besides those of the last step: transformers drafts 20 by
# default
SLACK = 64


def lasting(method: Callable[P, R]) -> Callable[P, R]:
    """A method whose tensors outlive the call. None becomes an inference tensor: those cannot be written to outside of
    `torch.inference_mode`. All others can be written to in both modes."""
    return torch.inference_mode(False)(torch.no_grad()(method))


class OutOfPagesError(RuntimeError):
    """A cache of fixed size has too few free pages. Nothing was changed."""


class Change(NamedTuple):
    """The changes that every layer makes to its pool before the next tokens are written.

    Attributes:
        num_pages: pages of the pool. A pool with fewer grows.
        sources, targets: pages to copy.
        tails: pages from which to drop the tokens past the end of their sequence, and the tokens to keep (after the
            copies).
    """

    num_pages: int
    sources: list[int]
    targets: list[int]
    tails: list[tuple[int, int]]


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
    """Lengths, pages and reference counts of `num_seqs` sequences.

    Args:
        num_layers: layers that share the table.
        num_seqs: sequences.
        num_pages: pages of each layer's pool, which never grows. None: it grows.
        device: the device of the tensors.
        window: tokens that a query sees, its own included; None: all.
    Attributes:
        lengths: tokens of each sequence.
        tables: the pages of each sequence, in order; -1 for a page left of the window that was given back.
        references: the number of sequences that have each page.
        tails: sequences whose last page may have tokens past their length, of a draft or of the sequence that they are
            a copy of. `reserve` drops these: a NaN in V would reach the sequence, because 0 * NaN is NaN.
        grows: whether the pools grow.
        recording: whether `truncate` gives back pages left of the window, and `reserve` does not, so that any token
            since the last `truncate` can be dropped.
        free: pages that no sequence has. The last one is used first.
        page_table: `[num_seqs, max_pages]` int32, `tables` on the device; entries past a sequence's last page are zero.
        cache_seqlens: `[num_seqs]` int32 for each layer, each in its own memory. Compiled code writes to them in place,
            and torch does not support that for views of one tensor.
    """

    def __init__(
        self, num_layers: int, num_seqs: int, num_pages: int | None, device: torch.device, window: int | None = None
    ) -> None:
        self.device, self.window, self.recording = device, window, False
        self.lengths = [0] * num_seqs
        self.tables: list[list[int]] = [[] for _ in range(num_seqs)]
        self.references = [0] * (num_pages or 0)
        self.free = list(reversed(range(num_pages or 0)))
        self.tails: set[int] = set()
        self.grows = num_pages is None
        # Tokens that every sequence can append without new pages or copies. `reserve` sets it; truncate, select and
        # copy set it to zero.
        self.headroom = 0
        self.page_table = torch.zeros(num_seqs, 1, dtype=torch.int32, device=device)
        self.cache_seqlens = [torch.zeros(num_seqs, dtype=torch.int32, device=device) for _ in range(num_layers)]

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

    def reserve(self, lengths: list[int], apply: Callable[[Change], None]) -> None:
        """Allocate pages for `lengths` tokens of each sequence, and copies of shared pages that the sequence will write
        to or of which it has only the first tokens. Give back pages left of the window.

        Args:
            lengths: tokens of each sequence.
            apply: makes a change in the pool of every layer. It is called before the table changes, and writes only
                where no sequence has tokens. So if it raises (a GPU has no memory for a larger pool), every sequence
                still has its tokens.
        Raises:
            OutOfPagesError: the pool has a fixed size and is too small. Nothing was changed.
        """
        added = [max(0, num_pages_of(length) - len(table)) for table, length in zip(self.tables, lengths, strict=True)]
        copied: list[tuple[int, int]] = []  # (sequence, column of its table)
        leaving: dict[
            int, int
        ] = {}  # the number of copies of each shared page; the last sequence that writes to it keeps the page
        # Of sequences that share a page, one with tails leaves it to a longer one, and to one without.
        for seq in sorted(range(self.num_seqs), key=lambda seq: self.lengths[seq] if seq in self.tails else math.inf):
            table, length = self.tables[seq], max(lengths[seq], self.lengths[seq])
            end = num_pages_of(length) if length > self.lengths[seq] or seq in self.tails else 0
            for column in range(self.lengths[seq] // PAGE_SIZE, min(len(table), end)):
                page = table[column]
                if self.references[page] - leaving.get(page, 0) > 1:
                    leaving[page] = leaving.get(page, 0) + 1
                    copied.append((seq, column))
        behind = [] if self.window is None or self.recording else self._behind()
        if any(added) or copied or self.tails or behind:
            self._assign(added, copied, behind, apply)
        self.headroom = min(
            num_pages_of(length) * PAGE_SIZE - old if length > old else 0
            for old, length in zip(self.lengths, lengths, strict=True)
        )

    @lasting
    def begin(self, length: int) -> None:
        """Allocate pages for the first `length` tokens of every sequence of an empty, growing table, and set its
        lengths.

        The pages are in the order of the sequences, as `fp8attn.from_dense` writes them.
        """
        columns = num_pages_of(length)
        self.references = [1] * (self.num_seqs * columns)
        self.tables = [list(range(seq * columns, (seq + 1) * columns)) for seq in range(self.num_seqs)]
        self.lengths = [length] * self.num_seqs
        self.headroom = columns * PAGE_SIZE - length if self.window is None else 0
        self.page_table = torch.arange(self.num_pages, dtype=torch.int32, device=self.device).view(
            self.num_seqs, columns
        )
        for lengths in self.cache_seqlens:
            lengths.fill_(length)

    def fill(self, lengths: list[int], tables: list[list[int]]) -> list[int]:
        """Set the lengths of an empty table, and allocate a page for each page of another pool that `tables` name.
        Sharing stays the same.

        Returns:
            The pages to write, in the order of the other pool.
        """
        taken, num_pages = self._find(1 + max((page for table in tables for page in table), default=-1))
        self._take(taken, num_pages)
        self.tables = [[taken[page] if page >= 0 else -1 for page in table] for table in tables]
        for page in taken:
            self.references[page] = 0
        for table in self.tables:
            self._share(table)
        self.lengths = list(lengths)
        self.tails = {seq for seq, length in enumerate(lengths) if length % PAGE_SIZE}  # not known of another pool
        self._write_table([(seq, 0, len(table)) for seq, table in enumerate(self.tables)])
        self.write_lengths()
        return taken

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
        for seq, (old, new) in enumerate(zip(self.lengths, lengths, strict=True)):
            self.check_held(seq, min(old, new))
        self.headroom = 0
        for seq, (old, new) in enumerate(zip(self.lengths, lengths, strict=True)):
            if new < old:
                self._note_tail(seq, new, True)
        self.lengths = [min(old, new) for old, new in zip(self.lengths, lengths, strict=True)]
        for table, length in zip(self.tables, self.lengths, strict=True):
            self._release(table[num_pages_of(length) :])
            del table[num_pages_of(length) :]
        if self.recording:
            self._give_back(behind := self._behind())
            self._write_table(behind)
        self.write_lengths()

    def check_held(self, seq: int, length: int) -> None:
        """Raise RuntimeError if a sequence cannot go back to `length` tokens: a page that its next query would see was
        given back.
        """
        table, column = self.tables[seq], first_column(length, self.window)
        if length and column < len(table) and table[column] < 0:
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

    def select(self, chosen: list[int]) -> None:
        """Replace the sequences with copies of the `chosen` ones. Copies share pages."""
        self.headroom = 0
        tables = [list(self.tables[i]) for i in chosen]
        for table in tables:
            self._share(table)
        for table in self.tables:
            self._release(table)
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
        self.write_lengths()

    def copy(self, source: int, target: int, length: int) -> None:
        """Make sequence `target` a copy of the first `length` tokens of `source`. The two share pages.

        Raises:
            RuntimeError: as `check_held`. Nothing was changed.
        """
        self.check_held(source, length)
        self.headroom = 0
        table = self.tables[source][: num_pages_of(length)]
        self._share(table)
        self._release(self.tables[target])
        self._note_tail(target, length, length < self.lengths[source] or source in self.tails)
        self.tables[target] = list(table)
        self.lengths[target] = length
        self._write_table([(target, 0, len(table))])
        self.write_lengths()

    def sync(self) -> None:
        """Read back from the device the number of tokens that every layer has, which waits for the GPU.

        Raises:
            RuntimeError: as `check_held`. Nothing was changed.
        """
        lengths = torch.stack(self.cache_seqlens).amin(0).tolist()
        for seq, length in enumerate(lengths):
            self.check_held(seq, length)
        before, self.lengths, self.headroom = self.lengths, lengths, 0
        for seq, (old, new) in enumerate(zip(before, self.lengths, strict=True)):
            if new < old:
                self._note_tail(seq, new, True)

    def write_lengths(self) -> None:
        """Copy the lengths to the device, for every layer."""
        given = self.to_device(self.lengths, torch.int32)
        for lengths in self.cache_seqlens:
            lengths.copy_(given)

    # Arguments

    def sequences(self, numbers: list[Any]) -> list[int]:
        """Check numbers of sequences. Negative numbers are errors."""
        try:
            found = [operator.index(number) for number in numbers]
        except TypeError:  # no integer
            found = [-1]
        if not all(0 <= number < self.num_seqs for number in found):
            raise ValueError(
                f"the cache has the sequences 0 to {self.num_seqs - 1}; got {', '.join(map(repr, numbers))}"
            )
        return found

    def indices(self, given: Iterable[int] | torch.Tensor) -> list[int]:
        """The numbers of the sequences that `given` selects. It has numbers, or is a mask with a bool for each
        sequence.
        """
        if isinstance(given, str) or not (hasattr(given, "tolist") or isinstance(given, Iterable)):
            raise ValueError(f"indices must be numbers of sequences, or a mask with a bool for each; got {given!r}")
        chosen = given.tolist() if hasattr(given, "tolist") else list(given)
        chosen = chosen if isinstance(chosen, list) else [chosen]
        if chosen and all(isinstance(i, bool) for i in chosen):
            if len(chosen) != self.num_seqs:
                raise ValueError(
                    f"a mask of sequences must have {self.num_seqs} entries, one for each; got {len(chosen)}"
                )
            chosen = [i for i, kept in enumerate(chosen) if kept]
        if len(chosen) > MOST_SEQUENCES:
            raise ValueError(f"a cache has at most {MOST_SEQUENCES:,} sequences; got {len(chosen):,} indices")
        if not chosen:
            raise ValueError(f"indices must name at least one of the sequences 0 to {self.num_seqs - 1}; got none")
        return self.sequences(chosen)

    def counts(self, lengths: int | Sequence[int]) -> list[int]:
        """A number of tokens for each sequence. If one number is given, it is the same for all."""
        given = lengths.tolist() if hasattr(lengths, "tolist") else lengths
        try:
            counts = (
                [operator.index(count) for count in given]
                if isinstance(given, Iterable)
                else [operator.index(given)] * self.num_seqs
            )
        except TypeError:  # no integer
            counts = [-1]
        if len(counts) != self.num_seqs or min(counts) < 0 or max(counts) > LARGEST:
            raise ValueError(
                f"lengths must be one count of tokens >= 0, or {self.num_seqs} of them, one for each sequence; got "
                f"{given!r} (the most: {LARGEST:,})"
            )
        return counts

    def to_device(self, values: list | torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Copy `values` to the device, without waiting for earlier work of the GPU."""
        return torch.as_tensor(values, dtype=dtype).to(self.device, non_blocking=True)

    # Pages

    def compact(self, take: Callable[[list[int]], None]) -> None:
        """Make the pools of a table with a window smaller if more than a third of their pages are free, as after a long
        prompt.

        Args:
            take: replaces the pool of every layer with copies of these pages of it, in this order. If it raises,
                nothing was changed.
        """
        if self.window is None or not self.grows or 3 * len(self.free) <= len(self.references):
            return
        used = [page for page, count in enumerate(self.references) if count]
        if not used:
            return
        take(used)
        number = {page: i for i, page in enumerate(used)} | {-1: -1}
        self.tables = [[number[page] for page in table] for table in self.tables]
        self.references, self.free = [self.references[page] for page in used], []
        self.page_table = torch.zeros_like(self.page_table)  # entries past the lengths name pages that are no more
        self._write_table([(seq, 0, len(table)) for seq, table in enumerate(self.tables)])

    def _assign(
        self,
        added: list[int],
        copied: list[tuple[int, int]],
        behind: list[tuple[int, int, int]],
        apply: Callable[[Change], None],
    ) -> None:
        """Add this many pages to each sequence, replace the page of each (sequence, column) in `copied` with a new one,
        and give back those `behind` the window (`_behind`)."""
        count = sum(added) + len(copied)
        if behind:
            leaving = Counter(page for seq, start, stop in behind for page in self.tables[seq][start:stop])
            if self.grows or count <= len(self.free) + sum(
                self.references[page] == leaves for page, leaves in leaving.items()
            ):
                self._give_back(behind)  # before `apply`, which writes to free pages
        taken, num_pages = self._find(count)
        sources, targets = [self.tables[seq][column] for seq, column in copied], taken[: len(copied)]
        moved = dict(zip(copied, targets, strict=True))
        tails = []
        for seq in self.tails:
            column, kept = divmod(self.lengths[seq], PAGE_SIZE)
            tails.append((moved.get((seq, column), self.tables[seq][column]), kept))
        apply(Change(num_pages, sources, targets, tails))
        self.tails.clear()
        self._take(taken, num_pages)
        for (seq, column), page in zip(copied, targets, strict=True):
            self._release([self.tables[seq][column]])
            self.tables[seq][column] = page
        written, given = [*behind, *((seq, column, column + 1) for seq, column in copied)], len(copied)
        for seq, (table, count) in enumerate(zip(self.tables, added, strict=True)):
            written.append((seq, len(table), len(table) + count))
            table += taken[given : given + count]
            given += count
        self._write_table(written)

    def _find(self, count: int) -> tuple[list[int], int]:
        """`count` free pages, and the number of pages of the pool that has them. A growing pool grows if it has too
        few.
        """
        size, short = len(self.references), count - len(self.free)
        if short <= 0:
            return self.free[len(self.free) - count :][::-1], size
        if not self.grows:
            raise OutOfPagesError(
                f"the cache needs {count} more pages of {PAGE_SIZE} tokens and has {len(self.free)} of {size} free; "
                "truncate or drop sequences, or make it with a larger num_pages (None grows without limit)"
            )
        more = max(short, size // 64)  # 1/64: a long decode rarely copies its pool, and wastes little
        return self.free[::-1] + list(range(size, size + short)), size + more

    def _take(self, found: list[int], num_pages: int) -> None:
        """Take the free pages that `_find` returned, in a pool of `num_pages`."""
        size = len(self.references)
        self.references += [0] * (num_pages - size)
        self.free = list(reversed(range(size, num_pages))) + self.free
        del self.free[len(self.free) - len(found) :]
        for page in found:
            self.references[page] = 1

    def _share(self, table: list[int]) -> None:
        """One more sequence has the pages of `table`."""
        for page in table:
            if page >= 0:
                self.references[page] += 1

    def _release(self, table: list[int]) -> None:
        """A sequence no longer has the pages of `table`."""
        for page in table:
            if page >= 0:
                self.references[page] -= 1
                if not self.references[page]:
                    self.free.append(page)

    def _behind(self) -> list[tuple[int, int, int]]:
        """Columns with pages that no later query sees, also after `SLACK` tokens are dropped, as (sequence, start,
        stop).
        """
        behind = []
        for seq, (table, length) in enumerate(zip(self.tables, self.lengths, strict=True)):
            start = stop = first_column(length - SLACK, self.window)
            while start and table[start - 1] >= 0:
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
                rows = [[max(page, 0) for page in table] + [0] * (width - len(table)) for table in self.tables]
                self.page_table = self.to_device(rows, torch.int32)
                return
            self.page_table = table = torch.nn.functional.pad(table, (0, width - table.shape[1]))
        places = [seq * table.shape[1] + column for seq, start, stop in written for column in range(start, stop)]
        if places:
            pages = [max(page, 0) for seq, start, stop in written for page in self.tables[seq][start:stop]]
            on_device = self.to_device([places, pages])
            table.view(-1)[on_device[0]] = on_device[1].int()
