"""A slot is a page of one head, `[K | V | header]` (`layout`). Positions of tokens and scales in it, and new scales for its codes."""

from __future__ import annotations

import triton
import triton.language as tl

from ...layout import HEADER, PAGE_SIZE, V_GROUP
from ..fp8 import encode, from_codes, round_where, to_codes

PAGE = tl.constexpr(PAGE_SIZE)
GROUP = tl.constexpr(V_GROUP)
HEADER_WORDS = tl.constexpr(HEADER // 4)
_HEADER = tl.constexpr(HEADER)
_FLOATS = tl.constexpr(tl.pointer_type(tl.float32))


@triton.jit
def slot_bytes(D: tl.constexpr):
    """The size of a slot."""
    return 2 * PAGE * D + _HEADER


@triton.jit
def scale_ptr_of(slot_ptr, D: tl.constexpr, IS_V: tl.constexpr):
    """The pointer to the scale of K or V in the slot at `slot_ptr`."""
    return (slot_ptr + 2 * PAGE * D).to(_FLOATS) + (1 if IS_V else 0)


@triton.jit
def v_position(token):
    """The position of a token in its group of V (`layout.V_POSITION`)."""
    return (token & 1) | ((token >> 2) & 2) | ((token << 1) & 12)


@triton.jit
def v_token(position):
    """The token of a group of V at a position (`layout.V_ORDER`)."""
    return (position & 1) | ((position & 2) << 2) | ((position >> 1) & 6)


@triton.jit
def word_token(word):
    """The first token of a 32-bit word of V. The others are the tokens 1, 8 and 9 after it (`layout.V_ORDER`)."""
    return word // (GROUP // 4) * GROUP + v_token(word % (GROUP // 4) * 4)


@triton.jit
def new_tokens(cu_seqlens_ptr, seqlens_ptr, seq, max_seqlen, ADVANCE: tl.constexpr):
    """The index of a sequence's first new token, and the number of its new tokens.

    If the lengths count the new tokens already, a sequence that is shorter than its new tokens is padding of the batch, and has none.
    """
    if cu_seqlens_ptr is None:
        start = seq * max_seqlen
        new = max_seqlen
    else:
        start = tl.load(cu_seqlens_ptr + seq)
        new = tl.load(cu_seqlens_ptr + seq + 1) - start
    if not ADVANCE:
        new = tl.where(new > tl.load(seqlens_ptr + seq), 0, new)
    return start, new


@triton.jit
def round_again(x, before, factor, CODES: tl.constexpr, SATURATE: tl.constexpr):
    """Round the rows `before [N, 1]` of `x * factor` to codes, as FP32 numbers. The other rows of `x [N, C]` do not change."""
    y = x * tl.where(before, factor, 1.0)
    if CODES.int8 and not SATURATE:
        return round_where(y, before)
    else:
        return tl.where(before, encode(y, CODES.int8, CODES.native), y)


@triton.jit
def rescale(codes_ptr, ratio, old, CODES: tl.constexpr):
    """Multiply the codes of the first `old` tokens at `codes_ptr` (K or V of a slot) by `ratio`, because their scale has grown."""
    # Bytes in the order of memory, 2048 at a time: few enough for registers, and a divisor of every page.
    SIZE: tl.constexpr = 2048
    D: tl.constexpr = CODES.row.head_dim
    for first in range(0, tl.cdiv(old, GROUP) * (GROUP * D), SIZE):
        i = first + tl.arange(0, SIZE)
        token = i // (D * GROUP) * GROUP + v_token(i % GROUP) if CODES.is_v else i // D
        codes = tl.load(codes_ptr + i)
        shifted = to_codes(from_codes(codes, CODES.int8, CODES.native) * ratio, CODES.int8, CODES.native)
        tl.store(codes_ptr + i, tl.where(token < old, shifted, codes))
    tl.debug_barrier()  # other threads' stores above cover bytes that are read or written next
