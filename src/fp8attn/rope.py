"""Rotary position embedding (Su et al., arXiv:2104.09864), the definition that the kernels fuse."""

from __future__ import annotations

import torch


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotate the first `R` of `D` channels: `(a, b) -> (a cos - b sin, b cos + a sin)`.

    Args:
        x: `[T, H, D]`, any floating dtype.
        cos, sin: `[T, R / 2]`, one row a token, `R <= D`.
        interleaved: pairs are `(0, 1), (2, 3), ...` (GPT-J); otherwise `(0, R/2), (1, R/2 + 1), ...` (NeoX, Llama).
    Returns:
        FP32 `[T, H, D]`.
    Raises:
        ValueError: cos and sin do not fit `x`.
    """
    check_rope(x, cos, sin)
    half = cos.shape[-1]
    cos, sin = cos.float()[:, None], sin.float()[:, None]
    out = x.float().clone()
    if interleaved:
        a, b = out[..., 0 : 2 * half : 2].clone(), out[..., 1 : 2 * half : 2].clone()
        out[..., 0 : 2 * half : 2], out[..., 1 : 2 * half : 2] = a * cos - b * sin, b * cos + a * sin
    else:
        a, b = out[..., :half].clone(), out[..., half : 2 * half].clone()
        out[..., :half], out[..., half : 2 * half] = a * cos - b * sin, b * cos + a * sin
    return out


def check_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Raises ValueError unless `cos` and `sin` fit `x` as `apply_rope` says."""
    if cos.shape != sin.shape or cos.shape[:-1] != x.shape[:1] or 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(
            f"cos and sin must both be [T, R/2] with T = {x.shape[0]} and R <= {x.shape[-1]}; got {tuple(cos.shape)}, {tuple(sin.shape)}"
            " (tables that repeat each angle twice, as transformers' do, must be cut to their first half)"
        )
