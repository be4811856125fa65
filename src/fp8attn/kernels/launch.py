"""Launching a Triton kernel in a few microseconds of the CPU's time.

`kernel[grid](...)` finds out anew on every call what it found out before: it binds the arguments, specialises each on its type and
alignment, makes a key of them and of the options, looks the compiled kernel up, and encodes a tensor map for every descriptor. `launch`
does so once per `Constants`. From then on it checks that the arguments are such as the kernel was compiled for, and hands them to Triton's
launcher in C.

This is the one place that knows that launcher, which is Triton's own affair: what it takes is written down here for the versions in
`_LAUNCHERS`, and every other Triton launches the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from inspect import getclosurevars, isfunction
from threading import get_ident
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from triton import knobs
from triton.runtime import driver

T = TypeVar("T")


@dataclass(frozen=True, eq=False)  # tensor maps are kept by whose view they are, which takes less than by what it says
class View:
    """How TMA sees a tensor; to be kept, for calls to come.

    Attributes:
        shape, strides: in elements.
        block: what one copy brings.
        swizzled: it lies in shared memory in the default layout; or else as it comes, one row behind the other.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    swizzled: bool = True


class Tiles(NamedTuple):
    """A kernel argument: blocks of a tensor, whose first element lies at a multiple of 16 bytes, that TMA copies to shared memory."""

    x: torch.Tensor
    view: View

    def descriptor(self) -> Any:
        """As Triton takes it."""
        from .gluon import describe

        view = self.view
        return describe(self.x, view.shape, view.strides, view.block, view.swizzled)


class PerStream(NamedTuple):
    """A kernel argument that belongs to the stream, or to the graph that is captured on it: `make(device)` at every launch."""

    make: Callable[[torch.device], torch.Tensor]
    device: torch.device


class Constants(dict):
    """The constexpr parameters and the options (`num_warps`, ...) of launches of one kernel on one device.

    What was compiled for them stays with them, so they must be kept: made by `constants`, or part of what is.
    """

    def __init__(self, device: torch.device, **constants: Any) -> None:
        super().__init__(constants)
        self.device = device
        self.compiled: list[Compiled] = []  # for arguments of several types and alignments, up to `VARIANTS`


@lru_cache(maxsize=4096)
def constants(kernel: str, device: torch.device, **values: Any) -> Constants:
    """The same `Constants` for the same values; `kernel` tells apart kernels that have equal ones.

    Plans are kept too, and share them: the plan of another batch size that had its own would learn the same kernel anew.
    """
    return Constants(device, **values)


VARIANTS = 8


class Compiled(NamedTuple):
    """A compiled kernel, and the arguments it was compiled for by their positions."""

    kernel: triton.JITFunction
    done: Any  # Triton's `CompiledKernel`, which holds what `call` calls
    call: Callable[..., None]  # (x, y, z, stream, values)
    asked: tuple[int, ...]  # `PerStream`; the tensors are among the next
    pointers: tuple[tuple[int, torch.dtype], ...]  # tensors whose addresses are multiples of 16
    absent: tuple[int, ...]  # None
    numbers: tuple[tuple[int, bool], ...]  # int32 that Triton specialises on: whether they are multiples of 16 (and none is 1)
    # Descriptors from the last to the first: their blocks, whether swizzled, what encodes them.
    tiles: tuple[tuple[int, torch.dtype, tuple[int, ...], bool, Callable], ...]
    constants: tuple[None, ...]  # stand where the constexpr parameters do, which are compiled in

    def values(self, args: Sequence) -> list | None:
        """What the launcher takes for `args`; None if the kernel was compiled for others."""
        values = list(args)
        for i in self.asked:
            make, device = values[i]
            values[i] = make(device)
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
        for i, aligned in self.numbers:
            x = values[i]
            if (x & 15 == 0) is not aligned or x == 1 or x >= 2**31:
                return None
        for i, dtype, block, swizzled, encode in self.tiles:
            if values[i] is None:
                return None
            x, view = values[i]
            if x.dtype is not dtype or view.block != block or view.swizzled is not swizzled:
                return None
            values[i : i + 1] = encode(x.data_ptr(), view)
        values += self.constants
        return values


def launch(kernel: Any, grid: tuple[int, ...], args: Sequence, given: Constants) -> None:
    """`kernel[grid](*args, **given)` on the current stream of `given.device`.

    Args:
        kernel: a `triton.jit` or `gluon.jit` function whose constexpr parameters come last.
        grid: up to three numbers of programs.
        args: the run-time arguments, all of them, on that device.
        given: the others.
    """
    device = given.device
    if _recordings and (recording := _recordings.get(get_ident())) is not None:
        recording.launches.append((kernel, grid, args, given))
    if given.compiled and is_direct(device):
        for compiled in given.compiled:
            if compiled.kernel is kernel and (values := compiled.values(args)) is not None:
                x, y, z = (*grid, 1, 1)[:3]
                compiled.call(x, y, z, current_stream(device), values)
                return
    asked = [x.make(x.device) if isinstance(x, PerStream) else x for x in args]
    described = [x.descriptor() if isinstance(x, Tiles) else x for x in asked]
    with torch.accelerator.device_index(device.index):
        done = kernel[grid](*described, **given)
    if isinstance(kernel, triton.JITFunction) and len(given.compiled) < VARIANTS and is_direct(device):
        compiled = _learn(kernel, done, args, asked)
        if compiled is not None:
            given.compiled.append(compiled)


