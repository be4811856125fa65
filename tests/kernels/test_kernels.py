"""What the Triton kernels have in common: grids, torch ops, compiled code; and what the Hopper kernels need of a
machine.
"""

import pytest
import torch

pytest.importorskip("triton")


import fp8attn
from fp8attn import AttentionParams, KVPages
from fp8attn._torch_ops import flatten_pages
from fp8attn.formats.codec import FP8
from fp8attn.formats.kv_format import KVFormat
from fp8attn.formats.rope import DenseRope, Rope
from fp8attn.formats.spec import PageSpec
from fp8attn.kernels import portable
from fp8attn.kernels.append import append, from_dense
from fp8attn.kernels.launch import recording
from fp8attn.kernels.machine import Machine
from fp8attn.params import Append
from tests.support.interpreted import ARGUMENTS, QUIET, cache_and_queries, dynamo_knows_torch, poisoned  # noqa: F401
from tests.support.kernel_cases import clone

pytestmark = QUIET


def test_the_hopper_kernels_need_no_table(monkeypatch):
    """A sequence without pages has a table without columns."""
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    from fp8attn.kernels import decode, prefill

    pages = KVPages.empty(4, 2, 64, num_seqs=2, max_pages=0)
    for attention, queries in ((decode.decode_attention, 1), (prefill.prefill_attention, 100)):
        q = torch.randn(2 * queries, 4, 64).half()
        out, lse = attention(q, pages, AttentionParams(**ARGUMENTS | {"max_seqlen_q": queries}))
        assert not out.any() and (lse == -torch.inf).all()


def test_a_pool_beyond_tma_s_coordinates_is_refused():
    """TMA counts pages of a head in 32 bits; both Hopper kernels ask for these views."""
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    from fp8attn.kernels.tiles import views

    assert views((2**31 - 1, 1, PageSpec.of(128).layout.nbytes), PageSpec.of(128), 128, 128, 128)
    with pytest.raises(ValueError, match="split them over several pools"):
        views((2**28, 8, PageSpec.of(128).layout.nbytes), PageSpec.of(128), 128, 128, 128)


def test_no_batch_is_too_large_for_a_grid(monkeypatch):
    """Only the first dimension of a CUDA grid goes beyond 65,535."""
    for module in ("append", "combine", "portable"):
        gpu = Machine(132, 232448, True, hopper=module == "portable")
        monkeypatch.setattr(f"fp8attn.kernels.{module}.machine", lambda device, gpu=gpu: gpu)
    batch, half = 70_000, {"dtype": torch.float16, "device": "meta"}
    x = torch.empty(batch, 2, 16, 64, **half)
    angle = torch.empty(batch, 16, 32, device="meta")
    rope = DenseRope(Rope(angle, angle), Rope(angle, angle), x, torch.empty_like(x))
    tokens, prompt = torch.empty(batch, 2, 64, **half), torch.empty(40 * batch, 2, 64, **half)
    bounds = torch.empty(batch + 1, dtype=torch.int32, device="meta")
    with recording(dry=True) as launches:
        pages = from_dense(x, x, KVFormat(PageSpec.of(64).name), rope)
        from_dense(x.to(FP8), x.to(FP8), KVFormat(PageSpec.of(64, "e4m3").name, rotate=False))
        append(pages, tokens, tokens, Append(None, 1))
        append(pages, prompt, prompt, Append(None, 40))
        append(pages, prompt, prompt, Append(bounds, 40))
        portable.portable_attention(tokens.repeat(1, 2, 1), pages, AttentionParams(**ARGUMENTS))
    assert len({note.kernel.fn.__name__ for note in launches}) == 3
    for note in launches:
        assert note.grid[0] < 2**31 and all(programs < 65_536 for programs in note.grid[1:]), (
            note.kernel.fn.__name__,
            note.grid,
        )


@pytest.mark.triton36
def test_ops_run_the_kernels_and_pass_opcheck():
    pages, q = cache_and_queries()
    expected = fp8attn.attention(q, pages, backend="reference")
    assert torch.allclose(fp8attn.attention(q, pages, backend="triton").float(), expected.float(), atol=2e-3)
    options = AttentionParams(None, 1, True, 0.125, return_lse=True, exact=True)
    torch.library.opcheck(torch.ops.fp8attn.attention, (q, *flatten_pages(pages), *options, "triton"))
    token = torch.randn(2, 2, 64).half()
    arguments = (token, token.clone(), *flatten_pages(pages), *Append(None, 1), "triton")
    torch.library.opcheck(
        torch.ops.fp8attn.append, arguments, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )


def test_a_compiled_step_calls_the_kernels(monkeypatch):
    monkeypatch.undo()  # Dynamo does not trace a replaced torch.empty
    pages, q = cache_and_queries()
    twin = clone(pages)
    token = torch.randn(2, 2, 64).half()

    def step(pages):
        fp8attn.append(pages, token, token, backend="triton")
        return fp8attn.attention(q, pages, backend="triton")

    expected = step(twin)
    actual = torch.compile(step, backend="aot_eager", fullgraph=True)(pages)
    assert torch.equal(actual, expected)
    assert torch.equal(pages.pool, twin.pool) and torch.equal(pages.cache_seqlens, twin.cache_seqlens)
