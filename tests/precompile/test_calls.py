"""The kernels that are compiled ahead are all that calls use, and not many more. No GPU is needed."""

import json

import pytest

from tests.precompile.run_calls import WITHOUT_DENSE
from tests.support import compiling

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("target", ["sm_90", "sm_80"])
def test_no_call_launches_a_kernel_that_is_not_listed(target):
    """Prompts of 1 to 32k tokens, steps of 1 to 16, batches of 1 to 64, of random lengths and pasts, dense, padded and
    ragged.
    """
    cases = json.loads(compiling.run("-m", "tests.precompile.run_calls", target))
    for case, found in cases.items():
        assert found["launches"] > 250, case  # decodes alone make 299
        assert not found["missing"], (case, found["missing"])
    for case in WITHOUT_DENSE:
        # Kernels that combine parts are listed for every number of parts, and a sample of calls need not have each.
        assert set(cases[case]["only dense"]) <= {"_combine_kernel"}, case
        assert len(cases[case]["kernels"]) < len(cases["llama"]["kernels"])


def test_no_length_launches_a_kernel_that_is_not_listed():
    """Every length to 300, and 200 up to 131,072: prompts, chunks, appends, and dense calls also of other numbers of
    keys than queries.
    """
    found = json.loads(compiling.run("-m", "tests.precompile.run_lengths"))
    assert all(case["launches"] > 5000 for case in found.values())
    assert {name: case["missing"] for name, case in found.items() if case["missing"]} == {}
