"""The page writer in Triton's interpreter, on a CPU: the reference's bytes."""

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.interpreter import InterpreterBuilder

from fp8attn.formats.codec import CODECS
from fp8attn.formats.kv_format import KVFormat
from fp8attn.formats.rope import DenseRope, Rope, apply_rope
from fp8attn.formats.spec import PageSpec
from fp8attn.kernels.append import MAX_STRIDE, append, from_dense
from fp8attn.params import Append
from tests.support.interpreted import QUIET, dynamo_knows_torch, poisoned  # noqa: F401
from tests.support.kernel_cases import (
    APPEND_EDGES,
    APPEND_FACTORS,
    APPEND_WIDE,
    COUNTED,
    QUANTIZE_FACTORS,
    case_id,
    check_append,
    check_counted,
    check_from_dense,
    clone,
    cumulative,
    empty_cache,
    pairwise,
    random_tokens,
)

pytestmark = QUIET


@pytest.mark.parametrize("case", pairwise(APPEND_FACTORS), ids=case_id)
def test_append_writes_the_references_bytes(case):
    check_append(append, case)


@pytest.mark.triton36
@pytest.mark.parametrize("name", APPEND_EDGES)
def test_append_at_its_edges(name):
    check_append(append, APPEND_EDGES[name])


@pytest.mark.parametrize("name", APPEND_WIDE)
def test_append_of_512_channels(name):
    check_append(append, APPEND_WIDE[name])


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize(
    "case", pairwise({"name": list(COUNTED), "key_dtype": list(CODECS), "static": [False, True]}), ids=case_id
)
def test_append_of_counted_tokens(case, backend):
    check_counted(backend, *COUNTED[case["name"]], 64, case["key_dtype"], case["static"])


def test_append_of_nothing():
    pages = empty_cache([128, 128], 2, 64)
    before = clone(pages)
    nothing = torch.zeros(0, 2, 64, dtype=torch.float16)
    append(pages, nothing, nothing, Append(None, 0))
    append(pages, nothing, nothing, Append(cumulative([0, 0]), 5))
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(before.tensors, pages.tensors, strict=True)
    )


@pytest.mark.parametrize("case", pairwise(QUANTIZE_FACTORS), ids=case_id)
def test_from_dense_writes_the_references_bytes(case):
    check_from_dense(from_dense, case)


def test_from_dense_of_512_channels():
    case = {name: values[0] for name, values in QUANTIZE_FACTORS.items()}
    check_from_dense(from_dense, case | {"head_dim": 512, "shape": (1, 2, 150), "rotary": 0, "mean": 0.5})


@pytest.mark.parametrize("rotary", [8, 64])
@pytest.mark.parametrize("interleaved", [False, True])
def test_no_angles_are_read_but_the_tables(rotary, interleaved, monkeypatch):
    """If RoPE rotates only some channels, a row has fewer angles than pairs of channels."""
    k, angle = (
        random_tokens(80, 2, 64, torch.bfloat16).view(2, 40, 2, 64).transpose(1, 2),
        torch.randn(2, 40, rotary // 2),
    )
    held = torch.zeros(3, *angle.shape)
    rope = Rope(held[0], held[1], interleaved)
    held[0], held[1] = angle.cos(), angle.sin()
    first, last = held.data_ptr(), held[2].data_ptr()
    read = []
    masked_load = InterpreterBuilder.create_masked_load

    def noting(self, ptrs, mask, *rest):
        read.append(ptrs.data[mask.data])
        return masked_load(self, ptrs, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", noting)
    from_dense(k, k, KVFormat(PageSpec.of(k.shape[3]).name), DenseRope(rope, rope, k, torch.empty_like(k)))
    addresses = torch.cat([torch.from_numpy(x.astype("int64")).flatten() for x in read])
    assert ((first <= addresses) & (addresses < last)).any()
    assert not ((last <= addresses) & (addresses < last + held[2].nbytes)).any()


def test_tokens_that_are_too_far_apart_are_refused():
    """Offsets in a page have 32 bits. A sequence of one token may have any stride, and one of the longest that is taken
    is written.
    """
    far = torch.zeros(MAX_STRIDE + 200, dtype=torch.bfloat16)

    def apart(stride: int, length: int = 2) -> torch.Tensor:
        return far.as_strided((1, 1, length, 64), (64, 64, stride, 1))

    near = torch.zeros(1, 1, 2, 64, dtype=torch.bfloat16)
    for k, v, name in ((apart(MAX_STRIDE + 1), near, "k"), (near, apart(MAX_STRIDE + 1), "v")):
        with pytest.raises(
            ValueError, match=rf"{name} has {MAX_STRIDE + 1} elements from one token .* pass {name}\.contiguous\(\)"
        ):
            from_dense(k, v, KVFormat(PageSpec.of(64).name))
    assert from_dense(apart(MAX_STRIDE), near, KVFormat(PageSpec.of(64).name)).cache_seqlens.tolist() == [2]
    assert from_dense(apart(2**30, 1), near[:, :, :1], KVFormat(PageSpec.of(64).name)).cache_seqlens.tolist() == [1]


@pytest.mark.parametrize("strides", ["rows apart", "every second column", "of cos and sin apart", "one row for all"])
def test_tables_of_rope_may_have_any_strides(strides):
    torch.manual_seed(0)
    x, wide = torch.randn(2, 2, 128, 64).bfloat16(), torch.randn(2, 128, 128)
    cos, sin = {
        "rows apart": (wide[..., :32], wide[..., 32:64]),
        "every second column": (wide[..., ::4], wide[..., 1::4]),
        "of cos and sin apart": (wide[..., ::4], wide[..., :32].contiguous()),
        "one row for all": (wide[:, :1, :32].expand(-1, 128, -1), wide[:1, :1, :32].expand(2, 128, -1)),
    }[strides]
    given, plain = Rope(cos, sin, True), Rope(cos.contiguous(), sin.contiguous(), True)
    outs = torch.empty_like(x), torch.empty_like(x)
    ropes = [DenseRope(rope, rope, x, out) for rope, out in zip((given, plain), outs, strict=True)]
    ours, theirs = (from_dense(x, x, KVFormat(PageSpec.of(64).name), rope) for rope in ropes)
    assert torch.equal(*outs) and torch.equal(outs[0], apply_rope(x, cos[:, None], sin[:, None], interleaved=True))
    assert torch.equal(ours.k, theirs.k) and torch.equal(ours.k_scale, theirs.k_scale)
