"""FP8 facts bit for bit: all 256 codes, rounding ties, scales, exact rescaling, means."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8attn.numerics import (
    E4M3,
    E5M2,
    MAX_SCALE_EXPONENT,
    MIN_SCALE,
    dequantize,
    finite_amax,
    power_of_two_scale,
    quantize,
    relative_error,
    rescale,
    sample_rows,
    shrunk_mean,
    sqnr_db,
)

CODES = torch.arange(256, dtype=torch.int32).to(torch.uint8)
FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def decode(code: int, fmt) -> float:
    """A code's value from the definition of the format: sign, exponent, mantissa."""
    exponent_bits = 7 - fmt.mantissa_bits
    mantissa, exponent = code & (2**fmt.mantissa_bits - 1), (code >> fmt.mantissa_bits) & (2**exponent_bits - 1)
    sign = -1.0 if code & 0x80 else 1.0
    if fmt.has_inf and exponent == 2**exponent_bits - 1:
        return sign * float("inf") if mantissa == 0 else float("nan")
    if not fmt.has_inf and code & 0x7F == 0x7F:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - fmt.exponent_bias - fmt.mantissa_bits)
    return sign * (1 + mantissa / 2**fmt.mantissa_bits) * 2.0 ** (exponent - fmt.exponent_bias)


@FORMATS
def test_every_code_has_its_value(fmt):
    expected = torch.tensor([decode(int(c), fmt) for c in CODES])
    torch.testing.assert_close(dequantize(CODES.view(fmt.dtype)), expected, rtol=0, atol=0, equal_nan=True)
    finite = expected[expected.isfinite()]
    assert finite.max() == fmt.max
    positive = finite[finite > 0]
    assert positive.min() == fmt.smallest_subnormal
    assert decode(1 << fmt.mantissa_bits, fmt) == fmt.smallest_normal
    assert 1.75 * 2.0**fmt.max_exponent == fmt.max


@FORMATS
def test_every_code_survives_a_round_trip(fmt):
    values = CODES.view(fmt.dtype).float()
    finite = values.isfinite()
    for scale in (MIN_SCALE, 0.5, 1.0, 64.0):
        assert torch.equal(quantize(values * scale, scale, fmt).view(torch.uint8)[finite], CODES[finite])


@FORMATS
def test_rounding_is_to_nearest_and_ties_to_even(fmt):
    values = CODES[:128].view(fmt.dtype).double()
    values = values[values.isfinite()]
    low, high = values[:-1], values[1:]
    middle = (low + high) / 2
    nudge = (high - low) / 1024
    codes = torch.arange(len(low))
    even = codes + codes % 2  # of two neighbours, the one whose last bit is zero
    for sign, bit in ((1, 0), (-1, 0x80)):
        got = lambda x, sign=sign: quantize((sign * x).float(), fmt=fmt).view(torch.uint8).int()  # noqa: E731
        assert torch.equal(got(middle), (even + bit).int())
        assert torch.equal(got(middle - nudge), (codes + bit).int())
        assert torch.equal(got(middle + nudge), (codes + 1 + bit).int())


@FORMATS
def test_saturation_and_nan(fmt):
    x = torch.tensor([fmt.max * 1.5, -fmt.max * 100, torch.inf, -torch.inf])
    assert quantize(x, fmt=fmt).float().tolist() == [fmt.max, -fmt.max, fmt.max, -fmt.max]
    assert quantize(torch.tensor([torch.nan]), fmt=fmt).float().isnan().all()


@FORMATS
def test_scale_of_every_boundary(fmt):
    """At fmt.max * 2^e exactly the scale is 2^e; one float above, it doubles."""
    exponents = range(-32, 32)
    at = torch.tensor([fmt.max * 2.0**e for e in exponents])
    above = torch.nextafter(at, torch.tensor(torch.inf))
    assert power_of_two_scale(at, fmt).tolist() == [2.0**e for e in exponents]
    assert power_of_two_scale(above, fmt).tolist() == [2.0 ** (e + 1) for e in exponents]
    assert power_of_two_scale(torch.tensor([0.0, 1e-45, 3e38]), fmt).tolist() == [MIN_SCALE, MIN_SCALE, 2.0**MAX_SCALE_EXPONENT]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.floats(min_value=2.0**-20, max_value=2.0**30, width=32))
