"""The kernel: the product's prefill kernel at head_dim 128, without what the experiment does not need (masks on the left, means, RoPE, a
softcap, sinks, rows of few keys, ragged batches)."""

from __future__ import annotations

from fp8attn.kernels.common import HIDDEN, LN2
from fp8attn.kernels.gluon import fence_async_shared, fetch, gdc_wait, gl, gluon, mbarrier, reinterpret, send_wait, sync
from fp8attn.kernels.pages import K_SCALE_WORD, V_SCALE_WORD, allocate_k, fetch_k, v_layout
from fp8attn.kernels.prefill.epilogue import PrefillOutput, write_channels
from fp8attn.kernels.prefill.items import (
    BATCH,
    COUNT,
    FIELDS,
    FIRST,
    HEAD,
    KV_HEAD,
    LAST,
    LEFT,
    LENGTH,
    POSITION,
    TILES,
    TOKEN,
    Items,
    Rows,
)  # fmt: skip
from fp8attn.kernels.prefill.kernel import NUMBERS
from fp8attn.kernels.prefill.producer import Block, PrefillSource, PrefillWork, leave_out, tiles_of
from fp8attn.kernels.prefill.queries import PrefillQueries, load_queries, store_signs
from fp8attn.kernels.prefill.registers import TILE
from fp8attn.kernels.prefill.ring import (
    K_EMPTY,
    K_FULL,
    V_EMPTY,
    V_FULL,
    Place,
    PrefillRing,
    address_of,
    allocate_barriers,
    allocate_numbers,
    number,
)
from fp8attn.kernels.prefill.schedule import PrefillBatch, advance_to, claimed, draw, scheduler_init
from fp8attn.kernels.prefill.softmax import sum_of_rows
from fp8attn.kernels.ptx import log2, reciprocal

from .convert import RAW_K, RAW_V, WARPS, convert, store_all_addresses
from .tiles import MOST, Columns, in_turn, interleaved, overlapped

UNIT = gl.constexpr(2.0**100)  # brings sums of subnormal numbers, in units of 2^-149, into the range of the others
REST = gl.constexpr(2.0**-49)


@gluon.jit
def store_item(rows, queries, output, acc, unit, sums, bias, options: gl.constexpr):
    items = rows.items
    slot = rows.slot
    ROW: gl.constexpr = unit.type.layout
    count = items.count(slot, rows.first)
    head = items.get(slot, HEAD)
    batch = items.get(slot, BATCH)
    token = items.get(slot, TOKEN) + rows.first
    SUMS: gl.constexpr = UNIT if options.v_form == "page" else MOST * REST
    sums = sum_of_rows(sums) * SUMS
    unseen = sums < 2.0**-60
    inverse = number(items.v_unit.index(slot)) * reciprocal(sums)
    bias = gl.convert_layout(sum_of_rows(bias), gl.SliceLayout(1, acc.type.layout), assert_trivial=True)
    acc = (acc - (bias * 128.0)[:, None]) * UNIT
    if output.lse is not None:
        row = gl.arange(0, unit.shape[0], ROW)
        at = (batch * output.num_tokens + token).to(gl.int64) * output.num_q_heads + head
        lse = unit + log2(sums * (1.0 / (MOST * REST)))
        if options.split:  # as `combine` takes it
            gl.store(output.lse + output.plane.to(gl.int64) + at + row * output.num_q_heads, unit * 0.0, mask=row < count)
            lse = gl.where(unseen, HIDDEN, lse)
        else:
            lse = gl.where(unseen, HIDDEN, lse * LN2)
        gl.store(output.lse + at + row * output.num_q_heads, lse, mask=row < count)
    write_channels(rows.PARTITION, output, batch, token, head, count, None, acc, inverse, None, unseen, None, 0, options)


