"""Rows of a batch that are padded on the left by more than a page and more than a window, in float16."""

import pytest
import torch
from transformers import DynamicCache

from fp8attn.integrations.transformers import FP8Cache
from fp8attn.numerics import relative_error
from tests.support.transformers_models import VOCABULARY, make, one_thread, using  # noqa: F401

WIDTH, STEPS = 450, 2  # of the batch's prompts; tokens after them
LENGTHS = (1, 2, 17, 63, 64, WIDTH)  # of the rows' prompts
WINDOWS = {"sliding_window": 384, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
# What a model has, and the limit of a row's error: half again as much as was measured, which is what 8 bits cost these
# models. If queries saw one token of padding, the rows of 1 to 64 tokens would be 0.11 to 0.53 off, those of Gemma 3
# and 2 0.03 to 0.1, and of Gemma 4 0.07 to 0.17.
MODELS = {
    "llama": ({"num_hidden_layers": 2}, 0.042),
    "gemma3": (WINDOWS, 0.006),
    "gemma2-softcap": (WINDOWS, 0.007),
    "gpt-oss-sinks": (
        WINDOWS | {"num_experts_per_tok": 2},
        0.027,
    ),  # all experts: a rounding can change which are chosen
    "gemma4-512-k-is-v-shared-kv": ({"sliding_window": 384}, 0.018),
}
FLOAT16 = 0.007  # likewise, without a cache


@pytest.fixture(scope="module")
def batch():
    ids = torch.randint(3, VOCABULARY, (len(LENGTHS), WIDTH + STEPS), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(WIDTH + STEPS) >= WIDTH - torch.tensor(LENGTHS)[:, None]).long()
    return ids * mask, mask


@torch.no_grad()
def logits(model, cache, ids, mask):
    """Of a prompt and `STEPS` tokens after it; without a cache, of all at once."""
    if cache is None:
        return model(ids, attention_mask=mask, use_cache=False).logits
    width = ids.shape[1] - STEPS
    outs = [model(ids[:, :width], attention_mask=mask[:, :width], past_key_values=cache).logits]
    for i in range(width, ids.shape[1]):
        outs.append(model(ids[:, i : i + 1], attention_mask=mask[:, : i + 1], past_key_values=cache).logits)
    return torch.cat(outs, 1)


# unsloth#9848, unsloth#9708
@pytest.mark.parametrize("form", ["growing", "static", "no cache"])
@pytest.mark.parametrize("family", MODELS)
def test_padded_rows_in_float16_are_finite_and_the_others_as_if_alone_in_float32(batch, family, form):
    """Reported: rows of padding attend to nothing, and in float16 their NaNs reach the whole batch, also in one forward
    without a cache."""
    ids, mask = batch
    options, limit = MODELS[family]
    model, exact = make(family, **options).half(), make(family, **options)
    cache = None if form == "no cache" else FP8Cache(model, max_cache_len=WIDTH + STEPS if form == "static" else None)
    found = logits(model, cache, ids, mask)
    assert found.dtype == torch.float16 and found.isfinite().all()
    errors = {}
    with using(exact, "eager"):
        for row, length in enumerate(LENGTHS):
            own = slice(row, row + 1), slice(WIDTH - length, None)
            expected = logits(exact, DynamicCache(config=exact.config), ids[own], mask[own])
            errors[length] = relative_error(found[own].float(), expected)
    assert max(errors.values()) < (FLOAT16 if cache is None else limit), errors
