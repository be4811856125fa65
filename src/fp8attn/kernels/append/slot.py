"""What the kernels that write pages share: positions of tokens and scales in a slot, and new scales for its codes.

A slot is a page of one head, `[K | V | header]` (`formats.page_layout`). V is 32-bit words of four tokens of a channel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..codec import ROUND, clamp, from_codes, to_codes
from ..common import GROUP, K_SCALE_WORD, V_SCALE_WORD, header_of, v_token


@triton.jit
def scale_ptr_of(slot_ptr, CODES: tl.constexpr):
    """The pointer to the scale of K or V in the slot at `slot_ptr`."""
    LAYOUT: tl.constexpr = CODES.layout
    return header_of(slot_ptr, LAYOUT) + (V_SCALE_WORD if CODES.is_v else K_SCALE_WORD)


@triton.jit
def store_scale(scale_ptr, scale, broken, CODES: tl.constexpr, exists=None):
    """Write settled scales, where they exist. One is NaN if its page is `broken` by a NaN that has no code (INT8)."""
    if not CODES.codec.has_nan:
        scale = tl.where(broken, float("nan"), scale)
    tl.store(scale_ptr, scale, mask=exists)


@triton.jit
def codes_ptr_of(slot_ptr, CODES: tl.constexpr):
    """The pointer to K or V in the slot at `slot_ptr`."""
    return slot_ptr + (CODES.layout.v_offset if CODES.is_v else CODES.layout.k_offset)


@triton.jit
def word_token(word):
    """The first token of a 32-bit word of V. The others are the tokens 1, 8 and 9 after it (`page_layout.V_ORDER`)."""
    return word // (GROUP // 4) * GROUP + v_token(word % (GROUP // 4) * 4)


@triton.jit
def round_again(x, before, factor, CODES: tl.constexpr, CLAMP: tl.constexpr):
    """Round the rows `before [N, 1]` of `x * factor` to codes, as FP32 numbers (`Codec.encode`). The other rows of
    `x [N, C]` do not change. Without CLAMP, all values are in the range of codes.
    """
    CODEC: tl.constexpr = CODES.codec
    x *= tl.where(before, factor, 1.0)
    if not CODEC.is_integer:
        return tl.where(before, from_codes(to_codes(x, CODEC, CODES.native), CODEC, CODES.native), x)
    elif CLAMP:
        return tl.where(before, (clamp(x, CODEC) + ROUND) - ROUND, x)
    else:
        magic = tl.where(before, ROUND, 0.0)
        return (x + magic) - magic


@triton.jit
def rescale(codes_ptr, ratio, old, CODES: tl.constexpr):
    """Multiply the codes of the first `old` tokens at `codes_ptr` (K or V of a slot) by `ratio`, because their scale
    has grown.
    """
    # Bytes in the order of memory, 2048 at a time: few enough for registers, and a divisor of every page.
    SIZE: tl.constexpr = 2048
    CODEC: tl.constexpr = CODES.codec
    D: tl.constexpr = CODES.head_dim
    for first in range(0, tl.cdiv(old, GROUP) * (GROUP * D), SIZE):
        i = first + tl.arange(0, SIZE)
        token = i // (D * GROUP) * GROUP + v_token(i % GROUP) if CODES.is_v else i // D
        codes = tl.load(codes_ptr + i)
        shifted = to_codes(from_codes(codes, CODEC, CODES.native) * ratio, CODEC, CODES.native)
        tl.store(codes_ptr + i, tl.where(token < old, shifted, codes))
    tl.debug_barrier()  # other threads' stores above cover bytes that are read or written next


@triton.jit
def launch_dependents():
    """Allow the next launch, if it is programmatic, to begin once all programs are here. It waits for the end of this
    launch by itself.

    A kernel that calls this must not be programmatic itself: attention reads queries, of earlier launches, before that
    wait.
    """
    asm: tl.constexpr = "griddepcontrol.launch_dependents; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
