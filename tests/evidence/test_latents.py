"""The tables of attention over latents, of made-up rows."""

import json

from benchmarks.accumulation import LATENTS
from evidence import rows
from evidence.tables import BLOCKS


def written(monkeypatch, tmp_path, block, **files):
    """The text of a block, of these rows."""
    (tmp_path / "h200").mkdir(exist_ok=True)
    for name, measured in files.items():
        (tmp_path / "h200" / f"{name}.json").write_text(json.dumps({"device": "NVIDIA H200", "rows": measured}))
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    return BLOCKS[block]()


def lines_of(monkeypatch, tmp_path, name, measured):
    made = written(monkeypatch, tmp_path, name.replace("_", "-"), **{name: measured})
    return [line.strip("| ").split(" | ") for line in made.splitlines()]


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


def test_sums_by_batch(monkeypatch, tmp_path):
    off = {"vllm-flashmla-fp8": {"rel_err_0": 0.01, "rel_err_0.3": 0.02, "rel_err_1": 0.03}}
    off["flashmla-bf16"] = dict.fromkeys(off["vllm-flashmla-fp8"], 0.002)
    sums = [{"case": case, "impl": impl} | errors for case in LATENTS for impl, errors in off.items()]
    sums[-2]["rel_err_1"] = 0.684
    times = {"H16-B1-S1024": (1.0, 2.5), "H128-B1-S1024": (1.0, 1.1)}
    steps = [
        {"case": case, "impl": impl, "ms": ms}
        for case, both in times.items()
        for impl, ms in zip(off, both, strict=True)
    ]
    made = written(monkeypatch, tmp_path, "latent-sums", accumulation=sums).splitlines()
    assert made[0].startswith("| H200, requests x tokens | error, %, latents of mean 0 |")
    assert made[2] == "| 1 x 2k | 1.0 | 2.0 | 3.0 |" and made[-1] == "| 66 x 128k | 1.0 | 2.0 | 68.4 |"
    words = written(monkeypatch, tmp_path, "latent-sums-in-words", latent=steps)
    assert words.startswith("It is 1.1 to 2.5 times as fast as the BF16 kernel.")
    assert "3.0% off alone, and 68% off among 66" in words and "beside it is 0.2% off in every batch" in words


def test_what_needles_cost_in_words(monkeypatch, tmp_path):
    costs = {
        "B1-S8192": (-0.5, 9.0),
        "B1-S131072": (0.1, 1.0),
        "B66-S131072": (0.2, 6.0),
        "mean1-B132-S131072": (0, 8.0),
        "mean3-B1-S131072": (0, 1.0),
        "mean3-B132-S131072": (0, 3900.0),
    }
    measured = [
        {"case": case, "impl": impl, "d_ppl_pct": cost, "accuracy": float(cost < 100), "samples": 6}
        for case, both in costs.items()
        for impl, cost in zip(("fp8attn", "vllm-flashmla-fp8"), both, strict=True)
    ]
    words = written(monkeypatch, tmp_path, "latent-needle-in-words", latent_needle=measured)
    assert words.startswith("6.0% to 8.0% more perplexity") and "1.0% alone" in words and "within 0.5% in" in words
    words = written(monkeypatch, tmp_path, "latent-needle-lost", latent_needle=measured)
    assert words == "6 of 6 alone and 0 of 6 in a batch of 132 (fp8attn: 6 of 6 and 6 of 6)"
