"""Gemma 4's full layers whose keys follow from their values, on an `FP8Cache`, against the model without a cache."""

from functools import partial

import pytest
import torch
from transformers import DynamicCache

from fp8attn.formats.spec import PageSpec
from fp8attn.integrations import k_eq_v
from fp8attn.integrations.transformers import FP8Cache, build
from fp8attn.integrations.transformers.config import layers_of
from fp8attn.integrations.transformers.layers import CacheOptions
from fp8attn.integrations.transformers.weights import key_matrices
from fp8attn.numerics import relative_error
from fp8attn_tools import calibrate
from tests.support import latent_models
from tests.support.latent_models import make_k_eq_v, without_cache
from tests.support.transformers_models import one_thread  # noqa: F401

LATENT = PageSpec.latent(512, 128, rope_in_codes=True)
LENGTH, CUTS = 340, (300, 310, 330, 338, 339)  # a prompt, chunks and steps
LOST = 0.02
run = partial(latent_models.run, cuts=CUTS)


def prompt(batch=2, length=LENGTH):
    return latent_models.prompt(batch, length)


def test_absorbed_attention_is_attention():
    """In float64, of K and V as a layer of the model computes them. K comes back as it was, where RoPE turns it bit for
    bit.
    """
    model = make_k_eq_v()
    given = []
    plain = DynamicCache(config=model.config)
    layer = plain.layers[1]
    update = layer.update
    layer.update = lambda k, v, *args, **kwargs: given.append((k, v)) or update(k, v, *args, **kwargs)
    with torch.no_grad():
        model(prompt(1, 50)[0], past_key_values=plain)
    (key, value), matrix = (x.double() for x in given[0]), key_matrices(model, layers_of(model.config))[1]
    assert matrix.shape == (512, 640) and (matrix != 0).sum() == 512 and not k_eq_v.turned(matrix.diagonal(), 128).any()
    size = matrix[:, 512:].sum(0).unique()
    assert len(size) == 1 and size.log2() == size.log2().round()
    latent, rope = k_eq_v.to_latent(key, value, matrix)
    assert rope.shape == (1, 2, 50, 128) and 0.5 < rope.square().mean().sqrt() < 2
    back = k_eq_v.key_of(latent, rope, matrix)
    assert torch.equal(k_eq_v.turned(back, 128), k_eq_v.turned(key, 128)) and relative_error(back, key) < 1e-6
    q = torch.randn(1, 2, 3, 512).double()
    scores = k_eq_v.absorb(q, matrix) @ torch.cat([latent, rope], -1).mT
    assert relative_error(scores, q @ key.mT) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_absorbed_query_is_rounded_as_a_product_of_two_numbers(dtype):
    q, w = torch.randn(2, 300, 512, dtype=dtype), torch.randn(512, dtype=dtype)
    matrix = k_eq_v.key_matrix(w, 128)
    turned = k_eq_v.turned(q, 128)
    latent = torch.where(matrix.diagonal() == 0, 0.0, q * w)
    assert torch.equal(k_eq_v.absorb(q, matrix), torch.cat([latent, turned * matrix[0, 512]], -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 350}], ids=["growing", "static"])
@pytest.mark.parametrize("heads", [1, 2])
def test_prompts_chunks_and_steps_are_right(heads, options, dtype):
    model, (ids, mask) = make_k_eq_v(num_global_key_value_heads=heads), prompt()
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
    model, (ids, mask) = make_k_eq_v(), prompt(1)
    exact = without_cache(model, ids, mask)
    cuts = tuple(range(10, LENGTH, 10))  # all tokens read what is stored
    lost = relative_error(run(model, FP8Cache(model), ids, mask, cuts=cuts), exact)
    monkeypatch.setattr("fp8attn.integrations.transformers.cache.latent_keys", lambda *_: {})
    halves = FP8Cache(model)
    assert halves.layers[1].shared.spec == PageSpec.of(512)
    assert relative_error(run(model, halves, ids, mask, cuts=cuts), exact) > 2 * lost > 0


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
    model, (ids, mask) = make_k_eq_v(**changes), prompt()
    if "scales" in options:
        options = {"scales": calibrate(model, [ids])}
    cache = FP8Cache(model, **options)
    spec = PageSpec.of(512, options.get("key_dtype", "int8"))
    assert cache.layers[1].key_matrix is None and cache.layers[1].shared.spec == spec
    real = mask.bool()
    lost = relative_error(run(model, cache, ids, mask)[real], without_cache(model, ids, mask)[real])
    assert lost < (0.05 if "key_dtype" in options else LOST)


def test_latents_are_for_a_cpu_and_a_hopper_gpu(monkeypatch):
    model = make_k_eq_v()
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


def test_layers_that_share_k_and_v():
    """They get the tensors of the layer whose K and V they share, and have no norm of keys."""
    model, (ids, mask) = make_k_eq_v(num_hidden_layers=4, num_kv_shared_layers=2), prompt()
    cache, real = FP8Cache(model), mask.bool()
    out = run(model, cache, ids, mask)
    assert relative_error(out[real], without_cache(model, ids, mask)[real]) < LOST
    assert cache.layers[1].shared.spec == LATENT