def is_direct(device: torch.device) -> bool:
    """Whether Triton's part in a launch on `device` can be left out now: no profiler's hook to call, no device to change."""
    hook = knobs.runtime.launch_enter_hook
    return not getattr(hook, "calls", hook) and driver.active.get_current_device() == device.index


@lru_cache
def overlaps(device: torch.device) -> bool:
    """Whether a launch with `launch_pdl=True` may begin while the one before it ends, and wait for it by `gdc_wait` (from Hopper on)."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def current_stream(device: torch.device) -> int:
    """The handle of the stream on which `launch` launches."""
    return driver.active.get_current_stream(device.index)


class Recording:
    """What a thread launched: `launches` as given to `launch`, and the tensors that were `own` to them."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, tuple[int, ...], Sequence, Constants]] = []
        self.owned: list[torch.Tensor] = []


_recordings: dict[int, Recording] = {}  # by thread


@contextmanager
def recording() -> Iterator[Recording]:
    """Note the launches of this thread, which are made as ever."""
    thread = get_ident()
    _recordings[thread] = Recording()
    try:
        yield _recordings[thread]
    finally:
        del _recordings[thread]


def own(x: torch.Tensor) -> torch.Tensor:
    """`x`, of `torch.empty` and its kin, which nothing but the launches of the running call writes: a recording must know (`replay`)."""
    if _recordings and (recording := _recordings.get(get_ident())) is not None:
        recording.owned.append(x)
    return x


def kept(make: Callable[[torch.device], T], device: torch.device) -> T:
    """What `make(device)` allocates and fills on the GPU, ready for every stream; not while a stream is capturing.

    In a thread of its own: this one may be warming up for a CUDA graph (`torch.compile(mode="reduce-overhead")`), whose pool its memory
    would come from, and which tolerates nothing that lives on.
    """

    def work() -> T:
        with torch.cuda.device(device):
            made = make(device)
            torch.cuda.synchronize()
            return made

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def _learn(kernel: triton.JITFunction, done: Any, args: Sequence, asked: Sequence) -> Compiled | None:
    """What `kernel`, just launched with `args`, was compiled for; None where that is more than `Compiled` says.

    `asked` are `args` with what every `PerStream` gave.
    """
    launcher = _LAUNCHERS.get(triton.__version__.rpartition(".")[0])
    params, run = kernel.params, done.run
    if launcher is None or type(run).__module__ != "triton.backends.nvidia.driver":
        return None
    special = run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False)
    if special or not all(param.is_constexpr for param in params[len(args) :]):
        return None
    metas = iter(done.metadata.tensordesc_meta or ())
    pointers, absent, numbers, tiles = [], [], [], []
    for i, x in enumerate(asked):
        if isinstance(x, Tiles):
            tiles.append((i, x.x.dtype, x.view.block, x.view.swizzled, _encoder(next(metas))))
        elif isinstance(x, torch.Tensor):
            if x.data_ptr() % 16:
                return None
            pointers.append((i, x.dtype))
        elif x is None:
            absent.append(i)
        elif isinstance(x, int) and not params[i].do_not_specialize:
            if x == 1 or not 0 <= x < 2**31:
                return None
            numbers.append((i, x % 16 == 0))
    rest = (None,) * (len(params) - len(args))
    streams = tuple(i for i, x in enumerate(args) if isinstance(x, PerStream))
    return Compiled(kernel, done, launcher(done), streams, tuple(pointers), tuple(absent), tuple(numbers), tuple(reversed(tiles)), rest)


def _encoder(meta: dict[str, Any]) -> Callable[[int, View], list]:
    """What makes a tensor map, and the numbers that follow it, of an address and a view: the same ones again and again."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    unused = (None,) * (make_tensordesc_arg.__code__.co_argcount - 2)  # newer versions have one

    @lru_cache(maxsize=1024)
    def encode(address: int, view: View) -> list:
        # No tensor is kept: it would keep its memory.
        base = SimpleNamespace(data_ptr=lambda: address)
        descriptor = SimpleNamespace(base=base, shape=list(view.shape), strides=list(view.strides), padding="zero", round_f32_to_tf32=False)
        return make_tensordesc_arg(descriptor, meta, *unused)

    return encode


def _launcher_3_6(done: Any) -> Callable[..., None]:
    run, function = done.run, done.function
    c = getclosurevars(run.launch).nonlocals["launcher"] if isfunction(run.launch) else run.launch  # the function expands descriptors
    rest = run.launch_cooperative_grid, run.launch_pdl, None, None, done.packed_metadata, None, None, None

    def call(x: int, y: int, z: int, stream: int, values: list) -> None:
        c(x, y, z, stream, function, *rest, *values)

    return call


def _launcher_3_9(done: Any) -> Callable[..., None]:
    run, function, c = done.run, done.function, driver.active.utils.launch
    rest = (
        run.launch_cooperative_grid, run.launch_pdl, done.packed_metadata, None, None, None, None, None, run.arg_annotations,
        run.kernel_signature,
    )  # fmt: skip

    def call(x: int, y: int, z: int, stream: int, values: list) -> None:
        c(x, y, z, stream, function, *rest, values)

    return call


# By Triton's version: the launcher of a compiled kernel.
_LAUNCHERS = {"3.6": _launcher_3_6, "3.9": _launcher_3_9}
