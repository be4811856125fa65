"""Compiles a recorded launch without a GPU, to the machine code that a launch on a GPU compiles.

    with launch.recording(dry=True) as launches:
        ops.attention(q, pages, backend="hopper")
    for launch in launches:
        kernel = compiled(launch.kernel, launch.args, launch.constants)
        print(kernel.metadata.shared, kernel.asm["ptx"])

Triton itself binds and specializes the arguments, in `JITFunction.warmup`. Only its driver, which needs libcuda and a
device, is replaced. So Triton's cache on disk has each compiled kernel under the key that a launch uses.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from triton import JITFunction
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver

from .keys import compute_key
from .launch import Constants, Launch, Tiles, arguments
from .operands import direct_operands

HOPPER = GPUTarget("cuda", 90, 32)


class _Driver:
    """The part of a Triton driver that compilation uses."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> GPUTarget:
        return self.target  # Triton keeps compiled kernels by device: one target's must not be taken for another's

    def get_current_stream(self, device: GPUTarget) -> int:
        return 0


@contextmanager
def compiling_for(target: GPUTarget) -> Iterator[None]:
    """Make Triton compile for `target` for a while, in all threads, without a GPU."""
    try:
        before = driver.active
    except RuntimeError:  # without a GPU there is none
        before = None
    driver.set_active(_Driver(target))
    try:
        yield
    finally:
        driver.set_active(before)


def compiled(
    kernel: JITFunction, args: Sequence[Any], constants: Mapping[str, Any], target: GPUTarget | None = HOPPER
) -> CompiledKernel:
    """The kernel that Triton compiles for `kernel[grid](*args, **constants)` on a GPU of `target`.

    Args:
        kernel: a `triton.jit` or `gluon.jit` function.
        args: the run-time arguments as `launch.launch` takes them: tensors, `launch.Tiles`, `launch.Counters`, int,
            float, None. Tensors may be on any device, "meta" too, where an address is an offset. Triton specializes on
            whether an address is a multiple of 16; those of counters are.
        constants: constexpr parameters and options (`num_warps`, ...).
        target: the GPU to compile for. None: the current device. Triton then has the kernel in memory, and the first
            launch finds it there.

    Returns:
        The compiled kernel: `.asm["ptx"]`, `.asm["cubin"]`, `.metadata`. Triton's cache on disk holds it, too.

    Raises:
        TypeError: the kernel runs in Triton's interpreter.
    """
    if not isinstance(kernel, JITFunction):
        raise TypeError(f"{kernel!r} cannot be compiled. Unset TRITON_INTERPRET before Triton is imported.")
    compute_key(kernel)
    operands = constants.operands if isinstance(constants, Constants) else "none"
    values = arguments(args, lambda count: torch.empty(count, dtype=torch.int32, device="meta"))
    with nullcontext() if target is None else compiling_for(target), direct_operands(operands):
        return kernel.warmup(*values, grid=(1,), **constants)


def build_launcher(program: CompiledKernel) -> None:
    """Build the C function that launches `program` with Triton 3.6, whose first launch of every signature calls a C
    compiler.

    It does nothing without a libcuda to link with, or with a later version of Triton, which needs no such function.
    """
    is_amd = program.metadata.target.backend == "hip"
    driver = sys.modules[backends["amd" if is_amd else "nvidia"].driver.__module__]
    if hasattr(driver, "make_launcher"):
        try:
            getattr(driver, "libcuda_dirs", list)()
        except (AssertionError, OSError):  # no libcuda; no ldconfig to look for it
            return
        (driver.HIPLauncher if is_amd else driver.CudaLauncher)(program.src, program.metadata)


def specialization(launch: Launch) -> tuple:
    """A key of a launch: launches with equal keys have the same compiled kernel. It covers at least what Triton
    specializes on.
    """
    kernel, _, args, constants, _ = launch
    kinds = tuple(_kind(x, param.do_not_specialize) for x, param in zip(args, kernel.params, strict=False))
    return kernel.fn.__qualname__, frozenset(constants.items()), kinds


def _kind(x: Any, plain: bool) -> Any:
    if isinstance(x, Tiles):
        return x.dtype, x.view.block, x.view.swizzled
    if isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr() % 16
    if isinstance(x, int):
        return not plain and (x == 1, x % 16 == 0), x.bit_length() > 31
    return type(x)
