"""Device code: quantizes latents, and writes them and their keys with RoPE to their tokens' places."""

import triton
import triton.language as tl

from ...formats import latent
from ..codec import magnitude, to_int8
from ..common import PAGE, new_tokens
from ..rotation import hadamard

_BLOCK = tl.constexpr(latent.BLOCK)
_MOST_CODE = tl.constexpr(latent.MOST_CODE)
_MOST_ROPE = tl.constexpr(latent.MOST_ROPE)


@triton.jit
def scale_of(amax):
    """The scales of tokens whose rotated channels have the largest magnitudes `amax [N]`."""
    return tl.where(amax < float("inf"), amax * (1 / _MOST_CODE), float("nan"))


@triton.jit
def codes_of(y, scale):
    """The bytes of rotated channels `y [N, C]`."""
    each = tl.broadcast_to(scale[:, None], y.shape)
    ratio = tl.minimum(tl.maximum(tl.div_rn(y, each), -_MOST_CODE), _MOST_CODE)
    return to_int8(tl.where(each > 0, ratio, 0.0))


@triton.jit(do_not_specialize=["table_stride", "max_seqlen", "num_kv_heads", "blocks"])
def append_kernel(
    x_ptr, rope_ptr, pool_ptr, mean_ptr, factor_ptr, table_ptr, seqlens_ptr, cu_seqlens_ptr,
    x_stride_t, x_stride_h, rope_stride_t, rope_stride_h, table_stride, max_seqlen, num_kv_heads, blocks,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """The kernel. A program writes some new tokens of one sequence and KV head."""
    LAYOUT: tl.constexpr = OPTIONS.layout
    RANK: tl.constexpr = OPTIONS.rank
    ROPE: tl.constexpr = OPTIONS.rope
    TOKENS: tl.constexpr = OPTIONS.rows
    program = tl.program_id(0)
    seq = program // (blocks * num_kv_heads)
    head = program // blocks % num_kv_heads
    first = program % blocks * TOKENS
    start, new = new_tokens(cu_seqlens_ptr, seqlens_ptr, seq, max_seqlen, OPTIONS.advance)
    if first >= new:
        return
    length = tl.load(seqlens_ptr + seq)
    if not OPTIONS.advance:
        length -= new
    token = first + tl.arange(0, TOKENS)
    valid = (token < new)[:, None]
    token = tl.minimum(token, new - 1)
    row = (start + token).to(tl.int64)[:, None]
    c = tl.arange(0, RANK)[None, :]
    x = tl.load(x_ptr + row * x_stride_t + head * x_stride_h + c).to(tl.float32)
    if mean_ptr is not None:
        x -= tl.load(mean_ptr + head * RANK + c)
    if factor_ptr is not None:
        factor = tl.load(factor_ptr + head * (RANK // _BLOCK) + c // _BLOCK)
        x = tl.div_rn(x, tl.broadcast_to(factor, x.shape))
    y = hadamard(x, RANK)
    amax = magnitude(y, OPTIONS.native)
    if ROPE > 0:
        i = tl.arange(0, ROPE)[None, :]
        key = tl.load(rope_ptr + row * rope_stride_t + head * rope_stride_h + i).to(tl.float32)
        if OPTIONS.rope_in_codes:
            key = hadamard(key, ROPE)
            amax = tl.maximum(amax, magnitude(key, OPTIONS.native), propagate_nan=tl.PropagateNan.ALL)
    scale = scale_of(amax)
    page = tl.load(table_ptr + seq.to(tl.int64) * table_stride + (length + token) // PAGE).to(tl.int64)
    page_ptr = pool_ptr + ((page * num_kv_heads + head) * LAYOUT.nbytes)[:, None]
    position = ((length + token) % PAGE)[:, None]
    tl.store(page_ptr + LAYOUT.k_offset + position * RANK + c, codes_of(y, scale), mask=valid)
    scale_ptr = (page_ptr + LAYOUT.header_offset).to(tl.pointer_type(tl.float32)) + position
    tl.store(scale_ptr, scale[:, None], mask=valid)
    if OPTIONS.rope_in_codes:
        key_ptr = page_ptr + LAYOUT.v_offset + position * ROPE + i
        tl.store(key_ptr, codes_of(key, scale), mask=valid)
    elif ROPE > 0:
        key = tl.where(key == key, tl.minimum(tl.maximum(key, -_MOST_ROPE), _MOST_ROPE), key)
        key_ptr = (page_ptr + LAYOUT.v_offset).to(tl.pointer_type(tl.float16)) + position * ROPE + i
        tl.store(key_ptr, key.to(tl.float16), mask=valid)
    if OPTIONS.advance and OPTIONS.alone:
        tl.debug_barrier()  # all threads have the old length
        tl.store(seqlens_ptr + seq, length + new)
