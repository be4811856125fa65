"""Public functions refuse what is no tensor, number or bool by name, and say what was given."""

import math

import numpy as np
import pytest
import torch

import fp8attn
from fp8attn import KVPages, PagedKVCache, append, attention, fake_quantize, scaled_dot_product_attention

NO_TENSORS = [None, [[1.0]], np.zeros((2, 2, 64)), "text"]


def full_cache() -> PagedKVCache:
    cache = PagedKVCache(2, 64, num_seqs=2)
    cache.append(0, torch.zeros(2, 2, 64), torch.zeros(2, 2, 64))
    return cache


@pytest.mark.parametrize("given", NO_TENSORS, ids=lambda x: type(x).__name__)
def test_what_is_no_tensor(given):
    cache, x, dense = full_cache(), torch.zeros(2, 2, 64), torch.zeros(1, 2, 2, 64)
    calls = {
        "k": [
            lambda: cache.append(0, given, x),
            lambda: append(cache.pages(0), given, x),
            lambda: fake_quantize(given, dense),
        ],
        "v": [
            lambda: cache.append(0, x, given),
            lambda: append(cache.pages(0), x, given),
            lambda: fp8attn.from_dense(dense, given),
        ],
        "q": [lambda: cache.attention(0, given), lambda: attention(given, cache.pages(0))],
        "query": [
            lambda: scaled_dot_product_attention(given, dense, dense),
            lambda: fp8attn.scaled_dot_product_attention_quantized(given, dense, dense),
            lambda: fp8attn.rope_scaled_dot_product_attention(given, dense, dense, x, x),
        ],
        "key": [lambda: scaled_dot_product_attention(dense, given, dense)],
        "value": [lambda: scaled_dot_product_attention(dense, dense, given)],
    }
    if given is not None:
        calls["rope_cos"] = [lambda: fp8attn.rope_scaled_dot_product_attention(dense, dense, dense, given, x)]
        calls["k_mean"] = [lambda: PagedKVCache(2, 64, k_mean=[given])]
    for name, given_calls in calls.items():
        for call in given_calls:
            with pytest.raises(
                ValueError, match=rf"^{name} must be a torch\.Tensor \[.*\]; got {type(given).__name__} "
            ):
                call()
    assert cache.lengths == (1, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": math.inf}, r"softcap must be a finite number > 0 \(None for no cap\); got float inf"),
        ({"softcap": math.nan}, "softcap must be a finite number"),
        ({"softcap": "3"}, "softcap must be a finite number.*; got str '3'"),
        (
            {"softmax_scale": math.nan},
            r"softmax_scale must be a finite number \(None for 1 / sqrt\(head_dim\)\); got float nan",
        ),
        ({"softmax_scale": -math.inf}, "softmax_scale must be a finite number"),
        ({"softmax_scale": "x"}, "softmax_scale must be a finite number.*; got str 'x'"),
        ({"causal": "no"}, "causal must be True or False; got str 'no'"),
        ({"exact": "false"}, "exact must be True or False; got str 'false'"),
        ({"return_lse": 1}, "return_lse must be True or False; got int 1"),
        ({"window": True}, "window must be an integer.*window=True"),
        ({"window": 10**20}, "window must be an integer from 1 to 9,223,372,036,854,775,807"),
        (
            {"cu_seqlens_q": torch.tensor([0, 1, 2]).int(), "max_seqlen_q": True},
            "max_seqlen_q must be a Python int >= 0.*got True",
        ),
    ],
)
def test_options_of_attention(options, message):
    cache = full_cache()
    with pytest.raises(ValueError, match=message):
        attention(torch.zeros(2, 2, 64), cache.pages(0), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": math.nan}, r"scale must be a finite number \(None for 1 / sqrt\(head_dim\)\); got float nan"),
        ({"scale": math.inf}, "scale must be a finite number"),
        ({"scale": "x"}, "scale must be a finite number"),
        ({"is_causal": "no"}, "is_causal must be True or False; got str 'no'"),
        ({"rotate_keys": "no"}, "rotate_keys must be True or False"),
    ],
)
def test_options_of_dense_attention(options, message):
    with pytest.raises(ValueError, match=message):
        scaled_dot_product_attention(*[torch.zeros(1, 2, 8, 64)] * 3, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rotate_keys": "no"}, "rotate_keys must be True or False; got str 'no'"),
        ({"num_layers": True}, "must be positive whole numbers; got .*num_layers=True"),
        ({"num_seqs": 10**9}, "num_seqs must be at most 1,048,576, .* got num_seqs=1,000,000,000 and num_layers=1"),
        ({"max_seqlen": 10**12}, "must be positive whole numbers; got .*the most: 2,147,483,647"),
        ({"num_pages": 10**12}, "must be positive whole numbers; got .*the most: 2,147,483,647"),
        (
            {"num_seqs": 2**20, "max_seqlen": 2**30},
            "need 8,796,093,022,208 pages, and there can be at most 2,147,483,647",
        ),
        (
            {"k_mean": torch.full((2, 64), math.nan)},
            "k_mean must be finite; it has 128 elements that are NaN or infinite",
        ),
        ({"v_mean": torch.full((2, 64), math.inf)}, "v_mean must be finite"),
    ],
)
def test_options_of_caches(options, message):
    with pytest.raises(ValueError, match=message):
        PagedKVCache(2, 64, **options)


