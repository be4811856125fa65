"""Latent attention (MLA) of transformers' models on an `FP8Cache`, against the model without a cache."""

import pickle
import warnings
from functools import partial

import pytest
import torch
import transformers
from transformers import DynamicCache

from fp8attn import UsageError
from fp8attn.formats.spec import PageSpec
from fp8attn.integrations.transformers import FP8Cache
from fp8attn.integrations.transformers.config import unsupported_reason
from fp8attn.integrations.transformers.latent import _statics, absorb, expand, latent_modules, read_latents
from fp8attn.numerics import relative_error
from tests.support import latent_models
from tests.support.latent_models import make_latents, without_cache
from tests.support.transformers_models import one_thread  # noqa: F401

if not hasattr(transformers, "Mistral4Config"):
    pytest.skip("transformers caches latents from 5.24 on", allow_module_level=True)

LOST = 0.02  # of logits: a latent loses 1%, and each layer has another
run = partial(latent_models.run, cuts=(130, 140, 147, 148, 149))


def prompt(batch=2, length=150):
    return latent_models.prompt(batch, length, 97)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [transformers.DeepseekV3Config, transformers.Mistral4Config])
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 160}], ids=["growing", "static"])
def test_chunks_and_steps_are_right(config, options, dtype):
    model, (ids, mask) = make_latents(config).to(dtype), prompt()
    real = mask.bool()
    exact = without_cache(model.float(), ids, mask)[real]
    model = model.to(dtype)
    cache = FP8Cache(model, **options)
    assert cache.fp8_layers == (0, 1)
    out = run(model, cache, ids, mask)
    rounding = relative_error(without_cache(model, ids, mask)[real], exact)
    assert relative_error(out[real], exact) < (LOST**2 + 2 * rounding**2) ** 0.5
    first = real.clone()
    first[:, 130:] = False
    plain = run(model, DynamicCache(config=model.config), ids, mask)
    assert relative_error(out[first], plain[first]) <= 2 * rounding  # the first tokens are not rounded to 8 bits
    assert cache.layers[0].shared.paged.spec == PageSpec.latent(256, 64)
    if dtype == torch.float32 and not options:
        held = cache.layers[0].shared.paged
        assert held.spec.layout.token_bytes == 256 + 128 + 4 and held.lengths == (150, 150)


def test_means_and_factors_come_from_random_tokens(monkeypatch):
    """The small block keeps its digits; without its factor it would lose ten times as many. The model reads the tokens
    once, and no prompt changes what is read.
    """
    model, (ids, mask) = make_latents(), prompt(1)
    exact = without_cache(model, ids, mask)
    kept = relative_error(run(model, FP8Cache(model), ids, mask)[:, 130:], exact[:, 130:])
    statics = read_latents(model)
    words = torch.randint(97, (1, 64), generator=torch.Generator().manual_seed(0))
    plain = DynamicCache(config=model.config)
    with torch.no_grad():
        model(words, past_key_values=plain)
    for index, (mean, factor) in statics.items():
        x = plain.layers[index].keys[0, 0]
        torch.testing.assert_close(mean[0], x.mean(0))
        blocks = (x - x.mean(0)).square().mean(0).view(2, 128).mean(1).sqrt()
        torch.testing.assert_close(factor[0], blocks)
        assert 0.05 < factor[0, 0] < 0.12 and 0.5 < factor[0, 1] < 1.2  # the weights of the norm are 0.1 and 1
        pages = FP8Cache(model).layers[index].shared.paged.pages(index)
        assert torch.equal(pages.format.v_mean, mean) and torch.equal(pages.format.factor, factor)
    assert read_latents(model) is statics and [*statics] == [0, 1]
    assert read_latents(make_latents().to("meta")) == {}
    monkeypatch.setattr("fp8attn.integrations.transformers.cache.read_latents", lambda model: {})
    assert relative_error(run(model, FP8Cache(model), ids, mask)[:, 130:], exact[:, 130:]) > 3 * kept


@pytest.mark.parametrize("wrong", [0.0, 3.0, torch.nan])
def test_a_mean_that_was_read_badly_costs_digits_only(monkeypatch, wrong):
    """As of a model whose weights changed since: the mean is three deviations off."""
    model, (ids, mask) = make_latents(), prompt(1)
    exact = without_cache(model, ids, mask)
    right = relative_error(run(model, FP8Cache(model), ids, mask)[:, 130:], exact[:, 130:])
    statics = {index: _statics(torch.full((2, 256), wrong)) for index in range(2)}
    assert all(mean.isfinite().all() and (factor == 1.0).all() for mean, factor in statics.values())
    statics = {index: (mean, read_latents(model)[index][1]) for index, (mean, _) in statics.items()}
    monkeypatch.setattr("fp8attn.integrations.transformers.cache.read_latents", lambda model: statics)
    off = relative_error(run(model, FP8Cache(model), ids, mask)[:, 130:], exact[:, 130:])
    assert off < (40 if wrong == 3.0 else 2) * right


