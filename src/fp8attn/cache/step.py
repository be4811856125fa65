"""An append that all layers make in turn, and the static form, in which it needs nothing from the host."""

from __future__ import annotations

import torch

from ..layout import KVPages
from .page_table import num_pages_of


class Step:
    """One append of new tokens, which every layer makes in turn.

    Attributes:
        lengths: new tokens of each sequence.
        num_tokens, longest: their sum, and the most of one sequence.
        cu_seqlens: `[num_seqs + 1]` int32 on the device, where each sequence's tokens begin. None: every sequence has `longest`.
        before: tokens of each sequence before the step.
        begins: these are the first tokens of a pool that grows: `ops.run_from_dense` makes the pages together with their contents.
        columns: how many columns of the page table hold tokens after the step. None: the host does not know, and all may.
        pages: of each layer that has appended, what its attention reads.
    """

    def __init__(self, lengths: list[int], cu_seqlens: torch.Tensor | None, before: list[int], begins: bool, columns: int | None) -> None:
        self.lengths, self.cu_seqlens, self.before, self.begins, self.columns = lengths, cu_seqlens, before, begins, columns
        self.num_tokens, self.longest = sum(lengths), max(lengths)
        self.pages: dict[int, KVPages] = {}

    def missing(self, num_layers: int) -> str:
        """The layers that have not appended; empty after all have."""
        return ", ".join(str(layer) for layer in range(num_layers) if layer not in self.pages)


class StaticForm:
    """What the host knows of a cache of fixed memory, whose steps may be compiled or replayed without it.

    Attributes:
        known_empty: the cache holds no tokens. False: it may hold some.
        captured: an append is in a CUDA graph, which may be replayed at any time.
    """

    def __init__(self, max_seqlen: int) -> None:
        self.max_seqlen = max_seqlen
        self.known_empty, self.captured = True, False

    def columns(self, longest: int, device: torch.device) -> int | None:
        """How many columns of the page table an append of `longest` tokens and its attention need; None: all.

        Kernels are launched for the tokens that the table has capacity for. Where the host knows that there are no other tokens, that is
        `longest`. A CUDA graph needs all, because it may be replayed on a cache that has grown.
        """
        self.captured = self.captured or _is_capturing(device)
        narrow = self.known_empty and not self.captured
        self.known_empty = False
        return num_pages_of(longest) if narrow else None

    def assert_fits(self, cache_seqlens: torch.Tensor, longest: int) -> None:
        """Tokens past the pages that the table names would overwrite others: stop there, as an index out of range does."""
        torch._assert_async(
            cache_seqlens.max() <= self.max_seqlen - longest,
            "the cache is full: make it with a larger max_seqlen (FP8Cache: a larger max_cache_len). If other code than `append` wrote its "
            "lengths, call sync() on the PagedKVCache",
        )

    def moved(self, lengths: list[int]) -> None:
        """Note the lengths after sequences were moved."""
        self.known_empty = not (self.captured or any(lengths))


def _is_capturing(device: torch.device) -> bool:
    """Whether what is launched now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
