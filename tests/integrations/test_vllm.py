"""The parts of the vLLM plugin that need no vLLM. `tests/vllm` has the others; `make test-vllm` runs them."""

import threading
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from fp8attn import KVScales, LayerScales, UsageError
from fp8attn.formats.page_layout import PageLayout, engine_marks_of
from fp8attn.formats.rotation import rotate
from fp8attn.integrations.transformers.biases import layer_biases
from fp8attn.integrations.vllm import NEWEST, OLDEST, refused, register, unsupported_release, warm
from fp8attn.integrations.vllm.biases import identity, means_of
from fp8attn.integrations.vllm.connectors import check_marks, exchanges_blocks, mark_of, unsupported_connector
from fp8attn.integrations.vllm.options import Calibrated, Options

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


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"fp8attn": {"exact": "false"}}, "has exact 'false'; it must be true or false, without quotes"),
        ({"fp8attn": {"static_scales": 1}}, "has static_scales 1; it must be true or false"),
        ({"fp8attn": {"scales": True}}, "has scales True; it must be a string"),
        ({"fp8attn": {"key_dtype": None}}, "has key_dtype None; it must be a string"),
        ({"fp8attn": True}, "must be a JSON object of options; got True"),
        ({"fp8_attn": {"exact": True}}, "additional_config has 'fp8_attn': the options of fp8attn are under 'fp8attn'"),
        ({"FP8-Attention": {}}, "additional_config has 'FP8-Attention'"),
    ],
)
def test_options_of_another_type_are_refused(config, message):
    with pytest.raises(UsageError) as error:
        Options.of(config)
    assert message in str(error.value)


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
    assert not caplog.records
    assert means_of("an/unknown-model", None, 512) == {} and identity("an/unknown-model", None, 512) == b""
    (record,) = caplog.records  # at WARNING, which vLLM's log shows
    assert "the biases of an/unknown-model cannot be read" in record.message and "fp8attn calibrate" in record.message


def quantized(model, folder, how):
    """The model's checkpoint with the names and types that quantized weights have. Biases stay."""
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    names = {"AWQ": "qweight", "FP8": "weight", "compressed-tensors": "weight_packed"}
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        x = weights.pop(name)
        weights[name.removesuffix("weight") + names[how]] = x.to(torch.float8_e4m3fn) if how == "FP8" else x[:, ::8].int()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("how", ["AWQ", "FP8", "compressed-tensors"])
def test_quantized_checkpoints_have_means(tmp_path, how):
    """Their biases are subtracted whole: with the weights, those that are small beside K are not."""
    model = qwen2()
    expected = layer_biases(model, 1024)
    for layer in model.model.layers:
        layer.self_attn.v_proj.bias.data.fill_(0.25)
    quantized(model, tmp_path, how)
    found = means_of(str(tmp_path), None, 1024)
    assert found.keys() == set(range(4))
    for index, layer in expected.items():
        used = layer.k_mean != 0
        assert used.any() and not used.all() and (found[index].k_mean != 0).sum() > used.sum()
        assert torch.equal(found[index].k_mean[used], layer.k_mean[used])
        assert torch.equal(found[index].v_mean, torch.full((2, 64), 0.25))


def configured(name=None, **own):
    given = SimpleNamespace(kv_connector=name, kv_connector_extra_config=own)
    return SimpleNamespace(kv_transfer_config=None if name is None else given)


def test_kv_connectors():
    """LMCache's connector of one process would cut pages. What stays in the own CPU's memory needs no mark."""
    multi = {"connectors": [{"kv_connector": "OffloadingConnector"}, {"kv_connector": "LMCacheConnectorV1"}]}
    for config in (configured("LMCacheConnectorV1"), configured("MultiConnector", **multi)):
        assert "LMCacheConnectorV1 moves tokens" in unsupported_connector(config) and "LMCacheMPConnector" in unsupported_connector(config)
    for config, exchanged in (
        (configured(), False), (configured("NixlConnector"), True), (configured("LMCacheMPConnector"), True),
        (configured("OffloadingConnector", cpu_bytes_to_use=1), False),
        (configured("OffloadingConnector", spec_name="TieringOffloadingSpec"), True),
        (configured("SimpleCPUOffloadConnector"), False), (configured("MultiConnector", connectors=multi["connectors"][:1]), False),
    ):  # fmt: skip
        assert unsupported_connector(config) is None and exchanges_blocks(config) == exchanged


def test_marks_differ_where_bytes_do(tmp_path):
    """The same tokens have other bytes with another type of keys, other means or other scales. Other options change no byte."""
    model = qwen2()
    model.save_pretrained(tmp_path / "plain")
    quantized(model, tmp_path / "quantized", "AWQ")
    LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=64)).save_pretrained(tmp_path / "llama")
    scales = KVScales({0: LayerScales(*2 * [torch.ones(2)], *2 * [torch.zeros(2, 64)])}, num_layers=4, num_kv_heads=2, head_dim=64)
    scales.save(tmp_path / "scales.safetensors")
    file = str(tmp_path / "scales.safetensors")
    different = [
        (Options(), "plain", 1024), (Options(key_dtype="e4m3"), "plain", 1024), (Options(), "plain", 512), (Options(), "quantized", 1024),
        (Options(), "llama", 512), (Options(file), "plain", 1024), (Options(file, static_scales=True), "plain", 1024),
    ]  # fmt: skip
    found = [mark_of(options, str(tmp_path / model), None, context) for options, model, context in different]
    assert len(set(found)) == len(different) and all(0 < mark < 2**63 for mark in found)
    assert mark_of(Options(exact=True, count_overflows=True), str(tmp_path / "plain"), None, 1024) == found[0]
    assert mark_of(Options(), str(tmp_path / "llama"), None, 1024) == found[4]  # without means the length does not matter
    model.model.layers[2].self_attn.k_proj.bias.data[0] += 1
    model.save_pretrained(tmp_path / "other")
    assert mark_of(Options(), str(tmp_path / "other"), None, 1024) not in found


def test_a_page_with_another_mark_is_an_error():
    pool = torch.full((9, 2, PageLayout.of(64).nbytes), 0x7F, dtype=torch.uint8)
    engine_marks_of(pool).fill_(77)
    table = torch.tensor([[3, 5, -1], [0, 8, 1]], dtype=torch.int32)
    check_marks(pool, table, 77)
    engine_marks_of(pool)[4] = 78  # not in the table
    check_marks(pool, table, 77)
    assert (pool[:, :, : PageLayout.of(64).nbytes - 120] == 0x7F).all() and (pool[:, :, PageLayout.of(64).nbytes - 112 :] == 0x7F).all()
    engine_marks_of(pool)[8] = 78
    with pytest.raises(RuntimeError, match=r"brought blocks of another format\. Engines .* must have the same options"):
        check_marks(pool, table, 77)


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
