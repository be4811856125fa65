"""A step: up to 16 new tokens of each sequence, in one launch.

A program writes a few heads of a sequence's K or V. The last program that reads a sequence's length advances it, unless
the length counts the new tokens already.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..codec import finite, inverse, needed_scale, to_codes, with_headroom
from ..common import GROUP, PAGE, new_tokens, slot_of, v_position
from ..rotation import hadamard
from .rows import load_halves, load_rows, store_rows
from .slot import codes_ptr_of, launch_dependents, rescale, round_again, scale_ptr_of, store_scale

MAX_PROGRAMS = 64  # for one sequence

_TURN = tl.constexpr(2**31 // MAX_PROGRAMS)  # more than any length (`_advance`)
_NONE = tl.constexpr(1 << 62)  # where all tokens fit (`_first_over`)


@triton.jit
def _advance(length_ptr, new, programs):
    """Read the length of a sequence before this launch, and add `new` to it for later launches.

    Each of the sequence's programs reads the length once, and counts its read in the upper bits. When the count is
    complete, all programs have the length, and the last one writes the new length.
    """
    counted = tl.atomic_add(length_ptr, _TURN, sem="relaxed")
    length = counted % _TURN
    if counted // _TURN == programs - 1:
        tl.store(length_ptr, length + new)
    return length


@triton.jit
def _rows(x):
    """`[HEADS, T]` as the rows of a tile, `[HEADS * T, 1]`."""
    return tl.reshape(x, (x.numel, 1))


@triton.jit
def _first_over(need, token, scale, new):
    """The first `new` token whose `need` is above `scale`, along the last axis: `token << 32 | the bits of need`, or
    `_NONE`.

    An empty page has a scale of zero, so its first token is above it.
    """
    key = (token.to(tl.int64) << 32) | need.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.min(tl.where(new & (need > scale), key, _NONE), len(need.shape) - 1)


@triton.jit
def _settle_slots(x, need, token, new, scale, slot_ptr, exists, old, CODES: tl.constexpr):
    """Settle the scales of some heads' slots at `slot_ptr [HEADS]`, which have `old` tokens, from the scales that their
    tokens need.

    Args:
        x: `[HEADS * T, C]` FP32.
        need, token, new: `[HEADS, T]`, the scale that a token needs, its number in the step, and whether it is in these
            pages.
        scale: `[HEADS]`, zero for an empty page.
        exists: `[HEADS]`, whether the head exists.
    Returns:
        `x`, with codes where a later token made the scale grow; the factors of its rows before they are rounded,
        `[HEADS, T]`; and the scales.
    """
    HEADS: tl.constexpr = need.shape[0]
    T: tl.constexpr = need.shape[1]
    CODEC: tl.constexpr = CODES.codec
    first_fresh = tl.zeros((HEADS,), tl.int32)  # rows before it are codes, to be multiplied by `ratio`
    ratio = tl.full((HEADS,), 1.0, tl.float32)
    # How often any of the scales grows. (A `while` that carries the tile is more than Triton 3.6 compiles.)
    settled = scale
    count = 0
    key = _first_over(need, token, settled[:, None], new)
    while tl.min(key) < _NONE:
        settled = tl.where(key < _NONE, with_headroom(key.to(tl.int32).to(tl.float32, bitcast=True), CODEC), settled)
        key = _first_over(need, token, settled[:, None], new)
        count += 1
    key = _first_over(need, token, scale[:, None], new)
    for _ in range(count):
        grows = key < _NONE
        index = (key >> 32).to(tl.int32)
        grown = tl.where(grows, with_headroom(key.to(tl.int32).to(tl.float32, bitcast=True), CODEC), scale)
        if T > 1:
            before = new & grows[:, None] & (token < index[:, None])
            factor = tl.where(token < first_fresh[:, None], ratio[:, None], inverse(scale, CODEC)[:, None])
            x = round_again(x, _rows(before), _rows(factor), CODES, True)
            first_fresh = tl.where(grows, index, first_fresh)
        ratio = tl.where(grows, scale * inverse(grown, CODEC), ratio)
        if old > 0:
            codes_ptr = codes_ptr_of(slot_ptr, CODES)
            for head in range(HEADS):
                this = (tl.arange(0, HEADS) == head) & grows & exists
                if tl.max(this.to(tl.int32)) > 0:
                    address = tl.sum(tl.where(this, codes_ptr.to(tl.int64), 0)).to(tl.pointer_type(tl.uint8))
                    rescale(address, tl.sum(tl.where(this, ratio, 0.0)), old, CODES)
        scale = grown
        key = _first_over(need, token, scale[:, None], new)
    return x, tl.where(token < first_fresh[:, None], ratio[:, None], inverse(scale, CODEC)[:, None]), scale


@triton.jit
def _clear_values(slot_ptr, exists, LAYOUT: tl.constexpr):
    """Set V of some heads' slots to zero. Attention multiplies tokens past the end by zero, and 0 * NaN
    would be NaN.
    """
    WORDS: tl.constexpr = 512  # at a time, a divisor of every page's
    first = (slot_ptr + LAYOUT.v_offset).to(tl.pointer_type(tl.int32))
    for word in range(0, LAYOUT.v_bytes // 4, WORDS):
        i = word + tl.arange(0, WORDS)
        tl.store(first[:, None] + i[None, :], tl.zeros((1, WORDS), tl.int32), mask=exists[:, None])
    tl.debug_barrier()  # other threads' codes are stored over it


@triton.jit
def _write(x, token, new, heads, sequence, pool_ptr, programs, num_kv_heads, CODES: tl.constexpr):
    """Quantize `x [HEADS * T, C]` and write it at the end of a sequence.

    Args:
        token: `[T]`, the numbers of the tokens; those below `new` exist.
        heads: the heads' numbers `[HEADS]`, and whether they exist.
        sequence: pointers to its length and to its row of the page table.
    """
    head, exists = heads
    seqlens_ptr, table_ptr = sequence
    HEADS: tl.constexpr = head.shape[0]
    T: tl.constexpr = token.shape[0]
    D: tl.constexpr = CODES.head_dim
    CODEC: tl.constexpr = CODES.codec
    IS_V: tl.constexpr = CODES.is_v
    STATIC: tl.constexpr = CODES.static
    LAYOUT: tl.constexpr = CODES.layout
    length = _advance(seqlens_ptr, new, programs) if CODES.advance else tl.load(seqlens_ptr) - new
    old = length % PAGE
    table_ptr += length // PAGE
    slot_ptr = slot_of(pool_ptr, tl.load(table_ptr), num_kv_heads, head, LAYOUT)
    scale_ptr = scale_ptr_of(slot_ptr, CODES)
    scale = tl.load(scale_ptr)
    next_ptr = slot_ptr
    crosses = T > 1 and old + new > PAGE
    if crosses:
        next_ptr = slot_of(pool_ptr, tl.load(table_ptr + 1), num_kv_heads, head, LAYOUT)
    next_scale_ptr = scale_ptr_of(next_ptr, CODES)
    tokens = tl.broadcast_to(token[None, :], (HEADS, T))
    here = old + tokens < PAGE
    nan = tl.reshape(tl.max((x != x).to(tl.int32), 1), (HEADS, T)) > 0
    if STATIC:
        next_scale = tl.load(next_scale_ptr) if T > 1 else scale
        factor = tl.where(here, inverse(scale, CODEC)[:, None], inverse(next_scale, CODEC)[:, None])
    else:
        need = tl.reshape(needed_scale(tl.max(finite(x), 1), CODEC), (HEADS, T))
        scale = tl.where(old > 0, scale, 0.0)
        x, factor, scale = _settle_slots(x, need, tokens, here, scale, slot_ptr, exists, old, CODES)
        next_scale = scale
        if crosses:
            empty = tl.zeros((HEADS,), tl.float32)
            x, next_factor, next_scale = _settle_slots(x, need, tokens, ~here, empty, next_ptr, exists, 0, CODES)
            factor = tl.where(here, factor, next_factor)
    x *= _rows(factor)
    codes = to_codes(x, CODEC, CODES.native)
    position = (old + tokens) % PAGE
    if not STATIC:
        store_scale(scale_ptr, scale, tl.max((nan & here).to(tl.int32), 1) > 0, CODES, exists)
        if crosses:
            store_scale(next_scale_ptr, next_scale, tl.max((nan & ~here).to(tl.int32), 1) > 0, CODES, exists)
    if IS_V:
        if old == 0:
            _clear_values(slot_ptr, exists, LAYOUT)
        if crosses:
            _clear_values(next_ptr, exists, LAYOUT)
    offset = (
        LAYOUT.v_offset + position // GROUP * (D * GROUP) + v_position(position)
        if IS_V
        else LAYOUT.k_offset + position * D
    )
    rows = tl.where(here, slot_ptr[:, None], next_ptr[:, None]) + offset
    valid = exists[:, None] & (tl.arange(0, T) < new)[None, :]
    if IS_V:
        d = tl.arange(0, CODES.width)
        tl.store(_rows(rows) + d * GROUP, codes, mask=_rows(valid) & (d < D))
    else:
        store_rows(_rows(rows), codes, _rows(valid), CODES)


@triton.jit(do_not_specialize=["table_stride", "max_seqlen", "num_kv_heads"])
def step_kernel(
    k_ptr, v_ptr, pool_ptr, k_mean_ptr, v_mean_ptr, table_ptr, seqlens_ptr, cu_seqlens_ptr,
    k_stride_t, k_stride_h, v_stride_t, v_stride_h, table_stride, max_seqlen, num_kv_heads, OPTIONS: tl.constexpr,
):  # fmt: skip
    """The kernel. A program writes some heads of K or V of a sequence."""
    K: tl.constexpr = OPTIONS.k
    V: tl.constexpr = OPTIONS.v
    HEADS: tl.constexpr = OPTIONS.heads
    T: tl.constexpr = OPTIONS.tokens
    if OPTIONS.hopper:
        launch_dependents()
    programs = 2 * tl.cdiv(num_kv_heads, HEADS)  # of a sequence: some heads of K, or of V
    seq = tl.program_id(0) // programs
    program = tl.program_id(0) % programs
    start, new = new_tokens(cu_seqlens_ptr, seqlens_ptr, seq, max_seqlen, K.advance)
    if new <= 0:
        return
    # Past the end, repeat the last token, so that only the stores need a mask.
    token = tl.minimum(tl.arange(0, T), new - 1)
    row = (start + token).to(tl.int64)[None, :]
    head = program // 2 * HEADS + tl.arange(0, HEADS)
    exists = head < num_kv_heads
    head = tl.minimum(head, num_kv_heads - 1).to(tl.int64)
    every = tl.zeros((HEADS, T), tl.int64)
    table_ptr += seq.to(tl.int64) * table_stride
    seqlens_ptr += seq
    # The barriers keep the compiler from waiting for the length, then the page, then its scale, before it loads the
    # tokens.
    if program % 2 == 0:
        x = load_halves(k_ptr + _rows(head[:, None] * k_stride_h + row * k_stride_t), K)
        if k_mean_ptr is not None:
            mean = load_rows(k_mean_ptr + _rows(head[:, None] * K.head_dim + every), K)
        tl.debug_barrier()
        if OPTIONS.rotate:
            x = hadamard(x, K.head_dim)
        if k_mean_ptr is not None:
            x -= mean
        _write(x, token, new, (head, exists), (seqlens_ptr, table_ptr), pool_ptr, programs, num_kv_heads, K)
    else:
        x = load_rows(v_ptr + _rows(head[:, None] * v_stride_h + row * v_stride_t), V)
        if v_mean_ptr is not None:
            x -= load_rows(v_mean_ptr + _rows(head[:, None] * V.head_dim + every), V)
        tl.debug_barrier()
        _write(x, token, new, (head, exists), (seqlens_ptr, table_ptr), pool_ptr, programs, num_kv_heads, V)
