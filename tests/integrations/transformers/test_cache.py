"""The contents of an FP8Cache, moves of its sequences, and what is refused."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
import transformers
from torch.autograd import forward_ad
from transformers import AutoModel, LlamaConfig, MistralConfig
from transformers.cache_utils import StaticSlidingWindowLayer

from fp8attn import LayerScales, UsageError
from fp8attn.formats.rotation import rotate_back
from fp8attn.integrations.transformers import FP8Cache, edge_layers, unsupported_reason
from fp8attn.integrations.transformers import build as build_module
from fp8attn.numerics import relative_error
from fp8attn.scales import KVScales
from tests.support.transformers_models import SHAPE, Oracle, close, logits, make, one_thread, plain, prompt, using  # noqa: F401


@pytest.fixture(scope="module")
def llama():
    return make()


# Which layers, and what they hold


@pytest.mark.parametrize(
    ("skip", "expected"),
    [
        ((), (0, 1, 2)),
        ([0, -1], (1,)),
        ([1], (0, 2)),
        (edge_layers(1, 1), (1,)),
        (edge_layers(last=2), (0,)),
    ],
)
@pytest.mark.parametrize("static", [False, True])
def test_skipped_layers_stay_in_16_bits(llama, skip, expected, static):
    ids = prompt()
    cache = FP8Cache(llama, skip_layers=skip, max_cache_len=160 if static else None)
    ours, read_back = logits(llama, cache, ids), FP8Cache(llama, skip_layers=skip)
    assert cache.fp8_layers == expected
    with using(llama, "sdpa"):
        close(ours, logits(llama, read_back, ids))
    exact = plain(llama.config)
    logits(llama, exact, ids)
    if 0 not in expected:
        torch.testing.assert_close(cache.layers[0].keys[:, :, : ids.shape[1]], exact.layers[0].keys)


def test_skipped_layers_with_left_padding_and_long_prompts(llama, monkeypatch):
    monkeypatch.setattr("fp8attn.integrations.transformers.attention.QUERY_BLOCK", 64)
    ids = prompt()
    mask = torch.ones_like(ids)
    mask[1, :37] = 0
    for length in (None, 160):
        ours = logits(llama, FP8Cache(llama, skip_layers=[0], max_cache_len=length), ids, mask)
        read_back = FP8Cache(llama, skip_layers=[0])
        with using(llama, "sdpa"):
            close(ours[mask.bool()], logits(llama, read_back, ids, mask)[mask.bool()])


def test_calibrated_scales_are_used(llama):
    layers = {
        i: LayerScales(torch.full((2,), 0.02), torch.full((2,), 0.05), torch.full((2, 64), 0.1), torch.zeros(2, 64))
        for i in range(3)
    }
    scales = KVScales(layers=layers, num_layers=3, num_kv_heads=2, head_dim=64)
    ids = prompt()
    caches = [FP8Cache(llama, scales=scales, max_cache_len=length) for length in (None, 160)]
    outs = [logits(llama, cache, ids) for cache in caches]
    assert torch.equal(*outs)
    pages = caches[0].pages(1)
    torch.testing.assert_close(
        pages.k_scale, torch.full_like(pages.k_scale, 0.02), rtol=1e-6, atol=0
    )  # INT8: any number
    assert (pages.v_scale == 2.0**-4).all()  # E4M3: the power of two above
    torch.testing.assert_close(rotate_back(pages.format.stored_k_mean), torch.full((2, 64), 0.1), rtol=1e-5, atol=0)
    with pytest.raises(
        ValueError, match="are for key_dtype='int8', rotate_keys=True, and the cache has key_dtype='e4m3'"
    ):
        FP8Cache(llama, scales=scales, key_dtype="e4m3")
    other = KVScales(layers=layers, num_layers=4, num_kv_heads=2, head_dim=64)
    with pytest.raises(ValueError, match="another model"):
        FP8Cache(llama, scales=other)


class Interrupt(Exception):
    """Stands for a KeyboardInterrupt."""


def interrupted(model, index, *args, where="o_proj", **options):
    """Run a forward that stops in a layer, after its cache has been updated (or before, at `where`)."""

    def stop(*_):
        raise Interrupt

    hook = model.model.layers[index].self_attn.get_submodule(where).register_forward_pre_hook(stop)
    try:
        with torch.no_grad(), pytest.raises(Interrupt):
            model(*args, **options)
    finally:
        hook.remove()


USES = {
    "forward": lambda cache, model, path: model(prompt(2, 3), past_key_values=cache),
    "get_seq_length": lambda cache, model, path: cache.get_seq_length(),
    "reorder_cache": lambda cache, model, path: cache.reorder_cache(torch.tensor([1, 0])),
    "batch_select_indices": lambda cache, model, path: cache.batch_select_indices(torch.tensor([1, 0])),
    "batch_repeat_interleave": lambda cache, model, path: cache.batch_repeat_interleave(1),
    "save": lambda cache, model, path: cache.save(path),
}


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("skip", [(), (0,), (2,)])
@pytest.mark.parametrize("stopped", [0, 1])
@pytest.mark.parametrize("first", [0, 130])
@torch.no_grad()
def test_a_cache_whose_layers_disagree_says_so_and_goes_back(llama, tmp_path, static, skip, stopped, first):
    """Also if layers in 16 bits, before or after the FP8 layers, do. Not to the bit: dropped tokens may have made a
    page's scale grow.
    """
    ids, new = prompt(), 150 - first
    cache = FP8Cache(llama, skip_layers=skip, max_cache_len=200 if static else None)
    if first:
        llama(ids[:, :first], past_key_values=cache)
    expected = llama(ids[:, first:], past_key_values=copy.deepcopy(cache)).logits
    interrupted(llama, stopped, ids[:, first:], past_key_values=cache)
    behind, ahead = ("1-2", "0") if stopped == 0 else ("2", "0-1")
    for use in USES.values():
        with pytest.raises(
            RuntimeError,
            match=rf"layers {behind} hold {first} tokens, layers {ahead} hold 150 .*cache\.crop\(0\).*reset",
        ):
            use(cache, llama, tmp_path / "prompt")
    assert not (tmp_path / "prompt").exists()
    again = copy.deepcopy(cache)
    cache.crop(0)
    assert int(cache.get_seq_length()) == first
    close(llama(ids[:, first:], past_key_values=cache).logits, expected)
    assert int(cache.get_seq_length()) == 150
    if first:  # fewer than all layers hold
        again.crop(-30)
        close(llama(ids[:, 100:], past_key_values=again).logits[:, -new:], expected)
    else:
        again.reset()
        close(llama(ids, past_key_values=again).logits, expected)


@pytest.mark.parametrize("static", [False, True])
def test_a_window_in_16_bits_that_has_dropped_tokens_asks_for_a_reset(static):
    """Nothing is changed by what is refused. A window that is not full goes back."""
    model, ids = make("qwen2-mixed"), prompt()
    cache = FP8Cache(model, max_cache_len=200 if static else None)
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
        expected = model(ids[:, 20:25], past_key_values=copy.deepcopy(cache)).logits
        interrupted(model, 1, ids[:, 20:30], past_key_values=cache)
        if static and not hasattr(StaticSlidingWindowLayer, "crop"):  # transformers 5.17
            with pytest.raises(RuntimeError, match=r"layer 0 cannot go back from 30 to 20 tokens.*cache\.reset\(\)"):
                cache.crop(0)
            cache.reset()
            model(ids[:, :20], past_key_values=cache)
        else:
            cache.crop(0)
        close(model(ids[:, 20:25], past_key_values=cache).logits, expected)
        model(ids[:, 25:], past_key_values=cache)
    held = copy.deepcopy(cache)
    with pytest.raises(
        RuntimeError, match=r"layer 0 cannot go back from 150 to 140 tokens: in 16 bits, it has .*cache\.reset\(\)"
    ):
        cache.crop(-10)
    cache.crop(0)
    with torch.no_grad():
        step = prompt(2, 3)
        assert torch.equal(model(step, past_key_values=cache).logits, model(step, past_key_values=held).logits)
    interrupted(model, 1, step, past_key_values=cache)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"layers 2 hold 153 tokens, layers 0-1 hold 156 .* cache\.reset\(\)"):
            model(step, past_key_values=cache)
        with pytest.raises(RuntimeError, match=r"layer 0 cannot go back from 156 to 153 tokens.*cache\.reset\(\)"):
            cache.crop(0)
    cache.crop(-200)  # to nothing is always possible
    with torch.no_grad():
        assert (
            torch.equal(model(ids, past_key_values=cache).logits, model(ids, past_key_values=FP8Cache(model)).logits)
            or static
        )
    assert int(cache.get_seq_length()) == 150


def test_a_window_in_16_bits_that_records_goes_back_as_far_as_it_has_recorded():
    model, ids = make("qwen2-mixed"), prompt()
    cache, short = FP8Cache(model), FP8Cache(model)
    with torch.no_grad():
        model(ids[:, :100], past_key_values=cache)
        model(ids[:, :100], past_key_values=short)
        cache.activate_past_recording()
        model(ids[:, 100:], past_key_values=cache)
        cache.crop(-50)
        assert cache.layers[0].keys.shape[2] == 31  # and drops what the next forward does not need
        close(model(ids[:, :9], past_key_values=cache).logits, model(ids[:, :9], past_key_values=short).logits)


@torch.no_grad()
def test_an_interrupt_where_later_layers_share_k_and_v_is_seen_by_the_mask():
    """All layers that append have the tokens, so the cache holds them: only a mask of the whole conversation can say
    that a forward appends them again."""
    model, ids = make("gemma3n-shared-kv", sliding_window=512), prompt(2, 45)
    cache, mask = FP8Cache(model), torch.ones_like(ids)
    whole = model(ids, past_key_values=FP8Cache(model)).logits
    model(ids[:, :40], attention_mask=mask[:, :40], past_key_values=cache)
    interrupted(model, 3, ids[:, 40:], attention_mask=mask, past_key_values=cache)
    with pytest.raises(ValueError, match="attention_mask is of 45 tokens, and the cache holds 45 and gets 5 new ones"):
        model(ids[:, 40:], attention_mask=mask, past_key_values=cache)
    assert cache.get_seq_length() == 45
    cache.crop(-5)
    close(model(ids[:, 40:], attention_mask=mask, past_key_values=cache).logits, whole[:, 40:])


def test_a_model_that_stops_early_is_never_emptied(llama):
    """An early exit leaves the later layers without tokens, which the next use says."""

    class Exit(Exception):
        pass

    def leave(*_):
        raise Exit

    cache, ids = FP8Cache(llama), prompt()
    hook = llama.model.layers[2].register_forward_pre_hook(leave)
    with torch.no_grad(), pytest.raises(Exit):
        llama(ids, past_key_values=cache)
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match=r"layers 2 hold 0 tokens, layers 0-1 hold 150 .*did not run every layer"),
    ):
        llama(ids[:, :1], past_key_values=cache)
    hook.remove()
    assert [layer.num_tokens for layer in cache.layers] == [150, 150, 0]


@torch.no_grad()
def test_a_crop_that_a_window_in_pages_refuses_changes_no_layer_before_it():
    """Layer 0 sees all tokens, so its pages are cropped before those of the window."""
    model = make("gemma3", sliding_window=384, layer_types=["full_attention", "sliding_attention", "sliding_attention"])
    cache, ids = FP8Cache(model), prompt(1, 1500)
    model(ids[:, :1490], past_key_values=cache)
    model(ids[:, 1490:], past_key_values=cache)
    held = copy.deepcopy(cache)
    with pytest.raises(RuntimeError, match="cannot go back to 700: pages of the 384 tokens before were given back"):
        cache.crop(-800)
    assert [layer.num_tokens for layer in cache.layers] == [1500] * 3
    step = prompt(1, 3)
    assert torch.equal(model(step, past_key_values=cache).logits, model(step, past_key_values=held).logits)


def test_a_model_with_other_layers_than_its_config_is_refused():
    pruned, longer = make(), make()
    pruned.model.layers = pruned.model.layers[:2]
    longer.config.num_hidden_layers = 2
    message = r"LlamaForCausalLM has the layers {}, and its config has {}: .*Set the config's num_hidden_layers"
    for model, layers, number in ((pruned, "0-1", 3), (longer, "0-2", 2)):
        with pytest.raises(UsageError, match=message.format(layers, number)):
            FP8Cache(model)
    pruned.config.num_hidden_layers = 2
    ids = prompt()
    with torch.no_grad():
        close(logits(pruned, FP8Cache(pruned), ids), logits(pruned, Oracle(pruned.config), ids))
    middle = make()
    del middle.model.layers[1]
    with pytest.raises(UsageError, match="has the layers 0, 2, and its config has 3"):
        FP8Cache(middle)


def test_an_empty_batch_is_refused(llama):
    cache = FP8Cache(llama)
    with torch.no_grad(), pytest.raises(ValueError, match=r"a batch of no sequences"):
        llama(prompt()[:0], past_key_values=cache)


@torch.no_grad()
def test_a_second_prompt_that_is_not_the_conversation_is_refused_where_it_shows(llama):
    """`generate` cuts as many tokens from a prompt as the cache has, and passes a mask on if it has padding. The mask
    of a prompt that is shorter than the conversation is too short then; nothing shows another one."""
    cache, ids = FP8Cache(llama), prompt(2, 30)
    llama.generate(prompt(2, 40), past_key_values=cache, max_new_tokens=6, do_sample=False)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with pytest.raises(
        ValueError, match=r"of 30 tokens, and the cache holds 45 and gets 15 .* For another prompt .* reset\(\)"
    ):
        llama.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=6, do_sample=False)
    assert cache.get_seq_length() == 45


def test_a_prompt_of_which_the_cache_leaves_nothing_is_refused(llama):
    """`generate` takes a prompt as the whole conversation, and cuts from it as many tokens as the cache has."""
    cache, ids = FP8Cache(llama), prompt(1, 10).flip(1)
    llama.generate(prompt(1, 40), past_key_values=cache, max_new_tokens=6, do_sample=False)
    with pytest.raises(ValueError, match=r"no new tokens.* holds 45 tokens.* call reset\(\)"):
        llama.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=6, do_sample=False
        )


@pytest.mark.parametrize(
    ("method", "arguments"),
    [("reset", ()), ("crop", (-1,)), ("reorder_cache", (torch.tensor([0]),)), ("batch_repeat_interleave", (2,)),
     ("batch_select_indices", (torch.tensor([0]),)), ("offload", ()), ("prefetch", ())],
)  # fmt: skip
def test_a_layer_alone_cannot_be_moved(llama, method, arguments):
    with pytest.raises(NotImplementedError, match=r"on the FP8Cache|does not offload"):
        getattr(FP8Cache(llama).layers[0], method)(*arguments)


def test_nbytes_is_half(llama):
    ids = prompt(length=1024)
    caches = [FP8Cache(llama), FP8Cache(llama, max_cache_len=1024), FP8Cache(llama, skip_layers=[0])]
    with torch.no_grad():
        for cache in caches:
            llama(ids, past_key_values=cache, logits_to_keep=1)
    bf16_layer = 2 * ids.numel() * 2 * 64 * 2  # K and V, tokens, heads, head_dim, bytes
    assert 0.5 < caches[0].nbytes / (3 * bf16_layer) < 0.51
    assert caches[1].nbytes == caches[0].nbytes
    table = caches[0].pages(0).page_table.nbytes
    assert (
        caches[2].nbytes - table == (caches[0].nbytes - table) * 2 // 3 + 2 * bf16_layer
    )  # a float32 model's 16-bit layer is in float32


@pytest.mark.parametrize("skip", [(), (0,)])
@pytest.mark.parametrize("static", [False, True])
def test_crop_reset_and_moving_sequences(llama, static, skip):
    ids = prompt(3)
    length = 200 if static else None

    def filled(n=150, rows=slice(None)):
        cache = FP8Cache(llama, max_cache_len=length, skip_layers=skip)
        with torch.no_grad():
            llama(ids[rows, :n], past_key_values=cache)
        return cache

    def next_logits(cache, rows=slice(None), token=7):
        with torch.no_grad():
            return llama(torch.full((len(ids[rows]), 1), token), past_key_values=cache).logits

    cache = filled()
    cache.crop(0)
    assert int(cache.get_seq_length()) == 150
    cache.crop(torch.tensor(-50))  # as assisted decoding calls it
    assert int(cache.get_seq_length()) == 100
    close(next_logits(cache), next_logits(filled(100)))
    cache = filled()
    order = torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    close(next_logits(cache), next_logits(filled())[order])
    cache.reset()
    assert int(cache.get_seq_length()) == 0
    with torch.no_grad():
        llama(ids[:, :70], past_key_values=cache)
    close(next_logits(cache), next_logits(filled(70)))
    if static:
        with pytest.raises(ValueError, match="from 3 to 2: make it with the final number"):
            cache.batch_select_indices(torch.tensor([0, 2]))
        return
    expected = next_logits(filled())
    cache = filled()
    cache.batch_select_indices(torch.tensor([0, 2]))
    close(next_logits(cache, slice(2)), expected[[0, 2]])
    cache = filled()
    cache.batch_select_indices(torch.tensor([True, False, True]))
    cache.batch_repeat_interleave(2)
    close(next_logits(cache, [0, 0, 2, 2]), expected[[0, 0, 2, 2]])


@pytest.mark.parametrize("static", [False, True])
def test_a_deep_copy_goes_its_own_way(llama, static):
    ids = prompt()
    cache = FP8Cache(llama, max_cache_len=200 if static else None)
    with torch.no_grad():
        llama(ids[:, :130], past_key_values=cache)
        other = copy.deepcopy(cache)
        assert other.groups[0].config is llama.config
        llama(ids[:, :9], past_key_values=other)
        ours = llama(ids[:, 130:], past_key_values=cache).logits
        oracle = Oracle(llama.config)
        llama(ids[:, :130], past_key_values=oracle)
        close(ours, llama(ids[:, 130:], past_key_values=oracle).logits)


def test_a_shallow_copy_and_odd_numbers_are_refused(llama):
    cache = FP8Cache(llama)
    with torch.no_grad():
        llama(prompt()[:, :20], past_key_values=cache)
    with pytest.raises(TypeError, match=r"would share its pages and append to them: use copy\.deepcopy\(cache\)"):
        copy.copy(cache)
    for call, message in (
        (lambda: cache.crop("x"), "crop takes minus the number of tokens to forget, as in transformers; got 'x'"),
        (lambda: cache.crop(-1.5), "crop takes minus the number of tokens.*; got -1.5"),
        (lambda: cache.batch_repeat_interleave(2.5), "repeats must be a whole number from 1 to .*; got float 2.5"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert cache.get_seq_length() == 20


@pytest.mark.parametrize("static", [False, True])
def test_a_pickled_cache_goes_on(llama, static):
    """The pages are pickled as bytes, because torch cannot load a pickled FP8 tensor."""
    ids = prompt()
    cache = FP8Cache(llama, max_cache_len=200 if static else None)
    with torch.no_grad():
        llama(ids[:, :130], past_key_values=cache)
        other = pickle.loads(pickle.dumps(cache))
        assert int(other.get_seq_length()) == 130
        ours, theirs = (llama(ids[:, 130:], past_key_values=one).logits for one in (cache, other))
    assert torch.equal(ours, theirs)


def test_under_autocast_it_computes_in_its_dtype(llama):
    """Queries and keys are float32 (after RoPE), and values are bfloat16 (from a projection)."""
    ids = prompt()
    with torch.autocast("cpu", torch.bfloat16):
        ours, read_back = logits(llama, FP8Cache(llama), ids), FP8Cache(llama)
        with using(llama, "sdpa"):
            dequantized, exact = (logits(llama, one, ids) for one in (read_back, plain(llama.config)))
    assert ours.dtype == dequantized.dtype == exact.dtype == torch.bfloat16
    close(ours, dequantized, 0.02)
    assert relative_error(ours, exact) < 0.1


# What is refused


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MistralConfig(**SHAPE, sliding_window=32), "every layer of 'mistral' .*sliding_attention"),
        (transformers.GlmMoeDsaConfig(), "sparse latent attention"),
        (transformers.T5Config(), "encoder-decoder"),
        (transformers.Mamba2Config(), "'mamba2' is not a decoder with layers of attention"),
        (transformers.MiniMaxConfig(), "'minimax' takes no cache but its own"),
        (transformers.MllamaConfig(), r"'mllama_text_model' has cross-attention layers \(3, 8, 13"),
        (LlamaConfig(**SHAPE, head_dim=48), r"'llama': head_dim must be one of \(64, 80, 96.*; got 48"),
        (
            transformers.BloomConfig(vocab_size=89, hidden_size=128, n_layer=2, n_head=2),
            "'bloom' computes its attention itself",
        ),
    ],
    ids=[
        "all-sliding",
        "mla",
        "encoder-decoder",
        "linear",
        "own-cache",
        "cross-attention",
        "head_dim",
        "own-attention",
    ],
)
def test_models_that_are_refused(config, message):
    """At the door, before the model is changed. Its weights are on no device here."""
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    before = model.config._attn_implementation
    with pytest.raises(UsageError, match=message) as error:
        FP8Cache(model)
    assert "transformers' own cache" in str(error.value) and str(error.value) == unsupported_reason(config)
    assert model.config._attn_implementation == before


def test_layers_of_another_head_dim_are_named_with_the_option_that_keeps_them_in_16_bits(monkeypatch):
    model, specs = make(), build_module.layers_of
    monkeypatch.setattr(
        build_module,
        "layers_of",
        lambda config: [replace(s, head_dim=48 if i < 2 else 64) for i, s in enumerate(specs(config))],
    )
    with pytest.raises(
        UsageError, match=r"layer 0: head_dim must be one of .*; got 48\..*in 16 bits: skip_layers=\[0, 1\]"
    ):
        FP8Cache(model)
    assert FP8Cache(model, skip_layers=[0, 1]).fp8_layers == (2,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skip_layers": [3]}, r"names \[3\]"),
        ({"skip_layers": range(3)}, "every full-attention layer in 16 bits"),
        ({"key_dtype": "fp8"}, "key_dtype must be one of 'int8', 'e4m3'; got 'fp8'"),
        ({"skip_layers": 1}, "skip_layers is a sequence of layers' numbers; got 1"),
        ({"skip_layers": "1"}, "skip_layers is a sequence .* got '1'"),
        ({"backend": "cuda"}, "unknown backend 'cuda'; choose 'auto', 'hopper', 'triton', 'reference'"),
        ({"max_cache_len": 0}, "a positive whole number of tokens .*got 0"),
        ({"max_cache_len": 10.5}, "a positive whole number of tokens .*got 10.5"),
    ],
)
def test_options_that_are_refused(llama, options, message):
    with pytest.raises(ValueError, match=message):
        FP8Cache(llama, **options)


def test_a_file_in_place_of_its_scales_is_refused(llama):
    with pytest.raises(TypeError, match=r"scales must be KVScales, as of KVScales\.load\(path\); got str"):
        FP8Cache(llama, scales="scales.safetensors")


def test_a_config_in_place_of_its_model_is_refused(llama):
    """A config knows no biases: without means, Qwen2.5 would lose several times as much, in silence."""
    for make_cache in (FP8Cache, lambda config: FP8Cache.load("prompt", config)):
        with pytest.raises(
            TypeError, match=r"takes the model, and got its config \(LlamaConfig\).* Call FP8Cache\(model, \.\.\.\)"
        ):
            make_cache(llama.config)
    with pytest.raises(
        TypeError, match=r"got OptimizedModule\. For a compiled or wrapped model, pass the model inside"
    ):
        FP8Cache(torch.compile(llama))


def test_a_window_that_cannot_be_cropped_leaves_all_layers_as_they_are():
    model = make("qwen2-mixed")
    cache = FP8Cache(model)
    logits(model, cache, prompt())
    lengths = [int(layer.get_seq_length()) for layer in cache.layers]
    with pytest.raises(
        RuntimeError, match=r"layer 0 cannot go back from 150 to 148 tokens: .*a window.*cache\.reset\(\)"
    ):
        cache.crop(-2)
    assert [int(layer.get_seq_length()) for layer in cache.layers] == lengths


def test_gradients_are_refused(llama):
    with pytest.raises(RuntimeError, match="inference"):
        llama(prompt(), past_key_values=FP8Cache(llama))
    k = torch.randn(1, 2, 9, 64)
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(k, k)
        for k_states, v_states in ((dual, k), (k, dual)):
            with pytest.raises(RuntimeError, match="for inference: an input has a forward-mode tangent"):
                FP8Cache(llama).update(k_states, v_states, 0)


def test_another_head_dim_batch_and_offloading_are_refused(llama):
    with torch.no_grad():
        cache = FP8Cache(llama)
        llama(prompt(), past_key_values=cache)
        with pytest.raises(ValueError, match="another batch"):
            llama(prompt(3), past_key_values=cache)
        with pytest.raises(ValueError, match="another batch"):
            llama(prompt(1, 2), past_key_values=cache)
    with pytest.raises(NotImplementedError, match="does not offload"):
        cache.offload(0)
    with pytest.raises(ValueError, match="minus the number"):
        cache.crop(3)
    with torch.no_grad(), pytest.raises(ValueError, match="without max_cache_len"):
        FP8Cache(make("qwen2-mixed"), max_cache_len=64).batch_repeat_interleave(2)


@torch.no_grad()
@pytest.mark.parametrize(("batch", "leftpad"), [(1, {False}), (2, {False, True})])
def test_kernels_of_padding_are_compiled_ahead_for_batches(llama, batch, leftpad):
    """A cache does not see whether a batch has padding, so it prepares both kernels; a single sequence has none."""
    cache = FP8Cache(llama)
    llama(prompt(batch, 20), past_key_values=cache)
    assert {attention.leftpad for attention in cache.paged.ahead.attention} == leftpad


@torch.no_grad()
def test_a_window_in_16_bits_goes_back_until_it_is_full():
    """transformers' layer keeps 31 tokens of a window of 32, so it cannot give back a token from 32 tokens on."""
    model = make("gemma3", sliding_window=32)
    for length, goes_back in ((31, True), (32, False)):
        cache = FP8Cache(model)
        model(prompt(length=length), past_key_values=cache)
        if goes_back:
            cache.crop(-1)
            assert cache.get_seq_length() == 30
        else:
            with pytest.raises(RuntimeError, match=r"cannot go back from 32 to 31 tokens"):
                cache.crop(-1)
            assert {int(layer.get_seq_length()) for layer in cache.layers} == {32}  # nothing was changed


@torch.no_grad()
def test_a_window_in_16_bits_that_records_gives_back_its_past_at_a_crop_of_nothing():
    model = make("gemma3", sliding_window=32)
    cache = FP8Cache(model)
    cache.activate_past_recording()
    model(prompt(length=50), past_key_values=cache)
    (window, *_) = [layer for layer in cache.layers if getattr(layer, "is_sliding", False)]
    assert window.keys.shape[2] == 50
    cache.crop(0)
    assert window.keys.shape[2] == 31 and cache.get_seq_length() == 50
