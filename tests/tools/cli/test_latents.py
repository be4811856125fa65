"""The commands with models whose attention caches latents (MLA): DeepSeek V3's, and GLM 4.7 Flash's with 20 heads."""

import math

import pytest

pytest.importorskip("typer")
transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "Mistral4Config"):
    pytest.skip("transformers caches latents from 5.24 on", allow_module_level=True)

import torch  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
)

from fp8attn.integrations.transformers import FP8Cache  # noqa: E402
from fp8attn_tools.evaluation.caches import cache_factory  # noqa: E402
from fp8attn_tools.evaluation.perplexity import by_token  # noqa: E402
from tests.conftest import byte_tokenizer  # noqa: E402
from tests.support.transformers_models import one_thread  # noqa: E402, F401
from tests.tools.cli.running import fail, never, run, run_json  # noqa: E402

LAYERS, RANK, ROPE = 2, 256, 64
# Of a page of each layer, with its mean and factors, its entry in the page table, and a length.
PAGES = LAYERS * (128 * (RANK + 2 * ROPE + 4) + 4 * RANK + 4 * RANK // 128 + 4) + 4
IN_16_BITS, IN_8_BITS = 2 * (RANK + ROPE), RANK + 2 * ROPE + 4  # bytes of a token and layer
SIZES = dict(
    vocab_size=257, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS,
    q_lora_rank=32, kv_lora_rank=RANK, qk_nope_head_dim=32, qk_rope_head_dim=ROPE, v_head_dim=48,
    max_position_embeddings=4096, first_k_dense_replace=9, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
    topk_group=1, moe_intermediate_size=32, pad_token_id=0, bos_token_id=None, eos_token_id=0,
)  # fmt: skip
FAMILIES = {"deepseek_v3": (DeepseekV3Config, 4), "glm4_moe_lite": (Glm4MoeLiteConfig, 20)}
DEEPSEEK_V3 = dict(  # of its config.json, what decides the cache and the weights
    num_hidden_layers=61, hidden_size=7168, intermediate_size=18432, num_attention_heads=128, num_key_value_heads=128,
    q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=2048,
    first_k_dense_replace=3, vocab_size=129280, max_position_embeddings=163840,
)  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    """A folder with a random model, its tokenizer and no text."""
    folder = tmp_path_factory.mktemp("models") / request.param
    config, heads = FAMILIES[request.param]
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config(**SIZES, num_attention_heads=heads, num_key_value_heads=heads))
    for module in made.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data.normal_(0, module.in_features**-0.5)
    made.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    """A folder with DeepSeek V3's config, and nothing else."""
    folder = tmp_path_factory.mktemp("deepseek-v3")
    config = DeepseekV3Config(**DEEPSEEK_V3)
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config.save_pretrained(folder)
    return folder


def test_plan_of_deepseek_v3(deepseek):
    """From its config alone: 644 bytes a token and layer for 1,152, and at 128k 4.8 GiB for 8.6."""
    plan = run_json("plan", "--model", deepseek, "--memory", "1128GB", "--context", 131072)
    bf16, fp8 = plan["rows"]
    assert (plan["shape"]["full_layers"], plan["shape"]["head_dim"], plan["shape"]["rank"]) == (61, 576, 512)
    assert bf16["bytes_per_token"] == 61 * 1152 and bf16["cache_bytes"] == 61 * 1152 * 131072
    assert fp8["bytes_per_token"] == 61 * 644 + 4 / 128  # an entry of the page table
    assert fp8["cache_bytes"] == 61 * (644 * 131072 + 4) + 4 * 131072 // 128
    assert 670e9 < plan["weights"] < 672e9  # 671 billion parameters in 8 bits
    assert plan["note"] == (
        "Attention caches latents of 512 channels and 64 of a key with RoPE: 644 bytes a token and layer, 1,152 in 16 "
        "bits"
    )
    shown = " ".join(run("plan", "--model", deepseek, "--memory", "1128GB", "--context", 131072).split())
    assert "8.6 GiB" in shown and "4.8 GiB" in shown and "8 bits each" in shown and plan["note"] in shown


def test_doctor_reads_the_config_alone(monkeypatch, deepseek):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", never)
    *_, served, latents, projection = run_json("doctor", "--model", deepseek, "--no-measure")
    assert served == {"name": f"model {deepseek}", "status": "ok", "detail": "FP8Cache can serve it"}
    assert (latents["name"], latents["status"]) == ("latents", "ok")
    assert latents["detail"] == (
        "layers 0-60: 512 channels in INT8 and 64 of a key with RoPE in FP16, 644 bytes a token and layer for 1,152 in "
        "16 bits"
    )
    assert projection["status"] == "warn" and "Dequantize the model" in projection["detail"]


def test_doctor_of_a_model_that_is_not_quantized(model):
    (*_, latents) = run_json("doctor", "--model", model, "--no-measure")
    assert latents["name"] == "latents" and "388 bytes a token and layer for 640" in latents["detail"]


