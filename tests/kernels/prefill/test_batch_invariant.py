"""`batch_invariant` of the Hopper kernel without a GPU: its PTX, run on the CPU.
(`tests/gpu/test_batch_invariant_gpu.py` has the rest.)
"""

import pytest

from tests.support import compiling

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", ["INT8 keys", "head_dim 256, E4M3 keys", "window"])
def test_a_query_has_the_same_bits(case):
    """Beside other sequences, in a chunk whose blocks begin elsewhere, alone; where rows beside it are multiplied twice
    and it is not.
    """
    row = compiling.call("tests.kernels.prefill.run_batch_invariant", "emulate_case", case)
    assert row == dict.fromkeys(row, 0) | {"case": case, "nan": False}, row
