"""Quantise-and-append: new tokens of K and V become FP8 bytes in pages, a cache's (`append`) or pages of their own (`quantize`).

A decode step (up to `MAX_TOKENS` new tokens a sequence) is one launch of `_step_kernel`: a program writes a few heads of a sequence's K or
V, others rotate Q, and the last of a sequence's programs to read its length advances it. A longer append goes page by page
(`_page_kernel`): a program reads 128 tokens of a head once, holds them in registers for the page's largest value, and writes them. So does
`quantize`, whose tokens are of any strides, and whose page table is written along with the pages.

Where RoPE may turn it, a row of `head_dim` channels is held as two tiles, the first and the second channels of its pairs (`_channels`): a
pair turns within one thread, with nothing exchanged. Where nothing turns, a pair is a channel of either half.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..layout import FP8, PAGE_SIZE, V_GROUP, KVPages, page_shapes
from ..numerics import E4M3, MAX_SCALE_EXPONENT, MEAN_SAMPLES, MIN_SCALE_EXPONENT
from .fp8 import from_e4m3, is_native, pack_e4m3, round_to, to_e4m3
from .launch import MAX_GRID, Constants, constants, launch, overlaps

MAX_TOKENS = 16  # appends of up to this many tokens go token by token, longer ones page by page
STEP_ELEMENTS = 512  # of K or V: what a program of a step holds, unless one head is more
QUERY_ELEMENTS = 2048  # of Q, likewise
MAX_PROGRAMS = 64  # of a step, for one sequence
MEAN_PAIRS = 4  # of channels, whose means one warp computes

_MAX_GRID = tl.constexpr(MAX_GRID)
_PAGE = tl.constexpr(PAGE_SIZE)
_GROUP = tl.constexpr(V_GROUP)
_SAMPLES = tl.constexpr(MEAN_SAMPLES)
_MAX_E4M3_EXPONENT = tl.constexpr(E4M3.max_exponent)
_MIN_SCALE_EXPONENT = tl.constexpr(MIN_SCALE_EXPONENT)
_MAX_SCALE_EXPONENT = tl.constexpr(MAX_SCALE_EXPONENT)
_TURN = tl.constexpr(2**31 // MAX_PROGRAMS)  # more than any length (`_take_turn`)
_BYTES = tl.constexpr(tl.pointer_type(tl.uint8))  # pools are written as bytes, which every target and the interpreter can
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


# Where things lie


@triton.jit
def _v_position(token):
    """Where a token lies in its group of a V page (`layout.V_POSITION`)."""
    return (token & 1) | ((token >> 2) & 2) | ((token << 1) & 12)


@triton.jit
def _v_token(position):
    """Which token of its group lies at a position (`layout.V_ORDER`)."""
    return (position & 1) | ((position & 2) << 2) | ((position >> 1) & 6)


@triton.jit
def _channels(i, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The channels of pair `i < D / 2`: neighbours, or `(i, i + HALF)` for the HALF pairs that turn; those left over pair up halfway
    likewise."""
    if INTERLEAVED:
        first = 2 * i
        second = 2 * i + 1
    elif HALF == 0 or 2 * HALF == D:
        first = i
        second = i + D // 2
    else:
        first = tl.where(i < HALF, i, i + HALF)
        second = tl.where(i < HALF, i + HALF, i + D // 2)
        if HALF % 8 == 0:  # eight channels stay together: say so, and the accesses are 16 bytes wide
            N: tl.constexpr = min(8, i.shape[0])
            first = tl.max_contiguous(tl.multiple_of(first, N), N)
            second = tl.max_contiguous(tl.multiple_of(second, N), N)
    return first, second


@triton.jit
def _widen(x):
    """FP32 of any input: 32 bits, 16, E4M3 (`quantize`), or bytes, which are E4M3 where that is not native."""
    if x.dtype == tl.uint8:
        return from_e4m3(x, False).to(tl.float32)
    else:
        return x.to(tl.float32)


@triton.jit
def _load(rows, at, i, LIMIT: tl.constexpr, BOUND: tl.constexpr):
    """Elements `at [N]` of the rows at pointers `[..., 1]`, in FP32; zero where `i [N]`, all below BOUND, is not below LIMIT."""
    if BOUND <= LIMIT:
        return _widen(tl.load(rows + at))
    else:
        return _widen(tl.load(rows + at, mask=tl.zeros(rows.shape, tl.int32) + i < LIMIT, other=0.0))


@triton.jit
def _load_rows(rows, D: tl.constexpr, HP: tl.constexpr):
    """Rows of D channels, as one tile `[..., 2 * HP]`."""
    d = tl.arange(0, 2 * HP)
    return _load(rows, d, d, D, 2 * HP)


@triton.jit
def _load_pairs(rows, D: tl.constexpr, HP: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rows of D channels, as two tiles `[..., HP]`: the first channels of all pairs, and the second."""
    if INTERLEAVED:
        x = _load_rows(rows, D, HP)
        a, b = tl.split(tl.reshape(x, rows.shape[:-1] + [HP, 2]))  # noqa: RUF005 - Triton has no starred lists
    else:
        i = tl.arange(0, HP)
        first, second = _channels(i, D, HALF, False)
        a = _load(rows, first, i, D // 2, HP)
        b = _load(rows, second, i, D // 2, HP)
    return a, b


@triton.jit
def _store_pairs(rows, a, b, valid, D: tl.constexpr, HP: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """What `_load_pairs` reads, where `valid [..., 1]`."""
    if INTERLEAVED:
        d = tl.arange(0, 2 * HP)
        x = tl.reshape(tl.join(a, b), rows.shape[:-1] + [2 * HP])  # noqa: RUF005
        tl.store(rows + d, x, mask=valid & (d < D))
    else:
        i = tl.arange(0, HP)
        first, second = _channels(i, D, HALF, False)
        tl.store(rows + first, a, mask=valid & (i < D // 2))
        tl.store(rows + second, b, mask=valid & (i < D // 2))


# Arithmetic


@triton.jit
def _power_of_two_scale(amax):
    """`numerics.power_of_two_scale`."""
    bits = amax.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 127 - _MAX_E4M3_EXPONENT + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, _MIN_SCALE_EXPONENT), _MAX_SCALE_EXPONENT)
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _inverse(scale):
    """`1 / scale` of a power of two: exact, and so is a product with it."""
    return (0x7F000000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _finite(x):
    """Magnitudes, zero where they are not finite."""
    magnitude = tl.abs(x)
    return tl.where(magnitude < float("inf"), magnitude, 0.0)


@triton.jit
def _load_angles(cos_ptr, sin_ptr, rows, cos_stride, sin_stride, i, BOUND: tl.constexpr, HALF: tl.constexpr, STEP: tl.constexpr):
    """Of rows `[..., 1]`, cos and sin of pairs `i [N]`, all below BOUND, each `[..., N]`; STEP is how far apart a row's angles lie."""
    cos = _load(cos_ptr + rows * cos_stride, i * STEP, i, HALF, BOUND)
    return cos, _load(sin_ptr + rows * sin_stride, i * STEP, i, HALF, BOUND)


@triton.jit
def _rotate(a, b, cos, sin, i, D: tl.constexpr, HALF: tl.constexpr):
    """`rope.apply_rope` on pairs `i`; every product and sum rounds by itself, as torch's do (the launches turn FMA contraction off)."""
    turned_a = a * cos - b * sin
    turned_b = b * cos + a * sin
    if 2 * HALF < D:
        turned_a = tl.where(i < HALF, turned_a, a)
        turned_b = tl.where(i < HALF, turned_b, b)
    return turned_a, turned_b


@triton.jit
def _shift(pool_ptrs, grown, ratio, old, D: tl.constexpr, IS_V: tl.constexpr, NATIVE: tl.constexpr):
    """`numerics.rescale` on the first `old` tokens of the pages at `pool_ptrs` that have `grown`, all three `[N]`."""
    # Bytes in the order they lie in, 2048 at a time: few enough for registers, and a divisor of every page.
    SIZE: tl.constexpr = 2048 // pool_ptrs.numel
    for first in range(0, D * _PAGE, SIZE):
        i = first + tl.arange(0, SIZE)
        lies = i // (D * _GROUP) * _GROUP + _v_token(i % _GROUP) if IS_V else i // D
        ptrs = pool_ptrs[:, None] + i[None, :]
        older = tl.load(ptrs, mask=grown[:, None], other=0)
        codes = older.to(tl.float8e4nv, bitcast=True) if NATIVE else older
        shifted = to_e4m3(from_e4m3(codes, NATIVE).to(tl.float32) * ratio[:, None], NATIVE)
        tl.store(ptrs, tl.where((lies < old)[None, :], shifted, older), mask=grown[:, None])
    tl.debug_barrier()  # other threads' stores above cover bytes that are written next


# A step: up to MAX_TOKENS tokens a sequence


@triton.jit
def _rotate_queries(
    program, q_ptr, out_ptr, cos_ptr, sin_ptr, stride_t, stride_h, out_stride_t, out_stride_h, cos_stride, sin_stride, num_tokens,
    num_heads, D: tl.constexpr, HP: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, STEP: tl.constexpr, NATIVE: tl.constexpr,
    T: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """RoPE on T tokens of HEADS heads of Q."""
    blocks = tl.cdiv(num_heads, HEADS)
    token = program // blocks * T + tl.arange(0, T)
    head = program % blocks * HEADS + tl.arange(0, HEADS)
    valid = ((token < num_tokens)[:, None] & (head < num_heads)[None, :])[:, :, None]
    token = tl.minimum(token, num_tokens - 1).to(tl.int64)
    head = tl.minimum(head, num_heads - 1).to(tl.int64)
    a, b = _load_pairs(q_ptr + (token[:, None] * stride_t + head[None, :] * stride_h)[:, :, None], D, HP, HALF, INTERLEAVED)
    i = tl.arange(0, HP)
    cos, sin = _load_angles(cos_ptr, sin_ptr, token[:, None, None], cos_stride, sin_stride, i, HP, HALF, STEP)
    a, b = _rotate(a, b, cos, sin, i, D, HALF)
    a = round_to(a, out_ptr.dtype.element_ty, NATIVE)
    b = round_to(b, out_ptr.dtype.element_ty, NATIVE)
    out = out_ptr + (token[:, None] * out_stride_t + head[None, :] * out_stride_h)[:, :, None]
    _store_pairs(out, a, b, valid, D, HP, HALF, INTERLEAVED)


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
def _step_pages(table_ptr, length, token, new, head, num_kv_heads, T: tl.constexpr):
    """Where new tokens go: how many older ones their page holds, its `slot` (page and head), the next page's, who is here, and where."""
    old = length % _PAGE
    table_ptr += length // _PAGE
    slot = tl.load(table_ptr).to(tl.int64) * num_kv_heads + head
    next_slot = slot
    if T > 1 and old + new > _PAGE:
        next_slot = tl.load(table_ptr + 1).to(tl.int64) * num_kv_heads + head
    return old, slot, next_slot, (old + token < _PAGE)[None, :], (old + token) % _PAGE


@triton.jit
def _step_factor(
    amax, scale, scale_ptr, pool_ptr, slot, next_slot, held, old, new, here,
    D: tl.constexpr, IS_V: tl.constexpr, STATIC: tl.constexpr, NATIVE: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """What tokens are multiplied by, `[heads, T, 1]`: the inverse of their page's scale, settled here from `amax [heads, T]`."""
    next_scale = scale
    if STATIC:
        if T > 1:
            next_scale = tl.load(scale_ptr + next_slot)
    else:
        older_scale = tl.where(old > 0, scale, 0.0)  # of a page that holds older tokens: it may only grow
        scale = tl.maximum(_power_of_two_scale(tl.max(tl.where(here, amax, 0.0), 1)), older_scale)
        grown = held & (scale > older_scale)
        if (old > 0) & (tl.max(grown.to(tl.int32), 0) > 0):
            _shift(pool_ptr + slot * (D * _PAGE), grown, older_scale * _inverse(scale), old, D, IS_V, NATIVE)
        tl.store(scale_ptr + slot, scale, mask=held)
        if T > 1:
            next_scale = _power_of_two_scale(tl.max(tl.where(here, 0.0, amax), 1))
            if old + new > _PAGE:
                tl.store(scale_ptr + next_slot, next_scale, mask=held)
    return tl.where(here, _inverse(scale)[:, None], _inverse(next_scale)[:, None])[:, :, None]


@triton.jit(do_not_specialize=["table_stride", "num_seqs", "max_seqlen", "num_kv_heads", "num_tokens", "num_q_heads"])
def _step_kernel(
    k_ptr, v_ptr, k_pool_ptr, v_pool_ptr, k_scale_ptr, v_scale_ptr, k_mean_ptr, v_mean_ptr, table_ptr, seqlens_ptr, cu_seqlens_ptr,
    q_ptr, q_out_ptr, cos_ptr, sin_ptr, k_stride_t, k_stride_h, v_stride_t, v_stride_h, q_stride_t, q_stride_h, q_out_stride_t,
    q_out_stride_h, cos_stride, sin_stride, table_stride, num_seqs, max_seqlen, num_kv_heads, num_tokens, num_q_heads,
    D: tl.constexpr, HP: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, STEP: tl.constexpr, STATIC: tl.constexpr,
    NATIVE: tl.constexpr, T: tl.constexpr, HEADS: tl.constexpr, Q_T: tl.constexpr, Q_HEADS: tl.constexpr,
):  # fmt: skip
    k_pool_ptr = k_pool_ptr.to(_BYTES)
    v_pool_ptr = v_pool_ptr.to(_BYTES)
    programs = 2 * tl.cdiv(num_kv_heads, HEADS)  # of a sequence: some heads of K, or of V
    seq = tl.program_id(0) // programs
    program = tl.program_id(0) % programs
    if seq >= num_seqs:
        if q_ptr is not None:
            _rotate_queries(
                tl.program_id(0) - num_seqs * programs, q_ptr, q_out_ptr, cos_ptr, sin_ptr, q_stride_t, q_stride_h, q_out_stride_t,
                q_out_stride_h, cos_stride, sin_stride, num_tokens, num_q_heads, D, HP, HALF, INTERLEAVED, STEP, NATIVE, Q_T, Q_HEADS,
            )  # fmt: skip
        return
    start, new = _new_tokens(cu_seqlens_ptr, seq, max_seqlen)
    if new <= 0:
        return
    token = tl.minimum(tl.arange(0, T), new - 1)  # past the end the last one again: nothing to mask before the stores
    row = (start + token).to(tl.int64)
    head = program // 2 * HEADS + tl.arange(0, HEADS)
    held = head < num_kv_heads
    head = tl.minimum(head, num_kv_heads - 1).to(tl.int64)
    valid = (held[:, None] & (tl.arange(0, T) < new)[None, :])[:, :, None]
    mean = ((seq.to(tl.int64) * num_kv_heads + head) * D)[:, None, None]
    table_ptr += seq.to(tl.int64) * table_stride
    seqlens_ptr += seq
    # The barriers keep the compiler from waiting for the length, then the page, then its scale, before it asks for the tokens.
    if program % 2 == 0:
        a, b = _load_pairs(k_ptr + (head[:, None] * k_stride_h + row[None, :] * k_stride_t)[:, :, None], D, HP, HALF, INTERLEAVED)
        mean_a, mean_b = _load_pairs(k_mean_ptr + mean, D, HP, HALF, INTERLEAVED)
        if HALF > 0:
            i = tl.arange(0, HP)
            cos, sin = _load_angles(cos_ptr, sin_ptr, row[None, :, None], cos_stride, sin_stride, i, HP, HALF, STEP)
        tl.debug_barrier()
        length = _take_turn(seqlens_ptr, new, programs)
        old, slot, next_slot, here, position = _step_pages(table_ptr, length, token, new, head, num_kv_heads, T)
        scale = tl.load(k_scale_ptr + slot)
        if HALF > 0:
            a, b = _rotate(a, b, cos, sin, i, D, HALF)
        a -= mean_a
        b -= mean_b
        amax = tl.max(tl.maximum(_finite(a), _finite(b)), 2)
        factor = _step_factor(amax, scale, k_scale_ptr, k_pool_ptr, slot, next_slot, held, old, new, here, D, False, STATIC, NATIVE, T)
        rows = tl.where(here, slot[:, None], next_slot[:, None]) * (D * _PAGE) + (position * D)[None, :]
        a = to_e4m3(a * factor, NATIVE)
        b = to_e4m3(b * factor, NATIVE)
        _store_pairs(k_pool_ptr + rows[:, :, None], a, b, valid, D, HP, HALF, INTERLEAVED)
    else:
        v = _load_rows(v_ptr + (head[:, None] * v_stride_h + row[None, :] * v_stride_t)[:, :, None], D, HP)
        v_mean = _load_rows(v_mean_ptr + mean, D, HP)
        tl.debug_barrier()
        length = _take_turn(seqlens_ptr, new, programs)
        old, slot, next_slot, here, position = _step_pages(table_ptr, length, token, new, head, num_kv_heads, T)
        scale = tl.load(v_scale_ptr + slot)
        v -= v_mean
        factor = _step_factor(
            tl.max(_finite(v), 2), scale, v_scale_ptr, v_pool_ptr, slot, next_slot, held, old, new, here,
            D, True, STATIC, NATIVE, T,
        )  # fmt: skip
        lies = position // _GROUP * (D * _GROUP) + _v_position(position)
        rows = tl.where(here, slot[:, None], next_slot[:, None]) * (D * _PAGE) + lies[None, :]
        d = tl.arange(0, 2 * HP)
        tl.store(v_pool_ptr + rows[:, :, None] + d * _GROUP, to_e4m3(v * factor, NATIVE), mask=valid & (d < D))


@triton.jit(do_not_specialize=["num_tokens", "num_heads", "first_seq"])
def _queries_kernel(
    q_ptr, out_ptr, cos_ptr, sin_ptr, stride_b, stride_t, stride_h, out_stride_b, out_stride_t, out_stride_h, cos_stride_b, cos_stride,
    sin_stride_b, sin_stride, num_tokens, num_heads, first_seq,
    D: tl.constexpr, HP: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, STEP: tl.constexpr, NATIVE: tl.constexpr,
    T: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    seq = (first_seq + tl.program_id(1)).to(tl.int64)
    _rotate_queries(
        tl.program_id(0), q_ptr + seq * stride_b, out_ptr + seq * out_stride_b, cos_ptr + seq * cos_stride_b,
        sin_ptr + seq * sin_stride_b, stride_t, stride_h, out_stride_t, out_stride_h, cos_stride, sin_stride, num_tokens, num_heads,
        D, HP, HALF, INTERLEAVED, STEP, NATIVE, T, HEADS,
    )  # fmt: skip


# Means


@triton.constexpr_function
def _eps(dtype):
    """The spacing of a dtype's numbers at one; 0 for FP32, which is what all is computed in."""
    return 2.0**-dtype.fp_mantissa_width if dtype.fp_mantissa_width <= 10 else 0.0


@triton.jit
def _shrunk_mean(x, n, EPS: tl.constexpr):
    """`numerics.shrunk_mean` of samples `[N, C]`, of a sequence of n tokens: `[C]`. EPS is that of the dtype that they came in, or 0.

    Pages wait for this, so it is short: one sum for the mean and the variance, divisions by what is known ahead or the same for all. The
    variance as a difference of sums is off by as little of the mean's square, which is added to it, as the mean is of itself.
    """
    total, squares = tl.split(tl.sum(tl.join(x, x * x), 0))
    mean = total * (1 / _SAMPLES)
    noise = tl.maximum(squares - total * mean, 0.0) * (1.0 / ((_SAMPLES - 1) * tl.minimum(n, _SAMPLES).to(tl.float32)))
    square = mean * mean
    shrunk = mean * (square / tl.maximum(square + noise, _TINY))
    if EPS > 0:  # numerics.on_grid
        largest = tl.max(tl.abs(x).to(tl.int32, bitcast=True), 0)  # integers: a warp has an instruction for theirs
        magic = (largest & 0x7F800000).to(tl.float32, bitcast=True) * (1.5 * 2**23 * EPS)
        shrunk = (shrunk + magic) - magic
    return tl.where((tl.abs(shrunk) < float("inf")) & (n > 1), shrunk, 0.0)


@triton.jit
def _sampled_rows(start, new, last):
    """`numerics.sample_rows`, none behind the row `last`: an empty sequence has none, and its mean is zero."""
    return tl.minimum(start + tl.arange(0, _SAMPLES).to(tl.int64) * new // _SAMPLES, last)


@triton.jit
def _fix_mean(
    x_ptr, stride_t, mean_ptr, row, i, new, cos_ptr, sin_ptr, cos_stride, sin_stride,
    D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write the mean of a head's pairs of channels `i`, from its rows `row [N, 1]`."""
    first, second = _channels(i, D, HALF, INTERLEAVED)
    a = _widen(tl.load(x_ptr + row * stride_t + first))
    b = _widen(tl.load(x_ptr + row * stride_t + second))
    EPS: tl.constexpr = 0.0 if HALF > 0 else _eps(x_ptr.dtype.element_ty)
    if HALF > 0:
        cos, sin = _load_angles(cos_ptr, sin_ptr, row, cos_stride, sin_stride, i, D // 2, HALF, STEP)
        a, b = _rotate(a, b, cos, sin, i, D, HALF)
    tl.store(mean_ptr + first, _shrunk_mean(a, new, EPS))
    tl.store(mean_ptr + second, _shrunk_mean(b, new, EPS))


@triton.jit(do_not_specialize=["max_seqlen", "num_kv_heads", "num_tokens", "first_seq"])
def _means_kernel(
    k_ptr, v_ptr, k_mean_ptr, v_mean_ptr, seqlens_ptr, cu_seqlens_ptr, cos_ptr, sin_ptr, k_stride_b, k_stride_t, k_stride_h, v_stride_b,
    v_stride_t, v_stride_h, cos_stride_b, cos_stride, sin_stride_b, sin_stride, max_seqlen, num_kv_heads, num_tokens,
    first_seq,
    D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, STEP: tl.constexpr, PAIRS: tl.constexpr, DENSE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
    seq = (first_seq + tl.program_id(1)).to(tl.int64)
    if DENSE:
        start = 0
        new = max_seqlen
        k_ptr += seq * k_stride_b
        v_ptr += seq * v_stride_b
        if HALF > 0:
            cos_ptr += seq * cos_stride_b
            sin_ptr += seq * sin_stride_b
    else:
        if tl.load(seqlens_ptr + seq) > 0:
            return
        start, new = _new_tokens(cu_seqlens_ptr, seq, max_seqlen)
    PARTS: tl.constexpr = D // (2 * PAIRS)  # of a head
    head = (tl.program_id(0) // (2 * PARTS)).to(tl.int64)
    i = tl.program_id(0) % PARTS * PAIRS + tl.arange(0, PAIRS)
    mean = (seq * num_kv_heads + head) * D
    row = _sampled_rows(start, new, num_tokens - 1)[:, None]
    if tl.program_id(0) // PARTS % 2 == 0:
        _fix_mean(
            k_ptr + head * k_stride_h, k_stride_t, k_mean_ptr + mean, row, i, new, cos_ptr, sin_ptr, cos_stride, sin_stride,
            D, HALF, INTERLEAVED, STEP,
        )  # fmt: skip
    else:
        _fix_mean(v_ptr + head * v_stride_h, v_stride_t, v_mean_ptr + mean, row, i, new, None, None, 0, 0, D, 0, False, 1)


# A prompt: page by page


@triton.jit
def _page_scale(amax, scale_ptr, pool_ptr, old, D: tl.constexpr, IS_V: tl.constexpr, NATIVE: tl.constexpr):
    """The scale of a page whose new tokens' largest value is `amax`, stored; older tokens are shifted to it."""
    scale = _power_of_two_scale(amax)
    if old > 0:  # the page holds older tokens: its scale may only grow
        older_scale = tl.load(scale_ptr)
        scale = tl.maximum(scale, older_scale)
        if scale > older_scale:
            one = tl.arange(0, 1)
            _shift(pool_ptr + one, one == 0, older_scale * _inverse(scale) + one.to(tl.float32), old, D, IS_V, NATIVE)
    tl.store(scale_ptr, scale)
    return scale


@triton.jit
def _k_page(
    x_ptr, stride_t, mean_ptr, pool_ptr, scale_ptr, cos_ptr, sin_ptr, cos_stride, sin_stride, old, end,
    D: tl.constexpr, HP: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, STEP: tl.constexpr, STATIC: tl.constexpr,
    NATIVE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write tokens `[old, end)` of a head's K page; the pointers are token 0's (before the tensors begin, if old > 0)."""
    position = tl.arange(0, _PAGE)
    token = tl.minimum(tl.maximum(position, old), end - 1)  # outside, a new one again: it changes no maximum, and nothing is masked
    a, b = _load_pairs(x_ptr + (token * stride_t)[:, None], D, HP, HALF, INTERLEAVED)
    if HALF > 0:
        i = tl.arange(0, HP)
        cos, sin = _load_angles(cos_ptr, sin_ptr, token[:, None], cos_stride, sin_stride, i, HP, HALF, STEP)
        a, b = _rotate(a, b, cos, sin, i, D, HALF)
    if OVERLAP:
        gdc_wait()  # for the launch before this one, which computes the means
    mean_a, mean_b = _load_pairs(mean_ptr + tl.zeros((1, 1), tl.int32), D, HP, HALF, INTERLEAVED)
    a -= mean_a
    b -= mean_b
    if STATIC:
        scale = tl.load(scale_ptr)
    else:
        amax = tl.max(tl.maximum(tl.abs(a), tl.abs(b)))
        if not (amax < float("inf")):
            amax = tl.max(tl.maximum(_finite(a), _finite(b)))
        scale = _page_scale(amax, scale_ptr, pool_ptr, old, D, False, NATIVE)
    if OVERLAP:
        gdc_launch_dependents()  # the next one may begin when nobody has more to do than write
    factor = _inverse(scale)
    valid = ((position >= old) & (position < end))[:, None]
    # Not more than the eight channels that a thread has loaded: it would have to load 16, of one token and with 16 means.
    rows = tl.multiple_of(pool_ptr + (position * D)[:, None], [8, 8])
    _store_pairs(rows, to_e4m3(a * factor, NATIVE), to_e4m3(b * factor, NATIVE), valid, D, HP, HALF, INTERLEAVED)


@triton.jit
def _word_token(word):
    """The first token of a page's word: 1, 8 and 9 behind it are the others (`layout.V_ORDER`)."""
    return word // (_GROUP // 4) * _GROUP + _v_token(word % (_GROUP // 4) * 4)


@triton.jit
def _store_words(pool_ptr, words, first, old, end, D: tl.constexpr, DP: tl.constexpr):
    """Write tokens `[old, end)` of a head's V page, given as `words [32, DP]` whose tokens begin at `first [32]`."""
    GROUPS: tl.constexpr = _PAGE // _GROUP
    WORDS: tl.constexpr = _GROUP // 4  # of a group and channel
    d = tl.arange(0, DP)
    words = tl.permute(tl.reshape(words, (GROUPS, WORDS, DP)), (0, 2, 1))
    group = tl.arange(0, GROUPS)[:, None, None]
    ptrs = pool_ptr.to(tl.pointer_type(tl.int32)) + (group * D + d[None, :, None]) * WORDS + tl.arange(0, WORDS)[None, None, :]
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
def _v_page(
    x_ptr, stride_t, mean_ptr, pool_ptr, scale_ptr, old, end, D: tl.constexpr, HP: tl.constexpr, STATIC: tl.constexpr,
    NATIVE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """`_k_page` for V, transposed. A thread reads the four tokens that share a word of the page, so that whole words change threads."""
    first = _word_token(tl.arange(0, _PAGE // 4))
    last = end - 1
    x0 = _load_rows(x_ptr + (tl.minimum(tl.maximum(first, old), last) * stride_t)[:, None], D, HP)
    x1 = _load_rows(x_ptr + (tl.minimum(tl.maximum(first + 1, old), last) * stride_t)[:, None], D, HP)
    x2 = _load_rows(x_ptr + (tl.minimum(tl.maximum(first + 8, old), last) * stride_t)[:, None], D, HP)
    x3 = _load_rows(x_ptr + (tl.minimum(tl.maximum(first + 9, old), last) * stride_t)[:, None], D, HP)
    if OVERLAP:
        gdc_wait()  # for the launch before this one, which computes the means
    mean = _load_rows(mean_ptr + tl.zeros((1, 1), tl.int32), D, HP)
    x0 -= mean
    x1 -= mean
    x2 -= mean
    x3 -= mean
    if STATIC:
        scale = tl.load(scale_ptr)
    else:
        amax = tl.max(tl.maximum(tl.maximum(tl.abs(x0), tl.abs(x1)), tl.maximum(tl.abs(x2), tl.abs(x3))))
        if not (amax < float("inf")):
            amax = tl.max(tl.maximum(tl.maximum(_finite(x0), _finite(x1)), tl.maximum(_finite(x2), _finite(x3))))
        scale = _page_scale(amax, scale_ptr, pool_ptr, old, D, True, NATIVE)
    if OVERLAP:
        gdc_launch_dependents()  # the next one may begin when nobody has more to do than write
    factor = _inverse(scale)
    words = pack_e4m3(x0 * factor, x1 * factor, x2 * factor, x3 * factor, NATIVE)
    _store_words(pool_ptr, words, first, old, end, D, 2 * HP)


@triton.jit(do_not_specialize=["table_stride", "num_seqs", "max_seqlen", "num_kv_heads", "first_seq"])
def _page_kernel(
    k_ptr, v_ptr, k_pool_ptr, v_pool_ptr, k_scale_ptr, v_scale_ptr, k_mean_ptr, v_mean_ptr, table_ptr, seqlens_ptr, cu_seqlens_ptr,
    cos_ptr, sin_ptr, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h, cos_stride_b, cos_stride, sin_stride_b,
    sin_stride, table_stride, num_seqs, max_seqlen, num_kv_heads, first_seq,
    D: tl.constexpr, HP: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, STEP: tl.constexpr, STATIC: tl.constexpr,
    NATIVE: tl.constexpr, DENSE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    k_pool_ptr = k_pool_ptr.to(_BYTES)
    v_pool_ptr = v_pool_ptr.to(_BYTES)
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
    old = tl.maximum(length - first, 0)
    end = tl.minimum(length + new - first, _PAGE)
    if old >= end:
        return
    if not DENSE:
        page = tl.load(table_ptr + wide * table_stride + column)
    row = (start + first - length).to(tl.int64)
    slot = page.to(tl.int64) * num_kv_heads + head
    mean = (wide * num_kv_heads + head) * D
    head = head.to(tl.int64)
    if is_v == 0:
        if HALF > 0:
            cos_ptr += row * cos_stride
            sin_ptr += row * sin_stride
        _k_page(
            k_ptr + row * k_stride_t + head * k_stride_h, k_stride_t, k_mean_ptr + mean, k_pool_ptr + slot * (D * _PAGE),
            k_scale_ptr + slot, cos_ptr, sin_ptr, cos_stride, sin_stride, old, end, D, HP, HALF, INTERLEAVED, STEP, STATIC, NATIVE, OVERLAP,
        )  # fmt: skip
    else:
        _v_page(
            v_ptr + row * v_stride_t + head * v_stride_h, v_stride_t, v_mean_ptr + mean, v_pool_ptr + slot * (D * _PAGE),
            v_scale_ptr + slot, old, end, D, HP, STATIC, NATIVE, OVERLAP,
        )  # fmt: skip


@triton.jit
def _bytes(x_ptr, token, end, stride_t, D: tl.constexpr, DP: tl.constexpr):
    """Bytes of tokens, `[T, DP]`; past the end the last one's."""
    d = tl.arange(0, DP)
    rows = x_ptr + (tl.minimum(token, end - 1) * stride_t)[:, None]
    if DP == D:
        return tl.load(rows + d)
    else:
        return tl.load(rows + d, mask=tl.zeros(rows.shape, tl.int32) + d < D, other=0)


@triton.jit(do_not_specialize=["num_kv_heads", "length", "first_seq"])
def _bytes_kernel(
    k_ptr, v_ptr, k_pool_ptr, v_pool_ptr, k_scale_ptr, v_scale_ptr, k_mean_ptr, v_mean_ptr, table_ptr, seqlens_ptr,
    k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h, num_kv_heads, length,
    first_seq,
    D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Pages of what is E4M3 already: its bytes as they are, scales of one, means of zero."""
    k_ptr = k_ptr.to(_BYTES)
    v_ptr = v_ptr.to(_BYTES)
    k_pool_ptr = k_pool_ptr.to(_BYTES)
    v_pool_ptr = v_pool_ptr.to(_BYTES)
    is_v = tl.program_id(0) % 2
    head = (tl.program_id(0) // 2).to(tl.int64)
    column = tl.program_id(1)
    seq = (first_seq + tl.program_id(2)).to(tl.int64)
    page = (first_seq + tl.program_id(2)) * tl.num_programs(1) + column
    first = column * _PAGE
    end = tl.minimum(length - first, _PAGE)
    slot = page.to(tl.int64) * num_kv_heads + head
    d = tl.arange(0, DP)
    if tl.program_id(0) == 0:
        tl.store(table_ptr + page, page)
        if column == 0:
            tl.store(seqlens_ptr + seq, length)
    if is_v == 0:
        tl.store(k_scale_ptr + slot, 1.0)
        if column == 0:
            tl.store(k_mean_ptr + (seq * num_kv_heads + head) * D + d, tl.zeros((DP,), tl.float32), mask=d < D)
        token = tl.arange(0, _PAGE)
        x = _bytes(k_ptr + seq * k_stride_b + head * k_stride_h + first.to(tl.int64) * k_stride_t, token, end, k_stride_t, D, DP)
        tl.store(k_pool_ptr + slot * (D * _PAGE) + (token * D)[:, None] + d, x, mask=(token < end)[:, None] & (d < D))
    else:
        tl.store(v_scale_ptr + slot, 1.0)
        if column == 0:
            tl.store(v_mean_ptr + (seq * num_kv_heads + head) * D + d, tl.zeros((DP,), tl.float32), mask=d < D)
        v_ptr += seq * v_stride_b + head * v_stride_h + first.to(tl.int64) * v_stride_t
        first_token = _word_token(tl.arange(0, _PAGE // 4))
        words = _bytes(v_ptr, first_token, end, v_stride_t, D, DP).to(tl.int32)
        words |= _bytes(v_ptr, first_token + 1, end, v_stride_t, D, DP).to(tl.int32) << 8
        words |= _bytes(v_ptr, first_token + 8, end, v_stride_t, D, DP).to(tl.int32) << 16
        words |= _bytes(v_ptr, first_token + 9, end, v_stride_t, D, DP).to(tl.int32) << 24
        _store_words(v_pool_ptr + slot * (D * _PAGE), words, first_token, 0, end, D, DP)


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
    fix_means: bool = False,
) -> None:
    """`reference.append`, bit for bit (NaN may lose its sign); but for means, whose sums are taken in another order."""
    if not k.shape[0] or not max_seqlen:
        return
    device, num_tokens, num_seqs = k.device, k.shape[0], pages.page_table.shape[0]
    _, heads, _, head_dim = pages.k.shape
    row, angles, ((*_, cos_stride), (*_, sin_stride)) = _rotation(head_dim, rope_cos, rope_sin, rope_interleaved)
    native = is_native(device)
    means, lengths = (pages.k_mean, pages.v_mean), (pages.cache_seqlens, cu_seqlens)
    pools = _typed(pages.k, native), _typed(pages.v, native), pages.k_scale, pages.v_scale
    k_strides, v_strides = k.stride()[:2], v.stride()[:2]
    # Sequences follow one another: no strides between them.
    strides = (0, *k_strides, 0, *v_strides, 0, cos_stride, 0, sin_stride)
    if fix_means:
        args = k, v, *means, *lengths, *angles, *strides, max_seqlen, heads, num_tokens
        _launch_means(args, row, heads, num_seqs, dense=False, overlap=False)
    if max_seqlen <= MAX_TOKENS:
        queries, query_strides, query_shape = (None, None), (0, 0, 0, 0), (0, 0)
        if q is not None:
            queries, query_strides, query_shape = (q, q_out), (*q.stride()[:2], *q_out.stride()[:2]), q.shape[:2]
        args = (
            k, v, *pools, *means, pages.page_table, *lengths, *queries, *angles, *k_strides, *v_strides, *query_strides, cos_stride,
            sin_stride, pages.page_table.stride(0), num_seqs, max_seqlen, heads, *query_shape,
        )  # fmt: skip
        grid, given = _step_plan(device, heads, num_seqs, max_seqlen, static_scales, native, *query_shape, *row.items())
        launch(_step_kernel, grid, args, given)
        return
    columns = (max_seqlen + PAGE_SIZE - 2) // PAGE_SIZE + 1  # the most pages that so many tokens can touch
    args = (
        k, v, *pools, *means, pages.page_table, *lengths, *angles, *strides, pages.page_table.stride(0), num_seqs, max_seqlen, heads,
    )  # fmt: skip
    pairs = row["HP"]
    given = constants("page", device, **row, STATIC=static_scales, NATIVE=native, DENSE=False, OVERLAP=False, num_warps=pairs // 8)
    if cu_seqlens is None:
        _launch_sequences(_page_kernel, (2 * heads, columns), num_seqs, args, given)
    else:
        places = num_tokens // PAGE_SIZE + 2 * num_seqs
        launch(_page_kernel, (2 * heads, min(places, MAX_GRID), -(-places // MAX_GRID)), (*args, 0), given)
    if q is not None:
        _rotate_dense(q[None], q_out[None], row, angles, ((0, cos_stride), (0, sin_stride)))
    pages.cache_seqlens.add_(max_seqlen if cu_seqlens is None else cu_seqlens.diff())


@lru_cache(maxsize=4096)
def _step_plan(
    device: torch.device, heads: int, num_seqs: int, max_seqlen: int, static: bool, native: bool, num_tokens: int, num_q_heads: int,
    *row: tuple[str, int],
) -> tuple[tuple[int], Constants]:  # fmt: skip
    """Grid and constants of `_step_kernel`, for so many tokens and heads of queries (0: none) and what `_rotation` says of a row."""
    row = dict(row)
    pairs, tokens = row["HP"], _power_of_two(max_seqlen)
    block = min(_power_of_two(heads), max(1, STEP_ELEMENTS // (2 * pairs * tokens)))
    block = max(block, _power_of_two(-(-2 * heads // MAX_PROGRAMS)))
    tile, programs = _query_tile(num_tokens, num_q_heads, pairs) if num_q_heads else ((1, 1), 0)
    given = constants(
        "step", device, **row, STATIC=static, NATIVE=native, T=tokens, HEADS=block, Q_T=tile[0], Q_HEADS=tile[1], num_warps=4
    )  # fmt: skip
    return (num_seqs * 2 * -(-heads // block) + programs,), given


def quantize(
    k: torch.Tensor, v: torch.Tensor, *, rope_cos: torch.Tensor | None, rope_sin: torch.Tensor | None, rope_interleaved: bool, means: bool
) -> KVPages:
    """`reference.quantize`, bit for bit, as `append` is `reference.append`."""
    device = k.device
    native = is_native(device)
    batch, heads, length, head_dim = k.shape
    columns = -(-length // PAGE_SIZE)
    num_pages = batch * columns
    pairs = _power_of_two(head_dim // 2)
    row, angles, (cos_strides, sin_strides) = _rotation(head_dim, rope_cos, rope_sin, rope_interleaved)
    k_shape, v_shape = page_shapes(num_pages, heads, head_dim)
    k_pages, v_pages = torch.empty(k_shape, dtype=FP8, device=device), torch.empty(v_shape, dtype=FP8, device=device)
    k_scale = torch.empty(num_pages, heads, dtype=torch.float32, device=device)
    v_scale = torch.empty(num_pages, heads, dtype=torch.float32, device=device)
    given_bytes = k.dtype == FP8
    make_mean = torch.empty if means or given_bytes else torch.zeros  # else no launch writes them
    k_mean = make_mean(batch, heads, head_dim, dtype=torch.float32, device=device)
    v_mean = make_mean(batch, heads, head_dim, dtype=torch.float32, device=device)
    table = torch.empty(batch, columns, dtype=torch.int32, device=device)
    lengths = torch.empty(batch, dtype=torch.int32, device=device)
    (k_b, k_h, k_t, _), (v_b, v_h, v_t, _) = k.stride(), v.stride()
    if batch == 1:  # a stride that leads nowhere can be anything
        k_b = v_b = 0
    pages = _typed(k_pages, native), _typed(v_pages, native), k_scale, v_scale, k_mean, v_mean, table
    if given_bytes:
        args = _typed(k, native), _typed(v, native), *pages, lengths, k_b, k_t, k_h, v_b, v_t, v_h, heads, length
        given = constants("bytes", device, D=head_dim, DP=2 * pairs, num_warps=pairs // 8)
        _launch_sequences(_bytes_kernel, (2 * heads, columns), batch, args, given)
        return KVPages.trusted(k_pages, v_pages, k_scale, v_scale, k_mean, v_mean, table, lengths)
    strides = (k_b, k_t, k_h, v_b, v_t, v_h, *cos_strides, *sin_strides)
    overlap = means and overlaps(device)  # pages are read while their means are computed
    if means:
        args = k, v, k_mean, v_mean, None, None, *angles, *strides, length, heads, length
        _launch_means(args, row, heads, batch, dense=True, overlap=overlap)
    args = k, v, *pages, lengths, None, *angles, *strides, columns, batch, length, heads
    options = {"launch_pdl": True} if overlap else {}
    given = constants("page", device, **row, STATIC=False, NATIVE=native, DENSE=True, OVERLAP=overlap, num_warps=pairs // 8, **options)
    _launch_sequences(_page_kernel, (2 * heads, columns), batch, args, given)
    return KVPages.trusted(k_pages, v_pages, k_scale, v_scale, k_mean, v_mean, table, lengths)


def _launch_sequences(kernel, grid: tuple[int, ...], num_seqs: int, args: tuple, given: Constants) -> None:
    """A launch for all sequences, which are the grid's last dimension; several where CUDA has no more of that."""
    for first in range(0, num_seqs, MAX_GRID):
        launch(kernel, (*grid, min(MAX_GRID, num_seqs - first)), (*args, first), given)


def _launch_means(args: tuple, row: dict, heads: int, num_seqs: int, *, dense: bool, overlap: bool) -> None:
    given = {name: row[name] for name in ("D", "HALF", "INTERLEAVED", "STEP", "enable_fp_fusion")}
    given = constants("means", args[0].device, **given, PAIRS=MEAN_PAIRS, DENSE=dense, OVERLAP=overlap, num_warps=1)
    _launch_sequences(_means_kernel, (row["D"] // MEAN_PAIRS * heads,), num_seqs, args, given)


def rotate(x: torch.Tensor, rope_cos: torch.Tensor, rope_sin: torch.Tensor, rope_interleaved: bool) -> torch.Tensor:
    """`reference.rotate`, bit for bit."""
    out = torch.empty_like(x)
    if x.numel():
        row, angles, angle_strides = _rotation(x.shape[3], rope_cos, rope_sin, rope_interleaved)
        _rotate_dense(x.transpose(1, 2), out.transpose(1, 2), row, angles, angle_strides)
    return out


def _rotate_dense(x: torch.Tensor, out: torch.Tensor, row: dict, angles: tuple, angle_strides: tuple) -> None:
    """RoPE on `x [B, T, H, D]`; the rest is `_rotation`'s of tables `[B, T, R / 2]`."""
    cos_strides, sin_strides = angle_strides
    batch, tokens, heads, _ = x.shape
    tile, programs = _query_tile(tokens, heads, row["HP"])
    given = constants("queries", x.device, **row, NATIVE=is_native(x.device), T=tile[0], HEADS=tile[1], num_warps=4)
    args = x, out, *angles, *x.stride()[:3], *out.stride()[:3], *cos_strides, *sin_strides, tokens, heads
    _launch_sequences(_queries_kernel, (programs,), batch, args, given)


def _query_tile(tokens: int, heads: int, pairs: int) -> tuple[tuple[int, int], int]:
    """Tokens and heads of Q that one program rotates; how many programs there are."""
    tile_heads = min(_power_of_two(heads), QUERY_ELEMENTS // (2 * pairs))
    tile = QUERY_ELEMENTS // (2 * pairs * tile_heads), tile_heads
    return tile, -(-tokens // tile[0]) * -(-heads // tile[1])


def _rotation(
    head_dim: int, cos: torch.Tensor | None, sin: torch.Tensor | None, interleaved: bool
) -> tuple[dict[str, int], tuple[torch.Tensor | None, torch.Tensor | None], tuple[tuple[int, ...], tuple[int, ...]]]:
    """What kernels need to know of a row and its rotation: constants, the tables, and the tables' strides but for their last."""
    half, step, strides = 0, 1, ((0, 0), (0, 0))
    if cos is not None:
        if cos.stride(-1) != sin.stride(-1):
            cos, sin = cos.contiguous(), sin.contiguous()
        half, step, strides = cos.shape[-1], cos.stride(-1), (cos.stride()[:-1], sin.stride()[:-1])
    row = {
        "D": head_dim, "HP": _power_of_two(head_dim // 2), "HALF": half, "INTERLEAVED": interleaved and half > 0, "STEP": step,
        "enable_fp_fusion": False,
    }  # fmt: skip
    return row, (cos, sin), strides


def _typed(x: torch.Tensor, native: bool) -> torch.Tensor:
    """As a kernel's argument: where E4M3 is not native, no target knows its type, and bytes are bytes."""
    return x if native or x.dtype != FP8 else x.view(torch.uint8)


def _power_of_two(n: int) -> int:
    """The smallest that is not below `n >= 1`. (`triton.next_power_of_2` takes 8 us.)"""
    return 1 << (n - 1).bit_length()
