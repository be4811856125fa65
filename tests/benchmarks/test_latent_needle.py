"""Needles and perplexity of the small model's twin, untrained, through ours and the definitions of others' kernels."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval")

sys.path.append(str(Path(__file__).parents[2] / "training"))  # scripts that import each other by name

from data import MODEL
from model import save_hf
from twin import make_twin, small_model

from benchmarks import latent_needle
from fp8attn.formats.codec import E4M3, FP8
from fp8attn.numerics import relative_error
from fp8attn_tools.evaluation import models


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The twin's weights and tokenizer."""
    folder = tmp_path_factory.mktemp("twin")
    torch.manual_seed(0)
    text = models.tokenize(models.load_tokenizer(), models.read_text())[: 4 * 512].view(4, 512)
    save_hf(make_twin(small_model(), text), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder)
    return folder


def no_kernel(*_):
    raise RuntimeError("it does not take 4 heads")


@pytest.fixture(scope="module")
def rows(folder):
    """Rows of two questions and two short texts after prompts of 256 tokens, by case and implementation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latent_needle, "MODEL", folder)
        patch.setattr(latent_needle, "PROMPTS", folder / "latent.zip")
        patch.setattr(latent_needle, "ALONE", 2)
        patch.setattr(latent_needle, "TEXT", 4)
        cases = {
            "B1": latent_needle.Case(256, 1),
            "B2": latent_needle.Case(256, 2),
            "mean1-B2": latent_needle.Case(256, 2, 1.0),
        }
        patch.setattr(latent_needle, "CASES", cases)
        assert list(latent_needle.measure("B1")) == []  # there are no prompts yet
        latent_needle.main()
        latent_needle.system.cache_clear()
        by_case = {(case, row["impl"]): row for case in cases for row in latent_needle.measure(case)}
        patch.setitem(latent_needle.KERNELS, "vllm-flashmla-fp8", latent_needle.Kernel(no_kernel, FP8))
        patch.setattr(latent_needle, "IMPLS", ("vllm-flashmla-fp8", "fp8attn"))
        assert [row["impl"] for row in latent_needle.measure("B2")] == ["fp8attn"]  # the one after it is measured
    latent_needle.system.cache_clear()
    return by_case


@pytest.mark.slow
def test_every_system_finds_the_needles_of_a_short_prompt(rows):
    assert {impl for case, impl in rows if case == "B2"} == {*latent_needle.IMPLS}
    for row in rows.values():
        assert row["accuracy"] == 1.0 and row["samples"] == 2 and row["nats"] < 0.01, row


@pytest.mark.slow
def test_alone_and_in_a_batch_are_the_same_questions(rows):
    for impl in ("bf16", "fp8attn"):
        alone, together = rows["B1", impl], rows["B2", impl]
        assert alone["ppl"] == pytest.approx(together["ppl"], rel=1e-3) and alone["depths"] == together["depths"]


@pytest.mark.slow
def test_perplexity_is_close_to_that_of_16_bits(rows):
    for case in ("B1", "B2", "mean1-B2"):
        assert abs(rows[case, "fp8attn"]["d_ppl_pct"]) < 8
        assert abs(rows[case, "vllm-flashmla-fp8"]["d_ppl_pct"]) < 12
    assert rows["mean1-B2", "bf16"]["ppl"] == pytest.approx(rows["B2", "bf16"]["ppl"], rel=0.03)


def test_a_planted_mean_changes_no_output(folder):
    tokens = torch.arange(1, 101)[None] * 7 % 4096
    model, shifted = (models.load(folder, device="cpu", attn_implementation="sdpa")[0] for _ in range(2))
    latent_needle.plant_mean(shifted, 1.0)
    with torch.no_grad():
        want, got = model(tokens).logits, shifted(tokens).logits
    assert relative_error(got, want.double()) < 1e-5
    norm = shifted.model.layers[0].self_attn.kv_a_layernorm
    x = norm(torch.randn(1000, 512))
    assert (x.mean(0).abs() / norm.weight).sub(1).abs().max() < 0.2


def test_copies_share_full_pages_and_have_tokens_of_their_own():
    torch.manual_seed(0)
    layer, rows = latent_needle.LatentLayer(FP8, 30), torch.randn(1, 1, 100, 576)
    layer.update(rows[..., :512], rows[..., 512:])
    layer.batch_repeat_interleave(3)
    new = torch.randn(3, 1, 30, 576)  # from the second page to the third
    for part in new.split(15, 2):
        layer.update(part[..., :512], part[..., 512:])
    assert layer.table.shape == (3, 4) and set(layer.table[:, 0].tolist()) == {0}
    for seq in range(3):
        stored = layer.pool.view(torch.uint8)[layer.table[seq].long()].view(FP8).flatten(0, 2)[:130]
        expected = E4M3.quantize(torch.cat([rows[0, 0], new[seq, 0]]), torch.ones(()))
        assert torch.equal(stored.float(), expected.float())