def test_memory_is_allocated_before_lists_of_its_pages(monkeypatch):
    """A pool that does not fit fails in torch, before the host has a list of a billion numbers."""
    made = []
    monkeypatch.setattr("fp8attn.cache.paged.PageTable", lambda *args: made.append(args))
    with pytest.raises(RuntimeError, match="allocate"):
        PagedKVCache(8, 64, num_pages=2 * 10**9)
    assert not made


@pytest.mark.parametrize("mean", [torch.full((2, 64), math.nan), torch.full((2, 64), -math.inf)])
def test_means_of_pages_are_finite(mean):
    x = torch.zeros(1, 2, 8, 64)
    for call in (
        lambda: KVPages.empty(1, 2, 64, 1, 1, v_mean=mean),
        lambda: fp8attn.from_dense(x, x, k_mean=mean),
        lambda: fake_quantize(x, x, k_mean=mean),
    ):
        with pytest.raises(ValueError, match="_mean must be finite; it has 128 elements"):
            call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda cache: cache.append("0", torch.zeros(2, 2, 64), torch.zeros(2, 2, 64)),
            "the cache has the layers 0 to 0; got '0'",
        ),
        (lambda cache: cache.attention(None, torch.zeros(2, 2, 64)), "the layers 0 to 0; got None"),
        (lambda cache: cache.pages(-1), "the layers 0 to 0; got -1"),
        (lambda cache: cache.pages(0.0), "the layers 0 to 0; got 0.0"),
        (lambda cache: cache.select(0), "indices must be numbers of sequences, or a mask with a bool for each; got 0"),
        (lambda cache: cache.select("01"), "indices must be numbers of sequences"),
        (lambda cache: cache.select(None), "indices must be numbers of sequences"),
        (lambda cache: cache.copy(0, 1, 1.5), "sequence 0 has 1 tokens, so length must be 0 to 1; got 1.5"),
        (lambda cache: cache.copy(0, 1, "x"), "length must be 0 to 1; got 'x'|got x"),
        (lambda cache: cache.reserve(10**12), "lengths must be one count of tokens >= 0.*the most: 2,147,483,647"),
        (lambda cache: cache.truncate("x"), "lengths must be one count"),
        (lambda cache: cache.read(0, "x"), "the sequences 0 to 1; got 'x'"),
        (
            lambda cache: KVPages.empty(True, 2, 64, 1, 1),
            "num_pages must be a whole number from 0 to .*; got bool True",
        ),
    ],
)
def test_numbers_of_layers_sequences_and_tokens(call, message):
    cache = full_cache()
    with pytest.raises(ValueError, match=message):
        call(cache)
    assert cache.lengths == (1, 1)


def test_the_cache_of_transformers_is_imported_when_it_is_asked_for():
    from fp8attn.integrations.transformers import FP8Cache

    assert fp8attn.FP8Cache is FP8Cache
