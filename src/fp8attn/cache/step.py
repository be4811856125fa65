"""A step, in which all layers append the same tokens; and the static form, in which a step needs nothing from the host."""

from __future__ import annotations

import torch

from ..layout import KVPages
from .page_table import num_pages_of


class Step:
    """One append of new tokens by all layers, one after another.

    Attributes:
        lengths: number of new tokens of each sequence.
        num_tokens, longest: the sum and the maximum of `lengths`.
        cu_seqlens: `[num_seqs + 1]` int32 on the device, cumulative `lengths` from 0. None: every sequence has `longest` tokens.
        before: number of tokens of each sequence before the step.
        begins: whether these are the first tokens of a growing pool. Then `dense.ops.run_from_dense` makes the pages with their contents.
        columns: number of columns of the page table that have tokens after the step. None: the host does not know it; use all columns.
        pages: by layer that has appended, the pages that its attention reads.
    """

    def __init__(self, lengths: list[int], cu_seqlens: torch.Tensor | None, before: list[int], begins: bool, columns: int | None) -> None:
        self.lengths, self.cu_seqlens, self.before, self.begins, self.columns = lengths, cu_seqlens, before, begins, columns
        self.num_tokens, self.longest = sum(lengths), max(lengths)
        self.pages: dict[int, KVPages] = {}

    def missing(self, num_layers: int) -> str:
        """The layers that have not appended; empty after all have."""
        return ", ".join(str(layer) for layer in range(num_layers) if layer not in self.pages)


class StaticForm:
    """What the host knows about a static cache, whose steps can be compiled, or replayed in a CUDA graph, without the host.

    Attributes:
        known_empty: True while the host knows that the cache has no tokens. False: it may have some.
        captured: whether a CUDA graph contains an append. It can be replayed at any time.
    """

    def __init__(self, max_seqlen: int) -> None:
        self.max_seqlen = max_seqlen
        self.known_empty, self.captured = True, False

    def columns(self, longest: int, device: torch.device) -> int | None:
        """Number of columns of the page table that an append of `longest` tokens and its attention need; None: all.

        Kernels are launched for the capacity of the table. If the host knows that the cache is empty, `longest` tokens are enough. A CUDA
        graph needs all columns, because it can be replayed when the cache has more tokens.
        """
        self.captured = self.captured or _is_capturing(device)
        narrow = self.known_empty and not self.captured
        self.known_empty = False
        return num_pages_of(longest) if narrow else None

    def assert_fits(self, cache_seqlens: torch.Tensor, longest: int) -> None:
        """Raise RuntimeError, on a GPU later, if tokens would exceed the sequence's pages. They would overwrite other tokens."""
        torch._assert_async(
            cache_seqlens.max() <= self.max_seqlen - longest,
            "the cache is full: make it with a larger max_seqlen (FP8Cache: a larger max_cache_len). If other code than `append` wrote its "
            "lengths, call sync() on the PagedKVCache",
        )

    def moved(self, lengths: list[int]) -> None:
        """Update what is known after sequences were moved."""
        self.known_empty = not (self.captured or any(lengths))


def _is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph captures the kernels that are launched now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
