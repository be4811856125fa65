"""What is static in the pages of a layer: a calibration's scales and means, and the means of biases."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

from fp8attn import KVScales, LayerScales, UsageError
from fp8attn.formats.rotation import rotate
from fp8attn.integrations.engine import Options, ServedModel, StaticState, static_state
from fp8attn.integrations.engine.biases import means_digest, means_of
from fp8attn.integrations.transformers.biases import layer_biases

from .models import SIZES, quantized, qwen2


def of_layer(options, number, heads, num_layers=3):
    model = ServedModel("a model without a folder", None, 512, num_layers, num_kv_heads=4)
    return static_state(options, model, number, heads, head_dim=64)


def test_a_calibration_of_the_heads_of_a_rank(tmp_path):
    """The file's scales are used on request. A layer that was not calibrated has nothing."""
    k_scale, mean = torch.arange(1.0, 5.0), torch.arange(4 * 64).view(4, 64).float()
    layers = {i: LayerScales(k_scale / 127, torch.full((4,), 3.0), mean + 100 * i, torch.zeros(4, 64)) for i in (0, 2)}
    KVScales(layers, num_layers=3, num_kv_heads=4, head_dim=64).save(tmp_path / "scales.safetensors")
    options = Options(str(tmp_path / "scales.safetensors"))
    k, v, scales = of_layer(options, 2, slice(2, 4))
    assert torch.equal(k, rotate(mean[2:] + 200)) and not v.any() and scales is None
    k, v, scales = of_layer(replace(options, static_scales=True), 2, slice(2, 4))
    assert torch.equal(k, rotate(mean[2:] + 200)) and not v.any()
    torch.testing.assert_close(
        scales, torch.tensor([[3 / 127, 4.0], [4 / 127, 4.0]])
    )  # V's is rounded up to a power of two
    assert of_layer(options, 1, slice(0, 4)) == StaticState()
    with pytest.raises(UsageError, match=r"num_layers is 3 in the scales and 5 in the model"):
        of_layer(options, 2, slice(0, 4), num_layers=5)
    with pytest.raises(UsageError, match=r"key_dtype='int8'"):
        of_layer(replace(options, key_dtype="e4m3"), 2, slice(0, 4))
    with pytest.raises(UsageError, match=r"no such file"):
        of_layer(Options(str(tmp_path / "none")), 2, slice(0, 4))
    assert of_layer(Options(), 2, slice(0, 4)) == of_layer(options, None, slice(0, 4)) == StaticState()


def test_means_are_those_of_the_transformers_model(tmp_path):
    model = qwen2()
    model.save_pretrained(tmp_path, max_shard_size="1MB")
    found, expected = means_of(str(tmp_path), None, 1024), layer_biases(model, 1024)
    assert found.keys() == expected.keys() == set(range(4))
    for index, layer in expected.items():
        assert layer.k_mean.any() and layer.v_mean is None and found[index].v_mean is None
        assert torch.equal(found[index].k_mean, layer.k_mean)


def test_a_layer_has_both_means_or_none(tmp_path):
    """The biases of this model give K a mean, and V none: zeros, because `warmup` compiles no kernels of one mean."""
    model = qwen2()
    model.save_pretrained(tmp_path)
    served = ServedModel(str(tmp_path), None, 1024, 4, model.config.num_key_value_heads)
    heads = slice(0, model.config.num_key_value_heads)
    found = static_state(Options(), served, 1, heads, model.config.hidden_size // model.config.num_attention_heads)
    assert torch.equal(found.stored_k_mean, rotate(layer_biases(model, 1024)[1].k_mean))
    assert found.v_mean is not None and found.v_mean.shape == found.stored_k_mean.shape and not found.v_mean.any()


def test_models_without_biases_that_can_be_read_have_no_means(tmp_path, caplog):
    LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=64)).save_pretrained(tmp_path / "llama")
    assert means_of(str(tmp_path / "llama"), None, 512) == {}
    assert not caplog.records
    assert means_of("an/unknown-model", None, 512) == {} and means_digest("an/unknown-model", None, 512) == b""
    (record,) = caplog.records  # at WARNING, which vLLM's log shows
    assert "the biases of an/unknown-model cannot be read" in record.message and "fp8attn calibrate" in record.message


def test_layers_that_lose_are_named_once(tmp_path, caplog):
    """Layer 1 has a bias of 125 deviations (1.6) in one fast channel of 64: the step is 16 times as large."""
    model = qwen2()
    model.model.layers[1].self_attn.k_proj.bias.data[1] = 200.0
    model.save_pretrained(tmp_path)
    served = ServedModel(str(tmp_path), None, 1024, num_layers=4, num_kv_heads=2)
    for number in range(4):
        static_state(Options(), served, number, slice(0, 2), head_dim=64)
    (record,) = caplog.records  # at WARNING, which vLLM's log shows
    step = layer_biases(model, 1024)[1].k_step
    assert step == pytest.approx(200 / 1.6 / 8, rel=0.1)
    assert (
        f"layers 1 of {tmp_path} lose accuracy in 8 bits" in record.message
        and f"up to {step:.0f} times as coarse" in record.message
    )
    assert "--max-model-len" in record.message


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
        assert not found[index].loses  # unknown
