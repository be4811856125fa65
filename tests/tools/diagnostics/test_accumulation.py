"""How kernels sum, by length and batch: with kernels whose sums are known, and with fp8attn's on a CPU."""

from functools import partial

import pytest
import torch

from fp8attn.backends import fa3
from fp8attn.formats.codec import FP8
from fp8attn_tools.diagnostics import accumulation, flashmla
from fp8attn_tools.diagnostics.accumulation import LATENTS, PROMPT, STEP, Accumulation, Inputs, candidates, measure
from tests.support.fa3 import equal_weights

KEYS, LATENT = Inputs(heads=2, queries=1, channels=64), Inputs(heads=2, queries=1, channels=128, rope=64)
CASES = ((1, 8192), (3, 300), (8, 8192))


@pytest.mark.parametrize("inputs", [KEYS, LATENT], ids=["keys and values", "latents"])
def test_ours_sum_as_well_in_a_batch(inputs):
    """The reference, over pages that the sequences share."""
    attend = partial(accumulation._over_pages, "reference")
    found = measure(attend, "cpu", inputs, CASES)
    assert found.levels == 2 and max(found.errors.values()) < 2.5e-3  # BF16's rounding of the output
    assert found.errors[1, 8192] == pytest.approx(found.errors[8, 8192])


@pytest.mark.parametrize("inputs", [KEYS, LATENT], ids=["keys and values", "latents"])
def test_a_kernel_whose_answer_depends_on_the_batch_is_found(inputs):
    """Eight blocks divide the sequences, each sums its part in the tensor core, and the parts are added in FP32: what
    vLLM's FlashMLA does with its blocks.
    """

    def attend(q, k, v):
        parts = max(1, 8 // len(q))
        scores = q.float()[:1] @ k.float().mT
        assert not scores.any() and q.shape[2:] == (1, inputs.channels + inputs.rope) and q.float().any()
        zeros = torch.zeros(1, 1, 1)
        out = torch.stack([equal_weights(zeros, part, 1) for part in v.transpose(1, 2).chunk(parts, 1)]).mean(0)
        return out.expand(len(q), inputs.heads, 1, -1)

    found = measure(attend, "cpu", inputs, CASES)
    alone, _, batch = found.errors.values()
    assert alone < 2.5e-3 and batch == pytest.approx(0.119, rel=0.02)  # as of one sequence in test_fa3.py
    assert found.hurts_from == 8192
    assert str(found) == (
        f"single-level: hurts from 8,192 tokens where V has a mean ({batch:.1%} at 8 x 8,192, {alone:.1%} at 8,192)"
    )


def test_what_is_said_of_batches():
    found = Accumulation({(1, 1024): 0.001, (1, 4096): 0.002, (64, 1024): 0.003})
    assert str(found) == "two-level: 0.20% off at 4,096 tokens, 0.30% at 64 x 1,024"
    found = Accumulation({(1, 8192): 0.02, (1, 131072): 0.03, (64, 32768): 0.4})
    assert str(found) == (
        "single-level: hurts from 8,192 tokens where V has a mean (2.0% at 8,192, 3.0% at 131,072, 40.0% at 64 x "
        "32,768)"
    )


def test_a_cpu_has_a_reason_for_each(builds, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    builds()
    for inputs, last in (
        (PROMPT, "FlashAttention-3 (vllm)"),
        (STEP, "FlashAttention-3 (vllm)"),
        (LATENTS, flashmla.NAME),
    ):
        found = candidates(inputs, "cpu")
        assert found["fp8attn hopper"] == "the kernels are for NVIDIA GPUs, not cpu"
        assert found[last] == "the kernel is for NVIDIA GPUs, not cpu" and [*found][-1] == last
        assert not accumulation.kernels(inputs, "cpu")
        assert ("fp8attn triton" in found) == (inputs is not PROMPT)


class Ops:
    """vLLM's two ops, on a CPU: the second attends from the definition over its pages, and keeps its arguments."""

    def __init__(self, namespace):
        self.library = torch.library.Library(namespace, "DEF")
        self.library.define(
            "get_mla_decoding_metadata_dense_fp8(Tensor lengths, int rows, int heads) -> (Tensor, Tensor)"
        )
        self.library.define(
            "fwd_kvcache_mla_fp8(Tensor q, Tensor cache, int rank, Tensor lengths, Tensor table, float scale, bool "
            "causal, Tensor plan, Tensor splits, Tensor? descale_q, Tensor? descale_k) -> (Tensor, Tensor)"
        )
        self.library.impl("get_mla_decoding_metadata_dense_fp8", self.plan, "CPU")
        self.library.impl("fwd_kvcache_mla_fp8", self.attend, "CPU")

    def plan(self, lengths, rows, heads):
        return torch.tensor([rows, heads]), lengths.clone()

    def attend(self, q, cache, rank, lengths, table, scale, causal, plan, splits, descale_q, descale_k):
        assert plan.tolist() == [q.shape[1] * q.shape[2], 1] and torch.equal(splits, lengths)
        assert q.is_contiguous() and (scale, causal, float(descale_q), float(descale_k)) == (1.0, False, 1.0, 1.0)
        outs = []
        for rows, length, pages in zip(q.double(), lengths.tolist(), table, strict=True):
            x = cache.double()[pages.long()].flatten(0, 1)[:length, 0]
            weights = torch.einsum("qhc,kc->qhk", rows, x).softmax(-1)
            outs.append(torch.einsum("qhk,kc->qhc", weights, x[:, :rank]))
        return torch.stack(outs).bfloat16(), torch.empty(0)


@pytest.fixture
def vllm(monkeypatch):
    monkeypatch.setattr(flashmla, "OPS", "fp8attn_test_flashmla")
    flashmla.find.cache_clear()
    yield lambda: Ops("fp8attn_test_flashmla")
    flashmla.find.cache_clear()


def test_vllms_kernel_gets_what_it_takes(vllm, monkeypatch):
    monkeypatch.setattr(fa3.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LookupError, match="not installed"):
        flashmla.find()
    monkeypatch.setattr(accumulation, "no_hopper_reason", lambda device, subject: None)
    assert candidates(LATENTS, "cpu")[flashmla.NAME] == "not installed"
    ops = vllm()
    assert candidates(LATENTS, "cpu")[flashmla.NAME] is flashmla.attention
    found = measure(flashmla.attention, "cpu", LATENT, [(1, 64), (3, 131)])
    assert found.levels == 2 and max(found.errors.values()) < 2.5e-3
    q, k = (torch.randn(shape).to(FP8) for shape in ((3, 2, 1, 192), (1, 1, 131, 192)))
    out = flashmla.attention(q, k, k[..., :128])
    x = k.double().expand(3, -1, -1, -1)
    exact = torch.softmax(q.double() @ x.mT, -1) @ x[..., :128]
    torch.testing.assert_close(out.double(), exact, atol=0.01, rtol=0.01)
    del ops
