"""FP8Cache of models with linear layers, whose states are transformers', and of models whose layers have several
shapes.
"""

import copy

import pytest
import torch

from fp8attn import UsageError
from fp8attn.cache import storage
from fp8attn.integrations.transformers import FP8Cache
from fp8attn.numerics import relative_error
from fp8attn_tools import calibrate
from tests.integrations.transformers.test_cache import interrupted
from tests.support.transformers_models import (  # noqa: F401
    HYBRIDS,
    close,
    generated,
    logits,
    make,
    one_thread,
    plain,
    prompt,
    two_shapes,
    using,
)


@pytest.mark.parametrize("family", HYBRIDS)
def test_the_memory_is_pages_and_states(family):
    model, cache = make(family), None
    cache = FP8Cache(model)
    logits(model, cache, prompt())
    sixteen = plain(model.config)
    logits(model, sixteen, prompt())
    states = sum(
        x.nbytes for layer in sixteen.layers for name in ("conv_states", "recurrent_states") for x in getattr(layer,
        name, {}).values()
        if x is not None
    )  # fmt: skip
    assert states and cache.nbytes == states + cache.paged.nbytes


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("static", [False, True])
def test_generation_goes_on_from_a_file(tmp_path, family, static):
    model, ids, size = make(family), prompt(length=140), 256 if static else None
    cache = FP8Cache(model, max_cache_len=size)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    cache.save(tmp_path / "prompt", [1, 0])
    loaded = FP8Cache.load(tmp_path / "prompt", model, max_cache_len=size)
    more = torch.cat([ids, prompt(length=5)], 1)
    mine, theirs = generated(model, cache, more), generated(model, loaded, more.flip(0))
    assert torch.equal(mine[0], theirs[0].flip(0))
    close(theirs[1].flip(0), mine[1], 1e-5)


@pytest.mark.parametrize("family", HYBRIDS)
def test_beams_take_their_states_with_them(family):
    model, ids, beams, step = make(family), prompt(3, 126), torch.tensor([2, 2, 0]), torch.tensor([[5], [6], [7]])
    cache, other = FP8Cache(model), FP8Cache(model)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        model(ids[beams], past_key_values=other)
        before = copy.deepcopy(cache)
        cache.reorder_cache(beams)
        ours, theirs = (model(step, past_key_values=each).logits for each in (cache, other))
        unmoved = model(step, past_key_values=before).logits
    close(ours, theirs, 1e-5)
    assert relative_error(unmoved, theirs) > 0.1


@pytest.mark.parametrize("family", HYBRIDS)
@torch.no_grad()
def test_what_a_state_cannot_do_is_refused_before_anything_changes(family):
    model, ids = make(family), prompt()
    cache = FP8Cache(model)
    model(ids, past_key_values=cache)
    before = cache.get_seq_length()
    for method, arguments in (("batch_repeat_interleave", (2,)), ("batch_select_indices", (torch.tensor([0]),))):
        with pytest.raises(
            ValueError, match=rf"{method} needs layers of attention alone: transformers' linear layers \(.*final batch"
        ):
            getattr(cache, method)(*arguments)
    with pytest.raises(RuntimeError, match=r"layer \d cannot go back from 150 to 147 tokens: .*cache\.reset\(\)"):
        cache.crop(-3)
    assert cache.get_seq_length() == before == min(cache.paged.lengths)


@pytest.mark.parametrize("first", [0, 130])
@torch.no_grad()
def test_an_interrupted_forward_after_a_state_has_changed(first):
    """Of the first prompt nothing is left; a longer one cannot go back. A state alone shows only whether it has any
    tokens.
    """
    model, ids = make("qwen3.5-linear"), prompt()
    cache = FP8Cache(model)
    expected = model(ids[:, first:], past_key_values=FP8Cache(model)).logits
    if first:
        model(ids[:, :first], past_key_values=cache)
    interrupted(model, 1, ids[:, first:], past_key_values=cache, where="k_proj")
    if not first:
        with pytest.raises(
            RuntimeError, match=r"layers 1 hold 0 tokens, and states of linear layers have changed.*cache\.reset\(\)"
        ):
            model(ids[:, first:], past_key_values=cache)
    cache.reset()
    close(model(ids[:, first:], past_key_values=cache).logits, expected)


