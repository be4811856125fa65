"""Steps of a cache: tokens that come in parts, sequences without tokens, tokens for which there is no room, and
positions that begin later."""

import pytest
import torch
import torch.nn.functional as F

import fp8attn
from fp8attn import OutOfPagesError, PagedKVCache
from fp8attn.formats.rope import apply_rope
from fp8attn.numerics import relative_error
from tests.support.kernel_cases import poison_empty

HEADS, GROUP, DIM = 2, 2, 64
SPLITS = (1, 127, 128, 129)


def tokens(count, seed=0):
    """Q, K and V. The mean of K and V is far from zero, so that static means matter."""
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(count, heads, DIM, generator=draw) for heads in (GROUP * HEADS, HEADS, HEADS))
    return q, k + 3, v - 2


def attended(cache, q, k, v, lengths=None):
    cache.append(0, k, v, lengths=lengths)
    return cache.attention(0, q)


# sglang#24198, sglang#19603
@pytest.mark.parametrize("key_dtype", ["int8", "e4m3"])
@pytest.mark.parametrize("form", [{}, {"max_seqlen": 300}])
@pytest.mark.parametrize("split", SPLITS)
def test_a_prompt_in_two_appends_is_that_of_one(key_dtype, form, split):
    """Reported: what is already cached is read without its scales. Here both parts have static means. Pages are equal
    to the bit, and so is the attention of the second part's tokens."""
    means = {"k_mean": torch.full((HEADS, DIM), 3.0), "v_mean": torch.full((HEADS, DIM), -2.0)}
    whole, parts, bare = (
        PagedKVCache(HEADS, DIM, key_dtype=key_dtype, **form, **given) for given in (means, means, {})
    )
    q, k, v = tokens(260)
    expected, plain = (attended(cache, q, k, v) for cache in (whole, bare))
    found = torch.cat([attended(parts, q[at], k[at], v[at]) for at in (slice(0, split), slice(split, None))])
    assert all(map(torch.equal, parts.read(0, 0), whole.read(0, 0)))
    assert torch.equal(found[split:], expected[split:])
    exact = F.scaled_dot_product_attention(
        *(x.transpose(0, 1).double() for x in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(0, 1)  # fmt: skip
    error, without = (relative_error(x + 2, exact + 2) for x in (found, plain))  # beside what V's mean adds
    print(key_dtype, split, error, without)
    assert error < 0.04 < without


# vllm#37442
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("form", [{}, {"max_seqlen": 256}])
def test_sequences_without_tokens_change_no_others(backend, form, monkeypatch):
    """Reported: rows of empty sequences are never written, and what is in them spreads to others by a maximum of the
    batch. Here all memory is NaN until it is written."""
    poison_empty(monkeypatch)
    cache, alone = (PagedKVCache(HEADS, DIM, num_seqs=n, backend=backend, **form) for n in (4, 2))
    for step, lengths in enumerate(([140, 0, 3, 0], [1, 0, 1, 0])):
        given = [x.half() for x in tokens(sum(lengths), step)]
        found, expected = attended(cache, *given, lengths), attended(alone, *given, [n for n in lengths if n])
        assert found.isfinite().all() and torch.equal(found, expected)
    assert cache.lengths == (141, 0, 4, 0)
    q, bounds = tokens(2)[0].half(), torch.tensor([0, 1, 1, 2, 2], dtype=torch.int32)
    out = torch.full_like(q, torch.nan)
    given = {"backend": backend, "max_seqlen_q": 1}
    fp8attn.attention(q, cache.pages(0), cu_seqlens_q=bounds, out=out, **given)
    assert torch.equal(out, fp8attn.attention(q, alone.pages(0), cu_seqlens_q=bounds[[0, 1, 3]], **given))
    nothing = fp8attn.attention(q[:0], cache.pages(0), cu_seqlens_q=bounds * 0, **given)
    assert nothing.shape == (0, GROUP * HEADS, DIM)


# llama.cpp#9383, llama.cpp#9743, llama.cpp#7230
@pytest.mark.parametrize("form", [{"num_pages": 2}, {"max_seqlen": 256}])
def test_a_full_cache_refuses_tokens_and_drops_none(form):
    """Reported: a context shift drops the oldest tokens of a full cache, and crashes where it turns quantized keys by
    RoPE. There is no such shift here: tokens that do not fit are refused."""
    cache = PagedKVCache(HEADS, DIM, **form)
    q, k, v = tokens(257)
    cache.append(0, k[:250], v[:250])
    held = cache.read(0, 0)
    for count in (7, 257):
        with pytest.raises((OutOfPagesError, RuntimeError, ValueError), match=r"num_pages|max_seqlen"):
            cache.append(0, k[:count], v[:count])
        assert cache.lengths == (250,) and all(map(torch.equal, cache.read(0, 0), held))
    with pytest.raises(ValueError, match="length"):
        cache.truncate([-7])
    assert attended(cache, q[:6], k[250:256], v[250:256]).isfinite().all() and cache.lengths == (256,)


# llama.cpp#7230
@pytest.mark.parametrize("interleaved", [False, True])
def test_positions_may_begin_anywhere(interleaved):
    """Keys are stored as RoPE has turned them, so their bytes are those of their positions. Attention depends on
    differences of positions only."""
    count, first = 200, 1000
    q, k, v = tokens(count)
    outs = []
    for begin in (0, first):
        angle = torch.outer(
            torch.arange(begin, begin + count).double(), 1e4 ** (-torch.arange(0, 1, 2 / DIM, dtype=torch.float64))
        )
        tables = angle.cos().float(), angle.sin().float()
        turned = [apply_rope(x.transpose(0, 1), *tables, interleaved=interleaved).transpose(0, 1) for x in (q, k)]
        cache = PagedKVCache(HEADS, DIM)
        cache.append(0, turned[1], v)
        outs.append(cache.attention(0, turned[0]))
    error = relative_error(*outs)
    assert 0 < error < 0.01  # other angles, other roundings to 8 bits
