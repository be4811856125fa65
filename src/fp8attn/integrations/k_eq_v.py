"""Full-attention layers of Gemma 4 with `attention_k_eq_v`, whose keys follow from their values, over pages of latents.

    V = norm(x)        K = RoPE(w * V)

x is the same projection for both, and w the weight of the keys' norm. RoPE turns some channels of K (`turned`). The
others are w * V, and are not stored. So V is a latent, and the turned channels of K are its key with RoPE, divided by
one number that makes them as large as V's: both are in codes, with one scale (`PageSpec.rope_in_codes`).

    q K^T = (q M) [V, turned channels / number]^T

`key_matrix` is M. A column of it has one element at most: one of w, or the number. So `absorb` rounds as a product of
two numbers does. What attention sums are values already.
"""

from __future__ import annotations

from typing import Any

import torch


def key_matrix(w: torch.Tensor, width: int) -> torch.Tensor:
    """The matrix `[head_dim, head_dim + width]` of keys whose norm has the weight `w [head_dim]`, and of which RoPE
    turns `width` channels.

    The number of the turned channels is a power of two, and that of w alone: a channel of V has a mean square of one.
    """
    size = torch.exp2(turned(w, width).float().square().mean().sqrt().log2().round())
    size = torch.where(size.isfinite() & (size > 0), size, 1.0).to(w.dtype)
    identity = torch.eye(len(w), dtype=w.dtype, device=w.device)
    rope = turned(identity, width)
    return torch.cat([identity * (w * (1 - rope.sum(1))), rope * size], 1)


def turned(x: torch.Tensor, width: int) -> torch.Tensor:
    """The `width` channels that proportional RoPE turns: the first ones of both halves of `x [..., head_dim]`."""
    half = x.shape[-1] // 2
    return torch.cat([x[..., : width // 2], x[..., half : half + width // 2]], -1)


def to_latent(key: torch.Tensor, value: torch.Tensor, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V `[..., head_dim]` as a latent and its key with RoPE `[..., turned]`."""
    head_dim, columns = matrix.shape
    return value, (turned(key, columns - head_dim) / matrix[0, head_dim]).to(key.dtype)


def key_of(latent: torch.Tensor, rope: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """K from what `to_latent` returns."""
    head_dim, half = latent.shape[-1], rope.shape[-1] // 2
    key, (low, high) = latent * matrix.diagonal(), (rope * matrix[0, head_dim]).split(half, -1)
    middle = head_dim // 2
    return torch.cat([low, key[..., half:middle], high, key[..., middle + half :]], -1).to(latent.dtype)


def absorb(query: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Queries `[..., head_dim]` for latents: `[..., head_dim + turned]`."""
    return query @ matrix.to(query.dtype)


class KeysOfNorm:
    """The matrix of keys whose norm is a module, into which an engine may load other weights at any time.

    The number of the turned channels stays: what is stored was divided by it. An engine that discards memory must save
    and restore `buffers`.
    """

    def __init__(self, norm: Any, width: int) -> None:
        w = norm.weight.data
        self.norm, self._matrix = norm, key_matrix(w, width)
        self._kept = key_matrix(torch.ones_like(w), width).diagonal().clone()  # 1 where w is in the matrix, else 0

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The tensors that must outlive new weights and sleep, by name."""
        return {"key_matrix": self._matrix, "kept": self._kept}

    def matrix(self) -> torch.Tensor:
        """`key_matrix` of the norm, in one launch that a CUDA graph can replay."""
        torch.mul(self.norm.weight.data, self._kept, out=self._matrix.diagonal())
        return self._matrix
