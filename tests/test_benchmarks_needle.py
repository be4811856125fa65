"""The comparison of retrieval runs whole on a CPU, with a kernel of torch's in the place of the others'."""

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import needle as bench
from fp8attn.evaluation import models, needle
from fp8attn.evaluation.recall import recall_samples


def rows_attention(shape, q, k, v):
    """What the others' kernels compute, in FP32."""

    def call():
        group = shape.q_heads // shape.kv_heads
        queries, keys, values = q.float(), k.float().repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * shape.softmax_scale
        ahead = torch.arange(len(k)) > torch.arange(len(q))[:, None] + len(k) - len(q)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(ahead, -torch.inf).softmax(-1), values)

    return call


def test_all_implementations_on_the_same_samples(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "KERNELS", {"fa3-fp8": rows_attention})
    model, tokenizer = models.load(tiny_model, device="cpu")
    text = models.read_text(model=tiny_model)
    file = tmp_path / "recall-600.jsonl.xz"
    needle.save_samples(file, recall_samples(tokenizer, text, lengths=(600,), depths=(0.5,), samples=2))
    names = ["bf16", "fp8attn", "fp8attn-static", "fa3-fp8:calibrated", "fa3-fp8:calibrated+means"]
    outcomes = bench.run(model, tokenizer, [file], names, models.windows(models.tokenize(tokenizer, text), 256, 2, from_end=True), 1 << 20)
    rows = bench.rows(outcomes, 2)
    assert [(row["case"], row["impl"], row["samples"]) for row in rows] == [("recall-S600-stress2", name, 2) for name in names]
    assert "p" not in rows[0] and all(row["p"] == 1 and row["lost"] == row["won"] == 0 for row in rows[1:])
    with pytest.raises(ValueError, match="no implementation is called 'fa4'"):
        bench.run(model, tokenizer, [file], ["fa4"], models.windows(models.tokenize(tokenizer, text), 256, 1), 512)


@pytest.mark.parametrize("options", ["calibrated", "calibrated+means"])
def test_a_foreign_kernel_is_the_model_but_for_rounding(tiny_model, monkeypatch, options):
    monkeypatch.setattr(bench, "KERNELS", {"fa3-fp8": rows_attention})
    model, tokenizer = models.load(tiny_model, device="cpu")
    tokens = models.tokenize(tokenizer, models.read_text(model=tiny_model))
    largest = bench.largest_values(model, tokens[None, :600])
    want = bench.prefill(model, tokens[None, :300], bench.BF16Cache(model.config))
    (_, attention, make) = next(bench.impls([f"fa3-fp8:{options}"], model, None, largest))
    model.set_attn_implementation(attention)
    got = bench.prefill(model, tokens[None, :300], make(), chunk=128)
    assert 0 < (got - want).std() < 0.15 * want.std()
