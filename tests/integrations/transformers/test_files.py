"""FP8Cache in a file, for a prompt that is prefilled once."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8attn import PagedKVCache, UsageError
from fp8attn.cache.storage import FORMAT
from fp8attn.integrations.transformers import FP8Cache
from tests.support.transformers_models import close, generated, make, one_thread, prompt  # noqa: F401


@torch.no_grad()
def prefilled(model, ids, **options):
    cache = FP8Cache(model, **options)
    model(ids, past_key_values=cache)
    return cache


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"max_cache_len": 256, "key_dtype": "e4m3"}),
        ("gemma3", {"skip_layers": [-1]}),
        ("gemma3", {"max_cache_len": 256}),
        ("gemma3n-shared-kv", {}),
    ],
)
def test_generation_goes_on_from_a_loaded_cache_with_the_same_tokens(tmp_path, family, options):
    """The file also has sliding-window layers and layers in 16 bits."""
    model, ids = make(family), prompt(length=140)
    cache = prefilled(model, ids, **options)
    cache.save(tmp_path / "prompt")
    loaded = FP8Cache.load(tmp_path / "prompt", model, max_cache_len=options.get("max_cache_len"))
    assert int(loaded.get_seq_length()) == 140 and loaded.fp8_layers == cache.fp8_layers
    more = torch.cat([ids, prompt(length=5)], 1)
    mine, theirs = (generated(model, each, more) for each in (cache, loaded))
    assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])


def test_what_the_weights_decided_is_in_the_file(tmp_path):
    """The file has the means of the model's biases, and that the keys of these layers are not rotated."""
    model, ids = make("qwen2"), prompt(length=140)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.bias.fill_(20.0)
    cache = FP8Cache(model, key_dtype="e4m3")
    with torch.no_grad():
        model(ids, past_key_values=cache)
    cache.save(tmp_path / "prompt")
    loaded = FP8Cache.load(tmp_path / "prompt", model)
    assert [loaded.pages(i).format.rotate for i in range(3)] == [layer.rotate_keys for layer in cache.layers]
    assert loaded.pages(1).format.v_mean is not None and torch.equal(
        loaded.pages(1).format.v_mean, cache.pages(1).format.v_mean
    )
    more = torch.cat([ids, prompt(length=5)], 1)
    assert torch.equal(generated(model, cache, more)[1], generated(model, loaded, more)[1])
    loaded.reset()
    with torch.no_grad():
        ours, again = (model(ids, past_key_values=each).logits for each in (FP8Cache(model, key_dtype="e4m3"), loaded))
    assert torch.equal(ours, again)


def test_a_sequence_of_a_batch_serves_another_batch(tmp_path):
    model, ids = make("gemma3"), prompt(3, 140)
    prefilled(model, ids).save(tmp_path / "second", seqs=[1])
    loaded = FP8Cache.load(tmp_path / "second", model)
    loaded.batch_repeat_interleave(2)
    token = torch.tensor([[5], [7]])
    with torch.no_grad():
        ours = model(token, past_key_values=loaded).logits
        close(ours, model(token, past_key_values=prefilled(model, ids[[1, 1]])).logits)


@pytest.mark.parametrize("family", ["gemma3", "lfm2-conv", "falcon-h1-hybrid"])
@pytest.mark.parametrize("length", [2, 50])
@torch.no_grad()
def test_a_cache_that_records_goes_on_from_a_file(tmp_path, family, length):
    """Its windows and convolutions hold more than the next token sees, or, of a short prompt, less."""
    model, ids = make(family), prompt(length=60)
    cache, expected = FP8Cache(model), prefilled(model, ids[:, :length])
    cache.activate_past_recording()
    model(ids[:, :length], past_key_values=cache)
    cache.save(tmp_path / "prompt")
    loaded = FP8Cache.load(tmp_path / "prompt", model)
    for begin, end in ((length, length + 1), (length + 1, length + 9)):
        close(*(model(ids[:, begin:end], past_key_values=each).logits for each in (loaded, expected)), 1e-5)


