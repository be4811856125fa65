"""Tiles, the parts of a page that kernels multiply: how TMA copies them, and their layouts in shared memory for the
tensor cores.

A tile has `tile` tokens of one page and KV head, a number that divides the page's 128. It is an option of a launch.
With n = 128 / tile, tile t of a sequence is part `t % n` (`part_of`) of the page in column `t // n` (`column_of`) of
the page table. The scales of a page are the scales of each of its tiles.
"""

from __future__ import annotations

from functools import lru_cache

from ..formats.page_layout import PAGE_SIZE, V_GROUP
from ..formats.spec import PageSpec
from .common import GROUP, PAGE
from .gluon import fetch, gl, gluon, reinterpret
from .view import View

ROW = 256  # bytes in a row of V's blocks: TMA has no longer ones
BUNDLE = ROW // V_GROUP  # channels of a row


@lru_cache(maxsize=4096)  # descriptors are found by their view, so plans of other batches share them
def views(pool: tuple[int, ...], spec: PageSpec, width: int, part: int, tile: int) -> tuple[View, View]:
    """K and V of a tile of one head as TMA copies them, for a pool of pages of `spec`, of shape `pool`.

    `width` is head_dim padded to a power of two; the padding is zero. K's block is `[1, tile, width]`. V's block has
    its channels in parts, `[1, width / part, tile / 16, part, 16]` (in rows of `ROW` bytes), and is not swizzled.

    Raises:
        ValueError: the pool has more than 2^31 pages of a head, which TMA's coordinates cannot number.
    """
    page, head_dim = spec.layout, spec.k_dim
    num_pages, heads, nbytes = pool
    slots, parts = num_pages * heads, -(-head_dim // part)
    if slots >= 2**31:
        raise ValueError(
            f"{num_pages} pages of {heads} KV heads are too many for TMA's 32-bit coordinates; split them over several "
            f"pools"
        )
    bundles = min(part, head_dim) // BUNDLE
    return (
        View((slots, PAGE_SIZE, head_dim), (nbytes, head_dim, 1), (1, tile, width), dtype=spec.k.dtype,
        offset=page.k_offset),
        View(
            (slots, parts, PAGE_SIZE // V_GROUP, bundles, ROW), (nbytes, part * V_GROUP, head_dim * V_GROUP, ROW, 1),
            (1, width // part, tile // V_GROUP, part // BUNDLE, ROW), swizzled=False, dtype=spec.v.dtype,
            offset=page.v_offset,
        ),
    )  # fmt: skip


@gluon.constexpr_function
def v_layout(part, tile):
    """A part of V's block as `[part, tile]`, channels and tokens: one group of 16 tokens after the other."""
    in_group = [[0, 1 << bit] for bit in range(4)]
    channels = [[1 << bit, 0] for bit in range(part.bit_length() - 1)]
    groups = [[0, V_GROUP << bit] for bit in range((tile // V_GROUP).bit_length() - 1)]
    return gl.SharedLinearLayout(in_group + channels + groups, alignment=128)


@gluon.jit
def allocate_k(k_desc, STAGES: gl.constexpr):
    """Shared memory for K of `STAGES` tiles, `[STAGES, tile, width]`."""
    BLOCK: gl.constexpr = k_desc.block_type.shape[1:]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(BLOCK, k_desc.dtype)
    return gl.allocate_shared_memory(k_desc.dtype, [STAGES] + BLOCK, LAYOUT)  # noqa: RUF005


@gluon.jit
def column_of(tile, TILE: gl.constexpr):
    """The column of the page table with the page of a tile."""
    if TILE == PAGE:
        return tile
    else:
        return tile // (PAGE // TILE)


@gluon.jit
def part_of(tile, TILE: gl.constexpr):
    """The index of a tile in its page."""
    if TILE == PAGE:
        return 0
    else:
        return tile % (PAGE // TILE)


@gluon.jit
def fetch_k(k_desc, slot, tile, barrier, memory):
    """Starts to copy K of tile `tile` of a sequence, in `slot` (page x heads + head), to `memory [tile, width]`."""
    SHAPE: gl.constexpr = k_desc.block_type.shape
    LAYOUT: gl.constexpr = k_desc.layout
    TILE: gl.constexpr = SHAPE[1]
    fetch(k_desc, [slot, part_of(tile, TILE) * TILE, 0], barrier, reinterpret(memory, k_desc.dtype, SHAPE, LAYOUT))


@gluon.jit
def fetch_v(v_desc, slot, tile, barrier, memory, stage, STAGES: gl.constexpr):
    """Starts to copy V of tile `tile` of a sequence, in `slot`, to one of the stages of
    `memory [STAGES * parts, part, tile]`.
    """
    SHAPE: gl.constexpr = [STAGES] + v_desc.block_type.shape  # noqa: RUF005
    LAYOUT: gl.constexpr = v_desc.layout
    GROUPS: gl.constexpr = SHAPE[3]
    first = part_of(tile, GROUPS * GROUP) * GROUPS
    fetch(v_desc, [slot, 0, first, 0, 0], barrier, reinterpret(memory, gl.float8e4nv, SHAPE, LAYOUT).index(stage))
