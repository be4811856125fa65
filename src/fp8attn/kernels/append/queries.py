"""RoPE on Q. In a step, programs of the step's launch apply it; for a prompt or a dense tensor it is a separate launch."""

from __future__ import annotations

import triton
import triton.language as tl

from ..codec import round_to
from ..rows import load_rotated, store_rows


@triton.jit
def rotate_queries(program, pointers, strides, num_tokens, num_heads, QUERIES: tl.constexpr):
    """RoPE on some tokens of some heads of Q.

    Args:
        pointers: to Q, the result, cos and sin.
        strides: of tokens and heads of Q, of tokens and heads of the result, of tokens of cos and sin.
    """
    q_ptr, out_ptr, cos_ptr, sin_ptr = pointers
    stride_t, stride_h, out_stride_t, out_stride_h, cos_stride, sin_stride = strides
    ROW: tl.constexpr = QUERIES.row
    HEADS: tl.constexpr = QUERIES.heads
    TOKENS: tl.constexpr = QUERIES.tokens
    blocks = tl.cdiv(num_heads, HEADS)
    row = tl.arange(0, TOKENS * HEADS)
    token = program // blocks * TOKENS + row // HEADS
    head = program % blocks * HEADS + row % HEADS
    valid = ((token < num_tokens) & (head < num_heads))[:, None]
    token = tl.minimum(token, num_tokens - 1).to(tl.int64)
    head = tl.minimum(head, num_heads - 1).to(tl.int64)
    x = load_rotated(
        q_ptr + (token * stride_t + head * stride_h)[:, None], cos_ptr + (token * cos_stride)[:, None],
        sin_ptr + (token * sin_stride)[:, None], ROW,
    )  # fmt: skip
    out = out_ptr + (token * out_stride_t + head * out_stride_h)[:, None]
    store_rows(out, round_to(x, out_ptr.dtype.element_ty, QUERIES.native), valid, ROW)


@triton.jit(do_not_specialize=["num_tokens", "num_heads", "first_seq"])
def rope_kernel(
    q_ptr, out_ptr, cos_ptr, sin_ptr, stride_b, stride_t, stride_h, out_stride_b, out_stride_t, out_stride_h, cos_stride_b, cos_stride,
    sin_stride_b, sin_stride, num_tokens, num_heads, first_seq, QUERIES: tl.constexpr,
):  # fmt: skip
    """The kernel. The second dimension of the grid is the sequence of `[B, T, H, D]`."""
    seq = (first_seq + tl.program_id(1)).to(tl.int64)
    program = tl.program_id(0)
    pointers = q_ptr + seq * stride_b, out_ptr + seq * out_stride_b, cos_ptr + seq * cos_stride_b, sin_ptr + seq * sin_stride_b
    strides = stride_t, stride_h, out_stride_t, out_stride_h, cos_stride, sin_stride
    rotate_queries(program, pointers, strides, num_tokens, num_heads, QUERIES)
