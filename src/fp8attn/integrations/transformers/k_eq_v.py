"""Full-attention layers of Gemma 4 with `attention_k_eq_v`, whose keys follow from their values, over pages of latents.

    V = norm(x)        K = RoPE(w * V)

x is the same projection for both, and w the weight of the keys' norm. RoPE turns some channels of K (`turned`). The
others are w * V, and are not stored. So V is a latent, and the turned channels of K are its key with RoPE, divided by
one number that makes them as large as V's: both are in codes, with one scale (`PageSpec.rope_in_codes`).

`key_weights` has w without the turned channels, `[head_dim]`, and then that number for each of them. The rest of the
module is products with it. What attention sums are values already.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ...cache.layer import lasting
from .config import LayerSpec
from .decoder import decoder_modules

MANY = 1 << 14  # rows of queries from which on a product of matrices is faster than torch's of channels


@lasting
def key_weights(model: PreTrainedModel, specs: list[LayerSpec]) -> dict[int, torch.Tensor]:
    """The weight `[head_dim + turned]` of each layer whose keys follow from its values, if it is loaded.

    The number of the turned channels is a power of two, and that of w alone: a channel of V has a mean square of one.
    """
    follow = {index: spec.turned for index, spec in enumerate(specs) if spec.latent_pages is not None}
    found: dict[int, torch.Tensor] = {}
    for _, module in decoder_modules(model) if follow else ():
        index, norm = vars(module).get("layer_idx", -1), getattr(module, "k_norm", None)
        if index not in follow or norm is None or norm.weight.is_meta:
            continue
        w, width = norm.weight.clone(), follow[index]
        size = torch.exp2(turned(w, width).float().square().mean().sqrt().log2().round())
        size = torch.where(size.isfinite() & (size > 0), size, 1.0).to(w.dtype)
        for part in _turned_parts(w, width):
            part.zero_()
        found[index] = torch.cat([w, size.expand(width)])
    return found


def _turned_parts(x: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    half = x.shape[-1] // 2
    return x[..., : width // 2], x[..., half : half + width // 2]


def turned(x: torch.Tensor, width: int) -> torch.Tensor:
    """The `width` channels that proportional RoPE turns: the first ones of both halves of `x [..., head_dim]`."""
    return torch.cat(_turned_parts(x, width), -1)


def to_latent(key: torch.Tensor, value: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V `[B, num_kv_heads, S, head_dim]` as a latent and its key with RoPE `[B, num_kv_heads, S, turned]`."""
    head_dim = key.shape[-1]
    return value, (turned(key, len(weight) - head_dim) / weight[head_dim:]).to(key.dtype)


def key_of(latent: torch.Tensor, rope: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """K from what `to_latent` returns."""
    head_dim, half = latent.shape[-1], rope.shape[-1] // 2
    key, (low, high) = latent * weight[:head_dim], (rope * weight[head_dim:]).split(half, -1)
    middle = head_dim // 2
    return torch.cat([low, key[..., half:middle], high, key[..., middle + half :]], -1).to(latent.dtype)


def absorb(query: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Queries `[..., head_dim]` for latents: `[..., head_dim + turned]`."""
    head_dim = query.shape[-1]
    if query.shape[:-1].numel() >= MANY:
        identity = torch.eye(head_dim, dtype=query.dtype, device=query.device)
        return query @ absorb(identity, weight)  # the same bits: a sum has one term that is not zero
    width = len(weight) - head_dim
    return (torch.cat([query, turned(query, width)], -1) * weight).to(query.dtype)
