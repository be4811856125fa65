"""Compiles variants of a small kernel with `tests.support.ptx`; prints JSON.

A process of its own (`test_ptx.py` runs it), because a process with TRITON_INTERPRET=1 cannot compile.

    python -m tests.support.run_ptx FOLDER
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import torch
import triton
from triton import JITFunction, knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fp8attn.kernels.compile import compiled
from fp8attn.kernels.launch import Tiles
from fp8attn.kernels.view import View
from tests.support.ptx import normalized

FOLDER = Path(sys.argv[1])
SOURCE = '''
from triton.language import cdiv

from fp8attn.kernels.gluon import fetch, gl, gluon, mbarrier


@gluon.jit
def power(x, count):
    """x ** count, in a loop."""
    for _ in range(count):
        x *= x
    return x


@gluon.jit(do_not_specialize=["count"])
def kernel(x_ptr, y_ptr, absent_ptr, tiles, stride, count, scale, D: gl.constexpr, FLAG: gl.constexpr):
    """y = x scaled."""
    memory = gl.allocate_shared_memory(gl.float16, [8, 64], tiles.layout)
    landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(landed, count=1)
    mbarrier.expect(landed, 8 * 64 * 2)
    fetch(tiles, [0, 0], landed, memory)
    mbarrier.wait(landed, 0)
    i = gl.arange(0, D, gl.BlockedLayout([4], [32], [4], [0]))
    x = power(gl.load(x_ptr + stride + i), count)
    if FLAG:
        x = gl.load(absent_ptr + i)
    gl.store(y_ptr + i, x * scale + 3.0)
'''
VIEW = View((64, 64), (64, 1), (8, 64))


def jitted(name: str, source: str) -> JITFunction:
    """The last kernel of a module that is written for it."""
    path = FOLDER / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [x for x in vars(module).values() if isinstance(x, JITFunction)][-1]


def ptx(kernel: JITFunction, device: str = "cpu", stride: int = 48, offset: int = 0, arch: int = 90) -> str:
    x, y = torch.zeros(256, device=device)[offset:], torch.zeros(256, device=device)
    tiles = Tiles(torch.zeros(64, 64, dtype=torch.float16, device=device), VIEW)
    args = x, y, None, tiles, stride, 1, 0.5
    return compiled(kernel, args, {"D": 128, "FLAG": False, "num_warps": 4}, GPUTarget("cuda", arch, 32)).asm["ptx"]


def main() -> None:
    kernel = jitted("plain", SOURCE)
    plain = ptx(kernel)
    variants = {
        "meta": ptx(kernel, device="meta"),
        "moved": ptx(
            jitted("moved", "# one line\n# another\n" + SOURCE.replace("    i = ", "    # a comment\n    i = "))
        ),
        "docstring": ptx(
            jitted("docstring", SOURCE.replace("y = x scaled.", "Something else.").replace("in a loop", "of floats"))
        ),
        "renamed": ptx(
            jitted("renamed", SOURCE.replace("power", "raised").replace("kernel(", "scaled(").replace("stride", "step"))
        ),
    }
    with knobs.compilation.scope():
        knobs.compilation.disable_line_info = True
        variants["no lines"] = ptx(jitted("no_lines", SOURCE.replace("in a loop", "without lines")))
    others = {
        "constant": ptx(jitted("constant", SOURCE.replace("3.0", "5.0"))),
        "multiple of 16": ptx(kernel, stride=47),
        "one": ptx(kernel, stride=1),
        "aligned": ptx(kernel, offset=1),
        "arch": ptx(kernel, arch=100),
    }
    try:
        active = driver.active
    except RuntimeError:
        active = None
    print(json.dumps({
        "same as plain": {name: normalized(text) == normalized(plain) for name, text in variants.items()},
        "identical": {name: text == plain for name, text in variants.items()},
        "different": {name: normalized(text) != normalized(plain) for name, text in others.items()},
        "normalized": normalized(plain), "targets": [plain.count("sm_90"), others["arch"].count("sm_100")],
        "driver": type(active).__module__, "triton": triton.__version__,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
