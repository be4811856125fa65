"""8-bit numerics bit for bit: all 256 codes, rounding ties, scales, how the scale of a page grows."""

from bisect import bisect_left

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8attn.formats.codec import E4M3, INT8, MAX_SCALE, MAX_SCALE_EXPONENT, MIN_SCALE, Codec, finite_amax
from fp8attn.numerics import relative_error, settle, sqnr_db

CODES = torch.arange(256, dtype=torch.int32).to(torch.uint8)


def decode(code: int) -> float:
    """The value of a code of E4M3 from its definition: sign, 4 bits of exponent with bias 7, 3 of mantissa."""
    mantissa, exponent = code & 7, (code >> 3) & 15
    sign = -1.0 if code & 0x80 else 1.0
    if code & 0x7F == 0x7F:
        return float("nan")
    return sign * mantissa * 2.0**-9 if exponent == 0 else sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def test_every_code_has_its_value():
    expected = torch.tensor([decode(int(c)) for c in CODES])
    torch.testing.assert_close(CODES.view(E4M3.dtype).float(), expected, rtol=0, atol=0, equal_nan=True)
    finite = expected[expected.isfinite()]
    assert finite.max() == E4M3.max == 1.75 * 2.0**E4M3.max_exponent
    assert finite[finite > 0].min() == E4M3.smallest_subnormal


def test_every_code_survives_a_round_trip():
    values = CODES.view(E4M3.dtype).float()
    finite = values.isfinite()
    for scale in (MIN_SCALE, 0.5, 1.0, 64.0):
        assert torch.equal(E4M3.quantize(values * scale, scale).view(torch.uint8)[finite], CODES[finite])


def test_rounding_is_to_nearest_and_ties_to_even():
    values = CODES[:128].view(E4M3.dtype).double()
    values = values[values.isfinite()]
    low, high = values[:-1], values[1:]
    middle = (low + high) / 2
    nudge = (high - low) / 1024
    codes = torch.arange(len(low))
    even = codes + codes % 2  # of two neighbors, the one whose last bit is zero
    for sign, bit in ((1, 0), (-1, 0x80)):
        got = lambda x, sign=sign: E4M3.quantize((sign * x).float()).view(torch.uint8).int()  # noqa: E731
        assert torch.equal(got(middle), (even + bit).int())
        assert torch.equal(got(middle - nudge), (codes + bit).int())
        assert torch.equal(got(middle + nudge), (codes + 1 + bit).int())


def test_saturation_and_nan():
    x = torch.tensor([E4M3.max * 1.5, -E4M3.max * 100, torch.inf, -torch.inf])
    assert E4M3.quantize(x).float().tolist() == [E4M3.max, -E4M3.max, E4M3.max, -E4M3.max]
    assert E4M3.quantize(torch.tensor([torch.nan])).float().isnan().all()


def test_scale_of_every_boundary():
    """At E4M3.max * 2^e exactly the scale is 2^e; one float above, it doubles."""
    exponents = range(-32, 32)
    at = torch.tensor([E4M3.max * 2.0**e for e in exponents])
    above = torch.nextafter(at, torch.tensor(torch.inf))
    assert E4M3.needed_scale(at).tolist() == [2.0**e for e in exponents]
    assert E4M3.needed_scale(above).tolist() == [2.0 ** (e + 1) for e in exponents]
    assert E4M3.needed_scale(torch.tensor([0.0, 1e-45, 3e38])).tolist() == [
        MIN_SCALE,
        MIN_SCALE,
        2.0**MAX_SCALE_EXPONENT,
    ]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.floats(min_value=2.0**-20, max_value=2.0**30, width=32))
def test_scale_is_the_smallest_that_holds(amax):
    scale = E4M3.needed_scale(torch.tensor(amax)).item()
    assert np.log2(scale) == round(np.log2(scale))
    assert amax <= E4M3.max * scale and amax > E4M3.max * scale / 2


