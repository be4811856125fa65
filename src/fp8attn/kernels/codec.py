"""Codecs inside Triton kernels, with the bits of `formats.codec`: conversions of E4M3, integers and BF16, and scales.

`CODEC` is a `Codec` of `formats.codec`, whose attributes are compile-time constants. Integers of any largest magnitude
up to 127 are one way of computing here, E4M3 is the other. Another floating-point format is another branch of the
functions below "By codec", and of the products with queries: `begin_scores` of `prefill/softmax.py`, `_scores` of
`decode/consume.py`.

`NATIVE`: the target has instructions that convert E4M3 (`Machine.native_e4m3`: NVIDIA from compute capability 8.9).
Without them, and in Triton's interpreter (whose own conversions truncate), integer arithmetic computes the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..formats.codec import MAX_SCALE, MAX_SCALE_EXPONENT, MIN_SCALE, MIN_SCALE_EXPONENT

_MIN_SCALE_EXPONENT = tl.constexpr(MIN_SCALE_EXPONENT)
_MAX_SCALE_EXPONENT = tl.constexpr(MAX_SCALE_EXPONENT)
_MIN_SCALE = tl.constexpr(MIN_SCALE)
_MAX_SCALE = tl.constexpr(MAX_SCALE)
# A sum with it is a multiple of one, and its lowest byte is that of the other number, rounded.
ROUND = tl.constexpr(1.5 * 2**23)


@triton.jit
def from_e4m3(x, NATIVE: tl.constexpr):
    """Bytes of E4M3 to FP16, which holds every E4M3 value exactly."""
    if NATIVE:
        return x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        # E4M3's four exponent bits in FP16's five give the value over 2^8 (the biases are 7 and 15), subnormals
        # included.
        bits = x.to(tl.int16)
        magnitude = bits & 0x7F
        value = (((bits & 0x80) << 8) | (magnitude << 7)).to(tl.float16, bitcast=True) * 256.0
        return tl.where(magnitude == 0x7F, float("nan"), value)


@triton.jit
def from_int8(x):
    """Bytes of INT8 to FP16, exactly."""
    # FP16 counts by 1 from 1024 on, so the last bits of such a number are an integer; 1152 is 1024 and the 128 that
    # `^ 0x80` adds.
    return ((x ^ 0x80).to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1152.0


@triton.jit
def to_e4m3(x, NATIVE: tl.constexpr):
    """FP32 to E4M3 bytes: to nearest, ties to even. Values that are too large saturate, also Inf. NaN stays NaN."""
    if NATIVE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        nan = magnitude > 0x7F800000
        magnitude = tl.minimum(magnitude, 0x43E00000)  # 448
        # 20 mantissa bits go; the bias falls by 120.
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6 the codes count 2^-9, which is what the last mantissa bit of 2^14 is worth: FP32's own addition
        # rounds.
        subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(nan, 0x7F, tl.where(magnitude < 0x3C800000, subnormal, normal))
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def pack_e4m3(x0, x1, x2, x3, NATIVE: tl.constexpr):
    """`to_e4m3` of four tensors as the bytes of int32 words, x0 the lowest."""
    if NATIVE:
        # Triton's own conversion would pack neighbors of one tensor, which would then be unpacked.
        asm: tl.constexpr = """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
        }"""
        words = tl.inline_asm_elementwise(asm, "=r,f,f,f,f", [x0, x1, x2, x3], dtype=tl.int32, is_pure=True, pack=1)
    else:
        words = to_e4m3(x0, False).to(tl.int32) | (to_e4m3(x1, False).to(tl.int32) << 8)
        words |= (to_e4m3(x2, False).to(tl.int32) << 16) | (to_e4m3(x3, False).to(tl.int32) << 24)
    return words


@triton.jit
def round_to(x, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """FP32 to `dtype`, to nearest, ties to even."""
    if NATIVE or dtype != tl.bfloat16:
        return x.to(dtype)
    else:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x != x, 0x7FC0, rounded).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def to_int8(x):
    """FP32 of magnitudes up to 127.5 to INT8 bytes: to nearest, ties to even."""
    return (x + ROUND).to(tl.int32, bitcast=True).to(tl.uint8)


# By codec


@triton.jit
def clamp(x, CODEC: tl.constexpr):
    """Values in the range of codes, or as `round_to_codes` takes them: E4M3's conversion saturates by itself. NaN
    becomes zero where it has no code."""
    if CODEC.is_integer:
        return tl.where(x == x, tl.minimum(tl.maximum(x, -CODEC.max), CODEC.max), 0.0)
    else:
        return x


@triton.jit
def round_to_codes(x, CODEC: tl.constexpr, NATIVE: tl.constexpr):
    """Bytes of the codes of values from `clamp`: rounded to nearest, ties to even."""
    if CODEC.is_integer:
        return to_int8(x)
    else:
        return to_e4m3(x, NATIVE)


@triton.jit
def to_codes(x, CODEC: tl.constexpr, NATIVE: tl.constexpr):
    """Bytes of codes: rounded to nearest, ties to even, saturated. NaN becomes zero where it has no code."""
    return round_to_codes(clamp(x, CODEC), CODEC, NATIVE)


@triton.jit
def to_fp16(codes, CODEC: tl.constexpr, NATIVE: tl.constexpr):
    """FP16 of bytes of codes, exactly."""
    if CODEC.is_integer:
        return from_int8(codes)
    else:
        return from_e4m3(codes, NATIVE)


@triton.jit
def from_codes(codes, CODEC: tl.constexpr, NATIVE: tl.constexpr):
    """FP32 of bytes of codes."""
    return to_fp16(codes, CODEC, NATIVE).to(tl.float32)


@triton.jit
def needed_scale(amax, CODEC: tl.constexpr):
    """`Codec.needed_scale`."""
    if CODEC.is_integer:
        return tl.minimum(tl.maximum(amax * (1 / CODEC.max), _MIN_SCALE), _MAX_SCALE)
    else:
        bits = amax.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) - 127 - CODEC.max_exponent + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
        exponent = tl.minimum(tl.maximum(exponent, _MIN_SCALE_EXPONENT), _MAX_SCALE_EXPONENT)
        return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def with_headroom(scale, CODEC: tl.constexpr):
    """`Codec.with_headroom`."""
    return tl.minimum(scale * CODEC.headroom, _MAX_SCALE)


@triton.jit
def inverse(scale, CODEC: tl.constexpr):
    """`1 / scale`, rounded to nearest. It is exact for E4M3, whose scales are powers of two."""
    if CODEC.is_integer:
        return tl.div_rn(1.0, scale)
    else:
        return (0x7F000000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def ratio_of_powers(a, b):
    """`a / b` of two powers of two, the scales of E4M3: a difference of exponents, so exact."""
    return (a.to(tl.int32, bitcast=True) - b.to(tl.int32, bitcast=True) + 0x3F800000).to(tl.float32, bitcast=True)


# Magnitudes


@triton.jit
def finite(x):
    """Magnitudes, with zero for elements that are not finite."""
    magnitude = tl.abs(x)
    return tl.where(magnitude < float("inf"), magnitude, 0.0)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def magnitude(x, NATIVE: tl.constexpr):
    """The largest magnitude of each row of `x [N, C]`; NaN if the row has a NaN."""
    if NATIVE:
        return tl.reduce(tl.abs(x), 1, _larger)
    else:
        return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
