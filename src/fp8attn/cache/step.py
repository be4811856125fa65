"""The steps of a cache: in a step all layers append the same tokens, one layer after another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from ..pages import KVPages
from ..params import Append, AttentionArguments, AttentionParams
from .page_table import PageTable, num_pages_of

DROP = (
    "drop the tokens of this step: cache.truncate(cache.lengths); for an FP8Cache whose forward was interrupted, "
    "cache.reset()"
)


class Step:
    """One append of new tokens by all layers.

    Args:
        lengths: number of new tokens of each sequence.
        cu_seqlens: `[num_seqs + 1]` int32 on the device, cumulative `lengths` from 0. None: every sequence has
            `longest` tokens.
        before: number of tokens of each sequence before the step. None: the host does not know it.
        columns: number of columns of the page table that have tokens after the step. None: the host does not know it;
            use all columns.
    Attributes:
        num_tokens, longest: the sum and the maximum of `lengths`.
        ragged: whether they differ.
        options: of the append of a layer without static scales.
        pages: by layer that has appended, the pages that its attention reads.
        params: by the queries' dtype, their heads and the options, the checked options, which layers share.
    """

    def __init__(
        self, lengths: list[int], cu_seqlens: torch.Tensor | None, num_layers: int, before: list[int] | None,
        columns: int | None,
    ) -> None:  # fmt: skip
        self.lengths, self.cu_seqlens, self.num_layers = lengths, cu_seqlens, num_layers
        self.before, self.columns = before, columns
        self.num_tokens, self.longest = sum(lengths), max(lengths)
        self.ragged = cu_seqlens is not None and min(lengths) < self.longest
        self.options = Append(cu_seqlens, self.longest)
        self.pages: dict[int, KVPages] = {}
        self.params: dict[tuple[torch.dtype, int, AttentionArguments], AttentionParams] = {}

    @property
    def missing(self) -> str:
        """The layers that have not appended; empty after all have."""
        return ", ".join(str(layer) for layer in range(self.num_layers) if layer not in self.pages)


class Steps:
    """The last step, and who may join it.

    Attributes:
        last: the last step. None: none since the cache was made, pages were reserved or its sequences were moved, or
            the host has not seen it.
    """

    def __init__(self, table: PageTable) -> None:
        self.table = table
        self.last: Step | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all layers have appended the tokens of the last step."""
        return self.last is None or not self.last.missing

    def check_complete(self, call: str) -> None:
        """Raise ValueError, which names the `call`, if some layers have not appended the tokens of the last step."""
        if self.last is not None and (missing := self.last.missing):
            raise ValueError(
                f"{call} between the appends of a step: layers {missing} have not appended its tokens yet. Append them "
                f"first, or {DROP}"
            )

    def join(self, layer: int, num_tokens: int, lengths: Sequence[int] | None) -> Step:
        """The step of this append of `layer`: the one that other layers have begun, or a new one."""
        step = self.last
        if step is None or len(step.pages) == step.num_layers:
            step = self.last = self._begin(num_tokens, lengths)
        elif layer in step.pages:
            raise ValueError(
                f"layer {layer} appends a second time before layers {step.missing} appended once: all layers append "
                f"the same tokens, one after another. To go on, {DROP}"
            )
        elif num_tokens != step.num_tokens or (
            (lengths is not None or step.cu_seqlens is not None) and self._divide(num_tokens, lengths) != step.lengths
        ):
            raise ValueError(
                f"layer {layer} appends {num_tokens} tokens{'' if lengths is None else f' (lengths {lengths})'}, and "
                f"the layers before it appended {step.num_tokens} (lengths {step.lengths}): a step has the same "
                f"lengths in all layers"
            )
        return step

    def _begin(self, num_tokens: int, lengths: Sequence[int] | None) -> Step:
        """A new step: reserve pages for all layers, and update the lengths on the host."""
        table, new = self.table, self._divide(num_tokens, lengths)
        cu_seqlens = None if lengths is None else table.to_device([0, *accumulate(new)], torch.int32)
        before, longest, columns = table.lengths, max(new), None
        if table.max_seqlen is not None:
            table.check_room(new, cu_seqlens)
            columns = num_pages_of(longest) if table.counted and not any(before) else None
        elif longest > table.headroom:
            table.reserve([old + n for old, n in zip(before, new, strict=True)])
        if table.counted:
            table.advance(new, longest)
        return Step(new, cu_seqlens, len(table.layers), before if table.counted else None, columns)

    def _divide(self, num_tokens: int, lengths: Sequence[int] | None) -> list[int]:
        """The number of new tokens of each sequence."""
        num_seqs = self.table.num_seqs
        if lengths is None:
            if num_tokens % num_seqs:
                raise ValueError(
                    f"{num_tokens} tokens cannot be divided evenly among {num_seqs} sequences; give each sequence's "
                    f"number: lengths=[...]"
                )
            return [num_tokens // num_seqs] * num_seqs
        new = self.table.counts(lengths)
        if sum(new) != num_tokens:
            raise ValueError(f"lengths must be {num_seqs} counts that add up to {num_tokens} tokens; got {new}")
        return new
