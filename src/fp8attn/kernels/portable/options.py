"""The compile-time options of the kernel, for the host and for device code."""

from __future__ import annotations

from dataclasses import dataclass

from ..constexpr import ConstexprFields


@dataclass(frozen=True)
class Options(ConstexprFields):
    """The compile-time options of the kernel. The host makes them, and device code reads them."""

    int8: bool  # keys; or else E4M3
    rotate: bool  # queries, as the keys are
    head_dim: int
    width: int  # head_dim, padded to a power of two
    group: int  # query heads of a KV head
    rows: int  # of a program
    tile: int  # keys of a tile
    warps: int  # that split a tile's keys; 1: none does
    causal: bool
    window: bool
    softcap: bool
    split: bool  # the keys are divided among programs
    native: bool  # the target converts E4M3 by itself (`fp8.is_native`)
