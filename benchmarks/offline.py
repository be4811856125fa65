"""Compiles a recorded launch without a GPU, to the machine code that a launch on a GPU compiles.

    with launch.recording(dry=True) as launches:
        ops.attention(q, pages, backend="hopper")
    for made in launches:
        kernel = compiled(made.kernel, made.args, made.given)
        print(kernel.metadata.shared, normalized(kernel.asm["ptx"]))

Triton itself binds and specializes the arguments, by `JITFunction.warmup`. Only its driver is replaced, which needs libcuda and a device.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver

from fp8attn.kernels import launch

HOPPER = GPUTarget("cuda", 90, 32)


class _Driver:
    """The part of a Triton driver that compiling uses."""

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


def compiled(kernel: JITFunction, args: Sequence[Any], given: Mapping[str, Any], target: GPUTarget = HOPPER) -> CompiledKernel:
    """What Triton compiles for `kernel[grid](*args, **given)` on a GPU of `target`.

    Args:
        kernel: a `triton.jit` or `gluon.jit` function.
        args: the run-time arguments as `launch.launch` takes them: tensors, `launch.Tiles`, `launch.Counters`, int, float, None. Tensors
            may be on any device, "meta" too, where an address is an offset. Triton specializes on whether an address is a multiple of
            16; those of counters are.
        given: constexpr parameters and options (`num_warps`, ...).
        target: the GPU to compile for.

    Returns:
        The compiled kernel: `.asm["ptx"]`, `.asm["cubin"]`, `.metadata`. Triton's cache on disk holds it, too.

    Raises:
        TypeError: the kernel runs in Triton's interpreter.
    """
    if not isinstance(kernel, JITFunction):
        raise TypeError(f"{kernel!r} cannot be compiled. Unset TRITON_INTERPRET before Triton is imported.")
    with _active(_Driver(target)):
        return kernel.warmup(*map(_argument, args), grid=(1,), **given)


def _argument(x: Any) -> Any:
    """What Triton takes for an argument of `launch.launch`."""
    if isinstance(x, launch.Tiles):
        return x.descriptor()
    if isinstance(x, launch.Counters):
        return torch.empty(x.count, dtype=torch.int32, device="meta")
    return x


def normalized(ptx: str) -> str:
    """PTX without its locations, names and versions: if this text of two kernels is equal, their machine code is, too.

    It leaves out source locations (`.loc`, `.file`, debug sections, labels that only these use), comments, white space and the version of
    the PTX language. It renames functions and their parameters (`function0`), and labels (`label0`), in the order in which they appear. All
    the rest stays: the target, instructions, registers, sizes of arrays, limits of threads and registers.
    """
    text = re.sub(r"//[^\n]*", "", ptx)
    text = re.sub(r"^\s*\.section\s+\.debug\w*\s*\{[^}]*\}", "", text, flags=re.MULTILINE)
    text = re.sub(r"^\s*\.(?:version|loc|file)\b.*$", "", text, flags=re.MULTILINE)
    for number, name in enumerate(dict.fromkeys(re.findall(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)", text))):
        text = re.sub(rf"(?<![\w$]){re.escape(name)}(?=_param_|_retval|(?![\w$]))", f"function{number}", text)
    used = set(re.findall(r"\$L__\w+(?!\w|:)", text))
    lines = (" ".join(line.split()) for line in text.splitlines())
    lines = (line for line in lines if line and (not re.fullmatch(r"\$L__\w+:", line) or line[:-1] in used))
    numbers = itertools.count()
    labels: dict[str, str] = defaultdict(lambda: f"label{next(numbers)}")
    return re.sub(r"\$L__\w+", lambda label: labels[label[0]], "\n".join(lines)) + "\n"
