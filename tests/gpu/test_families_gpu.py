"""Small hybrids, vision-language models and models with windows in BF16 on the GPU: the kernels under `FP8Cache`,
beside the states of the other layers; and caches in and out of `torch.inference_mode`."""

import pytest
import torch

pytest.importorskip("transformers")

from fp8attn.integrations.transformers import FP8Cache
from fp8attn.numerics import relative_error
from tests.support.multimodal_models import make as make_multimodal
from tests.support.transformers_models import HYBRIDS, make, plain, prompt

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

CLOSE = 0.03  # BF16 rounds at 2^-9, in another order in every implementation, and 8-bit codes flip with it
QUANTIZED = 0.10
DEVICE = "cuda"
WINDOWS = [  # alone, beside full attention, and beside that with 512 channels, on another backend
    (family, 1300, {"sliding_window": 400}) for family in ("mistral", "gemma3", "gemma4-512-k-is-v-shared-kv")
]


@torch.no_grad()
def logits(model, cache, ids, steps=8):
    """Of the last `steps` tokens, fed one by one."""
    n = ids.shape[1] - steps
    model(ids[:, :n], past_key_values=cache)
    return torch.cat(
        [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(n, ids.shape[1])], 1
    ).float()


@pytest.mark.parametrize(("family", "tokens", "changes"), [(name, 300, {}) for name in HYBRIDS] + WINDOWS)
def test_a_family_agrees_with_the_reference_with_its_static_form_and_with_bf16(family, tokens, changes):
    model, ids = make(family, **changes).to(DEVICE, torch.bfloat16), prompt(length=tokens).to(DEVICE)
    ours = logits(model, FP8Cache(model), ids)
    assert ours.isfinite().all()
    assert relative_error(ours, logits(model, FP8Cache(model, backend="reference"), ids)) < CLOSE
    if family != "mistral":  # a static cache has windows in 16 bits, and refuses a model of windows alone
        assert relative_error(logits(model, FP8Cache(model, max_cache_len=tokens + 20), ids), ours) < CLOSE
    model.set_attn_implementation("sdpa")
    assert relative_error(ours, logits(model, plain(model.config), ids)) < QUANTIZED


@pytest.mark.parametrize("family", ["qwen2_5_vl", "glm4v"])
def test_a_vision_language_model_agrees_with_the_reference_with_its_static_form_and_with_bf16(family):
    """Heads of 128 channels with biases in K, beside a vision model with heads of 80."""
    model, ids = make_multimodal(family).to(DEVICE, torch.bfloat16), prompt(length=700).to(DEVICE)
    ours = logits(model, FP8Cache(model), ids)
    assert ours.isfinite().all()
    assert relative_error(ours, logits(model, FP8Cache(model, backend="reference"), ids)) < CLOSE
    assert relative_error(logits(model, FP8Cache(model, max_cache_len=720), ids), ours) < CLOSE
    model.set_attn_implementation("sdpa")
    assert relative_error(ours, logits(model, plain(model.config.get_text_config()), ids)) < QUANTIZED


@pytest.mark.parametrize(("family", "changes"), [("llama", {}), ("gemma3", {"sliding_window": 400})])
@pytest.mark.parametrize("length", [None, 800])
def test_a_cache_goes_in_and_out_of_inference_mode(family, changes, length):
    """Forwards, crops and moves of beams, alternately inside and outside:
    the bits of a cache that never saw the mode.
    """
    model, ids = make(family, **changes).to(DEVICE, torch.bfloat16), prompt(length=700).to(DEVICE)
    steps = [
        lambda cache: model(ids[:, :600], past_key_values=cache).logits,
        lambda cache: model(ids[:, 600:640], past_key_values=cache).logits,
        lambda cache: cache.crop(-40) if length is None else None,  # a static window in 16 bits cannot go back
        lambda cache: cache.reorder_cache(torch.tensor([1, 0], device=DEVICE)) if length is None else None,
        lambda cache: model(ids[:, 640:641], past_key_values=cache).logits,
        lambda cache: cache.reset(),
        lambda cache: model(ids[:, :300], past_key_values=cache).logits,
    ]
    outs = []
    for first in (None, 0, 1):
        cache = FP8Cache(model, max_cache_len=length)
        made = []
        for number, step in enumerate(steps):
            inside = first is not None and (number + first) % 2 == 0
            with torch.inference_mode() if inside else torch.no_grad():
                made.append(step(cache))
        outs.append([x for x in made if x is not None])
    for each in outs[1:]:
        assert all(map(torch.equal, each, outs[0]))
