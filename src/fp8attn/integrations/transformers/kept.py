"""Full-attention layers that a static `FP8Cache` has in 16 bits, and tensors of 16-bit layers that are changed in
place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers.cache_utils import StaticLayer


class KeptLayer(StaticLayer):
    """transformers' static layer, with the moves of sequences that the FP8 layers beside it have. What is moved stays
    in the same tensors, because compiled code and CUDA graphs refer to them."""

    is_croppable = True

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` tokens. The next ones are written over them, and masks hide them until
        then.
        """
        self.cumulative_length.add_(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times, which must be 1."""
        if self.is_initialized:
            self.batch_select_indices(torch.arange(len(self.keys), device=self.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Replace each sequence `i` with a copy of the previous sequence `indices[i]`. Their number is the same."""
        if self.is_initialized:
            for x in (self.keys, self.values):
                x.copy_(x[indices.to(x.device)])

    reorder_cache = batch_select_indices


def make_normal(layers: Iterable[Any]) -> bool:
    """Replace tensors of transformers' layers that were made under `torch.inference_mode` by copies, because they
    cannot be changed in place outside of it. Returns whether there were any."""
    if torch.is_inference_mode_enabled():
        return False
    changed = False
    for layer in layers:
        for values in (vars(layer), *(x for x in vars(layer).values() if isinstance(x, dict))):
            for name, x in values.items():
                if isinstance(x, torch.Tensor) and x.is_inference():
                    values[name], changed = x.clone(), True
                    torch._dynamo.mark_static_address(values[name])
    return changed
