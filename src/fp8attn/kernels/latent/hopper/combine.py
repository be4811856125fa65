"""The kernel after attention: it adds the parts of each row, and takes the latents' rotation, factor and mean back."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ....formats.rotation import MAX_BLOCK
from ...common import HIDDEN, HIDDEN_FINITE, LN2
from ...rotation import hadamard_back

BLOCK = tl.constexpr(MAX_BLOCK)  # channels of a block of the rotation, which has one factor


@triton.jit(do_not_specialize=["parts", "num_seqs", "num_tokens", "row_tiles"])
def latent_combine_kernel(parts_ptr, parts_lse_ptr, more_ptr, bounds_ptr, mean_ptr, factor_ptr, out_ptr, lse_ptr,
                          parts, num_seqs, num_tokens, row_tiles,
                          OPTIONS: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
                          CHANNELS: tl.constexpr):  # fmt: skip
    """R rows and some channels of `out [tokens, heads, rank]` a program, from S parts at a time, in order. A
    row and its first part may have the same memory."""
    RANK: tl.constexpr = OPTIONS.rank
    HEADS: tl.constexpr = OPTIONS.heads * OPTIONS.group
    gdc_wait()
    row = (tl.program_id(0) // (RANK // CHANNELS)) * R + tl.arange(0, R)
    block = tl.program_id(0) % (RANK // CHANNELS)
    channel = block * CHANNELS + tl.arange(0, CHANNELS)
    rows = num_tokens * HEADS
    kv_head = (row % HEADS // OPTIONS.group)[:, None]
    inside = row < rows
    written = inside  # by attention
    if OPTIONS.ragged:
        written = inside & (row < tl.load(bounds_ptr + num_seqs) * HEADS)
    more = tl.load(more_ptr + 2 * row, mask=written, other=0)
    count = tl.load(more_ptr + 2 * row + 1, mask=written, other=0)
    # The first part is where the row is: it is loaded beside what says how many there are.
    top = tl.load(parts_lse_ptr + row, mask=written, other=HIDDEN_FINITE)
    own = row.to(tl.int64)[:, None] * RANK + channel[None, :]
    out = tl.load(parts_ptr + own, mask=written[:, None], other=0.0).to(tl.float32)
    if OPTIONS.digits == 1:
        out *= tl.load(parts_lse_ptr + parts + row, mask=written, other=0.0)[:, None]
    total = tl.full([R], 1.0, tl.float32)
    for first in range(0, tl.max(count, 0), S):
        i = first + tl.arange(0, S)[None, :]
        part = more[:, None] + i * OPTIONS.rows
        here = i < count[:, None]
        lse = tl.load(parts_lse_ptr + part, mask=here, other=HIDDEN_FINITE)
        at = part.to(tl.int64)[:, :, None] * RANK + channel[None, None, :]
        o = tl.load(parts_ptr + at, mask=here[:, :, None], other=0.0).to(tl.float32)
        new_top = tl.maximum(top, tl.max(lse, 1))
        weight = tl.where(here, tl.exp2(lse - new_top[:, None]), 0.0)
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(weight, 1)
        if OPTIONS.digits == 1:
            weight *= tl.load(parts_lse_ptr + parts + part, mask=here, other=0.0)
        out = out * rescale[:, None] + tl.sum(o * weight[:, :, None], 1)
        top = new_top
    hidden = (top == HIDDEN_FINITE) & (total == total)  # a row without keys, or of no sequence; a NaN stays
    out = hadamard_back(out / total[:, None], CHANNELS)
    if factor_ptr is not None:
        out *= tl.load(factor_ptr + kv_head * (RANK // BLOCK) + channel[None, :] // BLOCK)
    lse = top + tl.log2(total)
    if mean_ptr is not None:
        out += tl.load(mean_ptr + kv_head * RANK + channel[None, :])
        mean_scores = parts_lse_ptr + 2 * parts + num_seqs * OPTIONS.heads * row_tiles * OPTIONS.rows
        lse += tl.load(mean_scores + row, mask=written, other=0.0)
    out = tl.where(hidden[:, None], 0.0, out)
    tl.store(out_ptr + own, out.to(out_ptr.dtype.element_ty), mask=inside[:, None])
    if block == 0:
        tl.store(lse_ptr + row, tl.where(hidden, HIDDEN, lse * LN2), mask=inside)
