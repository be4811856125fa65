"""The sequences of a step, in one or two parts: decodes (and verified drafts), then prompts.

Attention of few queries and of many have different kernels. A batch of both is two calls, so that a long prompt does
not take the decodes through the kernel for many.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...formats.page_layout import PAGE_SIZE
from ...params import LONG


@dataclass(frozen=True)
class StepPart:
    """Neighboring sequences of a step, for one `append` and one `attention`.

    Attributes:
        tokens: their tokens among those of the step.
        cu_seqlens: `[num_seqs + 1]` int32, the index in `tokens` of each sequence's first token, then their number;
            None if the sequences are prompts with equal numbers of more than `LONG` tokens.
        max_seqlen: the largest number of new tokens of a sequence.
        cache_seqlens: `[num_seqs]` int32, with the new tokens.
        page_table: `[num_seqs, max_pages]` int32; of prompts as wide as the longest sequence of the step.
    """

    tokens: slice
    cu_seqlens: torch.Tensor | None
    max_seqlen: int
    cache_seqlens: torch.Tensor
    page_table: torch.Tensor


@dataclass
class Step:
    """A step, which all layers with the same blocks share.

    Attributes:
        checked: whether a layer has checked the marks of the pages (`marks.check_marks`).
    """

    parts: tuple[StepPart, ...]
    checked: bool = False

    def with_table(self, page_table: torch.Tensor) -> Step:
        """The same step for layers whose blocks are others: another table of the same sequences."""
        done, parts = 0, []
        for part in self.parts:
            num_seqs, columns = part.page_table.shape
            table = page_table[done : done + num_seqs]
            parts.append(replace(part, page_table=_of_prompts(table, done, columns)))
            done += num_seqs
        return Step(tuple(parts))


def step_of(
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    num_decodes: int,
    decode_tokens: int,
    max_decode: int,
    num_tokens: int,
    max_seqlen: int,
    longest: int,
) -> Step:
    """The parts of a step. A part of decodes has views of these tensors, so a CUDA graph can replay it after they were
    written.

    Args:
        cache_seqlens: `[num_seqs]` int32, the length of each sequence, with its new tokens. Sequences of few new tokens
            come first.
        page_table: `[num_seqs, any number]` int32, the blocks of each sequence. Entries past its length name any block.
        cu_seqlens: `[num_seqs + 1]` int32, the index of each sequence's first new token in the step, then their number.
        num_decodes: how many sequences are decodes.
        decode_tokens: their new tokens.
        max_decode: the largest number of new tokens of a decode.
        num_tokens: new tokens of all sequences.
        max_seqlen: the largest number of new tokens of a sequence.
        longest: the largest length.
    """
    num_seqs, num_prompts = len(cache_seqlens), len(cache_seqlens) - num_decodes
    parts = []
    if num_decodes:
        bounds, lengths, table = cu_seqlens[: num_decodes + 1], cache_seqlens[:num_decodes], page_table[:num_decodes]
        parts.append(StepPart(slice(0, decode_tokens), bounds, max_decode, lengths, table))
    if num_prompts:
        bounds, lengths, table = (
            cu_seqlens[num_decodes : num_seqs + 1],
            cache_seqlens[num_decodes:],
            page_table[num_decodes:],
        )
        # At new addresses: those inside the tensors are no multiples of 16 bytes, which need other kernels.
        if num_decodes:
            bounds, lengths = bounds - decode_tokens, lengths.clone()
        equal = not num_decodes and max_seqlen > LONG and num_prompts * max_seqlen == num_tokens
        # A table may be as wide as the longest request that may come. Plans follow the width.
        table = _of_prompts(table, num_decodes, -(-longest // PAGE_SIZE))
        parts.append(StepPart(slice(decode_tokens, num_tokens), None if equal else bounds, max_seqlen, lengths, table))
    return Step(tuple(parts))


def _of_prompts(table: torch.Tensor, num_decodes: int, columns: int) -> torch.Tensor:
    """The first columns of a table, at a new address if decodes are before it: see `step_of`."""
    return (table.clone() if num_decodes else table)[:, :columns]
