"""What is read from a transformers config: layers, shapes, and the models that are refused."""

from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from fp8attn import UsageError  # noqa: E402
from fp8attn.integrations.transformers import config as config_module  # noqa: E402
from fp8attn.integrations.transformers.config import (  # noqa: E402
    LayerSpec,
    cache_keyword,
    has_sinks,
    has_softcap,
    heads_of,
    layers_of,
    unsupported_reason,
)
from fp8attn_tools.calibration.calibrate import calibrate  # noqa: E402

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 128}


def gemma3(**changes):
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    options = {
        "num_hidden_layers": 3,
        "layer_types": kinds,
        "sliding_window": 512,
        "head_dim": 256,
        "num_key_value_heads": 1,
    }
    return transformers.Gemma3TextConfig(**{**options, "num_attention_heads": 4, **changes})


def test_llama():
    config = transformers.LlamaConfig(
        num_hidden_layers=3, num_attention_heads=8, hidden_size=512, num_key_value_heads=2
    )
    assert layers_of(config) == 3 * [LayerSpec("full_attention", 8, 2, 64)]


def test_without_grouped_heads():
    config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=256)
    assert layers_of(config) == 2 * [LayerSpec("full_attention", 4, 4, 64)]


def test_windows():
    sliding = LayerSpec("sliding_attention", 4, 1, 256, 512, {"sliding_window": 512})
    assert [*map(vars, layers_of(gemma3()))][:2] == 2 * [vars(sliding)]
    assert layers_of(gemma3())[2] == LayerSpec("full_attention", 4, 1, 256)


def test_layers_that_share_k_and_v_are_not_counted():
    config = transformers.Gemma3nTextConfig(
        num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2,
        sliding_window=32,
        intermediate_size=[96] * 4, activation_sparsity_pattern=[0.0] * 4,
    )  # fmt: skip
    assert unsupported_reason(config) is None


def test_gemma_4_has_layers_of_two_shapes():
    """From transformers 5.20 on, layers have their own configs; before, the model's names those of full attention."""
    kinds = ["sliding_attention", "full_attention"]
    config = transformers.Gemma4TextConfig(
        num_hidden_layers=2,
        layer_types=kinds,
        num_key_value_heads=4,
        attention_k_eq_v=True,
        num_global_key_value_heads=2,
    )
    assert unsupported_reason(config) is None
    assert [(layer.kind, layer.num_kv_heads, layer.head_dim) for layer in layers_of(config)] == [
        (kinds[0], 4, 256),
        (kinds[1], 2, 512),
    ]
    before = SimpleNamespace(
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        global_head_dim=512,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
    )
    assert [heads_of(before, kind) for kind in kinds] == [(8, 4, 256), (8, 2, 512)]


def test_softcaps_and_sinks():
    assert has_softcap(transformers.Gemma2Config()) and not has_softcap(transformers.LlamaConfig())
    assert has_sinks(transformers.GptOssConfig()) and not has_sinks(transformers.LlamaConfig())


REFUSED = {
    r"no layer would be in FP8: every layer of 'mistral' .* \(sliding_attention\)": lambda: transformers.MistralConfig(
        **SMALL, sliding_window=64
    ),
    "'bart' is an encoder-decoder": lambda: transformers.BartConfig(),
    "'t5' is an encoder-decoder": lambda: transformers.T5Config(),
    r"'glm_moe_dsa' has sparse latent attention: it chooses the keys .* \(index_topk\)": lambda: (
        transformers.GlmMoeDsaConfig()
    ),
    "'mllama_text_model' has cross-attention layers": lambda: transformers.MllamaConfig(),
}


@pytest.mark.parametrize("words", REFUSED)
def test_models_are_refused_in_the_same_words_everywhere(words):
    config = REFUSED[words]()
    messages = set()
    for use in (
        layers_of,
        lambda config: calibrate(_Model(config), [torch.zeros(1, 4, dtype=torch.long)]),
    ):
        with pytest.raises(UsageError, match=words) as refused:
            use(config)
        messages.add(str(refused.value))
    assert messages == {unsupported_reason(config)}


class _Model(torch.nn.Module):
    """A model that has only a config."""

    def __init__(self, config):
        super().__init__()
        self.config = config


def test_the_cache_refuses_layers_that_it_does_not_hold(monkeypatch):
    indexed = LayerSpec("indexed_attention", 8, 2, 64)
    monkeypatch.setattr(config_module, "layers_of", lambda config: [LayerSpec("full_attention", 8, 2, 64), indexed])
    assert "layer 1 of 'llama' is of type 'indexed_attention'" in unsupported_reason(transformers.LlamaConfig())
    monkeypatch.undo()
    assert unsupported_reason(transformers.Qwen3NextConfig(num_hidden_layers=4)) is None


def test_the_keyword_of_a_cache_is_the_models_own():
    """transformers 5.24 renamed it, and warns of the former name."""
    renamed = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=64, intermediate_size=64, vocab_size=32, num_attention_heads=1
    )
    model = transformers.LlamaForCausalLM(config)
    assert cache_keyword(model) == ("cache" if renamed else "past_key_values")