@torch.no_grad()
def test_layers_of_attention_that_disagree_beside_a_state_ask_for_a_reset():
    model, ids = make("qwen3.5-linear", layer_types=["full_attention", "linear_attention", "full_attention"]), prompt()
    cache = FP8Cache(model)
    expected = model(ids, past_key_values=FP8Cache(model)).logits
    model(ids[:, :130], past_key_values=cache)
    interrupted(model, 0, ids[:, 130:], past_key_values=cache)
    with pytest.raises(RuntimeError, match=r"layers 2 hold 130 tokens, layers 0 hold 150 .* cache\.reset\(\)"):
        model(ids[:, 130:], past_key_values=cache)
    with pytest.raises(
        RuntimeError,
        match=r"layer 1 cannot go back from 150 to 130 tokens: in 16 bits, it has a state .*cache\.reset\(\)",
    ):
        cache.crop(0)
    assert [cache.layers[i].num_tokens for i in (0, 2)] == [150, 130]
    cache.crop(-130)
    close(model(ids, past_key_values=cache).logits, expected)


@torch.no_grad()
def test_a_convolution_s_state_that_records_goes_back():
    model, ids = make("lfm2-conv"), prompt()
    cache, short = FP8Cache(model), FP8Cache(model)
    for each in (cache, short):
        model(ids[:, :100], past_key_values=each)
    with pytest.raises(
        RuntimeError,
        match=r"layer 0 cannot go back from 100 to 97 tokens: .*cache\.reset\(\).*activate_past_recording\(\)",
    ):
        cache.crop(-3)
    cache.activate_past_recording()
    model(ids[:, 100:], past_key_values=cache)
    cache.crop(-50)
    close(model(ids[:, :9], past_key_values=cache).logits, model(ids[:, :9], past_key_values=short).logits)


@pytest.mark.parametrize("family", HYBRIDS)
@torch.no_grad()
def test_another_batch_may_follow_a_reset(family):
    model, ids = make(family), prompt(3, 40)
    cache = FP8Cache(model)
    model(ids, past_key_values=cache)
    for batch in (1, 2):
        cache.reset()
        found, expected = (logits(model, each, ids[:batch]) for each in (cache, FP8Cache(model)))
        assert torch.equal(found, expected)


def test_layers_of_several_shapes_have_pages_for_each(tmp_path):
    model, ids = two_shapes(), prompt()
    with using(model, "eager"):
        exact = logits(model, plain(model.config), ids)
    for size in (None, ids.shape[1]):
        cache = FP8Cache(model, max_cache_len=size)
        assert 1e-3 < relative_error(logits(model, cache, ids), exact) < 0.06
        assert [(group.paged.num_kv_heads, group.paged.num_layers) for group in cache.groups] == [(2, 2), (4, 1)]
        assert [cache.pages(i).pool.shape[1] for i in cache.fp8_layers] == [2, 4, 2]
        assert cache.nbytes == sum(group.paged.nbytes for group in cache.groups)
        with pytest.raises(ValueError, match=r"have 2 shapes.*cache\.pages\(layer\)"):
            _ = cache.paged
    cache = FP8Cache(model)
    first = logits(model, cache, ids[:, :140])
    cache.save(tmp_path / "prompt")
    loaded = FP8Cache.load(tmp_path / "prompt", model)
    assert storage.read(tmp_path / "prompt")[0]["pages.1"].shape[1] == 4
    for each in (cache, loaded):
        each.crop(-4)
        each.batch_repeat_interleave(2)
    more = prompt(4, 9)
    with torch.no_grad():
        assert torch.equal(*(model(more, past_key_values=each).logits for each in (cache, loaded)))
    assert first.isfinite().all()


def test_calibration_of_models_with_linear_layers():
    """Those whose attention has a layer of its own are calibrated in chunks; others are refused."""
    ids = prompt(2, 200)
    model = make("qwen3.5-linear")
    scales = calibrate(model, [ids], chunk=64)
    with using(model, "eager"):
        exact = logits(model, plain(model.config), ids)
    assert set(scales.layers) == {1}
    assert relative_error(logits(model, FP8Cache(model, scales=scales), ids), exact) < 0.06
    with pytest.raises(UsageError, match="layers 0-2 have attention and the state of a linear layer"):
        calibrate(make("falcon-h1-hybrid"), [ids])
