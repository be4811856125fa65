"""`fp8attn.rotation` inside Triton kernels, to the same bits."""

from __future__ import annotations

import triton
import triton.language as tl

from .. import rotation

_LOW = tl.constexpr(rotation.LOW_SIGNS)
_HIGH = tl.constexpr(rotation.HIGH_SIGNS)


block_size = triton.constexpr_function(rotation.block_size)


@triton.constexpr_function
def _steps(head_dim):
    return block_size(head_dim).bit_length() - 1


@triton.constexpr_function
def _factor(head_dim):
    return block_size(head_dim) ** -0.5


@triton.jit
def negative(c):
    """Whether the sign of channels `c` is negative."""
    return (((_LOW >> (c & 15)) ^ (_HIGH >> ((c >> 4) & 7))) & 1) > 0


@triton.jit
def rotate(x, D: tl.constexpr):
    """`rotation.rotate` of rows `x [N, C]` in FP32, of which the first D channels count; every operation rounds by itself."""
    N: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    x = x * tl.where(negative(tl.arange(0, C)), -_factor(D), _factor(D))[None, :]
    second = (tl.arange(0, 2) > 0)[None, None, :, None]
    for step in tl.static_range(_steps(D)):
        y = tl.reshape(x, (N, C >> (step + 1), 2, 1 << step))
        u = tl.sum(y, 2, keep_dims=True)  # a + b: a shuffle where the two are in two threads
        x = tl.reshape(tl.where(second, u - 2 * y, u), (N, C))
    return x
