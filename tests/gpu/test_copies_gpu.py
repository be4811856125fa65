"""A cache that is moved to the host's memory and back between the steps of a model on the GPU."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

from fp8attn.integrations.transformers import FP8Cache
from tests.support.transformers_models import make, prompt

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


# transformers#48947
@pytest.mark.parametrize("static", [None, 160])
@pytest.mark.parametrize("family", ["qwen3.5-linear", "falcon-h1-hybrid", "gemma3", "llama"])
@torch.no_grad()
def test_steps_after_a_way_through_the_host_have_the_same_bits(family, static, tmp_path):
    """Reported: an offloaded cache of a hybrid model is right in the prompt, and wrong from its first reuse."""
    host = make(family).bfloat16()
    model, ids = copy.deepcopy(host).cuda(), prompt(length=131).cuda()
    untouched, cache = FP8Cache(model, max_cache_len=static), FP8Cache(model, max_cache_len=static)
    for each in (untouched, cache):
        model(ids[:, :126], past_key_values=each)
    for i in range(126, 131):
        cache.save(tmp_path / "from the GPU")
        FP8Cache.load(tmp_path / "from the GPU", host, max_cache_len=static).save(tmp_path / "from the host")
        cache = FP8Cache.load(tmp_path / "from the host", model, max_cache_len=static)
        assert {group.paged.device.type for group in cache.groups} == {"cuda"}
        found, expected = (model(ids[:, i : i + 1], past_key_values=each).logits for each in (cache, untouched))
        assert torch.equal(found, expected), i
