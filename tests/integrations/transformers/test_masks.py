"""The tensors, masks and keywords that reach the attention function, and those that are refused."""

import copy
import warnings

import pytest
import torch

from fp8attn.integrations.transformers import FP8Cache, fp8_kv_attention, fp8_kv_mask
from fp8attn.integrations.transformers.masks import CompactMask
from fp8attn.integrations.transformers.tensors import PagedTensor, dequantize
from fp8attn.numerics import relative_error
from tests.support.transformers_models import Oracle, close, logits, make, one_thread, plain, prompt, using  # noqa: F401


@pytest.fixture(scope="module")
def llama():
    return make()


# Tensors that carry pages


def test_paged_kv_is_its_dequantized_values():
    cache = FP8Cache(make())
    k0, v0 = torch.randn(2, 2, 2, 150, 64) + 3
    k, v = cache.update(k0, v0, 0)
    assert isinstance(k, PagedTensor)
    assert k.shape == k0.shape
    for paged, original, index in ((k, k0, 0), (v, v0, 1)):
        assert relative_error(paged + 0, original) < (0.02 if index == 0 else 0.03)  # INT8; E4M3
        for seq in range(2):
            read = cache.paged.read(0, seq)[index].transpose(0, 1)
            torch.testing.assert_close(paged[seq], read, rtol=0, atol=0)
    torch.testing.assert_close(k.transpose(2, 3) @ v, (k + 0).transpose(2, 3) @ (v + 0))
    assert torch.equal(torch.compile(lambda x: x * 2, backend="aot_eager", fullgraph=True)(k), k * 2)


def test_dequantize_is_zero_past_the_length():
    cache = FP8Cache(make(), max_cache_len=256)
    cache.update(torch.randn(1, 2, 5, 64), torch.randn(1, 2, 5, 64), 0)
    pages = cache.pages(0)
    pages.k.view(torch.uint8)[:, :, 5:] = 0x7F  # NaN
    k = dequantize(pages, "k", 256, torch.float32)
    assert k.shape == (1, 2, 256, 64)
    assert (k[:, :, 5:] == 0).all()


# Masks


def test_masks_are_none_or_compact():
    def mask(*args, **options):
        return fp8_kv_mask(2, *args, device="cpu", **options)

    def rows(*args, **options):
        return mask(*args, **options).rows.tolist()

    padding = torch.arange(100) >= torch.tensor([[0], [30]])
    everything = torch.ones(2, 100, dtype=torch.bool)
    assert mask(100, 100) is None
    assert mask(100, 100, attention_mask=everything) is None
    assert mask(1, 100, 99, attention_mask=everything) is None
    assert mask(100, 256, attention_mask=everything) is None  # an empty static cache
    assert rows(100, 100, attention_mask=padding) == [[0, 30], [100, 100]]
    assert rows(10, 100, 90) == [[100, 100]]  # a later chunk
    assert rows(1, 256, torch.tensor(99), attention_mask=padding) == [[0, 30], [100, 100]]
    assert rows(1, 256, 0) == [[1, 1]]
    assert mask(1, 100, 99, attention_mask=padding).shape == (1, 1, 2, 2)
    with pytest.raises(ValueError, match="attention_mask is of 60 tokens, and the cache holds 50 and gets 50 new ones"):
        mask(50, 100, 50, attention_mask=everything[:, :60])
    future = torch.ones(2, 256, dtype=torch.bool)
    assert mask(100, 256, attention_mask=future) is None
    assert mask(32, 32, local_size=16, mask_function=lambda b, h, q, k: (k <= q) & (k > q - 16)).shape == (2, 1, 32, 32)


