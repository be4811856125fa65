"""A cache that is copied, pickled, or written to a file and read again between any two steps goes on as one that
nothing has touched."""

import copy
import pickle

import pytest
import torch

from fp8attn.integrations.transformers import FP8Cache
from tests.support.families import config_of, model_of
from tests.support.transformers_models import HYBRIDS, make, one_thread, prompt  # noqa: F401

LENGTH, STEPS = 126, 5  # the first page ends among the steps
FAMILIES = ("qwen3-next", *HYBRIDS, "llama", "gemma3")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    if request.param != "qwen3-next":
        return make(request.param)
    model = model_of(config_of("qwen3_next"))
    model.set_attn_implementation("fp8_kv")
    return model


def in_a_file(cache, model, path, ids, static):
    cache.save(path, tokens=ids)
    return FP8Cache.load(path, model, tokens=ids, max_cache_len=static)


MOVES = {
    "copy": lambda cache, *_: copy.deepcopy(cache),
    "pickle": lambda cache, *_: pickle.loads(pickle.dumps(cache)),
    "file": in_a_file,
    "turns": lambda cache, model, path, ids, static: MOVES[("copy", "file", "pickle")[ids.shape[1] % 3]](
        cache, model, path, ids, static
    ),
}


# transformers#48947
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("static", [None, 160])
@torch.no_grad()
def test_a_cache_that_is_moved_between_steps_gives_the_same_bits(model, static, move, tmp_path):
    """Reported: a hybrid's cache whose layers are moved off the GPU and back is right in the prompt, and wrong from its
    first reuse. The first cache must keep its own tokens, too, while its copies get others."""
    ids = prompt(length=LENGTH + STEPS)
    untouched, first = FP8Cache(model, max_cache_len=static), FP8Cache(model, max_cache_len=static)
    for cache in (untouched, first):
        model(ids[:, :LENGTH], past_key_values=cache)
    cache = first
    for i in range(LENGTH, LENGTH + STEPS):
        cache = MOVES[move](cache, model, tmp_path / "cache", ids[:, :i], static)
        assert int(cache.get_seq_length()) == i
        found, expected = (model(ids[:, i : i + 1], past_key_values=each).logits for each in (cache, untouched))
        assert torch.equal(found, expected), i
    again = FP8Cache(model, max_cache_len=static)
    model(ids[:, :LENGTH], past_key_values=again)
    assert torch.equal(*(model(ids[:, -1:], past_key_values=each).logits for each in (first, again)))


def test_offloading_is_refused_by_name(model):
    """A cache of transformers with offloading=True would call these of its layers between steps."""
    cache = FP8Cache(model)
    for name in ("offload", "prefetch"):
        with pytest.raises(NotImplementedError, match=r"FP8Cache does not offload.*DynamicCache\(offloading=True\)"):
            getattr(cache.layers[cache.fp8_layers[0]], name)()
