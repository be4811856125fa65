"""Layers with a sliding window in 8 bits: the same answers as transformers' own layers give, in the memory of the
window.
"""

import copy

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, Llama4TextConfig
from transformers.cache_utils import DynamicSlidingWindowLayer, StaticSlidingWindowLayer
from transformers.masking_utils import chunked_causal_mask_function, or_masks, sliding_window_causal_mask_function

from fp8attn import PagedKVCache
from fp8attn.cache.page_table import SLACK, pages_of_window
from fp8attn.errors import UsageError
from fp8attn.integrations.transformers import FP8Cache, fp8_kv_attention, fp8_kv_mask, unsupported_reason
from fp8attn.integrations.transformers.config import SHORTEST_WINDOW, layers_of
from fp8attn.integrations.transformers.layers import FP8SlidingLayer
from fp8attn.integrations.transformers.masks import CompactMask
from fp8attn.integrations.transformers.tensors import PagedTensor
from fp8attn.numerics import relative_error
from tests.support.transformers_models import VOCABULARY, make, one_thread, using  # noqa: F401

W = SHORTEST_WINDOW
CUTS = (500, 1, 1, 20, 150, 16, 3)
LENGTH = sum(CUTS)
WIDE = "gemma4-512-k-is-v-shared-kv"
FAMILIES = ("mistral", "gemma3", "gemma2-softcap", "gemma3n-shared-kv", WIDE)


def windowed(family="mistral", window=W, **changes):
    return make(family, sliding_window=window, **changes)


def ids(batch=2, length=LENGTH):
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, cache, cuts=CUTS, padding=0, begin=0, tokens=None):
    """The logits of all tokens, in forwards of these lengths. The second sequence begins with padding."""
    tokens, at, outs = ids() if tokens is None else tokens, begin, []
    mask = torch.ones_like(tokens)
    mask[1:, :padding] = 0
    for n in cuts:
        given = mask[:, : at + n] if padding else None
        outs.append(model(tokens[:, at : at + n], past_key_values=cache, attention_mask=given).logits)
        at += n
    return torch.cat(outs, 1)


def close(found, wanted, tolerance):
    assert relative_error(found, wanted) < tolerance, relative_error(found, wanted)


@pytest.mark.parametrize("key_dtype", ["int8", "e4m3"])
@pytest.mark.parametrize("recording", [False, True])
@torch.no_grad()
def test_what_a_layer_returns_is_the_end_of_all_tokens(key_dtype, recording):
    """Bit for bit what a cache of all tokens has, of the length, mask and numbers of transformers' own layer; and
    attention over pages is that of these K and V, to the rounding of FP32 sums."""
    model = windowed()
    cache, plain = FP8Cache(model, key_dtype=key_dtype), DynamicSlidingWindowLayer(W)
    full, layer = PagedKVCache(2, 64, num_seqs=2, key_dtype=key_dtype), cache.layers[0]
    if recording:
        for each in (cache, plain):
            each.activate_past_recording()
    generator = torch.Generator().manual_seed(0)
    for at, new in enumerate((W - 1, 1, 1, 129, 5, 1, 700, 1, 64, 1)):
        k, v, q = (torch.randn(2, heads, new, 64, generator=generator) for heads in (2, 2, 4))
        assert layer.get_mask_sizes(new) == plain.get_mask_sizes(new)
        full.append(0, *(x.transpose(1, 2).flatten(0, 1) for x in (k, v)))
        with using(model, "sdpa" if at % 2 else "fp8_kv"):
            found = cache.update(k, v, 0)
            for other in (1, 2):
                cache.update(k, v, other)
        shape = plain.update(k, v)[0].shape
        want = [
            torch.stack([full.read(0, seq)[which] for seq in range(2)]).transpose(1, 2)[:, :, -shape[2] :]
            for which in range(2)
        ]
        assert all(isinstance(x, PagedTensor) == (at % 2 == 0) and x.shape == shape for x in found)
        for ours, theirs in zip(found, want, strict=True):
            assert torch.equal(ours.dequantize() if at % 2 == 0 else ours, theirs)
        if at % 2 == 0:
            out = fp8_kv_attention(model.model.layers[0].self_attn, q, *found, None)[0]
            key = torch.arange(shape[2])
            query = torch.arange(shape[2] - new, shape[2])[:, None]
            exact = torch.nn.functional.scaled_dot_product_attention(
                q.double(), *(x.double() for x in want), attn_mask=(key <= query) & (key > query - W), enable_gqa=True
            )
            close(out.transpose(1, 2), exact, 1e-6)  # FP32's 6e-8, of sums of 384 terms


