"""Full-attention layers that a static `FP8Cache` has in 16 bits."""

from __future__ import annotations

import torch
from transformers.cache_utils import StaticLayer


class KeptLayer(StaticLayer):
    """transformers' static layer, with the moves of sequences that the FP8 layers beside it have. What is moved stays in the same tensors,
    because compiled code and CUDA graphs refer to them."""

    is_croppable = True

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` tokens. The next ones are written over them, and masks hide them until then."""
        if self.is_initialized:
            self.cumulative_length.add_(tokens_to_remove).clamp_(min=0)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times, which must be 1 (`_select`)."""
        if self.is_initialized:
            self._select(torch.arange(len(self.keys), device=self.device).repeat_interleave(repeats), "batch_repeat_interleave")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences with these indices, which must be as many (`_select`)."""
        self._select(indices, "batch_select_indices")

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Replace each sequence `i` with a copy of the previous sequence `beam_idx[i]`."""
        self._select(beam_idx, "reorder_cache")

    def _select(self, indices: torch.Tensor, what: str) -> None:
        """Replace each sequence `i` with a copy of the previous sequence `indices[i]`.

        Raises:
            ValueError: their number would change.
        """
        if not self.is_initialized:
            return
        keys, values = (x[indices.to(x.device)] for x in (self.keys, self.values))
        if len(keys) != len(self.keys):
            raise ValueError(
                f"{what} would change a static FP8Cache from {len(self.keys)} to {len(keys)} sequences; use max_cache_len=None, or give "
                "the prompt to generate with the final batch"
            )
        self.keys.copy_(keys)
        self.values.copy_(values)
