"""The bytes that `plan` counts, against real caches."""

import itertools

import pytest
import torch

from fp8attn import PagedKVCache
from fp8attn.checks import LARGEST
from fp8attn.formats.spec import PageSpec
from fp8attn_tools.plan import CacheShape, human, parse_bytes, plan

LLAMA_8B = CacheShape(full_layers=32, num_kv_heads=8, head_dim=128)


@pytest.mark.parametrize(("context", "batch"), [(1, 1), (128, 1), (129, 2), (1000, 3)])
def test_fp8_bytes_are_those_of_a_cache(context, batch):
    cache = PagedKVCache(2, 64, num_layers=5, num_seqs=batch)
    cache.reserve(context)
    assert CacheShape(5, 2, 64).nbytes("fp8", context, batch) == cache.nbytes


def test_bytes_per_token():
    assert LLAMA_8B.bytes_per_token("bf16") == 131072
    # Half, and for each page of 128 tokens a header of 128 bytes a head and layer, and 4 bytes of the page table.
    assert LLAMA_8B.bytes_per_token("fp8") == 65536 + (32 * 8 * 128 + 4) / 128
    assert LLAMA_8B.nbytes("bf16", 4096, 2) == 2 * 4096 * 131072


def test_latents_are_those_of_a_cache():
    """DeepSeek V3's: 512 channels of 1 byte, 64 of 2 and a scale of 4, for 1,152 bytes."""
    shape = CacheShape(5, 1, 576, rank=512)
    cache = PagedKVCache(1, PageSpec.latent(512, 64), num_layers=5, num_seqs=3)
    cache.reserve(1000)
    assert shape.nbytes("fp8", 1000, 3) == cache.nbytes
    assert shape.bytes_per_token("fp8") == 5 * 644 + 4 / 128
    assert shape.bytes_per_token("bf16") == 5 * 1152 and shape.nbytes("bf16", 1000, 3) == 3 * 1000 * 5 * 1152
    with pytest.raises(ValueError, match=r"no FP8 cache: there are no pages k364\.int8-v300\.int8-v_in_k"):
        CacheShape(5, 1, 364, rank=300)


@pytest.mark.parametrize(("context", "batch"), [(1, 1), (100, 2), (5000, 2)])
def test_windows_are_those_of_a_cache(context, batch):
    """After a prompt and a step. At the end of its last page, a sequence has one page less than the most."""
    made = []
    for window in (512, 1024):
        cache = PagedKVCache(2, 64, num_layers=2, num_seqs=batch, window=window)
        for new, layer in itertools.product((context - 1, 1), range(2)):
            x = torch.zeros(batch * new, 2, 64)
            cache.append(layer, x, x)
        made.append(cache.nbytes)
    shape = CacheShape(0, 2, 64, windows=(512, 512, 1024, 1024))
    page = PageSpec.of(64).layout.nbytes * 2
    assert shape.nbytes("fp8", context, batch) - sum(made) in (0, batch * page * 4)
    assert shape.nbytes("bf16", context, batch) == batch * 4 * 2 * 64 * sum(min(context, w) for w in shape.windows)
    assert shape.bytes_per_token("bf16") == 0 and shape.bytes_per_token("fp8") == 2 * 4 / 128
    bf16, fp8 = plan(shape, 10**9)
    assert (
        bf16.longest_context == LARGEST and fp8.longest_context > 10**9 and fp8.largest_batch > 1.2 * bf16.largest_batch
    )


def test_sliding_layers_are_a_16_bit_window_under_both():
    mixed = CacheShape(full_layers=1, num_kv_heads=2, head_dim=64, windows_16_bit=(512, 1024))
    full = CacheShape(full_layers=1, num_kv_heads=2, head_dim=64)
    for cache in ("bf16", "fp8"):
        assert mixed.nbytes(cache, 100) - full.nbytes(cache, 100) == 2 * 100 * 2 * 2 * 64 * 2
        assert mixed.nbytes(cache, 4096) - full.nbytes(cache, 4096) == (512 + 1024) * 2 * 2 * 64 * 2
        assert mixed.bytes_per_token(cache) == full.bytes_per_token(cache)


@pytest.mark.parametrize("memory", [2 * 10**9, 3 * 2**30])
def test_fits_are_the_largest(memory):
    for fit in plan(LLAMA_8B, memory, weights=10**9, context=1000, batch=2):
        free = memory - 10**9
        assert fit.cache_bytes == LLAMA_8B.nbytes(fit.cache, 1000, 2)
        assert (
            LLAMA_8B.nbytes(fit.cache, fit.longest_context, 2)
            <= free
            < LLAMA_8B.nbytes(fit.cache, fit.longest_context + 1, 2)
        )
        assert (
            LLAMA_8B.nbytes(fit.cache, 1000, fit.largest_batch)
            <= free
            < LLAMA_8B.nbytes(fit.cache, 1000, fit.largest_batch + 1)
        )


def test_fp8_fits_twice_as_much():
    bf16, fp8 = plan(LLAMA_8B, 80 * 10**9, weights=16 * 10**9)
    assert (bf16.cache, fp8.cache) == ("bf16", "fp8")
    assert 1.99 < fp8.longest_context / bf16.longest_context < 2.01
    assert bf16.longest_context == 64 * 10**9 // 131072


def test_nothing_fits():
    assert [fit.longest_context for fit in plan(LLAMA_8B, 1000)] == [0, 0]


def test_errors():
    with pytest.raises(
        ValueError,
        match=r"the weights \(14.9 GiB\) do not fit into a memory of 7.5 GiB; pass more memory, or the weights of one "
        r"GPU",
    ):
        plan(LLAMA_8B, 8 * 10**9, weights=16 * 10**9)
    with pytest.raises(ValueError, match="must be positive"):
        plan(LLAMA_8B, 10**9, batch=0)
    with pytest.raises(ValueError, match=r"no FP8 cache: head_dim must be one of \(64, .*; got 100"):
        CacheShape(1, 1, 100)
    for shape in ((0, 2, 64), (0, 2, 64, (), (16,)), (1, 0, 64), (1, 1, 0), (1, 2, 64, (0,))):
        with pytest.raises(ValueError, match="full_layers, num_kv_heads, head_dim and windows must be positive"):
            CacheShape(*shape)
    with pytest.raises(ValueError, match=r"cache must be one of \('bf16', 'fp8'\); got 'int4'"):
        LLAMA_8B.nbytes("int4", 1)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("80GB", 80 * 10**9),
        ("24GiB", 24 * 2**30),
        ("1.5 tb", 15 * 10**11),
        ("512", 512),
        ("7k", 7000),
        ("3MiB", 3 << 20),
    ],
)
def test_parse_bytes(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "eight", "-3GB", "1 PB", "1iB"])
def test_parse_bytes_refuses(text):
    with pytest.raises(ValueError, match="is not a size; write it as 80GB, 24GiB"):
        parse_bytes(text)


def test_human():
    assert [human(n) for n in (0, 1023, 1024, 16 * 10**9, 2**45)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "14.9 GiB",
        "32.0 TiB",
    ]
