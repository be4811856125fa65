"""A model whose layers are on several devices. This machine has one, so a layer's device is only said to be another."""

from itertools import cycle, islice

import pytest
import torch

from fp8attn.cache import storage
from fp8attn.errors import UsageError
from fp8attn.integrations.transformers import FP8Cache
from fp8attn.integrations.transformers import cache as cache_module
from fp8attn.integrations.transformers.decoder import layer_devices
from tests.support.transformers_models import generated, make, one_thread, prompt  # noqa: F401

CPU, OTHER = torch.device("cpu"), torch.device("cpu", 0)  # two devices, and the same memory


@pytest.fixture
def divided(monkeypatch):
    """Call it, and layers are on two devices in turn; call it with False, and they are on one."""

    def divide(on=True):
        for module in (cache_module,):
            monkeypatch.setattr(
                module,
                "layer_devices",
                (lambda _, count: [*islice(cycle([CPU, OTHER]), count)]) if on else layer_devices,
            )

    return divide


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2"])
@pytest.mark.parametrize("max_cache_len", [None, 256])
def test_a_divided_model_generates_what_the_whole_one_does(divided, tmp_path, family, max_cache_len):
    """And its file has the same tensors: each loads the other's."""
    model, ids = make(family), prompt(length=140)
    caches, paths = {}, {}
    for on in (False, True):
        divided(on)
        cache = FP8Cache(model, max_cache_len=max_cache_len)
        with torch.no_grad():
            model(ids, past_key_values=cache)
        caches[on], paths[on] = cache, tmp_path / str(on)
        cache.save(paths[on], tokens=ids)
    assert len(caches[True].groups) > len(caches[False].groups) and caches[True].fp8_layers == caches[False].fp8_layers
    (tensors, layers, metadata), others = (storage.read(paths[on]) for on in (False, True))
    assert (layers, metadata) == others[1:]  # a checksum of all bytes and names is in it
    assert tensors.keys() == others[0].keys()
    more = torch.cat([ids, prompt(length=5)], 1)
    wanted = generated(model, caches[False], more)
    divided(False)
    whole = FP8Cache.load(paths[True], model, max_cache_len=max_cache_len)
    divided()
    parts = FP8Cache.load(paths[False], model, max_cache_len=max_cache_len)
    assert {group.device for group in parts.groups} == {CPU, OTHER}
    for cache in (caches[True], whole, parts):
        found = generated(model, cache, more)
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


def test_sequences_of_a_divided_model_move_together(divided):
    model, ids = make("llama"), prompt(batch=2, length=140)
    results = []
    for on in (False, True):
        divided(on)
        cache = FP8Cache(model)
        with torch.no_grad():
            model(ids, past_key_values=cache)
            cache.reorder_cache(torch.tensor([1, 0]))
            cache.batch_repeat_interleave(2)
            cache.crop(-3)
            results.append(model(torch.cat([ids[:, -3:]] * 2), past_key_values=cache).logits)
    assert torch.equal(*results)


def test_a_file_that_lacks_a_layer_is_refused(divided, tmp_path):
    model, path = make("llama"), tmp_path / "cache"
    cache = FP8Cache(model)
    with torch.no_grad():
        model(prompt(length=8), past_key_values=cache)
    cache.save(path)
    tensors, layers, metadata = storage.read(path)
    del tensors["pages.1"]
    storage.write(path, tensors, layers, {name: metadata[name] for name in ("model", "max_cache_len")})
    divided()
    with pytest.raises(UsageError, match=r"incomplete or not as written"):
        FP8Cache.load(path, model)


def test_devices_of_layers(tmp_path):
    """A layer that is offloaded runs where accelerate moves its weights, and so do its pages."""
    accelerate = pytest.importorskip("accelerate")
    model, ids = make("llama"), prompt(length=140)
    count = model.config.num_hidden_layers
    assert layer_devices(model, count) == [CPU] * count
    wanted = generated(model, FP8Cache(model), ids)
    names = [name for name, _ in model.named_children() if name != "model"] + [
        f"model.{name}" for name, _ in model.model.named_children()
    ]
    places = {name: "cpu" for name in names if name != "model.layers"} | {
        f"model.layers.{i}": "cpu" for i in range(count)
    }
    model = accelerate.dispatch_model(
        model, places | {"model.layers.1": "disk"}, offload_dir=tmp_path, main_device="cpu"
    )
    assert next(model.model.layers[1].parameters()).is_meta
    assert layer_devices(model, count) == [CPU] * count
    cache = FP8Cache(model)
    found = generated(model, cache, ids)
    assert len(cache.groups) == 1 and torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    for module in model.model.layers[1].self_attn.modules():
        if hasattr(module, "_hf_hook"):
            module._hf_hook.execution_device = OTHER
    assert layer_devices(model, count) == [CPU, OTHER, *[CPU] * (count - 2)]


def test_a_model_that_is_offloaded_whole_reads_its_file(tmp_path):
    model, ids = make("llama"), prompt(length=140)
    cache = FP8Cache(model)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    cache.save(tmp_path / "cache")
    wanted = generated(model, cache, torch.cat([ids, prompt(length=5)], 1))
    model = pytest.importorskip("accelerate").cpu_offload(model, execution_device=CPU)
    assert model.device.type == "meta"
    cache = FP8Cache.load(tmp_path / "cache", model)
    found = generated(model, cache, torch.cat([ids, prompt(length=5)], 1))
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


def test_pages_have_the_heads_that_a_process_has():
    """Tensor parallelism leaves each process a share of the heads: of biases, whose means are subtracted, and of K."""
    model = make("qwen2")
    attention = model.model.layers[0].self_attn
    for name in ("k_proj", "v_proj"):  # the first of two KV heads of 64 channels
        projection = getattr(attention, name)
        projection.weight.data, projection.bias.data = projection.weight.data[:64], torch.full((64,), 20.0)
    cache = FP8Cache(model, skip_layers=[1, 2])
    assert cache.pages(0).num_kv_heads == 1 and cache.pages(0).format.v_mean.shape == (1, 64)
    k = torch.randn(2, 1, 3, 64)
    with torch.no_grad():
        cache.update(k, k + 20, 0)
    stored = torch.cat([cache.pages(0).read(seq, 3)[1] for seq in range(2)]).view(2, 3, 1, 64).transpose(1, 2)
    torch.testing.assert_close(stored, k + 20, rtol=0, atol=0.15)
