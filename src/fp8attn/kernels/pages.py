"""Pages in shared memory: how TMA brings them, and what the tensor cores take them for."""

from __future__ import annotations

from functools import lru_cache

from ..layout import PAGE_SIZE, V_GROUP, KVPages
from .gluon import fetch, gl, gluon, reinterpret
from .launch import Tiles, View

PAGE = gl.constexpr(PAGE_SIZE)
ROW = 256  # bytes in a row of V's blocks: TMA has no longer ones
BUNDLE = ROW // V_GROUP  # channels of a row


def tiles(pages: KVPages, width: int, part: int) -> tuple[Tiles, Tiles]:
    """A page of one head of K, and of V, as TMA copies them.

    `width` is head_dim padded to a power of two; what lies past head_dim becomes zeros. K's block is `[128, width]`. V's has its channels
    in parts, `[width / part, 8, part, 16]` (in rows of `ROW` bytes), and is not swizzled.
    """
    k, v = _views(pages.v.shape, width, part)
    return Tiles(pages.k, k), Tiles(pages.v, v)


@lru_cache(maxsize=4096)
def _views(shape: tuple[int, ...], width: int, part: int) -> tuple[View, View]:
    """Of `tiles`, for `KVPages.v` of this shape."""
    num_pages, heads, groups, head_dim, _ = shape
    slots, parts = num_pages * heads, -(-head_dim // part)
    if slots * PAGE_SIZE >= 2**31:
        raise ValueError(f"{num_pages} pages of {heads} KV heads are too many for TMA's 32-bit coordinates; split them over several pools")
    bundles = min(part, head_dim) // BUNDLE
    return (
        View((slots * PAGE_SIZE, head_dim), (head_dim, 1), (PAGE_SIZE, width)),
        View(
            (slots, parts, groups, bundles, ROW), (head_dim * PAGE_SIZE, part * V_GROUP, head_dim * V_GROUP, ROW, 1),
            (1, width // part, groups, part // BUNDLE, ROW), swizzled=False,
        ),
    )  # fmt: skip


@gluon.constexpr_function
def v_layout(part):
    """A part of V's block as `[part, 128]`, channels and tokens: one group of 16 tokens after the other."""
    in_group = [[0, 1 << bit] for bit in range(4)]
    channels = [[1 << bit, 0] for bit in range(part.bit_length() - 1)]
    groups = [[0, V_GROUP << bit] for bit in range(3)]
    return gl.SharedLinearLayout(in_group + channels + groups, alignment=128)


@gluon.jit
def fetch_k(k_desc, slot, barrier, memory):
    """Starts to copy K of `slot` (page x heads + head) to `memory [128, width]`."""
    fetch(k_desc, [slot * PAGE, 0], barrier, memory)


@gluon.jit
def fetch_v(v_desc, slot, barrier, memory, stage, STAGES: gl.constexpr):
    """Starts to copy V of `slot` to one of the stages of `memory [STAGES * parts, part, 128]`."""
    SHAPE: gl.constexpr = [STAGES] + v_desc.block_type.shape  # noqa: RUF005
    LAYOUT: gl.constexpr = v_desc.layout
    fetch(v_desc, [slot, 0, 0, 0, 0], barrier, reinterpret(memory, gl.float8e4nv, SHAPE, LAYOUT).index(stage))
