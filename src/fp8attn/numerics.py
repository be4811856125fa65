"""8-bit numerics in plain PyTorch: formats, scales, quantization, and how the scale of a page that fills up grows.

Everything here is the definition that the kernels repeat bit for bit. A value is stored as `x_8bit` with `x ~ x_8bit * scale + mean`.

A page's scale depends on its tokens in their order and on nothing else, so bytes do not depend on how the tokens came: in one append or in
many. Its first token sets it, with headroom; a later token that does not fit sets it anew, and the codes of the tokens before it are
rounded again to the larger scale (`settle`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """Facts of an 8-bit floating-point format (OCP 8-bit Floating Point Specification 1.0, table 1)."""

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

# Scales are kept to [2^-32, 2^32]: wide enough for any activation (values of 1e-7 keep their full relative precision, 1.9e12 does
# not saturate) and narrow enough that the ratio of any two scales times a million-token accumulator stays inside FP32.
MIN_SCALE_EXPONENT = -32
MAX_SCALE_EXPONENT = 32
MIN_SCALE = 2.0**MIN_SCALE_EXPONENT
MAX_SCALE = 2.0**MAX_SCALE_EXPONENT

INT8_MAX = 127

# How much larger than its first token needs a page's scale is. E4M3 is a floating-point format: headroom costs nothing but the smallest
# numbers, and with 2^5 of it hardly any page's scale ever grows. INT8's error is proportional to its scale; 1.25 is what measured best.
HEADROOM = {torch.float8_e4m3fn: 32.0, torch.int8: 1.25}


def finite_amax(x: torch.Tensor, dim: int | tuple[int, ...]) -> torch.Tensor:
    """Largest finite magnitude of `x` along `dim`, in FP32 (0 where nothing is finite).

    Inf and NaN are left out, so that one broken element coarsens nothing but itself.
    """
    x = x.float().abs()
    return torch.where(x < torch.inf, x, 0.0).amax(dim)


def power_of_two_scale(amax: torch.Tensor, fmt: Format = E4M3) -> torch.Tensor:
    """Smallest power of two `s` with `amax <= fmt.max * s`, kept to [2^-32, 2^32].

    FP8 is a floating-point format, so its relative precision does not depend on the scale: rounding the scale up to a power of two
    loses nothing, and makes every later change of scale a shift of exponents.

    Args:
        amax: FP32, any shape, finite and >= 0.
        fmt: the format that the scale is for.
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
        x: floating point, any shape. NaN stays NaN; values outside the range (Inf too) saturate.
        scale: powers of two, broadcastable to `x`.
        fmt: `E4M3` or `E5M2`.
    """
    return (x.float() / scale).clamp(-fmt.max, fmt.max).to(fmt.dtype)


def dequantize(x_fp8: torch.Tensor, scale: torch.Tensor | float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`x_fp8 * scale` in `dtype`; exact in FP32 when the scale is a power of two."""
    return x_fp8.to(dtype) * (scale.to(dtype) if isinstance(scale, torch.Tensor) else scale)


def needed_scale(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The smallest scale under which a value of magnitude `amax` does not saturate: E4M3 a power of two, INT8 `amax / 127`.

    Args:
        amax: FP32, any shape, finite and >= 0.
        dtype: `torch.float8_e4m3fn` or `torch.int8`.
    Returns:
        FP32 of the same shape, in [2^-32, 2^32].
    """
    if dtype == torch.float8_e4m3fn:
        return power_of_two_scale(amax)
    return (amax * torch.tensor(1 / INT8_MAX)).clamp(MIN_SCALE, MAX_SCALE)


def with_headroom(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scale of a page whose first token, or whose first token that does not fit, needs `scale`."""
    return (scale * HEADROOM[dtype]).clamp_max(MAX_SCALE)


def encode(x: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The codes of `x * factor` as FP32 numbers: rounded to nearest, ties to even, saturated."""
    y = x * factor
    if dtype == torch.int8:
        return y.clamp(-INT8_MAX, INT8_MAX).round()
    return y.clamp(-E4M3.max, E4M3.max).to(dtype).float()


def settle(
    x: torch.Tensor, old: torch.Tensor, scale: torch.Tensor, held: torch.Tensor, dtype: torch.dtype, static: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize new tokens onto the ends of pages.

    Args:
        x: `[N, P, D]` FP32, the new tokens of N pages (of one head each) at their places; zeros elsewhere.
        old: `[N, P, D]` FP32, codes of the tokens held, anything elsewhere.
        scale: `[N]` FP32, of the tokens held, or given.
        held: `[N, P]` int8: 2 at tokens held, 1 at new ones, 0 at none. New tokens follow those held.
        dtype: `torch.float8_e4m3fn` or `torch.int8`.
        static: the scales are given and stay; larger values saturate.
    Returns:
        codes `[N, P, D]` as FP32 numbers, of tokens held and new, and the pages' scales `[N]`. An INT8 page with a NaN in a token has NaN
        for a scale, because its codes cannot say it.
    """
    new = held == 1
    if not static:
        need = torch.where(new, needed_scale(finite_amax(x, -1), dtype), 0.0)
        first = torch.where(new, need, -1.0).gather(1, new.int().argmax(1, keepdim=True))[:, 0]
        scale = torch.where((held == 2).any(1) | ~new.any(1), scale, with_headroom(first, dtype))
    inverse = 1.0 / scale
    codes = torch.where(new[..., None], encode(x, inverse[:, None, None], dtype), old)
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
    if dtype == torch.int8:
        scale = torch.where((x.isnan().any(-1) & new).any(1), torch.nan, scale)
    return codes, scale


def on_grid(mean: torch.Tensor, amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`mean` rounded to a multiple of the spacing of `dtype`'s numbers at `amax`, the largest magnitude that it is to be taken off from.

    One BF16 number in 16 lies halfway between two of FP8. Ties go to even, up as often as down, and so they do after a shift by a multiple
    of the numbers' own spacing; a shift by anything else, however small, sends all of them the same way. Of V that is an error of a
    thousandth of its spread in every output, and no average over keys makes it less.
    """
    if dtype == torch.float32:
        return mean  # its spacing is the mean's own
    magic = binade(amax) * (1.5 * 2.0**23 * torch.finfo(dtype).eps)  # the last bit of numbers of this size is the spacing
    return (mean + magic) - magic


def binade(x: torch.Tensor) -> torch.Tensor:
    """The power of two at or below each `x >= 0` in FP32; 0 for subnormals."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """`||out - ref|| / ||ref||` over all elements, in float64."""
    out, ref = out.double(), ref.double()
    return float((out - ref).norm() / ref.norm())


def sqnr_db(out: torch.Tensor, ref: torch.Tensor) -> float:
    """Signal to quantisation-noise ratio in dB: `20 log10(||ref|| / ||out - ref||)`."""
    out, ref = out.double(), ref.double()
    return float(20 * torch.log10(ref.norm() / (out - ref).norm()))
