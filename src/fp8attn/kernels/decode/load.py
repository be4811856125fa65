"""The producer: one warp that copies the pages of its worker's range by TMA, and the stages of shared memory that
receive them.
"""

from __future__ import annotations

from ..common import PAGE
from ..gluon import (
    aggregate,
    arrive_with_words,
    fence_async_shared,
    fetch_words,
    gl,
    gluon,
    mbarrier,
    tensor_descriptor,
)
from ..tiles import allocate_k, fetch_k, fetch_v, v_layout

PRODUCER_REGISTERS = gl.constexpr(40)


@aggregate
class DecodeRing:
    """Shared memory between the producer and the consumer: stages of a K and a V page each, and their scales."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor  # K's and V's
    k_full: gl.shared_memory_descriptor  # barriers; this one counts the scales, too
    v_full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.jit
    def open(self):
        """Initializes the barriers."""
        for stage in gl.static_range(self.STAGES):
            mbarrier.init(self.k_full.index(stage), 1)
            mbarrier.init(self.v_full.index(stage), 1)
            mbarrier.init(self.empty.index(stage), 1)
        fence_async_shared()  # TMA sees them


@gluon.jit
def make_ring(k_desc, WIDTH: gl.constexpr, STAGES: gl.constexpr):
    """Allocates shared memory. `WIDTH` is the head dimension, padded to a power of two."""
    k = allocate_k(k_desc, STAGES)
    v = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, WIDTH, PAGE], v_layout(WIDTH, PAGE))
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, 2], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    return DecodeRing(k, v, scales, k_full, v_full, empty, STAGES)


@aggregate
class DecodeSource:
    """The addresses of the pages and their scales."""

    k_desc: tensor_descriptor
    v_desc: tensor_descriptor
    pool: gl.tensor  # pointers
    table: gl.tensor
    table_stride: gl.tensor
    LAYOUT: gl.constexpr  # `PageLayout`

    @gluon.jit
    def request(self, ring, stage, slot, page):
        """Starts to copy K and V of `slot` (page x heads + head), and their scales, to a stage that is free.

        `page` is the number of the page in its sequence.
        """
        header = self.pool + slot.to(gl.int64) * self.LAYOUT.nbytes + self.LAYOUT.header_offset
        two = gl.arange(0, 2, gl.BlockedLayout([2], [32], [gl.num_warps()], [0]))
        fetch_words(ring.scales.index(stage), header.to(gl.pointer_type(gl.float32), bitcast=True) + two)
        arrive_with_words(ring.k_full.index(stage))
        mbarrier.expect(ring.k_full.index(stage), self.k_desc.block_type.nbytes)
        fetch_k(self.k_desc, slot, page, ring.k_full.index(stage), ring.k.index(stage))
        mbarrier.expect(ring.v_full.index(stage), self.v_desc.block_type.nbytes)
        fetch_v(self.v_desc, slot, page, ring.v_full.index(stage), ring.v, stage, ring.STAGES)


@gluon.jit
def request_first(ring, batch, work, source):
    """Requests the first page of a range, before the warps are specialized.
    Returns whether there was one to request.
    """
    seq = batch.sequence(work.seq)
    i, j = batch.portion(work.begin, seq.num_pages, work.low, work.high)
    requested = (work.begin < work.high) & (i < j) & (seq.length > 0)
    if requested:
        slot = gl.load(source.table + work.seq * source.table_stride + seq.first_page + i) * batch.heads + work.head
        source.request(ring, 0, slot, seq.first_page + i)
    return requested


@gluon.jit
def produce(ring, batch, work, requested, source):
    """The producer's warp: requests the pages of a range, except the first page if that has been `requested`.

    It does not wait for the stage of that first page either. The stage was free then, and the consumer may have freed
    it again since. A wait would be for the next release, and the second page would never be requested.
    """
    index, head, begin = work.seq, work.head, work.begin
    done = requested.to(gl.int32)  # pages of the head
    tile = done
    while begin < work.high:
        seq = batch.sequence(index)
        i, j = batch.portion(begin, seq.num_pages, work.low, work.high)
        for page in range(seq.first_page + i + done, seq.first_page + j):
            stage = tile % ring.STAGES
            slot = gl.load(source.table + index * source.table_stride + page) * batch.heads + head
            mbarrier.wait(ring.empty.index(stage), ((tile // ring.STAGES) & 1) ^ 1)
            if seq.length > 0:
                source.request(ring, stage, slot, page)
            else:  # the table of an empty sequence may name any page, and that page may hold any bytes
                mbarrier.arrive(ring.k_full.index(stage), count=1)
                mbarrier.arrive(ring.v_full.index(stage), count=1)
            tile += 1
        done = 0
        begin += seq.places
        index, head = batch.following(index, head, seq.num_pages)
