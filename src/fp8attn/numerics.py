"""FP8 numerics in plain PyTorch: formats, power-of-two scales, quantisation, and the means that are taken off first.

Everything here is the definition that the kernels repeat bit for bit. A value is stored as `x_fp8` with `x ~ x_fp8 * scale + mean`.
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

MEAN_SAMPLES = 128  # tokens that a sequence's mean is estimated from


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


def rescale(x_fp8: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """FP8 values under the scale `old` rewritten under the power-of-two scale `new >= old`: exact, but for results below 2^-6.

    A shift of exponents loses bits only where the result is subnormal (E4M3: below 2^-6 of the new scale), and then rounds to even.
    """
    return (x_fp8.float() * (old / new)).to(x_fp8.dtype)


def sample_rows(lengths: torch.Tensor, starts: torch.Tensor, samples: int = MEAN_SAMPLES) -> torch.Tensor:
    """Rows `[B, samples]` spread evenly over each sequence's `[start, start + length)`; the start itself where it is empty."""
    step = torch.arange(samples, device=lengths.device)
    return starts[:, None].long() + step * lengths[:, None].long() // samples


def shrunk_mean(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Estimate of a constant worth subtracting, from a sample: the mean, as far as it stands out of its own noise.

        mean' = on_grid(mean * mean^2 / (mean^2 + var / n))        (empirical-Bayes shrinkage, per channel)

    Any constant may be subtracted from K or V without changing attention, so the estimate need not be exact; but one that is mostly
    noise (a prompt of a few tokens) would add that noise to every later token. Of a single token nothing is known, and nothing is
    subtracted.

    Args:
        x: `[B, N, H, D]`, N sampled tokens of each sequence (`sample_rows`), in the dtype that they come in (`on_grid`).
        lengths: `[B]`, how many tokens each sequence has.
    Returns:
        FP32 `[B, H, D]`; zeros for sequences of fewer than two tokens, and for channels that are not finite.
    """
    dtype, x = x.dtype, x.float()
    mean = x.mean(1)
    n = lengths.clamp(1, x.shape[1]).float()[:, None, None]
    noise = x.var(1) / n
    square = mean * mean
    shrunk = on_grid(mean * (square / (square + noise).clamp_min(torch.finfo(torch.float32).tiny)), x.abs().amax(1), dtype)
    return torch.where(torch.isfinite(shrunk) & (lengths > 1)[:, None, None], shrunk, 0.0)


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
