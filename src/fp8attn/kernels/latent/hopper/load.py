"""The producer: one warp that finds the pieces of work of its CTA, announces them, and copies queries and tiles by TMA.

A piece is what a range of pages has of one sequence. The other warps know nothing of sequences: they read a piece's
numbers, and its tiles in order.
"""

from __future__ import annotations

from ...common import PAGE
from ...gluon import (
    aggregate,
    fence_async_shared,
    fetch,
    gdc_wait,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    sync,
    tensor_descriptor,
)
from ...memory import address_of, allocate_barriers, allocate_numbers, number
from ...ptx import init_at, meet_and_arrive_at, uniform, wait_at
from ...tiles import column_of, fetch_k, part_of
from . import plan

TILE = gl.constexpr(plan.TILE)
MMA_ROWS = gl.constexpr(plan.MMA_ROWS)
PRODUCER_REGISTERS = gl.constexpr(24)
# Tiles of a piece that are requested before its queries. With more, the queries would wait until products of the piece
# before are added. (The first piece waits for its queries' kernel: as many as there is memory for.)
BEFORE_QUERIES = gl.constexpr(2)
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# Of a number for each of 64 rows: a thread of a product loads its 16 numbers by four in a row.
CHANGE = gl.constexpr(gl.SharedLinearLayout([[1], [8], [2], [4], [16], [32]], alignment=16))

# The numbers of a piece, one int32 each: its tiles (-1: there is no more piece); tokens from its first tile to the
# sequence's end; query tokens from that of its first row on; the block of quantized rows; rows that exist; its first
# row among those of the KV head; the part from which on they are written (`parts_of`); how many other ranges have parts
# of the sequence (-1: it began before this range, which does not know); tokens of padding from its first tile on.
TILES, LEFT, QUERIES, BLOCK, ROWS, FIRST, PART, MORE, PAD = (gl.constexpr(i) for i in range(9))
FIELDS = gl.constexpr(16)

# Barriers. Two of each but the last: of a tile's weights and of a piece, in two slots; and one for each stage of FULL
# and EMPTY.
WEIGHTS_FULL, WEIGHTS_EMPTY, PIECE_FULL, PIECE_EMPTY, SUMS_FULL, QUERIES_EMPTY, FULL = (
    gl.constexpr(i) for i in (0, 2, 4, 6, 8, 10, 11)
)