def test_generate(model):
    both = run_json("generate", "def f(x):", "--model", model, "--cache", "both,scale-1", "--max-new-tokens", 6)
    bf16, fp8, cast = both["rows"]
    assert all(len(row["tokens"]) == 6 for row in both["rows"])
    assert bf16["cache_bytes"] == 14 * LAYERS * IN_16_BITS and cast["cache_bytes"] == bf16["cache_bytes"] / 2
    assert fp8["cache_bytes"] == PAGES


@pytest.mark.parametrize("command", [("generate", "x"), ("evaluate", "perplexity", "--context", 64, "--windows", 1)])
def test_formats_of_keys_are_refused_before_a_model_runs(monkeypatch, capsys, model, command):
    for each in (DeepseekV3ForCausalLM, Glm4MoeLiteForCausalLM):
        monkeypatch.setattr(each, "forward", never)
    message = fail(monkeypatch, capsys, *command, "--model", model, "--cache", "both,fp8-e4m3-keys")
    assert message == (
        f"fp8attn: the cache 'fp8-e4m3-keys' is a format of keys and values, and {model.name!r} caches latents; choose "
        f"from bf16, fp8, fp8-int8-keys, scale-1, transformers-fp8"
    )


def test_sensitivity(model):
    """What is measured is 8 bits, even where one forward takes all tokens: the first forward of a prompt attends to
    exact latents.
    """
    arguments = ("sensitivity", "--model", model, "--context", 60)
    whole, parts = (run_json(*arguments, "--chunk", chunk)["report"] for chunk in (512, 16))
    for row, other in zip(whole["layers"], parts["layers"], strict=True):
        assert (row["bytes_8_bit"], row["bytes_16_bit"]) == (IN_8_BITS, IN_16_BITS)
        assert 1e-7 < row["kl"] < 1e-3
        assert row["kl"] == pytest.approx(other["kl"], rel=0.02)  # the bytes of a token depend on that token alone
    cast = run_json(*arguments, "--cache", "scale-1")["report"]
    assert cast["cumulated_kl"][0] > 3 * whole["cumulated_kl"][0]


def test_sensitivity_with_a_budget(model, monkeypatch, capsys):
    budget = IN_8_BITS + IN_16_BITS
    choice = run_json("sensitivity", "--model", model, "--context", 40, "--max-bytes", budget)["choice"]
    assert len(choice["skip_layers"]) == 1 and choice["bytes_per_token"] == budget
    message = fail(monkeypatch, capsys, "sensitivity", "--model", model, "--max-bytes", 700)
    assert message.endswith(f"with all in 8 bits it is {LAYERS * IN_8_BITS}")


def test_perplexity_reads_the_cache_from_the_first_token_on(model):
    """In one forward of the whole window, as in forwards of 16 tokens."""
    arguments = ("evaluate", "perplexity", "--model", model, "--context", 96, "--windows", 1)
    whole, parts = (run_json(*arguments, "--chunk", chunk)["rows"] for chunk in (512, 16))
    assert [row["bytes_per_token"] for row in whole] == [LAYERS * IN_16_BITS, PAGES / 96]
    assert 1e-7 < whole[1]["kl"] < 1e-3 and whole[1]["kl"] == pytest.approx(parts[1]["kl"], rel=0.02)


def test_needles_and_drift(model):
    """The random model knows no needle. Sequences that are copied, exchanged and truncated keep their predictions."""
    needles = run_json("evaluate", "needle", "--model", model, "--lengths", 600, "--samples", 1, "--depths", 0.5)
    assert needles["scores"] == {"bf16": 0.0, "fp8": 0.0} and len(needles["rows"]) == 2
    drift = run_json("evaluate", "drift", "--model", model, "--prompt", 120, "--decode", 32, "--segment", 8)
    assert [row["operation"] for row in drift["rows"]] == ["left alone", "copied", "reordered", "truncated"]
    assert all(row["kl"] < 1e-3 and not math.isnan(row["nll"]) for row in drift["rows"])


def test_calibrate_and_warmup_say_that_there_is_nothing_to_do(monkeypatch, capsys, model, tmp_path):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", never)
    message = fail(monkeypatch, capsys, "calibrate", "--model", model, "--out", tmp_path / "scales.safetensors")
    assert message == (
        f"fp8attn: {model.name!r} caches latents, whose scales are of single tokens: there is nothing to calibrate. "
        f"Use FP8Cache(model) without scales"
    )
    message = fail(monkeypatch, capsys, "warmup", "--model", model)
    assert "whose kernels are few and compiled at their first launch" in message


def test_only_the_first_forward_of_latents_is_cut(model):
    """Other caches get the tokens of a window in the forwards that were asked for."""
    from fp8attn_tools.evaluation import models

    loaded, _ = models.load(model, device="cpu")
    FP8Cache(loaded)  # reads random tokens, once
    sizes = []
    loaded.register_forward_pre_hook(
        lambda module, args, given: sizes.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    runs = {name: (loaded, cache_factory(name, loaded)) for name in ("bf16", "fp8")}
    by_token(runs, torch.arange(1, 42)[None], step=16)
    assert sizes == [16, 1, 15, 16, 16, 8, 8]
