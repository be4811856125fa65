"""Fragile layers are planted in a small model and found, and every measured number is measured again by
plain forwards.
"""

import json
import math
import warnings
from dataclasses import replace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from fp8attn import AttentionPolicy, UsageError, fp8_attention  # noqa: E402
from fp8attn.integrations.transformers import FP8Cache  # noqa: E402
from fp8attn_tools import plan  # noqa: E402
from fp8attn_tools.evaluation.caches import cache_factory  # noqa: E402
from fp8attn_tools.evaluation.sensitivity import Sensitivity, choose, divergence, sensitivity, vllm_arguments  # noqa: E402
from fp8attn_tools.shape import shape_of  # noqa: E402
from tests.support.transformers_models import VOCABULARY, make, one_thread  # noqa: E402, F401

LAYERS, FRAGILE, CHUNK = 6, (1, 4), 64
WINDOWS = torch.randint(3, VOCABULARY, (2, 129), generator=torch.Generator().manual_seed(1))
OTHERS = torch.randint(3, VOCABULARY, (2, 129), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def plant(model, k_layer, v_layer, size=2.0**9):
    """Make two layers fragile. The model's answers in exact arithmetic are the same for every `size` of 2 or more, a
    power of two.

    - In `k_layer` a pair of K's channels, which RoPE rotates into each other, becomes `size` times as large, and Q's
      pair as small. The rotation spreads this pair over all channels, and INT8's error is relative to the largest.
    - In `v_layer` every two channels of V get a large common part, which the output projection subtracts. E4M3's error
      is relative to it.

    No bias shows either, so `FP8Cache` has no means for them.
    """
    attention = model.model.layers[k_layer].self_attn
    for projection, factor in ((attention.k_proj, size), (attention.q_proj, 1 / size)):
        projection.weight.view(-1, 2, 32, projection.in_features)[:, :, 5] *= factor
    attention = model.model.layers[v_layer].self_attn
    v, o = attention.v_proj.weight, attention.o_proj.weight
    o[:, 1::2] = -o[:, 0::2]
    common = torch.randn(len(v) // 2, v.shape[1], generator=torch.Generator().manual_seed(2)) * size / 16 * v.std()
    v[0::2] += common
    v[1::2] += common


def plain_logits(model, windows):
    with torch.no_grad():
        return model(input_ids=windows[:, :-1], use_cache=False).logits


@torch.no_grad()
def direct_kl(model, windows, **options):
    """KL of the plain forward's predictions from those of `FP8Cache`, in float64 from the logits on.

    The chunks are the report's: a page's scale grows with its tokens, and queries that see the page before that see
    other codes.
    """
    cache = FP8Cache(model, **options)
    cached = [model(input_ids=part, past_key_values=cache).logits for part in windows[:, :-1].split(CHUNK, 1)]
    exact, found = (x.double().log_softmax(-1) for x in (plain_logits(model, windows), torch.cat(cached, 1)))
    return (exact.exp() * (exact - found)).sum(-1).mean().item()


def near(kl):
    """The report's KL is a sum of 89 terms in FP32, from probabilities that are off by up to 1e-6 of themselves."""
    return pytest.approx(kl, rel=0.005, abs=1e-7)


@pytest.fixture(scope="module")
def planted():
    model = make(num_hidden_layers=LAYERS)
    plant(model, *FRAGILE)
    return model


@pytest.fixture(scope="module")
def report(planted):
    """In chunks of 64 tokens: the second half of each window reads pages."""
    ticks = []
    found = sensitivity(planted, WINDOWS, chunk=CHUNK, progress=lambda done, total: ticks.append((done, total)))
    # 2 windows of 2 chunks, for: 6 layers alone and the nudged run with one baseline, and 5 sets with one baseline.
    # Then no tick is left.
    done = [*(8 * n for n in range(1, 5)), *(4 * 8 + 6 * n for n in range(1, 5))]
    assert ticks == [(number, 4 * 14) for number in done]
    return found


def test_the_planted_model_says_the_same_in_exact_arithmetic(planted):
    mild = make(num_hidden_layers=LAYERS)
    plant(mild, *FRAGILE, size=2.0)
    want = plain_logits(mild, WINDOWS)
    # V's common part is 32 times V. FP32 subtracts it to within 32 times 2^-24 of V, in one layer of six.
    assert torch.allclose(plain_logits(planted, WINDOWS), want, atol=1e-4 * want.std(), rtol=0)


def test_two_planted_fragile_layers_are_found(report):
    assert {*report.ranking[:2]} == {*FRAGILE}
    fragile = [row for row in report.layers if row.layer in FRAGILE]
    others = [row for row in report.layers if row.layer not in FRAGILE]
    assert min(row.kl for row in fragile) > 30 * max(row.kl for row in others)
    assert all(0 < row.standard_error < row.kl / 3 for row in report.layers)
    assert (report.tokens, report.context, report.chunk, report.dtype) == (256, 128, 64, "float32")


def test_a_budget_of_divergence_leaves_exactly_them_in_16_bits(planted, report):
    everything = report.cumulated_kl[0]
    chosen = choose(report, max_kl=everything / 20)
    assert chosen == FRAGILE
    assert report.kl(chosen) < everything / 20
    assert report.kl(chosen) == near(direct_kl(planted, WINDOWS, skip_layers=chosen))
    (everything, _), (kl, error) = divergence(planted, OTHERS, [(), chosen], chunk=CHUNK)
    assert kl < everything / 20 and error < kl / 3
    assert kl == near(direct_kl(planted, OTHERS, skip_layers=chosen))


def test_each_divergence_is_that_of_plain_forwards(planted, report):
    for row in report.layers:
        alone = direct_kl(planted, WINDOWS, skip_layers=[layer for layer in range(LAYERS) if layer != row.layer])
        assert row.kl == near(alone)
    for count, kl in enumerate(report.cumulated_kl):
        assert kl == near(direct_kl(planted, WINDOWS, skip_layers=report.ranking[:count]))
    assert report.cumulated_kl[-1] == min(row.kl for row in report.layers)


def test_the_choice_fits_the_cache_the_policy_and_vllm(planted, report):
    chosen = choose(report, max_kl=report.cumulated_kl[0] / 20)
    assert FP8Cache(planted, skip_layers=chosen).fp8_layers == (0, 2, 3, 5)
    planted.set_attn_implementation("sdpa")
    try:
        with fp8_attention(AttentionPolicy(min_length=1, skip=chosen), planted) as ran:
            plain_logits(planted, WINDOWS)
    finally:
        planted.set_attn_implementation("fp8_kv")
    assert [row.layer for row in ran.rows if row.reason is None] == [0, 2, 3, 5]
    assert vllm_arguments(report, chosen) == "--kv-cache-dtype fp8 --kv-cache-dtype-skip-layers 1 4"
    assert vllm_arguments(report, ()) == "--kv-cache-dtype fp8"


def test_budgets_that_everything_or_nothing_meets(report):
    assert choose(report, max_kl=1.0) == ()
    assert choose(report, max_kl=report.cumulated_kl[0]) == ()
    least = min(report.cumulated_kl)
    assert len(choose(report, max_kl=least)) == LAYERS - 1
    for budget in (least * 0.99, 0.0, -1.0, math.nan):
        with pytest.raises(
            UsageError,
            match=r"no choice of layers has a KL divergence of at most .* the smallest measured is .*DynamicCache",
        ):
            choose(report, max_kl=budget)
    for budgets in ({}, {"max_kl": 1.0, "max_bytes_per_token": 1.0}):
        with pytest.raises(UsageError, match="choose takes one budget, max_kl or max_bytes_per_token"):
            choose(report, **budgets)


def test_a_budget_of_bytes(planted, report):
    eight, sixteen = (shape_of(planted.config).bytes_per_token(cache) for cache in ("fp8", "bf16"))
    assert report.bytes_per_token() == pytest.approx(eight - plan.ENTRY / 128)  # without the page table
    assert report.bytes_per_token(range(LAYERS)) == sixteen
    one = (sixteen - report.bytes_per_token()) / LAYERS  # of one layer in 16 bits more
    assert choose(report, max_bytes_per_token=report.bytes_per_token()) == ()
    assert choose(report, max_bytes_per_token=report.bytes_per_token() + 1.5 * one) == report.ranking[:1]
    assert choose(report, max_bytes_per_token=report.bytes_per_token() + 2 * one) == FRAGILE
    assert len(choose(report, max_bytes_per_token=1e9)) == LAYERS - 1  # an FP8Cache has at least one layer in 8 bits
    for budget in (report.bytes_per_token() - 1, 0.0, math.nan):
        with pytest.raises(UsageError, match=r"with all in 8 bits it is 1,548, and with all in 16 bits 3,072"):
            choose(report, max_bytes_per_token=budget)


def test_more_bytes_never_make_a_choice_worse(report):
    """Errors interact, so one more layer in 16 bits can make the divergence larger. Then it is not chosen."""
    odd = replace(report, cumulated_kl=(0.5, 0.2, 0.3, 0.4, 0.1, 0.05))
    sizes = [odd.bytes_per_token(odd.ranking[:count]) for count in range(LAYERS)]
    assert [len(choose(odd, max_bytes_per_token=size)) for size in sizes] == [0, 1, 1, 1, 4, 5]
    assert [len(choose(odd, max_kl=kl)) for kl in (0.5, 0.35, 0.25, 0.15)] == [0, 1, 1, 4]


def test_a_set_that_was_not_measured(planted, report):
    with pytest.raises(
        UsageError, match=r"layers \[0\] in 16 bits were not measured, .*divergence\(model, windows, skip_layers\)"
    ):
        report.kl([0])
    with pytest.raises(UsageError, match="were not measured"):
        report.kl(range(LAYERS))
    with pytest.raises(
        UsageError, match=r"layers \[-1, 6\] are none that can be in 8 bits; those are \[0, 1, 2, 3, 4, 5\]"
    ):
        divergence(planted, WINDOWS, [(0, 6), (-1,)])


def test_reports_are_files(report, tmp_path):
    path = tmp_path / "folder" / "report.json"
    report.save(path)
    assert Sensitivity.load(path) == report
    whole = json.loads(path.read_text())
    for damaged in (
        "",
        "[]",
        "{}",
        json.dumps(whole | {"format": "x"}),
        json.dumps(whole | {"layers": [{"layer": 1}]}),
    ):
        path.write_text(damaged)
        with pytest.raises(
            UsageError, match=r"is no report of the format fp8attn\.sensitivity\.2; Sensitivity\.save writes it"
        ):
            Sensitivity.load(path)
    with pytest.raises(UsageError, match=r"cannot read .*nowhere\.json \(No such file"):
        Sensitivity.load(tmp_path / "nowhere.json")


def test_layers_with_a_window_stay_in_16_bits():
    model = make("qwen2-mixed")
    found = sensitivity(model, WINDOWS[:1], chunk=CHUNK)
    assert [row.layer for row in found.layers] == [1, 2] and found.windowed == (0,)
    assert 1e-5 < found.cumulated_kl[0] == near(direct_kl(model, WINDOWS[:1]))
    assert vllm_arguments(found, (2,)) == "--kv-cache-dtype fp8 --kv-cache-dtype-skip-layers 0 2"


def test_long_windows_are_measured():
    model = make("qwen2-mixed", sliding_window=384)
    found = sensitivity(model, WINDOWS[:1], chunk=CHUNK)
    assert [row.layer for row in found.layers] == [0, 1, 2] and found.windowed == ()
    assert found.cumulated_kl[0] == near(direct_kl(model, WINDOWS[:1]))
    assert (
        found.layers[0].bytes_8_bit == found.layers[0].bytes_16_bit == 0 < found.layers[1].bytes_8_bit
    )  # a window does not grow
    other = sensitivity(
        model,
        WINDOWS[:1],
        lambda skip: cache_factory("scale-1", model, skip_layers=skip)(),
        chunk=CHUNK,
        name="scale-1",
    )
    assert [row.layer for row in other.layers] == [1, 2] and other.windowed == (0,)


@pytest.mark.parametrize("family", ["gemma2-softcap", "gemma3n-shared-kv", "diffllama-changes-v", "gpt-oss-sinks"])
def test_every_architecture_is_measured(family):
    model, windows = make(family), WINDOWS[:1, :65]
    found = sensitivity(model, windows)
    full = {"gemma3n-shared-kv": [1], "diffllama-changes-v": [0, 1, 2]}.get(family, [1, 2])
    assert [row.layer for row in found.layers] == full
    for row in found.layers:
        assert row.kl == near(direct_kl(model, windows, skip_layers=[layer for layer in full if layer != row.layer]))


def test_another_cache_is_measured(planted):
    """A plain cast: the planted K is not rotated, so its other channels lose nothing. V is as fragile as in any E4M3
    cache.
    """
    name = "scale-1"
    found = sensitivity(planted, WINDOWS[:1], lambda skip: cache_factory(name, planted, skip_layers=skip)(), name=name)
    assert (found.cache, found.ranking[0]) == (name, FRAGILE[1])
    assert found.layers[FRAGILE[0]].kl < found.layers[FRAGILE[1]].kl / 10
    for other in ("bf16", "transformers-fp8"):
        if other == "bf16" or hasattr(transformers.cache_utils, "Fp8QuantizedLayer"):
            with pytest.raises(
                UsageError, match=f"the cache '{other}' holds all layers in one format; it takes no skip_layers"
            ):
                cache_factory(other, planted, skip_layers=(1,))


def test_a_16_bit_model_has_a_floor():
    """In FP32 the last bit of the embeddings changes nothing. In BF16 it changes predictions."""
    model = make()
    assert abs(sensitivity(model, WINDOWS[:1]).floor) < 1e-7  # what summing 89 probabilities in FP32 is off by
    found = sensitivity(model.bfloat16(), WINDOWS[:1])
    assert found.dtype == "bfloat16" and found.floor > 1e-5


def test_the_cache_has_the_name_that_the_model_knows(planted):
    """transformers 5.24 warns of the older one."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        sensitivity(planted, WINDOWS[:1, :9], chunk=CHUNK)


def test_hooks_are_removed(planted, report):
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in planted.modules())


def test_what_cannot_be_measured(planted):
    for windows in (WINDOWS[0], WINDOWS[:, :1], WINDOWS[:0]):
        with pytest.raises(UsageError, match=r"windows must be \[N, S \+ 1\] token ids"):
            sensitivity(planted, windows)
    model = make()
    with pytest.raises(UsageError, match=r"in training mode.* call model\.eval\(\)"):
        sensitivity(model.train(), WINDOWS)
    model.eval().lm_head.weight.data.fill_(math.nan)
    with pytest.raises(ValueError, match="with layer 0 in 8 bits is no number: logits are NaN or infinite"):
        sensitivity(model, WINDOWS)
    assert not any(module._forward_hooks for module in model.modules())
