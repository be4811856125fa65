"""Tokens that are dropped from the end of a cache: any number of them, in every layer. None are dropped from its
beginning."""

import pytest
import torch

from fp8attn.integrations.transformers import FP8Cache
from tests.integrations.transformers.test_cache import interrupted
from tests.support.transformers_models import Oracle, close, generated, make, one_thread, prompt  # noqa: F401

LENGTH, SHORT = 256, 32  # of static caches; of windows that stay in 16 bits
MODELS = {
    "llama": ("llama", {}),
    "16-bit window": ("gemma3", {"sliding_window": SHORT}),
    "8-bit window": ("gemma3", {"sliding_window": 384}),
    "sinks": ("gpt-oss-sinks", {"sliding_window": 384}),
}
IDS = prompt(length=LENGTH)
OTHER = IDS[:, :17].flip(1)


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    family, changes = MODELS[request.param]
    return make(family, **changes)


@torch.no_grad()
def filled(model, length, static=False):
    """A growing or static cache that holds the first `length` tokens."""
    cache = FP8Cache(model, max_cache_len=LENGTH if static else None)
    if length:
        model(IDS[:, :length], past_key_values=cache)
    return cache


@torch.no_grad()
def next_logits(model, cache):
    return model(OTHER, past_key_values=cache).logits


def contents(cache, length):
    """K and V of the first tokens in the pages of every layer and sequence, dequantized to float32."""
    return [x for layer in cache.fp8_layers for seq in range(2) for x in cache.pages(layer).read(seq, length)]


def lengths(cache):
    return {int(layer.get_seq_length()) for layer in cache.layers}


def cannot_crop(cache, held):
    """A window in 16 bits that is full, or of static form, cannot go back."""
    plain = len(cache.fp8_layers) < len(cache.layers)
    return plain and (held >= SHORT or cache.layers[-1].get_max_length() > 0)


def refusal(cache, n):
    """Crop, and return the message of the error if it is refused."""
    try:
        cache.crop(n)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


# transformers#47433
@pytest.mark.parametrize("held", [3, 31, 130])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("number", [int, torch.tensor], ids=["int", "tensor"])
def test_crop_keeps_exactly_the_tokens_before(model, held, static, number):
    """Reported: `crop(0)` keeps everything, and `crop(-5)` of 3 tokens keeps one stale token. The tokens that are left
    have the bits that they had. Where none are left, the next prompt has the logits of an empty cache, to the bit."""
    for n in (0, 1, held - 1, held, held + 1, held + 5):
        cache = filled(model, held, static)
        before, kept = contents(cache, held), max(0, held - n)
        if reason := refusal(cache, number(-n)):
            assert cannot_crop(cache, held) and (
                "activate_past_recording" in reason or "Make the FP8Cache without" in reason
            )
            kept = held
        assert int(cache.get_seq_length()) == kept and lengths(cache) == {kept}
        if kept:
            assert all(torch.equal(now, then[:kept]) for now, then in zip(contents(cache, kept), before, strict=True))
        expected = next_logits(model, filled(model, kept, static))
        found = next_logits(model, cache)
        if kept in (0, held):
            assert torch.equal(found, expected)
        else:  # the tokens that were dropped may have made the scales of a page larger, so that the others are coarser
            close(found, expected, 0.02)


@pytest.mark.filterwarnings("ignore:the last forward stopped")
@pytest.mark.parametrize("stopped", [0, 1])  # of three layers, after the layer has appended
@pytest.mark.parametrize("held", [0, 30, 130])
def test_crop_of_nothing_drops_tokens_that_only_some_layers_hold(model, held, stopped):
    cache = filled(model, held)
    if len(cache.fp8_layers) < len(cache.layers):
        pytest.skip("a window in 16 bits that has become full cannot go back")
    interrupted(model, stopped, OTHER, past_key_values=cache)
    cache.crop(0)
    assert lengths(cache) == {held}
    found, expected = next_logits(model, cache), next_logits(model, filled(model, held))
    if held:
        close(found, expected, 0.02)  # the tokens that were dropped may have made the scales of a page larger
    else:
        assert torch.equal(found, expected)


