"""A Llama whose layers are on two GPUs, as `device_map="auto"` divides a model."""

import copy

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate import dispatch_model

from fp8attn.integrations.transformers import FP8Cache

from .test_transformers_gpu import NEW, forced, generated, ids, mask, model  # noqa: F401

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")]


@pytest.fixture(scope="module")
def divided(model):  # noqa: F811
    """A copy of the model with its last two layers and its head on the second GPU."""
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    places |= {f"model.layers.{layer}": layer // 2 for layer in range(4)}
    return dispatch_model(copy.deepcopy(model), places)


def test_pages_are_on_the_devices_of_their_layers(divided, ids, mask):  # noqa: F811
    cache = FP8Cache(divided)
    forced(divided, cache, ids, mask, 4)
    assert [str(cache.pages(layer).pool.device) for layer in range(4)] == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]


@pytest.mark.parametrize("max_cache_len", [None, 1024])
def test_two_gpus_compute_what_one_does(model, divided, ids, mask, max_cache_len):  # noqa: F811
    """The same kernels on GPUs of one type: the same bits, in prompts and in steps, with padding on the left."""
    one, two = (forced(each, FP8Cache(each, max_cache_len=max_cache_len), ids, mask) for each in (model, divided))
    assert torch.equal(one, two.to(one.device))


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"max_cache_len": 1024}])
def test_generate_on_two_gpus(model, divided, ids, mask, options, tmp_path):  # noqa: F811
    """A cache that was saved of one GPU goes on on two."""
    options = dict(options)
    length = options.pop("max_cache_len", None)
    options |= {"disable_compile": True}  # compiled steps round otherwise, and accelerate's hooks break graphs
    found = []
    for each in (model, divided):
        found.append(generated(each, FP8Cache(each, max_cache_len=length), ids, mask, **options)[0].to("cuda:0"))
    assert found[0].shape[1] == NEW and torch.equal(*found)
    cache = FP8Cache(model, max_cache_len=length)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
    cache.save(tmp_path / "prompt")
    more = torch.cat([ids, found[0][:, :1]], 1)
    longer = torch.nn.functional.pad(mask, (0, 1), value=1)
    ones, twos = (
        generated(
            each, FP8Cache.load(tmp_path / "prompt", each, max_cache_len=length), more, longer, disable_compile=True
        )[0]
        for each in (model, divided)
    )
    assert torch.equal(ones, twos.to(ones.device))
