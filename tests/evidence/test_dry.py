"""A dry run records the same launches as a run."""

import json
import types

import pytest

from evidence import dry
from tests.support import compiling, libcuda

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

LAUNCH = """
import ctypes, importlib, json, os, sys
os.environ["TRITON_LIBCUDA_PATH"] = sys.argv[1]
ctypes.CDLL(f"{sys.argv[1]}/libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver
from evidence import dry, fingerprint
from fp8attn.kernels import launch

class Driver(CudaDriver):
    def __init__(self):
        super().__init__()
        self.get_device_capability, self.get_current_device, self.get_current_stream = (lambda *_: (9, 0)), (lambda: 0), (lambda _: 7)

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

dry.pretend({"capability": [9, 0], "sms": 132, "shared": 232448})
row = "append", "quantize-S4096", "fp8attn"
[expected] = dry.fingerprints(row[0], [row[1:]], GPUTarget("cuda", 90, 32))
driver.set_active(Driver())
with launch.recording(dry=True):  # of what makes its inputs
    call = importlib.import_module("benchmarks." + row[0]).calls(row[1])[row[2]]
print(json.dumps([expected, fingerprint.launched(call)]))
"""


def test_a_dry_run_gives_what_launches_give(tmp_path):
    """The launches are made by Triton, with a libcuda that does nothing."""
    dry, real = json.loads(compiling.run("-c", LAUNCH, tmp_path, **libcuda.build(tmp_path)))
    assert dry == real and dry.startswith("launches:")


DRY = """
import sys
from importlib import import_module
from evidence import dry
dry.pretend({"capability": [9, 0], "sms": 132, "shared": 232448})
for name in sys.argv[1:]:
    for (case, impl), launches in dry.launches_of(name, [(case, None) for case in import_module(f"benchmarks.{name}").CASES]).items():
        print(name, case, (impl or "inputs").replace(" ", "_"), *dict.fromkeys(made.kernel.fn.__name__ for made in launches))
"""


def test_every_case_can_be_run_dry():
    """Each case selects the kernels of a Hopper GPU."""
    names = "prefill", "decode", "sdpa", "append", "portable", "accumulation", "accuracy"
    rows = [line.split() for line in compiling.run("-c", DRY, *names).splitlines()]
    assert {name for name, *_ in rows} == set(names) and all(kernels for _, _, impl, *kernels in rows if impl != "inputs")
    kernels = {tuple(row[:3]): row[3:] for row in rows}
    impls = "fp8attn", "fp8attn-e4m3-keys", "fp8attn-q8"
    assert all(kernels["prefill", "chunked-2k-on-128k", impl] == ["prefill_kernel", "_combine_kernel"] for impl in impls)
    assert kernels["sdpa", "full-S1024", "fp8attn-rope"] == ["page_kernel", "prefill_kernel"]
    assert kernels["append", "step-B64", "fp8attn"] == ["step_kernel"]
    assert kernels["portable", "kernel-decode-B1-S8192", "fp8attn-triton"] == ["portable_kernel", "_combine_kernel"]


def test_kernels_are_compiled_ahead_where_there_is_a_gpu(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(dry, "answer", lambda name, request: asked.append((name, request["rows"])))
    monkeypatch.setattr(dry, "import_module", lambda name: types.SimpleNamespace(calls=None))
    monkeypatch.setattr(dry, "meta", lambda: {"device": "cpu"})
    dry.compile_ahead("made", ["a"])
    monkeypatch.setattr(dry, "meta", lambda: {"device": "H", "capability": [9, 0]})
    dry.compile_ahead("made", ["a", "b"])
    assert asked == [("made", [("a", None), ("b", None)])]
