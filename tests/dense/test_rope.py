"""The functions on dense tensors: RoPE in and before attention, pages of dense K and V, rows in 8 bits; the kernels
interpreted.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

import fp8attn
from fp8attn import (
    rope_scaled_dot_product_attention,
)
from fp8attn.backends import load
from fp8attn.formats.kv_format import KVFormat
from fp8attn.formats.page_layout import unpack_k, unpack_v
from fp8attn.formats.rope import DenseRope, Rope, apply_rope, dense_rope
from fp8attn.formats.spec import PageSpec
from fp8attn.numerics import sqnr_db
from tests.dense.inputs import BACKENDS, INTERPRETED, X, bhsd, turned
from tests.support.kernel_cases import random_tokens


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [64, 24])
def test_rope_inside_is_rope_before(rotary, interleaved, backend):
    query, key, value = (
        bhsd(2, 4, 40, 64, True, torch.float16),
        *(bhsd(2, 2, 40, 64, True, torch.float16) for _ in "kv"),
    )
    angle = torch.randn(50, rotary // 2) * 3
    cos, sin = angle.cos()[10:], angle.sin()[10:]  # positions from 10 on
    out = rope_scaled_dot_product_attention(
        query, key, value, cos, sin, rope_interleaved=interleaved, is_causal=True, enable_gqa=True, backend=backend
    )
    q, k = (turned(x, cos, sin, interleaved) for x in (query, key))
    exact = F.scaled_dot_product_attention(q, k, value.float(), is_causal=True, enable_gqa=True)
    assert out.stride() == query.stride()
    assert sqnr_db(out, exact) > 25.0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_tables_of_every_form(interleaved, backend):
    q, k, v = (bhsd(2, 2, 40, 64, False, torch.float16) for _ in "qkv")
    angle = torch.randn(2, 40, 32)
    cos, sin = angle.cos(), angle.sin()
    twice = (lambda x: x.repeat_interleave(2, -1)) if interleaved else (lambda x: torch.cat([x, x], -1))

    def attend(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return rope_scaled_dot_product_attention(q, k, v, cos, sin, rope_interleaved=interleaved, backend=backend)

    expected = attend(cos, sin)
    for form in (twice, lambda x: x[:, None], lambda x: twice(x)[:, None]):
        assert torch.equal(attend(form(cos), form(sin)), expected)
    assert torch.equal(attend(cos, sin.mT.contiguous().mT), expected), "cos and sin may have different strides"
    assert torch.equal(attend(cos[:1], sin[:1]), attend(cos[0], sin[0]))


def test_keys_may_have_tables_of_their_own():
    query, key, value = bhsd(1, 2, 30, 64), bhsd(1, 2, 50, 64), bhsd(1, 2, 50, 64)
    a, b = torch.randn(30, 32), torch.randn(50, 16)
    for is_causal in (False, True):
        out = rope_scaled_dot_product_attention(
            query, key, value, a.cos(), a.sin(), key_rope_cos=b.cos(), key_rope_sin=b.sin(), is_causal=is_causal
        )
        q, k = turned(query, a.cos(), a.sin(), False), turned(key, b.cos(), b.sin(), False)
        assert sqnr_db(out, F.scaled_dot_product_attention(q, k, value, is_causal=is_causal)) > 25.0


def test_what_rope_refuses():
    table = torch.zeros(8, 32)
    for cos, sin in (
        (table[:5], table[:5]),
        (table, table[:, :16]),
        (torch.zeros(8, 65),) * 2,
        (torch.zeros(3, 8, 32),) * 2,
    ):
        with pytest.raises(ValueError, match="rotary tables must both be"):
            dense_rope(X, Rope(cos, sin))
    with pytest.raises(ValueError, match="key_rope_cos and key_rope_sin together"):
        rope_scaled_dot_product_attention(X, X, X, table, table, key_rope_cos=table)
    with pytest.raises(ValueError, match="cannot serve this call: query, key and value must have four dimensions"):
        rope_scaled_dot_product_attention(X[0], X[0], X[0], table, table)
    with pytest.raises(ValueError, match="an input requires a gradient"):
        rope_scaled_dot_product_attention(X.clone().requires_grad_(), X, X, table, table)
    table = torch.zeros(X.shape[2], X.shape[3] // 2)
    for tables in ({"rope_sin": table.to("meta")}, {"key_rope_cos": table, "key_rope_sin": table.to("meta")}):
        with pytest.raises(ValueError, match="tables are on cpu and meta"):
            rope_scaled_dot_product_attention(X, X, X, **{"rope_cos": table, "rope_sin": table} | tables)


@pytest.mark.parametrize("interleaved", [False, True])
def test_apply_rope_is_a_product_of_complex_numbers(interleaved):
    x, angle = torch.randn(2, 3, 7, 64), torch.randn(7, 24)
    rotated = apply_rope(x, angle.cos(), angle.sin(), interleaved=interleaved)
    pairs = x[..., :48].unflatten(-1, (24, 2) if interleaved else (2, 24))
    product = torch.view_as_complex((pairs if interleaved else pairs.mT).contiguous()) * torch.polar(
        torch.ones(7, 24), angle
    )
    product = torch.view_as_real(product)
    torch.testing.assert_close(
        rotated[..., :48], (product if interleaved else product.mT).flatten(-2)
    )  # FP32 rounds in another order
    assert torch.equal(rotated[..., 48:], x[..., 48:])
    half = apply_rope(x.half().mT.contiguous().mT, angle.cos(), angle.sin(), interleaved=interleaved)
    exact = apply_rope(x.half().float(), angle.cos(), angle.sin(), interleaved=interleaved)
    assert half.dtype == torch.float16 and torch.equal(half, exact.half())
    with pytest.raises(ValueError, match=r"must both be \[\.\.\., S, R/2\] with R <= 64"):
        apply_rope(x, torch.ones(7, 64), torch.ones(7, 64), interleaved=interleaved)


# The dense ops


@pytest.mark.skipif(not INTERPRETED, reason="the kernels run compiled: tests/gpu")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of Inf and NaN
@pytest.mark.parametrize(
    ("shape", "transposed", "rotary", "interleaved"),
    [
        ((2, 2, 200, 64), True, 0, False),
        ((1, 3, 130, 80), False, 40, True),
        ((2, 1, 300, 128), True, 128, False),
        ((1, 2, 5, 96), False, 96, True),
    ],
)
def test_from_dense_writes_the_references_bytes(shape, transposed, rotary, interleaved):
    batch, heads, length, head_dim = shape
    k, v = (
        random_tokens(batch * length, heads, head_dim, torch.bfloat16).unflatten(0, (batch, length)).transpose(1, 2)
        for _ in "kv"
    )
    k[0, 0, 1, 3], v[0, -1, 2, 2], v[-1, 0, 3, 1] = torch.nan, torch.inf, torch.nan
    if not transposed:
        k, v = k.contiguous(), v.contiguous()
    angle, q_angle = (
        torch.randn(batch, length, rotary // 2),
        torch.randn(batch, 270, head_dim // 2),
    )  # Q has other angles and lengths
    tables = Rope(angle.cos(), angle.sin(), interleaved), Rope(q_angle.cos(), q_angle.sin(), interleaved)
    q = bhsd(batch, 3 * heads, 270, head_dim, not transposed, torch.bfloat16)
    outs = torch.full_like(q, torch.inf), torch.full_like(q, torch.inf)
    ours, theirs = (
        load(backend).from_dense(
            k, v, KVFormat(PageSpec.of(head_dim).name), DenseRope(*tables, q, out) if rotary else None
        )
        for backend, out in zip(("triton", "reference"), outs, strict=True)
    )
    assert torch.equal(*outs) and outs[0].isfinite().all() == (rotary > 0)
    columns = -(-length // 128)
    assert ours.page_table.tolist() == torch.arange(batch * columns).view(batch, columns).tolist()
    assert ours.cache_seqlens.tolist() == [length] * batch
    assert torch.equal(
        ours.k_scale.nan_to_num(-1.0), theirs.k_scale.nan_to_num(-1.0)
    )  # an INT8 page with a NaN has one for its scale
    assert torch.equal(ours.v_scale, theirs.v_scale)
    for name, unpack in (("k", unpack_k), ("v", unpack_v)):
        a, b = (unpack(getattr(pages, name).view(torch.uint8)).unflatten(0, (batch, -1)) for pages in (ours, theirs))
        a, b = (torch.where(x == 0xFF, 0x7F, x) for x in (a, b))  # a NaN may lose its sign
        assert torch.equal(a[:, :length], b[:, :length])
        assert name == "k" or not a[:, length:].any(), "V's tail must be finite"


def test_refusals_of_the_dense_ops():
    with pytest.raises(ValueError, match="last dimension contiguous"):
        fp8attn.from_dense(X.transpose(2, 3), X.transpose(2, 3))
    with pytest.raises(RuntimeError, match="FP8 ops have none"):
        fp8attn.from_dense(*[X.clone().requires_grad_()] * 2)
    with pytest.raises(ValueError, match="head_dim must be one of"):
        fp8attn.from_dense(X[..., :48], X[..., :48])
    with pytest.raises(ValueError, match="not empty"):
        fp8attn.from_dense(X[:, :, :0], X[:, :, :0])
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, X)
        with torch.no_grad(), pytest.raises(RuntimeError, match="for inference: an input has a forward-mode tangent"):
            fp8attn.from_dense(X, dual)
        with pytest.raises(RuntimeError, match=r"for inference: a transform of torch\.func is active"):
            torch.vmap(lambda x: fp8attn.from_dense(X, x))(X[None])
