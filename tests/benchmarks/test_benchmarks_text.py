"""The benchmarks that run models run on a CPU."""

import math

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import demo, real_model
from fp8attn_tools.evaluation import models
from fp8attn_tools.evaluation.caches import BF16Cache, E4M3Cache


@pytest.fixture(scope="module")
def given(tiny_model):
    model, tokenizer = models.load(tiny_model, device="cpu")
    text = models.tokenize(tokenizer, models.read_text(model=tiny_model))
    return model, text


@torch.no_grad()
def logits(model, windows, cache=None):
    given = {"use_cache": False} if cache is None else {"past_key_values": cache}
    return (
        torch.cat([model(input_ids=window[None, :-1], **given).logits for window in windows]).double().log_softmax(-1)
    )


def test_what_8_bits_cost_a_real_model(given):
    model, text = given
    windows = models.windows(text, 257, 1)
    impls = tuple(impl for impl in real_model.IMPLS if "e4m3" not in impl)
    rows = {row["impl"]: row for row in real_model.rows("tiny", model, model, windows, impls, 100)}
    assert tuple(rows) == impls
    exact, held = logits(model, windows), logits(model, windows, BF16Cache(model.config))
    losses = [-x.gather(2, windows[:, 1:, None])[..., 0] for x in (exact, held)]
    bf16 = rows["bf16"]
    assert bf16["ppl"] == pytest.approx(math.exp(losses[1].mean()), rel=1e-4)
    # K and V in bfloat16 change little: what float32 and the order of sums leave of so small a divergence is a
    # hundredth of the others'.
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
    # The reference has one arithmetic for any number of queries; rounding queries too costs more; what is not rounded
    # costs less.
    assert rows["fp8attn-int8-keys-prefill"]["kl"] == rows["fp8attn-int8-keys-decode"]["kl"]
    assert rows["scale-1-prefill"]["kl"] > 1.2 * rows["scale-1-decode"]["kl"]
    assert rows["transformers-fp8-prefill"]["kl"] < rows["transformers-fp8-decode"]["kl"]


def test_a_cache_that_overflows_gives_no_numbers(given, monkeypatch):
    model, text = given
    monkeypatch.setattr(real_model, "E4M3Cache", lambda config, **options: E4M3Cache(config, scale=math.nan))
    impls = ("bf16", "transformers-fp8-decode")
    bf16, row = real_model.rows("tiny", model, model, models.windows(text, 65, 1), impls)
    assert row["kl"] is None and row["ppl"] is None and bf16["kl"] > 0


def test_what_the_demo_finds_has_its_cases(monkeypatch):
    found = {
        "bytes_per_token_bf16": 1,
        "ppl_scale-1": 2,
        "kl_fp8": 3,
        "needle_model": "m",
        "needle_fp8": 4,
        "needle_cells_equal": 5,
    }
    monkeypatch.setattr(demo, "run", lambda folder, device, model: found | {"greedy_tokens": 6})
    assert [tuple(row.values()) for row in demo.measure("demo")] == [
        ("demo-bytes_per_token", "bf16", 1), ("demo-ppl", "scale-1", 2), ("demo-kl", "fp8", 3),
        ("demo-needle_model", "fp8", "m"),
        ("demo-needle", "fp8", 4), ("demo-needle_cells_equal", "fp8", 5), ("demo-greedy_tokens", "fp8", 6),
    ]  # fmt: skip
