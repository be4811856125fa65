"""What an `FP8Cache` of latents does whatever the latents are: those of latent attention (MLA), and Gemma 4's full
layers whose keys follow from their values."""

import copy
import warnings

import pytest
import torch

from fp8attn.integrations.transformers import FP8Cache
from fp8attn.numerics import relative_error
from tests.support.latent_models import make_k_eq_v, make_latents, prompt, run, without_cache
from tests.support.transformers_models import one_thread, using  # noqa: F401

LOST = 0.02  # of logits
LENGTH, READ = 150, 130  # tokens, and those of the first forward
OPTIONS = pytest.mark.parametrize("options", [{}, {"max_cache_len": LENGTH + 10}], ids=["growing", "static"])


@pytest.fixture(params=[make_latents, make_k_eq_v], ids=["latent attention", "keys that follow from values"])
def make(request):
    return request.param


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 16}],
    ids=["greedy", "beams", "prompt lookup", "chunks"],
)
def test_generate(make, options):
    """The tokens of the model's own cache, if none of them is close: the random model has few near ties."""
    model, (ids, _) = make(), prompt(1, 40)
    more = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = model.generate(ids, **more)
        out = model.generate(ids, past_key_values=FP8Cache(model), **more)
    assert torch.equal(out, want)


def test_crop_and_copies(make):
    model, (ids, mask) = make(), prompt(1, 60)
    cache = FP8Cache(model)
    run(model, cache, ids[:, :30], mask[:, :30], ())
    cache.crop(-10)
    assert cache.get_seq_length() == 20
    twin = copy.deepcopy(cache)
    exact = without_cache(model, ids, mask)[:, 20:]
    with torch.no_grad():
        ours, theirs = (model(ids[:, 20:], past_key_values=each).logits for each in (cache, twin))
    assert torch.equal(ours, theirs) and relative_error(ours, exact) < LOST


@OPTIONS
@pytest.mark.parametrize("more", [{}, {"key_dtype": "e4m3"}], ids=["latents", "K and V"])
def test_files(tmp_path, make, more, options):
    if more and make is make_latents:
        pytest.skip("latents are INT8")
    model, (ids, mask) = make(), prompt(2, LENGTH)
    cache = FP8Cache(model, **options, **more)
    run(model, cache, ids[:, :140], mask[:, :140], (READ,))
    cache.save(tmp_path / "a.safetensors")
    back = FP8Cache.load(tmp_path / "a.safetensors", model, **options)
    position = (mask.cumsum(-1) - 1)[:, 140:]
    with torch.no_grad():
        ours, theirs = (
            model(ids[:, 140:], attention_mask=mask, position_ids=position, past_key_values=each).logits
            for each in (cache, back)
        )
    assert torch.equal(ours, theirs)


def test_another_attention_function_reads_the_same_cache(make):
    model, (ids, mask) = make(), prompt(1, LENGTH)
    cache = FP8Cache(model)
    exact = without_cache(model, ids, mask)
    with using(model, "sdpa"), pytest.warns(UserWarning, match="dequantizes all of its K and V"):
        out = run(model, cache, ids, mask, (READ, 140, 149))
    assert relative_error(out, exact) < LOST


@pytest.mark.slow
def test_a_static_cache_is_compiled(make):
    model, (ids, mask) = make(), prompt(1, LENGTH)
    eager = run(model, FP8Cache(model, max_cache_len=160), ids, mask, (READ, 140, 149))
    cache = FP8Cache(model, max_cache_len=160)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        model(ids[:, :READ], past_key_values=cache)
        outs = [
            compiled(ids[:, i : i + 1], position_ids=torch.tensor([[i]]), past_key_values=cache).logits
            for i in range(READ, LENGTH)
        ]
    assert relative_error(torch.cat(outs, 1), eager[:, READ:]) < LOST
