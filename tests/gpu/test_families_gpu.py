"""Small hybrids and models with windows in BF16 on the GPU: the kernels under `FP8Cache`, beside the states of the other layers."""

import pytest
import torch

pytest.importorskip("transformers")

from fp8attn.integrations.transformers import FP8Cache
from fp8attn.numerics import relative_error
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
    return torch.cat([model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(n, ids.shape[1])], 1).float()


@pytest.mark.parametrize(("family", "tokens", "changes"), [(name, 300, {}) for name in HYBRIDS] + WINDOWS)
def test_a_family_agrees_with_the_reference_with_its_static_form_and_with_bf16(family, tokens, changes):
    model, ids = make(family, **changes).to(DEVICE, torch.bfloat16), prompt(length=tokens).to(DEVICE)
    ours = logits(model, FP8Cache(model), ids)
    assert ours.isfinite().all()
    assert relative_error(ours, logits(model, FP8Cache(model, backend="reference"), ids)) < CLOSE
    assert relative_error(logits(model, FP8Cache(model, max_cache_len=tokens + 20), ids), ours) < CLOSE
    model.set_attn_implementation("sdpa")
    assert relative_error(ours, logits(model, plain(model.config), ids)) < QUANTIZED
