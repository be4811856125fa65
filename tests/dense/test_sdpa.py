"""scaled_dot_product_attention in FP8: torch's semantics, what goes to torch instead, and the two errors.

The kernel error is against float64 attention over the same bytes. The quantization error is an SQNR against attention
on the unrounded inputs, beside that of attention whose inputs alone are rounded to FP8, by the largest value of each
head: no more than 1.2 dB below it.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import fp8attn
from fp8attn import (
    AttentionParams,
    apply_rope,
    fallback_reason,
    ops,
    reference,
    rope_scaled_dot_product_attention,
    scaled_dot_product_attention,
)
from fp8attn.dense import sdpa
from fp8attn.formats.codec import E4M3
from fp8attn.numerics import sqnr_db
from tests.dense.inputs import BACKENDS, X, bhsd
from tests.support.kernel_cases import assert_kernel_error

DECIBELS = 1.2


def floor_db(query, key, value, **options) -> float:
    """SQNR of exact attention over inputs rounded to FP8, one scale a head."""

    def rounded(x):
        scale = x.abs().amax((2, 3), keepdim=True).double() / E4M3.max
        return E4M3.quantize(x, scale).double() * scale

    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), **options)
    return sqnr_db(F.scaled_dot_product_attention(rounded(query), rounded(key), rounded(value), **options), exact)


# Semantics

SHAPES = {  # batch, query heads, KV heads, queries, keys, E, Ev
    "square": (2, 2, 2, 200, 200, 64, 64),
    "GQA": (1, 6, 2, 130, 130, 64, 64),
    "few queries": (2, 2, 2, 3, 140, 64, 64),
    "cross-attention": (2, 2, 1, 150, 77, 64, 64),
    "odd head_dim": (1, 2, 2, 70, 70, 72, 72),
    "narrow values": (1, 2, 2, 65, 131, 128, 40),
    "wide values": (1, 1, 1, 33, 129, 64, 96),
    "one of each": (1, 1, 1, 1, 1, 64, 64),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_is_torchs_attention(shape, is_causal, transposed, backend):
    batch, q_heads, heads, q_len, kv_len, head_dim, v_dim = shape
    dtype = torch.float32 if backend == "reference" else torch.float16
    query = bhsd(batch, q_heads, q_len, head_dim, transposed, dtype)
    key, value = (bhsd(batch, heads, kv_len, dim, transposed, dtype) for dim in (head_dim, v_dim))
    options = {"is_causal": is_causal, "enable_gqa": q_heads != heads}
    assert fallback_reason(query, key, value, **options) is None
    out = scaled_dot_product_attention(query, key, value, **options, backend=backend)
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), **options)
    assert out.shape == exact.shape
    assert out.dtype == dtype
    assert transposed == (out.stride(1) < out.stride(2)) or 1 in out.shape[1:3]
    assert (out.transpose(1, 2) if transposed else out).is_contiguous()
    assert sqnr_db(out, exact) > 25.0
    # K and V are all that is rounded here: better than rounding the queries too.
    if is_causal and q_len > kv_len == 1:
        return
    assert sqnr_db(out, exact) > floor_db(query, key, value, **options) - DECIBELS


@pytest.mark.parametrize("backend", BACKENDS)
def test_kernel_error_against_float64_on_the_same_bytes(backend):
    query, key, value = (
        bhsd(2, 4, 131, 64, True, torch.float16),
        *(bhsd(2, 2, 131, 64, True, torch.float16) for _ in "kv"),
    )
    pages, flat = fp8attn.from_dense(key, value, backend=backend), query.transpose(1, 2).flatten(0, 1)
    out = ops.attention(flat, pages, causal=False, backend=backend)
    params = AttentionParams(cu_seqlens_q=None, max_seqlen_q=131, causal=False, softmax_scale=0.125)
    ref, _ = reference.attention(flat, pages, params, compute_dtype=torch.float64, out_dtype=torch.float64)
    assert_kernel_error(out, ref)
    dense = scaled_dot_product_attention(query, key, value, enable_gqa=True, backend=backend)
    assert torch.equal(dense, out.unflatten(0, (2, 131)).transpose(1, 2))


@pytest.mark.parametrize("dims", [2, 3, 5])
def test_any_number_of_leading_dimensions(dims):
    shape = (2, 3, 2, 40, 64)[-dims:]
    query, key, value = (torch.randn(shape) for _ in "qkv")
    out = scaled_dot_product_attention(query, key, value, is_causal=True)
    exact = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert out.shape == exact.shape
    assert sqnr_db(out, exact) > 25.0


def test_scale_and_strides():
    fused = torch.randn(2, 70, 3, 2, 64)  # as a projection to Q, K and V leaves them
    query, key, value = fused.permute(2, 0, 3, 1, 4)
    exact = F.scaled_dot_product_attention(query, key, value, scale=0.4)
    assert (
        sqnr_db(scaled_dot_product_attention(query, key, value, scale=0.4), exact) > 22.0
    )  # sharper: scores are 3.2 times larger
    last = torch.randn(1, 2, 64, 70).transpose(2, 3)  # not contiguous in its last dimension
    exact = F.scaled_dot_product_attention(last, last, last)
    assert sqnr_db(scaled_dot_product_attention(last, last, last), exact) > 25.0


def test_outliers_and_offsets():
    """Channels 20 times larger than the others, and offsets of five standard deviations."""
    query, key, value = (bhsd(1, 2, 500, 64) for _ in "qkv")
    for x in (key, value):
        x += 5 * torch.randn(1, 2, 1, 64)
    outlying = torch.randperm(64)[:3]
    key[..., outlying] *= 20
    query[..., outlying] /= 20  # or softmax would see these channels alone
    value[..., torch.randperm(64)[:3]] *= 20
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double())
    assert sqnr_db(scaled_dot_product_attention(query, key, value), exact) > 25.0


# What torch answers


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"attn_mask": torch.ones(8, 8, dtype=torch.bool).tril()}, "a mask is given"),
        ({"attn_mask": torch.zeros(8, 8)}, "a mask is given"),
        ({"dropout_p": 0.1}, "dropout is for training"),
        ({"query": X.clone().requires_grad_()}, "an input requires a gradient"),
        (
            {"query": X.double(), "key": X.double(), "value": X.double()},
            "takes bfloat16, float16 and float32, not torch.float64",
        ),
        ({"key": X.half()}, "differ in dtype"),
        ({"query": X[0]}, "number of dimensions"),
        ({"query": X.expand(3, -1, -1, -1)}, "query and key differ in batch"),
        ({"value": X[:, :, :5]}, "key and value differ in batch, in their number of heads or in length"),
        ({"query": X[..., :32]}, "query and key differ in head_dim"),
        ({"key": X[:, :, :0], "value": X[:, :, :0]}, "a dimension is empty"),
        ({"key": X[:, :1], "value": X[:, :1]}, "enable_gqa"),
        ({"query": X[:, :1], "enable_gqa": True}, "enable_gqa"),
        ({"query": X.repeat(1, 1, 1, 5), "key": X.repeat(1, 1, 1, 5)}, "a head_dim above 256"),
        ({"scale": 0.0}, "the scale is not positive"),
        ({"scale": -0.5}, "the scale is not positive"),
        ({name: X.to("meta") for name in ("query", "key", "value")}, "the kernels take bfloat16"),
    ],
)
def test_fallbacks_have_a_reason(arguments, reason):
    assert reason in fallback_reason(**({"query": X, "key": X, "value": X} | arguments))


@pytest.mark.parametrize(
    "options",
    [
        {"attn_mask": torch.rand(9, 13) > 0.3},
        {"attn_mask": torch.randn(2, 1, 9, 13)},
        {"scale": -0.3},
        {"enable_gqa": True, "attn_mask": torch.rand(2, 1, 1, 13) > 0.3},
    ],
)
def test_what_falls_back_is_exact(options):
    query, key, value = bhsd(2, 4, 9, 64), *(bhsd(2, 2 if "enable_gqa" in options else 4, 13, 64) for _ in "kv")
    expected = F.scaled_dot_product_attention(query, key, value, **options)
    assert torch.equal(scaled_dot_product_attention(query, key, value, **options), expected)


# unsloth#9848, unsloth#9708
def test_rows_that_see_nothing_are_zero_in_float16():
    """Reported: rows of padding that attend to nothing are NaN. Here rows of 1 to 64 tokens have padding on the left by
    more than a page. They are compared with each row alone in float32."""
    lengths, width = (1, 2, 63, 64, 200), 200
    query, key, value = (
        bhsd(5, 4, width, 64, False, torch.float16),
        *(bhsd(5, 2, width, 64, False, torch.float16) for _ in "kv"),
    )
    tokens = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    mask = tokens[:, None, None] & torch.ones(width, width, dtype=torch.bool).tril()
    found = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    assert torch.equal(found, F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True))
    for row, length in enumerate(lengths):
        assert not found[row, :, : width - length].any()
        own = (x[row : row + 1, :, width - length :].float() for x in (query, key, value))
        alone = F.scaled_dot_product_attention(*own, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(
            found[row, :, width - length :].float(), alone[0], rtol=2**-9, atol=2**-10
        )  # float16 rounds by 2^-11


def test_gradients_flow_through_the_fallback():
    query = bhsd(1, 2, 9, 64).requires_grad_()
    scaled_dot_product_attention(query, query, query).sum().backward()
    assert query.grad is not None
    with torch.no_grad():
        assert not torch.equal(
            scaled_dot_product_attention(query, query, query), F.scaled_dot_product_attention(query, query, query)
        )


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by torch.autograd.forward_ad
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_forward_mode_derivatives_are_torchs(name):
    """With dual tensors (`torch.autograd.forward_ad`), and with `torch.func.jvp`. On a CPU, only torch's MATH backend
    supports them.
    """
    tensors = {"query": bhsd(1, 4, 20, 64), "key": bhsd(1, 2, 20, 64), "value": bhsd(1, 2, 20, 64)}
    tangent = torch.randn_like(tensors[name])

    def tangents(function):
        def call(x):
            return function(**(tensors | {name: x}), is_causal=True, enable_gqa=True)

        out, transformed = torch.func.jvp(call, (tensors[name],), (tangent,))
        with torch.no_grad(), forward_ad.dual_level():
            dual = forward_ad.unpack_dual(call(forward_ad.make_dual(tensors[name], tangent)))
            return out, transformed, dual.primal, dual.tangent

    with sdpa_kernel(SDPBackend.MATH):
        expected, ours = tangents(F.scaled_dot_product_attention), tangents(scaled_dot_product_attention)
        assert expected[1].norm() > 1.0
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    for function in (F.scaled_dot_product_attention, scaled_dot_product_attention):
        with pytest.raises(NotImplementedError, match="flash_attention_for_cpu"):
            tangents(function)
    with forward_ad.dual_level():
        reason = fallback_reason(**(tensors | {name: forward_ad.make_dual(tensors[name], tangent)}), enable_gqa=True)
        assert reason == "an input has a forward-mode tangent, and FP8 ops have no derivative; leave out the tangents"
        assert fallback_reason(**tensors, enable_gqa=True) is None


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_compiled_code_has_torchs_derivatives():
    torch._dynamo.reset()
    query, key, value = (bhsd(1, 2, 20, 64) for _ in "qkv")
    tangent = torch.randn_like(key)

    def both(function):
        transformed = torch.func.jvp(lambda x: function(query, x, value), (key,), (tangent,))[1]
        return transformed, torch.vmap(function)(query[None], key[None], value[None])[0]

    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    with sdpa_kernel(SDPBackend.MATH):
        expected = both(F.scaled_dot_product_attention)
        for ours, want in zip(
            torch.compile(both, fullgraph=True, backend="aot_eager")(scaled_dot_product_attention),
            expected,
            strict=True,
        ):
            torch.testing.assert_close(ours, want)
        rounded = scaled_dot_product_attention(query, key, value)
        assert torch.equal(compiled(query, key, value), rounded)
        with (
            torch.no_grad(),
            forward_ad.dual_level(),
        ):  # what was compiled outside of a level, called with a dual tensor
            dual = forward_ad.make_dual(key, tangent)
            if torch.__version__ >= (2, 15):  # then torch.compile itself refuses it
                with pytest.raises(torch._dynamo.exc.Unsupported, match="forward-mode AD"):
                    compiled(query, dual, value)
            else:
                torch.testing.assert_close(forward_ad.unpack_dual(compiled(query, dual, value)).tangent, expected[0])
        assert torch.equal(compiled(query, key, value), rounded)
    torch._dynamo.reset()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len"), [(90, 40), (40, 90), (60, 60)])
def test_each_query_has_its_own_angles(q_len, kv_len, interleaved):
    """Causal, aligned to the first key. Queries after the last key are computed apart from the others."""
    torch.manual_seed(0)
    (q, k, v), angle = (torch.randn(1, 2, n, 64) for n in (q_len, kv_len, kv_len)), torch.randn(90, 32)
    q_tables, k_tables = ((angle[:n].cos(), angle[:n].sin()) for n in (q_len, kv_len))
    out = rope_scaled_dot_product_attention(
        q, k, v, *q_tables, key_rope_cos=k_tables[0], key_rope_sin=k_tables[1], rope_interleaved=interleaved,
        is_causal=True,
        backend="reference",
    )  # fmt: skip
    rotated = (apply_rope(x, *t, interleaved=interleaved) for x, t in ((q, q_tables), (k, k_tables)))
    assert sqnr_db(out, F.scaled_dot_product_attention(*rotated, v, is_causal=True)) > 25.0


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_is_torchs():
    query, key, value = torch.randn(3, 5, 1, 2, 20, 64)
    vmapped, expected = (
        torch.vmap(f)(query, key, value) for f in (scaled_dot_product_attention, F.scaled_dot_product_attention)
    )
    assert torch.equal(vmapped, expected)
    with pytest.raises(ValueError, match=r"'reference' cannot serve this call: a transform of torch\.func is active"):
        torch.vmap(lambda q: scaled_dot_product_attention(q, q, q, backend="reference"))(query)
    angle = torch.randn(20, 32)
    with pytest.raises(ValueError, match=r"a transform of torch\.func is active"):
        torch.vmap(lambda q: rope_scaled_dot_product_attention(q, q, q, angle.cos(), angle.sin()))(query)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16, torch.float64, "mixed"], ids=str)
def test_autocast_is_torchs(given, dtype):
    query, key, value = (bhsd(1, 2, 60, 64) for _ in "qkv")
    dtypes = (torch.float32, torch.float32, torch.bfloat16) if given == "mixed" else (given,) * 3
    arguments = [x.to(to) for x, to in zip((query, key, value), dtypes, strict=True)]
    angle = torch.randn(60, 32)
    with torch.autocast("cpu", dtype):
        out, expected = (f(*arguments) for f in (scaled_dot_product_attention, F.scaled_dot_product_attention))
        reason = fallback_reason(*arguments)
    assert out.dtype == expected.dtype == (given if given == torch.float64 else dtype)
    if given == torch.float64:
        assert "float64" in reason and torch.equal(out, expected)
        return
    assert reason is None
    cast = [x.to(dtype) for x in arguments]
    assert torch.equal(out, scaled_dot_product_attention(*cast)) and sqnr_db(out, expected) > 25.0
    with torch.autocast("cpu", dtype):
        out = rope_scaled_dot_product_attention(*arguments, angle.cos(), angle.sin())
    assert torch.equal(out, rope_scaled_dot_product_attention(*cast, angle.cos(), angle.sin()))


def test_empty_dimensions_and_errors_are_torchs():
    assert scaled_dot_product_attention(X[:, :, :0], X, X).shape == (1, 2, 0, 64)
    with pytest.raises(RuntimeError):
        scaled_dot_product_attention(X, X[..., :32], X)


def test_dropout_goes_to_torch_as_a_mask_does():
    query, key, value = (bhsd(1, 2, 40, 64) for _ in "qkv")
    torch.manual_seed(1)
    expected = F.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(scaled_dot_product_attention(query, key, value, dropout_p=0.5), expected)
    with pytest.raises(
        ValueError, match="'reference' cannot serve this call: dropout is for training, FP8 attention for inference"
    ):
        scaled_dot_product_attention(query, key, value, dropout_p=0.5, backend="reference")


@pytest.mark.parametrize("entry", [scaled_dot_product_attention, "fp8_attention"])
@pytest.mark.parametrize(
    ("options", "reason"), [({"dropout_p": 0.5}, "dropout is for training"), ({"attn_mask": X[0, 0, :, :8]}, "a mask")]
)
def test_fallbacks_are_logged(entry, options, reason, caplog):
    with caplog.at_level("DEBUG", logger="fp8attn"):
        if entry == "fp8_attention":
            with fp8attn.fp8_attention(fp8attn.AttentionPolicy(min_length=1)):
                F.scaled_dot_product_attention(X, X, X, **options)
        else:
            entry(X, X, X, **options)
    (record,) = caplog.records
    assert (
        record.levelname == "DEBUG"
        and reason in record.message
        and "query [1, 2, 8, 64] torch.float32 on cpu" in record.message
    )


def test_impossible_backends_are_refused():
    with pytest.raises(ValueError, match="unknown backend 'fastest'"):
        scaled_dot_product_attention(X, X, X, backend="fastest")
    with pytest.raises(ValueError, match="are for NVIDIA GPUs, not cpu"):
        scaled_dot_product_attention(X, X, X, backend="hopper")
    with pytest.raises(ValueError, match="'reference' cannot serve this call: a mask is given"):
        scaled_dot_product_attention(
            X, X, X, attn_mask=torch.ones(X.shape[-2], X.shape[-2], dtype=torch.bool), backend="reference"
        )


def test_there_is_nothing_to_compile_ahead_on_a_cpu(monkeypatch):
    """On a GPU the same line finds the backend of the call's head_dim, before its first kernels."""
    monkeypatch.setattr(sdpa.first, "prepare", lambda *_: pytest.fail("prepared"))
    shape = 1, 8, 300, 128
    backend, format = sdpa._served(
        torch.device("cpu"), torch.bfloat16, "auto", shape, 2, 300, True, "e4m3", False
    )  # fmt: skip
    assert (backend.name, format.spec.k_dim, format.k.name, format.rotate) == ("reference", 128, "e4m3", False)
