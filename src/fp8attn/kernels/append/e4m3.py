"""Pages of K and V that are E4M3 already, with unchanged bytes and scales of one."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common import PAGE
from ..rows import store_rows
from .slot import HEADER_WORDS, SCALE_WORDS, header_ptr_of, store_words, word_token


@triton.jit
def _load_bytes(x_ptr, token, end, stride_t, ROW: tl.constexpr):
    """Bytes of tokens `[T, C]`. Rows past the end repeat the last token."""
    D: tl.constexpr = ROW.head_dim
    C: tl.constexpr = ROW.width
    c = tl.arange(0, C)
    rows = x_ptr + (tl.minimum(token, end - 1) * stride_t)[:, None]
    if C == D:
        return tl.load(rows + c)
    else:
        return tl.load(rows + c, mask=tl.zeros(rows.shape, tl.int32) + c < D, other=0)


@triton.jit(do_not_specialize=["num_kv_heads", "length", "first_seq"])
def e4m3_kernel(
    k_ptr, v_ptr, pool_ptr, table_ptr, seqlens_ptr, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t,
    v_stride_h, num_kv_heads,
    length, first_seq, CODES: tl.constexpr,
):  # fmt: skip
    """The kernel. A program writes K or V of a head of a page."""
    ROW: tl.constexpr = CODES.row
    LAYOUT: tl.constexpr = CODES.layout
    D: tl.constexpr = ROW.head_dim
    k_ptr = k_ptr.to(tl.pointer_type(tl.uint8))
    v_ptr = v_ptr.to(tl.pointer_type(tl.uint8))
    is_v = tl.program_id(0) % 2
    head = (tl.program_id(0) // 2).to(tl.int64)
    column = tl.program_id(1)
    seq = (first_seq + tl.program_id(2)).to(tl.int64)
    page = (first_seq + tl.program_id(2)) * tl.num_programs(1) + column
    first = column * PAGE
    end = tl.minimum(length - first, PAGE)
    slot_ptr = pool_ptr + (page.to(tl.int64) * num_kv_heads + head) * LAYOUT.nbytes
    if tl.program_id(0) == 0:
        tl.store(table_ptr + page, page)
        if column == 0:
            tl.store(seqlens_ptr + seq, length)
    if is_v == 0:
        i = tl.arange(0, HEADER_WORDS)
        tl.store(header_ptr_of(slot_ptr, LAYOUT) + i, tl.where(i < SCALE_WORDS, 1.0, 0.0))
        token = tl.arange(0, PAGE)
        x = _load_bytes(
            k_ptr + seq * k_stride_b + head * k_stride_h + first.to(tl.int64) * k_stride_t, token, end, k_stride_t, ROW
        )
        store_rows(slot_ptr + LAYOUT.k_offset + (token * D)[:, None], x, (token < end)[:, None], ROW)
    else:
        v_ptr += seq * v_stride_b + head * v_stride_h + first.to(tl.int64) * v_stride_t
        first_token = word_token(tl.arange(0, PAGE // 4))
        words = _load_bytes(v_ptr, first_token, end, v_stride_t, ROW).to(tl.int32)
        words |= _load_bytes(v_ptr, first_token + 1, end, v_stride_t, ROW).to(tl.int32) << 8
        words |= _load_bytes(v_ptr, first_token + 8, end, v_stride_t, ROW).to(tl.int32) << 16
        words |= _load_bytes(v_ptr, first_token + 9, end, v_stride_t, ROW).to(tl.int32) << 24
        store_words(slot_ptr + LAYOUT.v_offset, words, first_token, 0, end, ROW)
