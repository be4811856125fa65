"""The devices that a model's layers run on. A device map (`from_pretrained(..., device_map="auto")`) divides them among
several.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from .decoder import decoder_modules


def layer_devices(model: PreTrainedModel, num_layers: int) -> list[torch.device]:
    """The device on which each layer of the decoder attends: that of its weights, or that to which accelerate moves
    offloaded ones.
    """
    devices = [model.device] * num_layers
    mapped = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(mapped) < 2:
        return devices
    for _, module in decoder_modules(model):
        index = vars(module).get("layer_idx")
        if isinstance(index, int) and index < num_layers and getattr(module, "is_causal", True):
            devices[index] = _device_of(module) or devices[index]
    return devices


def _device_of(layer: nn.Module) -> torch.device | None:
    """The device that a layer's modules run on; None: nothing says which."""
    loaded = next((x.device for x in layer.parameters() if not x.is_meta), None)
    if loaded is not None:
        return loaded
    hooks = (getattr(getattr(module, "_hf_hook", None), "execution_device", None) for module in layer.modules())
    moved = next((device for device in hooks if device is not None), None)
    return None if moved is None else torch.device(moved)
