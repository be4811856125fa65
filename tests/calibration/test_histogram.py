"""Histograms of magnitudes against numpy. `Range` is tested with `calibrate` (tests/integrations/test_calibrate.py)."""

import numpy as np
import pytest
import torch

from fp8attn.statistics import Histogram


@pytest.mark.parametrize("q", [0.01, 0.5, 0.999, 0.99999, 1.0])
def test_histogram_of_heavy_tails(q):
    generator = torch.Generator().manual_seed(3)
    x = torch.exp(2 * torch.randn(3000, 2, 64, generator=generator)) * torch.tensor([1.0, 1e-6])[:, None]
    histogram = Histogram(x.amax((0, 2)))
    for part in x.split(700):
        histogram.add(part)
    exact = np.quantile(x.transpose(0, 1).flatten(1).numpy(), q, axis=1, method="inverted_cdf")
    ratio = histogram.quantile(q).numpy() / exact
    floor = x.amax((0, 2)).numpy() * 2.0**-16 / exact  # what is below the last bin is taken for its end
    assert (ratio >= 1 - 1e-6).all()
    assert (ratio <= np.maximum(1.002, floor * 1.01)).all()


def test_constant_head_has_a_positive_scale():
    histogram = Histogram(torch.zeros(1))
    histogram.add(torch.zeros(5, 1, 4))
    assert histogram.quantile(0.999).tolist() == [0.0]  # `calibrate` keeps scales above 2^-32
