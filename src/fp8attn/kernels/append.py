"""Quantize and append: new tokens of K and V become 8-bit codes in pages, a cache's (`append`) or pages of their own (`quantize`).

A decode step (up to `MAX_TOKENS` new tokens a sequence) is one launch of `_step_kernel`: a program writes a few heads of a sequence's K or
V, others apply RoPE to Q, and the last of a sequence's programs to read its length advances it. A longer append goes page by page
(`_page_kernel`): a program reads 128 tokens of a head once, holds them in registers while the page's scale is settled, and writes them. So
does `quantize`, whose tokens have any strides, and whose page table is written along with the pages.

Both settle scales as `numerics.settle` does. A token that does not fit makes the scale grow, and what came before it is rounded again: in
registers what this launch has read (`_regrow`), in memory what the page held (`_shift`).
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from ..layout import FP8, HEADER, PAGE_SIZE, V_GROUP, KVPages, page_bytes
from .fp8 import (
    encode,
    finite,
    from_codes,
    inverse,
    is_native,
    magnitude,
    needed_scale,
    pack_e4m3,
    round_to,
    round_where,
    saturate_int8,
    to_codes,
    to_e4m3,
    to_int8,
    with_headroom,
)
from .launch import MAX_GRID, Constants, constants, launch, num_sms
from .rotation import rotate as rotate_rows
from .rows import load_lanes, load_rows, load_turned, power_of_two, quarters, row_constants, store_rows

MAX_TOKENS = 16  # appends of up to this many tokens go token by token, longer ones page by page
STEP_ELEMENTS = 512  # of K or V: what a program of a step holds, unless one head is more
QUERY_ELEMENTS = 2048  # of Q, likewise
MAX_PROGRAMS = 64  # of a step, for one sequence

_MAX_GRID = tl.constexpr(MAX_GRID)
_PAGE = tl.constexpr(PAGE_SIZE)
_GROUP = tl.constexpr(V_GROUP)
_HEADER = tl.constexpr(HEADER)
_TURN = tl.constexpr(2**31 // MAX_PROGRAMS)  # more than any length (`_take_turn`)
_FLOATS = tl.constexpr(tl.pointer_type(tl.float32))
_NONE = tl.constexpr(1 << 62)  # where all tokens fit (`_first_over`)
_LARGE = tl.constexpr(2.0**38)  # values below it do not saturate under a scale that was settled for them


# Where things lie


@triton.jit
def _slot_bytes(D: tl.constexpr):
    """Of a page of one head."""
    return 2 * _PAGE * D + _HEADER


@triton.jit
def _scale_ptr(slot_ptr, D: tl.constexpr, IS_V: tl.constexpr):
    """Of K's scale or V's, of the page at `slot_ptr`."""
    return (slot_ptr + 2 * _PAGE * D).to(_FLOATS) + (1 if IS_V else 0)


@triton.jit
def _v_position(token):
    """Where a token lies in its group of a V page (`layout.V_POSITION`)."""
    return (token & 1) | ((token >> 2) & 2) | ((token << 1) & 12)


@triton.jit
def _v_token(position):
    """Which token of its group lies at a position (`layout.V_ORDER`)."""
    return (position & 1) | ((position & 2) << 2) | ((position >> 1) & 6)


# Scales


@triton.jit
def _first_over(need, token, scale, new):
    """Of tokens that are `new`, the first whose `need` is above `scale`: `token << 32 | the bits of need`, or `_NONE`. Along the last axis.

    A scale of zero is a page's that holds nothing: its first token is above."""
    key = (token.to(tl.int64) << 32) | need.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.min(tl.where(new & (need > scale), key, _NONE), len(need.shape) - 1)


@triton.jit
def _regrow(x, before, factor, INT8: tl.constexpr, NATIVE: tl.constexpr, SATURATE: tl.constexpr):
    """Codes, as FP32 numbers, of the rows `before [N, 1]` of `x * factor`; the other rows of `x [N, C]` as they are."""
    y = x * tl.where(before, factor, 1.0)
    if INT8 and not SATURATE:
        return round_where(y, before)
    else:
        return tl.where(before, encode(y, INT8, NATIVE), y)


@triton.jit
def _shift(codes_ptr, ratio, old, D: tl.constexpr, IS_V: tl.constexpr, INT8: tl.constexpr, NATIVE: tl.constexpr):
    """Shift the codes of the first `old` tokens at `codes_ptr`, K's or V's of a page, by `ratio` to another scale."""
    # Bytes in the order they lie in, 2048 at a time: few enough for registers, and a divisor of every page.
    SIZE: tl.constexpr = 2048
    for first in range(0, tl.cdiv(old, _GROUP) * (_GROUP * D), SIZE):
        i = first + tl.arange(0, SIZE)
        lies = i // (D * _GROUP) * _GROUP + _v_token(i % _GROUP) if IS_V else i // D
        codes = tl.load(codes_ptr + i)
        shifted = to_codes(from_codes(codes, INT8, NATIVE) * ratio, INT8, NATIVE)
        tl.store(codes_ptr + i, tl.where(lies < old, shifted, codes))
    tl.debug_barrier()  # other threads' stores above cover bytes that are read or written next


# A step: up to MAX_TOKENS tokens a sequence


