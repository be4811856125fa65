"""FlashAttention-3 as a backend, and attention on FP8 operands, on a Hopper GPU; builds in `.peers` (benchmarks/peers)
are used, too.
"""

import pytest
import torch
import torch.nn.functional as F

import fp8attn
from benchmarks import peers
from fp8attn.backends import fa3
from fp8attn.formats.codec import FP8
from fp8attn.numerics import relative_error
from fp8attn_tools.diagnostics import accumulation

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
P_ROUNDING = 0.027  # of weights rounded to E4M3, on V without a mean: 2.3%


def builds() -> list[str]:
    """The builds that are installed."""
    if not HOPPER:
        return []
    peers.available()
    found = []
    for name in fa3.BUILDS:
        try:
            found.append(fa3.find(name).name)
        except LookupError:
            continue
    return found


BUILDS = builds()
needs_a_build = pytest.mark.skipif(not BUILDS, reason="no FlashAttention-3 is installed")


def operands(batch, heads, kv_heads, q_len, kv_len, head_dim, transposed=False, v_mean=0.0):
    """FP8 query, key and value, with descales that are not powers of two."""
    torch.manual_seed(0)
    shapes = (batch, heads, q_len, head_dim), *((batch, kv_heads, kv_len, head_dim),) * 2
    made = [torch.randn(shape, device="cuda") for shape in shapes]
    made[2] += v_mean
    if transposed:
        made = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in made]
    return [x.to(FP8) for x in made], [0.3 + torch.rand(batch, kv_heads, device="cuda") for _ in range(3)]


def exact(q, k, v, causal, descales, rows=slice(None)):
    """Attention of some rows in float64, with a causal mask aligned to the last key."""
    heads = q.shape[1]
    scales = (x.double().repeat_interleave(heads // x.shape[1], 1)[..., None, None] for x in descales)
    q, k, v = (
        x.double().repeat_interleave(heads // x.shape[1], 1) * scale for x, scale in zip((q, k, v), scales, strict=True)
    )
    position = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device="cuda")[rows, None]
    scores = q[:, :, rows] @ k.mT * q.shape[3] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.arange(k.shape[2], device="cuda") > position, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


SHAPES = [
    (1, 4, 4, 300, 300, 128),
    (2, 8, 2, 129, 333, 128),
    (2, 4, 4, 333, 129, 64),
    (3, 6, 3, 1, 77, 96),
    (2, 4, 1, 257, 513, 256),
]


@pytest.mark.parametrize("transposed", [False, True], ids=["bhsd", "bshd"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_operands_in_fp8(shape, causal, transposed):
    """Our kernels, and every build, against float64 on the same bytes."""
    tensors, descales = operands(*shape, transposed)
    reference = exact(*tensors, causal, descales)
    out = fp8attn.scaled_dot_product_attention_quantized(*tensors, causal, None, *descales)
    assert relative_error(out, reference) <= P_ROUNDING and out.stride() == tensors[0].stride()
    if shape[3] == 1:
        assert relative_error(out, reference) <= 3e-3  # decoding rounds no weights, only its output
    for name in BUILDS:
        out = fa3.attention(*tensors, *descales, causal=causal, softmax_scale=shape[5] ** -0.5, build=fa3.find(name))
        assert relative_error(out, reference) <= P_ROUNDING, name


@pytest.mark.parametrize("causal", [False, True])
def test_our_sums_keep_the_mean_of_v(causal):
    tensors, descales = operands(1, 2, 1, 1024, 32768, 128, v_mean=1.0)
    rows = slice(0, None, 8)
    out = fp8attn.scaled_dot_product_attention_quantized(*tensors, causal, None, *descales)
    assert relative_error(out[:, :, rows], exact(*tensors, causal, descales, rows)) <= 3e-3


def test_operands_in_fp8_in_a_graph():
    tensors, descales = operands(2, 8, 2, 200, 300, 128)
    call = lambda: fp8attn.scaled_dot_product_attention_quantized(*tensors, True, None, *descales)  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for x in tensors:
        x.view(torch.uint8).copy_(x.flip(2).view(torch.uint8))
    descales[2].mul_(3.0)
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, call())


def test_the_probe_knows_our_kernel():
    found = accumulation.measure(accumulation.kernels()["fp8attn hopper"], "cuda")
    assert found.levels == 2 and max(found.errors.values()) <= 3e-3


@pytest.mark.parametrize("inputs", [accumulation.STEP, accumulation.LATENTS], ids=["keys and values", "latents"])
def test_our_steps_sum_as_well_in_a_batch(inputs):
    found = {
        name: accumulation.measure(attend, "cuda", inputs)
        for name, attend in accumulation.kernels(inputs).items()
        if name.startswith("fp8attn")
    }
    assert "fp8attn triton" in found
    assert all(each.levels == 2 and max(each.errors.values()) <= 3e-3 for each in found.values())


def test_the_answer_of_vllms_kernel_over_latents_depends_on_the_batch():
    attend = accumulation.kernels(accumulation.LATENTS).get("vLLM's FlashMLA")
    if attend is None:
        pytest.skip("vLLM is not installed")
    found = accumulation.measure(attend, "cuda", accumulation.LATENTS)
    assert found.levels == 1 and found.errors[64, 32768] > 5 * found.errors[1, 32768]


@needs_a_build
@pytest.mark.parametrize("name", BUILDS)
def test_the_probe_tells_builds_apart(name):
    """For builds whose sums are known: vLLM's sums in two levels; fa3-fwd 0.0.3, the published FlashAttention-3, in
    one.
    """
    found = accumulation.measure(accumulation.kernels()[f"FlashAttention-3 ({name})"], "cuda")
    assert found.levels == {"vllm": 2, "fa3_fwd_interface": 1}.get(name, found.levels)
    assert found.levels == 2 or found.hurts_from <= 8192


@needs_a_build
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(500, 500), (300, 700), (700, 300)], ids=str)
def test_dense_calls(lengths, causal):
    torch.manual_seed(0)
    q = torch.randn(2, lengths[0], 8, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    k, v = torch.randn(2, 2, 2, lengths[1], 128, device="cuda", dtype=torch.bfloat16)
    k += torch.randn(128, device="cuda") * 5
    out = fp8attn.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True, backend="fa3")
    reference = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal, enable_gqa=True)
    assert relative_error(out, reference) <= 0.075 and out.stride() == q.stride()


@needs_a_build
def test_without_its_mean_v_survives_any_build():
    """V has 64k tokens of mean 1. A single-level build loses much of this sum unless the mean is subtracted first."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 65536, 128, device="cuda", dtype=torch.bfloat16)
    v += 1
    rows = slice(0, None, 512)
    out = fp8attn.scaled_dot_product_attention(q, k, v, backend="fa3")[:, :, rows]
    reference = torch.cat(
        [
            (a.double() @ b.double().mT * 128**-0.5).softmax(-1) @ c.double()
            for a, b, c in zip(q[0, :, rows], k[0], v[0], strict=True)
        ]
    )
    assert relative_error(out.flatten(1, 2)[0], reference) <= 5e-3  # fa3-fwd 0.0.3: 0.33%; of V as it is, 44%
