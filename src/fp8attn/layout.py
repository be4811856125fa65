"""The page layout, which every writer and every kernel uses.

A page holds 128 tokens of one KV head in one run of bytes: K `[128, D]`, V `[8, D, 16]`, then a header with their scales.

V has groups of 16 tokens, and each group is transposed. An FP8 tensor-core operand must be contiguous along the contracted axis, which is
V's tokens. 8 channels of a group are 128 contiguous bytes, the unit that a tensor core reads (a core matrix). A token that is appended
touches `D / 8` of these units. The tokens of a group are in `V_ORDER`, so that the registers of a softmax accumulator are the operand of
P·V without a shuffle.
"""

from __future__ import annotations

import torch

PAGE_SIZE = 128
V_GROUP = 16  # tokens of a group of V
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
HEADER = 128  # bytes: the scales of K and V in float32, 8 bytes for what serving engines mark, `KVPages.nan_in_k`, then zeros

# V_ORDER[position] is the token at a position of a group; V_POSITION is the inverse.
V_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
V_POSITION = tuple(V_ORDER.index(token) for token in range(V_GROUP))


def pack_k(x: torch.Tensor) -> torch.Tensor:
    """Tokens `[P * 128, H, D]` to K pages `[P, H, 128, D]`; any dtype."""
    return x.unflatten(0, (-1, PAGE_SIZE)).transpose(1, 2).contiguous()


def unpack_k(pages: torch.Tensor) -> torch.Tensor:
    """K pages `[P, H, 128, D]` to tokens `[P * 128, H, D]`."""
    return pages.transpose(1, 2).flatten(0, 1)


def pack_v(x: torch.Tensor) -> torch.Tensor:
    """Tokens `[P * 128, H, D]` to V pages `[P, H, 8, D, 16]`, transposed and in `V_ORDER`; any dtype."""
    groups = x.unflatten(0, (-1, PAGE_SIZE // V_GROUP, V_GROUP))
    return groups[:, :, list(V_ORDER)].permute(0, 3, 1, 4, 2).contiguous()


def unpack_v(pages: torch.Tensor) -> torch.Tensor:
    """V pages `[P, H, 8, D, 16]` to tokens `[P * 128, H, D]`."""
    return pages.permute(0, 2, 4, 1, 3)[:, :, list(V_POSITION)].flatten(0, 2)


def page_bytes(head_dim: int) -> int:
    """Bytes of a page of one KV head: K, V and the header."""
    return 2 * PAGE_SIZE * head_dim + HEADER
