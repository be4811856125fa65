"""The parts of the vLLM plugin that need no vLLM. `tests/vllm` has the others; `make test-vllm` runs them."""

import re
import threading
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from fp8attn import KVScales, LayerScales, UsageError
from fp8attn.integrations.transformers.biases import layer_biases
from fp8attn.integrations.vllm import NEWEST, OLDEST, refused, register, unsupported_release, warm
from fp8attn.integrations.vllm.biases import means_of
from fp8attn.integrations.vllm.options import Calibrated, Options
from fp8attn.rotation import rotate

ROOT = Path(__file__).parents[2]


def test_the_entry_point_names_the_function():
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    assert points == {"fp8attn": f"{register.__module__}:{register.__name__}"}


def test_what_pip_installs_is_what_is_supported():
    (wanted,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["vllm"]
    assert wanted == f"vllm>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"


@pytest.mark.parametrize("version", ["0.26.0", "0.27.1", "0.32.0+cpu", "0.32.0.post1", "0.33.0+cu130"])
def test_supported_releases(version):
    assert unsupported_release(version) is None


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "0.33.1rc1.dev12+g4ba787ec9", "0.3.2", "1.0", "1.30.0", "dev"])
def test_another_release_is_refused_by_name(version, monkeypatch):
    assert f"vLLM 0.26 to 0.33, and this is vLLM {version}" in unsupported_release(version)
    monkeypatch.setattr(refused, "vllm_version", lambda: version)
    assert refused.RefusedBackend.validate_configuration(head_size=128, dtype=torch.bfloat16) == [unsupported_release(version)]


def test_options():
    assert Options.of({}) == Options.of({"other": 1}) == Options(None, key_dtype="int8")
    assert Options.of({"fp8attn": {"key_dtype": "e4m3"}}).key_dtype == "e4m3"
    with pytest.raises(UsageError, match=r"has keys, skale; the options are scales, static_scales, key_dtype"):
        Options.of({"fp8attn": {"skale": "x", "keys": "int8"}})
    with pytest.raises(UsageError, match=r"key_dtype must be one of"):
        Options.of({"fp8attn": {"key_dtype": "fp16"}})
    with pytest.raises(UsageError, match=r"static_scales, which needs scales"):
        Options.of({"fp8attn": {"static_scales": True}})


def test_a_calibration_of_the_heads_of_a_rank(tmp_path):
    """The file's scales are used on request. A layer that was not calibrated has nothing, and a mean that is zero is none."""
    k_scale, mean = torch.arange(1.0, 5.0), torch.arange(4 * 64).view(4, 64).float()
    layers = {i: LayerScales(k_scale / 127, torch.full((4,), 3.0), mean + 100 * i, torch.zeros(4, 64)) for i in (0, 2)}
    KVScales(layers, num_layers=3, num_kv_heads=4, head_dim=64).save(tmp_path / "scales.safetensors")
    shape = {"num_layers": 3, "num_kv_heads": 4, "head_dim": 64}
    options, second = Options(str(tmp_path / "scales.safetensors")), "model.layers.2.self_attn.attn"
    k, v, scales = options.calibrated(second, slice(2, 4), **shape)
    assert torch.equal(k, rotate(mean[2:] + 200)) and v is None and scales is None
    k, v, scales = replace(options, static_scales=True).calibrated(second, slice(2, 4), **shape)
    assert torch.equal(k, rotate(mean[2:] + 200)) and not v.any()
    torch.testing.assert_close(scales, torch.tensor([[3 / 127, 4.0], [4 / 127, 4.0]]))  # V's is rounded up to a power of two
    assert options.calibrated("model.layers.1.self_attn.attn", slice(0, 4), **shape) == Calibrated()
    with pytest.raises(UsageError, match=r"num_layers is 3 in the scales and 5 in the model"):
        options.calibrated(second, slice(0, 4), **(shape | {"num_layers": 5}))
    with pytest.raises(UsageError, match=r"key_dtype='int8'"):
        replace(options, key_dtype="e4m3").calibrated(second, slice(0, 4), **shape)
    with pytest.raises(UsageError, match=r"no such file"):
        Options(str(tmp_path / "none")).calibrated(second, slice(0, 4), **shape)
    assert Options().calibrated(second, slice(0, 4), **shape) == Calibrated()


SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}


def qwen2(**sizes):
    """A random Qwen2 whose K has an offset of 60 in the channels that RoPE rotates least, as trained ones have."""
    torch.manual_seed(0)
    rest = {"vocab_size": 512, "max_position_embeddings": 4096, "rope_theta": 1e6, "initializer_range": 0.1}
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES | sizes | rest, bos_token_id=0, eos_token_id=1))
    for layer in model.model.layers:
        bias = layer.self_attn.k_proj.bias.data.view(-1, 2, 32)
        bias.normal_()[:, :, 24:] += 60
    return model


def test_means_are_those_of_the_transformers_model(tmp_path):
    model = qwen2()
    model.save_pretrained(tmp_path, max_shard_size="1MB")
    found, expected = means_of(str(tmp_path), None, 1024), layer_biases(model, 1024)
    assert found.keys() == expected.keys() == set(range(4))
    for index, layer in expected.items():
        assert layer.k_mean.any() and layer.v_mean is None and found[index].v_mean is None
        assert torch.equal(found[index].k_mean, layer.k_mean)


def test_models_without_biases_that_can_be_read_have_no_means(tmp_path, caplog):
    LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=64)).save_pretrained(tmp_path / "llama")
    assert means_of(str(tmp_path / "llama"), None, 512) == {}
    qwen2().save_pretrained(tmp_path / "quantized")
    weights = load_file(tmp_path / "quantized/model.safetensors")
    packed = {name: x.view(-1, 1).byte() if re.search(r"[kv]_proj\.weight", name) else x for name, x in weights.items()}
    save_file(packed, tmp_path / "quantized/model.safetensors", {"format": "pt"})
    assert means_of(str(tmp_path / "quantized"), None, 512) == {}
    assert not caplog.records
    with caplog.at_level("INFO", "vllm"):
        assert means_of("an/unknown-model", None, 512) == {}
    assert "the biases of an/unknown-model are not read" in caplog.text


def test_the_first_process_compiles_and_the_others_wait(tmp_path):
    started, finish, made = threading.Event(), threading.Event(), []

    def compile():
        made.append(threading.get_ident())
        started.set()
        assert finish.wait(10)
        return ["kernel"]

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(warm._first, tmp_path, {"head_dim": 128}, compile)
        assert started.wait(10)
        others = [pool.submit(warm._first, tmp_path, {"head_dim": 128}, compile) for _ in range(2)]
        assert not any(other.done() for other in others)
        finish.set()
        assert first.result(10) == ["kernel"] and [other.result(10) for other in others] == [None, None]
    assert len(made) == 1
    assert warm._first(tmp_path, {"head_dim": 128}, compile) is None
    assert warm._first(tmp_path, {"head_dim": 64}, compile) == ["kernel"]
