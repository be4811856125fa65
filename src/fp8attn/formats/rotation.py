"""The fixed rotation of keys and queries, which spreads outlier channels over all channels of their block.

Scores do not change, because the same orthogonal matrix is applied to both: `(R q) . (R k) = q . k`. The error of
rounding K and Q to 8 bits changes. In trained models a few channels of both are many times larger than the others, and
their errors dominate the scores. This is the randomized Hadamard transform of QuIP# (Tseng et al., arXiv:2402.04396)
and QuaRot (Ashkboos et al., arXiv:2404.00456).

    R = H diag(sign) / sqrt(n)        on each block of n channels

`n` is the largest power of two that divides head_dim, at most 128: 16 for 80, 32 for 96, 64 for 64 and 192, 128 for
128, 256 and 512. H is the Hadamard matrix in natural (Sylvester) order. The sign of channel c is fixed: a bit for
`c % 16` times a bit for `c // 16 % 8`, from the golden ratio's expansion 0x9E3779.
"""

from __future__ import annotations

import torch

LOW_SIGNS = 0x9E37  # bit c % 16 is set if the sign is negative,
HIGH_SIGNS = 0x79  # bit c // 16 % 8, too: the signs multiply
MAX_BLOCK = 128


def block_size(head_dim: int) -> int:
    """The number of channels in a block."""
    return min(head_dim & -head_dim, MAX_BLOCK)


def signs(x: torch.Tensor) -> torch.Tensor:
    """`[head_dim]` of 1 and -1 in the dtype of `x [..., head_dim]`.

    It is computed from x: a constant tensor would be a real tensor while this is traced with fake ones.
    """
    c = x.new_ones(x.shape[-1], dtype=torch.int32).cumsum(0, dtype=torch.int32) - 1
    bits = ((LOW_SIGNS >> (c & 15)) ^ (HIGH_SIGNS >> ((c >> 4) & 7))) & 1
    return 1 - 2 * bits.to(x.dtype)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """`R x` on the last dimension, in x's dtype.

    In FP32 this defines the bits that kernels store. The factor `sign / sqrt(n)` is applied first. Then `log2(n)` steps
    compute `(a, b) -> (a + b, a - b)` of channels 1, 2, 4, ... apart. Every operation is rounded.

    Args:
        x: `[..., head_dim]`, float32 or float64.
    """
    return _hadamard(x * _factor(x))


def rotate_back(x: torch.Tensor) -> torch.Tensor:
    """The inverse of `rotate`: `R^T x`."""
    return _hadamard(x) * _factor(x)


def _factor(x: torch.Tensor) -> torch.Tensor:
    return signs(x) * block_size(x.shape[-1]) ** -0.5


def _hadamard(x: torch.Tensor) -> torch.Tensor:
    """Apply H to each block, without the factor `1 / sqrt(n)`."""
    step = 1
    while step < block_size(x.shape[-1]):
        pairs = x.unflatten(-1, (-1, 2, step))
        a, b = pairs.unbind(-2)
        x = torch.stack([a + b, a - b], -2).flatten(-3)
        step *= 2
    return x
