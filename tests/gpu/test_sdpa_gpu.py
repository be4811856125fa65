"""FP8 attention as torch calls it, on a GPU: bytes against the reference, SQNR over shapes and strides, graphs, poison,
compilation.
"""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

import fp8attn
from fp8attn import fallback_reason, rope_scaled_dot_product_attention, scaled_dot_product_attention
from fp8attn._torch_ops import flatten_format, flatten_pages
from fp8attn.backends import select_backend
from fp8attn.formats.kv_format import KVFormat
from fp8attn.formats.page_layout import unpack_k, unpack_v
from fp8attn.formats.spec import PageSpec
from fp8attn.numerics import sqnr_db
from fp8attn.params import AttentionParams
from tests.support.kernel_cases import case_id, pairwise, poison_empty

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
CUDA = torch.device("cuda", 0)
LEAST_DB = 23.0  # inputs and weights in FP8; flat attention of some thousand normal values loses most


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    torch.manual_seed(0)
    poison_empty(monkeypatch)


def dense(batch: int, heads: int, length: int, head_dim: int, how: str, dtype=torch.bfloat16) -> torch.Tensor:
    if how == "fused":  # a slice of a projection to more than this
        return (
            torch.randn(batch, length, heads, 3 * head_dim, device=CUDA)
            .to(dtype)[..., head_dim : 2 * head_dim]
            .transpose(1, 2)
        )
    x = torch.randn(batch, length, heads, head_dim, device=CUDA).to(dtype).transpose(1, 2)
    return x.contiguous() if how == "contiguous" else x


FACTORS = {
    "batch": [1, 2, 3],
    "heads": [(2, 2), (8, 2), (4, 1), (3, 3)],
    "lengths": [
        (1, 1),
        (1, 777),
        (17, 129),
        (128, 128),
        (129, 127),
        (300, 1000),
        (1000, 300),
        (1025, 1025),
        (2048, 2048),
    ],
    "dims": [(64, 64), (128, 128), (256, 256), (96, 96), (72, 40), (192, 128)],
    "how": ["contiguous", "transposed", "fused"],
    "causal": [False, True],
    "dtype": [torch.bfloat16, torch.float16],
    "backend": ["auto", "triton"],
}


@pytest.mark.parametrize("case", pairwise(FACTORS), ids=case_id)
def test_it_is_torchs_attention(case):
    (q_heads, heads), (q_len, kv_len), (head_dim, v_dim) = case["heads"], case["lengths"], case["dims"]
    shared = case["how"], case["dtype"]
    query = dense(case["batch"], q_heads, q_len, head_dim, *shared)
    key, value = (dense(case["batch"], heads, kv_len, dim, *shared) for dim in (head_dim, v_dim))
    options = {"is_causal": case["causal"], "enable_gqa": q_heads != heads}
    assert fallback_reason(query, key, value, **options) is None
    out = scaled_dot_product_attention(query, key, value, **options, backend=case["backend"])
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), **options)
    assert out.dtype == query.dtype
    assert out.shape == exact.shape
    assert (out if case["how"] == "contiguous" else out.transpose(1, 2)).is_contiguous()
    assert sqnr_db(out, exact) > LEAST_DB


