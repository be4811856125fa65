"""The program that `tests.gpu.sanitizer` runs in NVIDIA's compute-sanitizer: reduced grids of the kernels, and
controls.

python tests/gpu/sanitized.py TOOL GRID
"""

from __future__ import annotations

import itertools
import sys

import torch

from benchmarks.problem import DEVICE, KEYS, Shape, given, ours
from fp8attn import KVPages, ops
from fp8attn.kernels import decode, prefill
from fp8attn.kernels.gluon import gl, gluon, mbarrier, sync

DIMS = (64, 128, 256)


def tokens(count: int, heads: int, dim: int) -> torch.Tensor:
    return torch.randn(count, heads, dim, device=DEVICE).bfloat16()


def made(shape: Shape, impl: str = "fp8attn") -> tuple[torch.Tensor, KVPages]:
    """The queries and the cache of one of our implementations."""
    q = tokens(sum(shape.queries), shape.q_heads, shape.dim)
    return given(impl, shape, q, *(tokens(sum(shape.keys), shape.kv_heads, shape.dim) for _ in "kv"))


def all_options() -> dict:
    return {
        "window": 100, "softcap": 20.0, "sinks": torch.randn(4, device=DEVICE),
        "leftpad_k": torch.tensor([5, 131], dtype=torch.int32, device=DEVICE),
    }  # fmt: skip


def done(what: str) -> None:
    torch.cuda.synchronize()
    print(what, flush=True)


def check_prefill() -> None:
    for dim in DIMS:
        shape = Shape((1, 300, 0, 130), (1, 77, 0, 130), 4, 2, dim, True)
        for impl in (*KEYS, "fp8attn-q8"):
            ours(prefill.prefill_attention, shape, *made(shape, impl))()
            done(f"prefill D{dim} {impl}")
    ops.attention(*made(Shape((300, 200), (150, 150), 4, 2, 128, True)), **all_options())
    done("prefill, all options")


def check_decode() -> None:
    for dim in DIMS:
        for queries in (1, 3):
            shape = Shape((1, 1500, 0, 130), (queries,) * 4, 4, 2, dim, True)
            for impl in KEYS:
                ours(decode.decode_attention, shape, *made(shape, impl))()
                done(f"decode D{dim} {queries} {impl}")
    ops.attention(*made(Shape((300, 200), (2, 2), 4, 2, 128, True)), **all_options())
    done("decode, all options")


def check_append() -> None:
    for dim, impl in itertools.product(DIMS, KEYS):
        _, pages = made(Shape((1, 300, 0, 127), (0,) * 4, 4, 2, dim, True), impl)
        done(f"append D{dim} {impl}, prompts")
        # A step of the first two, whose last pages have free rows.
        ends = torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32, device=DEVICE)
        ops.append(pages, *(tokens(2, 2, dim) for _ in "kv"), cu_seqlens=ends, max_seqlen=1)
        done(f"append D{dim} {impl}, a step")


GRIDS = {"prefill": check_prefill, "decode": check_decode, "append": check_append}


# Controls


@gluon.jit
def _read(x_ptr, out_ptr, offset):
    gl.store(out_ptr, gl.load(x_ptr + offset))


@gluon.jit
def _store(shared):
    shared.store(gl.full([128], 1, gl.int64, gl.BlockedLayout([1], [32], [4], [0])))


@gluon.jit
def _load(shared, out_ptr):
    here: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    gl.store(out_ptr + gl.arange(0, 128, here), shared.load(here))


@gluon.jit
def _race(out_ptr):
    """Four warps write what four others read, without a barrier."""
    shared = gl.allocate_shared_memory(gl.int64, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.warp_specialize([(_store, (shared,)), (_load, (shared, out_ptr))], [4], [32])


@gluon.jit
def _write(shared, full, empty):
    """One warp: it writes four times, each time after the readers have released the memory."""
    for i in range(4):
        mbarrier.wait(empty, (i & 1) ^ 1)
        shared.store(gl.full([128], 1, gl.int64, gl.BlockedLayout([1], [32], [1], [0])) + i)
        sync()
        mbarrier.arrive(full, count=1)


@gluon.jit
def _follow(shared, full, empty, out_ptr):
    here: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    for i in range(4):
        mbarrier.wait(full, i & 1)
        gl.store(out_ptr + gl.arange(0, 128, here), shared.load(here))
        mbarrier.arrive(empty, count=1)


@gluon.jit
def _ordered(out_ptr):
    """One warp writes what four others read, four times. Each side waits for the other."""
    shared = gl.allocate_shared_memory(gl.int64, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, 1)
    mbarrier.init(empty, 1)
    gl.warp_specialize([(_follow, (shared, full, empty, out_ptr)), (_write, (shared, full, empty))], [1], [32])


def control(tool: str, name: str) -> None:
    x, out = (torch.empty(128, dtype=torch.int64, device=DEVICE) for _ in range(2))
    if tool == "racecheck":
        (_race if name == "planted" else _ordered)[(1,)](out)
    else:
        _read[(1,)](x, out, 128 if tool == "memcheck" else 0)  # behind the end, or uninitialized


if __name__ == "__main__":
    tool, grid = sys.argv[1:]
    GRIDS[grid]() if grid in GRIDS else control(tool, grid)
    torch.cuda.synchronize()
    print("grid done", flush=True)
