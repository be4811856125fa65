"""The kernel: its arguments, its shared memory, and the work of its warps.

A CTA has eight warps that accumulate (`output`; four with 256 channels), four that compute weights (`softmax`), and one
that copies (`load`). Registers are scarce in the first two.
"""

from __future__ import annotations

from ...decode.work import DecodeBatch, DecodeWork, assign
from ...gluon import gl, gluon
from .load import PRODUCER_REGISTERS, LatentSource, allocate, produce
from .output import accumulate
from .softmax import weigh


@gluon.jit(do_not_specialize=[
    "table_stride", "num_seqs", "num_tokens", "max_q", "row_tiles", "workers", "parts",
])  # fmt: skip
def latent_kernel(q_desc, q_rope_desc, codes_desc, rope_desc, scales_desc, table_ptr, table_stride, lengths_ptr,
                  bounds_ptr, leftpad_ptr, parts_ptr, lse_ptr, more_ptr, num_seqs, num_tokens, max_q, row_tiles,
                  workers, parts, OPTIONS: gl.constexpr):  # fmt: skip
    """A CTA for each worker and row tile. Neighbors read the same pages at the same time for other row tiles.

    In prompts, a CTA for each KV head of each sequence and row tile: those that see most are the first.
    """
    row_tile = gl.program_id(0) % row_tiles
    worker = gl.program_id(0) // row_tiles
    if OPTIONS.prompt:
        row_tile = row_tiles - 1 - row_tile
    batch = DecodeBatch(
        lengths_ptr, bounds_ptr, leftpad_ptr, num_seqs, gl.to_tensor(OPTIONS.heads), max_q, gl.to_tensor(0),
        row_tile * OPTIONS.rows, OPTIONS,
    )  # fmt: skip
    source = LatentSource(q_desc, q_rope_desc, codes_desc, rope_desc, scales_desc, table_ptr, table_stride)
    memory = allocate(source, OPTIONS)
    memory.open(gl.num_warps())
    # The kernel runs beside the one that rounds queries. Only what reads these waits: the producer, before it copies
    # them, and `softmax`. (If the kernel after this one began as early, a short one would be slower: measured.)
    if OPTIONS.prompt:
        seq = worker // OPTIONS.heads
        pages = batch.sequence(seq).places
        zero = gl.to_tensor(0)
        work = DecodeWork(zero, zero + 1, pages, zero, zero, pages, seq, worker % OPTIONS.heads, zero)
    else:
        work = assign(batch, worker, workers)
    part = num_tokens * (OPTIONS.heads * OPTIONS.group) + (row_tile * workers + worker) * OPTIONS.rows
    gl.warp_specialize([
        (accumulate, (memory, parts_ptr, OPTIONS)),
        (weigh, (memory, lse_ptr, parts, more_ptr, part + OPTIONS.rows, OPTIONS)),
        (produce, (memory, source, batch, work, part, row_tile, row_tiles, OPTIONS)),
    ], [4, 1], [OPTIONS.softmax_registers, PRODUCER_REGISTERS])  # fmt: skip
