"""A step, in which all layers append the same tokens; and the static form, in which a step needs nothing
from the host.
"""

from __future__ import annotations

from itertools import count
from operator import add
from typing import Any

import torch

from ..pages import KVPages
from ..params import AttentionParams, BackendName
from .page_table import PageTable, num_pages_of

LARGER = "make it with a larger max_seqlen (FP8Cache: a larger max_cache_len)"


class Step:
    """One append of new tokens by all layers, one after another.

    Attributes:
        lengths: number of new tokens of each sequence.
        num_tokens, longest: the sum and the maximum of `lengths`.
        ragged: whether they differ.
        cu_seqlens: `[num_seqs + 1]` int32 on the device, cumulative `lengths` from 0. None: every sequence has
            `longest` tokens.
        before: number of tokens of each sequence before the step. None: the host does not know it.
        begins: whether these are the first tokens of a growing pool. Then `ops.run_from_dense` makes the pages with
            their contents.
        columns: number of columns of the page table that have tokens after the step. None: the host does not know it;
            use all columns.
        pages: by layer that has appended, the pages that its attention reads.
        calls: by the queries' dtype, their heads and the options, the resolved backend and the checked options, which
            layers share.
    """

    def __init__(
        self,
        lengths: list[int],
        cu_seqlens: torch.Tensor | None,
        before: list[int] | None,
        begins: bool,
        columns: int | None,
    ) -> None:
        self.lengths, self.cu_seqlens, self.before, self.begins, self.columns = (
            lengths,
            cu_seqlens,
            before,
            begins,
            columns,
        )
        self.num_tokens, self.longest = sum(lengths), max(lengths)
        self.ragged = cu_seqlens is not None and min(lengths) < self.longest
        self.pages: dict[int, KVPages] = {}
        self.calls: dict[tuple[Any, ...], tuple[BackendName, AttentionParams]] = {}

    def missing(self, num_layers: int) -> str:
        """The layers that have not appended; empty after all have."""
        return ", ".join(str(layer) for layer in range(num_layers) if layer not in self.pages)


class StaticForm:
    """The static form of a cache, whose steps can be compiled, or replayed in a CUDA graph, without the host.

    Appends that run on the host are counted there, for each sequence, and one that does not fit raises an error before
    anything is written. The host does not see the steps of compiled code and of CUDA graphs. From then on the device
    compares its own lengths of each sequence, until `sync` reads them back. Both count what each sequence gets.

    Attributes:
        max_seqlen: tokens that each sequence has pages for.
        counted: whether the lengths of the page table on the host are right.
        captured: whether a CUDA graph contains an append. It can be replayed at any time, so the host never counts
            again.
    """

    def __init__(self, max_seqlen: int) -> None:
        self.max_seqlen = max_seqlen
        self.counted, self.captured = True, False
        self._full = (  # made once, because compiled code has it as a constant
            f"the cache is full: a sequence would have more than max_seqlen={max_seqlen} tokens; {LARGER}. If other "
            f"code than `append` wrote its lengths, call sync() on the PagedKVCache"
        )

    def begin(self, table: PageTable, new: list[int], cu_seqlens: torch.Tensor | None) -> bool:
        """Begin a step of `new` tokens of each sequence, and raise RuntimeError if they do not fit. Returns `counted`.

        Args:
            cu_seqlens: `[num_seqs + 1]` int32, cumulative `new` on the device. None: all sequences have the same
                number.
        """
        self.captured = self.captured or _is_capturing(table.device)
        self.counted = self.counted and not self.captured
        if not self.counted:
            self.assert_fits(table.cache_seqlens[0], new[0] if cu_seqlens is None else cu_seqlens.diff())
            return False
        if max(map(add, table.lengths, new)) > self.max_seqlen:
            seq, old, n = next(x for x in zip(count(), table.lengths, new) if x[1] + x[2] > self.max_seqlen)
            raise RuntimeError(
                f"the cache is full: sequence {seq} holds {old} tokens, {n} more were given, and max_seqlen is "
                f"{self.max_seqlen}; {LARGER}"
            )
        table.advance(new, max(new))
        return True

    def columns(self, before: list[int], longest: int) -> int | None:
        """Number of columns of the page table that an append of `longest` tokens and its attention need; None: all.

        Kernels are launched for the capacity of the table. If the cache is empty, `longest` tokens are enough.
        """
        return None if any(before) else num_pages_of(longest)

    def assert_fits(self, cache_seqlens: torch.Tensor, new: int | torch.Tensor) -> None:
        """Raise RuntimeError, on a GPU later, if `new` tokens of each sequence exceed its pages. They would overwrite
        other tokens.
        """
        held, most = (
            (cache_seqlens + new, self.max_seqlen)
            if isinstance(new, torch.Tensor)
            else (cache_seqlens, self.max_seqlen - new)
        )
        torch._assert_async(held.max() <= most, self._full)

    def read(self, table: PageTable, complete: bool) -> None:
        """Read the lengths back from the device. They stay right if no layer's append of a step is still to come
        (`complete`).
        """
        table.sync()
        self.counted = complete and not self.captured


def _is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph captures the kernels that are launched now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
