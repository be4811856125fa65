"""The compile-time options of the kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..constexpr import ConstexprFields
from ..gluon import gl

LOG2E = gl.constexpr(math.log2(math.e))
LN2 = gl.constexpr(math.log(2))


@dataclass(frozen=True)
class Options(ConstexprFields):
    """The one constexpr parameter of the kernel. The host makes it (`plan`), and device code reads it."""

    head_dim: int
    width: int  # head_dim, padded to a power of two; TMA pads with zeros
    group: int  # query heads of a KV head
    rows: int  # query rows of a tile
    used_rows: int  # rows that exist, padded to a power of two
    one_row_tile: bool  # of a KV head; else as many as the rows of `max_q` take, in one kernel for any number
    stages: int  # of shared memory: pages
    block: int  # sequences whose lengths a CTA loads at once
    causal: bool
    ragged: bool  # the queries' bounds are given
    window: bool
    softcap: bool
    sinks: bool
    leftpad: bool
    rotate: bool  # keys are rotated (`rotation`), so queries must be rotated
    whole_pages: int  # `devices.Chip.decode_whole_pages`
    head_pages: int  # `devices.Chip.decode_head_pages`
    early_v: bool  # V is loaded to registers before the scores are computed, if there are enough registers
