"""The static form of a cache against the growing form, on the GPU."""

import pytest
import torch

from tests.cache.fuzz import fuzz

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def test_static_is_growing_for_a_minute_of_random_operations():
    assert fuzz(10**9, seed=1, device="cuda", seconds=60.0) > 0