@pytest.mark.parametrize("padding", [0, 30])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_a_16_bit_cache(family, padding):
    """Growing, cut otherwise, dequantized, and static, with windows in 16 bits. 2%: what 8 bits cost these models
    (values are checked in `test_what_a_layer_returns_is_the_end_of_all_tokens`)."""
    model = windowed(family)
    with using(model, "eager"):
        exact = logits(model, DynamicCache(config=model.config), padding=padding)[:, padding:]
    cache = FP8Cache(model)
    growing = logits(model, cache, padding=padding)[:, padding:]
    assert relative_error(growing, exact) > 1e-4
    close(growing, exact, 0.02)
    assert all(
        isinstance(layer, FP8SlidingLayer) == layer.is_sliding for layer in (cache.layers[i] for i in cache.fp8_layers)
    )
    # A sum in another order moves single codes of later layers by a step. Where keys follow from values, prompts read
    # pages of K and V, and other tokens latents.
    same = 1e-2 if family == WIDE else 1e-3
    close(logits(model, FP8Cache(model), (300, 300, 80, 11), padding)[:, padding:], growing, same)
    cache = FP8Cache(model)
    with using(model, "eager"), pytest.warns(UserWarning, match="dequantizes"):
        # What rows of padding compute, which differs, is in the scales of their page.
        close(logits(model, cache, padding=padding)[:, padding:], growing, max(same, 5e-3 if padding else 1e-3))
    if family != "mistral":
        static = FP8Cache(model, max_cache_len=LENGTH)
        assert all(type(x) is StaticSlidingWindowLayer for x in static.layers if getattr(x, "is_sliding", False))
        found = logits(model, static, padding=padding)[:, padding:]
        close(found, exact, 0.02)
        static = FP8Cache(model, max_cache_len=LENGTH)
        with using(model, "eager"), pytest.warns(UserWarning, match="dequantizes"):
            close(logits(model, static, padding=padding)[:, padding:], found, max(same, 5e-3 if padding else 1e-3))


def test_16_bit_layers_beside_8_bit_ones_with_the_same_mask():
    """The first sliding layer, which sizes the mask, is in 8 bits or not."""
    model = windowed(num_hidden_layers=3)
    exact = logits(model, DynamicCache(config=model.config))
    for skipped in ((0,), (1, 2)):
        found = logits(model, FP8Cache(model, skip_layers=skipped))
        assert 1e-4 < relative_error(found, exact) < 0.02
        cache = FP8Cache(model, skip_layers=skipped)
        with using(model, "eager"), pytest.warns(UserWarning, match="dequantizes"):
            close(logits(model, cache), found, 1e-3)
    plain = logits(model, DynamicCache(config=model.config), padding=30)  # fp8_kv's masks in 16-bit layers
    with using(model, "eager"):
        close(plain[:, 30:], logits(model, DynamicCache(config=model.config), padding=30)[:, 30:], 1e-5)


