"""Launches Triton kernels at low CPU cost.

`kernel[grid](...)` repeats the same work on every call. It binds the arguments, specializes each on its type and
alignment, makes a key from them and the options, and looks up the compiled kernel. `launch` keeps the compiled kernel
with the `Constants` of the call. A later launch checks that its arguments have the types and alignments that the kernel
was compiled for, and calls the compiled kernel's `run`, as `kernel[grid](...)` does in the end. (`compiled[grid](...)`,
which Triton documents, takes a microsecond more: it collects the arguments by name for hooks, also where there is no
hook.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from threading import local
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.runtime import driver

from .counters import counters
from .keys import compute_key
from .machine import machine
from .operands import Hook, Which, direct_operands, warn_of_copies
from .view import View


class Tiles(NamedTuple):
    """A kernel argument: a tensor that TMA copies to shared memory in blocks. Its first element is at a multiple of 16
    bytes.
    """

    x: torch.Tensor
    view: View

    def descriptor(self) -> Any:
        """The argument in the form that Triton takes."""
        return _descriptor()(self.x.data_ptr() + self.view.offset, self.dtype, self.view)

    @property
    def dtype(self) -> torch.dtype:
        return self.view.dtype or self.x.dtype


@cache
def _descriptor() -> Callable[[int, torch.dtype, View], Any]:
    from .gluon import descriptor  # a Triton for other vendors may lack it; an import in every launch costs 1 us

    return descriptor


class Counters(NamedTuple):
    """A kernel argument: `count` int32 zeros that no other launch uses at the same time, and that the launch leaves
    zero.
    """

    count: int


def arguments(args: Sequence, zeros: Callable[[int], torch.Tensor]) -> list:
    """`args` in the form that Triton takes. `zeros` makes counters."""
    return [x.descriptor() if isinstance(x, Tiles) else zeros(x.count) if isinstance(x, Counters) else x for x in args]


class Constants(dict):
    """The constexpr parameters and the options (`num_warps`, ...) of launches of one kernel on one device.

    The compiled kernels are kept here, so `Constants` must be kept, too. `make_constants` makes them, or a kept object
    contains them. `operands` says which products of the kernel read their left operands without copies (`operands.py`).
    """

    def __init__(self, device: torch.device, operands: Which = "none", **constants: Any) -> None:
        super().__init__({"enable_fp_fusion": True} | constants)  # since Triton 3.10 it is not the default
        self.device = device
        self.operands = operands
        self.compiled: list[Compiled] = []  # for arguments of several types, up to `VARIANTS`


class ConstexprFields(dict):
    """The base class of the dataclasses that kernels take as constexpr parameters: an empty dict with attributes.

    Triton calls `knobs.runtime.jit_post_compile_hook` for each new kernel, and first writes the kernel's constexpr
    parameters as JSON. JSON has dicts, but no dataclasses. vLLM sets this hook.

    Device code passes a field that is no number to a function by way of a name, `CODEC: tl.constexpr = OPTIONS.codec`:
    Triton 3.6 takes no other objects.
    """

    def __bool__(self) -> bool:
        return True


@lru_cache(maxsize=4096)
def make_constants(kernel: str, device: torch.device, **values: Any) -> Constants:
    """The same `Constants` for the same values. `kernel` is a name, which separates kernels whose values are equal.

    Plans of several batch sizes share them, so a new batch size compiles nothing.
    """
    return Constants(device, **values)


VARIANTS = 8
MAX_GRID = 65535  # of the second and third dimension


class Compiled(NamedTuple):
    """A compiled kernel, and the arguments it was compiled for by their positions."""

    kernel: triton.JITFunction
    program: Any  # Triton's `CompiledKernel`
    pointers: tuple[tuple[int, torch.dtype], ...]  # tensors whose addresses are multiples of 16
    absent: tuple[int, ...]  # None
    numbers: tuple[int, ...]  # int32
    specialized: tuple[tuple[int, bool], ...]  # int32 but 1: whether a multiple of 16, a specialization
    floats: tuple[int, ...]
    counters: tuple[int, ...]
    tiles: tuple[tuple[int, torch.dtype, tuple[int, ...], bool], ...]  # blocks, whether swizzled
    constants: tuple[Any, ...]  # the constexpr parameters, which Triton takes again and ignores

    def values(self, args: Sequence) -> list | None:
        """`args` in the form that `program` takes, with addresses instead of tensors; None if the kernel was compiled
        for other types.
        """
        values = [*args, *self.constants]
        bits = 0
        for i, dtype in self.pointers:
            x = values[i]
            if x is None or x.dtype is not dtype:
                return None
            values[i] = address = x.data_ptr()
            bits |= address
        if bits & 15:
            return None
        for i in self.absent:
            if values[i] is not None:
                return None
        for i in self.numbers:
            x = values[i]
            if type(x) is not int or not -(2**31) <= x < 2**31:
                return None
        for i, aligned in self.specialized:
            x = values[i]
            if type(x) is not int or (x & 15 == 0) is not aligned or x == 1 or not 0 <= x < 2**31:
                return None
        for i in self.floats:
            if type(values[i]) is not float:
                return None
        for i, dtype, block, swizzled in self.tiles:
            if values[i] is None:
                return None
            x, view = values[i]
            if (view.dtype or x.dtype) is not dtype or view.block != block or view.swizzled is not swizzled:
                return None
            values[i] = _descriptor()(x.data_ptr() + view.offset, dtype, view)
        return values


class Launch(NamedTuple):
    """A launch that was recorded; `compiled` is Triton's `CompiledKernel`, None in a dry run."""

    kernel: triton.JITFunction
    grid: tuple[int, ...]
    args: tuple
    constants: Constants
    compiled: Any


