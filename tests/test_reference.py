"""The reference against torch's own SDPA in float64, with masks built here from their definitions."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8attn import AttentionParams, KVPages, PagedKVCache, append, attention, from_dense, reference
from fp8attn.formats.codec import CODECS
from fp8attn.formats.page_layout import PAGE_SIZE
from fp8attn.numerics import relative_error

EXACT = 2e-6  # FP32 arithmetic against float64


def make(lengths, heads=2, dim=64, seed=0, **options):
    torch.manual_seed(seed)
    cache = PagedKVCache(heads, dim, num_seqs=len(lengths), **options)
    total = sum(lengths)
    cache.append(0, torch.randn(total, heads, dim) + 1, torch.randn(total, heads, dim) + 1, lengths=lengths)
    return cache


def expected(q, cache, seq, *, causal=True, window=None, softcap=None, sinks=None, leftpad=0, scale=None):
    """One sequence's attention from the definition, in float64: returns `out [n, Hq, D]` and `lse [n, Hq]`."""
    k, v = (x.double().transpose(0, 1).repeat_interleave(q.shape[1] // x.shape[1], 0) for x in cache.read(0, seq))
    scores = q.double().transpose(0, 1) @ k.transpose(1, 2) * (scale or q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    n, length = scores.shape[1:]
    for i in range(n):
        for j in range(length):
            at = length - n + i
            if (causal and j > at) or (window and j <= at - window) or j < leftpad:
                scores[:, i, j] = -torch.inf
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, n, 1)], -1)
    p = scores.softmax(-1)[..., :length]
    return (p @ v).transpose(0, 1), scores.logsumexp(-1).T


@pytest.mark.parametrize("rotate_keys", [True, False])
@pytest.mark.parametrize("key_dtype", ["int8", "e4m3"])
def test_plain_causal_is_torch_sdpa(key_dtype, rotate_keys):
    cache = make([150, 150], key_dtype=key_dtype, rotate_keys=rotate_keys)
    q = torch.randn(300, 4, 64)
    k, v = (torch.stack([cache.read(0, s)[i] for s in range(2)]).transpose(1, 2) for i in range(2))
    want = F.scaled_dot_product_attention(
        q.view(2, 150, 4, 64).transpose(1, 2).double(), k.double(), v.double(), is_causal=True, enable_gqa=True
    )
    assert relative_error(attention(q, cache.pages(0)), want.transpose(1, 2).flatten(0, 1)) < EXACT


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"window": 5},
        {"window": 200},
        {"softcap": 3.0},
        {"softmax_scale": 0.3},
        {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])},
        {"window": 7, "softcap": 2.0, "sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])},
    ],
    ids=lambda o: "+".join(o) or "plain",
)
def test_ragged_chunks_with_every_option(options):
    """Sequences of different lengths, each with queries for a different number of its last tokens. One has none."""
    lengths, queries = [130, 40, 7, 129], [3, 40, 0, 1]
    cache = make(lengths)
    q = torch.randn(sum(queries), 4, 64)
    cu = torch.tensor([0, *queries]).cumsum(0, dtype=torch.int32)
    out, lse = attention(q, cache.pages(0), cu_seqlens_q=cu, max_seqlen_q=40, return_lse=True, **options)
    named = {"scale" if name == "softmax_scale" else name: value for name, value in options.items()}
    for seq, block in enumerate(zip(q.split(queries), out.split(queries), lse.split(queries), strict=True)):
        if queries[seq]:
            want, want_lse = expected(block[0], cache, seq, **named)
            assert relative_error(block[1], want) < EXACT
            torch.testing.assert_close(block[2].double(), want_lse, rtol=0, atol=1e-5)


def test_left_padding_hides_the_first_tokens():
    cache = make([20, 20])
    q = torch.randn(40, 2, 64)
    out, lse = attention(q, cache.pages(0), leftpad_k=torch.tensor([6, 0], dtype=torch.int32), return_lse=True)
    want, _ = expected(q[6:20], cache, 0, leftpad=6)  # rows that see something
    assert relative_error(out[6:20], want) < EXACT
    assert (out[:6] == 0).all() and (lse[:6] == -torch.inf).all()  # padding sees nothing
    assert relative_error(out[20:], expected(q[20:], cache, 1)[0]) < EXACT


