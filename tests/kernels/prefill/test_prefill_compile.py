"""The Hopper prefill kernel compiles for sm_90 as it was tuned: no spills in the hot loop, no serialized MMAs, within
shared memory.
"""

import pytest

from fp8attn.kernels.operands import copies_operands
from tests.support import compiling

triton = pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

pytestmark = [pytest.mark.triton36, pytest.mark.slow]

# The hot loop's instructions, spills in it, and spilled bytes in the whole kernel: what a Triton gives, and a little.
# Each brings a ptxas.
BOUNDS = {
    # ptxas 12.8. The kernel was tuned for it. Keys are INT8 where nothing is said. Each form of a CTA and of weights,
    # and what spills.
    "3.6": {
        "d64": (395, 0, 30), "d128": (475, 0, 50), "d128-long": (450, 4, 250), "d128-long-e4m3-no-lse": (420, 6, 180),
        "d128-q8-long-no-lse": (435, 2, 100), "d256": (580, 8, 150), "d256-e4m3-no-lse": (540, 4, 150),
        "d64-exact": (550, 0, 30), "d128-exact": (635, 0, 10), "d256-exact": (815, 45, 350),
    },
    # ptxas 13.4, without copies of operands and with 64-bit descriptors (`kernels/operands.py`). No loop spills
    # more than the one of 3.6, but for one instruction, and none is longer, but for head_dim 256 with an LSE, where
    # 3.6's spills 8 times.
    "3.9": {
        "d64": (384, 0, 40), "d64-e4m3": (345, 0, 40), "d128": (466, 0, 60), "d128-e4m3": (415, 0, 60),
        "d128-new": (466, 0, 40),
        "d128-long": (428, 2, 260), "d128-tile64": (315, 0, 20),
        "d128-long-no-lse": (428, 2, 180), "d128-long-e4m3-no-lse": (398, 2, 190),
        "d128-long-ragged-no-lse": (428, 2, 170),
        "d128-q8-long-no-lse": (415, 2, 160), "d192": (505, 0, 20), "d256": (596, 0, 40),
        "d256-no-lse": (563, 0, 20), "d256-e4m3-no-lse": (553, 0, 40), "d256-q8": (522, 0, 20),
        "d256-ragged-no-lse": (596, 0, 40),
        "d64-exact": (545, 0, 30), "d128-exact": (626, 0, 10),
        "d128-long-exact": (626, 0, 80), "d256-exact": (740, 0, 30),
    },
}  # fmt: skip
CASES = BOUNDS.get(triton.__version__.rpartition(".")[0], {})


@pytest.mark.skipif(not CASES, reason=f"no bounds for Triton {triton.__version__}")
@pytest.mark.parametrize("case", CASES)
def test_hot_loop(case):
    row = compiling.call("tests.kernels.prefill.compile_prefill", "compile_case", case)
    loop, loop_spills, spills = CASES[case]
    assert row["serialized"] == "" and row["unset"] == "", row
    assert row["early"] == "", "a stage is released while products read it"
    assert 300 < row["loop"] <= loop and row["loop_spills"] <= loop_spills, row
    assert row["spill_bytes"] <= spills, row
    assert row["overwritten"] == "", "a register is written while a product reads it"
    assert row["operands"] == ("direct" if copies_operands() else ""), row
    # Two warpgroups of one partition must not meet in a tile. Three have barriers of their own warps, before they
    # release K and V.
    assert row["barriers"] == (2 if "d64" in case or "long" in case else 0), row
    if case == "d128-new":
        assert row["instructions"] < 4300, "with the page writer's, more than the instruction cache holds"
    assert row["shared_bytes"] <= 232448, row
    assert 0 < row["end"] <= 2048, "no address is stored there (`memory.address_of`)"


def test_a_write_to_a_running_product_s_operand_is_found():
    """The fault of ptxas before 13.3, planted in the machine code of a loop."""
    overwritten, planted = compiling.call("tests.kernels.prefill.compile_prefill", "overwritten_if_planted", "d128")
    assert overwritten == planted and overwritten.startswith("MOV R")
