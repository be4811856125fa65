"""The decoder families of transformers, and what `FP8Cache` does with each: `docs/families.md`.

python -m tests.support.families --write    # after an upgrade of transformers
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, DynamicCache, PreTrainedConfig
from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError

from fp8attn import UsageError
from fp8attn.integrations.transformers import FP8Cache
from fp8attn.integrations.transformers.config import SHORTEST_WINDOW, layers_of, unsupported_reason
from fp8attn.numerics import relative_error
from tests.support.multimodal_models import FAMILIES as MULTIMODAL

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
VOCABULARY = 97
WINDOW = SHORTEST_WINDOW
TOKENS, LONG, STEPS = 140, WINDOW + 40, 2  # LONG: for models with windows
LAYERS = 4
# Small values for attributes of configs. A config gets those that it has.
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 512, "intermediate_size": 96, "ffn_dim": 96, "ffn_hidden_size": 96,
    "n_inner": 96,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "shared_intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "expert_ffn_hidden_size": 32, "moe_shared_expert_intermediate_size": 32, "prefix_dense_intermediate_size": 96,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1, "sliding_window": WINDOW, "attention_chunk_size": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "dropout": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "activation_dropout": 0.0, "word_embed_proj_dim": 128, "embedding_size": 128,
    "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16, "laurel_rank": 8,
    "query_pre_attn_scalar": 64,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1, "mamba_dt_rank": 8, "mamba_headdim": 32,
    "n_mamba_heads": 8,
    "mamba_ngroups": 1, "num_mem_blocks": 1, "chunk_size": 16, "mamba_chunk_size": 16,
}  # fmt: skip
# Latent attention: the smallest rank that there are pages for, and other sizes of keys and values.
LATENT = {
    "kv_lora_rank": 128, "q_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 48,
}  # fmt: skip
LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
MAMBA = {"mamba_d_head": 64}  # times the heads: twice the hidden size
# Families whose config needs more than `SMALL`, by model_type.
MORE = {
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "axk1", "youtu", "glm4_moe_lite", "longcat_flash", "minicpm3"), LATENT
    ),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), LATENT | LINEAR),
    "sarvam_mla": LATENT | {"q_lora_rank": None},
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "attention_head_dim": 64},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "phi4_multimodal": {
        "vision_config": {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 28},
        "audio_config": {"hidden_size": 64, "intermediate_size": 64, "num_blocks": 1, "num_attention_heads": 2,
        "ext_pw_out_channel": 64,
                         "depthwise_separable_out_channel": 64, "nemo_conv_channels": 64},
    },
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "gemma3n_text": {"intermediate_size": [96] * LAYERS, "layer_types": ["sliding_attention", "full_attention"] * 2,
                     "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * LAYERS},
    "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
    "attention_k_eq_v": True,
                    "num_global_key_value_heads": 1},
}  # fmt: skip


@cache
def families() -> dict[str, type[PreTrainedConfig]]:
    """The config of each family of causal language models, by its model_type. Multimodal models have one of these as
    their text model.
    """
    found = {}
    for config in MODEL_FOR_CAUSAL_LM_MAPPING:
        try:
            if config().get_text_config(decoder=True).model_type == config.model_type:
                found[config.model_type] = config
        except (
            AttributeError,
            ValueError,
            StrictDataclassError,
        ):  # a config without defaults, of a model that is part of another
            continue
    return dict(sorted(found.items()))


def small(config: type[PreTrainedConfig]) -> PreTrainedConfig:
    """A config of this family for a model of some hundred thousand weights."""
    default = config()
    values = {name: value for name, value in SMALL.items() if _has(default, name)}
    values = {
        name: value for name, value in values.items() if name != "sliding_window" or default.sliding_window is not None
    }
    values |= MORE.get(config.model_type, {})
    if config.model_type not in MORE and getattr(default, "layer_types", None):
        kinds = list(dict.fromkeys(default.layer_types))
        values["layer_types"] = (kinds * LAYERS)[:LAYERS]
    while True:
        try:
            return config(**values)
        except AttributeError as error:  # an attribute that follows from others
            named = re.search(r"property '(\w+)'", str(error))
            if (
                named is None
                or values.pop("layer_types" if named[1] == "layers_block_type" else named[1], None) is None
            ):
                raise


def _has(config: PreTrainedConfig, name: str) -> bool:
    try:
        return hasattr(config, name)
    except AmbiguousGlobalPerLayerAttributeError:  # layers may have others
        return True


@cache
def config_of(name: str) -> PreTrainedConfig:
    """A family's small config, or its default one if there is none (families that are refused)."""
    config = families()[name]
    try:
        return small(config)
    except (
        AttributeError,
        NotImplementedError,
        ValueError,
        AmbiguousGlobalPerLayerAttributeError,
        StrictDataclassError,
    ):
        return config()


def model_of(config: PreTrainedConfig) -> transformers.PreTrainedModel:
    """A random model with this config, whose attention is neither flat nor one-hot."""
    torch.manual_seed(0)
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = (cls[0] if isinstance(cls, tuple) else cls)(config).eval()
    assert sum(p.numel() for p in model.parameters()) < 20e6, f"give {config.model_type} smaller parts in MORE"
    for name, p in model.named_parameters():
        if p.dim() >= 2 and "A_log" not in name:
            p.data.normal_(std=0.9 / p.shape[-1] ** 0.5 if "embed" not in name else 1.0)
    return model


