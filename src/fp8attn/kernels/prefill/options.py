"""The compile-time options of the kernel (`Options`), and the sizes and layouts that all its files share."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ...layout import PAGE_SIZE
from ..constexpr import ConstexprFields
from ..gluon import gl, gluon

ROWS = gl.constexpr(64)  # query rows of a warpgroup: the height of its MMA
TILE = gl.constexpr(PAGE_SIZE)  # keys of a tile: a page
LN2 = gl.constexpr(math.log(2))
LOG2E = gl.constexpr(math.log2(math.e))
ENDLESS = gl.constexpr(1 << 30)  # the number of tokens that TMA sees in the output of a ragged batch (`plan.ragged_rows`)
HIDDEN = gl.constexpr(float("-inf"))  # a masked score, and the LSE of a row without keys


@gluon.constexpr_function
def accumulator(rows, columns):
    """The registers of a product `[rows, columns]`, of which each warpgroup computes 64 rows."""
    return gl.NVMMADistributedLayout([3, 0], [rows // 16, 1], [16, columns, 32])


@dataclass(frozen=True)
class Options(ConstexprFields):
    """The one constexpr parameter of the kernel, which the host makes (`plan`). Device code reads it.

    An option that follows from the types of arguments is a field of the aggregate that contains them: `Queries.Q16`, `Means.SHIFT`.
    """

    head_dim: int
    width: int  # head_dim, padded; TMA pads with zeros
    partitions: int  # that multiply: each has its own copy of the instructions, and
    rows: int  # so many query rows of an item, 64 for each of its warpgroups
    stages: int  # of the ring
    cubics: int  # of every 16 exponentials, how many run on the FMA pipe
    registers: int  # of a multiplying thread
    producer_registers: int
    mask_left: bool  # keys on the left may be masked: there is a window, or padding
    softcap: bool
    exact: bool  # Q and P are multiplied twice for all rows, not only for those that see few keys
    split: bool  # an item has a part of its tiles, and `combine` adds the parts
    rope_pairs: int  # number of channels that RoPE rotates; 0 without RoPE
    rope_interleaved: bool  # pairs are neighbors
    rope_step: int  # stride of the tables' last dimension
    rotate: bool  # keys are rotated (`rotation`), so queries must be rotated

    def __post_init__(self) -> None:
        for field in fields(self):  # Triton 3.6 takes no plain numbers in shapes
            object.__setattr__(self, field.name, gl.constexpr(getattr(self, field.name)))
