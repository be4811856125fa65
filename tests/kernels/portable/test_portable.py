"""Attention on any GPU, in Triton's interpreter, on a CPU."""

import pytest
import torch

pytest.importorskip("triton")


import fp8attn
from fp8attn import AttentionParams, KVPages, reference
from fp8attn.formats.codec import CODECS
from fp8attn.kernels import portable
from fp8attn.kernels.machine import Machine
from fp8attn.numerics import relative_error
from tests.support.interpreted import ARGUMENTS, QUIET, cache_and_queries, dynamo_knows_torch, poisoned  # noqa: F401
from tests.support.kernel_cases import (
    ATTENTION_FACTORS,
    ATTENTION_WIDE,
    case_id,
    check_attention,
    check_out,
    empty_cache,
    fill,
    pairwise,
    random_tokens,
    run_attention,
)

pytestmark = QUIET


@pytest.mark.parametrize("case", pairwise(ATTENTION_FACTORS), ids=case_id)
def test_attention_against_float64(case, monkeypatch):
    monkeypatch.setattr(portable, "num_splits", lambda *_: case["splits"])
    check_attention(portable.portable_attention, case)


@pytest.mark.parametrize(
    ("name", "hopper"), [*((name, False) for name in ATTENTION_WIDE), ("prefill", True), ("prefill, parts", True)]
)
def test_attention_of_512_channels(name, hopper, monkeypatch):
    """Hopper has tiles of its own for many queries."""
    monkeypatch.setattr(portable, "machine", lambda device: Machine(1, 1 << 30, False, hopper=hopper))
    monkeypatch.setattr(portable, "num_splits", lambda *_: ATTENTION_WIDE[name]["splits"])
    check_attention(portable.portable_attention, ATTENTION_WIDE[name])


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("queries", [1, 5, 130])
@pytest.mark.parametrize("splits", [1, 3])
def test_attention_writes_into_a_given_output(queries, splits, backend, monkeypatch):
    monkeypatch.setattr(portable, "num_splits", lambda *_: splits)
    check_out(backend, 64, queries, lengths=(300, 130), heads=1 if queries == 130 else 2)


@pytest.mark.triton36
@pytest.mark.parametrize("key_dtype", list(CODECS))
@pytest.mark.parametrize("splits", [1, 40])
@pytest.mark.parametrize(("k", "v"), [(0.0, 1.0), (8.0, None), (0.0, None), ("needle", 1.0)], ids=str)
def test_attention_of_extremes(k, v, splits, key_dtype, monkeypatch):
    """Flat and peaked scores, constant V, means that are not removed."""
    monkeypatch.setattr(portable, "num_splits", lambda *_: splits)
    length, heads = 700, 2
    pages = empty_cache([length], heads, 64, key_dtype=key_dtype)
    keys = torch.randn(length, heads, 64) * (0.0 if k == "needle" else k)
    values = torch.full((length, heads, 64), v) if v else torch.randn(length, heads, 64) + 1
    q = torch.randn(1, 8, 64).half()
    if k == "needle":  # one key that weighs about as much as all others together, with a value of its own
        keys[333] = q[0, ::4].float() * 0.8
        values[333] = torch.randn(heads, 64)
    fill(pages, keys, values, [length])
    run_attention(portable.portable_attention, pages, q, ARGUMENTS)


@pytest.mark.parametrize("key_dtype", list(CODECS))
def test_rounding_rotated_queries_costs_little(key_dtype):
    """Rounding Q to FP16 is off by up to 2^-12 of an element, 2e-4 in the mean square. Where the scores' deviation is 1
    as here, the weights are off by so much each. Rounding P adds 2e-4."""
    pages = empty_cache([300], 2, 128, key_dtype=key_dtype)
    fill(pages, torch.randn(300, 2, 128), torch.randn(300, 2, 128), [300])
    q = torch.randn(16, 8, 128).half()
    arguments = ARGUMENTS | {"max_seqlen_q": 16, "softmax_scale": 128**-0.5}
    ref, _ = reference.attention(
        q, pages, AttentionParams(**arguments), compute_dtype=torch.float64, out_dtype=torch.float64
    )
    out, _ = portable.portable_attention(q, pages, AttentionParams(**arguments))
    assert relative_error(out, ref) ** 2 < 2 * 2e-4**2 + relative_error(ref.half(), ref) ** 2


@pytest.mark.parametrize("rotate", [True, False])
def test_large_and_tiny_queries_keep_their_digits(rotate):
    pages = empty_cache([40], 1, 64, rotate=rotate)
    fill(pages, random_tokens(40, 1, 64, torch.float16), torch.randn(40, 1, 64), [40])
    q = (torch.randn(1, 4, 64) * torch.tensor([1e-30, 1e-6, 1e5, 1e20])[None, :, None]).bfloat16()
    for scale in (0.125, 1e-5, 1e-20, 0.0):
        arguments = ARGUMENTS | {"softmax_scale": scale}
        ref, _ = reference.attention(
            q, pages, AttentionParams(**arguments), compute_dtype=torch.float64, out_dtype=torch.float64
        )
        out, _ = portable.portable_attention(q, pages, AttentionParams(**arguments))
        torch.testing.assert_close(out.double(), ref, rtol=2**-8, atol=2e-3)


