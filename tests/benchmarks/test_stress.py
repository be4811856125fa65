"""The offsets and outliers of a stress cancel: the outputs of the model stay the same, and its keys and values are
harder to quantize.
"""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from benchmarks import stress  # noqa: E402
from benchmarks.stress import STRENGTHS, Strength, plant  # noqa: E402
from fp8attn.integrations.transformers import FP8Cache  # noqa: E402
from fp8attn_tools.evaluation import models  # noqa: E402
from fp8attn_tools.evaluation.caches import cache_factory, prefill  # noqa: E402
from fp8attn_tools.evaluation.perplexity import perplexity  # noqa: E402
from tests.support.transformers_models import bare  # noqa: E402


def logits(model, dtype=torch.float32):
    tokens = torch.arange(1, 201)[None] % 257
    with torch.no_grad():
        return model.to(dtype)(input_ids=tokens, use_cache=False).logits


@pytest.fixture
def fresh(tiny_model):
    return lambda: models.load(tiny_model, device="cpu")[0]


@pytest.mark.parametrize("strength", STRENGTHS[1:])
def test_outputs_are_unchanged(fresh, strength):
    model = fresh()
    want = logits(model)
    plant(model, strength)
    assert torch.allclose(
        logits(model), want, atol=2e-5 * strength.offset * want.std(), rtol=0
    )  # FP32's 1e-7, times offset and sums
    model = fresh()
    plant(model, Strength(0.0, strength.outlier))
    assert torch.equal(logits(model), want)  # powers of two: bit for bit


def test_nothing_is_planted_at_strength_0(fresh):
    model, same = fresh(), fresh()
    plant(model, STRENGTHS[0])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))


def test_keys_and_values_are_worse(fresh):
    def kv(model):
        cache = transformers.DynamicCache(config=model.config)
        prefill(model, torch.arange(1, 201)[None] % 257, cache)
        return cache.layers[1].keys[0].mT, cache.layers[1].values[0].mT  # [heads, channels, tokens]

    (k, v), model = kv(fresh()), fresh()
    plant(model, STRENGTHS[2])
    new_k, new_v = kv(model)
    ratio = (new_k.norm(dim=-1) / k.norm(dim=-1)).round().int()
    assert sorted(ratio.unique().tolist()) == [1, 16]
    assert torch.equal(ratio[:, :32], ratio[:, 32:])  # the two channels of a rotary pair alike
    assert (ratio == 16).sum(1).tolist() == [2 * 32 // stress.EVERY] * 2
    outlier = (new_v.std(dim=-1) / v.std(dim=-1)).round().int()
    assert (outlier == 16).sum(1).tolist() == [64 // stress.EVERY] * 2
    offsets = (new_v.mean(-1) / outlier - v.mean(-1)).abs() / v.std(-1)
    assert 2 < offsets.median() < 4.5  # 3 deviations, which are estimated from the weights


def test_means_hold_up(fresh, tiny_model):
    """The model's biases give V's means, which are subtracted before rounding. At the highest strength, compared with
    the same cache without means."""
    model = fresh()
    tokens = torch.arange(1, 401)[None] * 7 % 257
    plant(model, STRENGTHS[3])
    exact = prefill(model, tokens, transformers.DynamicCache(config=model.config))
    errors = [(prefill(model, tokens, make(model)) - exact).std().item() for make in (FP8Cache, bare)]
    assert errors[0] < 0.7 * errors[1]  # what is left is the outlier channels' error


def test_models_it_cannot_serve():
    config = transformers.Qwen3Config(
        num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=2, head_dim=16, vocab_size=9
    )
    with pytest.raises(ValueError, match="what 'qwen3' computes, because it has norms after its projections"):
        plant(transformers.Qwen3ForCausalLM(config), STRENGTHS[1])
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=9)
    with pytest.raises(ValueError, match="RoPE in all channels, and 'gpt2' is another"):
        plant(transformers.GPT2LMHeadModel(config), STRENGTHS[1])


def test_predictions_stay_and_cost_more_in_8_bits(fresh):
    windows = torch.randint(3, 257, (1, 201), generator=torch.Generator().manual_seed(1))
    rows = {}
    for strength in (0, 3):
        model = fresh()
        plant(model, STRENGTHS[strength])
        rows[strength] = perplexity(
            model, windows, {name: cache_factory(name, model) for name in ("bf16", "fp8", "scale-1")}
        )
    assert rows[3][0].nll == pytest.approx(rows[0][0].nll, rel=0.01)  # what bfloat16 loses of large values
    assert rows[3][2].kl > 2 * rows[3][1].kl