def test_files_that_are_refused(tmp_path):
    model, path = make(), tmp_path / "prompt"
    with pytest.raises(ValueError, match="run the prompt through the model first"):
        FP8Cache(model).save(path)
    prefilled(model, prompt()).save(path)
    for other, difference in (
        (make("mistral"), "type is 'llama' in the file and 'mistral' in the model"),
        (
            make(num_hidden_layers=2),
            "layers is 3 in the file and 2 in the model; FP8 layers is [0, 1, 2] in the file and [0, 1] in the model",
        ),
    ):
        with pytest.raises(UsageError) as raised:
            FP8Cache.load(path, other)
        said = f"is from another model: {difference}. Load it with that model, or prefill the prompt with this one"
        assert str(raised.value) == f"{path} {said}"
    with pytest.raises(ValueError, match="do not fit into max_seqlen=100"):
        FP8Cache.load(path, model, max_cache_len=100)
    paged = PagedKVCache.load(path)  # the pages alone
    assert paged.lengths == (150, 150)
    paged.save(path)
    with pytest.raises(ValueError, match=r"holds pages without a model: fp8attn.PagedKVCache.load reads it"):
        FP8Cache.load(path, model)
    gemma = make("gemma3")
    prefilled(gemma, prompt()).save(path)
    with pytest.raises(ValueError, match="has 16-bit layers of a cache with max_cache_len=None"):
        FP8Cache.load(path, gemma, max_cache_len=256)
    tensors = load_file(path)
    save_file(tensors, path, {"format": FORMAT, "model": json.dumps({})})
    with pytest.raises(ValueError, match="incomplete or not as written"):
        FP8Cache.load(path, gemma)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 4},
        {"head_dim": 128},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"dtype": "bfloat16"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_model_of_another_shape_rope_or_dtype_is_refused(tmp_path, changes):
    prefilled(make(), prompt()).save(tmp_path / "prompt")
    other = make().bfloat16() if "dtype" in changes else make(**changes)
    with pytest.raises(ValueError, match="is from another model"):
        FP8Cache.load(tmp_path / "prompt", other)


def test_a_flipped_byte_is_found(tmp_path):
    path = tmp_path / "prompt"
    prefilled(make(), prompt()).save(path)
    written = path.read_bytes()
    for place in (len(written) // 2, len(written) - 1):
        path.write_bytes(written[:place] + bytes([written[place] ^ 1]) + written[place + 1 :])
        for load in (PagedKVCache.load, lambda path: FP8Cache.load(path, make())):
            with pytest.raises(ValueError, match=r"not as written \(its bytes have another checksum"):
                load(path)


def test_a_file_knows_the_tokens_of_its_prompt(tmp_path):
    model, ids, path = make(), prompt(3, 140), tmp_path / "prompt"
    cache = prefilled(model, ids)
    with pytest.raises(ValueError, match=r"ids \[B, length\] = \[3, 140\] of what the cache holds; got \[3, 139\]"):
        cache.save(path, tokens=ids[:, 1:])
    cache.save(path)
    with pytest.raises(ValueError, match=r"saved without its tokens: save it with cache.save\(path, tokens=ids\)"):
        FP8Cache.load(path, model, tokens=ids)
    cache.save(path, seqs=[2, 0], tokens=ids)
    ids = ids[[2, 0]]
    for given in (None, ids, torch.cat([ids, ids], 1)):
        assert FP8Cache.load(path, model, tokens=given).get_seq_length() == 140
    other = ids.clone()
    other[1, 100] += 1
    for given in (other, ids[:, :100], ids.flip(0)):
        with pytest.raises(ValueError, match=r"is from another prompt: it holds 140 tokens.*save it to another file"):
            FP8Cache.load(path, model, tokens=given)
    with pytest.raises(
        ValueError, match=r"holds 2 sequences, and tokens must be the ids \[B, S\] of as many; got \[1, 140\]"
    ):
        FP8Cache.load(path, model, tokens=ids[:1])


def test_repr_says_what_it_is():
    model = make("gemma3")
    cache = FP8Cache(model)
    assert repr(cache) == "FP8Cache(2 layers in FP8, 1 in 16 bits, empty)"
    with torch.no_grad():
        model(prompt(), past_key_values=cache)
    paged = "PagedKVCache(2 layers, 2 seqs, lengths=(150, 150), 4 pages, 0.3 MiB, int8 keys, cpu)"
    assert repr(cache) == f"FP8Cache(2 layers in FP8, 1 in 16 bits, {paged})"
