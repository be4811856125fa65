"""The rotation of keys as a matrix product, for statistics of many rows."""

from __future__ import annotations

from functools import cache

import torch

from fp8attn.formats.rotation import block_size, rotate


def rotate_many(x: torch.Tensor) -> torch.Tensor:
    """`R x` on the last dimension as one matrix product, in FP32: for statistics of many rows, where `rotate` would
    read and write them `log2(n)` times. Sums round in another order than in `rotate`.

    The entries of the matrix are 1 and -1. So the products are exact, also of 16-bit tensors as they are given, without
    a copy in FP32.

    Args:
        x: `[..., head_dim]`, any floating point.
    """
    if x.is_cuda and x.element_size() == 2:
        y = torch.mm(
            x.reshape(-1, x.shape[-1]), _matrix(x.shape[-1], x.device).to(x.dtype), out_dtype=torch.float32
        ).view(x.shape)
    else:
        y = x.float() @ _matrix(x.shape[-1], x.device)
    return y.mul_(block_size(x.shape[-1]) ** -0.5)


@cache
def _matrix(head_dim: int, device: torch.device) -> torch.Tensor:
    """`[head_dim, head_dim]`: the transpose of R without its factor."""
    return rotate(torch.eye(head_dim, dtype=torch.float32, device=device)).sign()
