"""Rotary position embedding (Su et al., arXiv:2104.09864) in plain PyTorch, the definition of RoPE in the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..checks import check_is_tensor


class Rope(NamedTuple):
    """RoPE of tokens: a table of angles, and which channels are pairs.

    Attributes:
        cos, sin: `[T, R / 2]`, one row for each token; `[B, S, R / 2]` for dense tensors `[B, H, S, D]`. `R <= D` channels are rotated.
        interleaved: channel pairs are `(0, 1), (2, 3), ...` (GPT-J); otherwise `(0, R/2), (1, R/2 + 1), ...` (NeoX, Llama).
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False


NO_ROPE = None, None, False  # the arguments of a torch op without RoPE


def rope_of(cos: torch.Tensor | None, sin: torch.Tensor | None, interleaved: bool, prefix: str = "") -> Rope | None:
    """`Rope` of the arguments `rope_cos`, `rope_sin` and `rope_interleaved` of a public function; None: no RoPE. `prefix` is in front of
    their names.

    Raises:
        ValueError: only one of the tables is given, or one is no tensor.
    """
    if cos is None and sin is None:
        return None
    if cos is None or sin is None:
        missing = f"{prefix}rope_{'cos' if cos is None else 'sin'}"
        raise ValueError(f"give {prefix}rope_cos and {prefix}rope_sin together, or neither; {missing} is None")
    if not (isinstance(cos, torch.Tensor) and isinstance(sin, torch.Tensor)):
        check_is_tensor(cos, f"{prefix}rope_cos", "[T, R / 2]")
        check_is_tensor(sin, f"{prefix}rope_sin", "[T, R / 2]")
    return Rope(cos, sin, interleaved)


def with_tables(rope: Rope, change: Callable[[torch.Tensor], torch.Tensor]) -> Rope:
    """RoPE with other views of both tables."""
    return Rope(change(rope.cos), change(rope.sin), rope.interleaved)


def apply_rope(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotate the first `R` of `D` channels: `(a, b) -> (a cos - b sin, b cos + a sin)`.

    Args:
        x: `[T, H, D]`, any floating dtype.
        rope: tables `[T, R / 2]`.
    Returns:
        FP32 `[T, H, D]`.
    Raises:
        ValueError: the tables do not fit `x`.
    """
    check_rope(x, rope)
    half = rope.cos.shape[-1]
    cos, sin = rope.cos.float()[:, None], rope.sin.float()[:, None]
    out = x.float().clone()
    if rope.interleaved:
        a, b = out[..., 0 : 2 * half : 2].clone(), out[..., 1 : 2 * half : 2].clone()
        out[..., 0 : 2 * half : 2], out[..., 1 : 2 * half : 2] = a * cos - b * sin, b * cos + a * sin
    else:
        a, b = out[..., :half].clone(), out[..., half : 2 * half].clone()
        out[..., :half], out[..., half : 2 * half] = a * cos - b * sin, b * cos + a * sin
    return out


def check_rope(x: torch.Tensor, rope: Rope) -> None:
    """Raise ValueError unless the tables have the shapes that `apply_rope` takes with `x`."""
    cos, sin, _ = rope
    if cos.shape != sin.shape or cos.shape[:-1] != x.shape[:1] or 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(
            f"cos and sin must both be [T, R/2] with T = {x.shape[0]} and R <= {x.shape[-1]}; got {tuple(cos.shape)}, {tuple(sin.shape)}"
            " (tables that repeat each angle twice, as transformers' do, must be cut to their first half)"
        )
    check_device(x, rope)


def check_device(x: torch.Tensor, rope: Rope) -> None:
    """Raise ValueError unless the tables are on the device of `x`. A kernel takes addresses, and would read invalid memory."""
    if rope.cos.device != x.device or rope.sin.device != x.device:
        raise ValueError(f"rotary tables are on {rope.cos.device} and {rope.sin.device}, and x is on {x.device}; move them there")


def dense_rope(x: torch.Tensor, rope: Rope) -> Rope:
    """RoPE of a dense `x [B, H, S, D]` with tables as views `[B, S, R / 2]`, the form that kernels take.

    Args:
        rope: tables `[S, W]`, `[B or 1, S, W]` or `[B or 1, 1, S, W]`. The last dimension is contiguous. W is R / 2, one angle for each
            pair of channels. If W is more than half of head_dim, it is R, and each angle is repeated for both channels of its pair (the
            second half repeats the first, or neighbors are equal if interleaved). If R is at most half of head_dim, the caller must cut
            repeated tables to R / 2: `cos[..., : R // 2]`, or `cos[..., ::2]` if interleaved.
    Raises:
        ValueError: another shape, stride or device.
    """
    check_device(x, rope)
    batch, _, length, head_dim = x.shape
    cos, sin, interleaved = rope
    shapes = tuple(cos.shape), tuple(sin.shape)
    width = cos.shape[-1]
    if cos.dim() == 4 and cos.shape[1] == 1 and sin.dim() == 4:
        cos, sin = cos[:, 0], sin[:, 0]
    fits = shapes[0] == shapes[1] and width <= head_dim and (width % 2 == 0 or 2 * width <= head_dim)
    if not (fits and cos.dim() in (2, 3) and cos.shape[-2] == length and (cos.dim() == 2 or cos.shape[0] in (1, batch))):
        raise ValueError(
            f"rotary tables must both be [{length}, R/2], [{batch}, {length}, R/2] or [{batch}, 1, {length}, R/2] with R <= {head_dim}, "
            f"or of width R where R > {head_dim // 2}; got {shapes[0]} and {shapes[1]} (a position offset is a slice of longer tables)"
        )
    if 2 * width > head_dim:
        cos, sin = (x[..., ::2] if interleaved else x[..., : width // 2] for x in (cos, sin))
    return Rope(cos.expand(batch, -1, -1), sin.expand(batch, -1, -1), interleaved)
