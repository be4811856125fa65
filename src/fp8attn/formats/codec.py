"""Codecs: the 8-bit formats of K and V in plain PyTorch, with their scales. A value `x` is stored as the code `x_8bit`, with
`x ~ x_8bit * scale + mean`.

These functions are the definition. The kernels compute the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ..errors import UsageError

FP8 = torch.float8_e4m3fn
KeyDtype = Literal["int8", "e4m3"]
KEY_TYPES: dict[str, torch.dtype] = {"int8": torch.int8, "e4m3": FP8}
DEFAULT_KEY_DTYPE: KeyDtype = "int8"


@dataclass(frozen=True)
class Format:
    """An 8-bit floating-point format (OCP 8-bit Floating Point Specification 1.0, table 1)."""

    dtype: torch.dtype
    max: float  # largest finite magnitude
    smallest_normal: float
    smallest_subnormal: float
    mantissa_bits: int
    exponent_bias: int
    has_inf: bool

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest binade: both formats end at 1.75 * 2**max_exponent."""
        return round(self.max / 1.75).bit_length() - 1


E4M3 = Format(torch.float8_e4m3fn, 448.0, 2.0**-6, 2.0**-9, 3, 7, False)
E5M2 = Format(torch.float8_e5m2, 57344.0, 2.0**-14, 2.0**-16, 2, 15, True)

# Scales are in [2^-32, 2^32]. This is wide enough for any activation: values of 1e-7 keep their full relative precision, and 1.9e12 does
# not saturate. It is narrow enough that the ratio of any two scales, times a sum over a million tokens, is finite in FP32.
MIN_SCALE_EXPONENT = -32
MAX_SCALE_EXPONENT = 32
MIN_SCALE = 2.0**MIN_SCALE_EXPONENT
MAX_SCALE = 2.0**MAX_SCALE_EXPONENT

INT8_MAX = 127

# The headroom: the factor by which a page's first scale is larger than its first token needs. Headroom costs E4M3 only its smallest
# numbers, because it is a floating-point format. With 2^5, the scale of hardly any page grows. The error of INT8 is proportional to the
# scale; 1.25 had the smallest error in measurements.
HEADROOM = {torch.float8_e4m3fn: 32.0, torch.int8: 1.25}


def finite_amax(x: torch.Tensor, dim: int | tuple[int, ...]) -> torch.Tensor:
    """Largest finite magnitude of `x` along `dim`, in FP32 (0 if no element is finite).

    Inf and NaN are ignored, so that one of them does not make the scale of the other elements coarser.
    """
    x = x.float().abs()
    return torch.where(x < torch.inf, x, 0.0).amax(dim)


def power_of_two_scale(amax: torch.Tensor, fmt: Format = E4M3) -> torch.Tensor:
    """Smallest power of two `s` with `amax <= fmt.max * s`, clamped to [2^-32, 2^32].

    The relative precision of a floating-point format does not depend on the scale. So rounding the scale up to a power of two costs no
    precision, and every later change of scale is a shift of exponents.

    Args:
        amax: FP32, any shape, finite and >= 0.
        fmt: the format of the codes.
    Returns:
        FP32 scales of the same shape.
    """
    bits = amax.float().contiguous().view(torch.int32)
    # amax = 1.f * 2^(e - 127); one exponent more is needed when 1.f > 1.75, the mantissa of both formats' largest value.
    exponent = (bits >> 23) - 127 - fmt.max_exponent + ((bits & 0x7FFFFF) > 0x600000).int()
    exponent = exponent.clamp(MIN_SCALE_EXPONENT, MAX_SCALE_EXPONENT)
    return ((exponent + 127) << 23).view(torch.float32)


def quantize(x: torch.Tensor, scale: torch.Tensor | float = 1.0, fmt: Format = E4M3) -> torch.Tensor:
    """`round_to_nearest_even(clamp(x / scale, -fmt.max, fmt.max))` in FP8.

    Args:
        x: floating point, any shape. NaN stays NaN. Values outside the range saturate, also Inf.
        scale: powers of two, broadcastable to `x`.
        fmt: `E4M3` or `E5M2`.
    """
    return (x.float() / scale).clamp(-fmt.max, fmt.max).to(fmt.dtype)


def dequantize(x_fp8: torch.Tensor, scale: torch.Tensor | float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`x_fp8 * scale` in `dtype`; exact in FP32 when the scale is a power of two."""
    return x_fp8.to(dtype) * (scale.to(dtype) if isinstance(scale, torch.Tensor) else scale)


def needed_scale(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The smallest scale with which a value of magnitude `amax` does not saturate: a power of two for E4M3, `amax / 127` for INT8.

    Args:
        amax: FP32, any shape, finite and >= 0.
        dtype: `torch.float8_e4m3fn` or `torch.int8`.
    Returns:
        FP32 of the same shape, in [2^-32, 2^32].
    """
    if dtype == torch.float8_e4m3fn:
        return power_of_two_scale(amax)
    return (amax * torch.tensor(1 / INT8_MAX)).clamp(MIN_SCALE, MAX_SCALE)


def largest_code(dtype: torch.dtype) -> float:
    """The largest magnitude of a code: 448 for `torch.float8_e4m3fn`, 127 for `torch.int8`."""
    return INT8_MAX if dtype == torch.int8 else E4M3.max


def with_headroom(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scale of a page, with headroom, if a token that sets or raises it needs `scale`."""
    return (scale * HEADROOM[dtype]).clamp_max(MAX_SCALE)


def encode(x: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The codes of `x * factor` as FP32 numbers: rounded to nearest (ties to even) and saturated."""
    y = x * factor
    if dtype == torch.int8:
        return y.clamp(-INT8_MAX, INT8_MAX).round()
    return y.clamp(-E4M3.max, E4M3.max).to(dtype).float()


def key_type(name: str) -> torch.dtype:
    """The dtype of a `KeyDtype`.

    Raises:
        UsageError: neither "int8" nor "e4m3".
    """
    if name not in KEY_TYPES:
        hint = f": pass key_dtype={key_name(name)!r}" if isinstance(name, torch.dtype) and name in KEY_TYPES.values() else ""
        raise UsageError(f"key_dtype must be one of {', '.join(map(repr, KEY_TYPES))}; got {name!r}{hint}")
    return KEY_TYPES[name]


def key_name(dtype: torch.dtype) -> KeyDtype:
    """The `KeyDtype` of a dtype."""
    return "int8" if dtype == torch.int8 else "e4m3"
