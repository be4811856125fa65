"""The decode kernel without arithmetic: its producer, and a consumer that only releases what it gets. What is possible
at all.
"""

from __future__ import annotations

from collections.abc import Callable

from fp8attn import KVPages
from fp8attn.kernels.decode.load import PRODUCER_REGISTERS, DecodeSource, make_ring, produce, request_first
from fp8attn.kernels.decode.plan import DecodeProblem, make_decode_plan
from fp8attn.kernels.decode.work import DecodeBatch, assign
from fp8attn.kernels.gluon import gdc_wait, gl, gluon, mbarrier, sync
from fp8attn.kernels.launch import Tiles, launch

from .problem import Shape


@gluon.jit
def _drain(ring, batch, work):
    """`consume` without arithmetic: it waits, and walks over the tiles."""
    index, head, begin = work.seq, work.head, work.begin
    count = 0
    while begin < work.high:
        seq = batch.sequence(index)
        i, j = batch.portion(begin, seq, work)
        for _ in range(seq.first_tile + i, seq.first_tile + j):
            stage = count % ring.STAGES
            phase = (count // ring.STAGES) & 1
            mbarrier.wait(ring.k_full.index(stage), phase)
            mbarrier.wait(ring.v_full.index(stage), phase)
            sync()  # or a slow warp could miss two phases, and wait for ever
            mbarrier.arrive(ring.empty.index(stage), count=1)
            count += 1
        begin += seq.places
        index, head = batch.following(index, head, seq.num_tiles)


@gluon.jit(do_not_specialize=["table_stride", "num_seqs", "heads", "max_q", "workers"])
def _stream(k_desc, v_desc, pool_ptr, table_ptr, table_stride, lengths_ptr, num_seqs, heads, max_q, workers,
            OPTIONS: gl.constexpr):  # fmt: skip
    worker = gl.program_id(0)
    batch = DecodeBatch(
        lengths_ptr, lengths_ptr, lengths_ptr, num_seqs, heads, max_q, max_q, worker * 0, OPTIONS
    )  # fmt: skip
    source = DecodeSource(k_desc, v_desc, pool_ptr, table_ptr, table_stride, OPTIONS)
    ring = make_ring(k_desc, OPTIONS)
    ring.open()
    gdc_wait()
    work = assign(batch, worker, workers)
    requested = request_first(ring, batch, work, source)
    gl.warp_specialize([
        (_drain, (ring, batch, work)),
        (produce, (ring, batch, work, requested, source)),
    ], [1], [PRODUCER_REGISTERS])  # fmt: skip


def stream(shape: Shape, pages: KVPages) -> Callable[[], None]:
    problem = DecodeProblem(
        pool=pages.pool.shape, spec=pages.format.name,
        group=shape.q_heads // shape.kv_heads, num_seqs=len(shape.keys), max_q=1, causal=False, ragged=False,
        window=False, softcap=False, sinks=False, leftpad=False, rotate=False,
    )  # fmt: skip
    plan = make_decode_plan(pages.device, problem)
    args = (
        Tiles(pages.pool, plan.k), Tiles(pages.pool, plan.v), pages.pool, pages.page_table, pages.page_table.stride(0),
        pages.cache_seqlens, len(shape.keys), shape.kv_heads, 1, plan.workers,
    )  # fmt: skip
    return lambda: launch(_stream, (plan.workers,), args, plan.constants)
