"""How stock vLLM reads scales of its KV cache from a checkpoint: compressed-tensors.

vLLM 0.32 and 0.33 (`quantization/base_config.py`, `compressed_tensors.py`, `kv_cache.py`) read, for the module
`model.layers.N.self_attn`:

| | `tensor` | `attn_head` |
|---|---|---|
| K | `.k_scale` [1] | `.k_scale` [num_kv_heads, 1, 1] |
| V | `.v_scale` [1] | `.v_scale` [num_kv_heads, 1, 1] |
| Q | `.q_scale` [1] | `.q_scale` [num_q_heads, 1, 1] |

and the `quantization_config` of config.json. `x ~ x_8bit * scale` with x_8bit in E4M3. Q's scale is for backends that
also quantize
queries: FlashAttention-3, FlashInfer, Triton on CUDA. docs/export.md says what vLLM does if one is missing.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

from fp8attn.errors import UsageError
from fp8attn.formats.codec import E4M3
from fp8attn.scales import LayerScales

from .attentions import Attention
from .folder import CONFIG, Checkpoint

Strategy = Literal["tensor", "attn_head"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
MODELOPT_CONFIG = "hf_quant_config.json"  # ModelOpt's, which says how a checkpoint is quantized

_SCHEME = {"type": "float", "num_bits": 8, "symmetric": True, "dynamic": False}
_WANTED = (
    f"vLLM reads scales with compressed-tensors and a kv_cache_scheme of {_SCHEME}, with strategy one of "
    f"{', '.join(STRATEGIES)}"
)


def names(attention: Attention) -> dict[str, str]:
    """The names of the scales of `"q"`, `"k"` and `"v"`."""
    return {x: f"{attention.name}.{x}_scale" for x in "qkv"}


def shape(strategy: Strategy, heads: int) -> tuple[int, ...]:
    """The shape of the scale of a tensor of so many heads."""
    return (heads, 1, 1) if strategy == "attn_head" else (1,)


def to_tensor(scale: torch.Tensor, strategy: Strategy) -> torch.Tensor:
    """Scales `[heads]` in the form of the strategy, float32. One scale of several heads is the largest, so that none
    saturates.
    """
    chosen = scale if strategy == "attn_head" else scale.amax()
    return chosen.float().cpu().clone().reshape(shape(strategy, len(scale)))


def values(layer: LayerScales, moved: bool) -> dict[str, torch.Tensor]:
    """The scales `[num_kv_heads]` of `"k"` and `"v"` for an engine that subtracts no means.

    Calibrated scales are for `x - mean`, and `max |x| <= max |x - mean| + max |mean|`. So scales for x grow by the
    second term.

    Args:
        moved: whether the mean of V has been moved into biases.
    """
    k_mean, v_mean = layer.k_mean, layer.v_mean * (not moved)
    return {
        x: scale + mean.abs().amax(1) / E4M3.max
        for x, scale, mean in (("k", layer.k_scale, k_mean), ("v", layer.v_scale, v_mean))
    }


def new_config(checkpoint: Checkpoint, strategy: Strategy) -> dict[str, Any]:
    """The config of a checkpoint, with how to read the scales.

    Raises:
        UsageError: the checkpoint is quantized in a way that has no place for the scales, or it has scales already.
    """
    if (checkpoint.folder / MODELOPT_CONFIG).exists():
        raise UsageError(
            f"{checkpoint.folder} has a {MODELOPT_CONFIG}, which says how it is quantized; export the 16-bit "
            f"checkpoint without that file"
        )
    old = checkpoint.decoder.get("quantization_config") or checkpoint.config.get("quantization_config")
    method = str((old or {}).get("quant_method", "")).replace("_", "-")
    if old and method != "compressed-tensors":
        raise UsageError(
            f"{checkpoint.folder / CONFIG} has a quantization_config of {method or 'an unnamed method'}, which has no "
            f"place for scales of the cache; export the 16-bit checkpoint, or one quantized with compressed-tensors"
        )
    if old and old.get("kv_cache_scheme"):
        raise UsageError(
            f"{checkpoint.folder / CONFIG} has a kv_cache_scheme already: {old['kv_cache_scheme']}; export the original"
        )
    # vLLM passes the number of heads on, which it cuts scales of heads by, only if there are config_groups: none is
    # enough.
    new = old or {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "frozen",
        "config_groups": {},
    }
    new = {"config_groups": {}, **new, "kv_cache_scheme": {**_SCHEME, "strategy": strategy}}
    if old and "quantization_config" not in checkpoint.config:  # vLLM reads the decoder's if that is the only one
        return {**checkpoint.config, "text_config": {**checkpoint.config["text_config"], "quantization_config": new}}
    return {**checkpoint.config, "quantization_config": new}


def declared(checkpoint: Checkpoint) -> Strategy:
    """The strategy that the config of an exported checkpoint names, as vLLM reads it.

    Raises:
        UsageError: it names none, or a value for which vLLM would ignore the scales or refuse them.
    """
    config = checkpoint.config.get("quantization_config") or checkpoint.decoder.get("quantization_config")
    if config is None:
        raise UsageError(f"{checkpoint.folder} has no quantization_config in {CONFIG}: vLLM would read no scales")
    scheme, method = config.get("kv_cache_scheme"), str(config.get("quant_method", "")).replace("_", "-")
    if method != "compressed-tensors" or not isinstance(scheme, dict):
        raise UsageError(
            f"{checkpoint.folder / CONFIG}: the quantization_config has quant_method {method!r} and kv_cache_scheme "
            f"{scheme!r}; {_WANTED}"
        )
    wrong = {key: scheme.get(key) for key in ("type", "num_bits", "symmetric") if scheme.get(key) != _SCHEME[key]}
    if wrong or scheme.get("strategy") not in STRATEGIES:
        raise UsageError(f"{checkpoint.folder / CONFIG}: kv_cache_scheme is {scheme}; {_WANTED}")
    if scheme["strategy"] == "attn_head" and "config_groups" not in config:
        raise UsageError(
            f"{checkpoint.folder / CONFIG}: vLLM reads scales of heads only if quantization_config has config_groups, "
            f"even empty"
        )
    return scheme["strategy"]
