"""Several turns of several users on one cached prefix, over latents of 20 heads (vllm#38652)."""

import pytest

pytest.importorskip("transformers.models.glm4_moe_lite")

import transformers

from fp8attn.integrations.transformers import FP8Cache
from tests.support import latent_turns
from tests.support.transformers_models import one_thread  # noqa: F401

SYSTEM = 200


@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_later_turns_lose_no_more_than_the_first(mean):
    model = latent_turns.make(mean, 512)
    prompt, turns = latent_turns.said(SYSTEM)
    want = latent_turns.exact(model, prompt, turns)
    plain = latent_turns.through(model, transformers.DynamicCache(config=model.config), prompt, turns)
    assert max(latent_turns.errors(plain, want)) < 1e-4
    cache = FP8Cache(model)
    lost = latent_turns.errors(latent_turns.through(model, cache, prompt, turns), want)
    assert max(lost) < 0.02 and max(lost) < 1.5 * lost[0]
    shared = cache.paged.table.tables
    assert len({tables[0] for tables in shared}) == 1 and len({tables[-1] for tables in shared}) == latent_turns.USERS