def test_a_compact_mask_survives_copies_and_nothing_else():
    mask = CompactMask(torch.tensor([[0, 30], [100, 100]], dtype=torch.int32))
    for copied in (
        mask.to("cpu", copy=True),
        mask.clone(),
        mask.detach(),
        torch.compile(torch.clone, backend="aot_eager", fullgraph=True)(mask),
        mask[:, :, -1:, :],  # the last queries
        torch.compile(lambda x: x[:, :, -1:], backend="aot_eager", fullgraph=True)(mask),
    ):
        assert isinstance(copied, CompactMask) and copied.shape == (1, 1, 2, 2) and torch.equal(copied.rows, mask.rows)
    other_parts = mask[..., :1], mask[:, :, 1:], mask[..., -1:], mask[:, :, -2:-1]
    for other in (*other_parts, mask + 0, mask.bool(), mask.to(torch.int64), mask.clone().view(2, 2)):
        assert type(other) is torch.Tensor


def test_an_integer_mask_of_a_callers_is_never_taken_for_a_compact_one(llama):
    """Neither in FP8 layers, nor in 16-bit layers, where integers would be added to scores."""
    blocks = torch.block_diag(torch.ones(15, 15), torch.ones(15, 15)).tril()[None, None]
    for length in (30, 2):
        for dtype in (torch.int32, torch.int64, torch.uint8, torch.bool, torch.float32):
            mask = blocks[:, :, -length:, -length:].to(dtype)
            with (
                torch.no_grad(),
                pytest.raises(ValueError, match=r"another mask \(1, 1, .*set_attn_implementation\('sdpa'\)"),
            ):
                llama(prompt(1, length), past_key_values=FP8Cache(llama), attention_mask=mask)
            if dtype in (torch.int32, torch.int64, torch.uint8):
                for model in (llama, make("gpt-oss-sinks")):
                    with (
                        torch.no_grad(),
                        pytest.raises(ValueError, match=r"mask is bool .* got torch\.u?int.*mask\.bool\(\)"),
                    ):
                        model(prompt(1, length), past_key_values=plain(model.config), attention_mask=mask)
    with torch.no_grad():  # a 16-bit layer takes a bool mask
        ours = llama(prompt(1, 30), past_key_values=plain(llama.config), attention_mask=blocks.bool()).logits
        assert relative_error(ours, llama(prompt(1, 30)).logits) > 0.1
        with using(llama, "eager"):
            mask = torch.zeros(1, 1, 30, 30).masked_fill(~blocks.bool(), -1e9)
            close(ours, llama(prompt(1, 30), past_key_values=plain(llama.config), attention_mask=mask).logits, 1e-5)


@pytest.mark.parametrize("kind", ["left", "holes", "right-then-more", "short"])
def test_a_mask_is_checked_in_compiled_code(kind):
    llama, ids = make(num_hidden_layers=1), prompt()  # Dynamo takes seconds for each layer
    mask = torch.ones_like(ids)
    mask[0, :20] = 0
    cache = FP8Cache(llama, max_cache_len=160)
    with torch.no_grad():
        llama(ids[:, :-1], attention_mask=mask[:, :-1], past_key_values=cache)
        expected = llama(ids[:, -1:], attention_mask=mask, past_key_values=copy.deepcopy(cache)).logits
        if kind == "holes":
            mask[1, 5:9] = 0
        elif kind == "right-then-more":
            mask[1, -4:-1] = 0
        elif kind == "short":
            mask = mask[:, :-5]
        torch._dynamo.reset()
        step = torch.compile(llama, backend="aot_eager", fullgraph=True)
        if kind == "left":
            close(step(ids[:, -1:], attention_mask=mask, past_key_values=cache).logits, expected, 1e-5)
        else:
            with pytest.raises(
                RuntimeError, match="in compiled code an attention mask must have padding on the left only"
            ):
                step(ids[:, -1:], attention_mask=mask, past_key_values=cache)


def test_an_unknown_mask_function_is_compared_with_the_causal_one():
    def mask(blocks):
        function = lambda b, h, q, k: (k <= q) | ((blocks[q] == blocks[k]) & (blocks[q] >= 0))  # noqa: E731
        return fp8_kv_mask(1, 2000, 2000, mask_function=function, allow_is_causal_skip=False)

    blocks = torch.full((2000,), -1)
    assert mask(blocks) is None
    blocks[1990:] = 0  # an image
    assert mask(blocks).shape == (1, 1, 2000, 2000)


