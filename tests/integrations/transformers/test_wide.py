"""Gemma 4: full attention with 512 channels beside windows, V that is K, layers that share K and V. `test_windows` has
it among others.
"""

import pytest
import torch
from transformers import DynamicCache

from fp8attn.integrations.transformers import FP8Cache
from fp8attn_tools import calibrate
from tests.support.transformers_models import one_thread, using  # noqa: F401

from .test_windows import LENGTH, WIDE, W, close, ids, logits, windowed


def test_layers_of_several_shapes():
    """Gemma 4: windowed layers of one head_dim beside full attention with 512 channels, whose V is K before its norm;
    E4M3 keys.
    """
    model = windowed(WIDE)
    cache = FP8Cache(model, key_dtype="e4m3")
    with using(model, "eager"):
        exact = logits(model, DynamicCache(config=model.config))
    close(logits(model, cache), exact, 0.05)  # E4M3 keeps a digit less of K
    pools = [(group.paged.num_kv_heads, group.paged.head_dim, group.window) for group in cache.groups]
    assert pools == [(2, 64, W), (1, 512, None)] and cache.groups[1].paged.pages(0).pool.shape[1:] == (
        1,
        2 * 128 * 512 + 256,
    )


@pytest.mark.parametrize(("skipped", "keep"), [((), 1), ((), 3), ((0,), 3), ((1,), 3)])
@torch.no_grad()
def test_layers_that_share_k_and_v_compute_the_last_queries(skipped, keep):
    """Gemma 4 takes the last queries of its masks for them, as `generate` asks for; the layers that they share may be
    in 16 bits.
    """
    model, padded = windowed(WIDE), torch.ones_like(ids())
    padded[1:, :30] = 0
    for mask in (None, padded):
        for n in (LENGTH, 200):  # longer than the window, and shorter

            def last(cache, mask=None if mask is None else mask[:, :n], n=n):
                return model(ids()[:, :n], past_key_values=cache, attention_mask=mask, logits_to_keep=keep).logits

            with using(model, "eager"):
                exact = last(DynamicCache(config=model.config))
            for length in (None, LENGTH + 9)[: 1 if skipped == (1,) else 2]:  # static windows are in 16 bits, too
                close(last(FP8Cache(model, max_cache_len=length, skip_layers=skipped)), exact, 0.02)


def test_calibrated_scales():
    """Full-attention layers have calibrated scales; pages of windows settle their own."""
    model = windowed(WIDE)
    cache = FP8Cache(model, scales=calibrate(model, [ids()]))
    with using(model, "eager"):
        exact = logits(model, DynamicCache(config=model.config))
    close(logits(model, cache), exact, 0.02)
    assert [layer.scales is not None for group in cache.groups for layer in group.paged.layers] == [False, True]
