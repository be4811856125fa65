"""Rows in 8 bits: the kernels, interpreted, against the reference; the definition."""

import pytest
import torch

from fp8attn import reference
from fp8attn.formats import rotation
from fp8attn.formats.codec import E4M3, INT8, finite_amax

pytest.importorskip("triton")

from fp8attn.kernels.quantize_rows import quantize_rows

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted on a CPU; tests/gpu has the compiled kernels")


def check(x, heads_per_scale=1, means=False, rotate=False, codec=E4M3):
    """Check that the kernels' bytes follow from their means by the definition in this test. The reference's means must be near; without
    means, all bytes are the reference's."""
    options = dict(rotate_keys=rotate, subtract_mean=means, heads_per_scale=heads_per_scale, codec=codec)
    codes, scale, mean = quantize_rows(x, **options)
    expected_codes, expected_scale, expected_mean = reference.quantize_rows(x, **options)
    assert codes.dtype == codec.dtype and codes.stride() == x.stride()
    if means:
        y = (rotation.rotate(x.float()) if rotate else x.float()) - mean[:, :, None]
        torch.testing.assert_close(mean, expected_mean, rtol=1e-5, atol=1e-6)
        expected_scale = codec.needed_scale(finite_amax(y.unflatten(1, (-1, heads_per_scale)), (2, 3, 4)))
        expected_codes = codec.encode(y, (1 / expected_scale).repeat_interleave(heads_per_scale, 1)[..., None, None]).to(codec.dtype)
    else:
        assert mean is None
    assert torch.equal(scale, expected_scale)
    nan = expected_codes.isnan()
    assert torch.equal(nan, codes.isnan())
    assert torch.equal(expected_codes.view(torch.uint8)[~nan], codes.view(torch.uint8)[~nan])
    return codes, scale, mean


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 4, 33, 64), {"heads_per_scale": 2}),
        ((1, 2, 1, 128), {"means": True}),
        ((2, 1, 70, 80), {"means": True}),
        ((1, 3, 40, 96), {"means": True, "heads_per_scale": 3}),
        ((1, 1, 19, 256), {}),
        ((1, 1, 1100, 64), {"means": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize(("rotate", "codec"), [(False, E4M3), (True, INT8)], ids=str)
def test_bytes_scales_and_means(shape, options, rotate, codec):
    torch.manual_seed(0)
    x = (torch.randn(shape) * 3 + torch.randn(shape[0], shape[1], 1, shape[3]) * 10).bfloat16()
    check(x, **options, rotate=rotate, codec=codec)
    check(x.transpose(1, 2).contiguous().transpose(1, 2), **options, rotate=rotate, codec=codec)


def test_what_is_not_finite_influences_nothing_else():
    torch.manual_seed(0)
    x = torch.randn(1, 2, 30, 64)
    clean = check(x, means=True)
    x[0, 0, 3, 5], x[0, 1, 4, 6], x[0, 1, 5, 6] = torch.nan, torch.inf, -torch.inf
    codes, _, mean = check(x, means=True)
    assert codes[0, 0, 3, 5].isnan() and codes[0, 1, 4, 6].float() == 448 and codes[0, 1, 5, 6].float() == -448
    assert mean[0, 0, 5] == mean[0, 1, 6] == 0 and mean[0, 0, 6] == clean[2][0, 0, 6]


def test_zeros():
    codes, scale, mean = check(torch.zeros(1, 1, 5, 64), means=True)
    assert not codes.float().any() and not mean.any() and scale.item() == 2.0**-32
