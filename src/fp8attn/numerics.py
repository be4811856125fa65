"""8-bit numerics in plain PyTorch: formats, scales, quantization, and the growth of a page's scale.

These functions are the definition. The kernels compute the same bits. A value `x` is stored as the code `x_8bit`, with
`x ~ x_8bit * scale + mean`.

A page's scale depends only on its tokens in their order. So the bytes are the same after one append and after many. The first token sets
the scale, with headroom. A later token that does not fit raises it, and the codes of the tokens before it are rounded again to the larger
scale (`settle`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


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


def settle(
    x: torch.Tensor, old: torch.Tensor, scale: torch.Tensor, held: torch.Tensor, dtype: torch.dtype, static: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize new tokens at the ends of pages, and round the codes of older tokens again if a scale grows.

    Args:
        x: `[N, P, D]` FP32, the new tokens of N pages (of one head each) at their positions; zeros elsewhere.
        old: `[N, P, D]` FP32, the codes of the older tokens at their positions; unspecified elsewhere.
        scale: `[N]` FP32, the scale of the older tokens, or the static scale.
        held: `[N, P]` int8: 2 at older tokens, 1 at new ones, 0 at positions without a token. New tokens follow the older ones.
        dtype: `torch.float8_e4m3fn` or `torch.int8`.
        static: the scales do not grow; larger values saturate.
    Returns:
        The codes `[N, P, D]` of all tokens as FP32 numbers; the pages' scales `[N]`; and their overflows `[N]` int64: how many values of
        new tokens are larger than the largest code times the static scale (or NaN, for which INT8 has no code), or how often a scale grew
        after the first token of its page.
    """
    new = held == 1
    if not static:
        need = torch.where(new, needed_scale(finite_amax(x, -1), dtype), 0.0)
        first = torch.where(new, need, -1.0).gather(1, new.int().argmax(1, keepdim=True))[:, 0]
        scale = torch.where((held == 2).any(1) | ~new.any(1), scale, with_headroom(first, dtype))
    inverse = 1.0 / scale
    codes = torch.where(new[..., None], encode(x, inverse[:, None, None], dtype), old)
    overflows = torch.zeros_like(scale, dtype=torch.int64)
    if static:
        scaled = (x * inverse[:, None, None]).abs()
        lost = scaled > largest_code(dtype)
        overflows += (new[..., None] & (lost | scaled.isnan() if dtype == torch.int8 else lost)).sum((1, 2))
    while not static:
        over = new & (need > scale[:, None])
        grows = over.any(1)
        if not grows.any():
            break
        index = over.int().argmax(1, keepdim=True)  # the first token that does not fit
        grown = torch.where(grows, with_headroom(need.gather(1, index)[:, 0], dtype), scale)
        inverse = 1.0 / grown
        before = torch.arange(held.shape[1], device=x.device) < index
        shifted, rounded = (encode(y, factor[:, None, None], dtype) for y, factor in ((codes, scale * inverse), (x, inverse)))
        again = torch.where(before[..., None], shifted, rounded)
        codes = torch.where((grows[:, None] & (before | new))[..., None], again, codes)
        scale = grown
        overflows += grows
    return codes, scale, overflows


def on_grid(mean: torch.Tensor, amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`mean` rounded to a multiple of the ulp (the spacing of numbers) of `dtype` at `amax`, the largest magnitude of the input.

    One BF16 number in 16 is halfway between two FP8 numbers. Such ties round to even, up as often as down. After the subtraction of a
    multiple of the ulp they still do. After the subtraction of any other number, they all round the same way. For V this is a bias of 0.001
    standard deviations in every output, and averaging over keys does not remove it.
    """
    if dtype == torch.float32:
        return mean  # the input's ulp is the mean's ulp
    magic = binade(amax) * (1.5 * 2.0**23 * torch.finfo(dtype).eps)  # the last bit of numbers of this size is the ulp
    return (mean + magic) - magic


def binade(x: torch.Tensor) -> torch.Tensor:
    """The power of two at or below each `x >= 0` in FP32; 0 for subnormals."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """`||out - ref|| / ||ref||` over all elements, in float64."""
    out, ref = out.double(), ref.double()
    return float((out - ref).norm() / ref.norm())


def sqnr_db(out: torch.Tensor, ref: torch.Tensor) -> float:
    """Signal to quantization-noise ratio in dB: `20 log10(||ref|| / ||out - ref||)`."""
    out, ref = out.double(), ref.double()
    return float(20 * torch.log10(ref.norm() / (out - ref).norm()))
