"""`torch.set_default_dtype` changes no bit: whoever loads a model in BF16 may have set it, for good or
while it loads.
"""

import pytest
import torch

from fp8attn import PagedKVCache, scaled_dot_product_attention


def both(compute):
    """What `compute` returns under a default dtype of FP32 and of BF16, from empty caches of constants."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        _forget_constants()
        torch.set_default_dtype(dtype)
        try:
            found.append(compute())
        finally:
            torch.set_default_dtype(torch.float32)
            _forget_constants()
    return found


def _forget_constants():
    from fp8attn_tools.calibration import rotation

    rotation._matrix.cache_clear()


def equal(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a is b is None or (
            a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        )


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("key_dtype", ["int8", "e4m3"])
def test_bytes_of_pages_and_attention(key_dtype, backend):
    torch.manual_seed(0)
    k, v, q = torch.randn(3, 90, 2, 64).bfloat16()

    def run():
        cache = PagedKVCache(2, 64, key_dtype=key_dtype, backend=backend, num_pages=2)
        cache.append(0, k[:50], v[:50])
        cache.append(0, k[50:], v[50:])
        return cache.pages(0).pool, cache.attention(0, q[50:])

    equal(*both(run))


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_sdpa(backend):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 130, 64).bfloat16()
    equal(*both(lambda: [scaled_dot_product_attention(q, k, v, is_causal=True, backend=backend)]))


def test_calibration_and_means_of_biases(tiny_model):
    transformers = pytest.importorskip("transformers")
    from fp8attn.integrations.transformers import FP8Cache
    from fp8attn_tools import calibrate

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    ids = torch.randint(0, 257, (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.bias[31] = 24.0
        model.model.layers[1].self_attn.v_proj.bias.copy_(torch.linspace(-10, 10, 128))

    def run():
        scales, cache = calibrate(model, ids.split(1)), FP8Cache(model)
        found = [
            getattr(scales.layer(i), name)
            for i in range(2)
            for name in ("k_scale", "v_scale", "q_scale", "k_mean", "v_mean")
        ]
        return found + [x for layer in cache.layers for x in (layer.k_mean, layer.v_mean)]

    one, other = both(run)
    assert sum(x is not None for x in one[-4:]) >= 2
    equal(one, other)