@triton.jit
def _turn_queries(
    program, q_ptr, out_ptr, cos_ptr, sin_ptr, stride_t, stride_h, out_stride_t, out_stride_h, cos_stride, sin_stride, num_tokens,
    num_heads, D: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, STEP: tl.constexpr, NATIVE: tl.constexpr,
    T: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """RoPE on T tokens of HEADS heads of Q."""
    blocks = tl.cdiv(num_heads, HEADS)
    row = tl.arange(0, T * HEADS)
    token = program // blocks * T + row // HEADS
    head = program % blocks * HEADS + row % HEADS
    valid = ((token < num_tokens) & (head < num_heads))[:, None]
    token = tl.minimum(token, num_tokens - 1).to(tl.int64)
    head = tl.minimum(head, num_heads - 1).to(tl.int64)
    x = load_turned(
        q_ptr + (token * stride_t + head * stride_h)[:, None], cos_ptr + (token * cos_stride)[:, None],
        sin_ptr + (token * sin_stride)[:, None], D, C, HALF, INTERLEAVED, STEP,
    )  # fmt: skip
    out = out_ptr + (token * out_stride_t + head * out_stride_h)[:, None]
    store_rows(out, round_to(x, out_ptr.dtype.element_ty, NATIVE), valid, D, C)


@triton.jit
def _new_tokens(cu_seqlens_ptr, seq, max_seqlen):
    """Where a sequence's new tokens begin, and how many there are."""
    if cu_seqlens_ptr is None:
        start = seq * max_seqlen
        new = max_seqlen
    else:
        start = tl.load(cu_seqlens_ptr + seq)
        new = tl.load(cu_seqlens_ptr + seq + 1) - start
    return start, new


@triton.jit
def _take_turn(length_ptr, new, programs):
    """The length of a sequence before this launch, and `new` more for whoever reads it after.

    Each of its programs takes one turn, and counts it in the upper bits of what it reads. Whoever takes the last turn knows that all have
    the length, and writes the new one.
    """
    found = tl.atomic_add(length_ptr, _TURN, sem="relaxed")
    length = found % _TURN
    if found // _TURN == programs - 1:
        tl.store(length_ptr, length + new)
    return length


@triton.jit
def _settle_step(
    x, need, token, new, scale, slot_ptr, held, old,
    D: tl.constexpr, IS_V: tl.constexpr, INT8: tl.constexpr, NATIVE: tl.constexpr, T: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Settle the scales of HEADS heads' pages at `slot_ptr [HEADS]`, which hold `old` tokens, from what their tokens need.

    Args:
        x: `[HEADS * T, C]` FP32.
        need, token, new: `[HEADS, T]`; which of the step's tokens each is, and whether it is one of these pages.
        scale: `[HEADS]`, zero where a page holds nothing.
        held: `[HEADS]`, whether there is such a head.
    Returns:
        `x`, with codes where a later token made the scale grow; what its rows are multiplied by before they are rounded, `[HEADS, T]`; and
        the scales.
    """
    first_fresh = tl.zeros((HEADS,), tl.int32)  # rows before it are codes, to be shifted by `ratio`
    ratio = tl.full((HEADS,), 1.0, tl.float32)
    # How often any of the scales grows. (A `while` that carries the tile is more than Triton 3.6 compiles.)
    settled = scale
    count = 0
    key = _first_over(need, token, settled[:, None], new)
    while tl.min(key) < _NONE:
        settled = tl.where(key < _NONE, with_headroom(key.to(tl.int32).to(tl.float32, bitcast=True), INT8), settled)
        key = _first_over(need, token, settled[:, None], new)
        count += 1
    key = _first_over(need, token, scale[:, None], new)
    for _ in range(count):
        grows = key < _NONE
        index = (key >> 32).to(tl.int32)
        grown = tl.where(grows, with_headroom(key.to(tl.int32).to(tl.float32, bitcast=True), INT8), scale)
        if T > 1:
            before = new & grows[:, None] & (token < index[:, None])
            factor = tl.where(token < first_fresh[:, None], ratio[:, None], inverse(scale, INT8)[:, None])
            x = _regrow(x, _rows(before), _rows(factor), INT8, NATIVE, True)
            first_fresh = tl.where(grows, index, first_fresh)
        ratio = tl.where(grows, scale * inverse(grown, INT8), ratio)
        if old > 0:
            codes_ptr = slot_ptr + _PAGE * D if IS_V else slot_ptr
            for head in range(HEADS):
                this = (tl.arange(0, HEADS) == head) & grows & held
                if tl.max(this.to(tl.int32)) > 0:
                    address = tl.sum(tl.where(this, codes_ptr.to(tl.int64), 0)).to(tl.pointer_type(tl.uint8))
                    _shift(address, tl.sum(tl.where(this, ratio, 0.0)), old, D, IS_V, INT8, NATIVE)
        scale = grown
        key = _first_over(need, token, scale[:, None], new)
    return x, tl.where(token < first_fresh[:, None], ratio[:, None], inverse(scale, INT8)[:, None]), scale


@triton.jit
def _rows(x):
    """`[HEADS, T]` as the rows of a tile, `[HEADS * T, 1]`."""
    return tl.reshape(x, (x.numel, 1))


@triton.jit
def _write_step(
    x, token, new, head, held, seqlens_ptr, table_ptr, pool_ptr, programs, num_kv_heads,
    D: tl.constexpr, C: tl.constexpr, IS_V: tl.constexpr, INT8: tl.constexpr, STATIC: tl.constexpr, NATIVE: tl.constexpr,
    T: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Quantize `x [HEADS * T, C]`, tokens `token [T]` of `new` and heads `head [HEADS]`, to the end of a sequence."""
    length = _take_turn(seqlens_ptr, new, programs)
    old = length % _PAGE
    table_ptr += length // _PAGE
    slot_ptr = pool_ptr + (tl.load(table_ptr).to(tl.int64) * num_kv_heads + head) * _slot_bytes(D)
    scale_ptr = _scale_ptr(slot_ptr, D, IS_V)
    scale = tl.load(scale_ptr)
    next_ptr = slot_ptr
    crosses = T > 1 and old + new > _PAGE
    if crosses:
        next_ptr = pool_ptr + (tl.load(table_ptr + 1).to(tl.int64) * num_kv_heads + head) * _slot_bytes(D)
    next_scale_ptr = _scale_ptr(next_ptr, D, IS_V)
    tokens = tl.broadcast_to(token[None, :], (HEADS, T))
    here = old + tokens < _PAGE
    nan = tl.reshape(tl.max((x != x).to(tl.int32), 1), (HEADS, T)) > 0
    if STATIC:
        next_scale = tl.load(next_scale_ptr) if T > 1 else scale
        factor = tl.where(here, inverse(scale, INT8)[:, None], inverse(next_scale, INT8)[:, None])
    else:
        need = tl.reshape(needed_scale(tl.max(finite(x), 1), INT8), (HEADS, T))
        scale = tl.where(old > 0, scale, 0.0)
        x, factor, scale = _settle_step(x, need, tokens, here, scale, slot_ptr, held, old, D, IS_V, INT8, NATIVE, T, HEADS)
        next_scale = scale
        if crosses:
            x, next_factor, next_scale = _settle_step(
                x, need, tokens, ~here, tl.zeros((HEADS,), tl.float32), next_ptr, held, 0, D, IS_V, INT8, NATIVE, T, HEADS
            )  # fmt: skip
            factor = tl.where(here, factor, next_factor)
    codes = to_codes(x * _rows(factor), INT8, NATIVE)
    if INT8:  # its codes cannot say NaN
        broken = tl.max((nan & here).to(tl.int32), 1) > 0
        tl.store(scale_ptr, tl.where(broken, float("nan"), scale), mask=held & (broken | (not STATIC)))
        if crosses:
            broken = tl.max((nan & ~here).to(tl.int32), 1) > 0
            tl.store(next_scale_ptr, tl.where(broken, float("nan"), next_scale), mask=held & (broken | (not STATIC)))
    elif not STATIC:
        tl.store(scale_ptr, scale, mask=held)
        if crosses:
            tl.store(next_scale_ptr, next_scale, mask=held)
    position = (old + tokens) % _PAGE
    lies = _PAGE * D + position // _GROUP * (D * _GROUP) + _v_position(position) if IS_V else position * D
    rows = tl.where(here, slot_ptr[:, None], next_ptr[:, None]) + lies
    valid = held[:, None] & (tl.arange(0, T) < new)[None, :]
    if IS_V:
        d = tl.arange(0, C)
        tl.store(_rows(rows) + d * _GROUP, codes, mask=_rows(valid) & (d < D))
    else:
        store_rows(_rows(rows), codes, _rows(valid), D, C)


@triton.jit(do_not_specialize=["table_stride", "num_seqs", "max_seqlen", "num_kv_heads", "num_tokens", "num_q_heads"])
def _step_kernel(
    k_ptr, v_ptr, pool_ptr, k_mean_ptr, v_mean_ptr, table_ptr, seqlens_ptr, cu_seqlens_ptr,
    q_ptr, q_out_ptr, cos_ptr, sin_ptr, k_stride_t, k_stride_h, v_stride_t, v_stride_h, q_stride_t, q_stride_h, q_out_stride_t,
    q_out_stride_h, cos_stride, sin_stride, table_stride, num_seqs, max_seqlen, num_kv_heads, num_tokens, num_q_heads,
    D: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, STEP: tl.constexpr, ROTATE: tl.constexpr,
    INT8: tl.constexpr, STATIC: tl.constexpr, NATIVE: tl.constexpr, T: tl.constexpr, HEADS: tl.constexpr, Q_T: tl.constexpr,
    Q_HEADS: tl.constexpr,
):  # fmt: skip
    programs = 2 * tl.cdiv(num_kv_heads, HEADS)  # of a sequence: some heads of K, or of V
    seq = tl.program_id(0) // programs
    program = tl.program_id(0) % programs
    if seq >= num_seqs:
        if q_ptr is not None:
            _turn_queries(
                tl.program_id(0) - num_seqs * programs, q_ptr, q_out_ptr, cos_ptr, sin_ptr, q_stride_t, q_stride_h, q_out_stride_t,
                q_out_stride_h, cos_stride, sin_stride, num_tokens, num_q_heads, D, C, HALF, INTERLEAVED, STEP, NATIVE, Q_T, Q_HEADS,
            )  # fmt: skip
        return
    start, new = _new_tokens(cu_seqlens_ptr, seq, max_seqlen)
    if new <= 0:
        return
    token = tl.minimum(tl.arange(0, T), new - 1)  # past the end the last one again: nothing to mask before the stores
    row = (start + token).to(tl.int64)[None, :]
    head = program // 2 * HEADS + tl.arange(0, HEADS)
    held = head < num_kv_heads
    head = tl.minimum(head, num_kv_heads - 1).to(tl.int64)
    every = tl.zeros((HEADS, T), tl.int64)
    table_ptr += seq.to(tl.int64) * table_stride
    seqlens_ptr += seq
    # The barriers keep the compiler from waiting for the length, then the page, then its scale, before it asks for the tokens.
    if program % 2 == 0:
        rows = _rows(head[:, None] * k_stride_h + row * k_stride_t)
        if HALF > 0:
            cos = cos_ptr + _rows(row * cos_stride + every)
            sin = sin_ptr + _rows(row * sin_stride + every)
        else:
            cos = rows
            sin = rows
        x = load_turned(k_ptr + rows, cos, sin, D, C, HALF, INTERLEAVED, STEP)
        if k_mean_ptr is not None:
            mean = load_rows(k_mean_ptr + _rows(head[:, None] * D + every), D, C)
        tl.debug_barrier()
        if ROTATE:
            x = rotate_rows(x, D)
        if k_mean_ptr is not None:
            x -= mean
        _write_step(
            x, token, new, head, held, seqlens_ptr, table_ptr, pool_ptr, programs, num_kv_heads, D, C, False, INT8, STATIC, NATIVE, T, HEADS
        )
    else:
        x = load_rows(v_ptr + _rows(head[:, None] * v_stride_h + row * v_stride_t), D, C)
        if v_mean_ptr is not None:
            x -= load_rows(v_mean_ptr + _rows(head[:, None] * D + every), D, C)
        tl.debug_barrier()
        _write_step(
            x, token, new, head, held, seqlens_ptr, table_ptr, pool_ptr, programs, num_kv_heads, D, C, True, False, STATIC, NATIVE, T, HEADS
        )


@triton.jit(do_not_specialize=["num_tokens", "num_heads", "first_seq"])
def _queries_kernel(
    q_ptr, out_ptr, cos_ptr, sin_ptr, stride_b, stride_t, stride_h, out_stride_b, out_stride_t, out_stride_h, cos_stride_b, cos_stride,
    sin_stride_b, sin_stride, num_tokens, num_heads, first_seq,
    D: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, STEP: tl.constexpr, NATIVE: tl.constexpr,
    T: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    seq = (first_seq + tl.program_id(1)).to(tl.int64)
    _turn_queries(
        tl.program_id(0), q_ptr + seq * stride_b, out_ptr + seq * out_stride_b, cos_ptr + seq * cos_stride_b,
        sin_ptr + seq * sin_stride_b, stride_t, stride_h, out_stride_t, out_stride_h, cos_stride, sin_stride, num_tokens, num_heads,
        D, C, HALF, INTERLEAVED, STEP, NATIVE, T, HEADS,
    )  # fmt: skip


# A prompt: page by page, as two tiles `[64, C]`: of K 64 tokens in a row, of V the first two and the last two tokens of each word.


@triton.jit
def _token(tile: tl.constexpr, row, IS_V: tl.constexpr):
    """Which token of its page a row of tile 0 or 1 is."""
    if IS_V:
        return _word_token(row // 2) + row % 2 + 8 * tile
    else:
        return row + _PAGE // 2 * tile


@triton.jit
def _prefetch(x_ptr, stride_t, D: tl.constexpr, C: tl.constexpr):
    """Ask the L2 cache for a page's rows, the first of which is at `x_ptr`: one line of 128 bytes a thread in 16 bits."""
    SIZE: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth // 8
    LINES: tl.constexpr = C * SIZE // 128
    i = tl.arange(0, _PAGE * LINES)
    lines = (x_ptr + i // LINES * stride_t).to(tl.pointer_type(tl.uint8)) + tl.minimum(i % LINES * 128, (D - 1) * SIZE)
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _lanes(x0, x1):
    """Of two `[64]` the halves, four `[32]`: every warp has all of them, and reductions need no barrier."""
    x = tl.permute(tl.reshape(tl.join(x0, x1), (2, _PAGE // 4, 2)), (1, 2, 0))
    first, second = tl.split(x)
    a, c = tl.split(first)
    b, d = tl.split(second)
    return a, b, c, d


@triton.jit
def _lane_tokens(IS_V: tl.constexpr):
    """The tokens of what `_lanes` returns."""
    lane = tl.arange(0, _PAGE // 4)
    other = lane + _PAGE // 4
    return _token(0, lane, IS_V), _token(0, other, IS_V), _token(1, lane, IS_V), _token(1, other, IS_V)


@triton.jit
def _largest(lanes):
    """Of all elements, which are integers."""
    a, b, c, d = lanes
    return tl.max(tl.maximum(tl.maximum(a, b), tl.maximum(c, d)))


@triton.jit
def _at(lanes, token, IS_V: tl.constexpr):
    """The element of `token`, of integers that are not negative."""
    a, b, c, d = lanes
    t, u, v, w = _lane_tokens(IS_V)
    return _largest((tl.where(t == token, a, 0), tl.where(u == token, b, 0), tl.where(v == token, c, 0), tl.where(w == token, d, 0)))


@triton.jit
def _if_over(need, token, scale, old):
    return tl.where((need > scale) & (token >= old), token, _PAGE)


@triton.jit
def _first_token_over(needs, scale, old, IS_V: tl.constexpr):
    """The first new token that needs more than `scale`. (Rows past the end are copies of the last token's.)"""
    a, b, c, d = needs
    t, u, v, w = _lane_tokens(IS_V)
    first = tl.minimum(_if_over(a, t, scale, old), _if_over(b, u, scale, old))
    return tl.min(tl.minimum(first, tl.minimum(_if_over(c, v, scale, old), _if_over(d, w, scale, old))))


@triton.jit
def _factor(token, fresh, ratio, inverse_scale):
    """What the rows of tokens `[N]` are multiplied by before they are rounded: before `fresh` they are codes."""
    return tl.where(token < fresh, ratio, inverse_scale)[:, None]


@triton.jit
def _finite_rows(x0, x1):
    """The bits of the largest finite magnitude of each row of two tiles."""
    return _lanes(_bits(tl.max(finite(x0), 1)), _bits(tl.max(finite(x1), 1)))


@triton.jit
def _grow(
    x0, x1, amax, most, scale, codes_ptr, old,
    D: tl.constexpr, IS_V: tl.constexpr, INT8: tl.constexpr, NATIVE: tl.constexpr, DENSE: tl.constexpr, SATURATE: tl.constexpr,
):  # fmt: skip
    """Of a page with `scale`, whose new tokens reach up to `amax` (`_lanes` of bits) and need `most`: what is to be rounded of each tile,
    and the scale that fits all; codes held are shifted to it. Of V `amax` is computed here."""
    t0 = _token(0, tl.arange(0, _PAGE // 2), IS_V)
    t1 = _token(1, tl.arange(0, _PAGE // 2), IS_V)
    if IS_V:
        zero = tl.zeros((_PAGE // 4,), tl.int32)
        amax = zero, zero, zero, zero
        if most > scale:  # few pages of V
            amax = _finite_rows(x0, x1)
    a, b, c, d = amax
    needs = needed_scale(_float(a), INT8), needed_scale(_float(b), INT8), needed_scale(_float(c), INT8), needed_scale(_float(d), INT8)
    fresh = old  # tokens before it are codes, to be shifted by `ratio`
    ratio = 1.0
    while most > scale:
        index = _first_token_over(needs, scale, old, IS_V)
        grown = with_headroom(needed_scale(_float(_at(amax, index, IS_V)), INT8), INT8)
        if DENSE or old < index:
            factor = inverse(scale, INT8)
            x0 = _regrow(x0, (t0 < index)[:, None], _factor(t0, fresh, ratio, factor), INT8, NATIVE, SATURATE)
            if IS_V or index > _PAGE // 2:  # of K, often not
                x1 = _regrow(x1, (t1 < index)[:, None], _factor(t1, fresh, ratio, factor), INT8, NATIVE, SATURATE)
        ratio = scale * inverse(grown, INT8)
        if not DENSE and old > 0:
            _shift(codes_ptr, ratio, old, D, IS_V, INT8, NATIVE)
        fresh = index
        scale = grown
    factor = inverse(scale, INT8)
    x0 *= _factor(t0, fresh, ratio, factor)
    x1 *= _factor(t1, fresh, ratio, factor)
    if INT8 and SATURATE:
        return saturate_int8(x0), saturate_int8(x1), scale
    else:
        return x0, x1, scale


@triton.jit
def _settle_page(
    x0, x1, first, slot_ptr, old,
    D: tl.constexpr, IS_V: tl.constexpr, INT8: tl.constexpr, STATIC: tl.constexpr, NATIVE: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Settle the scale of a page from its tokens from `old` on, and write it.

    `first` is the largest finite magnitude of V's first token; K's is computed here. Returns what is to be rounded of each tile; of INT8 it
    is saturated.
    """
    scale_ptr = _scale_ptr(slot_ptr, D, IS_V)
    codes_ptr = slot_ptr + _PAGE * D if IS_V else slot_ptr
    if IS_V:
        amax = first, first, first, first  # rows' maxima are needed where the scale grows alone
        worst = tl.max(tl.maximum(tl.abs(x0), tl.abs(x1)))
    else:
        amax = _lanes(_bits(magnitude(x0, NATIVE)), _bits(magnitude(x1, NATIVE)))  # of integers NaN is the largest
        worst = _float(_largest(amax))
    broken = worst != worst
    if STATIC:
        scale = tl.load(scale_ptr)
        factor = inverse(scale, INT8)
        x0 *= factor
        x1 *= factor
        if INT8:
            x0, x1 = saturate_int8(x0), saturate_int8(x1)
    else:
        scale = 0.0
        if not DENSE and old > 0:
            scale = tl.load(scale_ptr)
        large = (not (worst < _LARGE)) | (scale != scale)
        if large:
            if IS_V:
                worst = tl.max(tl.maximum(finite(x0), finite(x1)))
            else:
                amax = _finite_rows(x0, x1)
                worst = _float(_largest(amax))
        if not IS_V:
            first = _float(_at(amax, old, False))
        if DENSE or old == 0:
            scale = with_headroom(needed_scale(first, INT8), INT8)
        most = needed_scale(worst, INT8)
        if INT8 and large:  # two paths: most pages have nothing that saturates, and it would cost them a sixth of their instructions
            x0, x1, scale = _grow(x0, x1, amax, most, scale, codes_ptr, old, D, IS_V, INT8, NATIVE, DENSE, True)
        else:
            x0, x1, scale = _grow(x0, x1, amax, most, scale, codes_ptr, old, D, IS_V, INT8, NATIVE, DENSE, False)
    if INT8:  # its codes cannot say NaN
        tl.store(scale_ptr, tl.where(broken, float("nan"), scale))
    elif not STATIC:
        tl.store(scale_ptr, scale)
    if DENSE:  # the rest of the header, by K's program
        i = tl.arange(0, _HEADER // 4)
        tl.store(scale_ptr + i, tl.zeros(i.shape, tl.float32), mask=(i > 1) & (not IS_V))
    return x0, x1


@triton.jit
def _load_keys(
    first, x_ptr, stride_t, cos_ptr, sin_ptr, cos_stride, sin_stride, old, end,
    D: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The tile of a K page from its token `first` on, and where it lies in the page."""
    position = first + tl.arange(0, _PAGE // 2)
    token = tl.minimum(tl.maximum(position, old), end - 1)  # outside, a new one again: it changes no maximum, and nothing is masked
    rows = (token * stride_t)[:, None]
    if HALF > 0:
        cos = cos_ptr + (token * cos_stride)[:, None]
        sin = sin_ptr + (token * sin_stride)[:, None]
    else:
        cos = rows
        sin = rows
    return load_turned(x_ptr + rows, cos, sin, D, C, HALF, INTERLEAVED, STEP), position


@triton.jit
def _codes(x, INT8: tl.constexpr, NATIVE: tl.constexpr):
    """Of what `_settle_page` returns."""
    return to_int8(x) if INT8 else to_e4m3(x, NATIVE)


@triton.jit
def _store_keys(x, position, page_ptr, old, end, D: tl.constexpr, C: tl.constexpr, INT8: tl.constexpr, NATIVE: tl.constexpr):
    rows = page_ptr + (position * D)[:, None]
    valid = ((position >= old) & (position < end))[:, None]
    if D == C:
        # In the parts that were loaded, and not more bytes than the eight channels that a thread has in a row: nothing changes threads.
        rows = tl.multiple_of(rows, [8, 8])
        i = tl.arange(0, C // 4)
        x0, x1, x2, x3 = quarters(x)
        tl.store(rows + i, _codes(x0, INT8, NATIVE), mask=valid)
        tl.store(rows + C // 4 + i, _codes(x1, INT8, NATIVE), mask=valid)
        tl.store(rows + C // 2 + i, _codes(x2, INT8, NATIVE), mask=valid)
        tl.store(rows + 3 * C // 4 + i, _codes(x3, INT8, NATIVE), mask=valid)
    else:
        store_rows(rows, _codes(x, INT8, NATIVE), valid, D, C)


@triton.jit
def _k_page(
    x_ptr, stride_t, mean_ptr, slot_ptr, cos_ptr, sin_ptr, cos_stride, sin_stride, old, end, ahead,
    D: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, STEP: tl.constexpr, ROTATE: tl.constexpr,
    INT8: tl.constexpr, STATIC: tl.constexpr, NATIVE: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Write tokens `[old, end)` of a head's K page; the pointers are token 0's (before the tensors begin, if old > 0)."""
    HALF_PAGE: tl.constexpr = _PAGE // 2
    if NATIVE and ahead > 0:
        _prefetch(x_ptr + ahead.to(tl.int64) * stride_t, stride_t, D, C)
    x0, t0 = _load_keys(0, x_ptr, stride_t, cos_ptr, sin_ptr, cos_stride, sin_stride, old, end, D, C, HALF, INTERLEAVED, STEP)
    x1, t1 = _load_keys(HALF_PAGE, x_ptr, stride_t, cos_ptr, sin_ptr, cos_stride, sin_stride, old, end, D, C, HALF, INTERLEAVED, STEP)
    tl.debug_barrier()  # ptxas: `D128 dense e4m3`, whose loads of the first tile follow one another with it
    if ROTATE:
        x0 = rotate_rows(x0, D)
        x1 = rotate_rows(x1, D)
    if mean_ptr is not None:
        mean = load_rows(mean_ptr + tl.zeros((1, 1), tl.int32), D, C)
        x0 -= mean
        x1 -= mean
    x0, x1 = _settle_page(x0, x1, 0.0, slot_ptr, old, D, False, INT8, STATIC, NATIVE, DENSE)
    _store_keys(x0, t0, slot_ptr, old, end, D, C, INT8, NATIVE)
    _store_keys(x1, t1, slot_ptr, old, end, D, C, INT8, NATIVE)


@triton.jit
def _word_token(word):
    """The first token of a page's word: 1, 8 and 9 behind it are the others (`layout.V_ORDER`)."""
    return word // (_GROUP // 4) * _GROUP + _v_token(word % (_GROUP // 4) * 4)


@triton.jit
def _store_words(page_ptr, words, first, old, end, D: tl.constexpr, C: tl.constexpr):
    """Write tokens `[old, end)` of a head's V page, given as `words [32, C]` whose tokens begin at `first [32]`."""
    GROUPS: tl.constexpr = _PAGE // _GROUP
    WORDS: tl.constexpr = _GROUP // 4  # of a group and channel
    d = tl.arange(0, C)
    words = tl.permute(tl.reshape(words, (GROUPS, WORDS, C)), (0, 2, 1))
    group = tl.arange(0, GROUPS)[:, None, None]
    ptrs = page_ptr.to(tl.pointer_type(tl.int32)) + (group * D + d[None, :, None]) * WORDS + tl.arange(0, WORDS)[None, None, :]
    inside = (d < D)[None, :, None]
    if (old > 0) | (end < _PAGE):  # bytes of older tokens stay; those past the end become zero: 0 * NaN would be NaN
        new = tl.where((first >= old) & (first < end), 0xFF, 0)
        new |= tl.where((first + 1 >= old) & (first + 1 < end), 0xFF00, 0)
        new |= tl.where((first + 8 >= old) & (first + 8 < end), 0xFF0000, 0)
        new |= tl.where((first + 9 >= old) & (first + 9 < end), -0x1000000, 0)
        new = tl.reshape(new, (GROUPS, WORDS))[:, None, :]
        older = tl.load(ptrs, mask=(d < tl.where(old > 0, D, 0))[None, :, None], other=0)
        words = (words & new) | (older & ~new)
    tl.store(ptrs, words, mask=inside)


@triton.jit
def _load_values(first, x_ptr, stride_t, old, end, D: tl.constexpr, C: tl.constexpr):
    """Tokens `first [32]` and the next ones as one tile `[64, C]`."""
    last = end - 1
    rows = x_ptr + (tl.minimum(tl.maximum(first, old), last) * stride_t)[:, None]
    a = load_turned(rows, rows, rows, D, C, 0, False, 1)
    rows = x_ptr + (tl.minimum(tl.maximum(first + 1, old), last) * stride_t)[:, None]
    b = load_turned(rows, rows, rows, D, C, 0, False, 1)
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (_PAGE // 2, C))


@triton.jit
def _take_apart(x, C: tl.constexpr):
    """The two that `_load_values` has put together."""
    return tl.split(tl.permute(tl.reshape(x, (_PAGE // 4, 2, C)), (0, 2, 1)))


@triton.jit
def _v_page(
    x_ptr, stride_t, mean_ptr, slot_ptr, old, end, ahead,
    D: tl.constexpr, C: tl.constexpr, STATIC: tl.constexpr, NATIVE: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """`_k_page` for V, transposed. A thread reads the four tokens that share a word of the page, so that whole words change threads."""
    first = _word_token(tl.arange(0, _PAGE // 4))
    if NATIVE and ahead > 0:
        _prefetch(x_ptr + ahead.to(tl.int64) * stride_t, stride_t, D, C)
    x0 = _load_values(first, x_ptr, stride_t, old, end, D, C)
    x1 = _load_values(first + 8, x_ptr, stride_t, old, end, D, C)
    token = load_lanes(x_ptr + old * stride_t, D, C)  # the first again, by every warp: cheaper than to pick it out
    if mean_ptr is not None:
        mean = load_rows(mean_ptr + tl.zeros((1, 1), tl.int32), D, C)
        x0 -= mean
        x1 -= mean
        token -= load_lanes(mean_ptr, D, C)
    first_amax = _float(tl.max(tl.max(_bits(finite(token)), 1), 0))
    x0, x1 = _settle_page(x0, x1, first_amax, slot_ptr, old, D, True, False, STATIC, NATIVE, DENSE)
    a, b = _take_apart(x0, C)
    c, d = _take_apart(x1, C)
    _store_words(slot_ptr + _PAGE * D, pack_e4m3(a, b, c, d, NATIVE), first, old, end, D, C)


@triton.jit(do_not_specialize=["table_stride", "num_seqs", "max_seqlen", "num_kv_heads", "columns_ahead", "first_seq"])
def _page_kernel(
    k_ptr, v_ptr, pool_ptr, k_mean_ptr, v_mean_ptr, table_ptr, seqlens_ptr, cu_seqlens_ptr,
    cos_ptr, sin_ptr, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h, cos_stride_b, cos_stride, sin_stride_b,
    sin_stride, table_stride, num_seqs, max_seqlen, num_kv_heads, columns_ahead, first_seq,
    D: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, STEP: tl.constexpr, ROTATE: tl.constexpr,
    INT8: tl.constexpr, STATIC: tl.constexpr, NATIVE: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    # Heads follow each other, so that programs that run together read memory that lies together.
    is_v = tl.program_id(0) % 2
    head = tl.program_id(0) // 2
    if cu_seqlens_ptr is None:
        column = tl.program_id(1)
        seq = first_seq + tl.program_id(2)
        start, new = _new_tokens(cu_seqlens_ptr, seq, max_seqlen)
    else:
        # A sequence of n tokens touches at most n // 128 + 2 pages, so its places may begin at start // 128 + 2 * seq.
        place = tl.program_id(1) + tl.program_id(2) * _MAX_GRID
        seq = -1
        for s in range(0, num_seqs, 128):
            seqs = s + tl.arange(0, 128)
            starts = tl.load(cu_seqlens_ptr + seqs, mask=seqs < num_seqs, other=0)
            seq += tl.sum(((seqs < num_seqs) & (starts // _PAGE + 2 * seqs <= place)).to(tl.int32), 0)
        start, new = _new_tokens(cu_seqlens_ptr, seq, max_seqlen)
        column = place - start // _PAGE - 2 * seq
    wide = seq.to(tl.int64)
    if DENSE:  # sequences of strides of their own begin here, in pages in order; whoever is first says so in the table
        start = 0
        length = 0
        page = seq * tl.num_programs(1) + column
        if tl.program_id(0) == 0:
            tl.store(table_ptr + page, page)
            if column == 0:
                tl.store(seqlens_ptr + seq, new)
        k_ptr += wide * k_stride_b
        v_ptr += wide * v_stride_b
        if HALF > 0:
            cos_ptr += wide * cos_stride_b
            sin_ptr += wide * sin_stride_b
    else:
        length = tl.load(seqlens_ptr + seq)
        column += length // _PAGE
    first = column * _PAGE  # the page's first token
    old = 0 if DENSE else tl.maximum(length - first, 0)
    end = tl.minimum(length + new - first, _PAGE)
    if old >= end:
        return
    if not DENSE:
        page = tl.load(table_ptr + wide * table_stride + column)
    ahead = columns_ahead * _PAGE  # tokens of a page that a later program reads, if there is one
    if first + ahead + _PAGE > length + new:
        ahead = 0
    row = (start + first - length).to(tl.int64)
    head = head.to(tl.int64)
    slot_ptr = pool_ptr + (page.to(tl.int64) * num_kv_heads + head) * _slot_bytes(D)
    if is_v == 0:
        if HALF > 0:
            cos_ptr += row * cos_stride
            sin_ptr += row * sin_stride
        if k_mean_ptr is not None:
            k_mean_ptr += head * D
        _k_page(
            k_ptr + row * k_stride_t + head * k_stride_h, k_stride_t, k_mean_ptr, slot_ptr, cos_ptr, sin_ptr, cos_stride, sin_stride,
            old, end, ahead, D, C, HALF, INTERLEAVED, STEP, ROTATE, INT8, STATIC, NATIVE, DENSE,
        )  # fmt: skip
    else:
        if v_mean_ptr is not None:
            v_mean_ptr += head * D
        v_ptr += row * v_stride_t + head * v_stride_h
        _v_page(v_ptr, v_stride_t, v_mean_ptr, slot_ptr, old, end, ahead, D, C, STATIC, NATIVE, DENSE)


@triton.jit
def _bytes(x_ptr, token, end, stride_t, D: tl.constexpr, C: tl.constexpr):
    """Bytes of tokens, `[T, C]`; past the end the last one's."""
    c = tl.arange(0, C)
    rows = x_ptr + (tl.minimum(token, end - 1) * stride_t)[:, None]
    if C == D:
        return tl.load(rows + c)
    else:
        return tl.load(rows + c, mask=tl.zeros(rows.shape, tl.int32) + c < D, other=0)


@triton.jit(do_not_specialize=["num_kv_heads", "length", "first_seq"])
def _bytes_kernel(
    k_ptr, v_ptr, pool_ptr, table_ptr, seqlens_ptr, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h, num_kv_heads,
    length, first_seq,
    D: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Pages of what is E4M3 already: its bytes as they are, and scales of one."""
    k_ptr = k_ptr.to(tl.pointer_type(tl.uint8))
    v_ptr = v_ptr.to(tl.pointer_type(tl.uint8))
    is_v = tl.program_id(0) % 2
    head = (tl.program_id(0) // 2).to(tl.int64)
    column = tl.program_id(1)
    seq = (first_seq + tl.program_id(2)).to(tl.int64)
    page = (first_seq + tl.program_id(2)) * tl.num_programs(1) + column
    first = column * _PAGE
    end = tl.minimum(length - first, _PAGE)
    slot_ptr = pool_ptr + (page.to(tl.int64) * num_kv_heads + head) * _slot_bytes(D)
    if tl.program_id(0) == 0:
        tl.store(table_ptr + page, page)
        if column == 0:
            tl.store(seqlens_ptr + seq, length)
    if is_v == 0:
        i = tl.arange(0, _HEADER // 4)
        tl.store(_scale_ptr(slot_ptr, D, False) + i, tl.where(i < 2, 1.0, 0.0))
        token = tl.arange(0, _PAGE)
        x = _bytes(k_ptr + seq * k_stride_b + head * k_stride_h + first.to(tl.int64) * k_stride_t, token, end, k_stride_t, D, C)
        store_rows(slot_ptr + (token * D)[:, None], x, (token < end)[:, None], D, C)
    else:
        v_ptr += seq * v_stride_b + head * v_stride_h + first.to(tl.int64) * v_stride_t
        first_token = _word_token(tl.arange(0, _PAGE // 4))
        words = _bytes(v_ptr, first_token, end, v_stride_t, D, C).to(tl.int32)
        words |= _bytes(v_ptr, first_token + 1, end, v_stride_t, D, C).to(tl.int32) << 8
        words |= _bytes(v_ptr, first_token + 8, end, v_stride_t, D, C).to(tl.int32) << 16
        words |= _bytes(v_ptr, first_token + 9, end, v_stride_t, D, C).to(tl.int32) << 24
        _store_words(slot_ptr + _PAGE * D, words, first_token, 0, end, D, C)


# Launches


def append(
    pages: KVPages,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q: torch.Tensor | None = None,
    q_out: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int,
    rope_cos: torch.Tensor | None,
    rope_sin: torch.Tensor | None,
    rope_interleaved: bool,
    static_scales: bool,
) -> None:
    """`reference.append`, bit for bit (NaN may lose its sign)."""
    if not k.shape[0] or not max_seqlen:
        return
    device, num_tokens, num_seqs = k.device, k.shape[0], pages.page_table.shape[0]
    heads, head_dim = pages.num_kv_heads, pages.head_dim
    row, angles, ((*_, cos_stride), (*_, sin_stride)) = row_constants(head_dim, rope_cos, rope_sin, rope_interleaved)
    row |= {"ROTATE": pages.rotate_keys, "INT8": pages.key_dtype == torch.int8, "STATIC": static_scales, "NATIVE": is_native(device)}
    held = pages.pool, pages.k_mean, pages.v_mean, pages.page_table, pages.cache_seqlens, cu_seqlens
    k_strides, v_strides = k.stride()[:2], v.stride()[:2]
    if max_seqlen <= MAX_TOKENS:
        queries, query_strides, query_shape = (None, None), (0, 0, 0, 0), (0, 0)
        if q is not None:
            queries, query_strides, query_shape = (q, q_out), (*q.stride()[:2], *q_out.stride()[:2]), q.shape[:2]
        args = (
            k, v, *held, *queries, *angles, *k_strides, *v_strides, *query_strides, cos_stride, sin_stride, pages.page_table.stride(0),
            num_seqs, max_seqlen, heads, *query_shape,
        )  # fmt: skip
        grid, given = _step_plan(device, heads, num_seqs, max_seqlen, *query_shape, *row.items())
        launch(_step_kernel, grid, args, given)
        return
    columns = (max_seqlen + PAGE_SIZE - 2) // PAGE_SIZE + 1  # the most pages that so many tokens can touch
    # Sequences follow one another: no strides between them.
    strides = (0, *k_strides, 0, *v_strides, 0, cos_stride, 0, sin_stride)
    args = k, v, *held, *angles, *strides, pages.page_table.stride(0), num_seqs, max_seqlen, heads, _columns_ahead(device, heads, row["C"])
    given = _page_constants(device, row, dense=False)
    if cu_seqlens is None:
        _launch_sequences(_page_kernel, (2 * heads, columns), num_seqs, args, given)
    else:
        places = num_tokens // PAGE_SIZE + 2 * num_seqs
        launch(_page_kernel, (2 * heads, min(places, MAX_GRID), -(-places // MAX_GRID)), (*args, 0), given)
    if q is not None:
        _turn_dense(q[None], q_out[None], row, angles, ((0, cos_stride), (0, sin_stride)))
    pages.cache_seqlens.add_(max_seqlen if cu_seqlens is None else cu_seqlens.diff())


@lru_cache(maxsize=4096)
def _step_plan(
    device: torch.device, heads: int, num_seqs: int, max_seqlen: int, num_tokens: int, num_q_heads: int, *row: tuple[str, int]
) -> tuple[tuple[int], Constants]:
    """Grid and constants of `_step_kernel`, for so many tokens and heads of queries (0: none) and what is known of a row."""
    row = dict(row)
    width, tokens = row["C"], power_of_two(max_seqlen)
    block = min(power_of_two(heads), max(1, STEP_ELEMENTS // (width * tokens)))
    block = max(block, power_of_two(-(-2 * heads // MAX_PROGRAMS)))
    tile, programs = _query_tile(num_tokens, num_q_heads, width) if num_q_heads else ((1, 1), 0)
    given = constants("step", device, **row, T=tokens, HEADS=block, Q_T=tile[0], Q_HEADS=tile[1], num_warps=4)
    return (num_seqs * 2 * -(-heads // block) + programs,), given


def _page_constants(device: torch.device, row: dict[str, int], dense: bool) -> Constants:
    return constants("page", device, **row, DENSE=dense, num_warps=row["C"] // 16, maxnreg=128)


@lru_cache
def _columns_ahead(device: torch.device, heads: int, width: int) -> int:
    """How many columns of pages all programs of `_page_kernel` read at a time: a program prefetches the page so many columns on."""
    if not is_native(device):
        return 0
    programs = num_sms(device) * max(1, 256 // width)  # of width / 16 warps with 128 registers a thread
    return -(-programs // (2 * heads))


def quantize(
    k: torch.Tensor, v: torch.Tensor, *, rope_cos: torch.Tensor | None, rope_sin: torch.Tensor | None, rope_interleaved: bool,
    k_mean: torch.Tensor | None, v_mean: torch.Tensor | None, key_dtype: torch.dtype, rotate_keys: bool,
) -> KVPages:  # fmt: skip
    """`reference.quantize`, bit for bit, as `append` is `reference.append`."""
    device = k.device
    native = is_native(device)
    batch, heads, length, head_dim = k.shape
    columns = -(-length // PAGE_SIZE)
    row, angles, (cos_strides, sin_strides) = row_constants(head_dim, rope_cos, rope_sin, rope_interleaved)
    pool = torch.empty(batch * columns, heads, page_bytes(head_dim), dtype=torch.uint8, device=device)
    table = torch.empty(batch, columns, dtype=torch.int32, device=device)
    lengths = torch.empty(batch, dtype=torch.int32, device=device)
    (k_b, k_h, k_t, _), (v_b, v_h, v_t, _) = k.stride(), v.stride()
    if batch == 1:  # a stride that leads nowhere can be anything
        k_b = v_b = 0
    strides = k_b, k_t, k_h, v_b, v_t, v_h
    if k.dtype == FP8:
        # Where E4M3 is not native, no target knows its type, and bytes are bytes.
        given = constants("bytes", device, D=head_dim, C=row["C"], num_warps=row["C"] // 16)
        args = k.view(torch.uint8), v.view(torch.uint8), pool, table, lengths, *strides, heads, length
        _launch_sequences(_bytes_kernel, (2 * heads, columns), batch, args, given)
    else:
        row |= {"ROTATE": rotate_keys, "INT8": key_dtype == torch.int8, "STATIC": False, "NATIVE": native}
        args = (
            k, v, pool, k_mean, v_mean, table, lengths, None, *angles, *strides, *cos_strides, *sin_strides, columns, batch, length, heads,
            _columns_ahead(device, heads, row["C"]),
        )  # fmt: skip
        _launch_sequences(_page_kernel, (2 * heads, columns), batch, args, _page_constants(device, row, dense=True))
    return KVPages.trusted(pool, table, lengths, k_mean, v_mean, key_dtype, rotate_keys)


def _launch_sequences(kernel, grid: tuple[int, ...], num_seqs: int, args: tuple, given: Constants) -> None:
    """A launch for all sequences, which are the grid's last dimension; several where CUDA has no more of that."""
    for first in range(0, num_seqs, MAX_GRID):
        launch(kernel, (*grid, min(MAX_GRID, num_seqs - first)), (*args, first), given)


def rotate(x: torch.Tensor, rope_cos: torch.Tensor, rope_sin: torch.Tensor, rope_interleaved: bool) -> torch.Tensor:
    """`reference.rotate`, bit for bit."""
    out = torch.empty_like(x)
    if x.numel():
        row, angles, angle_strides = row_constants(x.shape[3], rope_cos, rope_sin, rope_interleaved)
        row["NATIVE"] = is_native(x.device)
        _turn_dense(x.transpose(1, 2), out.transpose(1, 2), row, angles, angle_strides)
    return out


def _turn_dense(x: torch.Tensor, out: torch.Tensor, row: dict, angles: tuple, angle_strides: tuple) -> None:
    """RoPE on `x [B, T, H, D]`; the rest is `row_constants`' of tables `[B, T, R / 2]`."""
    cos_strides, sin_strides = angle_strides
    batch, tokens, heads, _ = x.shape
    tile, programs = _query_tile(tokens, heads, row["C"])
    row = {name: row[name] for name in ("D", "C", "HALF", "INTERLEAVED", "STEP", "NATIVE", "enable_fp_fusion")}
    given = constants("queries", x.device, **row, T=tile[0], HEADS=tile[1], num_warps=4)
    args = x, out, *angles, *x.stride()[:3], *out.stride()[:3], *cos_strides, *sin_strides, tokens, heads
    _launch_sequences(_queries_kernel, (programs,), batch, args, given)


def _query_tile(tokens: int, heads: int, width: int) -> tuple[tuple[int, int], int]:
    """Tokens and heads of Q that one program rotates, of rows of `width` channels; how many programs there are."""
    tile_heads = min(power_of_two(heads), QUERY_ELEMENTS // width)
    tile = QUERY_ELEMENTS // (width * tile_heads), tile_heads
    return tile, -(-tokens // tile[0]) * -(-heads // tile[1])
