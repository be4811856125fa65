"""Drafts that are appended and cropped change nothing: speculative and greedy decoding give the same tokens on the
committed model.
"""

import copy

import pytest

pytest.importorskip("transformers")

from fp8attn.integrations.transformers import FP8Cache
from fp8attn_tools.evaluation import models

pytestmark = pytest.mark.slow

PROMPTS, LENGTH, NEW = 2, 200, 24


@pytest.fixture(scope="module")
def loaded():
    model, tokenizer = models.load(device="cpu")
    tokens = models.tokenize(tokenizer, models.read_text())
    return model, [tokens[None, start : start + LENGTH] for start in range(0, PROMPTS * 1000, 1000)]


def assistant_of(model):
    """The same model without its last layer. Its guesses are often right and often wrong."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers -= 1
    assistant = type(model)(config).eval()
    assistant.load_state_dict(model.state_dict(), strict=False)
    assistant.generation_config = copy.deepcopy(model.generation_config)
    return assistant


@pytest.mark.parametrize("key_dtype", ["int8", "e4m3"])
def test_prompt_lookup_and_assisted_decoding_give_greedys_tokens(loaded, key_dtype):
    model, prompts = loaded
    assistant = assistant_of(model)
    for ids in prompts:
        tokens = []
        for options in ({}, {"prompt_lookup_num_tokens": 4}, {"assistant_model": assistant}):
            cache = FP8Cache(model, key_dtype=key_dtype)
            out = model.generate(
                ids, past_key_values=cache, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **options
            )
            tokens.append(out[0, LENGTH:].tolist())
        assert len(tokens[0]) > 0 and tokens[1] == tokens[0] and tokens[2] == tokens[0]
