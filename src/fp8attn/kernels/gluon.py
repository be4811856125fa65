"""All names of Gluon that the package uses. Gluon's API changes between Triton versions.

Gluon is part of Triton. In Gluon, a kernel assigns work to warps and layouts to memory and registers; in plain Triton
the compiler does. This file is for Triton 3.6 (PyTorch 2.11), 3.8 (PyTorch 2.14) and 3.9 (PyTorch 2.15), and hides
their differences.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import get_type_hints

import torch
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
)
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as _wait_for_products
from triton.experimental.gluon.language.nvidia.hopper.tma import tensor_descriptor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate, base_value
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import ConstexprFunction

from ..formats.codec import FP8
from .common import RELEASE
from .view import View

__all__ = [
    "ARRIVE_MEETS",
    "TensorDescriptor",
    "advance",
    "aggregate",
    "arrive",
    "arrive_with_words",
    "descriptor",
    "fence_async_shared",
    "fetch",
    "fetch_words",
    "gdc_launch_dependents",
    "gdc_wait",
    "gl",
    "gluon",
    "mbarrier",
    "mma_v2",
    "reinterpret",
    "send",
    "send_wait",
    "sync",
    "tensor_descriptor",
    "warpgroup_mma",
    "warpgroup_mma_init",
    "warpgroup_mma_wait",
]

# Whether `arrive` has a barrier before it, which `sync()` would only repeat.
ARRIVE_MEETS = gl.constexpr(RELEASE >= (3, 8))
_PUBLIC_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))

# fetch(descriptor, at, barrier, memory): start a TMA copy of the block at coordinates `at`; `barrier` counts its bytes.
fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
# send(descriptor, at, memory): start a TMA copy the other way; some of the partition's threads do.
send = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
# send_wait(n): if this thread sends, wait until all copies except the last n have read their memory.
send_wait = tma.store_wait
# fetch_words(memory, pointers): start to copy a tensor of 32-bit words to shared memory.
fetch_words = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
# arrive_with_words(barrier): its phase does not end before the words that were fetched so far are in memory.
arrive_with_words = async_copy.mbarrier_arrive
# sync(): wait for the other threads of this partition; then their writes to shared memory are visible.
sync = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


def aggregate(cls: type) -> type:
    """A class of values that kernels pass as one. Its constructor takes its annotated fields, by position or by name.

    Triton 3.9 makes such a constructor. Triton 3.6 does not, and does not accept annotations that are strings.
    """
    cls.__annotations__ = get_type_hints(cls)
    fields = tuple(cls.__annotations__)

    def __init__(self, *args, **named):
        values = dict(zip(fields, args, strict=False)) | named
        if len(values) < len(args) + len(named) or values.keys() != set(fields):
            raise TypeError(f"{type(self).__name__} has the fields {', '.join(fields)}: pass each of them once")
        for name, value in values.items():
            setattr(self, name, value if isinstance(value, base_value) else gl.constexpr(value))

    if "__init__" not in vars(cls):
        cls.__init__ = _Constructor(__init__, fields)
    return _aggregate(cls)


class _Constructor(ConstexprFunction):
    """A constructor whose key in Triton's cache covers the names of the fields. Its source, which all aggregates share,
    does not.
    """

    def __init__(self, function: Callable, fields: tuple[str, ...]) -> None:
        super().__init__(function)
        self.fields = fields
        self.used_global_vals = {}

    @property
    def cache_key(self) -> str:
        return hashlib.sha256(f"{self.src} {self.fields}".encode()).hexdigest()


_TYPES = {
    torch.float32: gl.float32, torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, FP8: gl.float8e4nv,
    torch.int8: gl.int8,
}  # fmt: skip


class Memory:
    """The attributes of a tensor that a TensorDescriptor reads."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address


def descriptor(address: int, dtype: torch.dtype, view: View) -> TensorDescriptor:
    """The descriptor of memory at `address`."""
    layout = gl.NVMMASharedLayout.get_default_for(list(view.block), _TYPES[dtype])
    if not view.swizzled:
        layout = gl.NVMMASharedLayout(0, layout.element_bitwidth, rank=len(view.block))
    return TensorDescriptor(Memory(address, dtype), list(view.shape), list(view.strides), list(view.block), layout)


@builtin
def warpgroup_mma_wait(num_outstanding=0, deps=None, _semantic=None):
    """Wait until no more than `num_outstanding` groups of products run, and return `deps`. Each warpgroup waits for
    itself.

    Triton 3.9 adds a barrier of the whole partition to it, so that other warps may write what the products read. Here
    nobody else writes what a warpgroup's products read, except the producer, which waits for the stage's release. Gluon
    has no argument for that yet.
    """
    values = _wait_for_products(num_outstanding, deps, _semantic=_semantic)
    if RELEASE >= (3, 9):
        first = values if len(deps) == 1 else values[0]
        first.handle.set_attr("warpGroupLocal", _semantic.builder.get_unit_attr())
    return values


@gluon.jit
def reinterpret(memory, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The same bytes of shared memory under another type, shape and layout."""
    if _PUBLIC_REINTERPRET:
        view = memory.reinterpret(DTYPE, SHAPE, LAYOUT)
    else:
        view = memory._reinterpret(DTYPE, SHAPE, LAYOUT)
    return view


@gluon.jit
def arrive(barrier):
    """One thread arrives at `barrier`. With Triton 3.6 it does not wait for the other threads of its partition;
    `ARRIVE_MEETS` says whether it does.

    With `mbarrier.arrive` they wait for one another, and then again when they next use shared memory.
    """
    mbarrier.expect(barrier, 0)


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The next stage of a ring, and the parity of the barrier phase that it is in."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase
