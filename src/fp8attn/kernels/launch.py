"""Launches Triton kernels at low CPU cost.

`kernel[grid](...)` repeats the same work on every call. It binds the arguments, specializes each on its type and
alignment, makes a key from them and the options, and looks up the compiled kernel. `launch` keeps the compiled kernel
with the `Constants` of the call. A later launch checks that its arguments have the types and alignments that the kernel
was compiled for, and passes them to CUDA's driver (`cuda.py`). While a profiler observes launches, and on GPUs of other
vendors, every launch is Triton's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from threading import local
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.runtime import driver

from .counters import counters
from .cuda import Function, MapForm, tensor_map
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
        from .gluon import descriptor  # a Triton for other vendors may lack it

        return descriptor(self.x.data_ptr() + self.view.offset, self.dtype, self.view)

    @property
    def dtype(self) -> torch.dtype:
        return self.view.dtype or self.x.dtype


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
    function: Function
    pointers: tuple[tuple[int, torch.dtype], ...]  # tensors whose addresses are multiples of 16
    absent: tuple[int, ...]  # None
    specialized: tuple[tuple[int, bool], ...]  # int32 but 1: whether a multiple of 16, a specialization
    floats: tuple[int, ...]
    counters: tuple[int, ...]
    tiles: tuple[tuple[int, torch.dtype, tuple[int, ...], bool, MapForm], ...]  # blocks, whether swizzled

    def launch(self, grid: tuple[int, ...], device: torch.device, stream: int, args: Sequence) -> bool:
        """Launch it with `args`, or return False if it was compiled for other types, or `function` refuses. All types
        are checked here but those of plain numbers, which must be int32 for `function`.
        """
        values = list(args)
        bits = 0
        for i, dtype in self.pointers:
            x = values[i]
            if x is None or x.dtype is not dtype:
                return False
            values[i] = address = x.data_ptr()
            bits |= address
        if bits & 15:
            return False
        for i, aligned in self.specialized:
            x = values[i]
            if type(x) is not int or (x & 15 == 0) is not aligned or x == 1 or x < 0:
                return False
        for i in self.floats:
            if type(values[i]) is not float:
                return False
        for i, dtype, block, swizzled, form in self.tiles:
            if values[i] is None:
                return False
            x, view = values[i]
            if (view.dtype or x.dtype) is not dtype or view.block != block or view.swizzled is not swizzled:
                return False
            values[i] = tensor_map(x.data_ptr() + view.offset, view, form)
        for i in self.counters:
            values[i] = counters(device, stream, values[i].count).data_ptr()
        for i in self.absent:
            if values[i] is not None:
                return False
            del values[i]
        if 0 in grid:  # CUDA would raise an error
            return True
        return self.function.launch((*grid, 1, 1)[:3], stream, values)


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
        if torch.accelerator.current_device_index() != device.index:
            with torch.accelerator.device_index(device.index):
                return launch(kernel, grid, args, constants)
        stream = driver.active.get_current_stream(device.index)
    for compiled in constants.compiled:
        if compiled.kernel is kernel and _as_before(kernel) and compiled.launch(grid, device, stream, args):
            program = compiled.program
            break
    else:
        values = arguments(args, lambda count: counters(device, stream, count))
        compute_key(kernel)
        with direct_operands(constants.operands):
            program = kernel[grid](*values, **constants)
        warn_of_copies(program)
        known = any(compiled.program is program for compiled in constants.compiled)  # the driver refused to launch it
        may_learn = not known and len(constants.compiled) < VARIANTS
        if isinstance(kernel, triton.JITFunction) and may_learn and _as_before(kernel):
            compiled = _learn(kernel, program, args)
            if compiled is not None:
                constants.compiled.append(compiled)
    if _recording.launches is not None:
        _recording.launches.append(Launch(kernel, grid, tuple(args), constants, program))


def _as_before(kernel: triton.JITFunction) -> bool:
    """Whether a launch may use a kernel that was compiled before: there is no hook on launches, and no setting that
    changes the code.
    """
    runtime, stages = knobs.runtime, knobs.runtime.add_stages_inspection_hook
    if isinstance(stages, Hook):
        stages = stages.before  # ours changes only the kernel that its thread compiles
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook  # of a profiler
    observed = getattr(enter, "calls", enter) or getattr(leave, "calls", leave) or kernel.pre_run_hooks
    return not (observed or runtime.debug or knobs.compilation.instrumentation_mode or stages)


def _learn(kernel: triton.JITFunction, program: Any, args: Sequence) -> Compiled | None:
    """The types and alignments that `kernel`, just launched with `args`, was compiled for; None if `Compiled` cannot
    describe them, or CUDA's driver cannot launch it.
    """
    pointers, absent, specialized, floats, zeros, tiles = [], [], [], [], [], []
    fields: list[str | MapForm] = []
    maps = iter(getattr(program.metadata, "tensordesc_meta", None) or ())
    for i, (x, param) in enumerate(zip(args, kernel.params, strict=False)):
        field: str | MapForm = "Q"
        if isinstance(x, Tiles):
            if (meta := next(maps, None)) is None or (form := MapForm.of(meta)) is None:
                return None
            field = form
            tiles.append((i, x.dtype, x.view.block, x.view.swizzled, form))
        elif isinstance(x, Counters):
            zeros.append(i)
        elif isinstance(x, torch.Tensor) and x.data_ptr() % 16 == 0:
            pointers.append((i, x.dtype))
        elif x is None:
            absent.insert(0, i)  # removed from the last one on
            continue
        elif type(x) is float:
            floats.append(i)
            field = "f"
        elif type(x) is int and -(2**31) <= x < 2**31 and (param.do_not_specialize or (x >= 0 and x != 1)):
            field = "i"
            if not param.do_not_specialize:
                specialized.append((i, x % 16 == 0))
        else:
            return None
        fields.append(field)
    function = Function.of(program, fields)
    if function is None:
        return None
    return Compiled(kernel, program, function, *map(tuple, (pointers, absent, specialized, floats, zeros, tiles)))


@lru_cache
def num_sms(device: torch.device) -> int:
    """Number of multiprocessors of a CUDA device."""
    return machine(device).num_sms
