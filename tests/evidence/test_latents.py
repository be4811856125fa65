"""The tables of attention over latents, of made-up rows."""

import json

from evidence import rows
from evidence.tables import BLOCKS


def lines_of(monkeypatch, tmp_path, name, measured):
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / f"{name}.json").write_text(json.dumps({"device": "NVIDIA H200", "rows": measured}))
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    return [line.strip("| ").split(" | ") for line in BLOCKS[name.replace("_", "-")]().splitlines()]


def test_speed_and_errors(monkeypatch, tmp_path):
    errors = {"rel_err_0": 0.01, "rel_err_0.3": 0.004, "rel_err": 0.002}
    measured = [
        {"case": "H16-B1-S1024", "impl": impl, "ms": ms} | errors
        for impl, ms in {"fp8attn": 0.02, "flashmla-bf16": 0.05, "vllm-flashmla-fp8": 0.03}.items()
    ]
    measured.append({"case": "H16-B1-S1024-ragged", "impl": "fp8attn", "ms": 0.01} | errors)
    head, _, even, ragged = lines_of(monkeypatch, tmp_path, "latent", measured)
    assert head[:6] == [
        "H200; us a step", "fp8attn", "vLLM's FlashMLA, FP8", "FlashMLA, BF16", "over vLLM's FP8", "over BF16",
    ]  # fmt: skip
    assert even == ["H16-B1-S1024", "20.0", "30.0", "50.0", "1.50", "2.50", *["1.00 / 0.40 / 0.20"] * 3]
    assert ragged[:2] == ["H16-B1-S1024-ragged", "10.0"] and "1.00 / 0.40 / 0.20" in ragged


def test_needles(monkeypatch, tmp_path):
    measured = [
        {"case": "B66-S131072", "impl": impl, "accuracy": right, "samples": 66, "ppl": 4.5}
        for impl, right in {"bf16": 1.0, "fp8attn": 1.0, "vllm-flashmla-fp8": 0.5}.items()
    ]
    head, _, line = lines_of(monkeypatch, tmp_path, "latent_needle", measured)
    assert head == ["H200; right answers; perplexity", "FlashMLA, BF16", "vLLM's FlashMLA, FP8", "fp8attn"]
    assert line == ["B66-S131072", "100% of 66; 4.50", "50% of 66; 4.50", "100% of 66; 4.50"]
