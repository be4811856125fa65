"""`scaled_dot_product_attention(backend="fa3")`: quantized rows without their means, torch's alignment; the build is
emulated.
"""

import pytest
import torch
import torch.nn.functional as F

import fp8attn
from fp8attn.backends import fa3
from fp8attn.numerics import relative_error
from tests.support.fa3 import UPSTREAM, VLLM, Fake


@pytest.fixture(params=[("fa3_fwd_interface", UPSTREAM), ("vllm", VLLM)], ids=["fa3_fwd_interface", "vllm"])
def fake(request, builds, monkeypatch):
    name, schema = request.param
    made = Fake(schema)
    builds(**{name: made})
    monkeypatch.setattr(fa3, "unsupported_reason", lambda device, dtype=None: None)
    return made


def tensors(q_len=40, kv_len=40, head_dim=64, v_dim=None, dtype=torch.bfloat16):
    torch.manual_seed(0)
    shapes = (2, 4, q_len, head_dim), (2, 2, kv_len, head_dim), (2, 2, kv_len, v_dim or head_dim)
    return [torch.randn(shape).to(dtype) for shape in shapes]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"q_len": 13},
        {"kv_len": 13},
        {"head_dim": 72, "v_dim": 40},
        {"dtype": torch.float16},
        {"q_len": 1, "kv_len": 1},
    ],
    ids=str,
)
def test_equals_torch(fake, shape, is_causal):
    q, k, v = tensors(**shape)
    out = fp8attn.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True, backend="fa3")
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    assert out.shape == expected.shape and out.dtype == q.dtype
    assert relative_error(out, expected) <= 0.07  # three operands of 2.6% each, and the softmax's amplification
    assert all(x.dtype == torch.float8_e4m3fn for call in fake.calls for x in (call["q"], call["k"], call["v"]))


def test_means_are_taken_off_and_come_back(fake):
    """With an offset of 100 in K and no means, K's variation is lost to rounding:
    the error is five times the output.
    """
    q, k, v = tensors(q_len=300, kv_len=300)
    for offset_k, offset_v, bound in ((100.0, 0.0, 0.07), (0.0, 100.0, 2**-8)):
        k1, v1 = k + offset_k, v + offset_v
        out = fp8attn.scaled_dot_product_attention(q, k1, v1, enable_gqa=True, backend="fa3")
        exact = F.scaled_dot_product_attention(q.double(), k1.double(), v1.double(), enable_gqa=True)
        assert relative_error(out, exact) <= bound
        given = fake.calls[-1]
        assert all((given[x].float().mean() * given[f"{x}_descale"].max()).abs() < 1.0 for x in "kv")


def test_the_output_lies_as_the_query_does(fake):
    q, k, v = tensors()
    for x in (q, q.transpose(1, 2).contiguous().transpose(1, 2)):
        assert fp8attn.scaled_dot_product_attention(x, k, v, enable_gqa=True, backend="fa3").stride() == x.stride()


def test_rope(fake):
    q, k, v = tensors()
    angle = torch.arange(40)[:, None] * torch.logspace(0, -3, 32)[None]
    cos, sin = angle.cos(), angle.sin()
    out = fp8attn.rope_scaled_dot_product_attention(q, k, v, cos, sin, enable_gqa=True, backend="fa3")
    q, k = (fp8attn.apply_rope(x, cos, sin) for x in (q, k))
    assert relative_error(out, F.scaled_dot_product_attention(q, k, v, enable_gqa=True)) <= 0.07


def test_it_compiles_whole(fake):
    q, k, v = tensors()
    call = lambda *x: fp8attn.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True, backend="fa3")  # noqa: E731
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v), call(q, k, v))


def test_what_cannot_run_says_why():
    with pytest.raises(ValueError, match="backend 'fa3' cannot run here: FlashAttention-3 is for NVIDIA GPUs, not cpu"):
        fp8attn.scaled_dot_product_attention(*tensors(), enable_gqa=True, backend="fa3")
