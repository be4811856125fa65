"""The decode kernel without arithmetic: its producer, and a consumer that only releases what it gets. What is possible at all."""

from __future__ import annotations

from collections.abc import Callable

from fp8attn import KVPages
from fp8attn.kernels import decode
from fp8attn.kernels.gluon import gl, gluon, mbarrier, sync
from fp8attn.kernels.launch import constants, launch, num_sms
from fp8attn.kernels.pages import tiles

from .problem import Shape


@gluon.jit
def _drain(pipe, batch, work):
    """What `decode._consume` does of waiting and walking."""
    seq, head, begin = work.seq, work.head, work.begin
    tile = 0
    while begin < work.high:
        _, _, _, _, first, count = batch.sequence(seq)
        i, j = decode.portion(begin, count, work.low, work.high)
        for _ in range(first + i, first + j):
            stage = tile % pipe.STAGES
            phase = (tile // pipe.STAGES) & 1
            mbarrier.wait(pipe.k_full.index(stage), phase)
            mbarrier.wait(pipe.v_full.index(stage), phase)
            sync()  # or a slow warp could miss two phases, and wait for ever
            mbarrier.arrive(pipe.empty.index(stage), count=1)
            tile += 1
        begin += count
        seq, head = batch.following(seq, head, count)


@gluon.jit(do_not_specialize=["table_stride", "num_seqs", "heads", "max_q", "workers"])
def _stream(k_desc, v_desc, pool_ptr, table_ptr, table_stride, lengths_ptr, num_seqs, heads, max_q, workers,
            D: gl.constexpr, WIDTH: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, BLOCK: gl.constexpr):  # fmt: skip
    worker = gl.program_id(0)
    batch = decode.Batch(
        lengths_ptr, lengths_ptr, lengths_ptr, num_seqs, heads, max_q, max_q, worker * 0, GROUP, False, False, False
    )  # fmt: skip
    source = decode.Source(k_desc, v_desc, pool_ptr, table_ptr, table_stride, D)
    count = batch.counts(0, BLOCK)
    pipe = decode.make_pipe(k_desc, WIDTH, STAGES)
    pipe.open(0, 1)
    work = decode.assign(batch, count, worker, workers, BLOCK)
    requested = decode.request_first(pipe, batch, work, source)
    pipe.open(1, STAGES)
    gl.warp_specialize([
        (_drain, (pipe, batch, work)),
        (decode.produce, (pipe, batch, work, requested, source)),
    ], [1], [decode.PRODUCER_REGISTERS])  # fmt: skip


def stream(shape: Shape, pages: KVPages) -> Callable[[], None]:
    device, how = pages.device, decode.Launch(shape.dim, *(shape.q_heads // shape.kv_heads,) * 2, len(shape.keys))
    workers = how.workers(num_sms(device), shape.kv_heads * len(shape.keys))
    same = {name: how.constants()[name] for name in ("D", "WIDTH", "GROUP", "STAGES", "BLOCK")}
    given = constants("stream", device, **same, **how.options())
    args = (
        *tiles(pages, how.width, how.width), pages.pool, pages.page_table, pages.page_table.stride(0), pages.cache_seqlens,
        len(shape.keys), shape.kv_heads, 1, workers,
    )  # fmt: skip
    return lambda: launch(_stream, (workers,), args, given)
