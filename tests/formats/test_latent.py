"""How latents are rounded, and that attention over what is stored is attention over latents."""

import pytest
import torch

from fp8attn.formats.latent import absorb, channels, dequantize, quantize, restore, to_rope
from fp8attn.formats.rotation import rotate
from fp8attn.numerics import relative_error

# Of a token of normal values, whose largest is at most 5.5 deviations: a step is 5.5 / 127, and its uniform error has
# a root mean square of step / sqrt(12).
ERROR = 5.5 / 127 / 12**0.5


def latents(tokens: int, rank: int = 512, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, rank, generator=torch.Generator().manual_seed(seed))


def statics(rank: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    """A mean and factors that differ by three orders of magnitude."""
    return latents(1, rank, 9)[0] * 3, 10.0 ** torch.linspace(-2, 1, rank // 128)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("rank", [128, 256, 512, 1024])
def test_a_code_is_off_by_half_a_step(rank, static):
    """A step is 1/127 of the largest rotated channel, of a uniform error: its root mean square is step / sqrt(12)."""
    mean, factor = statics(rank) if static else (None, None)
    x = latents(200, rank) if not static else latents(200, rank) * channels(factor) + mean
    codes, scale = quantize(x, mean, factor)
    y = rotate((x.double() - (mean if static else 0)) / (channels(factor).double() if static else 1))
    assert codes.dtype == torch.int8 and scale.dtype == torch.float32
    torch.testing.assert_close(scale.double() * 127, y.abs().amax(-1), rtol=1e-6, atol=0)
    off = codes.double() * scale.double()[:, None] - y
    assert (off.abs() <= scale.double()[:, None] * 0.5001).all()
    assert abs((off / scale[:, None]).square().mean().sqrt() * 12**0.5 - 1) < 0.02
    back = restore(codes.double() * scale.double()[:, None], mean, factor)
    assert relative_error((back - x) / (channels(factor) if static else 1), off) < 1.5  # the rotation keeps the norm
    assert relative_error(back, x) < ERROR


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tokens_are_dequantized_by_a_product(dtype):
    """Into 16 bits beside other columns, within a rounding of the sums of codes in FP16 and one of the result."""
    codes, scale = quantize(latents(200))
    out = torch.full((200, 576), torch.nan, dtype=dtype)
    dequantize(codes, scale, out[:, :512])
    expected = restore(codes.double() * scale.double()[:, None], None, None)
    assert out[:, 512:].isnan().all()
    torch.testing.assert_close(out[:, :512].double(), expected, rtol=torch.finfo(dtype).eps, atol=2**-11)


def test_a_token_of_normal_values_loses_one_percent_whatever_its_size():
    x = latents(64) * 10.0 ** torch.linspace(-30, 30, 64)[:, None]
    codes, scale = quantize(x)
    for back, token in zip(restore(codes.double() * scale.double()[:, None], None, None), x, strict=True):
        assert relative_error(back, token) < ERROR


def test_a_mean_and_factors_keep_small_blocks():
    """Without them, a block that is a thousandth of another is rounded to nothing."""
    mean, factor = statics()
    x = latents(100) * channels(factor) + mean
    errors = []
    for static in ((None, None), (mean, factor)):
        codes, scale = quantize(x, *static)
        back = restore(codes.float() * scale[:, None], *static)
        errors.append(relative_error(back[:, :128] - mean[:128], x[:, :128] - mean[:128]))
    assert errors[0] > 1 and errors[1] < ERROR


def test_the_bytes_of_a_token_depend_on_it_alone():
    x = latents(40)
    codes, scale = quantize(x)
    for part in (slice(0, 1), slice(7, 9), slice(20, 40)):
        assert torch.equal(quantize(x[part])[0], codes[part]) and torch.equal(quantize(x[part])[1], scale[part])
    again = quantize(x.flip(0).view(4, 10, 1, 512) + 0.0)
    assert torch.equal(again[0].view(40, 512).flip(0), codes)


def test_zeros_and_what_is_not_finite():
    x = latents(6)
    x[1] = 0
    x[2, 5], x[3, 500], x[4, 3] = torch.nan, torch.inf, -torch.inf
    codes, scale = quantize(x)
    assert scale[1] == 0 and scale[2:5].isnan().all() and not codes[1:5].any()
    finite = [0, 5]
    assert torch.equal(codes[finite], quantize(x[finite])[0]) and torch.equal(scale[finite], quantize(x[finite])[1])
    assert quantize(torch.full((1, 128), 3e38))[1].isnan()  # the rotation leaves FP32's range


def test_numbers_below_fp32s_normal_ones():
    x = torch.zeros(60, 128)
    x[:, 0] = torch.arange(60) * 16 * 2.0**-149
    codes, scale = quantize(x)
    assert (codes.int().abs() <= 127).all() and scale.isfinite().all()
    torch.testing.assert_close(codes.float() * scale[:, None], rotate(x), rtol=0, atol=127 * 2.0**-149)


def test_attention_over_what_is_stored():
    """Scores and sums of restored latents follow from codes, absorbed queries and static numbers, in float64."""
    mean, factor = statics()
    x = latents(50) * channels(factor) + mean
    codes, scale = quantize(x, mean, factor)
    y = codes.double() * scale.double()[:, None]
    stored, q, p = restore(y, mean, factor), latents(3, seed=1).double(), torch.rand(3, 50, dtype=torch.float64)
    p /= p.sum(-1, keepdim=True)
    torch.testing.assert_close(q @ stored.T, (q @ mean.double())[:, None] + absorb(q, factor) @ y.T)
    torch.testing.assert_close(p @ stored, restore(p @ y, mean, factor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rope_in_fp16(dtype):
    x = torch.tensor([1.0, -0.1, 65504.0, 1e6, -torch.inf, torch.nan, 0.0], dtype=torch.float32).to(dtype)
    x = to_rope(x)
    assert x.dtype == torch.float16 and x[5].isnan()
    assert x[[0, 2, 3, 4, 6]].tolist() == [1.0, 65504.0, 65504.0, -65504.0, 0.0]
    assert x[1] == torch.tensor(-0.1, dtype=dtype).half()
