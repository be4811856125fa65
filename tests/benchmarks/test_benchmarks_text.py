"""The whole benchmarks of losses, divergences and drift run on a CPU."""

import json
import math

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from benchmarks import agreement, demo, drift, perplexity, real_model, speculative, texts
from evidence import pictures
from fp8attn_tools import calibrate
from fp8attn_tools.evaluation import models
from fp8attn_tools.evaluation.caches import BF16Cache, E4M3Cache
from fp8attn_tools.evaluation.caches import forward as through


@pytest.fixture(scope="module")
def given(tiny_model):
    model, tokenizer = models.load(tiny_model, device="cpu")
    text = models.tokenize(tokenizer, models.read_text(model=tiny_model))
    return model, tokenizer, text, models.windows(text, 256, 2, from_end=True)


def test_losses_by_position_and_drift(given, tmp_path, monkeypatch):
    model, tokenizer, text, calibration = given
    scales = calibrate(model, calibration.split(1))
    cases = {"chunks-S300": (300, 2, 0), "chunks-S600": (600, 1, 0), "decode-S300": (300, 1, 20)}
    monkeypatch.setattr(perplexity, "CASES", cases)
    monkeypatch.setattr(perplexity, "CHUNK", 128)
    found = [row for case in cases for row in perplexity.rows(case, model, tokenizer, text, scales)]
    assert [(row["case"], row["impl"]) for row in found] == [(case, impl) for case in cases for impl in perplexity.IMPLS]
    assert all(row["change"] == 0 for row in found if row["impl"] == "bf16")
    assert all(0 < abs(row["change"]) < 0.1 and 0 < row["kl"] < 0.1 for row in found if row["impl"] != "bf16")
    for name, value in {"PROMPT": 100, "SEGMENT": 8, "CHUNK": 128}.items():
        monkeypatch.setattr(drift, name, value)
    long = list(drift.rows(model, models.windows(text, 100 + 40 + 1, 2)))
    assert [row["case"] for row in long] == [f"decode-S{start}" for start in range(100, 140, 8)]
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    for name, rows in (("perplexity", found), ("drift", long)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows}))
    pictures.plot_drift()
    assert (tmp_path / "drift.png").stat().st_size > 10_000


@torch.no_grad()
def logits(model, windows, cache=None):
    given = {"use_cache": False} if cache is None else {"past_key_values": cache}
    return torch.cat([model(input_ids=window[None, :-1], **given).logits for window in windows]).double().log_softmax(-1)


def test_what_8_bits_cost_a_real_model(given):
    model, _, text, _ = given
    windows = models.windows(text, 257, 1)
    impls = tuple(impl for impl in real_model.IMPLS if "e4m3" not in impl)
    rows = {row["impl"]: row for row in real_model.rows("tiny", model, model, windows, impls, 100)}
    assert tuple(rows) == impls
    exact, held = logits(model, windows), logits(model, windows, BF16Cache(model.config))
    losses = [-x.gather(2, windows[:, 1:, None])[..., 0] for x in (exact, held)]
    bf16 = rows["bf16"]
    assert bf16["ppl"] == pytest.approx(math.exp(losses[1].mean()), rel=1e-4)
    # K and V in bfloat16 change little: what float32 and the order of sums leave of so small a divergence is a hundredth of the others'.
    assert bf16["kl"] == pytest.approx((exact.exp() * (exact - held)).sum(-1).mean().item(), abs=2e-6)
    assert bf16["top1"] == pytest.approx((exact.argmax(-1) == held.argmax(-1)).double().mean().item())
    assert bf16["d_ppl_pct"] == bf16["d_ppl_se"] == bf16["kl_excess"] == 0
    for impl, row in rows.items():
        assert (row["case"], row["windows"], row["tokens"]) == ("tiny", 1, 256)
        assert row["kl_excess"] == row["kl"] - bf16["kl"]
        assert row["d_ppl_pct"] == pytest.approx(100 * (row["ppl"] / bf16["ppl"] - 1))
        if impl != "bf16":
            assert 1e-5 < row["kl_excess"] < 0.05
            assert abs(row["d_ppl_pct"]) < 5 * row["d_ppl_se"] < 10
    # The reference has one arithmetic for any number of queries; rounding queries too costs more; what is not rounded costs less.
    assert rows["fp8attn-int8-keys-prefill"]["kl"] == rows["fp8attn-int8-keys-decode"]["kl"]
    assert rows["scale-1-prefill"]["kl"] > 1.2 * rows["scale-1-decode"]["kl"]
    assert rows["transformers-fp8-prefill"]["kl"] < rows["transformers-fp8-decode"]["kl"]


