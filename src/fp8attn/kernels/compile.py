"""Compiles a recorded launch without a GPU, to the machine code that a launch on a GPU compiles.

    with launch.recording(dry=True) as launches:
        ops.attention(q, pages, backend="hopper")
    for made in launches:
        kernel = compiled(made.kernel, made.args, made.constants)
        print(kernel.metadata.shared, kernel.asm["ptx"])

Triton itself binds and specializes the arguments, in `JITFunction.warmup`. Only its driver, which needs libcuda and a
device, is replaced. So Triton's cache on disk has each compiled kernel under the key that a launch uses.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import torch
from triton import JITFunction
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas_version
from triton.compiler import CompiledKernel
from triton.runtime import driver

from .keys import compute_key
from .launch import Constants, Counters, Launch, Tiles
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
def _active(replacement: _Driver) -> Iterator[None]:
    """Make `replacement` Triton's driver for a while."""
    try:
        before = driver.active
    except RuntimeError:  # without a GPU there is none
        before = None
    driver.set_active(replacement)
    try:
        yield
    finally:
        driver.set_active(before)


def compiling_for(target: GPUTarget) -> AbstractContextManager[None]:
    """Make Triton compile for `target` for a while, in all threads, without a GPU."""
    return _active(_Driver(target))


def compiled(
    kernel: JITFunction, args: Sequence[Any], constants: Mapping[str, Any], target: GPUTarget = HOPPER
) -> CompiledKernel:
    """The kernel that Triton compiles for `kernel[grid](*args, **constants)` on a GPU of `target`.

    Args:
        kernel: a `triton.jit` or `gluon.jit` function.
        args: the run-time arguments as `launch.launch` takes them: tensors, `launch.Tiles`, `launch.Counters`, int,
            float, None. Tensors may be on any device, "meta" too, where an address is an offset. Triton specializes on
            whether an address is a multiple of 16; those of counters are.
        constants: constexpr parameters and options (`num_warps`, ...).
        target: the GPU to compile for.

    Returns:
        The compiled kernel: `.asm["ptx"]`, `.asm["cubin"]`, `.metadata`. Triton's cache on disk holds it, too.

    Raises:
        TypeError: the kernel runs in Triton's interpreter.
    """
    if not isinstance(kernel, JITFunction):
        raise TypeError(f"{kernel!r} cannot be compiled. Unset TRITON_INTERPRET before Triton is imported.")
    with compiling_for(target):
        return loaded(kernel, args, constants)


def loaded(kernel: JITFunction, args: Sequence[Any], constants: Mapping[str, Any]) -> CompiledKernel:
    """`compiled` for the current device. Triton then has the kernel in memory, and the first launch finds it there."""
    compute_key(kernel)
    with direct_operands(constants.operands if isinstance(constants, Constants) else "none"):
        return kernel.warmup(*map(_argument, args), grid=(1,), **constants)


def ptxas_version(target: GPUTarget) -> str:
    """What ptxas says of its version; empty for other vendors. Triton asks once in a process, and a kernel's key has
    the answer.
    """
    return get_ptxas_version(target.arch) if target.backend == "cuda" else ""


def _argument(x: Any) -> Any:
    """An argument of `launch.launch` in the form that Triton takes."""
    if isinstance(x, Tiles):
        return x.descriptor()
    if isinstance(x, Counters):
        return torch.empty(x.count, dtype=torch.int32, device="meta")
    return x


def build_launcher(program: CompiledKernel) -> None:
    """Build the C function that launches `program` with Triton 3.6, whose first launch of every signature calls a C
    compiler.

    It does nothing without a libcuda to link with, or with a later version of Triton, which needs no such function.
    """
    module, launcher = _driver(program.metadata.target)
    if hasattr(module, "make_launcher") and _links(module):
        getattr(module, launcher)(program.src, program.metadata)


_BACKENDS = {"cuda": ("nvidia", "CudaLauncher"), "hip": ("amd", "HIPLauncher")}


def _driver(target: GPUTarget) -> tuple[ModuleType, str]:
    """The module of Triton's driver for `target`, and the name of its class of launchers."""
    name, launcher = _BACKENDS[target.backend]
    return sys.modules[backends[name].driver.__module__], launcher


def _links(module: ModuleType) -> bool:
    """Whether the C functions of a driver's module can be linked here."""
    try:
        return bool(getattr(module, "libcuda_dirs", lambda: True)())
    except (AssertionError, OSError):  # no libcuda; no ldconfig to look for it
        return False


def specialization(made: Launch) -> tuple:
    """A key of a launch: launches with equal keys have the same compiled kernel. It covers at least what Triton
    specializes on.
    """
    kinds = tuple(_kind(x, param.do_not_specialize) for x, param in zip(made.args, made.kernel.params, strict=False))
    return made.kernel.fn.__qualname__, tuple(sorted(made.constants.items(), key=str)), kinds


def _kind(x: Any, plain: bool) -> Any:
    if isinstance(x, Tiles):
        return x.dtype, x.view.block, x.view.swizzled
    if isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr() % 16
    if isinstance(x, int):
        return not plain and (x == 1, x % 16 == 0), x.bit_length() > 31
    return type(x)
