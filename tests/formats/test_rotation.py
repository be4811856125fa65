"""The rotation, from its definition: signs, the Hadamard matrix in Sylvester's order, blocks."""

import pytest
import torch

from fp8attn.formats.rotation import block_size, rotate, rotate_back, signs
from fp8attn.formats.spec import HEAD_DIMS

BLOCKS = {64: 64, 80: 16, 96: 32, 128: 128, 192: 64, 256: 128, 512: 128}


def hadamard(n: int) -> torch.Tensor:
    """Sylvester's construction."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h


def test_blocks():
    assert {head_dim: block_size(head_dim) for head_dim in HEAD_DIMS} == BLOCKS


def test_signs_by_hand():
    """The bits of 0x9E37 from the lowest: 1110 1100 0111 1001. Those of 0x79: 1001 1110. A 1 is a minus, and two of
    them a plus.
    """
    low = [-1, -1, -1, 1, -1, -1, 1, 1, 1, -1, -1, -1, -1, 1, 1, -1]
    high = [-1, 1, 1, -1, -1, -1, -1, 1]
    expected = [a * b for b in high for a in low]
    assert signs(torch.zeros(128)).tolist() == expected
    assert signs(torch.zeros(256)).tolist() == expected * 2
    assert signs(torch.zeros(80)).tolist() == expected[:80]


def test_one_channel_by_hand():
    """Blocks of 16 channels, so each channel goes to 16 results, with a factor of 1/4."""
    x = torch.zeros(80)
    x[19], x[3] = 8.0, 4.0
    # Row i of column 3 of the Hadamard matrix is (-1)^(bits that i and 3 share): + - - +. Channel 3 has the sign - (low
    # +, high -), and channel 19 = 16 + 3 the sign + (low +, high +).
    assert rotate(x).tolist() == [-1.0, 1.0, 1.0, -1.0] * 4 + [2.0, -2.0, -2.0, 2.0] * 4 + [0.0] * 48


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_matrix_is_the_documented_one_and_orthogonal(head_dim):
    n = BLOCKS[head_dim]
    matrix = (
        torch.block_diag(*[hadamard(n)] * (head_dim // n)) * signs(torch.zeros(head_dim, dtype=torch.float64)) / n**0.5
    )
    unit = torch.eye(head_dim, dtype=torch.float64)
    torch.testing.assert_close(rotate(unit).T, matrix, rtol=0, atol=1e-15)  # a row of the unit matrix gives a column
    torch.testing.assert_close(rotate(unit) @ rotate(unit).T, unit, rtol=0, atol=1e-14)
    torch.testing.assert_close(rotate_back(unit).T, matrix.T, rtol=0, atol=1e-15)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_scores_stay_and_back_is_the_inverse(head_dim):
    torch.manual_seed(0)
    q, k = torch.randn(2, 5, 3, head_dim)
    # FP32 rounds some 8 times, each 2^-24 of values of size 1: 1e-6 is ample for an element, and 1e-5 for a sum of 256.
    torch.testing.assert_close(rotate_back(rotate(k)), k, rtol=0, atol=2e-6)
    torch.testing.assert_close((rotate(q) * rotate(k)).sum(-1), (q * k).sum(-1), rtol=0, atol=3e-5)


def test_a_channel_that_stands_out_is_spread():
    k = torch.randn(100, 128, generator=torch.Generator().manual_seed(0))
    k[:, 5] += 100.0
    rotated = rotate(k)
    assert (
        k.abs().amax() > 97 and rotated.abs().amax() < 100 / 128**0.5 + 5
    )  # each gets 8.8 of the 100, and 5 deviations of noise
