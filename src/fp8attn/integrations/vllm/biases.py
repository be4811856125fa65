"""Static means from the biases of a checkpoint's projections, as `FP8Cache` reads them off a transformers model.

vLLM's layers have fused weights, divided over processes. So the few tensors that determine the means are read from the checkpoint, into a
transformers model without memory for the others.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ...errors import UsageError
from ..checkpoints.folder import FLOATS, Checkpoint
from ..transformers.biases import LayerBiases, layer_biases
from ..transformers.config import decoder_config

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows the messages of its own loggers only
_PROJECTION = r"self_attn\.(k_proj|v_proj|qkv_proj)"
_READ = re.compile(rf".*\blayers\.\d+\.({_PROJECTION}|input_layernorm)\.(weight|bias)")
_BIAS = re.compile(rf".*{_PROJECTION}\.bias")


@lru_cache(maxsize=2)  # a model, and its draft model
def means_of(model: str, revision: str | None, context: int) -> dict[int, LayerBiases]:
    """The means of a model's layers, by index. Empty if its projections have no biases, or cannot be read; the log has the reason.

    Args:
        model: a folder, or the id of a model in the cache of the Hugging Face Hub.
        revision: of the id.
        context: positions over which K's bias is averaged.
    """
    try:
        folder = Path(model) if Path(model).is_dir() else Path(snapshot_download(model, revision=revision, local_files_only=True))
        checkpoint = Checkpoint.read(folder)
        if not any(map(_BIAS.fullmatch, checkpoint.tensors)):
            return {}
        found = layer_biases(_attention_of(checkpoint), context)
    except (UsageError, OSError, ValueError, RuntimeError) as error:  # RuntimeError: tensors of other shapes than the config says
        logger.info("fp8attn: the biases of %s are not read, so there are no static means: %s", model, error)
        return {}
    used = sum(layer.k_mean is not None or layer.v_mean is not None for layer in found.values())
    logger.info("fp8attn: static means from the biases of %d layers", used)
    return found


def _attention_of(checkpoint: Checkpoint) -> nn.Module:
    """A transformers model of which only the projections of K and V and the norms before them have values."""
    config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    names = [name for name, tensor in checkpoint.tensors.items() if _READ.fullmatch(name) and tensor.dtype in FLOATS]
    model.load_state_dict({name: checkpoint.get(name) for name in names}, strict=False, assign=True)
    for name, module in list(model.named_modules()):
        parent, _, own = name.rpartition(".")
        if any(buffer.endswith("inv_freq") for buffer, _ in module.named_buffers(recurse=False)):
            setattr(model.get_submodule(parent), own, type(module)(config=decoder_config(config)))
        elif own in ("k_proj", "v_proj", "qkv_proj") and any(x.is_meta for x in module.parameters()):  # quantized
            setattr(model.get_submodule(parent), own, nn.Identity())
    return model
