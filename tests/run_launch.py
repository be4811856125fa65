"""Launches a kernel the ordinary way and then directly (`kernels.launch`) on a libcuda that only notes what it is given; prints JSON.

A process of its own (`test_launch.py` runs it), because a process with TRITON_INTERPRET=1 cannot compile.

    python tests/run_launch.py FOLDER_WITH_LIBCUDA
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

FOLDER = Path(sys.argv[1])
os.environ["TRITON_LIBCUDA_PATH"] = str(FOLDER)
STUB = ctypes.CDLL(FOLDER / "libcuda.so.1", mode=ctypes.RTLD_GLOBAL)

import torch  # noqa: E402
import triton  # noqa: E402
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.driver import CudaDriver  # noqa: E402

from fp8attn.kernels.gluon import gl, gluon  # noqa: E402
from fp8attn.kernels.launch import Constants, PerStream, Tiles, View, launch, own  # noqa: E402
from fp8attn.kernels.replay import Replay, Replays  # noqa: E402
from fp8attn.layout import FP8  # noqa: E402

DEVICE = torch.device("cuda", 0)
ROWS = View((1024, 64), (64, 1), (128, 64))


class Driver(CudaDriver):
    """Triton's own, on a machine with one Hopper."""

    def __init__(self) -> None:
        super().__init__()
        self.get_device_capability = lambda device=0: (9, 0)
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 7

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@gluon.jit(do_not_specialize=["count"])
def kernel(x_ptr, stride, k_desc, absent_ptr, v_desc, y_ptr, count, scale, D: gl.constexpr, FLAG: gl.constexpr):
    i = gl.arange(0, D, gl.BlockedLayout([1], [32], [4], [0]))
    x = gl.load(x_ptr + i * stride, mask=i < count)
    gl.store(y_ptr + i, x * scale + k_desc.shape[0].to(gl.float32) + v_desc.shape[0].to(gl.float32), mask=i < count)


def noted(compiled) -> dict:
    """What the last launch was given."""
    parameters = (ctypes.c_ubyte * 128 * 64).in_dll(STUB, "stub_parameters")
    return {
        "grid": list((ctypes.c_uint * 3).in_dll(STUB, "stub_grid")),
        "parameters": [bytes(parameters[i])[:size].hex() for i, size in enumerate(sizes(compiled))],
    }


def expect(compiled) -> None:
    """Tell the stub how large the parameters of the launches to come are."""
    found = (ctypes.c_int * 64).in_dll(STUB, "stub_sizes")
    for i, size in enumerate([*sizes(compiled), 0]):
        found[i] = size


def sizes(compiled) -> list[int]:
    """Bytes of the parameters of a compiled kernel."""
    declared = re.search(r"\.entry \w+\((.*?)\)", compiled.asm["ptx"], re.DOTALL)[1]
    bytes_of = {"u64": 8, "b64": 8, "u32": 4, "b32": 4, "f32": 4}
    return [int(n) if n else bytes_of[kind] for kind, n in re.findall(r"\.param (?:\.align \d+ )?\.(\w+)[^,\[]*(?:\[(\d+)\])?", declared)]


