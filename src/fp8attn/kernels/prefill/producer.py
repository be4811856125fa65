"""The producer: the warp that claims items and loads their operands."""

from __future__ import annotations

from ..codec import ratio_of_powers
from ..common import HIDDEN, K_SCALE_WORD, V_SCALE_WORD
from ..gluon import (
    aggregate,
    arrive_with_words,
    fetch,
    fetch_words,
    gdc_wait,
    gl,
    gluon,
    mbarrier,
    sync,
    tensor_descriptor,
)
from ..tiles import column_of, fetch_k, fetch_v
from .items import BATCH, COUNT, FIRST, HEAD, KV_HEAD, LAST, LEFT, LENGTH, POSITION, TILES, TOKEN
from .ring import K_EMPTY, K_FULL, V_EMPTY, V_FULL, Place
from .schedule import PrefillBatch, advance_to, claimed, draw, scheduler_init

PRODUCER_REGISTERS = gl.constexpr(24)  # of a thread


@aggregate
class PrefillSource:
    """What the producer reads: queries, pages and scales, and how the work of a launch is divided into items."""

    q: tensor_descriptor
    k: tensor_descriptor
    v: tensor_descriptor
    queries: gl.shared_memory_descriptor  # `PrefillQueries.raw`, as blocks of TMA
    headers: gl.tensor  # float32, a pointer to the first page's header
    table: gl.tensor | gl.constexpr  # int32 [num_seqs, table_width], a pointer: pages. None: they are in this order
    table_width: gl.tensor
    num_kv_heads: gl.tensor
    batch: PrefillBatch
    counter: gl.tensor  # int32, a pointer
    max_q: gl.tensor
    causal: gl.tensor
    parts: gl.tensor  # of an item's tiles, with `PrefillOptions.split`
    min_tiles: gl.tensor  # the smallest number of tiles of a part
    OPTIONS: gl.constexpr  # `PrefillOptions`

    @gluon.jit
    def page(self, row, tile):
        """The page of tile `tile` of the sequence in row `row` of the table."""
        column = column_of(tile, self.OPTIONS.tile)
        page = row * self.table_width + column
        if self.table is not None:
            page = gl.load(self.table + row.to(gl.int64) * self.table_width + column)
        return page

    @gluon.jit
    def header(self, slot):
        """The header of `slot` (page x heads + head)."""
        return self.headers + slot.to(gl.int64) * (self.OPTIONS.layout.nbytes // 4)

    @gluon.jit
    def tiles_of(self, block):
        """The tiles that an item reads.

        Returns:
            The length of the sequence, 0 if the item sees no keys; the position of the block's first query; the first
            and the last tile, which are one tile if it sees no keys; the number of keys on the left that are masked.
        """
        batch = self.batch
        TILE: gl.constexpr = self.OPTIONS.tile
        length = gl.where(block.seq < batch.num_seqs, block.length, 0)
        position = length - block.q_len + block.begin
        last = length - 1
        if self.causal:
            last = gl.minimum(last, position + batch.BLOCK - 1)
        last = gl.maximum(last, 0) // TILE
        bottom = 0
        left = 0
        if self.OPTIONS.mask_left:
            if batch.padding is not None:
                left = gl.load(batch.padding + block.row)
            first = gl.maximum(-block.begin, 0)
            bottom = gl.minimum(gl.maximum(gl.maximum(position + first - batch.window + 1, left), 0) // TILE, last)
        if self.OPTIONS.split:
            tiles = gl.maximum((last - bottom + self.parts) // self.parts, self.min_tiles)
            bottom += block.part * tiles
            length = gl.where(bottom > last, 0, length)
            bottom = gl.minimum(bottom, last)
            last = gl.minimum(bottom + tiles - 1, last)
        return length, position, bottom, last, left


@aggregate
class Block:
    """A block of queries of one head, and a part of the keys: an item whose tiles are not yet known."""

    seq: gl.tensor  # its sequence; `num_seqs` for the rows after the last sequence
    row: gl.tensor  # the sequence's row in the table of pages; for the rows after the last sequence, any row
    length: gl.tensor  # keys of the sequence
    q_len: gl.tensor  # queries of the sequence
    # The block's first row among the queries; below zero, by whole partitions, if the block begins before them.
    begin: gl.tensor
    token: gl.tensor  # the block's first row in the batch
    head: gl.tensor
    part: gl.tensor
    slab: gl.tensor  # the index of the sequence among queries, 0 in a ragged batch
    out_slab: gl.tensor  # the index of the part and sequence among outputs


@gluon.jit
def leave_out(block, output, options: gl.constexpr):
    """Write the LSE of an item without keys. The other warps do not see the item, and `combine` reads nothing else of
    it.
    """
    lse = output.lse + (block.out_slab * output.num_tokens + block.token).to(gl.int64) * output.num_q_heads + block.head
    ROWS: gl.constexpr = options.rows
    for i in gl.static_range(options.partitions):
        row = i * ROWS + gl.arange(0, ROWS, gl.BlockedLayout([ROWS // 32], [32], [1], [0]))
        hidden = gl.full([ROWS], HIDDEN, gl.float32, row.type.layout)
        inside = (block.begin + row >= 0) & (block.begin + row < block.q_len)
        gl.store(lse + row * output.num_q_heads, hidden, mask=inside)


@gluon.jit
def feed(block, place, slot, queries, ring, items, means, source):
    """Announce an item, and request its queries and all of its tiles.

    Returns:
        The place in the ring after the tiles, and the ticket of the next claim.
    """
    options: gl.constexpr = source.OPTIONS
    PARTITIONS: gl.constexpr = options.partitions
    none = gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    kv_head = block.head // (source.batch.num_q_heads // source.num_kv_heads)
    # Copies that need no length start before the length is loaded. A copy may end before its barrier expects it: the
    # phase does not end without that arrival, and until then the count of bytes is below zero.
    for i in gl.static_range(PARTITIONS):
        mbarrier.wait(queries.empty.index(i), slot ^ 1)
    if options.width < 256:
        channel = gl.arange(0, options.width, gl.BlockedLayout([options.width // 32], [32], [1], [0]))
        inside = channel < options.head_dim
        if means.v is not None:  # zeros outside the mask
            fetch_words(means.memory.index(2 + slot), means.v + kv_head * options.head_dim + channel, mask=inside)
        if means.USES_K:
            fetch_words(means.memory.index(slot), means.k + kv_head * options.head_dim + channel, mask=inside)
    for i in gl.static_range(PARTITIONS):
        corner = [block.slab, block.token + i * options.rows, block.head, 0]
        memory = source.queries.index(i if queries.Q16 else slot * PARTITIONS + i)
        fetch(source.q, corner, queries.full.index(i), memory)
    length, position, bottom, last, left = source.tiles_of(block)
    # The first tile's page, and the next one's; the item is announced while they are fetched, and then the scales are
    # loaded.
    page = source.page(block.row, last)
    ahead = source.page(block.row, gl.maximum(last - 1, bottom))
    items.put(slot, TILES, last - bottom + 1)
    items.put(slot, LAST, last)
    items.put(slot, BATCH, block.out_slab)
    items.put(slot, TOKEN, block.token)
    items.put(slot, COUNT, block.q_len - block.begin)
    items.put(slot, POSITION, position)
    items.put(slot, LENGTH, length)
    items.put(slot, HEAD, block.head)
    items.put(slot, KV_HEAD, kv_head)
    items.put(slot, LEFT, left)
    items.put(slot, FIRST, gl.maximum(-block.begin, 0))  # whole partitions
    sync()
    if options.width < 256 and (means.USES_K or means.v is not None):
        for i in gl.static_range(PARTITIONS):
            arrive_with_words(queries.full.index(i))
    for i in gl.static_range(PARTITIONS):
        mbarrier.expect(queries.full.index(i), options.rows * options.width * (source.q.dtype.primitive_bitwidth // 8))
    if source.table is None:
        gdc_wait()  # Warps round the queries while the launch before writes the pages.
    at = page * source.num_kv_heads + kv_head
    header = source.header(at + none)
    k_scale = gl.load(header + K_SCALE_WORD, mask=none + length > 0, other=1.0)  # an empty sequence's page is any page
    v_scale = gl.load(header + V_SCALE_WORD)
    # Loaded a second time on purpose: Triton 3.6 would treat an alias as loop-invariant, and `+ 0` would wait for the
    # load.
    v_unit = gl.load(header + V_SCALE_WORD, cache_modifier=".ca")
    ticket = gl.full([32], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    for j in range(last - bottom + 1):
        # Not before: items differ in length, and a CTA that has just begun a long one would keep the next from others.
        # Nor after this tile is requested: the answer takes half a microsecond, and short items are over soon.
        ticket = draw(source.counter, j == last - bottom)
        mbarrier.wait(ring.barrier(K_EMPTY, place), place.phase)
        # Before its scale has been loaded.
        fetch_k(source.k, at, last - j, ring.barrier(K_FULL, place), ring.k.index(place.stage))
        ring.scales.index(place.stage).store(k_scale)
        v_ratio = ratio_of_powers(v_unit, v_scale)
        ring.scales.index(ring.STAGES + place.stage).store(v_ratio)
        items.v_unit.index(slot).store(v_scale)
        v_unit = v_scale
        sync()  # one lane's arrival announces what all lanes wrote
        mbarrier.expect(ring.barrier(K_FULL, place), source.k.block_type.nbytes)
        here = at
        at = ahead * source.num_kv_heads + kv_head
        header = source.header(at + none)
        k_scale = gl.load(header + K_SCALE_WORD)
        v_scale = gl.load(header + V_SCALE_WORD)
        ahead = source.page(block.row, gl.maximum(last - 2 - j, bottom))
        mbarrier.wait(ring.barrier(V_EMPTY, place), place.phase)
        mbarrier.expect(ring.barrier(V_FULL, place), source.v.block_type.nbytes)
        fetch_v(source.v, here, last - j, ring.barrier(V_FULL, place), ring.v, place.stage, ring.STAGES)
        place = ring.next(place)
    return place, ticket


@gluon.jit
def produce(queries, ring, items, means, output, source):
    """Claim items (query rows of one head, `options.rows` for each partition), announce them, and keep the ring of
    tiles full.

    With `options.split`, an item is one of `parts` parts of the tiles, and writes one of `parts` outputs.
    """
    options: gl.constexpr = source.OPTIONS
    batch = source.batch
    PARTITIONS: gl.constexpr = options.partitions
    stage = 0
    phase = 1
    place = Place(stage, phase)
    item = 0
    # The order of items: sequence by sequence; in a sequence, `wave` heads at a time, whose K and V fit into L2; of
    # these heads, the last block of queries first, because it sees the most keys. The last block ends with the
    # sequence. So the partial block, which takes the time of a full one, is the first block, which has the fewest keys,
    # and it begins before the sequence.
    claim = gl.program_id(0)
    part = 0
    if options.split:
        part = claim % source.parts
        claim = claim // source.parts
    if batch.bounds is not None:
        q_len = 0
        seqs = batch.num_seqs + 1  # rows after the last sequence belong to one more sequence, which has no keys
        heads = batch.num_q_heads
    else:
        q_len = source.max_q
        seqs = 1
        heads = batch.num_seqs * batch.num_q_heads
    sequence = advance_to(claim, scheduler_init(q_len, batch), seqs, heads, batch)
    while sequence.index < seqs:
        q_len = sequence.q_len
        blocks = sequence.blocks
        rest = claim - sequence.base
        lot = rest // (sequence.wave * blocks)
        rest -= lot * sequence.wave * blocks
        some = gl.minimum(heads - lot * sequence.wave, sequence.wave)
        head = lot * sequence.wave + rest % some
        begin = (q_len + options.rows - 1) // options.rows * options.rows - (rest // some + 1) * batch.BLOCK
        seq = sequence.index
        token = sequence.start + begin
        slab = 0
        out_slab = part
        if batch.bounds is None:
            seq = head // batch.num_q_heads
            head -= seq * batch.num_q_heads
            slab = seq
            out_slab = part * batch.num_seqs + seq
        row = gl.minimum(seq, batch.num_seqs - 1)
        length = batch.new_keys
        if batch.lengths is not None:
            length = gl.load(batch.lengths + row)
        block = Block(
            seq=seq, row=row, length=length, q_len=q_len, begin=begin, token=token, head=head, part=part, slab=slab,
            out_slab=out_slab,
        )  # fmt: skip
        if options.split:
            seen, _, _, _, _ = source.tiles_of(block)
            if seen > 0:
                place, ticket = feed(block, place, item & 1, queries, ring, items, means, source)
                item += 1
            else:
                if source.table is None:
                    gdc_wait()  # before the counter, too, which a launch just before may have set
                ticket = draw(source.counter, seen <= 0)
                leave_out(block, output, options)
        else:
            place, ticket = feed(block, place, item & 1, queries, ring, items, means, source)
            item += 1
        claim = claimed(ticket)
        if options.split:
            part = claim % source.parts
            claim = claim // source.parts
        sequence = advance_to(claim, sequence, seqs, heads, batch)
    base = sequence.base
    if options.split:
        claim = claim * source.parts + part
        base = base * source.parts
    if claim == base + gl.num_programs(0) - 1:  # the launch's last claim: set the counter back to zero
        gl.store(source.counter, 0)
    slot = item & 1
    for i in gl.static_range(PARTITIONS):
        mbarrier.wait(queries.empty.index(i), slot ^ 1)
    items.put(slot, TILES, 0)
    sync()
    for i in gl.static_range(PARTITIONS):
        mbarrier.arrive(queries.full.index(i), count=1)
