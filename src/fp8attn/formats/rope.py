"""Rotary position embedding (Su et al., arXiv:2104.09864) in plain PyTorch, the definition of RoPE in the kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..checks import check_is_tensor


class Rope(NamedTuple):
    """RoPE of a dense `[B, H, S, D]`: a table of angles, and which channels are pairs.

    Attributes:
        cos, sin: `[B, S, R / 2]`, one row for each token. `R <= D` channels are rotated.
        interleaved: channel pairs are `(0, 1), (2, 3), ...` (GPT-J); otherwise `(0, R/2), (1, R/2 + 1), ...` (NeoX,
            Llama).
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False


class DenseRope(NamedTuple):
    """RoPE of the keys and queries of a dense call, which is applied while K and V are quantized.

    Attributes:
        k, q: the tables of K and of Q.
        queries: `[B, Hq, L, D]`, the last dimension contiguous.
        out: the queries after RoPE are written here, in their shape and dtype. The last dimension is contiguous.
    """

    k: Rope
    q: Rope
    queries: torch.Tensor
    out: torch.Tensor


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """Rotate the first `R` of `D` channels: `(a, b) -> (a cos - b sin, b cos + a sin)`, in FP32.

    Args:
        x: `[..., S, D]`, any floating dtype. Of packed tokens `[T, H, D]` pass `x.transpose(0, 1)`.
        cos, sin: `[S, R / 2]`, or with more dimensions in front that broadcast to those of x. Tables that repeat each
            angle, as those of transformers do, must be cut to R / 2: `cos[..., : R // 2]`, or `cos[..., ::2]` if
            interleaved.
        interleaved: channel pairs are `(0, 1), (2, 3), ...` (GPT-J); otherwise `(0, R/2), (1, R/2 + 1), ...` (NeoX,
            Llama).
    Returns:
        `[..., S, D]` in the dtype of x.
    Raises:
        ValueError: the tables have different shapes or more than D / 2 columns.
    """
    half = cos.shape[-1]
    if cos.shape != sin.shape or 2 * half > x.shape[-1]:
        raise ValueError(
            f"cos and sin must both be [..., S, R/2] with R <= {x.shape[-1]}; got {tuple(cos.shape)} and "
            f"{tuple(sin.shape)}"
        )
    cos, sin = cos.float(), sin.float()
    y = x[..., : 2 * half].float()
    a, b = (y[..., ::2], y[..., 1::2]) if interleaved else (y[..., :half], y[..., half:])
    pairs = a * cos - b * sin, b * cos + a * sin
    y = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat([y.to(x.dtype), x[..., 2 * half :]], -1)


def rope_of(cos: torch.Tensor | None, sin: torch.Tensor | None, interleaved: bool, prefix: str = "") -> Rope | None:
    """`Rope` of the arguments `rope_cos`, `rope_sin` and `rope_interleaved` of a public function; None: no RoPE.
    `prefix` is in front of their names.

    Raises:
        ValueError: only one of the tables is given, or one is no tensor.
    """
    if cos is None and sin is None:
        return None
    if cos is None or sin is None:
        missing = f"{prefix}rope_{'cos' if cos is None else 'sin'}"
        raise ValueError(f"give {prefix}rope_cos and {prefix}rope_sin together, or neither; {missing} is None")
    if not (isinstance(cos, torch.Tensor) and isinstance(sin, torch.Tensor)):
        check_is_tensor(cos, f"{prefix}rope_cos", "[S, R / 2]")
        check_is_tensor(sin, f"{prefix}rope_sin", "[S, R / 2]")
    return Rope(cos, sin, interleaved)


def dense_rope(x: torch.Tensor, rope: Rope) -> Rope:
    """RoPE of a dense `x [B, H, S, D]` with tables as views `[B, S, R / 2]`, the form that kernels take.

    Args:
        rope: tables `[S, W]`, `[B or 1, S, W]` or `[B or 1, 1, S, W]`. W is R / 2, one angle for each pair of channels.
            If W is more than half of head_dim, it is R, and each angle is repeated for both channels of its pair (the
            second half repeats the first, or neighbors are equal if interleaved). If R is at most half of head_dim, the
            caller must cut repeated tables to R / 2: `cos[..., : R // 2]`, or `cos[..., ::2]` if interleaved.
    Raises:
        ValueError: another shape or device.
    """
    batch, _, length, head_dim = x.shape
    cos, sin, interleaved = rope
    if cos.device != x.device or sin.device != x.device:  # a kernel takes addresses, and would read invalid memory
        raise ValueError(f"rotary tables are on {cos.device} and {sin.device}, and x is on {x.device}; move them there")
    shapes = tuple(cos.shape), tuple(sin.shape)
    width = cos.shape[-1]
    if cos.dim() == 4 and cos.shape[1] == 1 and sin.dim() == 4:
        cos, sin = cos[:, 0], sin[:, 0]
    fits = shapes[0] == shapes[1] and width <= head_dim and (width % 2 == 0 or 2 * width <= head_dim)
    if not (
        fits and cos.dim() in (2, 3) and cos.shape[-2] == length and (cos.dim() == 2 or cos.shape[0] in (1, batch))
    ):
        raise ValueError(
            f"rotary tables must both be [{length}, R/2], [{batch}, {length}, R/2] or [{batch}, 1, {length}, R/2] with "
            f"R <= {head_dim}, or of width R where R > {head_dim // 2}; got {shapes[0]} and {shapes[1]} (a position "
            f"offset is a slice of longer tables)"
        )
    if 2 * width > head_dim:
        cos, sin = (x[..., ::2] if interleaved else x[..., : width // 2] for x in (cos, sin))
    return Rope(cos.expand(batch, -1, -1), sin.expand(batch, -1, -1), interleaved)
