"""Static means from the biases of a checkpoint's projections, as `FP8Cache` reads them off a transformers model.

The layers of engines have fused weights, divided over processes. So the few tensors that determine the means are read
from the checkpoint, into a transformers model without memory for the others.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from functools import lru_cache
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ...errors import UsageError
from ...scales import ranges
from ..transformers.biases import PLAIN, LayerBiases, layer_biases
from ..transformers.config import decoder_config

logger = logging.getLogger(__name__)
_PROJECTIONS = ("k_proj", "v_proj", "qkv_proj")
_PROJECTION = rf"self_attn\.({'|'.join(_PROJECTIONS)})"
_READ = re.compile(rf".*\blayers\.\d+\.({_PROJECTION}|input_layernorm)\.(weight|bias)")
_IF_BIASES = (
    "If its keys or values have large biases, as those of Qwen2 have, 8 bits lose accuracy: serve a folder of "
    "safetensors files or a model in the cache of the Hugging Face Hub, or pass the option scales with a file of "
    "`fp8attn calibrate`"
)
_IF_LOSING = (
    "An engine has all layers in 8 bits. INT8 keys (the option key_dtype) lose least, and a shorter context (vllm "
    "--max-model-len) leaves less of the biases. `fp8attn sensitivity` measures the loss; if "
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
        context: positions over which K's bias is averaged.
    """
    try:
        folder = _folder(model, revision)
        if not _tensors(folder, _BIAS):
            return {}
        biases = layer_biases(_attention_of(folder), context)
    # A RuntimeError is of tensors of other shapes than the config says.
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        logger.warning(
            "fp8attn: the biases of %s cannot be read, so there are no static means. %s: %s", model, _IF_BIASES, error
        )
        return {}
    if not biases:
        logger.warning(
            "fp8attn: the biases of %s have a form that is not known, so there are no static means. %s",
            model,
            _IF_BIASES,
        )
    used = sum(layer.k_mean is not None or layer.v_mean is not None for layer in biases.values())
    logger.info("fp8attn: static means from the biases of %d layers", used)
    if losing := {index: layer.k_step for index, layer in biases.items() if layer.loses}:
        logger.warning(
            "fp8attn: layers %s of %s lose accuracy in 8 bits. RoPE rotates large biases of their keys, so no mean "
            "removes them, and 8 bits are up to %.0f times as coarse. %s", ranges(losing), model, max(losing.values()),
            _IF_LOSING,
        )  # fmt: skip
    return biases


def means_digest(model: str, revision: str | None, context: int) -> bytes:
    """Equal for engines whose means are equal. It is made from biases, because sums in another order give means with
    another last bit.
    """
    means = [(index, kind, mean) for index, layer in sorted(means_of(model, revision, context).items())
             for kind, mean in (("k", layer.k_mean), ("v", layer.v_mean)) if mean is not None]  # fmt: skip
    if not means:
        return b""
    digest = hashlib.sha256(str(context).encode())
    for name, bias in sorted(_tensors(_folder(model, revision), _BIAS).items()):
        digest.update(name.encode() + bias.contiguous().view(torch.uint8).numpy().tobytes())
    for index, kind, mean in means:  # which channels have one depends on the weights, too
        digest.update(f"{index}{kind}".encode() + (mean != 0).numpy().tobytes())
    return digest.digest()


def _folder(model: str, revision: str | None) -> Path:
    return Path(model if Path(model).is_dir() else snapshot_download(model, revision=revision, local_files_only=True))


def _tensors(folder: Path, names: re.Pattern[str]) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint with these names, in its safetensors files: those of its index, or all.

    Raises:
        UsageError: there are no such files.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        paths = {folder / file for file in json.loads(index.read_text()).get("weight_map", {}).values()}
    else:
        paths = set(folder.glob("*.safetensors"))
    if not paths:
        raise UsageError(f"{folder} has no safetensors files")
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(paths):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys() if names.fullmatch(name)}  # noqa: SIM118
    return tensors


def _attention_of(folder: Path) -> nn.Module:
    """A transformers model of which only the projections of K and V and the norms before them have values."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    tensors = {name: x for name, x in _tensors(folder, _READ).items() if x.dtype in PLAIN}
    model.load_state_dict(tensors, strict=False, assign=True)
    for name, module in list(model.named_modules()):
        parent, _, attribute = name.rpartition(".")
        if any(buffer.endswith("inv_freq") for buffer, _ in module.named_buffers(recurse=False)):
            setattr(model.get_submodule(parent), attribute, type(module)(config=decoder_config(config)))
        elif attribute in _PROJECTIONS and isinstance(module, nn.Linear) and module.weight.is_meta:  # quantized
            if module.bias is None or module.bias.is_meta:
                setattr(model.get_submodule(parent), attribute, nn.Identity())
            else:  # without a deviation every bias is large enough
                module.weight = nn.Parameter(torch.zeros(()).expand(module.weight.shape), requires_grad=False)
    return model
