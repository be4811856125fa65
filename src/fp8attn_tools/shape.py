"""The sizes of a transformers model, from its config: of its cache, for `plan`, and of its weights."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from fp8attn.errors import UsageError
from fp8attn.integrations.transformers.biases import layer_biases
from fp8attn.integrations.transformers.config import layers_of

from .plan import CacheShape


def shape_of(config: PreTrainedConfig) -> CacheShape:
    """The shape of a model's KV cache, for `plan`.

    Raises:
        UsageError: as `layers_of`; or the layers in 8 bits have different shapes. Then call `plan` with one
            `CacheShape` for each.
    """
    layers = layers_of(config)
    shapes = {(layer.num_kv_heads, layer.head_dim, layer.rank) for layer in layers if layer.in_pages}
    if len(shapes) > 1:
        raise UsageError(
            f"the layers of {config.model_type!r} in 8 bits have different (num_kv_heads, head_dim): "
            f"{sorted(shape[:2] for shape in shapes)}; call fp8attn_tools.plan.plan with a CacheShape of each"
        )
    ((num_kv_heads, head_dim, rank),) = shapes
    full = sum(layer.is_full for layer in layers)
    windows = tuple(layer.window for layer in layers if layer.window is not None and layer.is_windowed)
    kept = tuple(layer.window for layer in layers if layer.window is not None and not layer.is_windowed)
    others = len(layers) - full - len(windows) - len(kept)
    return CacheShape(full, num_kv_heads, head_dim, windows, kept, others, rank)


def count_weights(model: str, config: PreTrainedConfig) -> tuple[int, str]:
    """Bytes of a model's parameters, and how they were found: from the files of a folder, or from the architecture in
    16 bits, or in 8 if the config says that the model is quantized to FP8.
    """
    files = list(Path(model).glob("*.safetensors")) if Path(model).is_dir() else []
    if files:
        return sum(file.stat().st_size for file in files), "size of the files"
    size = 1 if (getattr(config, "quantization_config", None) or {}).get("quant_method") == "fp8" else 2
    counted = size * sum(p.numel() for p in _shapes(config).parameters())
    return counted, f"counted from the architecture, {8 * size} bits each"


def may_have_biases(config: PreTrainedConfig) -> bool:
    """Whether a model's K or V have biases, by its architecture.

    How large they are is in the weights. `FP8Cache` keeps layers where K's are too large in 16 bits. Then its cache is
    larger than `shape_of` says.
    """
    try:
        built = _shapes(config)
    except ValueError:  # a class that is not transformers' own
        return True
    return any(found.unread for found in layer_biases(built).values())


def _shapes(config: PreTrainedConfig) -> PreTrainedModel:
    """The model without weights: no memory, no download."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)
