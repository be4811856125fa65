"""`fp8attn.formats.rotation` inside Triton kernels, to the same bits."""

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import rotation

LOW_SIGNS = tl.constexpr(rotation.LOW_SIGNS)
HIGH_SIGNS = tl.constexpr(rotation.HIGH_SIGNS)

block_size = triton.constexpr_function(rotation.block_size)


@triton.constexpr_function
def log2(n):
    """The exponent of a power of two."""
    return n.bit_length() - 1


@triton.jit
def negative(c):
    """Whether the sign of channels `c` is negative."""
    return (((LOW_SIGNS >> (c & 15)) ^ (HIGH_SIGNS >> ((c >> 4) & 7))) & 1) > 0


@triton.jit
def negative_in_step(channel, to):
    """Whether H diag(sign) of 16 channels is negative, in column `channel` and row `to`: 1 or 0."""
    odd = channel & to
    odd = odd ^ (odd >> 2)
    return (odd ^ (odd >> 1) ^ (LOW_SIGNS >> channel)) & 1


@triton.jit
def hadamard(x, D: tl.constexpr):
    """`fp8attn.formats.rotation.rotate` of rows `x [N, C]` in FP32, in the first D channels. Every operation is
    rounded.
    """
    C: tl.constexpr = x.shape[1]
    FACTOR: tl.constexpr = block_size(D) ** -0.5
    minus = negative(tl.arange(0, C))  # a separate line, because Triton's interpreter loses `tl.where` in the call
    return _butterflies(x * tl.where(minus, -FACTOR, FACTOR)[None, :], D)


@triton.jit
def hadamard_back(x, D: tl.constexpr):
    """`fp8attn.formats.rotation.rotate_back` of rows, as `hadamard`. They are one tensor `[N, C]`, or four, of the
    quarters of one block: between these, no data move. `x` and the result are tuples.
    """
    COUNT: tl.constexpr = len(x)
    C: tl.constexpr = x[0].shape[1]
    FACTOR: tl.constexpr = block_size(D) ** -0.5
    y = ()
    for i in tl.static_range(COUNT):
        y += (_butterflies(x[i], D // COUNT),)
    if COUNT == 4:
        y = y[0] + y[1], y[0] - y[1], y[2] + y[3], y[2] - y[3]
        y = y[0] + y[2], y[1] + y[3], y[0] - y[2], y[1] - y[3]
    z = ()
    for i in tl.static_range(COUNT):
        minus = negative(i * C + tl.arange(0, C))
        z += (y[i] * tl.where(minus, -FACTOR, FACTOR)[None, :],)
    return z


@triton.jit
def _butterflies(x, D: tl.constexpr):
    """The sums and differences of both: H of each block, without the factors."""
    N: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    BLOCK: tl.constexpr = block_size(D)
    sign = tl.where(tl.arange(0, 2) > 0, -1.0, 1.0)[None, None, :, None]
    for step in tl.static_range(log2(BLOCK)):
        x = tl.reshape(x, (N, C >> (step + 1), 2, 1 << step))
        # The other number of a pair is the sum of both minus this one. As integers this is exact. In machine code it
        # becomes a shuffle if the two are in different threads, and nothing if they are in one.
        bits = x.to(tl.int32, bitcast=True)
        other = (tl.sum(bits, 2, keep_dims=True) - bits).to(tl.float32, bitcast=True)
        x = tl.reshape(tl.fma(x, tl.broadcast_to(sign, x.shape), other), (N, C))
    return x
