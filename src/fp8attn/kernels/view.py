"""`View`: how TMA sees a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class View:
    """How TMA sees a tensor. Plans keep views, so that calls share them.

    Attributes:
        shape, strides: in elements.
        block: the shape of one copy.
        swizzled: shared memory has Triton's default (swizzled) layout; otherwise rows are contiguous.
        dtype: the dtype that the tensor's bytes are read as. None: the tensor's own dtype.
        offset: bytes before the first element; a multiple of 16.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    swizzled: bool = True
    dtype: torch.dtype | None = None
    offset: int = 0
