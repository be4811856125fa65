"""Rows in FP8: the kernels, interpreted, against the reference; the definition."""

import pytest
import torch

from fp8attn import ops
from fp8attn.numerics import finite_amax, power_of_two_scale, quantize
from fp8attn.rope import apply_rope

pytest.importorskip("triton")

from fp8attn.kernels.quantize_rows import quantize_rows

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted on a CPU; tests/gpu has the compiled kernels")


def check(x, heads_per_scale=1, means=False, cos=None, sin=None, interleaved=False):
    """The kernels' bytes are those that their means and this definition give; the reference's means are near."""
    options = dict(rope_cos=cos, rope_sin=sin, rope_interleaved=interleaved, means=means, heads_per_scale=heads_per_scale)
    x_fp8, scale, mean = quantize_rows(x, **options)
    y = x.float()
    if cos is not None:
        turned = apply_rope(x.transpose(1, 2).flatten(0, 1), cos.flatten(0, 1), sin.flatten(0, 1), interleaved)
        y = turned.unflatten(0, (x.shape[0], -1)).transpose(1, 2)
    if means:
        y = y - mean[:, :, None]
        torch.testing.assert_close(mean, ops.quantize_rows(x, **options, backend="reference")[2], rtol=1e-5, atol=1e-6)
    else:
        assert mean is None
    assert torch.equal(scale, power_of_two_scale(finite_amax(y.unflatten(1, (-1, heads_per_scale)), (2, 3, 4))))
    expected = quantize(y, scale.repeat_interleave(heads_per_scale, 1)[..., None, None])
    nan = expected.isnan()
    assert torch.equal(nan, x_fp8.isnan())
    assert torch.equal(expected.view(torch.uint8)[~nan], x_fp8.view(torch.uint8)[~nan])
    assert x_fp8.stride() == x.stride()
    return x_fp8, scale, mean


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
def test_bytes_scales_and_means(shape, options):
    torch.manual_seed(0)
    x = (torch.randn(shape) * 3 + torch.randn(shape[0], shape[1], 1, shape[3]) * 10).bfloat16()
    check(x, **options)
    check(x.transpose(1, 2).contiguous().transpose(1, 2), **options)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [64, 32])
def test_rotated(rotary, interleaved):
    torch.manual_seed(0)
    x, angle = torch.randn(2, 2, 21, 64).half(), torch.randn(2, 21, rotary // 2)
    check(x, means=True, cos=angle.cos(), sin=angle.sin(), interleaved=interleaved)


def test_what_is_not_finite_influences_nothing_else():
    torch.manual_seed(0)
    x = torch.randn(1, 2, 30, 64)
    clean = check(x, means=True)
    x[0, 0, 3, 5], x[0, 1, 4, 6], x[0, 1, 5, 6] = torch.nan, torch.inf, -torch.inf
    x_fp8, _, mean = check(x, means=True)
    assert x_fp8[0, 0, 3, 5].isnan() and x_fp8[0, 1, 4, 6].float() == 448 and x_fp8[0, 1, 5, 6].float() == -448
    assert mean[0, 0, 5] == mean[0, 1, 6] == 0 and mean[0, 0, 6] == clean[2][0, 0, 6]


def test_zeros():
    x_fp8, scale, mean = check(torch.zeros(1, 1, 5, 64), means=True)
    assert not x_fp8.float().any() and not mean.any() and scale.item() == 2.0**-32
