"""Static means from the biases of a checkpoint's projections, as `FP8Cache` reads them off a transformers model.

The layers of engines have fused weights, divided over processes. So the few tensors that determine the means are read
from the checkpoint, into a transformers model without memory for the others.
"""

from __future__ import annotations

import hashlib
import logging
import re
from functools import lru_cache
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ...errors import UsageError
from ...scales import ranges
from ..checkpoint import FLOATS, Checkpoint
from ..transformers.biases import LayerBiases, layer_biases
from ..transformers.config import decoder_config

logger = logging.getLogger(__name__)
_PROJECTION = r"self_attn\.(k_proj|v_proj|qkv_proj)"
_READ = re.compile(rf".*\blayers\.\d+\.({_PROJECTION}|input_layernorm)\.(weight|bias)")
_IF_BIASES = (
    "If its keys or values have large biases, as those of Qwen2 have, 8 bits lose accuracy: serve a folder of "
    "safetensors files or a model in the cache of the Hugging Face Hub, or pass the option scales with a file of "
    "`fp8attn calibrate`"
)
_IF_LOSING = (
    "An engine has all layers in 8 bits. INT8 keys (the option key_dtype) lose least, and a shorter context (vllm "
    "--max-model-len, sglang --context-length) leaves less of the biases. `fp8attn sensitivity` measures the loss; if "
    "it is too much, serve the model with the engine's own cache of 16 bits"
)
_BIAS = re.compile(rf".*{_PROJECTION}\.bias")


@lru_cache(maxsize=2)  # a model, and its draft model
def means_of(model: str, revision: str | None, context: int) -> dict[int, LayerBiases]:
    """The means of a model's layers, by index. Empty if its projections have no biases, or cannot be read; then a
    warning has the reason. Another one names the layers that lose accuracy whatever is subtracted
    (`LayerBiases.loses`).

    Where the weights are quantized, biases are not: such a layer subtracts them whole, since how large they are beside
    K or V is unknown.

    Args:
        model: a folder, or the id of a model in the cache of the Hugging Face Hub.
        revision: of the id.
        context: positions over which K's bias is averaged.
    """
    try:
        checkpoint = _checkpoint(model, revision)
        if not any(map(_BIAS.fullmatch, checkpoint.tensors)):
            return {}
        found = layer_biases(_attention_of(checkpoint), context)
    except (
        UsageError,
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # RuntimeError: tensors of other shapes than the config says
        logger.warning(
            "fp8attn: the biases of %s cannot be read, so there are no static means. %s: %s", model, _IF_BIASES, error
        )
        return {}
    if not found:
        logger.warning(
            "fp8attn: the biases of %s have a form that is not known, so there are no static means. %s",
            model,
            _IF_BIASES,
        )
    used = sum(layer.k_mean is not None or layer.v_mean is not None for layer in found.values())
    logger.info("fp8attn: static means from the biases of %d layers", used)
    if losing := {index: layer.k_step for index, layer in found.items() if layer.loses}:
        logger.warning(
            "fp8attn: layers %s of %s lose accuracy in 8 bits. RoPE rotates large biases of their keys, so no mean "
            "removes them, and 8 bits are up to %.0f times as coarse. %s", ranges(losing), model, max(losing.values()),
            _IF_LOSING,
        )  # fmt: skip
    return found


def identity(model: str, revision: str | None, context: int) -> bytes:
    """Equal for engines whose means are equal. It is made from biases, because sums in another order give means with
    another last bit.

    Args:
        model, revision, context: as of `means_of`.
    """
    means = [(index, kind, mean) for index, layer in sorted(means_of(model, revision, context).items())
             for kind, mean in (("k", layer.k_mean), ("v", layer.v_mean)) if mean is not None]  # fmt: skip
    if not means:
        return b""
    checkpoint = _checkpoint(model, revision)
    found = hashlib.sha256(str(context).encode())
    for name in sorted(filter(_BIAS.fullmatch, checkpoint.tensors)):
        found.update(name.encode() + checkpoint.get(name).contiguous().view(torch.uint8).numpy().tobytes())
    for index, kind, mean in means:
        found.update(
            f"{index}{kind}".encode() + (mean != 0).numpy().tobytes()
        )  # which channels have one depends on the weights, too
    return found.digest()


def _checkpoint(model: str, revision: str | None) -> Checkpoint:
    return Checkpoint.read(
        model if Path(model).is_dir() else snapshot_download(model, revision=revision, local_files_only=True)
    )


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
        elif (
            own in ("k_proj", "v_proj", "qkv_proj") and isinstance(module, nn.Linear) and module.weight.is_meta
        ):  # quantized
            if module.bias is None or module.bias.is_meta:
                setattr(model.get_submodule(parent), own, nn.Identity())
            else:  # without a deviation every bias is large enough
                module.weight = nn.Parameter(torch.zeros(()).expand(module.weight.shape), requires_grad=False)
    return model
