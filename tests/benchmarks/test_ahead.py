"""Kernels are compiled ahead from launches that are recorded without a GPU."""

import pytest

from tests.support import compiling

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

pytestmark = pytest.mark.slow

DRY = """
import sys
from importlib import import_module
import torch
from benchmarks import ahead
ahead.pretend([132, 232448, True, "NVIDIA H200", True])
torch.inference_mode().__enter__()
for name in sys.argv[1:]:
    for case in import_module(f"benchmarks.{name}").CASES:
        for impl, launches in ahead.launches_of(name, case):
            print(name, case, impl.replace(" ", "_"), *dict.fromkeys(made.kernel.fn.__name__ for made in launches))
from benchmarks import overhead
from fp8attn.kernels.launch import recording
with recording(dry=True):
    print("overhead", "calls", len(overhead.ops()), "made")
"""


def test_every_case_can_be_recorded():
    """Each case selects the kernels of a Hopper GPU, and `overhead` makes its calls."""
    names = "prefill", "decode", "sdpa", "append", "accuracy", "engine", "latent"
    rows = [line.split() for line in compiling.run("-c", DRY, *names).splitlines()]
    assert {name for name, *_ in rows} == {*names, "overhead"} and all(
        kernels for _, _, impl, *kernels in rows if impl != "inputs"
    )


COMPILE = """
import io, json, sys
from benchmarks import ahead
request = {"machine": [132, 232448, True, "NVIDIA H200", True], "arch": 90, "cases": {"decode": ["B1-S8192"]}}
sys.stdin = io.StringIO(json.dumps(request))
ahead.main()
"""


def test_kernels_are_compiled_ahead():
    assert compiling.run("-c", COMPILE).splitlines()[-1] in {f"{n} of {n} kernels compiled" for n in range(4, 12)}