def test_amax_leaves_out_what_is_not_finite():
    x = torch.tensor([[1.0, -3.0, torch.inf], [torch.nan, 0.5, -torch.inf], [torch.nan, torch.inf, torch.nan]])
    assert finite_amax(x, 1).tolist() == [3.0, 0.5, 0.0]


def test_a_scale_that_is_needed_just_holds_the_largest_value():
    amax = torch.tensor([127.0, 1.0, 0.0, 3e38])
    assert INT8.needed_scale(amax).tolist() == [1.0, float(torch.tensor(1 / 127)), MIN_SCALE, MAX_SCALE]
    assert E4M3.needed_scale(torch.tensor([448.0, 449.0, 0.0])).tolist() == [1.0, 2.0, MIN_SCALE]
    amax = torch.rand(1000) * 100
    assert torch.equal(INT8.encode(amax, 1.0 / INT8.needed_scale(amax)), torch.full((1000,), 127.0))


def test_headroom():
    assert INT8.with_headroom(torch.tensor([1.0, MAX_SCALE])).tolist() == [1.25, MAX_SCALE]
    assert E4M3.with_headroom(torch.tensor([1.0, MAX_SCALE])).tolist() == [32.0, MAX_SCALE]


def test_integer_codes_are_rounded_to_even_and_saturate():
    x = torch.tensor([0.5, 1.5, -2.5, 126.5, 127.5, 1e9, -1e9, torch.inf, -torch.inf])
    assert INT8.encode(x, torch.tensor(1.0)).tolist() == [0, 2, -2, 126, 127, 127, -127, 127, -127]
    assert INT8.encode(torch.tensor([torch.nan]), torch.tensor(1.0)).isnan().all()


def test_a_page_by_hand():
    """INT8. The first token, of 127, needs a scale of 1 and sets 1.25. The second fits; the third, of 254, needs 2 and
    sets 2.5.
    """
    x = torch.tensor([127.0, 150.0, 254.0, 10.0])[None, :, None]
    held = torch.ones(1, 4, dtype=torch.int8)
    codes, scale = settle(x, torch.zeros(1, 4, 1), torch.zeros(1), held, INT8, False)
    assert scale.tolist() == [2.5]
    # 127 / 1.25 = 101.6 is rounded to 102, and 102 / 2 to 51; 150 is 120, and then 60; 254 / 2.5 = 101.6.
    assert codes.flatten().tolist() == [51, 60, 102, 4]
    codes, scale = settle(x, torch.zeros(1, 4, 1), torch.ones(1), held, INT8, True)
    assert scale.tolist() == [1.0] and codes.flatten().tolist() == [127, 127, 127, 10]


FINITE = [decode(code) for code in range(127)]


def nearest(y: np.float32, codec: Codec) -> np.float32:
    """The value of the code nearest to `y`, with ties to even, by search."""
    if np.isnan(y):
        return y
    if codec is INT8:
        return np.float32(round(float(max(-127.0, min(127.0, float(y))))))  # Python rounds ties to even
    size = min(abs(float(y)), 448.0)
    above = bisect_left(FINITE, size)
    below = max(above - 1, 0)
    two = abs(FINITE[above] - size), abs(FINITE[below] - size)
    code = (above if above % 2 == 0 else below) if two[0] == two[1] else above if two[0] < two[1] else below
    return np.float32(np.copysign(FINITE[code], y))


