"""Which layers of a checkpoint have K and V in 8 bits, as ModelOpt writes it: `kv_cache_quantized_layers`, version 1.

vLLM gets the file as `hf_config.quantization_config`. Up to 0.33 it reads no layers there and serves the model as
before. A change that was proposed to it (vllm#56116) gives each layer the dtype of its cache by this file.
fp8attn's plugin refuses a file that leaves out layers (`integrations/vllm/supported.py`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import fp8attn
from fp8attn.errors import UsageError
from fp8attn.files import write_whole

from .attentions import Attention, attentions_of, layers_text
from .folder import CONFIG, Checkpoint, read_json
from .formats import MODELOPT_CONFIG

PRODUCER = {"name": "fp8attn", "version": fp8attn.__version__}


def layers_to_choose(folder: str | Path) -> dict[int, Attention]:
    """The attention modules of a checkpoint that a recipe can name, by layer index.

    Raises:
        UsageError: the checkpoint is quantized, or has another's recipe; or as `attentions_of`.
    """
    checkpoint = Checkpoint.read(folder)
    if "quantization_config" in checkpoint.config | checkpoint.decoder:
        raise UsageError(
            f"{checkpoint.folder / CONFIG} has a quantization_config, and vLLM would not read {MODELOPT_CONFIG} beside "
            f"it; choose layers for the 16-bit checkpoint"
        )
    path = checkpoint.folder / MODELOPT_CONFIG
    if path.exists() and (producer := read_json(path).get("producer", {})).get("name") != PRODUCER["name"]:
        raise UsageError(f"{path} was written by {producer.get('name', 'another program')}; remove it to replace it")
    return attentions_of(checkpoint)


def write_recipe(folder: str | Path, attentions: Mapping[int, Attention], in_8_bits: Collection[int]) -> Path:
    """Write the recipe beside a checkpoint's weights.

    Args:
        folder: of the checkpoint.
        attentions: of `layers_to_choose`.
        in_8_bits: indices of the layers with K and V in 8 bits. Others stay in 16 bits.
    Returns:
        The file.
    Raises:
        UsageError: the checkpoint has no such layer.
    """
    if strangers := set(in_8_bits) - attentions.keys():
        raise UsageError(
            f"{folder} has attention in {layers_text(attentions)}, and not in {layers_text(sorted(strangers))}: it is "
            f"another model's"
        )
    recipe = {
        "quant_algo": None, "quantized_layers": {},  # no weights
        "kv_cache_quant_algo": "FP8" if set(in_8_bits) == attentions.keys() else "MIXED_PRECISION",
        "kv_cache_quantized_layers": {attentions[index].name: {"quant_algo": "FP8"} for index in sorted(in_8_bits)},
        "kv_cache_schema_version": 1,
    }  # fmt: skip
    text = json.dumps({"producer": PRODUCER, "quantization": recipe}, indent=2) + "\n"
    path = Path(folder) / MODELOPT_CONFIG
    write_whole(path, lambda draft: draft.write_text(text, encoding="utf-8"))
    return path