def test_more_queries_than_keys_see_nothing_before_the_start():
    cache = make([3])
    out, lse = reference.attention(torch.randn(5, 2, 64), cache.pages(0), AttentionParams(None, 5, True, 0.125))
    assert (out[:2] == 0).all() and (lse[:2] == -torch.inf).all() and out[2:].abs().min() > 0


def test_an_empty_cache_gives_zeros_and_a_sink_takes_all():
    cache = PagedKVCache(2, 64)
    q = torch.randn(1, 2, 64)
    out, lse = attention(q, cache.pages(0), causal=False, return_lse=True)
    assert (out == 0).all() and (lse == -torch.inf).all()
    out, lse = attention(q, cache.pages(0), causal=False, sinks=torch.tensor([1.0, 2.0]), return_lse=True)
    assert (out == 0).all() and lse.tolist() == [[1.0, 2.0]]


def test_long_prompts_are_computed_in_blocks():
    cache = make([1100], heads=1)
    q = torch.randn(1100, 1, 64)
    whole = attention(q, cache.pages(0))
    tail = attention(q[700:], cache.pages(0))
    assert relative_error(whole[700:], tail) < EXACT


@pytest.mark.parametrize("size", [65504.0, 1e6])
def test_weights_add_up_to_one_at_any_scores(size):
    """Equal keys, and values of one: the output is the sum of the weights."""
    torch.manual_seed(0)
    cache = PagedKVCache(2, 64, key_dtype="e4m3", rotate_keys=False)
    cache.append(0, torch.full((100, 2, 64), size), torch.ones(100, 2, 64))
    q = torch.randn(100, 2, 64)
    out, lse = attention(q, cache.pages(0), causal=False, return_lse=True)
    assert lse.abs().max() > 2 * size
    assert (out - 1).abs().max() < EXACT
    scores = q.double().sum(-1) * cache.read(0, 0)[0][0, 0, 0].double() / 8
    torch.testing.assert_close(lse.double(), scores + torch.tensor(100.0).double().log(), rtol=0, atol=3e-6 * size)


def test_the_largest_values_of_float16_stay_finite():
    torch.manual_seed(0)
    k, v = (
        torch.full((100, 2, 64), value, dtype=torch.float16) for value in (65504.0, 61440.0)
    )  # E4M3 has 61440, and 65536 after it
    cache = PagedKVCache(2, 64)
    cache.append(0, k, v)
    out = attention(torch.randn(100, 2, 64).half(), cache.pages(0), causal=False)
    assert (out == 61440.0).all()


def test_autocast_leaves_the_arithmetic_alone():
    cache = make([150])
    q = torch.randn(150, 4, 64)
    want = attention(q, cache.pages(0))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attention(q, cache.pages(0)), want)


def test_storage_error_of_normal_data():
    """Rounding to E4M3's 3 mantissa bits is 2.6% of noise in K and in V. K's passes through a softmax whose scores have
    a deviation of 1: the weights, and so the output, get 2.6% of noise of it too: 3.7% in all. INT8 keys have 1.2% of
    noise: 2.9% in all. Rotated normal data are normal data, so the rotation changes the numbers and no error; by how
    much the outputs differ is what both errors are.
    """
    torch.manual_seed(0)
    k, v, q = torch.randn(1000, 2, 128), torch.randn(1000, 2, 128), torch.randn(64, 4, 128)
    exact = F.scaled_dot_product_attention(*(x.transpose(0, 1).double() for x in (q, k, v)), enable_gqa=True).transpose(
        0, 1
    )
    for key_dtype, low, high in (("e4m3", 0.033, 0.042), ("int8", 0.025, 0.033)):
        out = {}
        for rotate_keys in (True, False):
            cache = PagedKVCache(2, 128, key_dtype=key_dtype, rotate_keys=rotate_keys)
            cache.append(0, k, v)
            out[rotate_keys] = attention(q, cache.pages(0), causal=False)
            assert low < relative_error(out[rotate_keys], exact) < high, (key_dtype, rotate_keys)
        # V's errors are the same ones and cancel; K's are independent.
        of_keys = {"e4m3": 0.026, "int8": 0.012}[key_dtype] * 2**0.5
        assert 0.7 * of_keys < relative_error(out[True], out[False]) < 1.3 * of_keys


