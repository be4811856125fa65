"""Every launch of the Triton kernels compiles for Hopper, with no spills but those of writing pages, and a sample of
them for other GPUs.

No GPU is needed."""

import pytest

pytest.importorskip("triton")

from tests.kernels import compile_kernels
from tests.kernels.compile_kernels import FORMS, KINDS, SAMPLE, TARGETS
from tests.support import compiling

pytestmark = pytest.mark.slow

# All of one width. The others differ in padding and in how many registers a tile needs: one format of keys for each
# tile. Tiles of 80 channels are those of 96, and tiles of 192 those of 256, with another mask.
OTHER_WIDTHS = ("rows4", "rows64 e4m3", "rows128", "step", "prompt", "dense", "dense rope", "dense fp8")
# Each kernel; and pairs of RoPE that are neighbors, in the most channels.
TRITON36 = (
    *(f"D64 {case}" for case in (*OTHER_WIDTHS[:7], "rows")),
    "D256 dense rope interleaved",
    "D512 rows4",
    "D512 prompt",
)
HOPPER = tuple(
    case
    for case in compile_kernels.cases()
    if case.startswith("D128 ")
    or case in ("D80 rows64 e4m3", "D192 rows4", *TRITON36)
    or (case.partition(" ")[2] in OTHER_WIDTHS and case.split()[0] in ("D96", "D256"))
    or case.startswith(("D512 ", "L"))
)
OTHERS = [
    *((target, case) for target in TARGETS if target != "sm_90" for case in SAMPLE),
    *((target, case) for target in KINDS for case in FORMS),
]
KERNELS = {
    *("portable_kernel", "combine_kernel"),
    *("step_kernel", "page_kernel"),
    *("append_kernel", "queries_kernel", "attention_kernel"),
}
# Bytes that a thread may spill at head_dim 128 and less. Pages of K that are rotated and settled do not fit in the 128
# registers of two programs an SM, and steps of several tokens keep all that may be rounded again; spills are outside of
# loops over memory.
SPILLED = {"page_kernel": 320, "step_kernel": 160}
# RoPE of a dense call loads each channel's partner, too, and 96 channels are masked at each load. With one program an
# SM it does not spill.
MASKED_ROPE = {"D96 dense rope": 360}


@pytest.mark.parametrize("names", [HOPPER, SAMPLE], ids=["Hopper", "sample"])
def test_every_kernel_has_cases(names):
    assert compiling.call("tests.kernels.compile_kernels", "kernels", names) == KERNELS


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.triton36] * (case in TRITON36)) for case in HOPPER]
)
def test_compiles_for_hopper_without_spills(case, capsys):
    head_dim = int(case.split()[0][1:])
    for row in compiled("sm_90", case):
        # At head_dim 512 prompts spill, mostly before the loop, where Q is rotated. They take half of the time of tiles
        # that do not spill.
        if head_dim <= 128 or (head_dim == 512 and row["kernel"] == "portable_kernel" and "rows128" not in case):
            assert row["spill_bytes"] <= MASKED_ROPE.get(case, SPILLED.get(row["kernel"], 0)), row
        if row["kernel"] == "page_kernel" and head_dim in (64, 96, 128):
            # Two programs an SM: alone, a program's reading waits for its writing, and a quarter of the bandwidth is
            # gone.
            assert 2 * row["registers"] * 32 * row["num_warps"] <= 65536, row
        if row["spill_bytes"]:
            with capsys.disabled():
                print(f"\nsm_90 {row['kernel']} {case}: {row['spill_bytes']} bytes spilled", end="")


@pytest.mark.parametrize(("target", "case"), OTHERS)
def test_compiles_for_other_gpus(target, case):
    """Kernels that have not been run on these GPUs compile, within their shared memory."""
    compiled(target, case)


def compiled(target: str, case: str) -> list[dict]:
    rows = compiling.call("tests.kernels.compile_kernels", "compile_case", target, case)
    assert rows
    for row in rows:
        assert not row["warnings"] and row["shared_bytes"] <= row["shared_limit"], row
    return rows