def one_token_after_another(
    tokens: np.ndarray, codes: list, scale: np.float32, codec: Codec
) -> tuple[list, np.float32, int]:
    """`settle` as its docstring defines it, for one page: tokens `[n, D]`, and the codes and scale of the tokens
    before.
    """
    headroom = np.float32(1.25 if codec is INT8 else 32.0)
    for token in tokens:
        finite = np.abs(token[np.isfinite(token)])
        amax = finite.max() if len(finite) else np.float32(0)
        if codec is INT8:
            need = np.clip(amax * np.float32(1 / 127), np.float32(MIN_SCALE), np.float32(MAX_SCALE))
        else:
            need = next((2.0**e for e in range(-32, 33) if amax <= 448 * 2.0**e), MAX_SCALE)
        if not codes or need > scale:
            grown = np.float32(min(np.float32(need) * headroom, np.float32(MAX_SCALE)))
            ratio = scale * (np.float32(1) / grown)
            codes = [[nearest(np.float32(c) * ratio, codec) for c in row] for row in codes]
            scale = grown
        inverse = np.float32(1) / scale
        codes.append([nearest(np.float32(x) * inverse, codec) for x in token])
    return codes, scale


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of Inf and NaN
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    codec=st.sampled_from([INT8, E4M3]), seed=st.integers(0, 2**31), before=st.integers(0, 6), count=st.integers(0, 8),
    powers=st.lists(st.integers(-45, 45), min_size=14, max_size=14),
    special=st.sampled_from([0.0, torch.nan, torch.inf, -torch.inf, 1e38]),
)  # fmt: skip
def test_settle_is_one_token_after_another(codec, seed, before, count, powers, special):
    """Magnitudes at random; zeros; Inf, NaN or what saturates the largest scale in one element of eight. Two pages, the
    second one full.
    """
    generator = torch.Generator().manual_seed(seed)
    size = torch.tensor(powers).repeat(2)[torch.randperm(28, generator=generator)].view(2, 14, 1)
    x = torch.randn(2, 14, 3, generator=generator) * torch.exp2(size.float() / (1 + seed % 9))
    chance = torch.rand(x.shape, generator=generator)
    x[chance < 0.1] = 0.0
    first = torch.where(
        (chance > 0.9) & torch.tensor(special).isnan().logical_not(), special, x
    )  # without NaN, which is for the new ones
    x = torch.where(chance > 0.88, special, x)
    starts, ends = (before, 14 - count), (before + count, 14)
    old, scales, expected = torch.full((2, 14, 3), 77.0), torch.full((2,), torch.nan), []
    new, held = torch.zeros(2, 14, 3), torch.zeros(2, 14, dtype=torch.int8)
    for page, (start, end) in enumerate(zip(starts, ends, strict=True)):
        codes, scale = one_token_after_another(first[page, :start].numpy(), [], np.float32(0), codec)
        if codes:
            old[page, :start], scales[page] = torch.tensor(np.array(codes)), float(scale)
        new[page, start:end] = x[page, start:end]
        held[page, :start], held[page, start:end] = 2, 1
        expected.append(one_token_after_another(x[page, start:end].numpy(), codes, scale, codec))
    got, got_scales = settle(new, old, scales.clone(), held, codec, False)
    for page, ((codes, scale), end) in enumerate(zip(expected, ends, strict=True)):
        if not end:
            continue
        assert torch.equal(
            got[page, :end].nan_to_num(500.0), torch.tensor(np.array(codes), dtype=torch.float32).nan_to_num(500.0)
        )
        assert got_scales[page] == float(scale)


def test_integers_are_finer_than_e4m3_by_the_expected_factor():
    """Of normal values, E4M3 rounds off 0.026 of their root mean square, whatever the scale. INT8's steps are of one
    size s, of which it rounds off s / sqrt(12). The largest of 128 x 64 values is near 3.9, and s is 1 to 1.25 times
    3.9 / 127: 0.0089 to 0.0111. Tokens before a growth are rounded twice, which adds some percent."""
    x = torch.randn(1000, 128, 64, generator=torch.Generator().manual_seed(0))
    held = torch.ones(1000, 128, dtype=torch.int8)
    error = {}
    for codec in (INT8, E4M3):
        codes, scale = settle(x, torch.zeros_like(x), torch.zeros(1000), held, codec, False)
        error[codec] = relative_error(codes * scale[:, None, None], x)
    assert 0.0255 < error[E4M3] < 0.0275
    assert 0.0089 < error[INT8] < 0.012
    assert 2.2 < error[E4M3] / error[INT8] < 3.0


def test_error_measures():
    ref = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert relative_error(ref + torch.tensor([0.0, 0.05]), ref) == pytest.approx(0.01)
    assert sqnr_db(ref + torch.tensor([0.0, 0.05]), ref) == pytest.approx(40.0)
