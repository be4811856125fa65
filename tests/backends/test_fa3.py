"""FlashAttention-3 without an installed build: published schemas with emulated kernels, and the probe of their sums."""

import pytest
import torch

from fp8attn.backends import fa3
from fp8attn.formats.codec import E4M3, FP8
from fp8attn.numerics import relative_error
from fp8attn_tools.diagnostics import accumulation
from fp8attn_tools.diagnostics.accumulation import PROMPT, Accumulation, Inputs, measure
from tests.support.fa3 import UPSTREAM, VLLM, Fake, exact


def attend(q, k, v, *scales, **options):
    """Of rows `[B, S, heads, D]`."""
    return fa3.attention(*(x.transpose(1, 2) for x in (q, k, v)), *scales, **options).transpose(1, 2)


def rows(batch=2, heads=4, kv_heads=2, q_len=7, kv_len=19, head_dim=16):
    torch.manual_seed(0)
    shapes = (batch, q_len, heads, head_dim), *((batch, kv_len, kv_heads, head_dim),) * 2
    return [torch.randn(shape).to(FP8) for shape in shapes], [0.5 + torch.rand(batch, kv_heads) for _ in range(3)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "schema"), [("flash_attn_interface", UPSTREAM), ("fa3_fwd_interface", UPSTREAM), ("vllm", VLLM)]
)
def test_a_build_is_called_by_its_schema(builds, name, schema, causal):
    fake = Fake(schema)
    builds(**{name: fake})
    (q, k, v), scales = rows()
    out = attend(q, k, v, *scales, causal=causal, softmax_scale=0.25)
    dequantized = [
        x.float() * scale.repeat_interleave(x.shape[2] // 2, 1)[:, None, :, None]
        for x, scale in zip((q, k, v), scales, strict=True)
    ]
    assert relative_error(out, exact(*dequantized, 0.25, causal)) <= 2**-8
    [given] = fake.calls
    assert (given["is_causal"], given["softmax_scale"]) == (causal, 0.25)
    asked = {
        "q",
        "k",
        "v",
        "out",
        "q_descale",
        "k_descale",
        "v_descale",
        "is_causal",
        "softmax_scale",
        "max_seqlen_q",
        "max_seqlen_k",
    }
    asked |= {"cu_seqlens_q", "cu_seqlens_k"} if name == "vllm" else {"max_seqlen_q", "max_seqlen_k"}
    rest = {key: x for key, x in given.items() if key not in asked}
    neutral = {
        "window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "attention_chunk": 0, "num_splits": 0,
        "sm_margin": 0,
        "is_rotary_interleaved": False, "cp_world_size": 1, "cp_rank": 0,
    }  # fmt: skip
    assert rest == {key: neutral.get(key) for key in rest}
    if name == "vllm":
        assert given["cu_seqlens_q"].tolist() == [0, 7, 14] and given["cu_seqlens_k"].tolist() == [0, 19, 38]


def test_scales_may_be_left_out(builds):
    builds(vllm=Fake(VLLM))
    (q, k, v), _ = rows()
    assert relative_error(attend(q, k, v, causal=False, softmax_scale=1.0), exact(q, k, v, 1.0, False)) <= 2**-8


def test_the_output_has_the_memory_order_of_the_queries(builds):
    """vLLM's build writes sequences one after another. For another memory order, the output is copied."""
    builds(vllm=Fake(VLLM))
    (q, k, v), _ = rows()
    out = attend(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, causal=False, softmax_scale=1.0)
    assert out.transpose(1, 2).is_contiguous()
    assert torch.equal(out, attend(q, k, v, causal=False, softmax_scale=1.0))


@pytest.mark.parametrize(("heads_per_scale", "means"), [(1, True), (2, False), (4, True)])
def test_quantize(heads_per_scale, means):
    x = (torch.randn(2, 150, 4, 64) * torch.tensor([1.0, 30.0, 0.01, 1.0])[:, None] + 2).half().transpose(1, 2)
    x_fp8, scale, mean = fa3.quantize(x, rotate_keys=False, subtract_mean=means, heads_per_scale=heads_per_scale)
    y = x.float()
    assert x_fp8.dtype == FP8 and x_fp8.stride() == x.stride()
    assert (mean is not None) == means
    centred = y - mean[:, :, None] if means else y
    assert torch.equal(scale, E4M3.needed_scale(centred.unflatten(1, (-1, heads_per_scale)).abs().amax((2, 3, 4))))
    each = scale.repeat_interleave(heads_per_scale, 1)[..., None, None]
    assert torch.equal(x_fp8.float(), E4M3.quantize(centred, each).float())


def test_builds_are_chosen_in_order(builds):
    fakes = {"vllm": Fake(VLLM), "fa3_fwd_interface": Fake(UPSTREAM)}
    builds(**fakes)
    assert fa3.default().name == "fa3_fwd_interface"
    with pytest.raises(LookupError, match="not installed"):
        fa3.find("flash_attn_interface")
    (q, k, v), _ = rows()
    attend(q, k, v, causal=True, softmax_scale=1.0, build=fa3.find("vllm"))
    assert [len(fake.calls) for fake in fakes.values()] == [1, 0]


def test_a_build_with_arguments_unknown_is_refused(builds):
    builds(vllm=Fake(VLLM + ", int phase_of_the_moon"))
    with pytest.raises(LookupError, match="has an argument 'phase_of_the_moon'"):
        fa3.default()


def test_a_library_is_loaded_without_its_package(builds, monkeypatch, tmp_path):
    """A library that does not load, or registers another op, is an error that says so. A missing library is searched
    for again.
    """
    package = tmp_path / "fp8attn_fake_fa3"
    builds()
    monkeypatch.setattr(fa3, "BUILDS", {"vllm": ("fp8attn_test_late", "fp8attn_fake_fa3", "inner/_C*.so")})
    with pytest.raises(LookupError, match=r"no FlashAttention-3 is installed \(pip install fa3-fwd"):
        fa3.default()
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "inner/_C.abi3.so").write_bytes(b"no library")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(LookupError, match=r"vllm: .*_C\.abi3\.so does not load with torch"):
        fa3.default()
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    with pytest.raises(LookupError, match="registers no fp8attn_test_late::fwd"):
        fa3.default()
    library = torch.library.Library("fp8attn_test_late", "DEF")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: library.define(f"fwd({UPSTREAM}) -> Tensor[]"))
    assert fa3.default().name == "vllm"


