"""The benchmarks of losses by position and of drift run whole on a CPU, and are drawn."""

import json

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from benchmarks import drift, needle, perplexity, plot
from benchmarks.needle_systems import stressed
from fp8attn.evaluation import models
from fp8attn.evaluation.needle import Outcome, save_outcomes


@pytest.fixture(scope="module")
def given(tiny_model):
    model, tokenizer = models.load(tiny_model, device="cpu")
    text = models.tokenize(tokenizer, models.read_text(model=tiny_model))
    return model, tokenizer, text, models.windows(text, 256, 2, from_end=True)


def test_losses_by_position_and_drift(given, tmp_path, monkeypatch):
    model, tokenizer, text, calibration = given
    found = perplexity.rows(model, tokenizer, text, ((300, 2, 0), (600, 1, 0), (300, 1, 20)), 128, calibration)
    cases = ["chunks-S300", "chunks-S600", "decode-S300"]
    assert [(row["case"], row["impl"]) for row in found] == [(case, impl) for case in cases for impl in perplexity.IMPLS]
    assert all(row["change"] == 0 for row in found if row["impl"] == "bf16")
    assert all(0 < abs(row["change"]) < 0.1 and 0 < row["kl"] < 0.1 for row in found if row["impl"] != "bf16")
    long = drift.rows(model, models.windows(text, 100 + 40 + 1, 2), list(drift.IMPLS), 100, 8, 128, calibration)
    assert [row["case"] for row in long if row["impl"] == "fp8attn"] == [f"decode-S{start}" for start in range(100, 140, 8)]
    monkeypatch.setattr(plot, "FOLDER", tmp_path)
    for name, rows in (("perplexity", found), ("drift", long)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows}))
    plot.plot_drift()
    assert (tmp_path / "drift.png").stat().st_size > 10_000


def test_retrieval_is_drawn(tmp_path, monkeypatch):
    outcomes = [
        Outcome(impl, f"niah_multikey_2{stressed(strength)}", length, n, n / 4, ("1",), "1", float(n > strength))
        for impl in ("bf16", "fp8attn", "fa3-fp8:calibrated")
        for length, strengths in ((4096, (0,)), (8192, (0, 2)))
        for strength in strengths
        for n in range(4)
    ]
    monkeypatch.setattr(plot, "FOLDER", tmp_path)
    save_outcomes(tmp_path / "needle.jsonl.xz", outcomes)
    (tmp_path / "needle.json").write_text(json.dumps({"rows": needle.rows(outcomes)}))
    plot.plot_needle()
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in ("retrieval", "retrieval_maps"))