@aggregate
class LatentMemory:
    """Shared memory. `tile` and `piece` count those of the CTA, in all of its warps."""

    q: gl.shared_memory_descriptor  # int8 [64, rank]
    q_rope: gl.shared_memory_descriptor | gl.constexpr  # float16 or int8 [64, rope]; None without RoPE
    codes: gl.shared_memory_descriptor  # int8 [STAGES, 64, rank]
    rope: gl.shared_memory_descriptor | gl.constexpr  # [STAGES, 64, rope]
    scales: gl.shared_memory_descriptor  # float32 [STAGES, 1, 64]
    weights: gl.shared_memory_descriptor  # int8 [2, 64, 64], digits of rows, and tokens
    change: gl.shared_memory_descriptor  # [2, 64]: what a tile's weights make of the rows' units
    sums: gl.shared_memory_descriptor  # float32 [4, rows]: of a piece, in two slots
    fields: gl.shared_memory_descriptor  # int32 [2 * FIELDS, 1]
    barriers: gl.shared_memory_descriptor
    address: gl.tensor  # of the barriers
    STAGES: gl.constexpr

    @gluon.jit
    def open(self, ACCUMULATING: gl.constexpr):
        """Initializes the barriers. `ACCUMULATING`: the number of warps that accumulate; four compute weights."""
        for i in gl.static_range(2):
            init_at(self.at(WEIGHTS_FULL, i), 4)
            init_at(self.at(WEIGHTS_EMPTY, i), ACCUMULATING)
            init_at(self.at(PIECE_FULL, i), 1)
            init_at(self.at(PIECE_EMPTY, i), ACCUMULATING)
            init_at(self.at(SUMS_FULL, i), 4)
        init_at(self.at(QUERIES_EMPTY, 0), 4)
        for i in gl.static_range(self.STAGES):
            init_at(self.at(FULL, i), 1)
            init_at(self.at(FULL, self.STAGES + i), 4 + ACCUMULATING)
        fence_async_shared()  # TMA sees them

    @gluon.jit
    def at(self, KIND: gl.constexpr, slot):
        return self.address + (KIND + slot) * 8

    @gluon.jit
    def stage(self, tile):
        return (tile.to(gl.uint32) % self.STAGES).to(gl.int32)

    @gluon.jit
    def round(self, tile):
        """How often the stages have been filled before a tile."""
        return (tile.to(gl.uint32) // self.STAGES).to(gl.int32)

    @gluon.jit
    def wait_tile(self, tile):
        wait_at(self.at(FULL, self.stage(tile)), self.round(tile) & 1)

    @gluon.jit
    def release_tile(self, tile):
        meet_and_arrive_at(self.at(FULL, self.STAGES + self.stage(tile)))

    @gluon.jit
    def tiles_of(self, piece):
        """Wait for a piece; returns the number of its tiles."""
        wait_at(self.at(PIECE_FULL, piece & 1), (piece >> 1) & 1)
        return uniform(self.get(piece, TILES))

    @gluon.jit
    def get(self, piece, FIELD: gl.constexpr):
        return number(self.fields.index((piece & 1) * FIELDS + FIELD))

    @gluon.jit
    def parts_of(self, piece, row, options: gl.constexpr):
        """The parts that rows of a piece are written to, from `PART` on. Rows of the output have all KV heads: with one
        they follow each other, and need no address each.
        """
        if options.heads > 1:
            of_head = self.get(piece, FIRST) + row
            of_output = of_head + of_head // options.group * ((options.heads - 1) * options.group)
            row = gl.where(self.get(piece, MORE) >= 0, of_output, row)
        return row

    @gluon.jit
    def wait_slot(self, piece):
        """Wait until the piece two before is done."""
        mbarrier.wait(self.barriers.index(PIECE_EMPTY + (piece & 1)), ((piece >> 1) & 1) ^ 1)

    @gluon.jit
    def put(self, piece, FIELD: gl.constexpr, x):
        """Write a number of a piece. Only the producer's warp calls it."""
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        self.fields.index((piece & 1) * FIELDS + FIELD).store(gl.full([1], x, gl.int32, layout))


@gluon.jit
def allocate(source, options: gl.constexpr):
    """Allocates shared memory."""
    STAGES: gl.constexpr = options.stages
    RANK: gl.constexpr = options.rank
    INT8_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, RANK], gl.int8)
    if options.rope > 0:
        ROPE_TYPE: gl.constexpr = gl.float16 if options.rope_in_16_bits else gl.int8
        ROPE_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, options.rope], ROPE_TYPE)
        q_rope = gl.allocate_shared_memory(ROPE_TYPE, [1, MMA_ROWS, options.rope], ROPE_LAYOUT)
        rope = gl.allocate_shared_memory(ROPE_TYPE, [STAGES, TILE, options.rope], ROPE_LAYOUT)
    else:
        q_rope: gl.constexpr = None
        rope: gl.constexpr = None
    barriers = allocate_barriers(FULL + 2 * STAGES)
    return LatentMemory(
        q=gl.allocate_shared_memory(gl.int8, [1, MMA_ROWS, RANK], INT8_LAYOUT),
        q_rope=q_rope,
        codes=gl.allocate_shared_memory(gl.int8, [STAGES, TILE, RANK], INT8_LAYOUT),
        rope=rope,
        scales=gl.allocate_shared_memory(gl.float32, [STAGES, 1, TILE], source.scales.layout),
        weights=gl.allocate_shared_memory(gl.int8, [2, MMA_ROWS, TILE], gl.NVMMASharedLayout(TILE, 8, rank=2)),
        change=gl.allocate_shared_memory(gl.int32, [2, MMA_ROWS], CHANGE if options.digits == 1 else FLAT),
        sums=allocate_numbers(gl.float32, 4, options.rows),
        fields=allocate_numbers(gl.int32, 2 * FIELDS, 1),
        barriers=barriers,
        address=address_of(barriers),
        STAGES=STAGES,
    )


