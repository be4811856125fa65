"""Every launch of the Triton kernels compiles for Hopper, with no spills but those of writing pages, and for older GPUs too; no GPU is
needed."""

import compiling
import pytest

from fp8attn.layout import HEAD_DIMS

pytest.importorskip("triton")

CASES = {90: HEAD_DIMS, 80: (96, 128, 256), 89: (96, 128, 256)}  # head dimensions by architecture
KERNELS = {
    *("attention_kernel", "combine_kernel"),
    *("step_kernel", "page_kernel", "queries_kernel", "e4m3_kernel"),
    *("statistics_kernel", "scales_kernel", "rows_kernel"),
}


# Bytes that a thread may spill at head_dim 128 and less. Pages of K that are rotated and settled do not fit in the 128 registers of two
# programs an SM, and steps of several tokens keep all that may be rounded again; spills are outside of loops over memory.
SPILLED = {"page_kernel": 320, "step_kernel": 160}


@pytest.mark.parametrize("arch", CASES)
def test_every_kernel_has_cases(arch):
    launched = compiling.call("compile_kernels", "kernels", arch)
    assert {name.split()[0] for name in launched} == {f"D{head_dim}" for head_dim in CASES[arch]}
    assert {kernel for kernels in launched.values() for kernel in kernels} == KERNELS


@pytest.mark.parametrize(
    ("arch", "head_dim"),
    [pytest.param(a, d, marks=[pytest.mark.triton36] * ((a, d) == (90, 64))) for a, head_dims in CASES.items() for d in head_dims],
)
def test_kernels_compile_without_spills(arch, head_dim, capsys):
    rows = compiling.call("compile_kernels", "compile_cases", arch, head_dim)
    assert rows
    for row in rows:
        assert row["head_dim"] == head_dim and not row["warnings"], row
        assert row["shared_bytes"] <= row["shared_limit"], row
        if arch == 90 and head_dim <= 128:
            assert row["spill_bytes"] <= SPILLED.get(row["kernel"], 0), row
        if arch == 90 and row["kernel"] == "page_kernel" and head_dim in (64, 96, 128):
            # Two programs an SM: alone, a program's reading waits for its writing, and a quarter of the bandwidth is gone.
            assert 2 * row["registers"] * 32 * row["num_warps"] <= 65536, row
    with capsys.disabled():
        for row in rows:
            if row["spill_bytes"]:
                print(f"\nsm_{arch} {row['kernel']} {row['case']}: {row['spill_bytes']} bytes spilled", end="")