@torch.no_grad()
def test_the_memory_is_that_of_the_windows():
    model = windowed("gemma3")
    cache = FP8Cache(model)
    sliding, full = cache.groups
    assert (sliding.window, full.window) == (W, None)
    for length in (20, 1000, 1500, 1, 1):
        logits(model, cache, (length,), tokens=ids(1, length))
    page = 2 * (256 * 64 + 128)
    assert sliding.paged.layers[0].pool.nbytes <= pages_of_window(W) * page
    assert full.paged.layers[0].pool.nbytes >= -(-2520 // 128) * page
    alone = windowed()
    cache = FP8Cache(alone)
    logits(alone, cache, (3000, 1), tokens=ids(1, 3001))
    exact = DynamicCache(config=alone.config)
    logits(alone, exact, (3000, 1), tokens=ids(1, 3001))
    held = sum(x.nbytes for layer in exact.layers for x in (layer.keys, layer.values)) // 2  # of float32
    assert cache.nbytes < 0.85 * held


def test_pages_of_every_window_are_smaller_than_16_bits():
    """From the shortest window on, of a head_dim of 64, whose pages have the most bytes a channel."""
    for window in range(SHORTEST_WINDOW, 2000):
        assert pages_of_window(window) * (256 * 64 + 128) < (window - 1) * 2 * 2 * 64, window


def test_short_windows_and_chunks_stay_in_16_bits():
    model = windowed("gemma3", window=W - 1)
    cache = FP8Cache(model)
    assert cache.fp8_layers == (1, 2) and type(cache.layers[0]).__name__ == "DynamicSlidingWindowLayer"
    reason = unsupported_reason(windowed(window=W - 1).config)
    assert "no layer would be in FP8" in reason and "no sliding window of 384 tokens or more" in reason
    assert unsupported_reason(windowed().config) is None
    config = Llama4TextConfig(num_hidden_layers=4, attention_chunk_size=512)
    assert {layer.kind for layer in layers_of(config) if layer.in_pages} == {"full_attention"}
    with pytest.raises(UsageError, match="no layer would be in FP8: skip_layers keeps every"):
        FP8Cache(windowed(), skip_layers=range(3))
    with pytest.raises(
        UsageError, match=r"every layer of 'mistral' has a sliding window.*FP8Cache\(model\) without max_cache_len"
    ):
        FP8Cache(windowed(), max_cache_len=1000)
    static = FP8Cache(windowed("gemma3"), max_cache_len=1000)
    assert static.fp8_layers == (1, 2) and type(static.layers[0]) is StaticSlidingWindowLayer


# Moving sequences


@torch.no_grad()
def test_crop():
    model = windowed("gemma3")
    cache, short = FP8Cache(model), FP8Cache(model)
    logits(model, cache, (600, 16))
    logits(model, short, (600,))
    cache.crop(-15)
    close(logits(model, cache, (40,), begin=601), logits(model, short, (1, 40), begin=600)[:, 1:], 1e-3)
    with pytest.raises(RuntimeError, match=r"cannot go back to 301.*activate_past_recording\(\)"):
        cache.crop(-340)
    assert int(cache.get_seq_length()) == 641  # no layer was changed
    cache.crop(-(40 + SLACK))
    close(
        logits(model, cache, (20,), begin=601 - SLACK),
        logits(model, prefilled(model, 601 - SLACK), (20,), begin=601 - SLACK),
        5e-3,
    )
    cache.crop(-int(cache.get_seq_length()))
    close(logits(model, cache, (600,)), logits(model, FP8Cache(model), (600,)), 1e-3)
    static = prefilled(model, 600, max_cache_len=LENGTH)
    with pytest.raises(RuntimeError, match="layer 0 cannot go back from 600 to 599 tokens: in 16 bits"):
        static.crop(-1)
    assert int(static.get_seq_length()) == 600


def prefilled(model, length, **options):
    cache = FP8Cache(model, **options)
    logits(model, cache, (length,))
    return cache


@torch.no_grad()
def test_a_cache_that_records_is_used_again():
    """A1 and A3: recording, and all tokens dropped, by crop and by reset."""
    model = windowed("gemma3")
    for drop in (lambda cache: cache.crop(-10), lambda cache: cache.reset()):
        cache = FP8Cache(model)
        cache.activate_past_recording()
        logits(model, cache, (10,))
        drop(cache)
        assert cache.layers[0].record_past and int(cache.get_seq_length()) == 0
        tokens = ids(2, 1500)
        logits(model, cache, (1400,), tokens=tokens)
        logits(model, cache, (50, 1), begin=1400, tokens=tokens)
        cache.crop(-1400)
        # Tokens that were dropped have made scales of the last page larger.
        tokens = torch.cat([tokens[:, :51], ids()[:, 51:61]], 1)
        want = FP8Cache(model)
        logits(model, want, (51,), tokens=tokens)
        close(
            logits(model, cache, (10,), begin=51, tokens=tokens),
            logits(model, want, (10,), begin=51, tokens=tokens),
            5e-3,
        )


@torch.no_grad()
def test_crop_of_recorded_tokens():
    model = windowed("gemma3")
    cache, want = FP8Cache(model), FP8Cache(model)
    logits(model, want, (600, 10, 30))
    logits(model, cache, (600,))
    cache.activate_past_recording()
    assert cache.layers[0].record_past and not hasattr(cache.layers[1], "record_past")
    logits(model, cache, (1, 5, 60), begin=600)
    cache.crop(-56)
    logits(model, cache, (30,), begin=610)
    cache.crop(0)
    close(logits(model, cache, (7,), begin=640), logits(model, want, (7,), begin=640), 1e-3)
    cache.layers[0].record_past = False
    assert not cache.groups[0].paged.table.recording
    cache.activate_past_recording()
    assert cache.groups[0].paged.table.recording


@pytest.mark.parametrize("length", [None, LENGTH])
@torch.no_grad()
def test_reorder_select_repeat_reset_and_copy(length):
    model = windowed("gemma3")
    cache = FP8Cache(model, max_cache_len=length)
    logits(model, cache, (600,))
    cache.reorder_cache(torch.tensor([1, 1]))
    swapped = ids()[[1, 1]]
    fresh = FP8Cache(model, max_cache_len=length)
    logits(model, fresh, (600,), tokens=swapped)
    want = logits(model, copy.deepcopy(fresh), (5, 60), begin=600, tokens=swapped)
    close(logits(model, copy.deepcopy(cache), (5, 60), begin=600, tokens=swapped), want, 1e-3)
    if length is None:
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 3]))
        close(logits(model, cache, (5, 60), begin=600, tokens=swapped), want, 1e-3)
    cache.reset()
    assert int(cache.get_seq_length()) == 0
    assert torch.equal(
        logits(model, cache, (600,), tokens=swapped),
        logits(model, FP8Cache(model, max_cache_len=length), (600,), tokens=swapped),
    )


