"""The Hopper prefill kernel without a GPU: its PTX, run on the CPU. (What the compiler makes of it: `test_compile_prefill.py`.)"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CASES = "16-bit queries", "FP8 queries, three warpgroups", "ragged, turned queries"


@pytest.fixture(scope="module")
def emulated():
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "tests/run_prefill.py"), *CASES]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return {row["case"]: row for row in json.loads(run.stdout)}


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_reference(emulated, case):
    """Rows of few keys and of many, blocks that begin before their sequence, tiles that end early, two items' memory and a ring that wraps;
    NaN where nobody may look.

    Bounds are those of `benchmarks.prefill_check` on a GPU, for V with a mean and for sums of weights that are rounded to 3 bits. A row of
    some 300 keys has not averaged its own roundings: 3.5% by sqrt(300), of scores so unlike that a few keys count.
    """
    row = emulated[case]
    assert not row["nan"]
    assert row["rel_err"] < 0.004 and row["row_err"] < 0.02, row
    assert row["lse_err"] < 2**-4, row
    assert row["counters"] == 0, "the counter must be left as it was found"
