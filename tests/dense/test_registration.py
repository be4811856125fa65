"""The torch ops of dense calls: schemas and fakes, compilation, export."""

import pytest
import torch

import fp8attn
from fp8attn import (
    rope_scaled_dot_product_attention,
    scaled_dot_product_attention,
)
from fp8attn._torch_ops import flatten_format, flatten_pages
from fp8attn.formats.kv_format import KVFormat
from fp8attn.formats.spec import PageSpec
from fp8attn.params import AttentionParams
from tests.dense.inputs import INTERPRETED, bhsd


def test_ops_pass_torch_opcheck():
    checks = (
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    )  # test_schema: see test_ops.py
    x = bhsd(2, 2, 130, 64, True)
    for backend in ("reference", "triton") if INTERPRETED else ("reference",):
        y = x if backend == "reference" else x.half()
        pages_of = (y, y, *flatten_format(KVFormat(PageSpec.of(64).name)), backend)
        torch.library.opcheck(torch.ops.fp8attn.from_dense, pages_of, test_utils=checks[:2])
        pages = fp8attn.from_dense(y, y, backend=backend)
        q = y.transpose(1, 2).flatten(0, 1)
        torch.library.opcheck(
            torch.ops.fp8attn.attention,
            (q, *flatten_pages(pages), *AttentionParams(None, 130, True, 0.1), backend),
            test_utils=checks,
        )


@pytest.mark.parametrize(
    ("q_len", "kv_len", "head_dim", "v_dim", "rope", "is_causal", "transposed"),
    [
        (130, 130, 64, 64, True, True, True),
        (130, 70, 64, 64, True, True, False),  # rows behind the last key
        (70, 130, 72, 72, False, True, False),
        (70, 130, 64, 40, False, False, True),
        (70, 130, 40, 64, False, False, False),
    ],
)
def test_the_dense_op_passes_torch_opcheck(q_len, kv_len, head_dim, v_dim, rope, is_causal, transposed):
    """In graphs it is one op. Its output has the memory order of q, as in the eager call."""
    tensors = [
        bhsd(2, heads, length, dim, transposed)
        for heads, length, dim in ((4, q_len, head_dim), (2, kv_len, head_dim), (2, kv_len, v_dim))
    ]
    tables = [torch.randn(2, length, 32) if rope else None for length in (q_len, q_len, kv_len, kv_len)]
    arguments = *tensors, *tables, False, is_causal, None, "int8", True, "reference"
    torch.library.opcheck(
        torch.ops.fp8attn.sdpa,
        arguments,
        test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_it_compiles_whole():
    angle = torch.randn(140, 32)
    tables = angle.cos(), angle.sin()

    def layer(query, key, value, mask):
        plain = scaled_dot_product_attention(query * 2, key, value, is_causal=True, enable_gqa=True)
        masked = scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
        return plain + rope_scaled_dot_product_attention(query, key, value, *tables, enable_gqa=True), masked

    arguments = bhsd(2, 4, 140, 64, True), *(bhsd(2, 2, 140, 64, True) for _ in "kv"), torch.rand(140, 140) > 0.2
    expected = layer(*arguments)
    actual = torch.compile(layer, fullgraph=True, backend="aot_eager")(*arguments)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("strict", [False, True])
def test_it_exports_with_any_length(strict):
    angle = torch.randn(4096, 32)
    cos, sin = angle.cos(), angle.sin()

    class Layer(torch.nn.Module):
        def forward(self, query, key, value):
            length = query.shape[2]
            rotated = rope_scaled_dot_product_attention(
                query, key, value, cos[:length], sin[:length], is_causal=True, enable_gqa=True
            )
            return rotated + scaled_dot_product_attention(query, key, value, enable_gqa=True)

    def arguments(length):
        return bhsd(1, 4, length, 64), bhsd(1, 2, length, 64), bhsd(1, 2, length, 64)

    size = torch.export.Dim("length", min=2, max=4096)
    dynamic = {name: {2: size} for name in ("query", "key", "value")}
    exported = torch.export.export(Layer(), arguments(100), dynamic_shapes=dynamic, strict=strict).module()
    for length in (2, 128, 129, 700):
        given = arguments(length)
        assert torch.equal(exported(*given), Layer()(*given))


@pytest.mark.parametrize("is_causal", [False, True])
def test_it_exports_with_any_two_lengths(is_causal):
    class Layer(torch.nn.Module):
        def forward(self, query, key, value):
            return scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    lengths = [torch.export.Dim(name, min=2, max=4096) for name in ("queries", "keys")]
    dynamic = {"query": {2: lengths[0]}, "key": {2: lengths[1]}, "value": {2: lengths[1]}}
    given = bhsd(1, 2, 100, 64), bhsd(1, 2, 200, 64), bhsd(1, 2, 200, 64)
    exported = torch.export.export(Layer(), given, dynamic_shapes=dynamic).module()
    for queries, keys in ((2, 300), (300, 2), (150, 150)):
        given = bhsd(1, 2, queries, 64), bhsd(1, 2, keys, 64), bhsd(1, 2, keys, 64)
        assert torch.equal(exported(*given), Layer()(*given))


def test_the_package_exports_it():
    for name in ("scaled_dot_product_attention", "rope_scaled_dot_product_attention", "fallback_reason"):
        assert name in fp8attn.__all__
