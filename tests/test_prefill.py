"""The Hopper prefill kernel without a GPU: its PTX, run on the CPU. (What the compiler makes of it: `test_compile_prefill.py`.)"""

import compiling
import pytest

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

CASES = "16-bit queries", "FP8 queries, three warpgroups", pytest.param("ragged, turned queries", marks=pytest.mark.triton36)


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_reference(case):
    """Rows of few keys and of many, blocks that begin before their sequence, tiles that end early, two items' memory and a ring that wraps;
    NaN where nobody may look.

    Bounds are those of `benchmarks.prefill_check` on a GPU, for V with a mean and for sums of weights that are rounded to 3 bits. A row of
    some 300 keys has not averaged its own roundings: 3.5% by sqrt(300), of scores so unlike that a few keys count.
    """
    row = compiling.call("run_prefill", "emulate_case", case)
    assert not row["nan"]
    assert row["rel_err"] < 0.004 and row["row_err"] < 0.02, row
    assert row["lse_err"] < 2**-4, row
    assert row["counters"] == 0, "the counter must be left as it was found"
