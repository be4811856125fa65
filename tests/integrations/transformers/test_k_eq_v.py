"""Gemma 4's full layers whose keys follow from their values, on an `FP8Cache`, against the model without a cache."""

import copy
import warnings

import pytest
import torch
from transformers import DynamicCache

from fp8attn.formats.spec import PageSpec
from fp8attn.integrations.transformers import FP8Cache, build, k_eq_v
from fp8attn.integrations.transformers.config import layers_of
from fp8attn.integrations.transformers.layers import CacheOptions
from fp8attn.numerics import relative_error
from fp8attn_tools import calibrate
from tests.support import transformers_models
from tests.support.transformers_models import VOCABULARY, one_thread, using  # noqa: F401

LATENT = PageSpec.latent(512, 128, rope_in_codes=True)
LENGTH, CUTS = 340, (300, 310, 330, 338, 339)  # a prompt, chunks and steps
LOST = 0.02


def make(**changes):
    """Windows of 32 tokens stay in 16 bits. The weights of the keys' norms differ by channel, as of trained models."""
    options = {"num_global_key_value_heads": 2, "num_kv_shared_layers": 0, "num_hidden_layers": 2} | changes
    options["layer_types"] = ["sliding_attention", "full_attention"] * (options["num_hidden_layers"] // 2)
    model = transformers_models.make("gemma4-512-k-is-v-shared-kv", **options)
    generator = torch.Generator().manual_seed(2)
    for module in model.modules():
        if hasattr(module, "k_norm") and module.head_dim == 512:
            size = torch.randn(512, generator=generator).mul(0.7).exp()
            module.k_norm.weight.data = 0.05 * size * torch.randn(512, generator=generator).sign()
    return model


def prompt(batch=2, length=LENGTH):
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[0, :17] = ids[0, :17] = 0
    return ids, mask


@torch.no_grad()
def run(model, cache, ids, mask, cuts=CUTS):
    """The logits of all tokens, which are given in pieces."""
    position, outs = (mask.cumsum(-1) - 1).clamp_min(0), []
    for a, b in zip((0, *cuts), (*cuts, ids.shape[1]), strict=True):
        given = {"attention_mask": mask[:, :b], "position_ids": position[:, a:b], "past_key_values": cache}
        outs.append(model(ids[:, a:b], **given).logits)
    return torch.cat(outs, 1)


@torch.no_grad()
def without_cache(model, ids, mask):
    position = (mask.cumsum(-1) - 1).clamp_min(0)
    with using(model, "eager"):
        return model(ids, attention_mask=mask, position_ids=position, use_cache=False).logits


def test_absorbed_attention_is_attention():
    """In float64, of K and V as a layer of the model computes them. K comes back as it was, where RoPE turns it bit for
    bit.
    """
    model = make()
    given = []
    plain = DynamicCache(config=model.config)
    layer = plain.layers[1]
    update = layer.update
    layer.update = lambda k, v, *args, **kwargs: given.append((k, v)) or update(k, v, *args, **kwargs)
    with torch.no_grad():
        model(prompt(1, 50)[0], past_key_values=plain)
    (key, value), weight = (x.double() for x in given[0]), k_eq_v.key_weights(model, layers_of(model.config))[1]
    assert weight.shape == (640,) and not k_eq_v.turned(weight[:512], 128).any()
    size = weight[512:].unique()
    assert len(size) == 1 and size.log2() == size.log2().round()
    latent, rope = k_eq_v.to_latent(key, value, weight)
    assert rope.shape == (1, 2, 50, 128) and 0.5 < rope.square().mean().sqrt() < 2
    back = k_eq_v.key_of(latent, rope, weight)
    assert torch.equal(k_eq_v.turned(back, 128), k_eq_v.turned(key, 128)) and relative_error(back, key) < 1e-6
    q = torch.randn(1, 2, 3, 512).double()
    scores = k_eq_v.absorb(q, weight) @ torch.cat([latent, rope], -1).mT
    assert relative_error(scores, q @ key.mT) < 1e-6


def test_many_queries_are_absorbed_as_few(monkeypatch):
    monkeypatch.setattr(k_eq_v, "MANY", 600)
    q, weight = torch.randn(2, 300, 512), torch.randn(640)
    assert torch.equal(k_eq_v.absorb(q, weight)[1, -1:], k_eq_v.absorb(q[1, -1:], weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 350}], ids=["growing", "static"])
@pytest.mark.parametrize("heads", [1, 2])
def test_prompts_chunks_and_steps_are_right(heads, options, dtype):
    model, (ids, mask) = make(num_global_key_value_heads=heads), prompt()
    real = mask.bool()
    exact = without_cache(model, ids, mask)[real]
    model = model.to(dtype)
    cache = FP8Cache(model, **options)
    assert cache.fp8_layers == (1,)
    out = run(model, cache, ids, mask)
    rounding = relative_error(without_cache(model, ids, mask)[real], exact)
    assert relative_error(out[real], exact) < (LOST**2 + 2 * rounding**2) ** 0.5
    paged = cache.layers[1].shared.paged
    assert paged.spec == LATENT and LATENT.layout.token_bytes == 644 and paged.num_kv_heads == heads