@torch.no_grad()
def test_an_empty_cache_takes_another_batch():
    model = windowed()
    cache = FP8Cache(model)
    logits(model, cache, (10,))
    with pytest.raises(ValueError, match="this cache holds 2 sequences"):
        logits(model, cache, (10,), tokens=ids(3))
    cache.reset()
    logits(model, cache, (10,), tokens=ids(3))


@pytest.mark.parametrize("family", ["mistral", "gemma3", WIDE])
def test_files(tmp_path, family):
    model, path = windowed(family), tmp_path / "prompt.safetensors"
    cache = FP8Cache(model)
    logits(model, cache, (600,))
    cache.save(path, tokens=ids()[:, :600])
    loaded = FP8Cache.load(path, model, tokens=ids()[:, :600])
    with pytest.raises(
        UsageError, match=r"has windows of a cache with max_cache_len=None.*load it with this max_cache_len"
    ):
        FP8Cache.load(path, model, max_cache_len=LENGTH)
    assert torch.equal(logits(model, loaded, (1, 50), begin=600), logits(model, cache, (1, 50), begin=600))
    with pytest.raises(UsageError, match=r"have a window of 384; those of the given model have 512"):
        FP8Cache.load(path, windowed(family, window=512))
    with pytest.raises(UsageError, match=r"another model|no layer would be in FP8"):
        FP8Cache.load(path, windowed(family, window=100))


@torch.no_grad()
def test_an_interrupted_forward(monkeypatch):
    model = windowed("gemma3")
    for new in (10, 300):
        cache, want = FP8Cache(model), FP8Cache(model)
        for each in (cache, want):
            logits(model, each, (600,))
        with monkeypatch.context() as m:
            m.setattr(
                model.model.layers[2].self_attn.k_proj, "forward", lambda x: (_ for _ in ()).throw(KeyboardInterrupt)
            )
            with pytest.raises(KeyboardInterrupt):
                logits(model, cache, (new,), begin=600, tokens=ids(2, 1000))
        with pytest.raises(RuntimeError, match=r"do not hold the same tokens: layers .* hold 600 tokens.*crop"):
            logits(model, cache, (20,), begin=600)
        cache.crop(0)
        # The dropped tokens may have made scales grow.
        close(logits(model, cache, (20,), begin=600), logits(model, want, (20,), begin=600), 5e-3)


# Generation


def generated(model, cache, assistant=None, **options):
    config = GenerationConfig(max_new_tokens=30, do_sample=False, pad_token_id=0, eos_token_id=None, **options)
    return model.generate(ids(1, 450), past_key_values=cache, generation_config=config, assistant_model=assistant)[
        :, 450:
    ]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "gemma3", WIDE])
