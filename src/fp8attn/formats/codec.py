"""Codecs: the 8-bit codes of K and V, in plain PyTorch. A value `x` is stored as the code `x_8bit`, with
`x ~ x_8bit * scale + mean`.

`INT8` and `E4M3` are the definition. The kernels compute the same bits. All that is said of a codec is in its object: a
new one with integer codes is one more object in `CODECS`, and its name in `KeyDtype`. A floating-point one also needs
its conversions in `kernels/codec.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from ..errors import UsageError

FP8 = torch.float8_e4m3fn
KeyDtype = Literal["int8", "e4m3"]  # the names of `CODECS`, as public functions take them
DEFAULT_KEY_DTYPE: KeyDtype = "int8"

# Scales are in [2^-32, 2^32]. This is wide enough for any activation: values of 1e-7 keep their full relative
# precision, and 1.9e12 does not saturate. It is narrow enough that the ratio of any two scales, times a sum over a
# million tokens, is finite in FP32.
MIN_SCALE_EXPONENT = -32
MAX_SCALE_EXPONENT = 32
MIN_SCALE = 2.0**MIN_SCALE_EXPONENT
MAX_SCALE = 2.0**MAX_SCALE_EXPONENT


@dataclass(frozen=True, eq=False)
class Codec:
    """How numbers are stored in 8 bits.

    Attributes:
        name: what public functions call it.
        dtype: of the codes. Its size is the bytes of a value.
        max: the largest magnitude of a code.
        headroom: the factor by which a page's first scale is larger than its first token needs.
        has_nan: whether there is a code for NaN.
        is_integer: whether codes are integers, equally far apart. Then the scale is any number, otherwise a power of
            two.
    """

    name: KeyDtype
    dtype: torch.dtype
    max: float
    headroom: float
    has_nan: bool
    is_integer: ClassVar[bool] = False

    def __reduce__(self) -> tuple[Any, ...]:
        return codec_of, (self.name,)  # copies are the same object

    def needed_scale(self, amax: torch.Tensor) -> torch.Tensor:
        """The smallest scale with which a value of magnitude `amax` does not saturate.

        Args:
            amax: FP32, any shape, finite and >= 0.
        Returns:
            FP32 of the same shape, in [2^-32, 2^32].
        """
        raise NotImplementedError

    def with_headroom(self, scale: torch.Tensor) -> torch.Tensor:
        """The scale of a page, with headroom, if a token that sets or raises it needs `scale`."""
        return (scale * self.headroom).clamp_max(MAX_SCALE)

    def encode(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """The codes of `x * factor` as FP32 numbers: rounded to nearest (ties to even) and saturated."""
        return self.round((x * factor).clamp(-self.max, self.max))

    def round(self, y: torch.Tensor) -> torch.Tensor:
        """Numbers in the range of the codes, rounded to codes, in FP32."""
        raise NotImplementedError


class Integer(Codec):
    """Integers of magnitudes up to 127."""

    is_integer = True

    def needed_scale(self, amax: torch.Tensor) -> torch.Tensor:
        """`amax / max`."""
        return (amax * torch.tensor(1 / self.max, dtype=torch.float32)).clamp(MIN_SCALE, MAX_SCALE)

    def round(self, y: torch.Tensor) -> torch.Tensor:
        return y.round()


@dataclass(frozen=True, eq=False)
class Float(Codec):
    """An 8-bit floating-point format that ends at 1.75 times a power of two. The scale is a power of two."""

    smallest_subnormal: float

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest binade."""
        return int(self.max / 1.75).bit_length() - 1

    def needed_scale(self, amax: torch.Tensor) -> torch.Tensor:
        """The smallest power of two `s` with `amax <= max * s`.

        The relative precision of a floating-point format does not depend on the scale. So rounding the scale up to a
        power of two costs no precision, and every later change of scale is a shift of exponents.
        """
        bits = amax.float().contiguous().view(torch.int32)
        # amax = 1.f * 2^(e - 127); one exponent more is needed when 1.f > 1.75, the mantissa of the largest value.
        exponent = (bits >> 23) - 127 - self.max_exponent + ((bits & 0x7FFFFF) > 0x600000).int()
        exponent = exponent.clamp(MIN_SCALE_EXPONENT, MAX_SCALE_EXPONENT)
        return ((exponent + 127) << 23).view(torch.float32)

    def round(self, y: torch.Tensor) -> torch.Tensor:
        return y.to(self.dtype).float()

    def quantize(self, x: torch.Tensor, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
        """`round_to_nearest_even(clamp(x / scale, -max, max))` in `dtype`.

        Args:
            x: floating point, any shape. NaN stays NaN. Values outside the range saturate, also Inf.
            scale: powers of two, broadcastable to `x`.
        """
        return (x.float() / scale).clamp(-self.max, self.max).to(self.dtype)


# The error of INT8 is proportional to the scale; a headroom of 1.25 had the smallest error in measurements. Headroom
# costs E4M3 (OCP 8-bit Floating Point Specification 1.0, table 1) only its smallest numbers. With 2^5, the scale of
# hardly any page grows.
INT8 = Integer("int8", torch.int8, 127.0, 1.25, has_nan=False)
E4M3 = Float("e4m3", FP8, 448.0, 32.0, has_nan=True, smallest_subnormal=2.0**-9)
CODECS: dict[str, Codec] = {codec.name: codec for codec in (INT8, E4M3)}


def codec_of(name: Any) -> Codec:
    """The codec that public functions call `key_dtype=name`.

    Raises:
        UsageError: there is no such codec.
    """
    if name not in CODECS:
        named = [codec.name for codec in CODECS.values() if isinstance(name, torch.dtype) and codec.dtype == name]
        hint = f": pass key_dtype={named[0]!r}" if named else ""
        raise UsageError(f"key_dtype must be one of {', '.join(map(repr, CODECS))}; got {name!r}{hint}")
    return CODECS[name]


def finite_amax(x: torch.Tensor, dim: int | tuple[int, ...]) -> torch.Tensor:
    """Largest finite magnitude of `x` along `dim`, in FP32 (0 if no element is finite).

    Inf and NaN are ignored, so that one of them does not make the scale of the other elements coarser.
    """
    x = x.float().abs()
    return torch.where(x < torch.inf, x, 0.0).amax(dim)