def test_scale_is_the_smallest_that_holds(amax):
    scale = power_of_two_scale(torch.tensor(amax)).item()
    assert np.log2(scale) == round(np.log2(scale))
    assert amax <= E4M3.max * scale and amax > E4M3.max * scale / 2


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 20), st.integers(0, 2**31))
def test_rescale_is_exact_but_for_subnormals(shift, seed):
    codes = CODES[CODES.view(E4M3.dtype).float().isfinite()].view(E4M3.dtype)
    old, new = torch.tensor(2.0**-10), torch.tensor(2.0 ** (shift - 10))
    moved = dequantize(rescale(codes, old, new), new)
    exact = dequantize(codes, old)
    normal = exact.abs() >= E4M3.smallest_normal * new
    assert torch.equal(moved[normal], exact[normal])
    assert ((moved - exact).abs() <= E4M3.smallest_subnormal * new / 2).all()


def test_amax_leaves_out_what_is_not_finite():
    x = torch.tensor([[1.0, -3.0, torch.inf], [torch.nan, 0.5, -torch.inf], [torch.nan, torch.inf, torch.nan]])
    assert finite_amax(x, 1).tolist() == [3.0, 0.5, 0.0]


def test_sampled_rows_are_spread_and_stay_inside():
    rows = sample_rows(torch.tensor([1000, 3, 0]), torch.tensor([0, 1000, 1003]), samples=4)
    assert rows.tolist() == [[0, 250, 500, 750], [1000, 1000, 1001, 1002], [1003, 1003, 1003, 1003]]


def test_mean_is_kept_where_it_is_significant():
    torch.manual_seed(0)
    x = torch.randn(2, 64, 1, 3) + torch.tensor([100.0, 0.0, 2.0])
    mean = shrunk_mean(x, torch.tensor([64, 1]))
    torch.testing.assert_close(mean[0, 0, 0], x[0, :, 0, 0].mean(), rtol=1e-4, atol=0)  # an offset: all of it
    assert mean[0, 0, 1].abs() < x[0, :, 0, 1].mean().abs()  # noise: shrunk
    torch.testing.assert_close(mean[0, 0, 2], x[0, :, 0, 2].mean(), rtol=0.02, atol=0)
    assert (mean[1] == 0).all()  # one token says nothing


def test_mean_of_broken_channels_is_zero():
    x = torch.ones(1, 8, 1, 3)
    x[0, 2, 0, 0], x[0, 3, 0, 1] = torch.nan, torch.inf
    assert shrunk_mean(x, torch.tensor([8]))[0, 0].tolist() == [0.0, 0.0, 1.0]


def test_taking_off_a_mean_does_not_send_ties_one_way():
    """Halves of BF16 between two FP8 numbers are 1/16 of all: sent one way they are 1e-3 of V's spread, in every average over keys."""
    torch.manual_seed(0)
    for offset in (0.0, 0.3, 5.0):
        v = (torch.randn(1 << 15, 32) + offset).bfloat16()
        mean = shrunk_mean(v[None, :: len(v) // 128, None], torch.tensor([len(v)]))[0, 0]
        bias = {}
        for shift in (0.0, 1e-4):
            kept = v.float() - (mean + shift)
            scale = power_of_two_scale(kept.abs().amax())
            bias[shift] = float((dequantize(quantize(kept, scale), scale) - kept).double().mean(0).square().mean().sqrt())
        noise = 0.026 * len(v) ** -0.5  # of an average of independent roundings
        assert bias[0.0] < 2.5 * noise and bias[1e-4] > 4 * noise, (offset, bias, noise)


def test_error_measures():
    ref = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert relative_error(ref + torch.tensor([0.0, 0.05]), ref) == pytest.approx(0.01)
    assert sqnr_db(ref + torch.tensor([0.0, 0.05]), ref) == pytest.approx(40.0)