@gluon.jit
def multiply(PARTITION: gl.constexpr, options: gl.constexpr, queries, ring, columns, items, output, causal, window, scale, cap):
    """Compute the rows of a partition of every item that the producer announces."""
    FIRST_ROW: gl.constexpr = PARTITION * options.rows
    item = 0
    stage = 0
    phase = 0
    place = Place(stage, phase)
    mbarrier.wait(queries.full.index(PARTITION), 0)
    tiles = items.get(0, TILES)
    while tiles > 0:
        slot = item & 1
        last = items.get(slot, LAST)
        count = items.count(slot, FIRST_ROW)
        position = items.get(slot, POSITION)
        length = items.get(slot, LENGTH)
        bottom = last - tiles + 1
        all_last = position + FIRST_ROW + ((1 - causal) << 30)
        any_last = gl.minimum(all_last + options.rows - 1, length - 1)
        all_last = gl.minimum(all_last, length - 1)
        q = queries.codes.index(PARTITION)
        factor, mean_score = load_queries(q, queries.raw.index(PARTITION), queries.signs, None, scale, options, True)
        rows = Rows(
            PARTITION=PARTITION, first=FIRST_ROW, items=items, slot=slot, causal=causal, window=window, q=q, factor=factor,
            mean_score=mean_score, cap=cap)  # fmt: skip
        whole = gl.maximum(all_last + 1, 0) // TILE  # tiles before this one end where every row still sees
        top = gl.maximum(gl.minimum(gl.maximum(any_last, 0) // TILE, last), bottom)
        if count <= 0:
            top = bottom
        n_hi = gl.maximum(top - gl.maximum(whole, bottom), 0)
        n_free = gl.maximum(gl.minimum(top, whole) - bottom, 0)
        for _ in range(last - top):  # tiles that only other partitions' rows see
            ring.wait_k(place)
            ring.wait_v(place)
            ring.release_k(place)
            ring.release_v(place)
            place = ring.next(place)
        if options.partitions > 1:
            queries.factor.index(PARTITION).store(rows.factor)
            queries.release(PARTITION)
            acc, unit, sums, bias, place = in_turn(rows, ring, columns, queries, top, n_hi, n_free, place, options)
        else:
            queries.release(PARTITION)
            acc, unit, sums, bias, place = overlapped(rows, ring, columns, top, n_hi, n_free, place, options)
        store_item(rows, queries, output, acc, unit, sums, bias, options)
        item += 1
        mbarrier.wait(queries.full.index(PARTITION), item & 1)
        tiles = items.get(item & 1, TILES)
    if output.desc is not None:
        send_wait(0)  # a CTA's shared memory ends with it


@gluon.jit
def feed(block, place, slot, options: gl.constexpr, queries, ring, columns, k_columns, v_columns, items, source, batch, work):
    """Announce an item, and request its queries and all of its tiles."""
    PARTITIONS: gl.constexpr = options.partitions
    COPIED_K: gl.constexpr = RAW_K if options.converted else K_FULL
    COPIED_V: gl.constexpr = RAW_V if options.converted > 1 else V_FULL
    none = gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    kv_head = block.head // (batch.num_q_heads // source.num_kv_heads)
    for i in gl.static_range(PARTITIONS):
        mbarrier.wait(queries.empty.index(i), slot ^ 1)
    for i in gl.static_range(PARTITIONS):
        corner = [block.slab, block.token + i * options.rows, block.head, 0]
        fetch(source.q, corner, queries.full.index(i), source.queries.index(i))
    length, position, bottom, last, left = tiles_of(block, batch, work, options)
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
    for i in gl.static_range(PARTITIONS):
        mbarrier.expect(queries.full.index(i), options.rows * options.width * (source.q.dtype.primitive_bitwidth // 8))
    at = page * source.num_kv_heads + kv_head
    header = source.header(at + none, options)
    k_scale = gl.load(header + K_SCALE_WORD, mask=none + length > 0, other=1.0)  # an empty sequence's page is any page
    v_scale = gl.load(header + V_SCALE_WORD)
    v_unit = gl.load(header + V_SCALE_WORD, cache_modifier=".ca")
    ticket = gl.full([32], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    for j in range(last - bottom + 1):
        ticket = draw(work.counter, j == last - bottom)
        mbarrier.wait(ring.barrier(K_EMPTY, place), place.phase)
        fetch_k(source.k, at, ring.barrier(COPIED_K, place), ring.k.index(place.stage))  # before its scale has been loaded
        ring.scales.index(place.stage).store(k_scale)
        ring.scales.index(ring.STAGES + place.stage).store(v_unit / v_scale)
        items.v_unit.index(slot).store(v_scale)
        v_unit = v_scale
        sync()  # one lane's arrival announces what all lanes wrote
        if k_columns is not None:
            fetch(k_columns, [at, 0, 0], ring.barrier(COPIED_K, place), columns[0].index(place.stage))
            mbarrier.expect(ring.barrier(COPIED_K, place), source.k.block_type.nbytes + k_columns.block_type.nbytes)
        else:
            mbarrier.expect(ring.barrier(COPIED_K, place), source.k.block_type.nbytes)
        here = at
        at = ahead * source.num_kv_heads + kv_head
        header = source.header(at + none, options)
        k_scale = gl.load(header + K_SCALE_WORD)
        v_scale = gl.load(header + V_SCALE_WORD)
        ahead = source.page(block.row, gl.maximum(last - 2 - j, bottom))
        mbarrier.wait(ring.barrier(V_EMPTY, place), place.phase)
        if v_columns is not None:
            mbarrier.expect(ring.barrier(COPIED_V, place), source.v.block_type.nbytes + v_columns.block_type.nbytes)
            fetch(v_columns, [here, 0, 0], ring.barrier(COPIED_V, place), columns[1].index(place.stage))
        else:
            mbarrier.expect(ring.barrier(COPIED_V, place), source.v.block_type.nbytes)
        SHAPE: gl.constexpr = [ring.STAGES] + source.v.block_type.shape  # noqa: RUF005
        LAYOUT: gl.constexpr = source.v.layout
        memory = reinterpret(ring.v, gl.int8, SHAPE, LAYOUT).index(place.stage)
        fetch(source.v, [here, 0, 0, 0, 0], ring.barrier(COPIED_V, place), memory)
        place = ring.next(place)
    return place, ticket


@gluon.jit
def produce(options: gl.constexpr, queries, ring, columns, k_columns, v_columns, items, output, source, batch, work):
    """`prefill.producer.produce` for one length of queries."""
    BLOCK: gl.constexpr = batch.BLOCK
    PARTITIONS: gl.constexpr = options.partitions
    stage = 0
    phase = 1
    place = Place(stage, phase)
    item = 0
    claim = gl.program_id(0)
    part = 0
    if options.split:
        part = claim % work.parts
        claim = claim // work.parts
    heads = batch.num_seqs * batch.num_q_heads
    sequence = advance_to(claim, scheduler_init(work.max_q, batch), 1, heads, batch)
    while sequence.index < 1:
        q_len = sequence.q_len
        blocks = sequence.blocks
        rest = claim - sequence.base
        lot = rest // (sequence.wave * blocks)
        rest -= lot * sequence.wave * blocks
        some = gl.minimum(heads - lot * sequence.wave, sequence.wave)
        head = lot * sequence.wave + rest % some
        begin = (q_len + options.rows - 1) // options.rows * options.rows - (rest // some + 1) * BLOCK
        token = sequence.start + begin
        seq = head // batch.num_q_heads
        head -= seq * batch.num_q_heads
        out_slab = part * batch.num_seqs + seq
        block = Block(
            seq=seq, row=seq, length=gl.load(batch.lengths + seq), q_len=q_len, begin=begin, token=token, head=head, part=part, slab=seq,
            out_slab=out_slab)  # fmt: skip
        if options.split:
            seen, _, _, _, _ = tiles_of(block, batch, work, options)
            if seen > 0:
                place, ticket = feed(
                    block, place, item & 1, options, queries, ring, columns, k_columns, v_columns, items, source, batch, work)  # fmt: skip
                item += 1
            else:
                ticket = draw(work.counter, seen <= 0)
                leave_out(block, output, options)
        else:
            place, ticket = feed(
                block, place, item & 1, options, queries, ring, columns, k_columns, v_columns, items, source, batch, work)  # fmt: skip
            item += 1
        claim = claimed(ticket)
        if options.split:
            part = claim % work.parts
            claim = claim // work.parts
        sequence = advance_to(claim, sequence, 1, heads, batch)
    base = sequence.base
    if options.split:
        claim = claim * work.parts + part
        base = base * work.parts
    if claim == base + gl.num_programs(0) - 1:  # the launch's last claim: set the counter back to zero
        gl.store(work.counter, 0)
    slot = item & 1
    for i in gl.static_range(PARTITIONS):
        mbarrier.wait(queries.empty.index(i), slot ^ 1)
    items.put(slot, TILES, 0)
    if options.converted:
        mbarrier.wait(ring.barrier(K_EMPTY, place), place.phase)
        columns[2].index(place.stage).store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    sync()
    if options.converted:
        mbarrier.arrive(ring.barrier(RAW_K, place), count=1)
    for i in gl.static_range(PARTITIONS):
        mbarrier.arrive(queries.full.index(i), count=1)


@gluon.jit
def first_word(memory, BYTES: gl.constexpr):
    return number(reinterpret(memory, gl.int32, [BYTES // 4, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])).index(0))


@gluon.jit(do_not_specialize=NUMBERS)
def lab_kernel(q_desc, k_desc, v_desc, k_columns, v_columns, out_desc, out_ptr, lse_ptr, pool_ptr, table_ptr, lengths_ptr, counter_ptr,
               out_stride_b, out_stride_t, out_stride_h, num_tokens, max_q, num_seqs, num_q_heads, num_kv_heads, table_width, causal,
               window, parts, min_tiles, wave, wave_rows, wave_tiles, plane, scale, cap, OPTIONS: gl.constexpr):  # fmt: skip
    """The arguments of `prefill_kernel`, and the scales of tokens, which TMA copies."""
    PARTITIONS: gl.constexpr = OPTIONS.partitions
    ROWS: gl.constexpr = OPTIONS.rows
    WIDTH: gl.constexpr = OPTIONS.width
    STAGES: gl.constexpr = OPTIONS.stages
    barriers = allocate_barriers((6 if OPTIONS.converted else 4) * STAGES)
    if not OPTIONS.converted:
        address = address_of(barriers)
    headers = (pool_ptr + OPTIONS.layout.header_offset).to(gl.pointer_type(gl.float32))
    FLAT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], q_desc.dtype)
    BYTES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], gl.int8)
    blocks = gl.allocate_shared_memory(q_desc.dtype, [PARTITIONS, 1, ROWS, 1, WIDTH], q_desc.layout)
    raw = reinterpret(blocks, q_desc.dtype, [PARTITIONS, ROWS, WIDTH], FLAT)
    codes = gl.allocate_shared_memory(gl.int8, [PARTITIONS, ROWS, WIDTH], BYTES)
    PARTS: gl.constexpr = v_desc.block_type.shape[1]
    k_tiles = allocate_k(k_desc, STAGES)
    v_tiles = gl.allocate_shared_memory(gl.int8, [STAGES * PARTS, WIDTH // PARTS, TILE], v_layout(WIDTH // PARTS))
    scales = allocate_numbers(gl.float32, 2 * STAGES, 1)
    ones = gl.allocate_shared_memory(gl.int8, [8, TILE], gl.NVMMASharedLayout.get_default_for([8, TILE], gl.int8))
    ones.store(gl.full([8, TILE], 1, gl.int8, gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])))
    if OPTIONS.k_form == "bias":
        full = gl.allocate_shared_memory(gl.int8, [TILE, 32], gl.NVMMASharedLayout.get_default_for([TILE, 32], gl.int8))
        full.store(gl.full([TILE, 32], -1, gl.int8, gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])))
    else:
        full: gl.constexpr = None
    signs = gl.allocate_shared_memory(q_desc.dtype, [16, 16], gl.SwizzledSharedLayout(8, 1, 1, [0, 1]))
    store_signs(signs)
    fields = allocate_numbers(gl.int32, 2 * FIELDS, 1)
    v_units = allocate_numbers(gl.float32, 2, 1)
    factor = allocate_numbers(gl.float32, PARTITIONS, ROWS if PARTITIONS == 3 else 1)
    if k_columns is not None:
        k_memory = gl.allocate_shared_memory(gl.int8, [STAGES] + k_columns.block_type.shape, k_columns.layout)  # noqa: RUF005
        if OPTIONS.converted:
            of_k: gl.constexpr = None
        elif OPTIONS.k_form == "group":
            of_k = reinterpret(k_memory, gl.float32, [STAGES * 64, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        elif OPTIONS.loaded:
            of_k = reinterpret(k_memory, gl.float32, [STAGES * 2, 4, 32], interleaved(4))
        else:
            of_k = reinterpret(k_memory, gl.int32, [STAGES, 4, 16], interleaved(4, 16))
    else:
        k_memory: gl.constexpr = None
        of_k: gl.constexpr = None
    if v_columns is not None:
        v_memory = gl.allocate_shared_memory(gl.int8, [STAGES] + v_columns.block_type.shape, v_columns.layout)  # noqa: RUF005
        if OPTIONS.converted:
            of_v: gl.constexpr = None
        else:
            of_v = reinterpret(v_memory, gl.float16, [STAGES, 4, 32], interleaved(8))
    else:
        v_memory: gl.constexpr = None
        of_v: gl.constexpr = None
    if out_desc is not None:
        out_memory = gl.allocate_shared_memory(out_desc.dtype, [PARTITIONS] + out_desc.block_type.shape, out_desc.layout)  # noqa: RUF005
    else:
        out_memory: gl.constexpr = None
    queries = PrefillQueries(
        codes=codes, raw=raw, rest=codes, signs=signs, mean_score=factor, factor=factor, full=allocate_barriers(PARTITIONS),
        empty=allocate_barriers(PARTITIONS), Q16=True, REST=False)  # fmt: skip
    if OPTIONS.converted:
        alive = allocate_numbers(gl.int32, STAGES, 1)
        sync()
        store_all_addresses()
        sync()
        address = number(reinterpret(barriers, gl.int32, [12 * STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])).index(0))
        k_base = first_word(k_tiles, STAGES * TILE * WIDTH)
        v_base = first_word(v_tiles, STAGES * TILE * WIDTH)
        k_ratios = first_word(k_memory, STAGES * 256)
        v_ratios = first_word(v_memory, STAGES * 256) if OPTIONS.converted > 1 else k_ratios
        sync()
        for i in gl.static_range(STAGES):
            alive.index(i).store(gl.full([1], 1, gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])))
        ones.store(gl.full([8, TILE], 1, gl.int8, gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])))
        store_signs(signs)
    else:
        alive: gl.constexpr = None
    ring = PrefillRing(k=k_tiles, v=v_tiles, scales=scales, ones=ones, barriers=barriers, address=address, STAGES=STAGES)
    for i in gl.static_range(PARTITIONS):
        mbarrier.init(queries.full.index(i), 1)
        mbarrier.init(queries.empty.index(i), 1)
    ring.open(ROWS // 16 if PARTITIONS == 1 else PARTITIONS)
    if OPTIONS.converted:  # what is full is what has been converted, by two warps
        for i in gl.static_range(2 * STAGES):
            mbarrier.init(barriers.index(i), WARPS if i < STAGES or OPTIONS.converted > 1 else 1)
            mbarrier.init(barriers.index(4 * STAGES + i), 1)
    fence_async_shared()  # TMA and the tensor cores see the barriers and the ones
    items = Items(fields=fields, v_unit=v_units)
    output = PrefillOutput(
        desc=out_desc, memory=out_memory, ptr=out_ptr, stride_b=out_stride_b, stride_t=out_stride_t, stride_h=out_stride_h, lse=lse_ptr,
        sinks=None, num_tokens=num_tokens, num_q_heads=num_q_heads, plane=plane)  # fmt: skip
    source = PrefillSource(
        q=q_desc, k=k_desc, v=v_desc, queries=blocks, headers=headers, table=table_ptr, table_width=table_width,
        num_kv_heads=num_kv_heads)  # fmt: skip
    batch = PrefillBatch(
        bounds=None, lengths=lengths_ptr, new_keys=gl.to_tensor(0), padding=None, num_tokens=num_tokens, num_seqs=num_seqs,
        num_q_heads=num_q_heads, window=window, wave=wave, wave_rows=wave_rows, wave_tiles=wave_tiles, BLOCK=PARTITIONS * ROWS)  # fmt: skip
    work = PrefillWork(counter=counter_ptr, max_q=max_q, causal=causal, parts=parts, min_tiles=min_tiles)
    columns = Columns(k=of_k, v=of_v, full=full, LOADED=OPTIONS.loaded)
    gdc_wait()
    shared = (queries, ring, columns, items, output, causal, window, scale, cap)
    memory = (k_memory, v_memory, alive)
    if OPTIONS.converted:
        gl.warp_specialize(
            [
                (multiply, (0, OPTIONS) + shared),  # noqa: RUF005
                (multiply, (1, OPTIONS) + shared),  # noqa: RUF005
                (multiply, (2, OPTIONS) + shared),  # noqa: RUF005
                (produce, (OPTIONS, queries, ring, memory, k_columns, v_columns, items, output, source, batch, work)),
                (convert, (ring, alive, k_base, v_base, k_ratios, v_ratios, OPTIONS)),
            ],
            [4, 4, 1, WARPS],
            [OPTIONS.registers, OPTIONS.registers, 32, 32],
        )
    elif PARTITIONS == 1:
        gl.warp_specialize(
            [
                (multiply, (0, OPTIONS) + shared),  # noqa: RUF005
                (produce, (OPTIONS, queries, ring, memory, k_columns, v_columns, items, output, source, batch, work)),
            ],
            [1],
            [OPTIONS.producer_registers],
        )
    else:
        gl.warp_specialize(
            [
                (multiply, (0, OPTIONS) + shared),  # noqa: RUF005
                (multiply, (1, OPTIONS) + shared),  # noqa: RUF005
                (multiply, (2, OPTIONS) + shared),  # noqa: RUF005
                (produce, (OPTIONS, queries, ring, memory, k_columns, v_columns, items, output, source, batch, work)),
            ],
            [4, 4, 1],
            [OPTIONS.registers, OPTIONS.registers, OPTIONS.producer_registers],
        )
