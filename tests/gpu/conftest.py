"""Fixtures of the tests of the Hopper kernels."""

import os

import pytest
import torch

# Workers are spread over the GPUs. Each sees one, unless it is alone: tests of two GPUs are then left out.
if "PYTEST_XDIST_WORKER" in os.environ and (gpus := torch.cuda.device_count()) > 1:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) % gpus)


@pytest.fixture
def poisoned(monkeypatch):
    """Tensors that kernels allocate are filled with NaN, and plans are made again."""
    from fp8attn.kernels import prefill
    from tests.support.kernel_cases import poison_empty  # imports Triton, as does prefill

    torch.manual_seed(0)
    poison_empty(monkeypatch)
    prefill.plan.make_prefill_plan.cache_clear()  # a plan keeps what tests have changed
    yield
    prefill.plan.make_prefill_plan.cache_clear()
