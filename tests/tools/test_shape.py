"""The sizes of a model's cache and weights, from its config."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from fp8attn import UsageError  # noqa: E402
from fp8attn_tools.plan import CacheShape  # noqa: E402
from fp8attn_tools.shape import count_weights, may_have_biases, shape_of  # noqa: E402

from ..integrations.transformers.test_config import gemma3  # noqa: E402


def test_layers_by_their_type():
    llama = transformers.LlamaConfig(num_hidden_layers=3, num_attention_heads=8, hidden_size=512, num_key_value_heads=2)
    assert shape_of(llama) == CacheShape(3, 2, 64)
    assert shape_of(gemma3()) == CacheShape(1, 1, 256, windows=(512, 512)) and shape_of(gemma3()).num_layers == 3
    mistral = transformers.MistralConfig(num_hidden_layers=2)
    assert shape_of(mistral) == CacheShape(0, mistral.num_key_value_heads, 128, windows=(4096, 4096))
    chunked = transformers.Llama4TextConfig(num_hidden_layers=4, head_dim=128)
    assert shape_of(chunked) == CacheShape(1, chunked.num_key_value_heads, 128, windows_16_bit=(8192, 8192, 8192))
    linear = transformers.Qwen3NextConfig(num_hidden_layers=4)
    assert shape_of(linear) == CacheShape(1, linear.num_key_value_heads, linear.head_dim, other_layers=3)


@pytest.mark.skipif(not hasattr(transformers, "Mistral4Config"), reason="transformers caches latents from 5.24 on")
def test_latents():
    """Kimi's linear layers cache none."""
    assert shape_of(transformers.DeepseekV3Config()) == CacheShape(61, 1, 576, rank=512)
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    kimi = transformers.KimiLinearConfig(**sizes, layer_types=["linear_attention", "full_attention"] * 2)
    assert shape_of(kimi) == CacheShape(2, 1, 576, other_layers=2, rank=512)


def test_layers_that_share_k_and_v_are_counted_as_the_cache_has_them():
    config = transformers.Gemma3nTextConfig(
        num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2,
        sliding_window=32,
        intermediate_size=[96] * 4, activation_sparsity_pattern=[0.0] * 4,
    )  # fmt: skip
    assert shape_of(config).num_layers == len(transformers.DynamicCache(config=config).layers)


def test_biases_are_those_of_the_architecture():
    """StarCoder's have a form that is not known. What transformers cannot make may have some."""
    sizes = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "hidden_size": 128,
        "vocab_size": 64,
    }
    assert may_have_biases(transformers.Qwen2Config(**sizes)) and may_have_biases(
        transformers.LlamaConfig(**sizes, attention_bias=True)
    )
    assert may_have_biases(transformers.GPTBigCodeConfig(n_layer=2, n_head=2, n_embd=128, vocab_size=64))
    assert not may_have_biases(transformers.LlamaConfig(**sizes)) and not may_have_biases(
        transformers.Qwen3Config(**sizes)
    )
    assert may_have_biases(transformers.PreTrainedConfig())


def test_layers_of_several_shapes_are_refused():
    with pytest.raises(
        UsageError,
        match=r"'gemma4_text' in 8 bits have different .*: \[\(4, 256\), \(4, 512\)\]; call .* CacheShape of each",
    ):
        shape_of(transformers.Gemma4TextConfig(num_hidden_layers=6))


def test_a_model_without_a_cache_is_refused():
    with pytest.raises(UsageError, match="'t5' is an encoder-decoder"):
        shape_of(transformers.T5Config())


def test_weights(tiny_model, tmp_path):
    config = transformers.AutoConfig.from_pretrained(tiny_model)
    size = (tiny_model / "model.safetensors").stat().st_size
    assert count_weights(str(tiny_model), config) == (size, "size of the files")
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    counted, source = count_weights(str(tmp_path), config)
    assert counted == 2 * sum(p.numel() for p in model.parameters())
    assert "counted from the architecture" in source
    assert torch.get_default_device() == torch.device("cpu")
