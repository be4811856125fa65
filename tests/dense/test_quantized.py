"""Attention on FP8 operands: PyTorch's signature, against float64 on the same bytes."""

import inspect

import pytest
import torch
from torch.autograd import forward_ad

import fp8attn
from fp8attn import scaled_dot_product_attention_quantized as attend
from fp8attn.dense.strategies import fp8_strategy
from fp8attn.formats.codec import FP8
from fp8attn.formats.kv_format import KVFormat
from fp8attn.formats.spec import PageSpec
from fp8attn.numerics import relative_error


def operands(batch=2, heads=4, kv_heads=2, q_len=5, kv_len=131, head_dim=64, v_dim=None, seed=0):
    """FP8 query, key and value, with descales that are not powers of two."""
    torch.manual_seed(seed)
    q, k = torch.randn(batch, heads, q_len, head_dim), torch.randn(batch, kv_heads, kv_len, head_dim)
    v = (
        torch.randn(batch, kv_heads, kv_len, v_dim or head_dim).clamp(-4, 4) * 100
    )  # a cast to E4M3 does not saturate everywhere
    descales = [0.1 + torch.rand(batch, kv_heads) for _ in range(3)]
    return [x.to(FP8) for x in (q, k, v)], descales


def exact(q, k, v, is_causal=False, scale=None, descales=None):
    """Attention in float64, with a causal mask aligned to the last key."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    if descales is not None:
        q, k, v = (
            x * d.double().repeat_interleave(group, 1)[..., None, None]
            for x, d in zip((q, k, v), descales, strict=True)
        )
    scores = q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    if is_causal:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(k.shape[2] - q.shape[2] + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


def check(out, reference):
    assert out.shape == reference.shape and out.dtype == torch.bfloat16
    assert relative_error(out, reference) <= 2**-8  # the output's rounding to BF16


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"q_len": 131},
        {"q_len": 40, "kv_len": 256, "kv_heads": 4},
        {"q_len": 1, "kv_len": 1, "kv_heads": 1},
        {"head_dim": 72},
        {"head_dim": 128, "v_dim": 64},
        {"head_dim": 40, "v_dim": 96},
    ],
    ids=str,
)
def test_equals_float64_on_the_same_bytes(shape, is_causal):
    tensors, descales = operands(**shape)
    check(attend(*tensors, is_causal, None, *descales), exact(*tensors, is_causal, None, descales))
    check(attend(*tensors, is_causal, 0.3), exact(*tensors, is_causal, 0.3))
    one = torch.full((), 0.7).expand(descales[0].shape)
    check(attend(*tensors, is_causal, None, one, None, one), exact(*tensors, is_causal, None, [one, one / 0.7, one]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted on a CPU; tests/gpu has the compiled kernels")
def test_the_portable_kernels_take_any_descales():
    pytest.importorskip("triton")
    tensors, descales = operands(batch=1, kv_len=300)
    out = attend(*tensors, True, None, *descales, backend="triton")
    assert relative_error(out, exact(*tensors, True, None, descales)) <= 2**-8


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted on a CPU; tests/gpu has the compiled kernels")
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("zero", ["qkv", "q", "k", "v"])
def test_a_head_of_zeros_has_a_descale_of_zero(zero, backend):
    """`absmax / 448` of a head that is zero. Its scores are zero, or its output."""
    if backend == "triton":
        pytest.importorskip("triton")
    tensors, descales = operands(batch=1, kv_len=140)
    for name, descale in zip("qkv", descales, strict=True):
        if name in zero:
            descale[0, 1] = 0.0
    out, expected = attend(*tensors, True, 2.0, *descales, backend=backend), exact(*tensors, True, 2.0, descales)
    for head in range(4):
        assert (out[0, head].double() - expected[0, head]).norm() <= 2**-8 * expected[0, head].norm() + 1e-30, head


def test_negative_descales_are_refused():
    tensors, descales = operands()
    descales[1][1, 0] = -0.5
    with pytest.raises(ValueError, match=r"k_descale must not be negative; got -0\.5: negate k's own values"):
        attend(*tensors, True, None, *descales)


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted on a CPU; tests/gpu has the compiled kernels")
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("which", range(3))
def test_on_a_gpu_a_negative_descale_makes_its_head_nan(which, backend):
    """There nothing waits to refuse it. The reference and the kernels agree, and other heads stay as they are."""
    if backend == "triton":
        pytest.importorskip("triton")
    (q, k, v), descales = operands(batch=1, kv_len=140)
    expected = fp8_strategy(backend, k, v, *descales, 0.125)(q, True)
    descales[which][0, 1] *= -1
    out = fp8_strategy(backend, k, v, *descales, 0.125)(q, True)
    assert out[0, 2:].isnan().all() and torch.equal(out[0, :2], expected[0, :2])


def test_every_byte_survives_the_pages():
    """Values from the smallest subnormal to the largest, in one page and head: V read out one token a query."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = torch.cat([codes[:0x7F], codes[0x80:0xFF]]).repeat(64)[: 128 * 64]
    v = codes.view(1, 1, 128, 64).view(FP8)
    q = torch.eye(128, dtype=torch.float32)[None, None].mul(448).to(FP8)  # query i is key i, and no other
    out = attend(q, q, torch.nn.functional.pad(v.view(torch.uint8), (0, 64)).view(FP8), scale=1.0)
    assert torch.equal(out[..., :64].float(), v.float())


