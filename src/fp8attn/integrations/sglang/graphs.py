"""`GraphSteps`: steps of decodes in memory that CUDA graphs read."""

from __future__ import annotations

import torch

from ..engine.steps import Step, step_of


class GraphSteps:
    """The sequences of a step, at the same addresses whatever the step, and one `Step` for each number of sequences.

    Args:
        max_seqs: sequences of the largest graph.
        columns: pages of the longest request that may come.
        device: of the tensors.
    Attributes:
        cache_seqlens: `[max_seqs]` int32, with the new tokens.
        page_table: `[max_seqs, columns]` int32.
    """

    def __init__(self, max_seqs: int, columns: int, device: torch.device) -> None:
        self.cache_seqlens = torch.zeros(max_seqs, dtype=torch.int32, device=device)
        self.page_table = torch.zeros(max_seqs, columns, dtype=torch.int32, device=device)
        self._bounds = torch.arange(max_seqs + 1, dtype=torch.int32, device=device)
        self._steps: dict[int, Step] = {}

    def write(self, lengths: torch.Tensor, table: torch.Tensor, padding: int) -> Step:
        """Write a step, which the work after it in the stream reads, and return it.

        Args:
            lengths: `[num_seqs]`, with the new token of each sequence.
            table: `[num_seqs, columns]` int32.
            padding: how many sequences, the last ones, pad the graph. Their length is 0, less than their new token: so
                nothing is written for them, and their attention is zero.
        """
        num_seqs = len(lengths)
        self.cache_seqlens[:num_seqs].copy_(lengths)
        self.cache_seqlens[num_seqs - padding : num_seqs].zero_()
        self.page_table[:num_seqs].copy_(table)
        if num_seqs not in self._steps:
            self._steps[num_seqs] = step_of(
                self.cache_seqlens[:num_seqs], self.page_table[:num_seqs], self._bounds[: num_seqs + 1],
                num_decodes=num_seqs,
                decode_tokens=num_seqs, max_decode=1, num_tokens=num_seqs, max_seqlen=1, longest=0,
            )  # fmt: skip
        return self._steps[num_seqs]
