"""The kernel before attention: it rotates the queries and rounds them to INT8 digits, with a factor for each row."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ....formats.rotation import MAX_BLOCK
from ...common import LOG2E
from ...rotation import hadamard

SMALLEST = tl.constexpr(67 << 23)  # 2^-60, in bits: a row of smaller values is rounded as if this were its largest
ROUND = tl.constexpr(1.5 * 2**23)  # a sum with it has the bits of this number plus the rounded integer
BLOCK = tl.constexpr(MAX_BLOCK)  # channels of a factor, and of the rotation
ROUND_BITS = tl.constexpr(0x4B400000)
MOST_ROPE = tl.constexpr(32768.0)  # of a query's RoPE part in FP16


@triton.jit(do_not_specialize=["stride_t", "stride_h", "parts", "num_seqs", "max_q", "row_tiles"])
def latent_queries_kernel(q_ptr, stride_t, stride_h, bounds_ptr, mean_ptr, factor_ptr, codes_ptr, rope_ptr, numbers_ptr,
                          parts, num_seqs, max_q, row_tiles, scale,
                          OPTIONS: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """Rounds N rows `[rank + rope]` a program. A score is the integer product times the token's scale plus the RoPE
    product, times the row's factor: an exponent of two.

    One unit serves both parts of a row. It is the largest magnitude of the latent part by 127 or 127 * 128, or more if
    the RoPE part would not fit into FP16.
    """
    ROWS: tl.constexpr = OPTIONS.rows
    TOP: tl.constexpr = 127.0 if OPTIONS.digits == 1 else 127.0 * 128
    gdc_wait()
    block = tl.program_id(0) // (ROWS // N)
    row = (tl.program_id(0) % (ROWS // N)) * N + tl.arange(0, N)[:, None]
    seq = block // row_tiles
    query = seq * max_q
    num_q = max_q
    if OPTIONS.ragged:
        query = tl.load(bounds_ptr + seq)
        num_q = tl.load(bounds_ptr + seq + 1) - query
    in_seq = (block % row_tiles) * ROWS + row
    inside = in_seq < num_q * OPTIONS.group
    token = (query + in_seq // OPTIONS.group).to(tl.int64)
    head = in_seq % OPTIONS.group
    at = q_ptr + token * stride_t + head.to(tl.int64) * stride_h
    channel = tl.arange(0, OPTIONS.rank)[None, :]
    q = tl.load(at + channel, mask=inside, other=0.0).to(tl.float32)
    lse_ptr = numbers_ptr + parts.to(tl.int64) * OPTIONS.rank
    row_factor_ptr = lse_ptr + parts
    if mean_ptr is not None:
        mean_score = tl.sum(q * tl.load(mean_ptr + channel), 1, keep_dims=True) * (scale * LOG2E)
        mean_scores = row_factor_ptr + num_seqs * row_tiles * ROWS
        tl.store(mean_scores + token * OPTIONS.group + head, mean_score, mask=inside)
    if factor_ptr is not None:
        q *= tl.load(factor_ptr + channel // BLOCK)
    q = hadamard(q, OPTIONS.rank)
    bits = tl.max(tl.abs(q).to(tl.int32, bitcast=True), 1, keep_dims=True)  # NaN is larger than all numbers here
    if OPTIONS.rope > 0:
        rope_channel = tl.arange(0, OPTIONS.rope)[None, :]
        rope = tl.load(at + OPTIONS.rank + rope_channel, mask=inside, other=0.0).to(tl.float32)
        rope_bits = (tl.abs(rope) * (TOP / MOST_ROPE)).to(tl.int32, bitcast=True)
        bits = tl.maximum(bits, tl.max(rope_bits, 1, keep_dims=True))
    largest = tl.maximum(bits, SMALLEST).to(tl.float32, bitcast=True)
    inverse = tl.where(scale < 0, -TOP, TOP) / largest  # the sign of the scale is the queries'
    factor = tl.abs(scale) * LOG2E * largest / TOP
    factor = tl.where(factor < 1e-37, 1e-37, factor)  # times a hidden score it is no NaN
    tl.store(row_factor_ptr + block * ROWS + row, factor)
    x = (q * inverse + ROUND).to(tl.int32, bitcast=True) - ROUND_BITS
    if OPTIONS.digits == 1:
        at_row = block * 64 + row
        tl.store(codes_ptr + at_row.to(tl.int64) * OPTIONS.rank + channel, x.to(tl.int8))
    else:
        at_row = block * 64 + 16 * (row // 8) + row % 8  # the low digits are 8 rows behind: in the same thread
        low = ((x + 64) & 127) - 64
        to = codes_ptr + at_row.to(tl.int64) * OPTIONS.rank + channel
        tl.store(to, ((x - low) >> 7).to(tl.int8))
        tl.store(to + 8 * OPTIONS.rank, low.to(tl.int8))
    if OPTIONS.rope > 0:
        tl.store(rope_ptr + at_row.to(tl.int64) * OPTIONS.rope + rope_channel, (rope * inverse).to(tl.float16))
