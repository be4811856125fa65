"""The kernel: its arguments, its shared memory, and the work of its warps.

A CTA has `PrefillOptions.partitions`, of one warpgroup or two, that multiply `PrefillOptions.rows` query rows each
(`multiply`), and one warp that claims work, reads the page table and loads the operands by TMA (`producer`). Registers
are scarce; shared memory is not. A comment that begins with `ptxas` explains an expression whose form saves registers,
and names the case of `compile_prefill.py` that spills without it.
"""

from __future__ import annotations

from ..gluon import fence_async_shared, gdc_wait, gl, gluon, mbarrier, reinterpret
from ..memory import address_of, allocate_barriers, allocate_numbers
from ..tiles import allocate_k, v_layout
from .epilogue import PrefillOutput
from .items import FIELDS, Items, Means
from .multiply import multiply
from .plan import PrefillNumbers
from .producer import PRODUCER_REGISTERS, PrefillSource, produce
from .queries import PrefillQueries, store_signs
from .ring import PrefillRing
from .schedule import PrefillBatch

NUMBERS = (*PrefillNumbers._fields, "scale", "cap", "new_keys")


@gluon.jit(do_not_specialize=NUMBERS)  # one kernel for all shapes
def prefill_kernel(q_desc, k_desc, v_desc, out_desc, out_ptr, lse_ptr, pool_ptr, k_mean_ptr, v_mean_ptr, table_ptr,
                   lengths_ptr, bounds_ptr, sinks_ptr, padding_ptr, counter_ptr, out_stride_b, out_stride_t,
                   out_stride_h, num_tokens, max_q, num_seqs, num_q_heads, num_kv_heads, table_width, causal, window,
                   parts, min_tiles, wave, wave_rows, wave_pages, plane, scale, cap, new_keys,
                   OPTIONS: gl.constexpr):  # fmt: skip
    """The arguments of a launch, which `plan` and `attention` make. Strides of the output are in units of 8 elements.

    ptxas: d128-q8-long-no-lse. With `new_keys` before the other numbers it spills in the loop.

    Without a table, and then without lengths, the launch before this one writes the pages. They are in the order of
    sequences, each of which has `new_keys` keys.
    """
    PARTITIONS: gl.constexpr = OPTIONS.partitions
    ROWS: gl.constexpr = OPTIONS.rows
    WIDTH: gl.constexpr = OPTIONS.width
    STAGES: gl.constexpr = OPTIONS.stages
    TILE: gl.constexpr = OPTIONS.tile
    barriers = allocate_barriers(4 * STAGES)
    address = address_of(barriers)
    Q16: gl.constexpr = q_desc.dtype.primitive_bitwidth == 16
    USES_K: gl.constexpr = k_mean_ptr is not None and (lse_ptr is not None or OPTIONS.softcap or sinks_ptr is not None)
    headers = (pool_ptr + OPTIONS.layout.header_offset).to(gl.pointer_type(gl.float32))
    FLAT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], q_desc.dtype)
    # The memory of 16-bit rows is free after rounding, that of FP8 rows after the products.
    ITEMS: gl.constexpr = 1 if Q16 else 2
    blocks = gl.allocate_shared_memory(q_desc.dtype, [ITEMS * PARTITIONS, 1, ROWS, 1, WIDTH], q_desc.layout)
    raw = reinterpret(blocks, q_desc.dtype, [ITEMS * PARTITIONS, ROWS, WIDTH], FLAT)
    if Q16:
        BYTES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], k_desc.dtype)
        codes = gl.allocate_shared_memory(k_desc.dtype, [PARTITIONS, ROWS, WIDTH], BYTES)
        rest = reinterpret(blocks, k_desc.dtype, [2 * PARTITIONS, ROWS, WIDTH], BYTES)
    else:
        codes = raw
        rest = raw
    PARTS: gl.constexpr = v_desc.block_type.shape[1]  # of V's channels, each of them one product
    k_tiles = allocate_k(k_desc, STAGES)
    v_tiles = gl.allocate_shared_memory(
        gl.float8e4nv, [STAGES * PARTS, WIDTH // PARTS, TILE], v_layout(WIDTH // PARTS, TILE)
    )
    scales = allocate_numbers(gl.float32, 2 * STAGES, 1)
    ones = gl.allocate_shared_memory(
        gl.float8e4nv, [8, TILE], gl.NVMMASharedLayout.get_default_for([8, TILE], gl.float8e4nv)
    )
    bits = gl.full([8, TILE], 0x38, gl.uint8, gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0]))
    ones.store(bits.to(gl.float8e4nv, bitcast=True))
    if Q16 and OPTIONS.rotate:
        signs = gl.allocate_shared_memory(q_desc.dtype, [16, 16], gl.SwizzledSharedLayout(8, 1, 1, [0, 1]))
        store_signs(signs)
    else:
        signs: gl.constexpr = None
    mean_memory = allocate_numbers(gl.float32, 4, WIDTH if WIDTH < 256 else 1)
    fields = allocate_numbers(gl.int32, 2 * FIELDS, 1)
    v_units = allocate_numbers(gl.float32, 2, 1)
    mean_score = allocate_numbers(gl.float32, PARTITIONS, ROWS)
    factor = allocate_numbers(gl.float32, PARTITIONS, ROWS if PARTITIONS == 3 else 1)
    if out_desc is not None:
        OUT: gl.constexpr = [PARTITIONS] + out_desc.block_type.shape  # noqa: RUF005
        out_memory = gl.allocate_shared_memory(out_desc.dtype, OUT, out_desc.layout)
    else:
        out_memory: gl.constexpr = None
    queries = PrefillQueries(
        codes=codes, raw=raw, rest=rest, signs=signs, mean_score=mean_score, factor=factor,
        full=allocate_barriers(PARTITIONS), empty=allocate_barriers(PARTITIONS), Q16=Q16,
        REST=Q16 and (OPTIONS.exact or not (OPTIONS.rotate and k_desc.dtype == gl.int8)),
    )  # fmt: skip
    ring = PrefillRing(
        k=k_tiles, v=v_tiles, scales=scales, ones=ones, barriers=barriers, address=address, STAGES=STAGES
    )
    for i in gl.static_range(PARTITIONS):
        mbarrier.init(queries.full.index(i), 1)
        mbarrier.init(queries.empty.index(i), 1)
    ring.open(ROWS // 16 if PARTITIONS == 1 else PARTITIONS)
    fence_async_shared()  # TMA and the tensor cores see the barriers and the ones
    items = Items(fields=fields, v_unit=v_units)
    means = Means(memory=mean_memory, k=k_mean_ptr, v=v_mean_ptr, USES_K=USES_K)
    output = PrefillOutput(
        desc=out_desc, memory=out_memory, ptr=out_ptr, stride_b=out_stride_b, stride_t=out_stride_t,
        stride_h=out_stride_h, lse=lse_ptr, sinks=sinks_ptr, num_tokens=num_tokens, num_q_heads=num_q_heads,
        plane=plane,
    )  # fmt: skip
    batch = PrefillBatch(
        bounds=bounds_ptr, lengths=lengths_ptr, new_keys=new_keys, padding=padding_ptr, num_tokens=num_tokens,
        num_seqs=num_seqs, num_q_heads=num_q_heads, window=window, wave=wave, wave_rows=wave_rows,
        wave_pages=wave_pages, BLOCK=PARTITIONS * ROWS,
    )  # fmt: skip
    source = PrefillSource(
        q=q_desc, k=k_desc, v=v_desc, queries=blocks, headers=headers, table=table_ptr, table_width=table_width,
        num_kv_heads=num_kv_heads, batch=batch, counter=counter_ptr, max_q=max_q, causal=causal, parts=parts,
        min_tiles=min_tiles, OPTIONS=OPTIONS,
    )  # fmt: skip
    # The kernel is launched while the previous one ends. From here on it reads and writes memory that the previous
    # kernel uses. Without a table that kernel writes pages, which only the producer reads, so only the producer waits.
    if table_ptr is not None:
        gdc_wait()
    shared = (queries, ring, items, means, output, causal, window, scale, cap)
    sources = (queries, ring, items, means, output, source)
    if PARTITIONS == 1:
        gl.warp_specialize(
            [(multiply, (0, OPTIONS) + shared), (produce, sources)],  # noqa: RUF005 - Triton knows no starred elements
            [1],
            [PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (multiply, (0, OPTIONS) + shared),  # noqa: RUF005
                (multiply, (1, OPTIONS) + shared),  # noqa: RUF005
                (multiply, (2, OPTIONS) + shared),  # noqa: RUF005
                (produce, sources),
            ],
            [4, 4, 1],
            [OPTIONS.registers, OPTIONS.registers, PRODUCER_REGISTERS],
        )
