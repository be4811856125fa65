"""The sizes of a transformers model, from its config: of its cache, for `plan`, and of its weights."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from fp8attn.errors import UsageError
from fp8attn.integrations.transformers.config import attention_shape, layers_of

from .plan import CacheShape


def shape_of(config: PreTrainedConfig) -> CacheShape:
    """The shape of a model's KV cache, for `plan`.

    Raises:
        UsageError: as `layers_of`; or the layers in 8 bits have different shapes. Then call `plan` with one `CacheShape` for each.
    """
    layers = layers_of(config)
    shapes = {(layer.num_kv_heads, layer.head_dim) for layer in layers if layer.in_pages}
    if len(shapes) > 1:
        raise UsageError(
            f"the layers of {config.model_type!r} in 8 bits have different (num_kv_heads, head_dim): {sorted(shapes)}; call "
            "fp8attn_tools.plan.plan with a CacheShape of each"
        )
    _, num_kv_heads, head_dim = attention_shape(config)
    full = sum(layer.is_full for layer in layers)
    windows = tuple(layer.window for layer in layers if layer.window is not None and layer.is_ring)
    kept = tuple(layer.window for layer in layers if layer.window is not None and not layer.is_ring)
    return CacheShape(full, num_kv_heads, head_dim, windows, kept, len(layers) - full - len(windows) - len(kept))


def count_weights(model: str, config: PreTrainedConfig) -> tuple[int, str]:
    """Bytes of a model's parameters, and how they were found: from the files of a folder, or from the architecture in 16 bits."""
    files = list(Path(model).glob("*.safetensors")) if Path(model).is_dir() else []
    if files:
        return sum(file.stat().st_size for file in files), "size of the files"
    with torch.device("meta"):  # shapes only: no memory, no download
        built = AutoModelForCausalLM.from_config(config)
    return 2 * sum(p.numel() for p in built.parameters()), "counted from the architecture, 16 bits each"
