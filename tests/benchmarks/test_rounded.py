"""Caches of other systems by definition: their roundings against numbers worked out by hand, and the cache that holds
them.
"""

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import rounded
from benchmarks.rounded import RoundedCache
from fp8attn_tools.evaluation import models
from fp8attn_tools.evaluation.caches import BF16Cache


def test_int8_has_a_scale_for_each_token_and_rounds_halves_away_from_zero():
    x = torch.tensor([[127.0, 0.5, -0.5, 1.49, -2.5], [-1.27, 0.004, 0.006, 0.015, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    scale = 1.27 / 127
    expected = torch.tensor([[127.0, 1, -1, 1, -3], [-127 * scale, 0, scale, 2 * scale, 100 * scale], [0.0] * 5])
    # The reciprocal of the scale and the products are FP32; 0.015 / 0.01 is a half up to their rounding, so it is not
    # compared.
    keep = [0, 1, 2, 4]
    torch.testing.assert_close(rounded.int8_per_token_head(x)[:, keep], expected[:, keep], rtol=1e-6, atol=0)


def test_fp8_maps_the_largest_magnitude_to_448():
    x = torch.tensor([[448.0, 17.0, 19.0, -1.0625, 0.001], [44.8, 1.7, -0.1, 0.0, 0.0]])
    # Spacing 2 from 16 to 32: 17 and 19 are ties, and go to the even codes 16 and 20. 1.0625 is a tie of 1 and 1.125.
    # 2^-10 is half the smallest code, 2^-9, and 0.001 is more. -0.1 is -1 of the scale 0.1.
    expected = torch.tensor([[448.0, 16.0, 20.0, -1.0, 2**-9], [44.8, 1.6, -0.1, 0.0, 0.0]])
    got = rounded.fp8_per_token_head(x)
    torch.testing.assert_close(got[0], expected[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(
        got[1, [0, 2, 3]], expected[1, [0, 2, 3]], rtol=1e-6, atol=0
    )  # 1.7 is a tie up to rounding


def test_int4_is_asymmetric_after_a_rotation():
    """A vector whose rotation is known: 16 channels, whose rotated values are 0, 1, ... 15 of a unit, are codes
    themselves.
    """
    signs = rounded._signs(16, torch.device("cpu"))
    assert set(signs.tolist()) == {-1.0, 1.0}
    rotated = torch.arange(16.0) - 5
    x = rounded._hadamard(rotated) / 16 * signs
    torch.testing.assert_close(rounded._hadamard(x * signs), rotated)
    # Scale 1 loses nothing by its four low bits, which are zeros; zero is 5.
    torch.testing.assert_close(rounded.int4_per_token_head(x), x, rtol=1e-5, atol=1e-6)
    off = rounded._hadamard(rotated + 0.25 * (torch.arange(16) % 2 == 1) * (torch.arange(16) < 15)) / 16 * signs
    torch.testing.assert_close(rounded.int4_per_token_head(off), x, rtol=1e-5, atol=1e-6)


def test_q8_0_has_a_scale_in_fp16_for_32_rotated_channels():
    """64 channels whose rotation is known: two blocks, each with its own scale."""
    steps = torch.cat([torch.arange(32.0) * 4 + 3, torch.full((32,), -0.5)])
    steps[32] = 127 / 8  # of the second block, whose scale is 1/8: -0.5 is code -4
    x = rounded._hadamard(steps) / 8
    torch.testing.assert_close(rounded._hadamard(x) / 8, steps, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        rounded.q8_0_keys(x), x, rtol=0, atol=1e-5
    )  # scales 1 and 1/8 are FP16 numbers, all values codes
    off = steps + torch.cat([torch.full((32,), 0.25), torch.full((32,), 0.03)]) * (steps.abs() < 15)
    torch.testing.assert_close(rounded.q8_0_values(rounded._hadamard(off) / 8), x, rtol=0, atol=1e-5)
    scales = torch.tensor([1 / 3, 1 / 24]).half().float().repeat_interleave(32)  # 0.33325 and 0.04166
    codes = torch.cat([steps[:32], 8 * steps[32:]])
    torch.testing.assert_close(rounded.q8_0_keys(x / 3), rounded._hadamard(codes * scales) / 8)
    assert torch.equal(rounded.q8_0_keys(torch.zeros(2, 64)), torch.zeros(2, 64))


def test_q8_0_rotates_all_channels_of_keys_and_64_of_values():
    """A large channel hides a small one that is rotated with it: a step is 1000 / 16 / 127, and the small one's share
    is 1 / 16.
    """
    x = torch.zeros(256)
    x[3], x[200] = 1000, 1
    assert rounded.q8_0_values(x)[200] == pytest.approx(1, rel=5e-3)
    assert rounded.q8_0_keys(x)[200] == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize(("name", "low", "high"), [("int8", 2e-3, 1e-2), ("fp8", 1e-2, 4e-2), ("int4", 4e-2, 0.15)])
def test_errors_are_those_of_the_formats(name, low, high):
    """On normal data of 64 channels: a step of INT8 is 2.5 / 127 deviations, E4M3 has 3 bits of a mantissa, INT4 has 16
    levels.
    """
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    of_keys, of_values = rounded.ROUNDINGS[f"vllm-{name}-per-token-head"]
    assert of_keys is of_values and low < (of_keys(x) - x).norm() / x.norm() < high


@torch.no_grad()
def test_a_cache_holds_rounded_tokens(tiny_model):
    model, tokenizer = models.load(tiny_model, device="cpu")
    tokens = models.tokenize(tokenizer, models.read_text(model=tiny_model))[None, :80]
    model.set_attn_implementation(rounded.ROUNDED_KV)
    half = RoundedCache(model.config, (lambda x: x.to(torch.bfloat16),) * 2)
    parts = [model(tokens[:, :50], past_key_values=half).logits, model(tokens[:, 50:], past_key_values=half).logits]
    assert half.layers[0].keys.dtype == torch.bfloat16 and half.get_seq_length() == 80
    whole = model(tokens, past_key_values=RoundedCache(model.config, (rounded.int8_per_token_head,) * 2)).logits
    plain = model(tokens, past_key_values=BF16Cache(model.config)).logits
    assert 0 < (whole - plain).norm() / plain.norm() < 0.05
    # BF16 queries, too, in this cache: K's dtype is that of attention. 2^-9 is BF16's rounding.
    assert (torch.cat(parts, 1) - plain).norm() / plain.norm() < 10 * 2**-9
