"""Saturation and underflow against the codes that quantization gives."""

import pytest
import torch

from fp8attn import LayerScales, UsageError
from fp8attn.formats.codec import E4M3, codec_of
from fp8attn.formats.rotation import rotate
from fp8attn_tools.calibration import Coverage, ScalesReport, counters

HEADS, DIM = 2, 64


def test_shares_are_those_of_the_codes():
    generator = torch.Generator().manual_seed(0)
    for key_dtype in ("int8", "e4m3"):
        for rotated in (False, True):
            x = {which: torch.exp(3 * torch.randn(400, HEADS, DIM, generator=generator)) for which in "qkv"}
            x["v"][:, 1, :10] = 0.0  # zeros are no underflow
            mean = torch.randn(HEADS, DIM, generator=generator)
            keys = codec_of(key_dtype)
            # A third of the octaves of these values saturates.
            layer = LayerScales(
                *[torch.tensor([2.0**-7, 2.0**-5])] * 2,
                mean,
                torch.zeros(HEADS, DIM),
                key_dtype,
                rotated,
                torch.ones(HEADS),
            )
            found = counters(layer)
            for which, y in x.items():
                for part in y.split(150):
                    found[which].add(part)
            for which, scale, m, codec in (
                ("k", layer.k_scale, mean, keys), ("v", layer.v_scale, 0.0, E4M3), ("q", layer.q_scale, 0.0, keys),
            ):  # fmt: skip
                y = x[which] - m
                y = rotate(y) if rotated and which != "v" else y
                codes = codec.encode(y, 1 / scale[:, None])
                past = y.abs() > scale[:, None] * codec.max
                zero = (codes == 0) & (y != 0)
                # One value on an edge may fall otherwise, because the rotation rounds otherwise.
                coverage = found[which].coverage()
                torch.testing.assert_close(
                    coverage.saturated, past.double().mean((0, 2)), rtol=0, atol=1.5 / (400 * DIM)
                )
                torch.testing.assert_close(
                    coverage.underflow, zero.double().mean((0, 2)), rtol=0, atol=1.5 / (400 * DIM)
                )
                assert (coverage.saturated > 0).any()


def test_a_scale_of_the_maximum_saturates_nothing():
    x = torch.randn(1000, 1, DIM, generator=torch.Generator().manual_seed(0))
    for n in range(50):  # amax / 127 * 127 is less than amax in about half of all cases
        y = x * (1 + n / 50)
        one = torch.tensor([1.0])
        layer = LayerScales(y.abs().amax()[None] / 127, one, torch.zeros(1, DIM), torch.zeros(1, DIM), "int8", False)
        found = counters(layer)
        found["k"].add(y)
        assert found["k"].coverage().saturated.tolist() == [0.0]


def test_maps_and_the_worst():
    def coverage(*saturated):
        return Coverage(torch.tensor(saturated, dtype=torch.float64), torch.zeros(len(saturated), dtype=torch.float64))

    report = ScalesReport(
        {1: {"k": coverage(0.1, 0.0), "v": coverage(0.0, 0.3)}, 4: {"k": coverage(0.0, 0.2), "v": coverage(0.0, 0.0)}},
        7,
    )
    assert report.tensors == ("k", "v")
    assert report.map("k", "saturated").tolist() == [[0.1, 0.0], [0.0, 0.2]]
    assert [(worst.layer, worst.tensor, worst.head) for worst in report.worst(3)] == [
        (1, "v", 1),
        (4, "k", 1),
        (1, "k", 0),
    ]
    assert (
        repr(report) == "ScalesReport(layers 1, 4, 7 tokens, at most 30.00% of a head saturated: V of layer 1, head 1)"
    )


def test_another_number_of_heads_is_refused():
    """A part of the heads would be broadcast to all."""
    layer = LayerScales(*[torch.ones(HEADS)] * 2, *[torch.zeros(HEADS, DIM)] * 2)
    with pytest.raises(
        UsageError, match=r"the scales have 2 heads, and the model has 1 in this process; pass the scales of this model"
    ):
        counters(layer)["k"].add(torch.ones(3, 1, DIM))
