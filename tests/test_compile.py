"""Every launch of the Triton kernels compiles for Hopper without spilling, and for older GPUs too; no GPU is needed."""

import json

import compiling
import pytest

pytest.importorskip("triton")


def compiled(*arguments: str) -> list[dict]:
    printed = compiling.run("tests/compile_kernels.py", *arguments)
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("arch", ["sm_90", "sm_80", "sm_89"])
def test_kernels_compile_without_spills(arch, capsys):
    rows = compiled(arch)
    append = {"step_kernel", "page_kernel", "queries_kernel", "means_kernel", "bytes_kernel"}
    dense = {"statistics_kernel", "scales_kernel", "rows_kernel"}
    assert {row["kernel"] for row in rows} == {"attention_kernel", "combine_kernel"} | append | dense
    for row in rows:
        assert not row["warnings"], row
        assert row["shared_bytes"] <= row["shared_limit"], row
        if arch == "sm_90" and row["head_dim"] <= 128:
            assert row["spill_bytes"] == 0, row
        if arch == "sm_90" and row["kernel"] == "page_kernel" and row["head_dim"] in (64, 96, 128):
            # Two programs an SM: alone, a program's reading waits for its writing, and a quarter of the bandwidth is gone.
            assert 2 * row["registers"] * 32 * row["num_warps"] <= 65536, row
    with capsys.disabled():
        for row in rows:
            if row["spill_bytes"]:
                print(f"\n{arch} {row['kernel']} {row['case']}: {row['spill_bytes']} bytes spilled", end="")