def test_steps_lose_less_than_with_k_and_v(monkeypatch):
    """A value has its token's scale in INT8, instead of E4M3."""
    model, (ids, mask) = make(), prompt(1)
    exact = without_cache(model, ids, mask)
    cuts = tuple(range(10, LENGTH, 10))  # all tokens read what is stored
    lost = relative_error(run(model, FP8Cache(model), ids, mask, cuts), exact)
    monkeypatch.setattr("fp8attn.integrations.transformers.cache.latent_keys", lambda *_: {})
    halves = FP8Cache(model)
    assert halves.layers[1].shared.spec == PageSpec.of(512)
    assert relative_error(run(model, halves, ids, mask, cuts), exact) > 2 * lost > 0


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"attention_k_eq_v": False}, {}),
        ({}, {"key_dtype": "e4m3"}),
        ({}, {"rotate_keys": False}),
        ({}, {"batch_invariant": True}),
        ({}, {"scales": True}),
        ({"rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6},
        }}, {}),
    ],
    ids=["another projection", "E4M3", "not rotated", "batch invariant", "calibrated", "RoPE turns more channels"],
)  # fmt: skip
def test_what_keeps_k_and_v(changes, options):
    model, (ids, mask) = make(**changes), prompt()
    if "scales" in options:
        options = {"scales": calibrate(model, [ids])}
    cache = FP8Cache(model, **options)
    spec = PageSpec.of(512, options.get("key_dtype", "int8"))
    assert cache.layers[1].key_weight is None and cache.layers[1].shared.spec == spec
    real = mask.bool()
    lost = relative_error(run(model, cache, ids, mask)[real], without_cache(model, ids, mask)[real])
    assert lost < (0.05 if "key_dtype" in options else LOST)


def test_latents_are_for_a_cpu_and_a_hopper_gpu(monkeypatch):
    model = make()
    specs = layers_of(model.config)
    more = dict(max_cache_len=None, key_dtype="int8", rotate_keys=True, exact=False, batch_invariant=False)

    def layers(device, backend="auto"):
        options = CacheOptions(**more, backend=backend)
        return list(build.latent_keys(model, specs, options, None, [torch.device(device)] * len(specs)))

    assert layers("cpu") == layers("cpu", "reference") == layers("cuda", "reference") == [1]
    monkeypatch.setattr(build, "unsupported_backend", lambda *_: "this GPU is another")
    assert layers("cuda") == layers("cuda", "triton") == layers("cuda", "hopper") == []
    monkeypatch.setattr(build, "unsupported_backend", lambda *_: None)
    assert layers("cuda") == [1]


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 16}],
    ids=["greedy", "beams", "prompt lookup", "chunks"],
)
def test_generate(options):
    """The tokens of the model's own cache, if none of them is close: the random model has few near ties."""
    model, (ids, _) = make(), prompt(1, 40)
    more = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = model.generate(ids, **more)
        out = model.generate(ids, past_key_values=FP8Cache(model), **more)
    assert torch.equal(out, want)


def test_crop_and_copies():
    model, (ids, mask) = make(), prompt(1, 60)
    cache = FP8Cache(model)
    run(model, cache, ids[:, :30], mask[:, :30], ())
    cache.crop(-10)
    twin = copy.deepcopy(cache)
    exact = without_cache(model, ids, mask)[:, 20:]
    with torch.no_grad():
        ours, theirs = (model(ids[:, 20:], past_key_values=each).logits for each in (cache, twin))
    assert torch.equal(ours, theirs) and relative_error(ours, exact) < LOST


@pytest.mark.parametrize("options", [{}, {"max_cache_len": 350}], ids=["growing", "static"])
def test_files(tmp_path, options):
    """Of latents; and of K and V, as of a cache with E4M3 keys."""
    model, (ids, mask) = make(), prompt()
    for more in ({}, {"key_dtype": "e4m3"}):
        cache = FP8Cache(model, **options, **more)
        run(model, cache, ids[:, :310], mask[:, :310], (300,))
        cache.save(tmp_path / "a.safetensors")
        back = FP8Cache.load(tmp_path / "a.safetensors", model, **options)
        assert (back.layers[1].key_weight is None) == bool(more)
        position = (mask.cumsum(-1) - 1)[:, 310:]
        with torch.no_grad():
            ours, theirs = (
                model(ids[:, 310:], attention_mask=mask, position_ids=position, past_key_values=each).logits
                for each in (cache, back)
            )
        assert torch.equal(ours, theirs)


def test_another_attention_function_reads_the_same_cache():
    model, (ids, mask) = make(), prompt(1)
    cache = FP8Cache(model)
    exact = without_cache(model, ids, mask)
    with using(model, "sdpa"), pytest.warns(UserWarning, match="dequantizes all of its K and V"):
        out = run(model, cache, ids, mask)
    assert relative_error(out, exact) < LOST


def test_layers_that_share_k_and_v():
    """They get the tensors of the layer whose K and V they share, and have no norm of keys."""
    model, (ids, mask) = make(num_hidden_layers=4, num_kv_shared_layers=2), prompt()
    cache, real = FP8Cache(model), mask.bool()
    out = run(model, cache, ids, mask)
    assert relative_error(out[real], without_cache(model, ids, mask)[real]) < LOST
    assert cache.layers[1].shared.spec == LATENT


@pytest.mark.slow
def test_a_static_cache_is_compiled():
    model, (ids, mask) = make(), prompt(1)
    eager = run(model, FP8Cache(model, max_cache_len=350), ids, mask)
    cache = FP8Cache(model, max_cache_len=350)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        model(ids[:, :330], past_key_values=cache)
        outs = [
            compiled(ids[:, i : i + 1], position_ids=torch.tensor([[i]]), past_key_values=cache).logits
            for i in range(330, LENGTH)
        ]
    assert relative_error(torch.cat(outs, 1), eager[:, 330:]) < LOST
