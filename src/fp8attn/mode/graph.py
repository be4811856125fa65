"""Attention of a context in compiled code: a torch op of its own, so that the context's report counts its runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._torch_ops import register
from ..dense.sdpa import attend_dense, autocast, batched, sdpa_fake
from .policy import AttentionPolicy

Count = Callable[[int, torch.Tensor, torch.Tensor], None]  # of the context's level, queries and keys
_counts: list[Count] = []  # one: `mode.py` finds the context


def count_runs(count: Count) -> None:
    """Call `count` whenever a graph computes attention."""
    _counts.append(count)


def attend_in_graph(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    policy: AttentionPolicy,
    level: int,
) -> torch.Tensor:
    """`scaled_dot_product_attention` of a call that has no `fallback_reason`, in code that is traced inside the context
    of this level.
    """
    q, k, v = (batched(x) for x in autocast(query, key, value))
    out = torch.ops.fp8attn.sdpa_of_context(
        q, k, v, is_causal, scale, policy.key_dtype, policy.rotate_keys, policy.backend, level
    )
    return out if query.dim() == 4 else out.view(*query.shape[:-1], value.shape[-1])


def _sdpa_of_context(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> torch.Tensor:
    *given, level = options
    for count in _counts:
        count(level, q, k)
    return attend_dense(q, k, v, None, None, *given)


register(
    "sdpa_of_context(Tensor q, Tensor k, Tensor v, bool is_causal, float? scale, str key_dtype, bool rotate_keys, str "
    "backend, int level) -> Tensor",
    _sdpa_of_context,
    sdpa_fake,
)
