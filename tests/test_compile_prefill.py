"""The Hopper prefill kernel compiles for sm_90 as it was tuned: no spills in the hot loop, no serialized MMAs, within shared memory."""

import compiling
import pytest

triton = pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

pytestmark = pytest.mark.triton36

# The hot loop's instructions, spills in it, and spilled bytes in the whole kernel: what a Triton gives, and a little. Each brings a ptxas.
BOUNDS = {
    # ptxas 12.8. The kernel was tuned for this one, and results are of it.
    "3.6": {
        "d64": (360, 0, 20), "d128": (430, 0, 90), "d128-no-lse": (425, 0, 40), "d128-long": (415, 6, 330),
        "d128-long-no-lse": (415, 6, 270), "d256": (560, 4, 280), "d256-no-lse": (560, 4, 280), "d256-q8": (540, 8, 270),
        "d256-q8-no-lse": (540, 8, 270), "d256-ragged-no-lse": (560, 4, 280), "d128-rope": (430, 0, 110),
        "d256-rope-pairs": (560, 4, 280),
    },
    # ptxas 13.4, which spills in loops of the same PTX.
    "3.9": {"d64": (370, 0, 10), "d128": (445, 6, 300), "d128-long": (555, 90, 3800), "d256-q8": (565, 2, 250)},
}  # fmt: skip
CASES = BOUNDS.get(triton.__version__.rpartition(".")[0], {})


@pytest.mark.skipif(not CASES, reason=f"no bounds for Triton {triton.__version__}")
@pytest.mark.parametrize("case", CASES)
def test_hot_loop(case):
    row = compiling.call("compile_prefill", "compile_case", case)
    loop, loop_spills, spills = CASES[case]
    assert row["serialized"] == "" and row["unset"] == "", row
    assert 300 < row["loop"] <= loop and row["loop_spills"] <= loop_spills, row
    assert row["spill_bytes"] <= spills, row
    assert row["shared_bytes"] <= 232448, row
