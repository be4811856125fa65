"""Rotary position embedding (Su et al., arXiv:2104.09864) in plain PyTorch, the definition of RoPE in the kernels."""

from __future__ import annotations

import torch

from ..checks import check_is_tensor


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotate the first `R` of `D` channels: `(a, b) -> (a cos - b sin, b cos + a sin)`.

    Args:
        x: `[T, H, D]`, any floating dtype.
        cos, sin: `[T, R / 2]`, one row for each token, `R <= D`.
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
    """Raise ValueError unless `cos` and `sin` have the shapes that `apply_rope` takes with `x`."""
    if cos.shape != sin.shape or cos.shape[:-1] != x.shape[:1] or 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(
            f"cos and sin must both be [T, R/2] with T = {x.shape[0]} and R <= {x.shape[-1]}; got {tuple(cos.shape)}, {tuple(sin.shape)}"
            " (tables that repeat each angle twice, as transformers' do, must be cut to their first half)"
        )
    check_device(x, cos, sin)


def check_device(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Raise ValueError unless `cos` and `sin` are on the device of `x`. A kernel takes addresses, and would read invalid memory."""
    if cos.device != x.device or sin.device != x.device:
        raise ValueError(f"rotary tables are on {cos.device} and {sin.device}, and x is on {x.device}; move them there")


def both(rope_cos: torch.Tensor | None, rope_sin: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The tables, where at least one is given."""
    if rope_cos is None or rope_sin is None:
        raise ValueError(f"give rope_cos and rope_sin together, or neither; rope_{'cos' if rope_cos is None else 'sin'} is None")
    if not (isinstance(rope_cos, torch.Tensor) and isinstance(rope_sin, torch.Tensor)):
        check_is_tensor(rope_cos, "rope_cos", "[T, R / 2]")
        check_is_tensor(rope_sin, "rope_sin", "[T, R / 2]")
    return rope_cos, rope_sin


def dense_tables(
    cos: torch.Tensor, sin: torch.Tensor, batch: int, length: int, head_dim: int, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables of a dense batch as views `[batch, length, R / 2]`.

    Args:
        cos, sin: `[length, W]`, `[batch or 1, length, W]` or `[batch or 1, 1, length, W]`. The last dimension is contiguous. W is R / 2,
            one angle for each pair of channels. If W is more than half of head_dim, it is R, and each angle is repeated for both channels
            of its pair (the second half repeats the first, or neighbors are equal if interleaved). If R is at most half of head_dim, the
            caller must cut repeated tables to R / 2: `cos[..., : R // 2]`, or `cos[..., ::2]` if interleaved.
    Raises:
        ValueError: another shape or stride.
    """
    given = tuple(cos.shape), tuple(sin.shape)
    width = cos.shape[-1]
    if cos.dim() == 4 and cos.shape[1] == 1 and sin.dim() == 4:
        cos, sin = cos[:, 0], sin[:, 0]
    fits = given[0] == given[1] and width <= head_dim and (width % 2 == 0 or 2 * width <= head_dim)
    if not (fits and cos.dim() in (2, 3) and cos.shape[-2] == length and (cos.dim() == 2 or cos.shape[0] in (1, batch))):
        raise ValueError(
            f"rotary tables must both be [{length}, R/2], [{batch}, {length}, R/2] or [{batch}, 1, {length}, R/2] with R <= {head_dim}, "
            f"or of width R where R > {head_dim // 2}; got {given[0]} and {given[1]} (a position offset is a slice of longer tables)"
        )
    if 2 * width > head_dim:
        cos, sin = (x[..., ::2] if interleaved else x[..., : width // 2] for x in (cos, sin))
    return cos.expand(batch, -1, -1), sin.expand(batch, -1, -1)


def tables_for(x: torch.Tensor, rope_cos: torch.Tensor, rope_sin: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`dense_tables` for `x [B, H, S, D]`: `[B, S, R / 2]`, the form that kernels take."""
    check_device(x, rope_cos, rope_sin)
    batch, _, length, head_dim = x.shape
    return dense_tables(rope_cos, rope_sin, batch, length, head_dim, interleaved)
