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
    row and its first part may have the same memory. Of many rows, a thread has channels in each quarter of a block:
    fewer steps of the rotation are between threads.
    """
    RANK: tl.constexpr = OPTIONS.rank
    HEADS: tl.constexpr = OPTIONS.heads * OPTIONS.group
    gdc_wait()
    row = (tl.program_id(0) // (RANK // CHANNELS)) * R + tl.arange(0, R)
    block = tl.program_id(0) % (RANK // CHANNELS)
    COUNT: tl.constexpr = 4 if R > 1 else 1  # tensors of a row
    WIDTH: tl.constexpr = CHANNELS // COUNT
    channel = block * CHANNELS + tl.arange(0, WIDTH)
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
    out = ()
    for i in tl.static_range(COUNT):
        out += (tl.load(parts_ptr + own + i * WIDTH, mask=written[:, None], other=0.0).to(tl.float32),)
    unit = tl.full([R], 1.0, tl.float32)  # of `out`
    if OPTIONS.digits == 1:
        unit = tl.load(parts_lse_ptr + parts + row, mask=written, other=0.0)
    total = tl.full([R], 1.0, tl.float32)
    for first in range(0, tl.max(count, 0), S):
        each = first + tl.arange(0, S)[None, :]
        part = more[:, None] + each * OPTIONS.rows
        here = each < count[:, None]
        lse = tl.load(parts_lse_ptr + part, mask=here, other=HIDDEN_FINITE)
        at = part.to(tl.int64)[:, :, None] * RANK + channel[None, None, :]
        loaded = ()
        for i in tl.static_range(COUNT):
            loaded += (tl.load(parts_ptr + at + i * WIDTH, mask=here[:, :, None], other=0.0).to(tl.float32),)
        new_top = tl.maximum(top, tl.max(lse, 1))
        weight = tl.where(here, tl.exp2(lse - new_top[:, None]), 0.0)
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(weight, 1)
        if OPTIONS.digits == 1:
            weight *= tl.load(parts_lse_ptr + parts + part, mask=here, other=0.0)
        rescale *= unit
        added = ()
        for i in tl.static_range(COUNT):
            added += (out[i] * rescale[:, None] + tl.sum(loaded[i] * weight[:, :, None], 1),)
        out = added
        unit = tl.full([R], 1.0, tl.float32)
        top = new_top
    hidden = (top == HIDDEN_FINITE) & (total == total)  # a row without keys, or of no sequence; a NaN stays
    lse = top + tl.log2(total)
    if mean_ptr is not None:
        mean_scores = parts_lse_ptr + 2 * parts + num_seqs * OPTIONS.heads * row_tiles * OPTIONS.rows
        lse += tl.load(mean_scores + row, mask=written, other=0.0)
    if block == 0:
        tl.store(lse_ptr + row, tl.where(hidden, HIDDEN, lse * LN2), mask=inside)
    out = hadamard_back(out, CHANNELS)
    unit /= total
    for i in tl.static_range(COUNT):
        o = out[i] * unit[:, None]
        if factor_ptr is not None:
            o *= tl.load(factor_ptr + kv_head * (RANK // BLOCK) + channel[None, :] // BLOCK)
        if mean_ptr is not None:  # without it, hidden rows are zero
            o += tl.load(mean_ptr + kv_head * RANK + channel[None, :] + i * WIDTH)
            o = tl.where(hidden[:, None], 0.0, o)
        tl.store(out_ptr + own + i * WIDTH, o.to(out_ptr.dtype.element_ty), mask=inside[:, None])