def test_rotation_takes_the_error_of_channels_that_stand_out():
    """One channel of K is 50 times larger than the others. In INT8 its step is 50 times theirs; the rotation
    distributes it over 128 channels."""
    torch.manual_seed(0)
    k, v, q = torch.randn(500, 1, 128), torch.randn(500, 1, 128), torch.randn(64, 2, 128)
    k[..., 9] *= 50
    q[..., 9] /= 50
    exact = F.scaled_dot_product_attention(*(x.transpose(0, 1).double() for x in (q, k, v)), enable_gqa=True).transpose(
        0, 1
    )
    error = {}
    for rotate_keys in (True, False):
        cache = PagedKVCache(1, 128, rotate_keys=rotate_keys)
        cache.append(0, k, v)
        error[rotate_keys] = relative_error(attention(q, cache.pages(0), causal=False), exact)
    assert error[True] < error[False] / 3, error


@pytest.mark.parametrize("rotate_keys", [True, False])
@pytest.mark.parametrize("key_dtype", list(CODECS))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cuts=st.lists(st.integers(0, 300), max_size=8), seed=st.integers(0, 2**31), spread=st.integers(0, 12))
def test_bytes_do_not_depend_on_how_appends_are_cut(key_dtype, rotate_keys, cuts, seed, spread):
    """Tokens of many sizes, so that scales grow within calls and between them."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp2(torch.randint(-spread, spread + 1, (300, 1, 1), generator=generator).float())
    k, v = (torch.randn(300, 2, 64, generator=generator) * size for _ in "kv")
    v[generator.initial_seed() % 300] = torch.inf
    means = {"k_mean": torch.randn(2, 64, generator=generator)} if seed % 2 else {}
    pools = []
    for bounds in ([0, 300], [0, *sorted(cuts), 300]):
        pages = KVPages.empty(3, 2, 64, num_seqs=1, max_pages=3, key_dtype=key_dtype, rotate_keys=rotate_keys, **means)
        pages.page_table.copy_(torch.tensor([[2, 0, 1]]))
        for start, end in pairwise(bounds):
            append(pages, k[start:end], v[start:end], backend="reference")
        assert pages.cache_seqlens.tolist() == [300]
        pools.append(pages.pool)
    assert torch.equal(*pools)


def test_a_nan_in_a_key_marks_the_token_in_e4m3_and_the_page_in_int8():
    """INT8 has no NaN, and a NaN may not be hidden: the page's scale says it. Other pages and heads, and V, are as they
    are without.
    """
    k, v = torch.randn(2, 200, 2, 64, generator=torch.Generator().manual_seed(0))
    k[3, 1, 5] = torch.nan
    for key_dtype, tokens in (("int8", PAGE_SIZE), ("e4m3", 1)):
        cache, clean = (PagedKVCache(2, 64, key_dtype=key_dtype) for _ in range(2))
        cache.append(0, k, v)
        clean.append(0, k.nan_to_num(0.0), v)
        got, _ = cache.read(0, 0)
        broken = got.isnan().all(-1)
        assert int(broken.sum()) == tokens == int(got.isnan().any(-1).sum()) and broken[3, 1]
        assert torch.equal(cache.read(0, 0)[1], clean.read(0, 0)[1])
        assert torch.equal(got[:, 0], clean.read(0, 0)[0][:, 0]) and torch.equal(got[128:], clean.read(0, 0)[0][128:])


def test_the_largest_numbers_of_fp16_round_to_65536_which_is_inf_in_fp16():
    """E4M3 has 61440 and 65536 as neighbors. docs/numerics.md names the limit, 63488."""
    v = torch.tensor([61440.0, 63456.0, 63488.0, 65504.0, -65504.0]).half().view(5, 1, 1).repeat(1, 1, 64)
    cache = PagedKVCache(1, 64)
    cache.append(0, v, v)
    assert cache.read(0, 0)[1][:, 0, 0].tolist() == [61440.0, 61440.0, 65536.0, 65536.0, -65536.0]
    assert cache.read(0, 0, torch.float16)[1][:, 0, 0].tolist() == [61440.0, 61440.0, torch.inf, torch.inf, -torch.inf]


def test_inf_saturates_but_two_in_a_rotated_k_are_nan():
    """The rotation adds and subtracts channels: one Inf makes all of its block +-Inf, two of them may cancel."""
    k, v = torch.randn(2, 30, 1, 64, generator=torch.Generator().manual_seed(0))
    k[3, 0, 5] = v[4, 0, 6] = torch.inf
    for rotate_keys in (False, True):
        for count in (1, 2):
            k[3, 0, 9] = torch.inf if count == 2 else 0.5
            cache = PagedKVCache(1, 64, key_dtype="e4m3", rotate_keys=rotate_keys)
            cache.append(0, k, v)
            got, got_v = cache.read(0, 0)
            assert got_v.isfinite().all()
            assert got[3].isnan().any() == (rotate_keys and count == 2) and got[torch.arange(30) != 3].isfinite().all()


def test_one_large_key_makes_the_others_of_its_int8_page_coarser():
    """By what docs/numerics.md says, and not those of E4M3."""
    k = torch.randn(128, 1, 128, generator=torch.Generator().manual_seed(0))
    for key_dtype, factor, low, high in (
        ("int8", 30.0, 0.15, 0.25),
        ("int8", 100.0, 0.5, 0.75),
        ("e4m3", 30.0, 0.02, 0.03),
    ):
        x = k.clone()
        x[60] *= factor
        cache = PagedKVCache(1, 128, key_dtype=key_dtype)
        cache.append(0, x, x)
        others = torch.arange(128) != 60
        assert low < relative_error(cache.read(0, 0)[0][others], x[others]) < high, (key_dtype, factor)


def test_a_static_mean_takes_an_offset_off():
    """K and V have an offset of 100, and a mean of 100 is given: the storage error is that of the varying part."""
    torch.manual_seed(0)
    k, v, mean = torch.randn(256, 2, 64), torch.randn(256, 2, 64), torch.full((2, 64), 100.0)
    plain, shifted = PagedKVCache(2, 64), PagedKVCache(2, 64, k_mean=mean, v_mean=mean)
    plain.append(0, k, v)
    shifted.append(0, k + 100, v + 100)
    for got, want, tolerance in zip(shifted.read(0, 0), plain.read(0, 0), (0.0126, 0.0266), strict=True):
        assert (
            relative_error(got - 100, want) < 2**0.5 * tolerance
        )  # FP32 at 100 tips some roundings; it is the same size of error
    q = torch.randn(8, 2, 64)
    out, lse = attention(q, shifted.pages(0), return_lse=True)
    want, want_lse = expected(q, shifted, 0)
    assert relative_error(out, want) < EXACT
    # Scores of up to 100 * 8 * 4 / 8 in FP32, from products that are larger by 8: some units of 2^-24 of 4e3.
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=5e-4)


@pytest.mark.parametrize("edge", [-1, 0, 1])
@pytest.mark.parametrize("queries", [1, 3])
def test_the_first_page_of_a_window(queries, edge):
    """The first key that is seen is the last of a page, the first of the next, or the one after. Pages to its left have
    NaN.
    """
    length = 400
    k, v, q = (torch.randn(1, heads, n, 64) for heads, n in ((1, length), (1, length), (2, queries)))
    pages = from_dense(k, v)
    window = length - queries + 1 - (2 * PAGE_SIZE + edge)  # the first query sees this many keys
    left = 2 if edge >= 0 else 1
    pages.pool[:left] = 0xFF
    out = attention(q[0].transpose(0, 1), pages, window=window, backend="reference")
    k, v = (x.transpose(0, 1) for x in pages.read(0, length, torch.float64, left * PAGE_SIZE))
    position, key = length - queries + torch.arange(queries)[:, None], torch.arange(left * PAGE_SIZE, length)
    seen = (key <= position) & (key > position - window)
    assert seen[0].sum() == window
    exact = F.scaled_dot_product_attention(q[0].double(), k.expand(2, -1, -1), v.expand(2, -1, -1), attn_mask=seen)
    assert relative_error(out.transpose(0, 1), exact) < 1e-6  # FP32's 6e-8, of sums of 145 terms