def test_a_positive_crop_is_refused_and_changes_nothing(model):
    """Until version 5.18, transformers took it for the number of tokens to keep."""
    cache = filled(model, 30)
    before = contents(cache, 30)
    for n in (1, 30, 35, torch.tensor(5)):
        with pytest.raises(ValueError, match="crop takes minus the number of tokens to forget"):
            cache.crop(n)
    assert lengths(cache) == {30} and all(map(torch.equal, contents(cache, 30), before))


@pytest.mark.parametrize("n", [5, 30, 35])
def test_generation_after_a_crop_is_that_of_what_is_left(model, n):
    cache = filled(model, 30)
    cache.crop(-n)
    ids = torch.cat([IDS[:, : max(0, 30 - n)], OTHER], 1)
    (tokens, scores), (expected, expected_scores) = (generated(model, each, ids) for each in (cache, FP8Cache(model)))
    assert torch.equal(tokens, expected)
    close(scores, expected_scores, 0.02)  # as above


# llama.cpp#9383, llama.cpp#9743, llama.cpp#7230: a context shift drops the oldest tokens of a full cache, and crashes
# with 8-bit keys, which RoPE would have to turn again


@torch.no_grad()
def test_a_full_static_cache_refuses_tokens_and_drops_none(model):
    """The next tokens have the same logits as without that call. Where a window in 16 bits has taken the tokens before
    a layer refused them, the cache says that it cannot go on."""
    cache, want = filled(model, LENGTH - 6, static=True), filled(model, LENGTH - 6, static=True)
    with pytest.raises(RuntimeError, match="larger max_cache_len"):
        model(IDS[:, :7], past_key_values=cache)
    if len(cache.fp8_layers) == len(cache.layers):
        found, expected = (model(IDS[:, -6:], past_key_values=each).logits for each in (cache, want))
        assert torch.equal(found, expected) and cache.get_seq_length() == LENGTH
    else:
        with pytest.raises(RuntimeError, match=r"reset\(\)"):
            model(IDS[:, -6:], past_key_values=cache)


def test_generate_does_not_go_on_past_a_full_static_cache(model):
    with pytest.raises((RuntimeError, ValueError), match="max_cache_len"):
        generated(model, FP8Cache(model, max_cache_len=40), IDS[:, :35], max_new_tokens=8)


@torch.no_grad()
def test_positions_may_jump():
    """Keys are stored as RoPE has turned them. A model that is given other positions for new tokens
    attends from there.
    """
    model = make("llama")
    outs = []
    for cache in (FP8Cache(model), Oracle(model.config)):
        model(IDS[:, :200], past_key_values=cache)
        outs.append(model(IDS[:, 200:220], position_ids=torch.arange(900, 920)[None], past_key_values=cache).logits)
    close(*outs, 1e-3)  # measured: 2e-5, FP32 sums in another order; the other positions are more than 0.1
    near = FP8Cache(model)
    model(IDS[:, :200], past_key_values=near)
    with pytest.raises(AssertionError):
        close(outs[0], model(IDS[:, 200:220], past_key_values=near).logits, 0.1)


@pytest.mark.parametrize("family", ["gemma3", "lfm2-conv"])
@torch.no_grad()
def test_a_layer_in_16_bits_goes_back_only_over_what_it_has_recorded(family):
    """Windows and convolutions, whose tokens before are no more."""
    model = make(family)
    cache = filled(model, 100)
    cache.activate_past_recording()
    with pytest.raises(RuntimeError, match="layer 0 cannot go back from 100 to 98 tokens"):
        cache.crop(-2)
    model(IDS[:, 100:109], past_key_values=cache)
    with pytest.raises(RuntimeError, match="layer 0 cannot go back from 109 to 99 tokens"):
        cache.crop(-10)
    cache.crop(-9)
    with pytest.raises(RuntimeError, match="layer 0 cannot go back from 100 to 99 tokens"):
        cache.crop(-1)
    close(next_logits(model, cache), next_logits(model, filled(model, 100)))