def test_rows_without_keys_are_zero():
    tensors, descales = operands(q_len=9, kv_len=4)
    out = attend(*tensors, True, None, *descales)
    assert not out[:, :, :5].any()
    check(out, exact(*tensors, True, None, descales))
    q, k, v = tensors
    assert attend(q, k[:, :, :0], v[:, :, :0]).eq(0).all()
    assert attend(q[:, :, :0], k, v).shape == (2, 4, 0, 64)


@pytest.mark.parametrize("v_dim", [64, 32])
def test_the_output_lies_as_the_query_does(v_dim):
    (q, k, v), descales = operands(v_dim=v_dim)
    out = attend(q, k, v, False, None, *descales)
    transposed = attend(q.transpose(1, 2).contiguous().transpose(1, 2), k.mT.contiguous().mT, v, False, None, *descales)
    assert torch.equal(out, transposed)
    assert out.is_contiguous() and transposed.transpose(1, 2).is_contiguous() == (v_dim == 64)
    part = (
        q.transpose(1, 2).contiguous().repeat(1, 1, 2, 1)[:, :, :4].transpose(1, 2)
    )  # of a tensor that has more heads
    assert torch.equal(attend(part, k, v, False, None, *descales), out)


def test_the_signature_is_pytorchs():
    from torch.nn.attention.experimental._scaled_dot_product_attention_quantized import (
        DescaleType,
        _scaled_dot_product_attention_quantized,
    )

    theirs = inspect.signature(_scaled_dot_product_attention_quantized).parameters
    ours = inspect.signature(attend).parameters
    assert list(ours) == [*theirs, "backend"]
    assert all(ours[name].default == p.default and ours[name].kind == p.kind for name, p in theirs.items())
    tensors, descales = operands()
    assert attend(*tensors, False, None, *descales, DescaleType.PER_HEAD).shape == tensors[0].shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"q_descale": torch.ones(2, 2, dtype=torch.float64)},
            r"q_descale \[B, H\] must be \(2, 2\) float32 on cpu; got \(2, 2\) float64",
        ),
        ({"k_descale": torch.ones(2, 4)}, r"k_descale \[B, H\] must be \(2, 2\) float32 on cpu; got \(2, 4\)"),
        ({"v_descale": torch.ones(2, 2, 1)}, r"v_descale \[B, H\] must be \(2, 2\) .* got \(2, 2, 1\)"),
        ({"v_descale": torch.ones(2, 2, device="meta")}, r"v_descale \[B, H\] must be .* on cpu; got .* on meta"),
        ({"v_descale_type": 1}, "v_descale_type must be DescaleType.PER_HEAD"),
        ({"query": torch.zeros(2, 4, 5, 64)}, "query must be torch.float8_e4m3fn on cpu .* got torch.float32"),
        ({"query": torch.zeros(2, 3, 5, 64).to(FP8)}, "Hq a multiple of H"),
        ({"query": torch.zeros(4, 5, 64).to(FP8)}, r"must be \[B, Hq, L, E\]"),
        ({"query": torch.zeros(2, 4, 5, 32).to(FP8)}, r"must be \[B, Hq, L, E\]"),
        ({"value": torch.zeros(2, 2, 131, 320).to(FP8)}, "E and Ev up to 256"),
        ({"backend": "fa3"}, "backend 'fa3' cannot run here: FlashAttention-3 is for NVIDIA GPUs, not cpu"),
        ({"backend": "fastest"}, "unknown backend 'fastest'"),
    ],
)
def test_refusals_say_what_would_do(change, message):
    tensors, _ = operands()
    with pytest.raises(ValueError, match=message):
        attend(**dict(zip(("query", "key", "value"), tensors, strict=True)) | change)


