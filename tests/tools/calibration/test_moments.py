"""Static means of K and V."""

import torch

from fp8attn.formats.codec import E4M3
from fp8attn_tools.calibration.moments import on_grid


def test_a_mean_on_the_grid_does_not_send_ties_one_way():
    """Halves of BF16 between two FP8 numbers are 1/16 of all: sent one way they are 1e-3 of V's spread, in every
    average over keys.
    """
    torch.manual_seed(0)
    for offset in (0.0, 0.3, 5.0):
        v = (torch.randn(1 << 15, 32) + offset).bfloat16()
        mean = on_grid(v.float().mean(0), v.float().abs().amax(0), torch.bfloat16)
        bias = {}
        for shift in (0.0, 1e-4):
            kept = v.float() - (mean + shift)
            scale = E4M3.needed_scale(kept.abs().amax())
            bias[shift] = float(
                (E4M3.quantize(kept, scale).float() * scale - kept).double().mean(0).square().mean().sqrt()
            )
        noise = 0.026 * len(v) ** -0.5  # of an average of independent roundings
        assert bias[0.0] < 2.5 * noise and bias[1e-4] > 4 * noise, (offset, bias, noise)
