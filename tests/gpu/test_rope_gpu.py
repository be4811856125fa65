"""RoPE on queries inside the Hopper prefill kernel: the same bits as a call whose queries got RoPE in a separate launch before."""

import pytest
import torch

pytest.importorskip("triton")

import fp8attn
from fp8attn import AttentionParams, rope_scaled_dot_product_attention
from fp8attn.dense import rope as dense_rope
from fp8attn.dense.sdpa import attend_dense
from fp8attn.formats.codec import FP8
from fp8attn.formats.rope import Rope, with_tables
from fp8attn.kernels import prefill
from fp8attn.kernels.append import rope_dense
from fp8attn.kernels.common import power_of_two

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"), pytest.mark.usefixtures("poisoned")]
CUDA = torch.device("cuda", 0)


def tokens(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=CUDA).to(dtype)


def angles(*shape: int, dtype=torch.float32) -> dict[str, torch.Tensor]:
    """Tables in the middle of a larger tensor that is NaN."""
    tables = []
    angle = torch.randn(shape, device=CUDA)
    for x in (angle.cos(), angle.sin()):
        wide = torch.full((*shape[:-2], shape[-2] + 16, shape[-1]), torch.nan, device=CUDA, dtype=dtype)
        tables.append(wide[..., 8:-8, :])
        tables[-1].copy_(x)
    return dict(zip(("rope_cos", "rope_sin"), tables, strict=True))


def held(lengths: list[int], head_dim: int, heads: int = 2):
    """Pages of sequences of these lengths."""
    pages = fp8attn.from_dense(*(tokens(len(lengths), heads, max(lengths), head_dim) for _ in "kv"))
    pages.cache_seqlens.copy_(torch.tensor(lengths))
    return pages


def check(q, pages, tables, interleaved=False, causal=True, cu=None, longest=None) -> None:
    params = AttentionParams(cu_seqlens_q=cu, max_seqlen_q=longest or q.shape[1], causal=causal, softmax_scale=0.1, return_lse=True)
    rope = Rope(*tables.values(), interleaved)
    inside = prefill.prefill_attention(q, pages, params._replace(rope=rope))
    dense = (lambda x: x) if q.dim() == 4 else (lambda x: x[None])
    turned = rope_dense(dense(q).transpose(1, 2), with_tables(rope, dense)).transpose(1, 2).reshape(q.shape)
    before = prefill.prefill_attention(turned, pages, params)
    assert not inside[0].isnan().any()
    for a, b in zip(inside, before, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("case", ["halves", "pairs", "part"])
@pytest.mark.parametrize(("head_dim", "short"), [(d, True) for d in (64, 80, 96, 128, 192, 256)] + [(128, False)])
def test_the_kernel_turns_queries_to_the_same_bits(head_dim, short, case, monkeypatch):
    shape = prefill.cut.SHAPES[power_of_two(head_dim)][0 if short else 1]
    monkeypatch.setattr(prefill.cut, "cuts", lambda *_: [(shape, 3 if case == "part" else 1)])
    if case == "halves":  # rows of few keys and of many; tables of each sequence; queries that lie heads first
        pages = held([900, 900], head_dim)
        check(tokens(2, 900, 4, head_dim), pages, angles(2, 900, head_dim // 2))
        shared = {name: x.expand(2, -1, -1) for name, x in angles(1, 333, head_dim // 2).items()}
        check(tokens(2, 4, 333, head_dim).transpose(1, 2), pages, shared, causal=False)
        check(tokens(2 * 333, 4, head_dim), pages, angles(2 * 333, head_dim // 2), longest=333)
    elif case == "pairs":  # ragged, with rows behind the last; every second number of tables
        cu = torch.tensor([0, 300, 301, 301, 1000], dtype=torch.int32, device=CUDA)
        tables = {name: x[:, ::2] for name, x in angles(1150, head_dim, dtype=torch.bfloat16).items()}
        check(tokens(1150, 4, head_dim, dtype=torch.float16), held([900, 1, 5, 800], head_dim), tables, True, cu=cu, longest=699)
    else:  # some of the channels, keys in parts
        tables = angles(2, 200, head_dim // 32 * 8, dtype=torch.bfloat16)
        check(tokens(2, 200, 4, head_dim), held([1000, 100], head_dim), tables)


@pytest.mark.parametrize(
    ("lengths", "head_dim", "half", "interleaved", "causal"),
    [
        ((700, 700), 128, 64, False, True),
        ((300, 1000), 128, 64, True, False),
        ((900, 300), 128, 32, False, True),  # rows behind the last key
        ((300, 300), 72, 32, False, True),  # padded
        ((300, 300), 80, 10, False, True),  # not whole eights: turned before
        ((3, 900), 128, 64, False, True),  # few queries
    ],
    ids=str,
)
def test_whole_calls(lengths, head_dim, half, interleaved, causal):
    """For new inputs and tables, each call equals its parts."""
    (q_len, kv_len), options = lengths, {"rope_interleaved": interleaved}
    for _ in range(4):
        query = tokens(2, 4, q_len, head_dim)
        key, value = (tokens(2, 2, kv_len, head_dim) for _ in "kv")
        q_rope, k_rope = angles(2, q_len, half), angles(2, kv_len, half)
        out = rope_scaled_dot_product_attention(
            query, key, value, *q_rope.values(), key_rope_cos=k_rope["rope_cos"], key_rope_sin=k_rope["rope_sin"], is_causal=causal,
            enable_gqa=True, **options,
        )  # fmt: skip
        turned = dense_rope.apply_rope(query, **q_rope, **options)
        expected = attend_dense(turned, key, value, None, Rope(*k_rope.values(), interleaved), causal, None, "int8", True, "auto")
        assert torch.equal(out, expected)


def test_fp8_queries_are_refused():
    table = {"rope_cos": torch.zeros(300, 64, device=CUDA), "rope_sin": torch.zeros(300, 64, device=CUDA)}
    with pytest.raises(ValueError, match="rotate them before they are quantized"):
        check(tokens(300, 4, 128).to(FP8), held([300], 128), table, longest=300)
