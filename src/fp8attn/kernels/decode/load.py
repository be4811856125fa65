"""The producer: one warp that copies the tiles of its worker's range by TMA, and the stages of shared memory that
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
from ..tiles import allocate_k, column_of, fetch_k, fetch_v, v_layout

PRODUCER_REGISTERS = gl.constexpr(40)


@aggregate
class DecodeRing:
    """Shared memory between the producer and the consumer: stages of a tile of K and of V each, and their scales."""

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
def make_ring(k_desc, options: gl.constexpr):
    """Allocates shared memory."""
    STAGES: gl.constexpr = options.stages
    WIDTH: gl.constexpr = options.width
    TILE: gl.constexpr = options.tile
    k = allocate_k(k_desc, STAGES)
    v = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, WIDTH, TILE], v_layout(WIDTH, TILE))
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
    OPTIONS: gl.constexpr  # `plan.DecodeOptions`

    @gluon.jit
    def page(self, seq, first, i):
        """The page of tile `first + i` of sequence `seq`."""
        row = self.table + seq * self.table_stride
        if self.OPTIONS.tile == PAGE:
            return gl.load(row + first + i)  # in this order: kernels' machine code is that of before there were tiles
        else:
            return gl.load(row + column_of(first + i, self.OPTIONS.tile))

    @gluon.jit
    def request(self, ring, stage, slot, tile):
        """Starts to copy K and V of tile `tile` of a sequence, in `slot` (page x heads + head), and the scales of its
        page, to a stage that is free.
        """
        header = self.pool + slot.to(gl.int64) * self.OPTIONS.layout.nbytes + self.OPTIONS.layout.header_offset
        two = gl.arange(0, 2, gl.BlockedLayout([2], [32], [gl.num_warps()], [0]))
        fetch_words(ring.scales.index(stage), header.to(gl.pointer_type(gl.float32), bitcast=True) + two)
        arrive_with_words(ring.k_full.index(stage))
        mbarrier.expect(ring.k_full.index(stage), self.k_desc.block_type.nbytes)
        fetch_k(self.k_desc, slot, tile, ring.k_full.index(stage), ring.k.index(stage))
        mbarrier.expect(ring.v_full.index(stage), self.v_desc.block_type.nbytes)
        fetch_v(self.v_desc, slot, tile, ring.v_full.index(stage), ring.v, stage, ring.STAGES)


@gluon.jit
def request_first(ring, batch, work, source):
    """Requests the first tile of a range, before the warps are specialized.
    Returns whether there was one to request.
    """
    seq = batch.sequence(work.seq)
    i, j = batch.portion(work.begin, seq, work)
    requested = (work.begin < work.high) & (i < j) & (seq.length > 0)
    if requested:
        slot = source.page(work.seq, seq.first_tile, i) * batch.heads + work.head
        source.request(ring, 0, slot, seq.first_tile + i)
    return requested


@gluon.jit
def produce(ring, batch, work, requested, source):
    """The producer's warp: requests the tiles of a range, except the first tile if that has been `requested`.

    It does not wait for the stage of that first tile either. The stage was free then, and the consumer may have freed
    it again since. A wait would be for the next release, and the second tile would never be requested.
    """
    index, head, begin = work.seq, work.head, work.begin
    done = requested.to(gl.int32)  # tiles of the head
    count = done  # tiles of the range
    while begin < work.high:
        seq = batch.sequence(index)
        i, j = batch.portion(begin, seq, work)
        for tile in range(seq.first_tile + i + done, seq.first_tile + j):
            stage = count % ring.STAGES
            slot = source.page(index, tile, 0) * batch.heads + head
            mbarrier.wait(ring.empty.index(stage), ((count // ring.STAGES) & 1) ^ 1)
            if seq.length > 0:
                source.request(ring, stage, slot, tile)
            else:  # the table of an empty sequence may name any page, and that page may hold any bytes
                mbarrier.arrive(ring.k_full.index(stage), count=1)
                mbarrier.arrive(ring.v_full.index(stage), count=1)
            count += 1
        done = 0
        begin += seq.places
        index, head = batch.following(index, head, seq.num_tiles)
