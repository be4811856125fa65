"""A small model and its input; no gradients; counts of compiled graphs."""

import pytest
import torch

from tests.mode.nets import Net


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def x():
    return torch.randn(2, 40, 128, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield
    assert torch._C._len_torch_function_stack() == 0  # every context has ended


@pytest.fixture
def graphs():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