@pytest.mark.parametrize("keys", ["int8", "e4m3"])
@pytest.mark.parametrize("how", ["contiguous", "transposed", "fused"])
@pytest.mark.parametrize("means", [False, True])
def test_from_dense_writes_the_references_bytes(how, means, keys):
    batch, heads, length, head_dim = 2, 3, 1111, 128
    k, v = (
        dense(batch, heads, length, head_dim, how) * torch.exp2(torch.randint(-3, 4, (length, 1), device=CUDA))
        for _ in "kv"
    )
    k, v = k.bfloat16(), v.bfloat16()
    given = {"key_dtype": keys, "rotate_keys": how != "fused"}
    if means:
        given |= {
            "k_mean": torch.randn(heads, head_dim, device=CUDA),
            "v_mean": torch.randn(heads, head_dim, device=CUDA),
        }
    ours, theirs = (fp8attn.from_dense(k, v, **given, backend=backend) for backend in ("triton", "reference"))
    for name in ("k_scale", "v_scale", "page_table", "cache_seqlens"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    for name, unpack in (("k", unpack_k), ("v", unpack_v)):
        a, b = (unpack(getattr(pages, name).view(torch.uint8)).unflatten(0, (batch, -1)) for pages in (ours, theirs))
        assert torch.equal(a[:, :length], b[:, :length])
        assert name == "k" or not a[:, length:].any(), "V's tail must be finite"


@pytest.mark.parametrize("length", [1000, 2100])  # so many pages let attention begin before they are written
@pytest.mark.parametrize("causal", [False, True])
def test_a_graph_follows_its_inputs(causal, length):
    """Launches overlap their predecessors; replayed over inputs that change, every output is what a lone call gives."""
    inputs = [[dense(1, 8, length, 128, "contiguous") + i for _ in "qkv"] for i in range(3)]
    tables = torch.randn(length, 64, device=CUDA), torch.randn(length, 64, device=CUDA)

    def layer(query, key, value):
        plain = scaled_dot_product_attention(query, key, value, is_causal=causal)
        return plain, rope_scaled_dot_product_attention(plain, key, value, *tables, is_causal=causal)

    expected = []
    for each in inputs:
        expected.append([x.clone() for x in layer(*each)])
        torch.cuda.synchronize()
    held = [x.clone() for x in inputs[0]]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(*held)
    for i in range(60):
        for target, source in zip(held, inputs[i % 3], strict=True):
            target.copy_(source)
        graph.replay()
        replayed = [x.clone() for x in out]
        called = layer(*held)
        for a, b, c in zip(replayed, called, expected[i % 3], strict=True):
            assert torch.equal(a, c)
            assert torch.equal(b, c)


@pytest.mark.parametrize("how", ["contiguous", "transposed", "fused"])
@pytest.mark.parametrize(
    ("heads", "lengths", "dim", "causal"),
    [
        ((8, 2), (700, 700), 64, True),
        ((8, 8), (300, 1000), 128, True),  # keys cut off
        ((8, 8), (900, 300), 128, True),  # rows behind the last key: torch copies
        ((2, 2), (256, 9000), 128, False),  # in parts
        ((4, 4), (3, 900), 128, False),  # few queries
        ((4, 4), (300, 300), 72, False),  # padded
    ],
    ids=str,
)
def test_later_calls_are_the_first_ones(heads, lengths, dim, causal, how):
    """The first call compiles or binds, later ones launch what was kept: on new inputs each is what the reference
    gives.
    """
    for _ in range(3):
        query = dense(1, heads[0], lengths[0], dim, how)
        key, value = (dense(1, heads[1], lengths[1], dim, how) for _ in "kv")
        out = scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)
        expected = F.scaled_dot_product_attention(
            query.double(), key.double(), value.double(), is_causal=causal, enable_gqa=True
        )
        assert out.stride() == torch.empty_like(query).stride() and sqnr_db(out, expected) > LEAST_DB


def test_calls_on_several_streams():
    query, key, value = (dense(1, 8, 512, 128, "contiguous") for _ in "qkv")
    expected = scaled_dot_product_attention(query, key, value)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    found = []
    for i in range(30):
        with torch.cuda.stream(streams[i % 3]):
            found.append(scaled_dot_product_attention(query, key, value))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in found)


def test_ops_pass_torch_opcheck():
    x = dense(2, 2, 300, 128, "transposed")
    name = select_backend("auto", CUDA, x.dtype)
    checks = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        torch.ops.fp8attn.from_dense, (x, x, *flatten_format(KVFormat(PageSpec.of(128).name)), name), test_utils=checks
    )
    pages = fp8attn.from_dense(x, x)
    options = AttentionParams(None, 300, True, 0.1, exact=True)
    torch.library.opcheck(
        torch.ops.fp8attn.attention,
        (x.transpose(1, 2).flatten(0, 1), *flatten_pages(pages), *options, name),
        test_utils=checks,
    )


@pytest.mark.parametrize("options", [{"backend": "inductor"}, {"mode": "reduce-overhead"}], ids=["inductor", "graphs"])
def test_it_compiles_whole(options, monkeypatch):
    monkeypatch.undo()  # Dynamo does not trace a replaced torch.empty
    torch._dynamo.reset()

    def layer(query, key, value):
        return scaled_dot_product_attention(query * 2, key, value, is_causal=True, enable_gqa=True)

    compiled = torch.compile(layer, fullgraph=True, **options)
    for _ in range(4):
        arguments = dense(2, 4, 300, 128, "transposed"), *(dense(2, 2, 300, 128, "transposed") for _ in "kv")
        assert torch.equal(compiled(*arguments).clone(), layer(*arguments))
