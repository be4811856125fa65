"""The decode kernel without arithmetic: its producer, and a consumer that only releases what it gets. What is possible
at all.
"""

from __future__ import annotations

from collections.abc import Callable

from fp8attn import KVPages
from fp8attn.formats.page_layout import PAGE_SIZE
from fp8attn.kernels import decode
from fp8attn.kernels.decode.load import PRODUCER_REGISTERS, DecodeSource, make_ring, produce, request_first
from fp8attn.kernels.decode.work import DecodeBatch, assign
from fp8attn.kernels.devices import chip
from fp8attn.kernels.gluon import gdc_wait, gl, gluon, mbarrier, sync
from fp8attn.kernels.launch import Tiles, launch, make_constants, num_sms
from fp8attn.kernels.tiles import views

from .problem import Shape


@gluon.jit
def _drain(ring, batch, work):
    """`consume` without arithmetic: it waits, and walks over the pages."""
    index, head, begin = work.seq, work.head, work.begin
    tile = 0
    while begin < work.high:
        seq = batch.sequence(index)
        i, j = batch.portion(begin, seq.num_pages, work.low, work.high)
        for _ in range(seq.first_page + i, seq.first_page + j):
            stage = tile % ring.STAGES
            phase = (tile // ring.STAGES) & 1
            mbarrier.wait(ring.k_full.index(stage), phase)
            mbarrier.wait(ring.v_full.index(stage), phase)
            sync()  # or a slow warp could miss two phases, and wait for ever
            mbarrier.arrive(ring.empty.index(stage), count=1)
            tile += 1
        begin += seq.places
        index, head = batch.following(index, head, seq.num_pages)


@gluon.jit(do_not_specialize=["table_stride", "num_seqs", "heads", "max_q", "workers"])
def _stream(k_desc, v_desc, pool_ptr, table_ptr, table_stride, lengths_ptr, num_seqs, heads, max_q, workers,
            OPTIONS: gl.constexpr):  # fmt: skip
    worker = gl.program_id(0)
    batch = DecodeBatch(
        lengths_ptr, lengths_ptr, lengths_ptr, num_seqs, heads, max_q, max_q, worker * 0, OPTIONS.group, False, False,
        False,
        OPTIONS.whole_pages, OPTIONS.head_pages,
    )  # fmt: skip
    source = DecodeSource(k_desc, v_desc, pool_ptr, table_ptr, table_stride, OPTIONS.layout)
    ring = make_ring(k_desc, OPTIONS.width, OPTIONS.stages)
    ring.open()
    gdc_wait()
    count = batch.counts(0, OPTIONS.block)
    work = assign(batch, count, worker, workers, OPTIONS.block)
    requested = request_first(ring, batch, work, source)
    gl.warp_specialize([
        (_drain, (ring, batch, work)),
        (produce, (ring, batch, work, requested, source)),
    ], [1], [PRODUCER_REGISTERS])  # fmt: skip


def stream(shape: Shape, pages: KVPages) -> Callable[[], None]:
    group, device = shape.q_heads // shape.kv_heads, pages.device
    plan = decode.DecodeShape(
        head_dim=shape.dim, group=group, max_rows=group, num_seqs=len(shape.keys), chip=chip(device)
    )
    k, v = views(pages.pool.shape, shape.dim, pages.format.k.dtype, plan.width, plan.width, PAGE_SIZE)
    workers = plan.workers(num_sms(device), shape.kv_heads * len(shape.keys))
    given = make_constants("stream", device, **plan.constants())
    args = (
        Tiles(pages.pool, k), Tiles(pages.pool, v), pages.pool, pages.page_table, pages.page_table.stride(0),
        pages.cache_seqlens,
        len(shape.keys), shape.kv_heads, 1, workers,
    )  # fmt: skip
    return lambda: launch(_stream, (workers,), args, given)
