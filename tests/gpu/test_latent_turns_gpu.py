"""Several turns of several users on one long cached prefix, over latents of 20 heads (vllm#38652), on a GPU."""

import pytest
import torch

pytest.importorskip("transformers.models.glm4_moe_lite")

import transformers

from fp8attn.integrations.transformers import FP8Cache
from tests.support import latent_turns

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
SYSTEM = 20_000
QUANTIZED = 0.02  # as on a CPU


@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_later_turns_lose_no_more_than_the_first(mean):
    model = latent_turns.make(mean, 32768).cuda()
    prompt, turns = latent_turns.said(SYSTEM)
    prompt, turns = prompt.cuda(), [turn.cuda() for turn in turns]
    want = latent_turns.exact(model, prompt, turns)
    model = model.bfloat16()
    caches = transformers.DynamicCache(config=model.config), FP8Cache(model)
    rounded, lost = (latent_turns.errors(latent_turns.through(model, x, prompt, turns), want) for x in caches)
    assert max(lost) < (QUANTIZED**2 + (2 * max(rounded)) ** 2) ** 0.5
    assert max(lost) < 1.5 * lost[0]