class _Recording(local):
    launches: list[Launch] | None = None  # of this thread
    dry = False


_recording = _Recording()


@contextmanager
def recording(dry: bool = False) -> Iterator[list[Launch]]:
    """Record the launches of this thread. `dry`: record them without running them. A recording around this one does not
    get them.
    """
    around = _recording.launches, _recording.dry
    launches: list[Launch] = []
    _recording.launches, _recording.dry = launches, dry
    try:
        yield launches
    finally:
        _recording.launches, _recording.dry = around


def launch(kernel: Any, grid: tuple[int, ...], args: Sequence, constants: Constants) -> None:
    """`kernel[grid](*args, **constants)` on the current stream of `constants.device`.

    Args:
        kernel: a `triton.jit` or `gluon.jit` function whose constexpr parameters come last.
        grid: up to three numbers of programs.
        args: all run-time arguments, on that device.
        constants: the constexpr parameters and options.
    Raises:
        ValueError: a second or third number of programs is more than CUDA launches.
    """
    if len(grid) > 1 and max(grid[1:]) > MAX_GRID:
        raise ValueError(
            f"{kernel.__name__} takes a grid of {grid}, and CUDA only {MAX_GRID} in the second and third dimension: "
            f"split the call"
        )
    if _recording.dry:
        _recording.launches.append(Launch(kernel, grid, tuple(args), constants, None))
        return
    device = constants.device
    stream = None
    if device.index is not None:  # else the kernel is interpreted
        active = driver.active
        if active.get_current_device() != device.index:
            with torch.accelerator.device_index(device.index):
                return launch(kernel, grid, args, constants)
        stream = active.get_current_stream(device.index)
    for compiled in constants.compiled:
        if compiled.kernel is kernel and _as_before(kernel) and (values := compiled.values(args)) is not None:
            program = compiled.program
            for i in compiled.counters:
                values[i] = counters(device, stream, values[i].count)
            enter, leave = _hooks()
            noted = enter and program.launch_metadata(grid, stream, *values)
            program.run(
                *(*grid, 1, 1)[:3], stream, program.function, program.packed_metadata, noted, enter, leave, *values
            )
            break
    else:
        values = arguments(args, lambda count: counters(device, stream, count))
        compute_key(kernel)
        with direct_operands(constants.operands):
            program = kernel[grid](*values, **constants)
        warn_of_copies(program)
        if isinstance(kernel, triton.JITFunction) and len(constants.compiled) < VARIANTS and _as_before(kernel):
            compiled = _learn(kernel, program, args, constants)
            if compiled is not None:
                constants.compiled.append(compiled)
    if _recording.launches is not None:
        _recording.launches.append(Launch(kernel, grid, tuple(args), constants, program))


def _hooks() -> tuple[Any, Any]:
    """What a profiler has registered to be called before and after every launch; None without a profiler."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return (enter, leave) if getattr(enter, "calls", enter) or getattr(leave, "calls", leave) else (None, None)


def _as_before(kernel: triton.JITFunction) -> bool:
    """Whether a launch may use a kernel that was compiled before: there is no hook on launches, and no setting that
    changes the code.
    """
    runtime, stages = knobs.runtime, knobs.runtime.add_stages_inspection_hook
    if isinstance(stages, Hook):
        stages = stages.before  # ours changes only the kernel that its thread compiles
    return not (kernel.pre_run_hooks or runtime.debug or knobs.compilation.instrumentation_mode or stages)


def _learn(kernel: triton.JITFunction, program: Any, args: Sequence, constants: Constants) -> Compiled | None:
    """The types and alignments that `kernel`, just launched with `args`, was compiled for; None if `Compiled` cannot
    describe them.
    """
    pointers, absent, numbers, specialized = [], [], [], []
    floats, zeros, tiles = [], [], []
    for i, (x, param) in enumerate(zip(args, kernel.params, strict=False)):
        if isinstance(x, Tiles):
            tiles.append((i, x.dtype, x.view.block, x.view.swizzled))
        elif isinstance(x, Counters):
            zeros.append(i)
        elif isinstance(x, torch.Tensor) and x.data_ptr() % 16 == 0:
            pointers.append((i, x.dtype))
        elif x is None:
            absent.append(i)
        elif type(x) is float:
            floats.append(i)
        elif type(x) is int and param.do_not_specialize and -(2**31) <= x < 2**31:
            numbers.append(i)
        elif type(x) is int and not param.do_not_specialize and 0 <= x < 2**31 and x != 1:
            specialized.append((i, x % 16 == 0))
        else:
            return None
    rest = tuple(constants[param.name] for param in kernel.params[len(args) :])
    return Compiled(kernel, program, *map(tuple, (pointers, absent, numbers, specialized, floats, zeros, tiles)), rest)


@lru_cache
def num_sms(device: torch.device) -> int:
    """Number of multiprocessors of a CUDA device."""
    return machine(device).num_sms
