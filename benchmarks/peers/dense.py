"""Helpers of peers that compute sequences of equal lengths."""

from __future__ import annotations

import torch

from ..problem import Shape


def check(shape: Shape) -> None:
    """Raise ValueError for a problem that these peers do not support."""
    if not shape.uniform:
        raise ValueError("no ragged batches")
    if masked(shape) and shape.queries != shape.keys:
        raise ValueError("its causal mask is aligned to the start")


def masked(shape: Shape) -> bool:
    """Whether some query sees fewer than all keys. The query of a decode step sees all."""
    return shape.causal and max(shape.queries) > 1


def batched(shape: Shape, *xs: torch.Tensor) -> list[torch.Tensor]:
    """`[tokens, heads, head_dim]` of equal lengths as `[batch, heads, length, head_dim]`."""
    return [x.unflatten(0, (len(shape.keys), -1)).transpose(1, 2) for x in xs]


def rows(out: torch.Tensor) -> torch.Tensor:
    """`[batch, heads, length, head_dim]` as `[tokens, heads, head_dim]`."""
    return out.transpose(1, 2).flatten(0, 1)
