"""What tests of the Triton kernels in Triton's interpreter share. Modules that import this are skipped where kernels
are compiled.
"""

import os

import pytest
import torch

from tests.support.kernel_cases import empty_cache, fill, poison_empty

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the kernels run compiled here: see tests/gpu", allow_module_level=True)

QUIET = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of Inf and NaN
ARGUMENTS = {
    "cu_seqlens_q": None,
    "max_seqlen_q": 1,
    "causal": True,
    "softmax_scale": 0.125,
    "window": 0,
    "softcap": 0.0,
    "sinks": None,
    "leftpad_k": None,
    "return_lse": True,
}


@pytest.fixture(autouse=True, scope="module")
def dynamo_knows_torch():
    """Dynamo identifies torch's functions once, by object. So this runs before `torch.empty` is replaced."""
    torch.compile(lambda: torch.empty(1), backend="eager")()


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    torch.manual_seed(0)
    poison_empty(monkeypatch)


def cache_and_queries():
    pages = empty_cache([150, 30], 2, 64, mean=1.0)
    fill(pages, torch.randn(180, 2, 64), torch.randn(180, 2, 64), [150, 30])
    return pages, torch.randn(2, 4, 64).half()
