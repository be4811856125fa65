"""`torch.inference_mode`, entered or left between any two uses of a cache: the logits of a cache that has never seen
it, to the bit.
"""

from contextlib import nullcontext

import pytest
import torch

from fp8attn.integrations.transformers import FP8Cache
from tests.support.transformers_models import make, one_thread, prompt  # noqa: F401

CASES = {
    "growing": ("llama", {}),
    "static": ("llama", {"max_cache_len": 64}),
    "static, one layer in 16 bits": ("llama", {"max_cache_len": 64, "skip_layers": [1]}),
    "means, and windows in 16 bits": ("qwen2-mixed", {"skip_layers": ()}),
    "static windows in 16 bits": ("qwen2-mixed", {"max_cache_len": 64, "skip_layers": ()}),
    "windows in pages": ("mistral", {}),
    "linear": ("qwen3.5-linear", {}),
    "static linear": ("qwen3.5-linear", {"max_cache_len": 64}),
    "attention and a state in one layer": ("falcon-h1-hybrid", {}),
}
CHANGES = {"mistral": {"sliding_window": 512}}


def forward(model, cache, _):
    model(prompt(2, 40)[:, 20:23], past_key_values=cache)
    return cache


def generate(model, cache, _):
    ids = torch.cat([prompt(2, 20), prompt(2, 30)], 1)[:, : int(cache.get_seq_length()) + 2]
    model.generate(ids, past_key_values=cache, max_new_tokens=3, do_sample=False)
    return cache


def crop(model, cache, _):
    cache.crop(-2)
    return cache


def reorder(model, cache, _):
    cache.reorder_cache(torch.tensor([1, 0]))
    return cache


def select(model, cache, _):
    cache.batch_select_indices(torch.tensor([1, 1]))
    return cache


def repeat(model, cache, _):
    cache.batch_repeat_interleave(1)
    return cache


def save_and_load(model, cache, path):
    cache.save(path)
    return FP8Cache.load(path, model, max_cache_len=cache.options.max_cache_len)


def reset(model, cache, _):
    cache.reset()
    model(prompt(2, 20), past_key_values=cache)
    return cache


USES = (forward, generate, crop, reorder, select, repeat, save_and_load, reset)


@torch.no_grad()
def run(model, options, uses, modes, path):
    """The logits of a forward after a prompt and two `uses` of the cache, or the error if one is refused; each in
    inference mode or not.
    """
    inside = [torch.inference_mode() if mode else nullcontext() for mode in modes]
    with inside[0]:
        cache = FP8Cache(model, **options)
        model(prompt(2, 20), past_key_values=cache)
        try:
            cache = uses[0](model, cache, path)
        except (ValueError, RuntimeError) as error:  # a state or a static window cannot do it, in any mode
            return str(error)
    with inside[1]:
        try:
            cache = uses[1](model, cache, path)
        except (ValueError, RuntimeError) as error:
            return str(error)
    with inside[2]:
        return model(prompt(2, 3), past_key_values=cache).logits.clone()


@pytest.mark.parametrize("first", USES)
@pytest.mark.parametrize("case", CASES)
def test_entering_and_leaving_it_between_two_uses(case, first, tmp_path):
    family, options = CASES[case]
    model = make(family, **CHANGES.get(family, {}))
    for second in USES:
        expected = run(model, options, (first, second), (False, False, False), tmp_path / "cache")
        for modes in ((True, False, True), (False, True, False)):
            found = run(model, options, (first, second), modes, tmp_path / "cache")
            assert type(found) is type(expected), (second.__name__, modes, found)
            assert found == expected if isinstance(found, str) else torch.equal(found, expected), (
                second.__name__,
                modes,
            )


def test_a_state_of_an_interrupted_forward_in_it_can_be_reset_outside():
    """The first forward stopped: some layers have tensors of inference mode, and the others none."""
    model, ids = make("qwen3.5-linear"), prompt(2, 20)
    for options in ({}, {"max_cache_len": 64}):
        cache = FP8Cache(model, **options)
        hook = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with torch.inference_mode(), pytest.raises(ZeroDivisionError):
            model(ids, past_key_values=cache)
        hook.remove()
        with torch.no_grad():
            cache.crop(0)
            found = model(ids, past_key_values=cache).logits
            assert torch.equal(found, model(ids, past_key_values=FP8Cache(model, **options)).logits)