# What is refused


@pytest.mark.parametrize("kind", ["holes", "right-then-more", "short", "4-d"])
def test_masks_that_are_refused(llama, kind):
    ids = prompt()
    mask = torch.ones_like(ids)
    cache = FP8Cache(llama)
    with torch.no_grad():
        if kind == "holes":
            mask[0, 5:9] = 0
        elif kind == "4-d":
            mask = torch.ones(2, 1, 150, 150, dtype=torch.bool).tril()
        else:
            first = torch.ones_like(ids)
            first[0, -3:] = 0
            llama(ids, attention_mask=first, past_key_values=cache)
            mask = torch.cat([first, first[:, :1]], 1) if kind == "right-then-more" else mask[:, :1]
            ids = ids[:, :1]
        message = r"another mask.*padding_side = 'left'.*set_attn_implementation\('sdpa'\)"
        if kind == "short":
            message = (
                "attention_mask is of 1 tokens, and the cache holds 150 and gets 1 new ones: pass a mask of all of them"
            )
        with pytest.raises(ValueError, match=message):
            llama(ids, attention_mask=mask, past_key_values=cache)


def test_a_refused_mask_works_dequantized(llama):
    ids = prompt()
    mask = torch.ones_like(ids)
    mask[0, 5:9] = 0
    cache = FP8Cache(llama)
    with using(llama, "sdpa"):
        close(logits(llama, cache, ids, mask), logits(llama, Oracle(llama.config), ids, mask))
    with torch.no_grad():  # and under fp8_kv without an FP8 layer that would see it
        ours = llama(ids, attention_mask=mask).logits
        with using(llama, "sdpa"):
            close(ours, llama(ids, attention_mask=mask).logits)


@pytest.fixture
def attend():
    """Calls `fp8_kv_attention` on random Q, K and V, with these keywords."""
    cache = FP8Cache(make())
    k, v = cache.update(torch.randn(1, 2, 9, 64), torch.randn(1, 2, 9, 64), 0)
    q = torch.randn(1, 4, 9, 64)
    return lambda **keywords: fp8_kv_attention(torch.nn.Module(), q, k, v, None, **keywords)[0]


@pytest.mark.parametrize(
    "keyword",
    [
        {"dropout": 0.1},
        {"sliding_window": 16},
        {"position_bias": torch.zeros(1)},
        {"cu_seq_lens_q": torch.zeros(2)},
        {"output_attentions": True},
        {"attention_temperature": 2.0},  # no transformers has it
    ],
)
def test_keywords_that_change_attention_are_refused(attend, keyword):
    with pytest.raises(ValueError, match=next(iter(keyword))):
        attend(**keyword)


def test_keywords_that_change_nothing_are_silent_and_unknown_ones_warn_once(attend, monkeypatch):
    monkeypatch.setattr("fp8attn.integrations.transformers.attention._warned", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = attend(
            sliding_window=None, output_attentions=False, unknown=None, position_ids=torch.arange(9)[None], labels=None
        )
    with pytest.warns(
        UserWarning,
        match=r"called with x, y, which fp8attn does not know.*set_attn_implementation\('sdpa' or 'eager'\)",
    ):
        assert torch.equal(attend(y=1, x=torch.ones(2)), expected)
    with pytest.warns(UserWarning, match="called with z, which"):
        attend(x=1, z=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend(x=1, y=1, z=1)


def test_packed_prefixes_and_bidirectional_models_are_refused_or_served(llama):
    ids = prompt(1, 20)
    positions = torch.cat([torch.arange(12), torch.arange(8)])[None]
    with torch.no_grad():  # packed: transformers knows it without a cache only, and that is sdpa
        ours = llama(ids, position_ids=positions, use_cache=False).logits
        with using(llama, "sdpa"):
            close(ours, llama(ids, position_ids=positions, use_cache=False).logits)
    model = make("gemma3", use_bidirectional_attention=True)
    with torch.no_grad(), pytest.raises(ValueError, match="another mask"):
        model(ids, past_key_values=FP8Cache(model))