@torch.no_grad()
def errors(config: PreTrainedConfig) -> tuple[float, float | None, float | None]:
    """The relative errors of a model's logits beside transformers' own cache: on a growing `FP8Cache`, on one whose
    windows are in 16 bits, as a static one has them, and on a static one. Without the last two, of models of windows
    alone: a static cache refuses them.
    """
    model = model_of(config)
    windows = [index for index, layer in enumerate(layers_of(config)) if layer.is_windowed]
    tokens = LONG if windows else TOKENS
    ids = torch.randint(3, VOCABULARY, (2, tokens), generator=torch.Generator().manual_seed(1))

    def logits(made: transformers.Cache) -> torch.Tensor:
        prompt = model(ids[:, :-STEPS], past_key_values=made).logits
        steps = [model(ids[:, i : i + 1], past_key_values=made).logits for i in range(tokens - STEPS, tokens)]
        return torch.cat([prompt, *steps], 1)

    model.set_attn_implementation("eager")
    exact = logits(DynamicCache(config=model.config))
    growing = relative_error(logits(FP8Cache(model)), exact)
    if not any(layer.is_full for layer in layers_of(config)):
        with pytest.raises(UsageError, match="has a sliding window, and a static cache"):
            FP8Cache(model, max_cache_len=tokens)
        return growing, None, None
    beside = relative_error(logits(FP8Cache(model, skip_layers=windows)), exact) if windows else growing
    return growing, beside, relative_error(logits(FP8Cache(model, max_cache_len=tokens)), exact)


def page(untried: dict[str, str]) -> str:
    """The text of `docs/families.md`. `untried`: families of which the test makes no model, and why."""
    served, refused = defaultdict(list), defaultdict(list)
    for name in families():
        if name in untried:
            continue
        reason = unsupported_reason(config_of(name))
        if reason is None:
            kinds = {layer.kind for layer in layers_of(config_of(name)) if not layer.in_pages} - {"dummy"}
            served[
                ", ".join(sorted(kind.replace("_", " ").removesuffix(" attention") for kind in kinds)) or "none"
            ].append(name)
        else:
            refused[_in_short(reason)].append(name)
    lines = [
        "# Families of models in transformers", "",
        f"What `FP8Cache` does with each family of causal language models in transformers {transformers.__version__},",
        "by `model_type`. Multimodal models have the family of their text model. A test makes a small random model of",
        "each with head_dim 64 (Gemma 4's full attention: 512), and compares its logits on a growing and on a static",
        f"cache with those on transformers' own cache. Windows of these models have {WINDOW} tokens: shorter ones stay",
        "in 16 bits, because their pages would not be smaller. A static cache has windows in 16 bits, and refuses",
        "models of windows alone.", "",
        "`fp8attn.integrations.transformers.unsupported_reason(model.config)` says the same of your model, which may",
        "have another head_dim or other layers. Full layers with `attention_k_eq_v` (Gemma 4)",
        "[store V and a quarter of K's channels](latent.md#keys-that-follow-from-values-gemma-4).",
        "`python -m tests.support.families --write` writes this page.", "",
        "## Served", "", "By the layers that stay in 16 bits:", "",
        *(f"- **{kinds}**: {', '.join(names)}." for kinds, names in sorted(served.items(),
        key=lambda item: -len(item[1]))), "",
        "## Vision-language models", "",
        "`FP8Cache(model)` of a vision-language model has the layers of its text model, and reads RoPE and biases",
        "there. The vision model stays as it is. Tests compare logits of small random models, with biases in K, with",
        "those on transformers' own cache: of text, and of images where positions have several parts.", "",
        "| tested | text model |", "|---|---|",
        *(f"| {name} | {_text_model(name)} |" for name in MULTIMODAL), "",
        "## Refused", "", "| because | families |", "|---|---|",
        *(f"| {reason} | {', '.join(names)} |" for reason, names in sorted(refused.items(),
        key=lambda item: -len(item[1]))), "",
        "## Not tried", "", "| the test makes no small model, because | families |", "|---|---|",
        *(f"| {reason} | {name} |" for name, reason in sorted(untried.items())), "",
    ]  # fmt: skip
    return "\n".join(lines)


def _text_model(family: str) -> str:
    return CONFIG_MAPPING[family]().get_text_config(decoder=True).model_type


def _in_short(reason: str) -> str:
    """A reason without the family's own name and numbers."""
    reason = re.sub(r"^'[\w-]+' ", "", reason.split(". Use transformers")[0].split("; use transformers")[0])
    reason = re.sub(r"every layer of '[\w-]+'", "every layer", reason)
    return re.sub(r" ?\([^()]*\)", "", reason)


if __name__ == "__main__":
    from tests.integrations.transformers.test_families import UNTRIED

    if sys.argv[1:] != ["--write"]:
        sys.exit("python -m tests.support.families --write")
    PAGE.write_text(page(UNTRIED))
