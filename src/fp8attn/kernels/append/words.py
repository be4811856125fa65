"""V in a page is 32-bit words of four tokens of a channel."""

from __future__ import annotations

import triton
import triton.language as tl

from .slot import GROUP, PAGE


@triton.jit
def store_words(page_ptr, words, first, old, end, ROW: tl.constexpr):
    """Write tokens `[old, end)` of a head's V page, given as `words [32, C]` whose tokens begin at `first [32]`."""
    D: tl.constexpr = ROW.head_dim
    C: tl.constexpr = ROW.width
    GROUPS: tl.constexpr = PAGE // GROUP
    WORDS: tl.constexpr = GROUP // 4  # of a group and channel
    d = tl.arange(0, C)
    words = tl.permute(tl.reshape(words, (GROUPS, WORDS, C)), (0, 2, 1))
    group = tl.arange(0, GROUPS)[:, None, None]
    ptrs = page_ptr.to(tl.pointer_type(tl.int32)) + (group * D + d[None, :, None]) * WORDS + tl.arange(0, WORDS)[None, None, :]
    inside = (d < D)[None, :, None]
    if (old > 0) | (end < PAGE):  # bytes of older tokens stay; those past the end become zero, because 0 * NaN would be NaN
        new = tl.where((first >= old) & (first < end), 0xFF, 0)
        new |= tl.where((first + 1 >= old) & (first + 1 < end), 0xFF00, 0)
        new |= tl.where((first + 8 >= old) & (first + 8 < end), 0xFF0000, 0)
        new |= tl.where((first + 9 >= old) & (first + 9 < end), -0x1000000, 0)
        new = tl.reshape(new, (GROUPS, WORDS))[:, None, :]
        older = tl.load(ptrs, mask=(d < tl.where(old > 0, D, 0))[None, :, None], other=0)
        words = (words & new) | (older & ~new)
    tl.store(ptrs, words, mask=inside)
