"""The reference against torch's own SDPA in float64, with masks built here from their definitions."""

import pytest
import torch
import torch.nn.functional as F

from fp8attn import PagedKVCache, attention
from fp8attn.numerics import relative_error

EXACT = 2e-6  # FP32 arithmetic against float64


def make(lengths, heads=2, dim=64, seed=0):
    torch.manual_seed(seed)
    cache = PagedKVCache(heads, dim, num_seqs=len(lengths))
    total = sum(lengths)
    cache.append(torch.randn(total, heads, dim) + 1, torch.randn(total, heads, dim) + 1, lengths=lengths)
    return cache


def expected(q, cache, seq, *, causal=True, window=None, softcap=None, sinks=None, leftpad=0, scale=None):
    """One sequence's attention from the definition, in float64: returns `out [n, Hq, D]` and `lse [n, Hq]`."""
    k, v = (x.double().transpose(0, 1).repeat_interleave(q.shape[1] // x.shape[1], 0) for x in cache.read(seq))
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


def test_plain_causal_is_torch_sdpa():
    cache = make([150, 150])
    q = torch.randn(300, 4, 64)
    k, v = (torch.stack([cache.read(s)[i] for s in range(2)]).transpose(1, 2) for i in range(2))
    want = F.scaled_dot_product_attention(
        q.view(2, 150, 4, 64).transpose(1, 2).double(), k.double(), v.double(), is_causal=True, enable_gqa=True
    )
    assert relative_error(attention(q, cache.pages), want.transpose(1, 2).flatten(0, 1)) < EXACT


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
    """Sequences of different lengths, of which different numbers of last tokens ask; one has no query."""
    lengths, queries = [130, 40, 7, 129], [3, 40, 0, 1]
    cache = make(lengths)
    q = torch.randn(sum(queries), 4, 64)
    cu = torch.tensor([0, *queries]).cumsum(0, dtype=torch.int32)
    out, lse = attention(q, cache.pages, cu_seqlens_q=cu, max_seqlen_q=40, return_lse=True, **options)
    named = {"scale" if name == "softmax_scale" else name: value for name, value in options.items()}
    for seq, block in enumerate(zip(q.split(queries), out.split(queries), lse.split(queries), strict=True)):
        if queries[seq]:
            want, want_lse = expected(block[0], cache, seq, **named)
            assert relative_error(block[1], want) < EXACT
            torch.testing.assert_close(block[2].double(), want_lse, rtol=0, atol=1e-5)


def test_left_padding_hides_the_first_tokens():
    cache = make([20, 20])
    q = torch.randn(40, 2, 64)
    out, lse = attention(q, cache.pages, leftpad_k=torch.tensor([6, 0], dtype=torch.int32), return_lse=True)
    want, _ = expected(q[6:20], cache, 0, leftpad=6)  # rows that see something
    assert relative_error(out[6:20], want) < EXACT
    assert (out[:6] == 0).all() and (lse[:6] == -torch.inf).all()  # padding sees nothing
    assert relative_error(out[20:], expected(q[20:], cache, 1)[0]) < EXACT


def test_more_queries_than_keys_see_nothing_before_the_start():
    cache = make([3])
    out, lse = attention(torch.randn(5, 2, 64), cache.pages, return_lse=True)
    assert (out[:2] == 0).all() and (lse[:2] == -torch.inf).all() and out[2:].abs().min() > 0


def test_an_empty_cache_gives_zeros_and_a_sink_takes_all():
    cache = PagedKVCache(2, 64)
    q = torch.randn(1, 2, 64)
    out, lse = attention(q, cache.pages, causal=False, return_lse=True)
    assert (out == 0).all() and (lse == -torch.inf).all()
    out, lse = attention(q, cache.pages, causal=False, sinks=torch.tensor([1.0, 2.0]), return_lse=True)
    assert (out == 0).all() and lse.tolist() == [[1.0, 2.0]]


def test_long_prompts_are_computed_in_blocks():
    cache = make([1100], heads=1)
    q = torch.randn(1100, 1, 64)
    whole = attention(q, cache.pages)
    tail = attention(q[700:], cache.pages)
    assert relative_error(whole[700:], tail) < EXACT


@pytest.mark.parametrize("size", [65504.0, 1e6])
def test_weights_add_up_to_one_at_any_scores(size):
    """Equal keys, and values of one: the output is the sum of the weights."""
    torch.manual_seed(0)
    cache = PagedKVCache(2, 64, remove_means=False)
    cache.append(torch.full((100, 2, 64), size), torch.ones(100, 2, 64))
    q = torch.randn(100, 2, 64)
    out, lse = attention(q, cache.pages, causal=False, return_lse=True)
    assert lse.abs().max() > 2 * size
    assert (out - 1).abs().max() < EXACT
    scores = q.double().sum(-1) * cache.read(0)[0][0, 0, 0].double() / 8
    torch.testing.assert_close(lse.double(), scores + torch.tensor(100.0).double().log(), rtol=0, atol=3e-6 * size)


def test_the_largest_values_of_float16_stay_finite():
    torch.manual_seed(0)
    k = torch.full((100, 2, 64), 65504.0, dtype=torch.float16)
    cache = PagedKVCache(2, 64)
    cache.append(k, k)
    out = attention(torch.randn(100, 2, 64).half(), cache.pages, causal=False)
    assert (out == 65504.0).all()


def test_autocast_leaves_the_arithmetic_alone():
    cache = make([150])
    q = torch.randn(150, 4, 64)
    want = attention(q, cache.pages)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attention(q, cache.pages), want)


def test_quantisation_error_of_random_data_is_what_fp8_gives():
    """Uniform rounding to 3 mantissa bits gives 2.6% of noise per element; two operands and a softmax keep it under 6%."""
    torch.manual_seed(0)
    k, v, q = torch.randn(1000, 2, 128), torch.randn(1000, 2, 128), torch.randn(64, 4, 128)
    cache = PagedKVCache(2, 128)
    cache.append(k, v)
    exact = F.scaled_dot_product_attention(*(x.transpose(0, 1).double() for x in (q, k, v)), enable_gqa=True).transpose(0, 1)
    assert 0.01 < relative_error(attention(q, cache.pages, causal=False), exact) < 0.06


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_is_fused_into_append(interleaved):
    torch.manual_seed(0)
    k, v = torch.randn(200, 2, 64), torch.randn(200, 2, 64)
    angle = torch.arange(200)[:, None] / 10000 ** (torch.arange(16) / 16)  # half of the channels turn
    z = torch.view_as_complex(
        torch.stack([k[..., 0:32:2], k[..., 1:32:2]] if interleaved else [k[..., :16], k[..., 16:32]], -1).contiguous()
    )
    turned = torch.view_as_real(z * torch.polar(torch.ones_like(angle), angle)[:, None])
    want = k.clone()
    if interleaved:
        want[..., :32] = turned.flatten(-2)
    else:
        want[..., :32] = torch.cat([turned[..., 0], turned[..., 1]], -1)
    fused, plain = PagedKVCache(2, 64), PagedKVCache(2, 64)
    fused.append(k, v, rope_cos=angle.cos(), rope_sin=angle.sin(), rope_interleaved=interleaved)
    plain.append(want, v)
    assert torch.equal(fused.read(0)[1], plain.read(0)[1])
    assert relative_error(fused.read(0)[0], plain.read(0)[0]) < 1e-3  # a last bit of FP32 may tip an FP8 rounding