def test_a_cache_that_overflows_gives_no_numbers(given, monkeypatch):
    model, _, text, _ = given
    monkeypatch.setattr(real_model, "E4M3Cache", lambda config, **options: E4M3Cache(config, scale=math.nan))
    impls = ("bf16", "transformers-fp8-decode")
    bf16, row = real_model.rows("tiny", model, model, models.windows(text, 65, 1), impls)
    assert row["kl"] is None and row["ppl"] is None and bf16["kl"] > 0


@torch.no_grad()
def test_prefill_agrees_with_decode(given):
    model, _, text, _ = given
    windows = models.windows(text, 201, 2)
    rows = list(agreement.rows("tiny", model, windows, impls=("bf16", "fp8attn-int8-keys"), decode=30, chunk=64))
    assert [(row["impl"], row["attention"], row["windows"], row["decoded"]) for row in rows] == [
        ("bf16", "sdpa", 2, 30), ("fp8attn-int8-keys", "fp8attn", 2, 30)
    ]  # fmt: skip
    for row in rows:  # exact arithmetic over the same bytes: what is left is the order of float32's sums
        assert 0 < row["dlogp_mean"] <= row["dlogp_max"] < 1e-2
        assert row["kl"] < 1e-5
        assert row["top1"] > 0.95


def test_how_far_two_sets_of_predictions_are_apart():
    p, q = torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([[0.25, 0.75], [0.9, 0.1]])
    found = agreement.compare(p.log()[None], q.log()[None] + 3, torch.tensor([[1, 0]]))
    assert found["dlogp_max"] == pytest.approx(math.log(1.5), rel=1e-5)
    assert found["dlogp_mean"] == pytest.approx(math.log(1.5) / 2, rel=1e-5)
    assert found["kl"] == pytest.approx((0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 2, rel=1e-5)
    assert found["top1"] == 0.5


@torch.no_grad()
def test_both_paths_read_the_same_tokens(given):
    model, _, text, _ = given
    tokens = models.windows(text, 90, 2)
    prefilled, decoded = agreement.both_paths(model, tokens, lambda: BF16Cache(model.config), 20, 32)
    want = through(model, tokens, BF16Cache(model.config), logits=20)
    assert prefilled.shape == decoded.shape == want.shape
    for got in (prefilled, decoded):
        torch.testing.assert_close(got, want, atol=5e-3, rtol=0)  # K and V round to bfloat16 after sums in another order


def test_speculative_decoding_gives_greedys_tokens(monkeypatch):
    """On the committed model; a public one that is not installed is left out."""
    for name, value in {"PIECES": 1, "QUESTIONS": (), "LENGTH": 40, "NEW": 6}.items():
        monkeypatch.setattr(speculative, name, value)
    for case in ("stdlib-prompt-lookup", "stdlib-assisted"):
        rows = list(speculative.measure(case))
        assert [(row["case"], row["impl"]) for row in rows] == [(case, impl) for impl in speculative.IMPLS]
        assert all((row["prompts"], row["equal"]) == (2, 2) for row in rows)
        assert all(0 < row["accepted"] <= speculative.DRAFT for row in rows)
    monkeypatch.setattr(texts, "load", lambda name: None)
    assert not list(speculative.measure("smollm2-assisted"))


def test_tokens_that_differ_are_counted():
    found = speculative.compare([[1, 2, 3], [4, 5, 6], [7, 8]], [[1, 2, 3], [4, 5, 7], [7]], 4)
    assert found == {"prompts": 3, "equal": 1, "accepted": 0.75}  # 7 tokens in 4 forwards


def test_what_the_demo_finds_has_its_cases(monkeypatch):
    found = {"bytes_per_token_bf16": 1, "ppl_scale-1": 2, "kl_fp8": 3, "needle_model": "m", "needle_fp8": 4, "needle_cells_equal": 5}
    monkeypatch.setattr(demo, "run", lambda folder, device, model: found | {"greedy_tokens": 6})
    assert [tuple(row.values()) for row in demo.measure("demo")] == [
        ("demo-bytes_per_token", "bf16", 1), ("demo-ppl", "scale-1", 2), ("demo-kl", "fp8", 3), ("demo-needle_model", "fp8", "m"),
        ("demo-needle", "fp8", 4), ("demo-needle_cells_equal", "fp8", 5), ("demo-greedy_tokens", "fp8", 6),
    ]  # fmt: skip
