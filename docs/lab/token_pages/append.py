"""Writes a prompt to pages with a scale for every token: the product's `append.page` with scales of rows, which nothing settles.

Finite inputs only, no RoPE and no means. `layout.store` defines the bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8attn.formats.codec import INT8, MAX_SCALE, MIN_SCALE
from fp8attn.formats.page_layout import PAGE_SIZE, PageLayout
from fp8attn.kernels.append import Codes, _columns_ahead
from fp8attn.kernels.append.page import _load_keys, _load_values, _prefetch, _store_keys, _take_apart
from fp8attn.kernels.append.slot import PAGE, store_words, word_token
from fp8attn.kernels.codec import to_int8
from fp8attn.kernels.launch import launch, make_constants
from fp8attn.kernels.rotation import hadamard
from fp8attn.kernels.rows import row_of

from .layout import TokenPages, nbytes

_MIN = tl.constexpr(MIN_SCALE)
_MAX = tl.constexpr(MAX_SCALE)


@triton.jit
def _rounded(x, token, scales_ptr, old, end):
    """Rows `x [N, C]` of `token [N]` divided by their scales. Stores the scales, and zeros behind the end."""
    scale = tl.minimum(tl.maximum(tl.max(tl.abs(x), 1) * (1 / 127.0), _MIN), _MAX)
    bits = (scale.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000  # rounded up to BF16
    position = token // 32 * 32 + token % 8 * 4 + token // 8 % 4
    stored = tl.where(token < end, bits >> 16, 0).to(tl.int16)
    tl.store(scales_ptr.to(tl.pointer_type(tl.int16)) + position, stored, mask=token >= old)
    return x * tl.div_rn(1.0, bits.to(tl.float32, bitcast=True))[:, None]


@triton.jit
def _pack(a, b, c, d):
    """Codes of four tensors as the bytes of int32 words, a the lowest."""
    words = (to_int8(a).to(tl.int32) | (to_int8(b).to(tl.int32) << 8)) | (to_int8(c).to(tl.int32) << 16)
    return words | (to_int8(d).to(tl.int32) << 24)


@triton.jit(do_not_specialize=["table_stride", "new", "heads", "columns_ahead"])
def token_append_kernel(k_ptr, v_ptr, pool_ptr, table_ptr, lengths_ptr, k_stride_t, k_stride_h, v_stride_t, v_stride_h, table_stride, new,
                        heads, columns_ahead, CODES: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """A program writes K or V of a head of a page: `new` tokens of each sequence, which holds `lengths` tokens before."""
    ROW: tl.constexpr = CODES.row
    D: tl.constexpr = ROW.head_dim
    is_v = tl.program_id(0) % 2
    head = (tl.program_id(0) // 2).to(tl.int64)
    seq = tl.program_id(2)
    length = tl.load(lengths_ptr + seq)
    column = tl.program_id(1) + length // PAGE
    first = column * PAGE
    old = tl.maximum(length - first, 0)
    end = tl.minimum(length + new - first, PAGE)
    if old >= end:
        return
    page = tl.load(table_ptr + seq.to(tl.int64) * table_stride + column)
    slot_ptr = pool_ptr + (page.to(tl.int64) * heads + head) * SIZE
    scales_ptr = slot_ptr + 2 * PAGE * D
    ahead = columns_ahead * PAGE
    if first + ahead + PAGE > length + new:
        ahead = 0
    row = (seq * new + first - length).to(tl.int64)
    if is_v == 0:
        x_ptr = k_ptr + row * k_stride_t + head * k_stride_h
        x0, t0 = _load_keys(0, x_ptr, k_stride_t, (k_ptr, k_ptr), (0, 0), old, end, ROW)
        x1, t1 = _load_keys(PAGE // 2, x_ptr, k_stride_t, (k_ptr, k_ptr), (0, 0), old, end, ROW)
        if CODES.native and ahead > 0:
            _prefetch(x_ptr + ahead.to(tl.int64) * k_stride_t, k_stride_t, ROW)
        tl.debug_barrier()
        x0 = _rounded(hadamard(x0, D), t0, scales_ptr, old, end)
        x1 = _rounded(hadamard(x1, D), t1, scales_ptr, old, end)
        _store_keys(x0, t0, slot_ptr, old, end, CODES)
        _store_keys(x1, t1, slot_ptr, old, end, CODES)
    else:
        x_ptr = v_ptr + row * v_stride_t + head * v_stride_h
        i = word_token(tl.arange(0, PAGE // 4))
        x0 = _load_values(i, x_ptr, v_stride_t, old, end, ROW)
        x1 = _load_values(i + 8, x_ptr, v_stride_t, old, end, ROW)
        if CODES.native and ahead > 0:
            _prefetch(x_ptr + ahead.to(tl.int64) * v_stride_t, v_stride_t, ROW)
        j = tl.arange(0, PAGE // 2)
        token = word_token(j // 2) + j % 2
        x0 = _rounded(x0, token, scales_ptr + 2 * PAGE, old, end)
        x1 = _rounded(x1, token + 8, scales_ptr + 2 * PAGE, old, end)
        a, b = _take_apart(x0)
        c, d = _take_apart(x1)
        store_words(slot_ptr + PAGE * D, _pack(a, b, c, d), i, old, end, ROW)


def append(pages: TokenPages, k: torch.Tensor, v: torch.Tensor, new: int, native: bool = True) -> None:
    """Append `k` and `v [num_seqs * new, num_kv_heads, head_dim]`; lengths do not change."""
    heads, head_dim = k.shape[1:]
    row, *_ = row_of(head_dim, None)
    codes = Codes(row, PageLayout.of(head_dim), False, INT8, native, False, False)
    given = make_constants("token append", k.device, CODES=codes, SIZE=nbytes(head_dim), num_warps=row.width // 16, enable_fp_fusion=False,
                           maxnreg=128)  # fmt: skip
    ahead = _columns_ahead(k.device, heads, row.width) if native else 0
    columns = (new + PAGE_SIZE - 2) // PAGE_SIZE + 1
    args = (k, v, pages.pool, pages.page_table, pages.lengths, *k.stride()[:2], *v.stride()[:2], pages.page_table.stride(0), new, heads,
            ahead)  # fmt: skip
    launch(token_append_kernel, (2 * heads, columns, len(pages.page_table)), args, given)