def test_absorbed_attention_is_expanded_attention():
    """In float64: scores of absorbed queries and latents are those of queries and expanded keys, and so are values."""
    model = make_latents().double()
    (module, *_) = latent_modules(model)
    x, rope = torch.randn(2, 1, 9, 256).double(), torch.randn(2, 1, 9, 64).double()
    q = torch.randn(2, 4, 3, 96).double()
    key, value = type(module).expand_kv(module, x, rope)
    absorbed = absorb(module, q)
    torch.testing.assert_close(absorbed @ torch.cat([x, rope], -1).mT, q @ key.mT)
    p = torch.rand(2, 4, 3, 9).double()
    torch.testing.assert_close(expand(module, (p @ x).transpose(1, 2)), (p @ value).transpose(1, 2))


def test_an_adapter_on_the_projection_is_expanded():
    """Its weight is not what it multiplies by."""

    class Adapter(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * 1.5

    model, (ids, mask) = make_latents(), prompt(1)
    for module in latent_modules(model):
        adapter = Adapter(*reversed(module.kv_b_proj.weight.shape), bias=False)
        adapter.weight = module.kv_b_proj.weight
        module.kv_b_proj = adapter
    with pytest.warns(UserWarning, match="kv_b_proj of DeepseekV3Attention is a Adapter whose weight fp8attn cannot"):
        out = run(model, FP8Cache(model), ids, mask)
    assert relative_error(out, without_cache(model, ids, mask)) < LOST


def test_training_and_plain_caches_work_on_the_same_model():
    model, (ids, mask) = make_latents(), prompt()
    plain = run(model, DynamicCache(config=model.config), ids, mask)[mask.bool()]
    FP8Cache(model)
    assert torch.allclose(run(model, DynamicCache(config=model.config), ids, mask)[mask.bool()], plain, atol=2e-5)
    model(ids, labels=ids, use_cache=False).loss.backward()
    assert latent_modules(model)[0].kv_b_proj.weight.grad.isfinite().all()


SPARSE = ("deepseek_v32", "axk2", "glm_moe_dsa", "glm5_next", "mistral_large4", "dots3_note", "hy_v4", "hy_v4_vl")


def test_a_model_is_pickled_after_a_cache_was_made_for_it():
    model, (ids, mask) = make_latents(), prompt(1)
    expected = run(model, FP8Cache(model), ids, mask)
    other = pickle.loads(pickle.dumps(model))
    assert torch.equal(run(other, FP8Cache(other), ids, mask), expected)
    assert all(module.expand_kv.args == (module,) for module in latent_modules(other))


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_models_are_refused_by_name(name):
    """Each query has keys of its own, which a function that overlooks `indices` would not see."""
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip("this transformers does not have it yet")
    reason = unsupported_reason(transformers.CONFIG_MAPPING[name]())
    assert reason.startswith(f"'{name}") and "has sparse latent attention: it chooses the keys of each query" in reason


def test_what_is_refused():
    model, (ids, _) = make_latents(), prompt(1)
    for options, said in (
        ({"rotate_keys": False}, "'deepseek_v3' caches latents.*leave out scales and rotate_keys"),
        ({"key_dtype": "e4m3"}, "have no key_dtype='e4m3'"),
    ):
        with pytest.raises(UsageError, match=said):
            FP8Cache(model, **options)
    cache = FP8Cache(model)
    with torch.no_grad():
        model(ids[:, :100], past_key_values=cache)
        for keyword, said in (("indices", "called with indices, which"), ("newest", "called with newest, unknown")):
            with pytest.raises(ValueError, match=f"is in FP8 .*{said}"):
                model(ids[:, 100:101], past_key_values=cache, **{keyword: torch.zeros(1, 1, 4)})
            cache.crop(0)
            model(ids[:, :100], past_key_values=cache)
    with pytest.raises(UsageError, match=r"there are no pages k72\.int8-v64"):
        FP8Cache(make_latents(kv_lora_rank=64, qk_rope_head_dim=8))


@pytest.mark.parametrize("used", [False, True], ids=["as loaded", "with a cache of its own before"])
def test_an_assistant_that_caches_latents(used):
    """The tokens of greedy decoding on the same cache, across the end of a page. The assistant is the model without its
    last layer, of which some guesses are right, and has transformers' own cache.
    """
    model, (ids, _) = make_latents(), prompt(1, 120)
    assistant = make_latents(num_hidden_layers=1)
    assistant.load_state_dict(model.state_dict(), strict=False)
    assistant.generation_config.update(assistant_confidence_threshold=0.0, num_assistant_tokens=4)
    if used:
        FP8Cache(assistant)  # sets its attention, and installs what reads pages
    more = dict(max_new_tokens=24, min_new_tokens=24, do_sample=False)
    FP8Cache(model)  # reads random tokens, once
    lengths = []
    hook = model.register_forward_pre_hook(
        lambda module, args, given: lengths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = model.generate(ids, past_key_values=FP8Cache(model), **more)
        assert lengths == [120] + [1] * 23
        lengths.clear()
        cache = FP8Cache(model)
        out = model.generate(ids, past_key_values=cache, assistant_model=assistant, **more)
    hook.remove()
    assert torch.equal(out, want) and 143 <= cache.get_seq_length() <= 144
    assert len(lengths) < 24 and max(lengths[1:]) > 2  # guesses were right, and checked together
