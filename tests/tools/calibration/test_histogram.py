"""Histograms of magnitudes against numpy, and the scale of least error against a search over all scales on the values themselves."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from fp8attn.formats.codec import CODECS, E4M3
from fp8attn_tools.calibration.histogram import Histogram, _error_integral

BIN = 2.0**-7  # the widest bin, relative to its lower end


def heavy(tokens=3000, seed=3):
    """`[2, tokens, 64]`: a head whose logarithms have a deviation of 2, and the same around 1e-6."""
    x = torch.exp(2 * torch.randn(2, tokens, 64, generator=torch.Generator().manual_seed(seed)))
    return x * torch.tensor([1.0, -1e-6])[:, None, None]


def counted(x):
    histogram = Histogram()
    for part in x.split(700, 1):
        histogram.add(part)
    return histogram


@pytest.mark.parametrize("q", [0.01, 0.5, 0.999, 0.99999, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantiles_of_heavy_tails(q, dtype):
    x = heavy().to(dtype)
    exact = np.quantile(x.abs().flatten(1).float().numpy(), q, axis=1, method="inverted_cdf")
    ratio = counted(x).quantile(q).numpy() / exact
    assert (ratio >= 1 - 1e-6).all()
    assert (ratio <= 1 + BIN).all()
    torch_s = torch.quantile(x.abs().flatten(1).float(), q, dim=1, interpolation="higher").numpy()
    assert (np.abs(counted(x).quantile(q).numpy() / torch_s - 1) <= BIN).all()


def test_values_of_bfloat16_are_counted_exactly():
    x = torch.tensor([[1.0, -1.0, 1.0078125, 0.0, -0.0, 2.0**-130, 3e38]]).bfloat16()
    histogram = counted(x)
    bins = {1.0: 2, 1.0078125: 1, 0.0: 2, 2.0**-130: 1, 3e38: 1}
    found = {
        float((torch.tensor(int(n)) << 16).int().view(torch.float32)): int(histogram.counts[0, n]) for n in histogram.counts[0].nonzero()
    }
    assert found == {float(torch.tensor(value).bfloat16()): count for value, count in bins.items()}


def test_a_head_of_zeros():
    histogram = counted(torch.zeros(1, 5, 4))
    assert 0 <= histogram.quantile(0.999) < 1e-38  # `Observer.scale` keeps scales above 2^-32
    assert histogram.best_scale(torch.zeros(1), E4M3) < 1e-37
    assert histogram.squared_error(torch.ones(1), E4M3) == 0


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_the_integral_of_the_error_is_that_of_the_codes(codec):
    """Against the midpoint rule on the codes that `encode` gives, over every octave from subnormal to saturated."""
    top = 1.5 * codec.max
    ends = torch.tensor([0.0, 2.0**-11, 2.0**-9, 0.013, 2.0**-6, 0.02, 0.4999, 1.0, 17.3, 100.0, top], dtype=torch.float64)[1:]
    for low, high in pairwise(ends):
        t = low + (high - low) * (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
        numeric = ((codec.encode(t.float(), torch.ones(())).double() - t).square().mean() * (high - low)).item()
        found = (_error_integral(high, codec) - _error_integral(low, codec)).item()
        assert found == pytest.approx(numeric, rel=1e-3)  # the midpoint rule's own error


def error(x, scale, codec):
    """`[num_heads]`: the squared error of `x [num_heads, ...]` in float64."""
    scale = scale[:, None, None]
    return (codec.encode(x.float(), 1 / scale).double() * scale - x).square().sum((1, 2))


SHAPES = {
    "normal": lambda g: torch.randn(2, 2000, 64, generator=g),
    "heavy tails": lambda g: torch.exp(1.5 * torch.randn(2, 2000, 64, generator=g)),
    "an outlier of 100 deviations in 100,000 values": lambda g: torch.randn(2, 2000, 64, generator=g).index_put(
        (torch.tensor(0), torch.tensor(7), torch.tensor(5)), torch.tensor(100.0)
    ),
    "an outlier of 3,000 deviations": lambda g: torch.randn(2, 2000, 64, generator=g).index_put(
        (torch.tensor(0), torch.tensor(7), torch.tensor(5)), torch.tensor(3000.0)
    ),
}


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_scale_of_least_error_against_brute_force(shape, codec):
    x = SHAPES[shape](torch.Generator().manual_seed(1))
    amax = x.abs().amax((1, 2))
    histogram = counted(x)
    scale = histogram.best_scale(amax, codec)
    every = [amax / codec.max * 2.0 ** (-n / 64) for n in range(8 * 64)]
    least = torch.stack([error(x, s, codec) for s in every]).amin(0)
    mine = error(x, scale, codec)
    # The search has steps of 1/64 octave, too, but other ones, and spreads the values over a bin.
    assert (mine <= 1.01 * least).all(), (mine / least).tolist()
    if shape == "normal":  # elsewhere single values dominate, and where in its bin a single value is is not known
        torch.testing.assert_close(histogram.squared_error(scale, codec), mine, rtol=0.01, atol=0)
    assert (scale <= amax / codec.max * (1 + 1e-6)).all()
