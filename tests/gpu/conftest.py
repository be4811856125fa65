"""Fixtures of the tests of the Hopper kernels."""

import pytest
import torch


@pytest.fixture
def poisoned(monkeypatch):
    """Tensors that kernels allocate are filled with NaN, and plans are made again."""
    from fp8attn.kernels import prefill
    from tests.support.kernel_cases import poison_empty  # imports Triton, as does prefill

    torch.manual_seed(0)
    poison_empty(monkeypatch)
    prefill.plan.make_plan.cache_clear()  # a plan keeps what tests have changed
    yield
    prefill.plan.make_plan.cache_clear()
