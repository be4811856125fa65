"""The kernel: the code before warp specialization, and the arguments of each partition."""

from __future__ import annotations

from ..gluon import gdc_wait, gl, gluon
from .combine import DecodeOutput, Parts, clear_rest
from .consume import consume
from .load import PRODUCER_REGISTERS, DecodeSource, make_ring, produce, request_first
from .plan import DecodeNumbers
from .queries import DecodeQueries
from .work import DecodeBatch, assign


@gluon.jit(do_not_specialize=["table_stride", "plane", *DecodeNumbers._fields])
def decode_kernel(q_ptr, q_stride_t, q_stride_h, k_desc, v_desc, pool_ptr, k_mean_ptr, v_mean_ptr, table_ptr,
                  table_stride, lengths_ptr, bounds_ptr, leftpad_ptr, sinks_ptr, out_ptr, lse_ptr, part_ptr, plane,
                  state_ptr, num_seqs, heads, max_q, num_tokens, window, workers, scale, softcap,
                  OPTIONS: gl.constexpr):  # fmt: skip
    """A CTA for each worker and row tile. Neighbors read the same pages at the same time for other row tiles, so memory
    is read once.
    """
    ROWS: gl.constexpr = OPTIONS.rows
    row_tiles = 1
    if not OPTIONS.one_row_tile:
        row_tiles = (max_q * OPTIONS.group + ROWS - 1) // ROWS
    row_tile = gl.program_id(0) % row_tiles
    worker = gl.program_id(0) // row_tiles
    batch = DecodeBatch(lengths_ptr, bounds_ptr, leftpad_ptr, num_seqs, heads, max_q, window, row_tile * ROWS, OPTIONS)
    # Every row tile has its own parts, as its own ranges.
    first = row_tile * (2 * workers) * ROWS
    sums_ptr = part_ptr + plane * OPTIONS.width
    parts = Parts(
        part_ptr + first * OPTIONS.width,
        sums_ptr + 2 * first,
        sums_ptr + 2 * plane + first,
        state_ptr + row_tile * workers,
        k_mean_ptr is not None,
    )
    source = DecodeSource(k_desc, v_desc, pool_ptr, table_ptr, table_stride, OPTIONS)
    queries = DecodeQueries(q_ptr, q_stride_t, q_stride_h, k_mean_ptr, scale)
    output = DecodeOutput(out_ptr, lse_ptr, v_mean_ptr, sinks_ptr)
    # Before warp specialization, do only the work that the first tile waits for, and load the first queries. Later they
    # would wait for the pages that the SM has requested.
    ring = make_ring(k_desc, OPTIONS)
    ring.open()
    # The kernel is launched while `append` runs. From here on it reads and writes memory that previous kernels use.
    gdc_wait()
    work = assign(batch, worker, workers)
    first_q, first_k_mean = queries.load(batch, batch.sequence(work.seq), work.head)
    requested = request_first(ring, batch, work, source)
    gl.warp_specialize([
        (consume, (ring, batch, work, parts, first_q, first_k_mean, queries, output, softcap)),
        (produce, (ring, batch, work, requested, source)),
    ], [1], [PRODUCER_REGISTERS])  # fmt: skip
    if OPTIONS.ragged:
        clear_rest(batch, num_tokens, output)