@aggregate
class LatentSource:
    """The addresses of the quantized queries and the pages."""

    q: tensor_descriptor
    q_rope: tensor_descriptor | gl.constexpr  # None without RoPE
    codes: tensor_descriptor
    rope: tensor_descriptor | gl.constexpr
    scales: tensor_descriptor
    table: gl.tensor  # pointer
    table_stride: gl.tensor

    @gluon.jit
    def request_queries(self, memory, piece, block):
        """Starts to copy the queries of a piece, when those of the piece before are not needed any more."""
        gdc_wait()
        mbarrier.wait(memory.barriers.index(QUERIES_EMPTY), (piece & 1) ^ 1)
        barrier = memory.barriers.index(PIECE_FULL + (piece & 1))
        if self.q_rope is not None:
            mbarrier.expect(barrier, self.q.block_type.nbytes + self.q_rope.block_type.nbytes)
            fetch(self.q_rope, [block * MMA_ROWS, 0], barrier, memory.q_rope.index(0))
        else:
            mbarrier.expect(barrier, self.q.block_type.nbytes)
        fetch(self.q, [block * MMA_ROWS, 0], barrier, memory.q.index(0))

    @gluon.jit
    def request(self, memory, stage, page, tile):
        """Starts to copy tile `tile` of a sequence, which is in `page`, to a stage that is free."""
        barrier = memory.barriers.index(FULL + stage)
        NBYTES: gl.constexpr = self.codes.block_type.nbytes + self.scales.block_type.nbytes
        if self.rope is not None:
            mbarrier.expect(barrier, NBYTES + self.rope.block_type.nbytes)
            fetch_k(self.rope, page, tile, barrier, memory.rope.index(stage))
        else:
            mbarrier.expect(barrier, NBYTES)
        fetch_k(self.codes, page, tile, barrier, memory.codes.index(stage))
        fetch(self.scales, [page, part_of(tile, TILE) * TILE], barrier, memory.scales.index(stage))


@gluon.jit
def scales_of(memory, stage):
    """The tokens' scales of a stage, `[64]` in shared memory."""
    return reinterpret(memory.scales, gl.float32, [memory.STAGES, TILE], FLAT).index(stage)


@gluon.jit
def produce(memory, source, batch, work, part, row_tile, row_tiles, options: gl.constexpr):
    """The producer's warp. The first tiles of a piece are requested before its queries, for which there is memory only
    when the scores of the piece before are computed. `part`: of a sequence that began before the CTA's range."""
    HEADS: gl.constexpr = options.heads
    index, head, begin = work.seq, work.head, work.begin
    piece = 0
    tile = 0
    while begin < work.high:
        seq = batch.sequence(index)
        i, j = batch.portion(begin, seq, work)
        if i < j:
            page0 = seq.first_tile + i
            left = seq.length - page0 * PAGE
            queries = seq.num_q - batch.row0 // options.group
            seen = left
            if options.causal:
                after_last = (batch.row0 + options.rows - 1) // options.group - batch.row0 // options.group + 1
                seen -= gl.maximum(queries - after_last, 0)
            # None of an empty sequence, or in a range that the rows do not see.
            tiles = gl.minimum((j - i) * (PAGE // TILE), (gl.maximum(seen, 0) + (TILE - 1)) // TILE)
            block = (index * HEADS + head) * row_tiles + row_tile
            last = work.worker_of(begin + seq.num_tiles - 1)
            memory.wait_slot(piece)
            memory.put(piece, TILES, tiles)
            memory.put(piece, LEFT, left)
            memory.put(piece, QUERIES, queries)
            memory.put(piece, BLOCK, block)
            memory.put(piece, ROWS, seq.num_q * options.group - batch.row0)
            memory.put(piece, FIRST, batch.row0)
            own = (seq.query * HEADS + head) * options.group
            if options.heads == 1:
                own += batch.row0
            memory.put(piece, PART, gl.where(i == 0, own, part))
            memory.put(piece, MORE, gl.where(i == 0, last - work.worker, -1))
            if options.leftpad:
                memory.put(piece, PAD, seq.pad - page0 * PAGE)
            sync()
            before = gl.where(piece == 0, memory.STAGES, BEFORE_QUERIES)
            for t in range(tiles):
                if t == before:
                    source.request_queries(memory, piece, block)
                in_seq = page0 * (PAGE // TILE) + t
                page = gl.load(source.table + index * source.table_stride + column_of(in_seq, TILE))
                stage = memory.stage(tile)
                empty = memory.barriers.index(FULL + memory.STAGES + stage)
                mbarrier.wait(empty, (memory.round(tile) & 1) ^ 1)
                source.request(memory, stage, page * HEADS + head, in_seq)
                tile += 1
            if tiles <= before:
                source.request_queries(memory, piece, block)
            piece += 1
        begin += seq.places
        index, head = batch.following(index, head, seq.num_tiles)
    memory.wait_slot(piece)
    memory.put(piece, TILES, -1)
    sync()
    mbarrier.arrive(memory.barriers.index(PIECE_FULL + (piece & 1)), count=1)
