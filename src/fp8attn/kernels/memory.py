"""Shared memory in Gluon kernels: numbers, barriers and their address."""

from __future__ import annotations

from .gluon import gl, gluon, mbarrier, sync
from .ptx import store_addresses


@gluon.jit
def allocate_numbers(DTYPE: gl.constexpr, N: gl.constexpr, LENGTH: gl.constexpr):
    """A layout of `[N, LENGTH]` with contiguous rows, one after another."""
    return gl.allocate_shared_memory(DTYPE, [N, LENGTH], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def allocate_barriers(N: gl.constexpr):
    return gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())


@gluon.jit
def number(memory):
    """The one number in `memory`, read by all threads."""
    return gl.max(memory.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def address_of(barriers):
    """The address of barriers in shared memory, for inline PTX.

    Gluon has none. So the end of shared memory, where Triton puts small allocations, is filled with addresses before it
    is used.
    """
    store_addresses()
    sync()
    address = number(barriers.index(0)).to(gl.int32)
    sync()  # all warps have read it, before inline PTX writes there
    return address
