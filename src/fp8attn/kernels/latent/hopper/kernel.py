"""The kernel: its arguments, its shared memory, and the work of its warps.

A CTA has eight warps that accumulate (`output`; four with 256 channels), four that compute weights (`softmax`), and one
that copies (`load`). Registers are scarce in the first two.
"""

from __future__ import annotations

from ...decode.work import DecodeBatch, assign
from ...gluon import gl, gluon
from .load import PRODUCER_REGISTERS, LatentSource, allocate, produce
from .output import accumulate
from .softmax import weigh


@gluon.jit(do_not_specialize=[
    "table_stride", "num_seqs", "num_tokens", "max_q", "row_tiles", "workers", "parts",
])  # fmt: skip
def latent_kernel(q_desc, q_rope_desc, codes_desc, rope_desc, scales_desc, table_ptr, table_stride, lengths_ptr,
                  bounds_ptr, leftpad_ptr, numbers_ptr, more_ptr, num_seqs, num_tokens, max_q, row_tiles, workers,
                  parts, OPTIONS: gl.constexpr):  # fmt: skip
    """A CTA for each worker and row tile. Neighbors read the same pages at the same time for other row tiles."""
    row_tile = gl.program_id(0) % row_tiles
    worker = gl.program_id(0) // row_tiles
    batch = DecodeBatch(
        lengths_ptr, bounds_ptr, leftpad_ptr, num_seqs, gl.to_tensor(OPTIONS.heads), max_q, gl.to_tensor(0),
        row_tile * OPTIONS.rows, OPTIONS,
    )  # fmt: skip
    source = LatentSource(q_desc, q_rope_desc, codes_desc, rope_desc, scales_desc, table_ptr, table_stride)
    memory = allocate(source, OPTIONS)
    memory.open(gl.num_warps())
    # The kernel runs beside the one that rounds queries. Only what reads these waits: the producer, before it copies
    # them, and `softmax`. (If the kernel after this one began as early, a short one would be slower: measured.)
    work = assign(batch, worker, workers)
    part = num_tokens * OPTIONS.group + (row_tile * workers + worker) * OPTIONS.rows
    lse_ptr = numbers_ptr + parts.to(gl.int64) * OPTIONS.part_width
    gl.warp_specialize([
        (accumulate, (memory, numbers_ptr, OPTIONS)),
        (weigh, (memory, lse_ptr, parts, more_ptr, part + OPTIONS.rows, batch.row0, OPTIONS)),
        (produce, (memory, source, batch, work, part, row_tile, row_tiles, OPTIONS)),
    ], [4, 1], [OPTIONS.softmax_registers, PRODUCER_REGISTERS])  # fmt: skip