def replayed(launches: list, compiled: dict) -> dict:
    """What replays of a function of two launches reach the driver with, and which calls are replayed.

    `launches` grows by one for each launch that goes Triton's ordinary way, whose kernel is then `compiled["last"]`.
    """
    zeros, asked = torch.zeros(4), []
    counter = PerStream(lambda device: asked.append(device) or zeros, DEVICE)
    constants = Constants(DEVICE, D=128, FLAG=False, num_warps=4)

    def function(pool: torch.Tensor, x: torch.Tensor, scale: float, elsewhere: str) -> torch.Tensor:
        between, pages = own(torch.empty(256)), own(torch.empty(8192, dtype=torch.uint8).view(FP8))
        out = own(torch.empty_like(x))
        k, v = Tiles(pool, ROWS), Tiles(pages, View((64, 128), (128, 1), (64, 128), swizzled=False))
        launch(kernel, (3, 2), (x if elsewhere != "copied" else x.clone(), 16, k, counter, v, between, 77, scale), constants)
        launch(kernel, (1,), (between, 16, k, counter, v, out, 77, scale), constants)
        return out if elsewhere != "result" else out + 1

    replays = Replays(function)
    rows = {}
    (ctypes.c_int * 64).in_dll(STUB, "stub_sizes")[0] = 0  # of a kernel that is not compiled yet
    function(torch.zeros(65536, dtype=torch.uint8).view(FP8), torch.zeros(256), 0.5, "")
    expect(compiled["last"])
    for elsewhere in ("", "copied", "result"):
        for _ in range(4):  # compiled, recorded, replayed twice
            given = torch.zeros(65536, dtype=torch.uint8).view(FP8), torch.zeros(256)
            before = len(launches)
            asked.clear()
            out = replays(given, (0.5, elsewhere))
        [kind] = [found for key, found in replays.known.items() if key[0] == (0.5, elsewhere)]
        addresses = {int.from_bytes(bytes.fromhex(x[:16]), "little") for x in noted(compiled["last"])["parameters"] if len(x) >= 16}
        held = {"pool": given[0], "out": out, "counter": zeros, "x": given[1]}
        rows[elsewhere or "launches"] = {
            "replayed": isinstance(kind, Replay), "ordinary": len(launches) - before, "asked": len(asked),
            "takes": [name for name, tensor in held.items() if tensor.data_ptr() in addresses],
        }  # fmt: skip
    return rows


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    torch.accelerator.device_index = lambda index: contextlib.nullcontext()
    ordinary = []
    compiled = {}
    run = type(kernel).run

    def counted(self, *args, **options):
        ordinary.append(1)
        compiled["last"] = run(self, *args, **options)
        return compiled["last"]

    type(kernel).run = counted
    pool = torch.zeros(4, 2, 128, 64, dtype=torch.uint8).view(FP8)
    x, y = torch.zeros(256), torch.zeros(256)

    def arguments(**changed) -> list:
        given = {
            "x": x, "stride": 16, "k": Tiles(pool, ROWS), "absent": None,
            "v": Tiles(pool, View((512, 128), (128, 1), (64, 128), swizzled=False)), "y": y, "count": 77, "scale": 0.5,
        }  # fmt: skip
        return list((given | changed).values())

    def done(constants: Constants, args: list) -> dict:
        before = len(ordinary)
        launch(kernel, (3, 2), args, constants)
        return noted(compiled["last"]) | {"ordinary": len(ordinary) > before}

    constants = Constants(DEVICE, D=128, FLAG=True, num_warps=4)
    launch(kernel, (3, 2), arguments(), constants)
    expect(compiled["last"])
    twin = Tiles(pool.clone(), ROWS)
    fresh = {"x": torch.ones(256), "y": torch.ones(256), "stride": 32, "count": 1, "scale": 2.0, "k": twin}
    same = {"again": arguments(), "others of a kind": arguments(**fresh)}
    others = {
        "dtype": arguments(x=x.half()),
        "address": arguments(x=x[1:]),
        "stride": arguments(stride=3),
        "stride 1": arguments(stride=1),
        "wide stride": arguments(stride=2**32),
        "present": arguments(absent=y),
        "block": arguments(k=Tiles(pool, replace(ROWS, block=(64, 64)))),
        "swizzle": arguments(k=Tiles(pool, replace(ROWS, swizzled=False))),
    }
    rows = {}
    for name, args in (same | others).items():
        direct = done(constants, args)
        rows[name] = {"direct": direct, "ordinary": done(Constants(DEVICE, **constants), args)}
    again = done(constants, others["dtype"])
    rows["dtype again"] = {"direct": again, "ordinary": rows["dtype"]["ordinary"]}
    hooked = []
    knobs.runtime.launch_enter_hook.add(hooked.append)
    rows["profiled"] = {"direct": done(constants, same["again"]), "hooks": len(hooked)}
    knobs.runtime.launch_enter_hook.remove(hooked.append)
    rows["replayed"] = replayed(ordinary, compiled)
    print(json.dumps({"same": list(same), "others": list(others), "learned": len(constants.compiled) > 0, "rows": rows}))


if __name__ == "__main__":
    main()
