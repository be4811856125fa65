"""Writes a prompt, or dense K and V, page by page. A program reads 128 tokens of a head's K or V once, and keeps them
in registers while it settles the page's scale. In a dense call with RoPE, other programs of the launch apply it to Q.

The tokens are two tiles `[64, C]`. A tile of K has 64 consecutive tokens. The tiles of V have the first two and the
last two tokens of each word. At head_dim 512, registers hold half of the channels (`rows`): the program reads the page
to find its scale, and then each half again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..codec import finite, pack_e4m3, round_to, round_to_codes
from ..common import GROUP, PAGE, new_tokens, slot_of
from ..launch import MAX_GRID
from ..rotation import hadamard
from .rows import channels, load_halves, load_lanes, load_rows, quarters, store_rows
from .settle import bits_of, float_of, no_maxima, settle_page, with_maxima
from .slot import codes_ptr_of, launch_dependents, word_token

_MAX_GRID = tl.constexpr(MAX_GRID)


@triton.jit
def _prefetch(x_ptr, stride_t, CODES: tl.constexpr):
    """Prefetch a page's rows, from `x_ptr` on, to the L2 cache. For 16-bit inputs, each thread requests one line of 128
    bytes. A row of 64 bytes requests a whole line.
    """
    SIZE: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth // 8
    LINES: tl.constexpr = (CODES.width * SIZE + 127) // 128
    i = tl.arange(0, PAGE * LINES)
    lines = (x_ptr + i // LINES * stride_t).to(tl.pointer_type(tl.uint8)) + tl.minimum(
        i % LINES * 128, (CODES.head_dim - 1) * SIZE
    )
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _load_keys(first, part, x_ptr, stride_t, angles, old, end, CODES: tl.constexpr):
    """The tile of a K page from its token `first` on, after RoPE.

    `angles` are pointers to cos and sin of token 0, and the stride of their tokens.
    """
    position = first + tl.arange(0, PAGE // 2)
    # Rows outside repeat a new token: no maximum changes, so no mask is needed.
    token = tl.minimum(tl.maximum(position, old), end - 1)
    rows = (token * stride_t)[:, None]
    if CODES.rope is None:
        return load_halves(x_ptr + rows, CODES, part)
    else:
        cos, sin, stride = angles
        angle = (token * stride)[:, None]
        return load_halves(x_ptr + rows, CODES, part, (cos + angle, sin + angle))


@triton.jit
def _rotate_queries(x_ptr, stride_t, out_ptr, out_stride_t, angles, num_tokens, CODES: tl.constexpr):
    """RoPE on a head of Q. The programs of a head divide its tokens."""
    cos, sin, stride = angles
    for first in range(tl.program_id(1) * (PAGE // 2), num_tokens, tl.num_programs(1) * (PAGE // 2)):
        row = tl.cast(first, tl.int64)
        end = num_tokens - first
        first_ptr = x_ptr + row * stride_t
        first_angles = cos + row * stride, sin + row * stride, stride
        x = _load_keys(0, 0, first_ptr, stride_t, first_angles, 0, end, CODES)
        token = tl.arange(0, PAGE // 2)
        rows = out_ptr + (row + token)[:, None] * out_stride_t
        store_rows(rows, round_to(x, out_ptr.dtype.element_ty, CODES.native), (token < end)[:, None], CODES)


@triton.jit
def _load_values(first, part, x_ptr, stride_t, old, end, CODES: tl.constexpr):
    """Tokens `first [32]` and the next ones as one tile `[64, C]`."""
    last = end - 1
    rows = x_ptr + (tl.minimum(tl.maximum(first, old), last) * stride_t)[:, None]
    a = load_halves(rows, CODES, part)
    rows = x_ptr + (tl.minimum(tl.maximum(first + 1, old), last) * stride_t)[:, None]
    b = load_halves(rows, CODES, part)
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (PAGE // 2, CODES.part_width))


@triton.jit
def _take_apart(x):
    """The two tiles of tokens that `_load_values` has joined."""
    return tl.split(tl.permute(tl.reshape(x, (PAGE // 4, 2, x.shape[1])), (0, 2, 1)))


@triton.jit
def _load(part, x_ptr, stride_t, mean_ptr, angles, old, end, ahead, CODES: tl.constexpr, ROTATE: tl.constexpr):
    """The tiles of a part of a head's page as they are rounded; and prefetch the page `ahead` tokens on.

    The pointers `x_ptr` and those of `angles` are of token 0. If `old` > 0, they point before the tensors. A thread
    reads the four tokens of V that share a word of the page, so that whole words change threads.

    Returns:
        The tiles, and of V the largest finite magnitude of the first token, all its channels; of K, 0.0.
    """
    IS_V: tl.constexpr = CODES.is_v
    if IS_V:
        word = word_token(tl.arange(0, PAGE // 4))
        x0 = _load_values(word, part, x_ptr, stride_t, old, end, CODES)
        x1 = _load_values(word + 8, part, x_ptr, stride_t, old, end, CODES)
        # Every warp loads the first token again, which is cheaper than to select it.
        token = load_lanes(x_ptr + old * stride_t, CODES)
    else:
        x0 = _load_keys(0, part, x_ptr, stride_t, angles, old, end, CODES)
        x1 = _load_keys(PAGE // 2, part, x_ptr, stride_t, angles, old, end, CODES)
    if CODES.native and ahead > 0:  # behind this page's loads, which would wait behind it in the memory pipeline
        _prefetch(x_ptr + ahead.to(tl.int64) * stride_t, stride_t, CODES)
    if not IS_V:
        tl.debug_barrier()  # ptxas: `D128 dense e4m3`, whose loads of the first tile follow one another with it
        if ROTATE:
            x0 = hadamard(x0, CODES.head_dim)
            x1 = hadamard(x1, CODES.head_dim)
    if mean_ptr is not None:
        mean = load_rows(mean_ptr + tl.zeros((1, 1), tl.int32), CODES, part)
        x0 -= mean
        x1 -= mean
        if IS_V:
            token -= load_lanes(mean_ptr, CODES)
    if IS_V:
        return x0, x1, float_of(tl.max(tl.max(bits_of(finite(token)), 1), 0))
    else:
        return x0, x1, 0.0


@triton.jit
def _store_keys(x, part, first, codes_ptr, old, end, CODES: tl.constexpr):
    """Round the tile of a K page from its token `first` on."""
    CODEC: tl.constexpr = CODES.codec
    C: tl.constexpr = CODES.part_width
    HALF: tl.constexpr = CODES.width // 2  # of a row, from one half of a part to the other
    position = first + tl.arange(0, PAGE // 2)
    rows = codes_ptr + (position * CODES.head_dim)[:, None]
    valid = ((position >= old) & (position < end))[:, None]
    if CODES.head_dim == CODES.width:
        # In the parts that were loaded, and not more bytes than the eight channels that a thread has in a row: nothing
        # changes threads.
        rows = tl.multiple_of(rows, [8, 8])
        i = part * (C // 2) + tl.arange(0, C // 4)
        x0, x1, x2, x3 = quarters(x)
        tl.store(rows + i, round_to_codes(x0, CODEC, CODES.native), mask=valid)
        tl.store(rows + C // 4 + i, round_to_codes(x1, CODEC, CODES.native), mask=valid)
        tl.store(rows + HALF + i, round_to_codes(x2, CODEC, CODES.native), mask=valid)
        tl.store(rows + (HALF + C // 4) + i, round_to_codes(x3, CODEC, CODES.native), mask=valid)
    else:
        store_rows(rows, round_to_codes(x, CODEC, CODES.native), valid, CODES)


@triton.jit
def _store_words(words, part, codes_ptr, old, end, CODES: tl.constexpr):
    """Write tokens `[old, end)` of a head's V page, given as its `words [32, C]`, of a part of the channels."""
    D: tl.constexpr = CODES.head_dim
    C: tl.constexpr = CODES.part_width
    GROUPS: tl.constexpr = PAGE // GROUP
    WORDS: tl.constexpr = GROUP // 4  # of a group and channel
    d = channels(part, CODES)
    words = tl.permute(tl.reshape(words, (GROUPS, WORDS, C)), (0, 2, 1))
    group = tl.arange(0, GROUPS)[:, None, None]
    ptrs = (
        codes_ptr.to(tl.pointer_type(tl.int32))
        + (group * D + d[None, :, None]) * WORDS
        + tl.arange(0, WORDS)[None, None, :]
    )
    inside = (d < D)[None, :, None]
    if (old > 0) | (end < PAGE):
        # Bytes of older tokens stay; those past the end become zero, because 0 * NaN would be NaN.
        first = word_token(tl.arange(0, PAGE // 4))
        new = tl.where((first >= old) & (first < end), 0xFF, 0)
        new |= tl.where((first + 1 >= old) & (first + 1 < end), 0xFF00, 0)
        new |= tl.where((first + 8 >= old) & (first + 8 < end), 0xFF0000, 0)
        new |= tl.where((first + 9 >= old) & (first + 9 < end), -0x1000000, 0)
        new = tl.reshape(new, (GROUPS, WORDS))[:, None, :]
        older = tl.load(ptrs, mask=(d < tl.where(old > 0, D, 0))[None, :, None], other=0)
        words = (words & new) | (older & ~new)
    tl.store(ptrs, words, mask=inside)


@triton.jit
def _store(x0, x1, part, slot_ptr, old, end, CODES: tl.constexpr):
    """Round the tiles of a part of a page, settled, and write their tokens `[old, end)`. V is transposed."""
    codes_ptr = codes_ptr_of(slot_ptr, CODES)
    if CODES.is_v:
        a, b = _take_apart(x0)
        c, d = _take_apart(x1)
        _store_words(pack_e4m3(a, b, c, d, CODES.native), part, codes_ptr, old, end, CODES)
    else:
        _store_keys(x0, part, 0, codes_ptr, old, end, CODES)
        _store_keys(x1, part, PAGE // 2, codes_ptr, old, end, CODES)


@triton.jit
def _write(x_ptr, stride_t, mean_ptr, slot_ptr, angles, old, end, ahead, CODES: tl.constexpr, ROTATE: tl.constexpr):
    """Write tokens `[old, end)` of a head's page. The arguments are `_load`'s."""
    PARTS: tl.constexpr = CODES.parts
    maxima = None
    if PARTS > 1 and not CODES.static:
        maxima = no_maxima()
        for part in range(PARTS):
            x0, x1, _ = _load(part, x_ptr, stride_t, mean_ptr, angles, old, end, 0, CODES, ROTATE)
            maxima = with_maxima(maxima, x0, x1)
    for part in range(PARTS):
        next_page = tl.where(part == 0, ahead, 0)
        x0, x1, first = _load(part, x_ptr, stride_t, mean_ptr, angles, old, end, next_page, CODES, ROTATE)
        x0, x1 = settle_page(x0, x1, part, first, maxima, slot_ptr, old, CODES)
        _store(x0, x1, part, slot_ptr, old, end, CODES)


NUMBERS = "num_queries", "table_stride", "num_seqs", "max_seqlen", "num_kv_heads", "columns_ahead", "first_seq"


@triton.jit(do_not_specialize=NUMBERS)
def page_kernel(
    k_ptr, v_ptr, pool_ptr, k_mean_ptr, v_mean_ptr, table_ptr, seqlens_ptr, cu_seqlens_ptr,
    cos_ptr, sin_ptr, cos_stride_b, cos_stride, q_ptr, q_out_ptr, q_cos_ptr, q_sin_ptr, q_stride_b, q_stride_h,
    q_stride_t,
    q_out_stride_b, q_out_stride_h, q_out_stride_t, q_cos_stride_b, q_cos_stride, num_queries,
    k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    table_stride, num_seqs, max_seqlen, num_kv_heads, columns_ahead, first_seq, OPTIONS: tl.constexpr,
):  # fmt: skip
    """The kernel. A program writes K or V of a head of a page. Dense pages are consecutive, and the kernel also writes
    their page table.

    The tables of RoPE, of K and of Q, are those of dense sequences; cos and sin have the same strides. The programs
    after those of K and V apply RoPE to a head of Q.
    """
    K: tl.constexpr = OPTIONS.k
    V: tl.constexpr = OPTIONS.v
    ROPE: tl.constexpr = K.rope
    Q: tl.constexpr = OPTIONS.q
    DENSE: tl.constexpr = K.dense
    LAYOUT: tl.constexpr = K.layout
    if OPTIONS.hopper:
        launch_dependents()
    # Heads follow each other, so that programs that run at the same time read neighboring memory.
    is_v = tl.program_id(0) % 2
    head = tl.program_id(0) // 2
    if Q is not None:  # noqa: SIM102 - at compile time
        if head >= num_kv_heads:
            seq = (first_seq + tl.program_id(2)).to(tl.int64)
            q_head = (tl.program_id(0) - 2 * num_kv_heads).to(tl.int64)
            angles = q_cos_ptr + seq * q_cos_stride_b, q_sin_ptr + seq * q_cos_stride_b, q_cos_stride
            q_ptr += seq * q_stride_b + q_head * q_stride_h
            q_out_ptr += seq * q_out_stride_b + q_head * q_out_stride_h
            _rotate_queries(q_ptr, q_stride_t, q_out_ptr, q_out_stride_t, angles, num_queries, Q)
            return
    if cu_seqlens_ptr is None:
        column = tl.program_id(1)
        seq = first_seq + tl.program_id(2)
        start, new = new_tokens(cu_seqlens_ptr, seqlens_ptr, seq, max_seqlen, K.advance)
    else:
        # A sequence of n tokens touches at most n // 128 + 2 pages, so its places may begin at start // 128 + 2 * seq.
        place = tl.program_id(1) + tl.program_id(2) * _MAX_GRID
        seq = -1
        for s in range(0, num_seqs, 128):
            seqs = s + tl.arange(0, 128)
            starts = tl.load(cu_seqlens_ptr + seqs, mask=seqs < num_seqs, other=0)
            seq += tl.sum(((seqs < num_seqs) & (starts // PAGE + 2 * seqs <= place)).to(tl.int32), 0)
        start, new = new_tokens(cu_seqlens_ptr, seqlens_ptr, seq, max_seqlen, K.advance)
        column = place - start // PAGE - 2 * seq
    wide = seq.to(tl.int64)
    if DENSE:  # sequences have their own strides and consecutive pages, which the first program writes to the table
        start = 0
        length = 0
        page = seq * tl.num_programs(1) + column
        if tl.program_id(0) == 0:
            tl.store(table_ptr + page, page)
            if column == 0:
                tl.store(seqlens_ptr + seq, new)
        k_ptr += wide * k_stride_b
        v_ptr += wide * v_stride_b
        if ROPE is not None:
            cos_ptr += wide * cos_stride_b
            sin_ptr += wide * cos_stride_b
    else:
        length = tl.load(seqlens_ptr + seq)
        if not K.advance:
            length -= new
        column += length // PAGE
    first = column * PAGE  # the page's first token
    old = 0 if DENSE else tl.maximum(length - first, 0)
    end = tl.minimum(length + new - first, PAGE)
    if old >= end:
        return
    if not DENSE:
        page = tl.load(table_ptr + wide * table_stride + column)
    ahead = columns_ahead * PAGE  # tokens of a page that a later program reads, if there is one
    if first + ahead + PAGE > length + new:
        ahead = 0
    row = (start + first - length).to(tl.int64)
    head = head.to(tl.int64)
    slot_ptr = slot_of(pool_ptr, page, num_kv_heads, head, LAYOUT)
    if is_v == 0:
        if ROPE is not None:
            cos_ptr += row * cos_stride
            sin_ptr += row * cos_stride
        if k_mean_ptr is not None:
            k_mean_ptr += head * K.head_dim
        k_ptr += row * k_stride_t + head * k_stride_h
        angles = cos_ptr, sin_ptr, cos_stride
        _write(k_ptr, k_stride_t, k_mean_ptr, slot_ptr, angles, old, end, ahead, K, OPTIONS.rotate)
    else:
        if v_mean_ptr is not None:
            v_mean_ptr += head * V.head_dim
        v_ptr += row * v_stride_t + head * v_stride_h
        _write(v_ptr, v_stride_t, v_mean_ptr, slot_ptr, None, old, end, ahead, V, False)
