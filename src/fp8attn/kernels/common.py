"""Definitions that all kernels share: `append`, `prefill`, `decode`, `portable` and `combine`.

The kernels of attention use the same names for the same things:

| name | what |
|---|---|
| `mean_score` | the score of K's mean, by row; the LSE, sinks and a softcap depend on it, weights do not |
| `WEIGHT_BITS` | weights are multiplied by two to this power, so that small ones keep their bits; one for each kernel |
| `v_unit` | the scale of V that is the unit of an accumulator |
| `v_ratio` | the unit before a tile, in units of this tile's |
| `ring` | the stages of shared memory between a producer and those that read them |
| `first`, `last`, `end` | the keys that a row sees, where `end` is `last + 1` |
| `any_first`, `all_first` | the first key that some row sees, and that all rows see |

Scores are exponents of two until the LSE is stored.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from ..formats.page_layout import K_SCALE, PAGE_SIZE, V_GROUP, V_SCALE

RELEASE = tuple(map(int, triton.__version__.split(".")[:2]))  # of Triton
PAGE = tl.constexpr(PAGE_SIZE)
GROUP = tl.constexpr(V_GROUP)
K_SCALE_WORD = tl.constexpr(K_SCALE // 4)  # of the header, in words of four bytes
V_SCALE_WORD = tl.constexpr(V_SCALE // 4)

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))

UNSEEN = tl.constexpr(-1e28)  # a row's maximum before it has seen a key: finite, so that differences are
HIDDEN = tl.constexpr(float("-inf"))  # a masked score, and the LSE of a row without keys
# A masked score where inf - inf could arise; far below `UNSEEN`, so weights are exactly zero.
HIDDEN_FINITE = tl.constexpr(-1e30)


@triton.jit
def v_position(token):
    """The position of a token in its group of V (the inverse of `page_layout.V_ORDER`)."""
    return (token & 1) | ((token >> 2) & 2) | ((token << 1) & 12)


@triton.jit
def v_token(position):
    """The token of a group of V at a position (`page_layout.V_ORDER`)."""
    return (position & 1) | ((position & 2) << 2) | ((position >> 1) & 6)


@triton.jit
def slot_of(pool_ptr, page, num_kv_heads, head, LAYOUT: tl.constexpr):
    """The pointer to a page of one head, `[K | V | header]`, a slot. LAYOUT: its `PageLayout`."""
    return pool_ptr + (page.to(tl.int64) * num_kv_heads + head) * LAYOUT.nbytes


@triton.jit
def header_of(slot_ptr, LAYOUT: tl.constexpr):
    """The pointer to the header of a slot, in words."""
    return (slot_ptr + LAYOUT.header_offset).to(tl.pointer_type(tl.float32))


@triton.jit
def new_tokens(cu_seqlens_ptr, seqlens_ptr, seq, max_seqlen, ADVANCE: tl.constexpr):
    """The index of a sequence's first new token, and the number of its new tokens.

    If the lengths count the new tokens already, a sequence that is shorter than its new tokens is padding of the batch,
    and has none.
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


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n >= 1`, to which kernels pad head_dim. (`triton.next_power_of_2`
    takes 8 us.)
    """
    return 1 << (n - 1).bit_length()
