"""The Triton kernels, compiled, on a GPU: bytes against the reference, errors against float64 up to 131072 tokens, CUDA
graphs.
"""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

import fp8attn
from fp8attn import AttentionParams, KVPages, reference
from fp8attn.formats.codec import E4M3
from fp8attn.kernels import portable
from fp8attn.kernels.append import append
from fp8attn.kernels.codec import from_e4m3, to_e4m3
from fp8attn.kernels.machine import machine
from fp8attn.numerics import relative_error
from fp8attn.params import Append
from tests.support.kernel_cases import (
    APPEND_EDGES,
    APPEND_FACTORS,
    APPEND_WIDE,
    ATTENTION_FACTORS,
    ATTENTION_WIDE,
    COUNTED,
    case_id,
    check_append,
    check_attention,
    check_counted,
    check_out,
    clone,
    cumulative,
    empty_cache,
    fill,
    pairwise,
    poison_empty,
    random_tokens,
    run_attention,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    torch.manual_seed(0)
    poison_empty(monkeypatch)


# Conversions: by hardware and by integers, all the same bits


@triton.jit
def _convert(codes_ptr, halves_ptr, x_ptr, quantized_ptr, N: tl.constexpr, NATIVE: tl.constexpr):
    i = tl.arange(0, 256)
    codes = tl.load(codes_ptr + i)
    tl.store(halves_ptr + i, from_e4m3(codes.to(tl.float8e4nv, bitcast=True) if NATIVE else codes, NATIVE))
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(quantized_ptr + i, to_e4m3(tl.load(x_ptr + i), NATIVE))


@pytest.mark.parametrize("native", [False, True])
def test_conversions_are_exact(native):
    if native and not machine(CUDA).native_e4m3:
        pytest.skip("no E4M3 conversions in hardware")
    codes = torch.arange(256, dtype=torch.uint8, device=CUDA)
    # 2^24 FP32 values: every exponent and sign, the upper 16 mantissa bits, with sticky bits below
    x = (
        ((torch.arange(1 << 24, device=CUDA) << 8) | torch.randint(0, 256, (1 << 24,), device=CUDA))
        .to(torch.int32)
        .view(torch.float32)
    )
    halves, quantized = (
        torch.zeros(256, dtype=torch.float16, device=CUDA),
        torch.zeros(1 << 24, dtype=torch.uint8, device=CUDA),
    )
    _convert[(1 << 12,)](codes, halves, x, quantized, N=1 << 12, NATIVE=native)
    assert torch.equal(halves.float().nan_to_num(1e5), codes.view(torch.float8_e4m3fn).float().nan_to_num(1e5))
    expected = E4M3.quantize(x).view(torch.uint8)
    nan = (expected & 0x7F) == 0x7F
    assert torch.equal(nan, (quantized & 0x7F) == 0x7F)
    assert torch.equal(quantized[~nan], expected[~nan])


# Append

APPEND_GPU = APPEND_FACTORS | {
    "lengths": [[0, 0, 0], [5, 127, 0], [128, 100, 250], [17, 1, 1000]],
    "new": [[1, 1, 1], [3, 16, 0], [200, 1, 29], [128, 0, 5000], [2048, 2048, 2048]],
}


@pytest.mark.parametrize("case", pairwise(APPEND_GPU), ids=case_id)
def test_append_writes_the_references_bytes(case):
    check_append(append, case, CUDA)


@pytest.mark.parametrize("name", APPEND_EDGES)
def test_append_at_its_edges(name):
    check_append(append, APPEND_EDGES[name], CUDA)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("name", APPEND_WIDE)
def test_append_of_512_channels(name, heads):
    check_append(append, APPEND_WIDE[name] | {"heads": heads}, CUDA)


@pytest.mark.parametrize(
    ("head_dim", "key_dtype", "static"),
    [(64, "int8", False), (128, "e4m3", False), (64, "e4m3", True), (128, "int8", True)],
    ids=str,
)
@pytest.mark.parametrize("name", COUNTED)
def test_append_of_counted_tokens(name, head_dim, key_dtype, static):
    check_counted("triton", *COUNTED[name], head_dim, key_dtype, static, CUDA)


def test_token_by_token_equals_the_reference():
    """A page filled in 300 decode steps, its scale growing on the way."""
    theirs = empty_cache([320, 320], 2, 128, CUDA)
    fill(theirs, *(random_tokens(20, 2, 128, torch.bfloat16, CUDA) for _ in "kv"), [3, 17])
    ours = clone(theirs)
    for step in range(300):
        k, v = (random_tokens(2, 2, 128, torch.bfloat16, CUDA) * 2.0 ** (step // 30) for _ in "kv")
        for pages, function in ((ours, append), (theirs, reference.append)):
            function(
                pages, k, v, Append(None, 1)
            )  # fmt: skip
    for name in ("k_scale", "v_scale"):
        held = theirs.page_table.flatten().long()
        assert torch.equal(getattr(ours, name)[held], getattr(theirs, name)[held])
    for seq, length in enumerate(theirs.cache_seqlens.tolist()):
        for a, b in zip(ours.read(seq, length), theirs.read(seq, length), strict=True):
            assert torch.equal(a, b)


# Attention: the grid

ATTENTION_GPU = ATTENTION_FACTORS | {
    "lengths": [[1, 300, 0], [2, 15, 128], [16, 17, 129], [127, 130, 1], [4000, 5, 1025]],
    "queries": [1, 2, 7, 130, 600],
    "splits": [1, 3, None],  # None: as the launcher chooses
}


@pytest.mark.parametrize("case", pairwise(ATTENTION_GPU), ids=case_id)
def test_attention_against_float64(case, monkeypatch):
    if case["splits"]:
        monkeypatch.setattr(portable, "num_splits", lambda *_: case["splits"])
    check_attention(portable.portable_attention, case, CUDA)


@pytest.mark.parametrize("lengths", [None, [4000, 5, 1025]])
@pytest.mark.parametrize("name", ATTENTION_WIDE)
def test_attention_of_512_channels(name, lengths, monkeypatch):
    case = ATTENTION_WIDE[name] | ({"lengths": lengths} if lengths else {})
    monkeypatch.setattr(portable, "num_splits", lambda *_: case["splits"])
    check_attention(portable.portable_attention, case, CUDA)


@pytest.mark.parametrize("queries", [1, 5, 130])
def test_attention_writes_into_a_given_output(queries):
    check_out("triton", 128, queries, CUDA)


def test_integer_conversions_serve_attention_and_append(monkeypatch):
    """The code for GPUs without E4M3 hardware."""
    without = machine(CUDA)._replace(native_e4m3=False)
    for kernel in ("portable", "combine", "append"):
        monkeypatch.setattr(f"fp8attn.kernels.{kernel}.machine", lambda _: without)
    case = {name: values[-1] for name, values in ATTENTION_FACTORS.items()} | {"head_dim": 128, "softcap": 0.0}
    check_attention(portable.portable_attention, case, CUDA)
    check_append(append, {name: values[-1] for name, values in APPEND_FACTORS.items()} | {"head_dim": 128}, CUDA)


# Attention: long contexts


def long_cache(kind: str, length: int, head_dim: int, q: torch.Tensor) -> KVPages:
    """One sequence of two KV heads, without static means: V's mean is the kernel's to accumulate."""
    heads, shape = 2, (length, 2, head_dim)
    k, v = torch.randn(shape, device=CUDA), torch.randn(shape, device=CUDA)
    if kind == "mean 1":
        v += 1
    elif kind == "flat":
        k.zero_()
    elif kind == "peaked":
        k *= 8
    elif kind == "constant":  # one score above the others: a bias in rounding P or summing shows in full
        k.zero_()
        k[length // 2] = q[-1, :: q.shape[1] // heads].float() * (4 / head_dim**0.5)
        v.fill_(1)
    elif kind == "needle":  # one key that weighs as much as all others together
        k.zero_()
        direction = q[-1, :: q.shape[1] // heads].float()
        score = torch.log(torch.tensor(float(length)))
        k[length // 3] = direction * (score * head_dim**0.5 / (direction * direction).sum(-1, keepdim=True))
    pages = empty_cache([length], heads, head_dim, CUDA)
    fill(pages, k, v, [length])
    return pages


@pytest.mark.parametrize("kind", ["normal", "mean 1", "flat", "peaked", "constant", "needle"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("queries", [1, 100])
def test_error_is_the_same_at_every_length(kind, head_dim, queries):
    arguments = {
        "cu_seqlens_q": None,
        "max_seqlen_q": queries,
        "causal": True,
        "softmax_scale": head_dim**-0.5,
        "window": 0,
        "softcap": 0.0,
        "sinks": None,
        "leftpad_k": None,
    }
    for length in (1, 2, 127, 128, 129, 1000, 8192, 32768, 131072):
        if length >= queries:
            q = torch.randn(queries, 8, head_dim, device=CUDA).half()
            pages = long_cache(kind, length, head_dim, q)
            error = run_attention(portable.portable_attention, pages, q, arguments)
            ours, _ = portable.portable_attention(q, pages, AttentionParams(**arguments))
            again, _ = portable.portable_attention(q, pages, AttentionParams(**arguments))
            assert torch.equal(ours, again), "two runs differ"
            print(f"{kind} D{head_dim} {queries} queries {length} keys: {error:.2e}")


def test_one_pass_over_131072_keys_without_splits(monkeypatch):
    """The longest chain of sums, whatever the launcher would choose."""
    monkeypatch.setattr(portable, "num_splits", lambda *_: 1)
    test_error_is_the_same_at_every_length("mean 1", 128, 1)
    test_error_is_the_same_at_every_length("mean 1", 256, 1)
    test_error_is_the_same_at_every_length("mean 1", 256, 100)


# Memory layout and capture


def test_pages_beyond_two_gigabytes_are_reached():
    """Offsets in 64 bits: the same tokens in the first and in the last pages of a pool of 2.2 GB each for K and V."""
    num_pages = 2_200_000_000 // (128 * 128 * 8)
    pages = KVPages.empty(num_pages, 8, 128, 2, 2, CUDA)
    pages.page_table.copy_(torch.tensor([[0, 1], [num_pages - 2, num_pages - 1]]))
    k, v = (random_tokens(200, 8, 128, torch.bfloat16, CUDA).repeat(2, 1, 1) for _ in "kv")
    append(
        pages, k, v, Append(None, 200)
    )  # fmt: skip
    q = torch.randn(1, 8, 128, device=CUDA).half().repeat(2, 1, 1)
    out = fp8attn.attention(q, pages, backend="triton")
    assert torch.equal(out[0], out[1])
    # A wrong page is wrong by all of it. Large scores show the rounding of rotated queries to FP16.
    assert relative_error(out[:1], reference_of(q[:1], pages)) < 0.01


def reference_of(q: torch.Tensor, pages: KVPages) -> torch.Tensor:
    """Attention of the first sequence's last token in float64."""
    first = replace(pages, page_table=pages.page_table[:1], cache_seqlens=pages.cache_seqlens[:1])
    params = AttentionParams(cu_seqlens_q=None, max_seqlen_q=1, causal=True, softmax_scale=128**-0.5)
    return reference.attention(q, first, params, compute_dtype=torch.float64, out_dtype=torch.float64)[0]


def test_a_captured_step_follows_changing_lengths():
    """One CUDA graph, replayed over a page boundary, against the same steps run eagerly."""
    lengths = [120, 3, 254]
    eager = empty_cache([600] * 3, 2, 128, CUDA, mean=0.5)
    fill(eager, *(random_tokens(sum(lengths), 2, 128, torch.bfloat16, CUDA) for _ in "kv"), lengths)
    pages = clone(eager)
    q = torch.zeros(3, 8, 128, dtype=torch.bfloat16, device=CUDA)
    k, v = (torch.zeros(3, 2, 128, dtype=torch.bfloat16, device=CUDA) for _ in "kv")

    def step(pages):
        fp8attn.append(pages, k, v, backend="triton")
        return fp8attn.attention(q, pages, return_lse=True, backend="triton")

    step(clone(eager))  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step(pages)
    for _ in range(20):
        for static in (q, k, v):
            static.normal_()
        graph.replay()
        expected, expected_lse = step(eager)
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
    assert pages.cache_seqlens.tolist() == [length + 20 for length in lengths]


def test_ragged_prefill_through_the_ops_in_every_stride():
    """Queries, keys and values cut out of one fused projection, sequences of very different lengths."""
    lengths, heads, group, head_dim = [700, 1, 0, 2500], 2, 4, 128
    pages = empty_cache(lengths, heads, head_dim, CUDA)
    fused = torch.randn(sum(lengths), heads * (group + 2), head_dim, device=CUDA, dtype=torch.float16)
    q, k, v = fused.split([heads * group, heads, heads], 1)
    cu = cumulative(lengths, CUDA)
    fp8attn.append(pages, k, v, cu_seqlens=cu, max_seqlen=max(lengths))
    arguments = {"cu_seqlens_q": cu, "max_seqlen_q": max(lengths), "causal": True, "softmax_scale": head_dim**-0.5}
    run_attention(portable.portable_attention, pages, q, arguments)