def test_generate(family):
    """Greedy, in chunks, static, with beams, and with drafts."""
    model = windowed(family)
    greedy = generated(model, FP8Cache(model))
    assert torch.equal(generated(model, FP8Cache(model), prefill_chunk_size=200), greedy)
    assert torch.equal(generated(model, FP8Cache(model), prompt_lookup_num_tokens=24), greedy)
    if family != "mistral":  # windows in 16 bits
        generated(model, FP8Cache(model, max_cache_len=512))
    assert torch.equal(
        *(generated(model, FP8Cache(model), num_beams=2, **more) for more in ({}, {"prefill_chunk_size": 200}))
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_drafts(family):
    """Prompt lookup and assisted decoding, with drafts as long as transformers' default (20), and longer: the greedy
    tokens, after a prompt that is longer than the window."""
    model = windowed(family)
    greedy = generated(model, FP8Cache(model))
    for options in ({"prompt_lookup_num_tokens": 10}, {"prompt_lookup_num_tokens": 40, "max_matching_ngram_size": 1}):
        assert torch.equal(generated(model, FP8Cache(model), **options), greedy)
    assistant = copy.deepcopy(model)  # whose drafts are wrong
    assistant.lm_head.register_forward_hook(lambda module, args, logits: -logits)
    assistant.set_attn_implementation("sdpa")
    assistant.generation_config.assistant_confidence_threshold = 0.0
    cache, cropped = FP8Cache(model), []
    crop = cache.crop
    cache.crop = lambda n: (cropped.append(-int(n)), crop(n))
    assert torch.equal(generated(model, cache, assistant=assistant), greedy)
    assert max(cropped) == 20, cropped


@pytest.mark.slow
@pytest.mark.parametrize(("family", "padding"), [("gemma3", 0), ("gemma3", 30), (WIDE, 30)])
@torch.no_grad()
def test_compiled_forwards(family, padding):
    """Graphs for a step and for a chunk, beside windows in 16 bits. Dynamo takes seconds for each layer: there is one
    of each kind, and of Gemma 4 one more, that shares another's K and V."""
    kinds = {"gemma3": ["sliding", "full"], WIDE: ["sliding", "full", "sliding"]}[family]
    changes = {"layer_types": [f"{kind}_attention" for kind in kinds]}
    model = windowed(
        family, num_hidden_layers=len(kinds), **changes, **({"num_kv_shared_layers": 1} if family == WIDE else {})
    )
    mask = torch.ones_like(ids()) if padding else None
    if padding:
        mask[1:, :padding] = 0
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    outs = []
    for step in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        cache, at, found = FP8Cache(model, max_cache_len=LENGTH), 500, []
        logits(model, cache, (at,), padding)
        for n in (1, 1, 1, 100, 1, 80):
            found.append(step(ids()[:, at : at + n], past_key_values=cache, attention_mask=mask).logits)
            at += n
        outs.append(torch.cat(found, 1))
    # Twice two: transformers' static windows count tokens in an integer, which Dynamo takes for a constant first and
    # then for a variable.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4
    close(outs[1], outs[0], 1e-3)


# Masks


def test_masks_of_windows():
    def mask(q, kv, offset=0, kv_offset=0, function=None, window=W, **options):
        function = sliding_window_causal_mask_function(window) if function is None else function
        return fp8_kv_mask(2, q, kv, offset, kv_offset, function, local_size=window, **options)

    padding = torch.arange(500) >= torch.tensor([[0], [30]])
    assert mask(W, W) is None
    assert mask(1, W, 499, 500 - W) is None
    found = mask(500, 500)
    assert isinstance(found, CompactMask) and found.window == W and found.rows.tolist() == [[500, 500]]
    assert mask(500, 500, attention_mask=padding).rows.tolist() == [[0, 30], [500, 500]]
    assert mask(20, W + 19, 480, 500 - W - 19).rows.tolist() == [[500, 500]]
    assert found.clone().window == W
    same = or_masks(sliding_window_causal_mask_function(W), lambda b, h, q, k: q < -1)
    assert mask(500, 500, function=same, use_vmap=True).window == W  # by its values
    for other in (
        or_masks(sliding_window_causal_mask_function(W), lambda b, h, q, k: (q < 9) & (k < 9)),
        chunked_causal_mask_function(W, torch.zeros(2, dtype=torch.int64)),
        sliding_window_causal_mask_function(W - 1),
    ):
        assert type(mask(500, 500, function=other)) is torch.Tensor
    assert type(mask(500, 500, window=W - 1)) is torch.Tensor  # no FP8 layer has it


@torch.no_grad()
def test_masks_of_another_window_are_refused():
    model = windowed("gemma3")
    cache = FP8Cache(model)
    x, q = torch.randn(1, 2, 3, 64), torch.randn(1, 4, 3, 64)
    attend = model.model.layers[0].self_attn
    k, v = cache.update(x, x, 0)
    for other in (None, W + 1):
        with pytest.raises(ValueError, match="another mask"):
            fp8_kv_attention(attend, q, k, v, CompactMask(torch.tensor([[3]], dtype=torch.int32), other))
    with pytest.raises(ValueError, match="sliding_window=400, and by the model's config its window is 384"):
        fp8_kv_attention(attend, q, k, v, None, sliding_window=400)
    right = fp8_kv_attention(attend, q, k, v, CompactMask(torch.tensor([[3]], dtype=torch.int32), W), sliding_window=W)[
        0
    ]
    assert torch.equal(right, fp8_kv_attention(attend, q, k, v, None)[0])
    k, v = cache.update(x, x, 1)
    with pytest.raises(ValueError, match="its window is None"):
        fp8_kv_attention(attend, q, k, v, None, sliding_window=W)
