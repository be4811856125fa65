"""Dense calls with RoPE: one launch applies it to Q while it quantizes K and V, with the bits of `apply_rope`."""

import pytest
import torch

pytest.importorskip("triton")

from fp8attn import apply_rope, reference, rope_scaled_dot_product_attention
from fp8attn.backends import find
from fp8attn.dense import sdpa
from fp8attn.dense.sdpa import attend_dense
from fp8attn.formats.kv_format import KVFormat
from fp8attn.formats.rope import DenseRope, Rope
from fp8attn.formats.spec import PageSpec
from fp8attn.kernels.append import from_dense
from fp8attn.kernels.launch import recording

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"),
    pytest.mark.usefixtures("poisoned"),
]
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


@pytest.mark.parametrize(
    ("lengths", "head_dim", "half", "interleaved", "causal"),
    [
        ((700, 700), 128, 64, False, True),
        ((300, 1000), 128, 64, True, False),
        ((900, 300), 128, 32, False, True),  # rows behind the last key
        ((300, 300), 72, 32, False, True),  # padded
        ((300, 300), 80, 10, False, True),  # a part of the channels
        ((3, 900), 128, 64, False, True),  # few queries
    ],
    ids=str,
)
def test_whole_calls(lengths, head_dim, half, interleaved, causal, monkeypatch):
    """For new inputs and tables, each call has the bits of attention with queries and pages of the reference."""
    q_len, kv_len = lengths
    for _ in range(4):
        query = tokens(2, 4, q_len, head_dim)
        key, value = (tokens(2, 2, kv_len, head_dim) for _ in "kv")
        q_rope, k_rope = angles(2, q_len, half), angles(2, kv_len, half)
        out = rope_scaled_dot_product_attention(
            query, key, value, *q_rope.values(), key_rope_cos=k_rope["rope_cos"], key_rope_sin=k_rope["rope_sin"],
            is_causal=causal,
            enable_gqa=True, rope_interleaved=interleaved,
        )  # fmt: skip
        turned = apply_rope(query, *(x[:, None] for x in q_rope.values()), interleaved=interleaved)
        none = Rope(torch.ones_like(q_rope["rope_cos"]), torch.zeros_like(q_rope["rope_sin"]), interleaved)
        with monkeypatch.context() as patch:
            patch.setattr(sdpa, "find", lambda *args: _Reference(find(*args)))
            sdpa._served.cache_clear()
            ropes = none, Rope(*k_rope.values(), interleaved)
            expected = attend_dense(turned, key, value, *ropes, causal, None, "int8", True, "auto")
        sdpa._served.cache_clear()
        assert torch.equal(out, expected)


class _Reference:
    """A backend whose pages the reference writes."""

    from_dense = staticmethod(reference.from_dense)

    def __init__(self, backend):
        self.attention = backend.attention


def test_it_is_one_launch_and_then_attention():
    q, table = tokens(1, 8, 1000, 128), torch.randn(1000, 64, device=CUDA)
    rope_scaled_dot_product_attention(q, q, q, table, table)
    with recording() as launches:
        rope_scaled_dot_product_attention(q, q, q, table, table)
    assert [made.kernel.fn.__name__ for made in launches] == ["page_kernel", "prefill_kernel"]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "half"), [(64, 32), (80, 40), (96, 16), (128, 64), (128, 20), (192, 96), (256, 128)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_queries_and_keys_are_the_references(head_dim, half, interleaved, dtype):
    k, v = (tokens(2, 2, 300, head_dim, dtype=dtype) for _ in "kv")
    q = tokens(2, 1500, 6, head_dim, dtype=dtype).transpose(1, 2)
    tables = [Rope(*angles(2, length, half).values(), interleaved) for length in (300, 1500)]
    outs = [torch.full_like(q, torch.nan) for _ in range(2)]
    writers = from_dense, reference.from_dense
    ours, theirs = (
        write(k, v, KVFormat(PageSpec.of(head_dim).name), DenseRope(*tables, q, out))
        for write, out in zip(writers, outs, strict=True)
    )
    assert torch.equal(*outs) and not outs[0].isnan().any()
    assert torch.equal(ours.k_scale, theirs.k_scale)
    for seq in range(2):
        assert all(map(torch.equal, ours.read(seq, 300), theirs.read(seq, 300)))
