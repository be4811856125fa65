"""The Hopper prefill kernel without a GPU: its PTX, run on the CPU. (`test_prefill_compile.py` checks the compiled
code.)
"""

import pytest

from tests.support import compiling

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

pytestmark = pytest.mark.slow

# By the keys' dtype: relative errors of all outputs and of the worst row, and of the LSE. What Q's rounding adds is in
# them: scores here have a spread of up to 8, of which INT8's rounding is 0.3% and E4M3's 2%.
BOUNDS = {
    "INT8 keys": (0.01, 0.04, 0.1),
    "E4M3 keys": (0.02, 0.1, 0.4),
    "head_dim 256": (0.02, 0.1, 0.4),  # E4M3 keys
    "FP8 queries, three warpgroups": (0.004, 0.02, 2**-4),
    "E4M3 keys, two warpgroups": (0.02, 0.1, 0.4),
    "FP8 queries, two warpgroups": (0.004, 0.02, 2**-4),
    "negative scale, FP8 queries": (0.004, 0.02, 2**-4),
    # Outputs' rounding to BF16 (2**-9) and FP16: twice multiplied, 8 bits are as exact as BF16.
    "exact": (0.002, 0.003, 0.002),
    "exact, E4M3 keys": (0.0004, 0.0008, 0.004),
}
TRITON36 = (
    "ragged, output given",
    "new pages, two CTAs",  # two warpgroups
    "head_dim 256",
    "window, padding, softcap, sinks",
)
RAGGED = "ragged, parts of the keys", "ragged, two warpgroups"
TILES = ("tiles of 64 keys",)
SCALES = ("negative scale", "negative scale, FP8 queries", "scale of zero")
CASES = [
    pytest.param(case, marks=[pytest.mark.triton36] * (case in TRITON36))
    for case in dict.fromkeys(
        (*BOUNDS, "head_dim 192", "two launches", "new pages, two CTAs", *SCALES, *TILES, *RAGGED, *TRITON36)
    )
]


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_reference(case):
    """Rows of few keys and of many, blocks that begin before their sequence, tiles that end early, two items' memory
    and a ring that wraps, parts without keys, pages that are NaN until the launch before has ended; NaN wherever no row
    may look. In each loop over tiles the ring wraps, so that the emulator sees what orders a stage's release and the
    next copy. A row of some 300 keys has not
    averaged the roundings of its weights: 3.5% by sqrt(300), of scores so unlike that a few keys count."""
    row = compiling.call("tests.kernels.prefill.run_prefill", "emulate_case", case)
    rel_err, row_err, lse_err = BOUNDS.get(case, BOUNDS["INT8 keys"])
    assert not row["nan"]
    assert row["rel_err"] < rel_err and row["row_err"] < row_err, row
    assert row["lse_err"] < lse_err, row
    assert row["counters"] == 0, "the counter must be left as it was found"
