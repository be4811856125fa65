"""The two formats in which stock vLLM reads scales of its KV cache: names, shapes and configs.

vLLM 0.26, 0.32 and 0.33 (`quantization/base_config.py`, `compressed_tensors.py`, `modelopt.py`, `kv_cache.py`) read, for the module
`model.layers.N.self_attn`:

| | compressed-tensors, `tensor` | compressed-tensors, `attn_head` | ModelOpt |
|---|---|---|---|
| K | `.k_scale` [1] | `.k_scale` [num_kv_heads, 1, 1] | `.k_proj.k_scale` [], or `.qkv_proj.k_scale` |
| V | `.v_scale` [1] | `.v_scale` [num_kv_heads, 1, 1] | `.v_proj.v_scale` [], or `.qkv_proj.v_scale` |
| Q | `.q_scale` [1] | `.q_scale` [num_q_heads, 1, 1] | `.q_scale` [] |
| config | `quantization_config` of config.json | the same | `hf_quant_config.json` |

`x ~ x_8bit * scale` with x_8bit in E4M3. Q's scale is for backends that also quantize queries: FlashAttention-3, FlashInfer, Triton on
CUDA. docs/export.md says what vLLM does if one is missing.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

from fp8attn.errors import UsageError
from fp8attn.formats.codec import E4M3
from fp8attn.integrations.checkpoint import CONFIG, Checkpoint, read_json
from fp8attn.scales import LayerScales

from .attentions import Attention

Format = Literal["compressed-tensors", "modelopt"]
Strategy = Literal["tensor", "attn_head"]
FORMATS: tuple[Format, ...] = get_args(Format)
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
MODELOPT_CONFIG = "hf_quant_config.json"

_SCHEME = {"type": "float", "num_bits": 8, "symmetric": True, "dynamic": False}


def check_choice(format: str, strategy: str) -> None:
    """Refuse what is no format, and strategies that a format does not have.

    Raises:
        UsageError: as above.
    """
    if format not in FORMATS or strategy not in STRATEGIES:
        raise UsageError(f"format must be one of {FORMATS} and strategy one of {STRATEGIES}; got {format!r} and {strategy!r}")
    if format == "modelopt" and strategy != "tensor":
        raise UsageError("ModelOpt has one scale a layer (strategy='tensor'); format='compressed-tensors' also has one a head")


def names(format: Format, attention: Attention) -> dict[str, str]:
    """The names of the scales of `"q"`, `"k"` and `"v"`."""
    places = dict.fromkeys("qkv", attention.name)
    if format == "modelopt":  # Q's is not in its projection: vLLM cannot load `q_proj.q_scale`
        places |= {x: f"{attention.name}.{'qkv' if attention.fused else x}_proj" for x in "kv"}
    return {x: f"{place}.{x}_scale" for x, place in places.items()}


def shape(format: Format, strategy: Strategy, heads: int) -> tuple[int, ...]:
    """The shape of the scale of a tensor of so many heads."""
    return (heads, 1, 1) if strategy == "attn_head" else () if format == "modelopt" else (1,)


def to_tensor(scale: torch.Tensor, format: Format, strategy: Strategy) -> torch.Tensor:
    """Scales `[heads]` in the form of the format, float32. One scale of several heads is the largest, so that none saturates.

    vLLM's loader for ModelOpt keeps scales in the model's dtype. So they are rounded up to BF16 here, and arrive as they are written.
    """
    chosen = (scale if strategy == "attn_head" else scale.amax()).float().cpu()
    if format == "modelopt":
        near = chosen.bfloat16()
        chosen = torch.where(near < chosen, near.nextafter(torch.full_like(near, torch.inf)), near).float()
    return chosen.clone().reshape(shape(format, strategy, len(scale)))


def values(layer: LayerScales, moved: bool) -> dict[str, torch.Tensor]:
    """The scales `[num_kv_heads]` of `"k"` and `"v"` for an engine that subtracts no means.

    Calibrated scales are for `x - mean`, and `max |x| <= max |x - mean| + max |mean|`. So scales for x grow by the second term.

    Args:
        moved: whether the mean of V has been moved into biases.
    """
    k_mean, v_mean = layer.k_mean, layer.v_mean * (not moved)
    return {x: scale + mean.abs().amax(1) / E4M3.max for x, scale, mean in (("k", layer.k_scale, k_mean), ("v", layer.v_scale, v_mean))}


def configs(checkpoint: Checkpoint, format: Format, strategy: Strategy) -> dict[str, dict[str, Any]]:
    """The JSON files that say how to read the scales, by name: the config of the checkpoint, and the one of ModelOpt.

    Raises:
        UsageError: the checkpoint is quantized in a way that has no place for the scales, or it has scales already.
    """
    if (checkpoint.folder / MODELOPT_CONFIG).exists():
        raise UsageError(f"{checkpoint.folder} has a {MODELOPT_CONFIG}: ModelOpt has quantized it; export the 16-bit checkpoint")
    old = checkpoint.decoder.get("quantization_config") or checkpoint.config.get("quantization_config")
    method = str((old or {}).get("quant_method", "")).replace("_", "-")
    if old and not (method == format == "compressed-tensors"):
        raise UsageError(
            f"{checkpoint.folder / CONFIG} has a quantization_config of {method or 'an unnamed method'}, and {format} has no place beside "
            "it; export the 16-bit checkpoint"
            + (", or format='compressed-tensors'" if method == "compressed-tensors" else ", or one quantized with compressed-tensors")
        )
    if old and old.get("kv_cache_scheme"):
        raise UsageError(f"{checkpoint.folder / CONFIG} has a kv_cache_scheme already: {old['kv_cache_scheme']}; export the original")
    if format == "modelopt":
        # vLLM needs an algorithm of weights, or it reads nothing. With all modules excluded from it, it leaves the weights alone.
        quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["*"]}
        return {CONFIG: checkpoint.config, MODELOPT_CONFIG: {"producer": {"name": "modelopt"}, "quantization": quantization}}
    # vLLM passes the number of heads on, which it cuts scales of heads by, only if there are config_groups: none is enough.
    new = old or {"quant_method": "compressed-tensors", "format": "dense", "quantization_status": "frozen", "config_groups": {}}
    new = {"config_groups": {}, **new, "kv_cache_scheme": {**_SCHEME, "strategy": strategy}}
    if old and "quantization_config" not in checkpoint.config:  # vLLM reads the decoder's if that is the only one
        return {CONFIG: {**checkpoint.config, "text_config": {**checkpoint.config["text_config"], "quantization_config": new}}}
    return {CONFIG: {**checkpoint.config, "quantization_config": new}}


def declared(checkpoint: Checkpoint) -> tuple[Format, Strategy]:
    """The format and strategy that the configs of an exported checkpoint name, as vLLM reads them.

    Raises:
        UsageError: they name none, or a value for which vLLM would ignore the scales or refuse them.
    """
    config = checkpoint.config.get("quantization_config") or checkpoint.decoder.get("quantization_config")
    if config is None and (checkpoint.folder / MODELOPT_CONFIG).is_file():
        found = read_json(checkpoint.folder / MODELOPT_CONFIG)
        inner = found.get("quantization", {})
        if inner.get("kv_cache_quant_algo") != "FP8" or not inner.get("quant_algo") or found.get("producer", {}).get("name") != "modelopt":
            raise UsageError(
                f"{checkpoint.folder / MODELOPT_CONFIG}: vLLM needs the producer's name 'modelopt', kv_cache_quant_algo 'FP8' and a "
                f"quant_algo, or it reads no scales; got {found}"
            )
        return "modelopt", "tensor"
    if config is None:
        raise UsageError(
            f"{checkpoint.folder} has neither a quantization_config in {CONFIG} nor a {MODELOPT_CONFIG}: vLLM would read no scales"
        )
    scheme, method = config.get("kv_cache_scheme"), str(config.get("quant_method", "")).replace("_", "-")
    if (
        method == "modelopt"
        and isinstance(scheme, dict)
        and all(scheme.get(key) == _SCHEME[key] for key in ("type", "num_bits", "dynamic"))
    ):
        return "modelopt", "tensor"
    if method != "compressed-tensors" or not isinstance(scheme, dict):
        raise UsageError(
            f"{checkpoint.folder / CONFIG}: the quantization_config has quant_method {method!r} and kv_cache_scheme {scheme!r}; {_WANTED}"
        )
    wrong = {key: scheme.get(key) for key in ("type", "num_bits", "symmetric") if scheme.get(key) != _SCHEME[key]}
    if wrong or scheme.get("strategy") not in STRATEGIES:
        raise UsageError(f"{checkpoint.folder / CONFIG}: kv_cache_scheme is {scheme}; {_WANTED}")
    if scheme["strategy"] == "attn_head" and "config_groups" not in config:
        raise UsageError(
            f"{checkpoint.folder / CONFIG}: vLLM reads scales of heads only if quantization_config has config_groups, even empty"
        )
    return "compressed-tensors", scheme["strategy"]


_WANTED = f"vLLM reads scales with compressed-tensors and a kv_cache_scheme of {_SCHEME}, with strategy one of {', '.join(STRATEGIES)}"