def test_a_gradient_is_warned_of():
    tensors, _ = operands()
    tensors[0].requires_grad_()
    with pytest.warns(UserWarning, match="no derivative"):
        assert not attend(*tensors).requires_grad


def test_a_tangent_is_warned_of_and_transforms_are_refused():
    tensors, descales = operands()
    expected = attend(*tensors, True, None, *descales)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(descales[1], torch.ones_like(descales[1]))
        with torch.no_grad(), pytest.warns(UserWarning, match="no derivative"):
            out = forward_ad.unpack_dual(attend(*tensors, True, None, descales[0], dual, descales[2]))
        assert out.tangent is None and torch.equal(out.primal, expected)
    with pytest.raises(RuntimeError, match=r"a transform of torch\.func is active"):
        torch.vmap(attend)(*(x[None] for x in tensors))


def test_the_op_passes_torch_opcheck():
    # All but test_schema, which compares arguments with allclose: a CPU has none for FP8.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for v_dim in (64, 32):
        tensors, descales = operands(v_dim=v_dim)
        torch.library.opcheck(
            torch.ops.fp8attn.sdpa_quantized, (*tensors, True, 0.1, *descales, "reference"), test_utils=checks
        )


def test_it_compiles_whole():
    tensors, descales = operands()
    compiled = torch.compile(lambda *x: attend(*x[:3], True, None, *x[3:]) * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors, *descales), attend(*tensors, True, None, *descales) * 2)


def test_inputs_stay_as_they_are():
    tensors, descales = operands()
    before = [x.view(torch.uint8).clone() for x in (*tensors, *descales)]
    attend(*tensors, True, None, *descales)
    assert all(torch.equal(old, new.view(torch.uint8)) for old, new in zip(before, (*tensors, *descales), strict=True))


def test_it_is_exported():
    assert "scaled_dot_product_attention_quantized" in fp8attn.__all__


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted on a CPU; tests/gpu has the compiled kernels")
@pytest.mark.parametrize("head_dim", [64, 80])
def test_fp8_goes_to_pages_by_the_kernel_as_by_the_reference(head_dim):
    """No precision is lost there."""
    pytest.importorskip("triton")
    from fp8attn import reference
    from fp8attn.kernels import append

    (_, k, v), _ = operands(kv_len=130, head_dim=head_dim)
    k.view(torch.uint8)[0, 0, :3, :2] = torch.tensor([[0x01, 0x81], [0x7E, 0xFE], [0x00, 0x80]], dtype=torch.uint8)
    format = KVFormat(PageSpec.of(head_dim, "e4m3").name, rotate=False)
    pages = append.from_dense(k.transpose(1, 2).contiguous().transpose(1, 2), v, format)
    expected = reference.from_dense(k, v, format)
    for name in ("v", "k_scale", "v_scale", "page_table", "cache_seqlens"):  # K's bytes past the end are anything
        ours, theirs = (getattr(x, name) for x in (pages, expected))
        assert torch.equal(
            ours.view(torch.uint8) if name == "v" else ours, theirs.view(torch.uint8) if name == "v" else theirs
        )
    for seq in range(2):
        read = pages.read(seq, 130)
        assert all(torch.equal(x, y[seq].transpose(0, 1).float()) for x, y in zip(read, (k, v), strict=True))
