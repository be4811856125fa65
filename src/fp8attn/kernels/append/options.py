"""The compile-time options of the kernels. The host makes them, and device code reads them."""

from __future__ import annotations

from dataclasses import dataclass

from ..constexpr import ConstexprFields
from ..rows import Row


@dataclass(frozen=True)
class Codes(ConstexprFields):
    """How K or V is stored in pages."""

    row: Row
    is_v: bool
    int8: bool  # or else E4M3
    native: bool  # the target converts E4M3 by itself (`fp8.is_native`)
    static: bool  # scales are given and stay
    dense: bool  # pages of their own, filled from their first token on


@dataclass(frozen=True)
class Options(ConstexprFields):
    """The one constexpr parameter of the kernels that write pages."""

    k: Codes
    v: Codes
    rotate: bool  # keys are rotated (`rotation`)
    advance: bool = True  # the lengths do not count the new tokens yet, and the launch adds them
    tokens: int = 1  # of a step's sequence, padded to a power of two
    heads: int = 1  # of K or V: what a program of a step writes
    hopper: bool = False  # attention is launched while pages are written, and waits for the end


@dataclass(frozen=True)
class Queries(ConstexprFields):
    """The one constexpr parameter of the code that applies RoPE to Q."""

    row: Row
    native: bool
    tokens: int  # of a program
    heads: int