def test_nan_in_a_value_is_not_hidden():
    pages = empty_cache([40, 40], 1, 64)
    v = torch.randn(80, 1, 64)
    v[3, 0, 5] = torch.nan
    fill(pages, torch.randn(80, 1, 64), v, [40, 40])
    out, _ = portable.portable_attention(torch.randn(2, 2, 64).half(), pages, AttentionParams(**ARGUMENTS))
    assert out[0, :, 5].isnan().all()
    assert int(out.isnan().sum()) == 2


@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("queries", [2, 30])  # tiles whose warps share the keys, and tiles whose warps share the rows
@pytest.mark.parametrize(("key_dtype", "token"), [("int8", 129), ("e4m3", 130)], ids=str)
def test_nan_in_a_key_is_for_the_rows_that_see_it(key_dtype, token, queries, softcap):
    """E4M3 has a NaN for the token; INT8 makes the scale of the page NaN, and so all tokens of the page. Rows before it
    are as without.
    """
    pages = empty_cache([132], 1, 64, key_dtype=key_dtype)
    k, v = torch.randn(132, 1, 64), torch.randn(132, 1, 64)
    k[130, 0, 7] = torch.nan
    fill(pages, k, v, [132])
    q = torch.randn(queries, 8, 64).half()
    arguments = ARGUMENTS | {"max_seqlen_q": queries, "softcap": softcap}
    ref, ref_lse = reference.attention(q, pages, AttentionParams(**arguments))
    out, lse = portable.portable_attention(q, pages, AttentionParams(**arguments))
    sees = 132 - queries + torch.arange(queries) >= (128 if key_dtype == "int8" else 130)
    assert torch.equal(ref.isnan(), sees[:, None, None].expand_as(ref)) and torch.equal(out.isnan(), ref.isnan())
    assert torch.equal(lse.isnan(), ref_lse.isnan())
    torch.testing.assert_close(out[~sees].float(), ref[~sees].float(), rtol=2**-10, atol=2e-3)


def test_no_queries():
    pages = empty_cache([40], 1, 64)
    out, lse = portable.portable_attention(
        torch.zeros(0, 2, 64).half(), pages, AttentionParams(**ARGUMENTS | {"max_seqlen_q": 0})
    )
    assert out.shape == (0, 2, 64)
    assert lse.shape == (0, 2)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("splits", [1, 3])
def test_rows_behind_the_last_sequence_are_zeros(splits, sinks, backend, monkeypatch):
    """A serving engine pads its batches. The memory of the output is poisoned here."""
    monkeypatch.setattr(portable, "num_splits", lambda *_: splits)
    pages, q = cache_and_queries()
    q, logits = torch.cat([q, torch.randn(20, 4, 64).half()]), torch.randn(4) if sinks else None
    bounds = torch.tensor([0, 1, 2], dtype=torch.int32)
    out, lse = fp8attn.attention(
        q, pages, cu_seqlens_q=bounds, max_seqlen_q=1, sinks=logits, return_lse=True, backend=backend
    )
    alone, alone_lse = fp8attn.attention(q[:2], pages, sinks=logits, return_lse=True, backend=backend)
    assert torch.equal(out[:2], alone) and torch.equal(lse[:2], alone_lse)
    assert not out[2:].any() and not out[2:].isnan().any()


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_an_idle_step_is_no_error(backend):
    """No sequence has a query, or there is no sequence at all, and the batch has rows to spare."""
    pages, _ = cache_and_queries()
    q = torch.randn(8, 4, 64).half()
    none = KVPages.empty(4, 2, 64, num_seqs=0, max_pages=2)
    for held, bounds in ((pages, torch.zeros(3, dtype=torch.int32)), (none, torch.zeros(1, dtype=torch.int32))):
        out, lse = fp8attn.attention(q, held, cu_seqlens_q=bounds, max_seqlen_q=0, return_lse=True, backend=backend)
        assert out.shape == q.shape and out.dtype == q.dtype and not out.any() and (lse == -torch.inf).all()
        k, before = torch.randn(8, 2, 64).half(), held.cache_seqlens.clone()
        fp8attn.append(held, k, k, cu_seqlens=bounds, max_seqlen=0, backend=backend)
        assert torch.equal(held.cache_seqlens, before)
    assert fp8attn.attention(q[:0], none, backend=backend).shape == (0, 4, 64)


def test_integers_may_stand_for_floats():
    pages, q = cache_and_queries()
    options = {"softcap": 30.0, "softmax_scale": 1.0, "backend": "triton"}
    expected = fp8attn.attention(q, pages, **options)
    assert torch.equal(fp8attn.attention(q, pages, **options | {"softcap": 30, "softmax_scale": 1}), expected)


def test_a_window_may_be_wider_than_32_bits():
    pages, q = cache_and_queries()
    expected = fp8attn.attention(q, pages, backend="triton")
    assert torch.equal(fp8attn.attention(q, pages, window=2**31 - 1, backend="triton"), expected)
    assert torch.equal(fp8attn.attention(q, pages, window=2**32, backend="triton"), expected)
