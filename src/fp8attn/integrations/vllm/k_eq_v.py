"""Gemma 4's full-attention layers in vLLM, whose keys follow from their values, over pages of latents
(`integrations/k_eq_v.py`).

vLLM calls such a layer with K and V as any other, and does not tell it of the module around it, which has the weight of
the keys' norm. The layer finds this module when weights are loaded.
"""

from __future__ import annotations

from typing import Any

from vllm import envs
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from ...backends import unsupported_reason
from ...formats.codec import DEFAULT_KEY_DTYPE
from ..engine.options import Options
from ..k_eq_v import KeysOfNorm
from .connectors import exchanges_blocks
from .specs import KEYS_PAGES

WIDTH = KEYS_PAGES.k_dim - KEYS_PAGES.v_dim  # channels that RoPE turns


def keys_of(layer: Any, options: Options, config: Any) -> KeysOfNorm | None:
    """How the keys of vLLM's layer follow from its values. None: they do not, or its pages have K and V. So it is if an
    option asks for these, if blocks have marks for other engines, if LoRA may change K and V apart, if the weights are
    not loaded yet (`--load-format dummy`), before vLLM 0.32, and on GPUs other than Hopper's, where attention over
    latents is slower.
    """
    if layer.impl.head_size != KEYS_PAGES.v_dim or not hasattr(AttentionBackendEnum, "register"):
        return None
    if options.exact or options.scales is not None or options.key_dtype != DEFAULT_KEY_DTYPE:
        return None
    if envs.VLLM_BATCH_INVARIANT or config.lora_config is not None or exchanges_blocks(config):
        return None
    if config.load_config.load_format == "dummy":  # K is divided by a number that follows from the weight
        return None
    device = layer._k_scale.device
    if device.type != "cpu" and unsupported_reason("hopper", device, config.model_config.dtype, KEYS_PAGES) is not None:
        return None
    # No public way leads from a layer to its module, or to the model (0.33; docs/lab/2026-11-k-eq-v.md has others that
    # were thought of). This has all modules, for reloading weights.
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO
    from vllm.model_executor.models.gemma4 import Gemma4Attention

    module: Any = next((each for each in LAYERWISE_INFO if getattr(each, "attn", None) is layer), None)
    if type(module) is not Gemma4Attention or module.is_sliding or module.is_kv_shared_layer or layer.impl.softcap:
        return None
    # In a model without windows, all blocks must have the tokens that vLLM says.
    follows = module.config.attention_k_eq_v and "sliding_attention" in module.config.layer_types
    if not follows or 2 * getattr(module.rotary_emb, "rope_angles", 0) != WIDTH:
        return None
    return KeysOfNorm(module.k_norm, WIDTH) if module.k_norm.weight.device == device else None