def test_reasons(builds, monkeypatch):
    builds()
    assert fa3.unsupported_reason("cpu") == "FlashAttention-3 is for NVIDIA GPUs, not cpu"
    assert fa3.unsupported_reason("cuda") == "PyTorch finds no GPU" or torch.cuda.is_available()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (10, 0))
    assert "compute capability 9.0), not 10.0" in fa3.unsupported_reason("cuda")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    assert "not torch.float32" in fa3.unsupported_reason("cuda", torch.float32)
    assert "pip install fa3-fwd" in fa3.unsupported_reason("cuda")
    builds(vllm=Fake(VLLM))
    assert fa3.unsupported_reason("cuda", torch.float16) is None


# How they sum

LENGTHS = (1024, 8192, 32768)


@pytest.mark.parametrize(
    ("levels", "schema", "name"), [(1, UPSTREAM, "fa3_fwd_interface"), (2, UPSTREAM, "flash_attn_interface")]
)
def test_the_probe_tells_one_level_from_two(builds, levels, schema, name):
    builds(**{name: Fake(schema, levels)})
    inputs = Inputs(heads=2, queries=1, channels=128)
    cases = [(1, length) for length in LENGTHS]
    found = measure(accumulation.dense()[f"FlashAttention-3 ({name})"], "cpu", inputs, cases)
    assert found.levels == levels
    errors = list(found.errors.values())
    if levels == 1:
        assert found.hurts_from == 8192
        assert errors == pytest.approx([0.0019, 0.1188, 0.4838], rel=0.02)  # as measured of fa3-fwd on an H100
        assert str(found).startswith("single-level: hurts from 8,192 tokens where V has a mean (1")
    else:
        assert found.hurts_from is None and max(errors) < 3e-3
        assert str(found) == f"two-level: {errors[-1]:.2%} off at 32,768 tokens"


def test_the_exact_reference_is_two_level():
    """Our op as the probe calls it, on the CPU's reference."""
    from fp8attn import scaled_dot_product_attention_quantized

    found = measure(
        lambda q, k, v: scaled_dot_product_attention_quantized(q[:, :1, :1], k, v).expand(q.shape), "cpu",
        cases=[(1, 256), (1, 1000)],
    )  # fmt: skip
    assert found.levels == 2 and max(found.errors.values()) < 2e-3


def test_what_is_said():
    found = Accumulation({(1, 1024): 0.004, (1, 2048): 0.03, (1, 8192): 0.12, (1, 131072): 0.65})
    assert (found.levels, found.hurts_from) == (1, 2048)
    assert (
        str(found)
        == "single-level: hurts from 2,048 tokens where V has a mean (3.0% at 2,048, 12.0% at 8,192, 65.0% at 131,072)"
    )
    assert str(Accumulation({(1, 1024): 0.002, (1, 131072): 0.05})).endswith(
        "from 131,072 tokens where V has a mean (5.0% at 131,072)"
    )
    assert "fp8attn hopper" in accumulation.candidates(PROMPT, "cpu")
