"""Dense inputs, and the backends that run here."""

import os

import pytest
import torch

from fp8attn import apply_rope

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = [
    "reference",
    pytest.param("triton", marks=pytest.mark.skipif(not INTERPRETED, reason="the kernels run compiled: tests/gpu")),
]
X = torch.zeros(1, 2, 8, 64)


def bhsd(
    batch: int, heads: int, length: int, head_dim: int, transposed: bool = False, dtype=torch.float32
) -> torch.Tensor:
    """Normal values `[B, H, S, D]`. With `transposed`, the memory order is `[B, S, H, D]`."""
    if transposed:
        return torch.randn(batch, length, heads, head_dim).to(dtype).transpose(1, 2)
    return torch.randn(batch, heads, length, head_dim).to(dtype)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """`apply_rope` on `[B, H, S, D]` with tables `[S, R / 2]`, in FP32."""
    return apply_rope(x.float(), cos, sin, interleaved=interleaved)
