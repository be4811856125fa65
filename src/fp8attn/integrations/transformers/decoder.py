"""The decoder in a transformers model: its modules, without those of vision and audio models beside it, and the devices
of its layers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from ...errors import UsageError
from ...scales import ranges
from .config import EMPTY_LAYER_TYPES, decoder_config, layers_of


def decoder_modules(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model's decoder, by name: those whose nearest transformers model has the decoder's config."""
    config = decoder_config(model.config)

    def walk(name: str, module: nn.Module, inside: bool) -> Iterator[tuple[str, nn.Module]]:
        inside = module.config is config if isinstance(module, PreTrainedModel) else inside
        if inside:
            yield name, module
        for child, part in module.named_children():
            yield from walk(f"{name}.{child}".removeprefix("."), part, inside)

    return walk("", model, False)


def check_layers(model: PreTrainedModel) -> None:
    """Raise UsageError if no module has the decoder's config, or if layers of it were removed or added."""
    config, kinds = decoder_config(model.config), [spec.kind for spec in layers_of(model.config)]
    modules, name = dict(decoder_modules(model)), type(model).__name__
    if not modules:
        raise UsageError(
            f"no module of {name} has the config of its text model ({config.model_type!r}), so its layers cannot be "
            f"found. Give both the same config, or pass the text model: FP8Cache(model.language_model)"
        )
    numbers = {
        vars(module).get("layer_idx") for each, module in modules.items() if not {"mtp", "nextn"} & {*each.split(".")}
    }
    layers = {i for i in numbers if isinstance(i, int) and i >= 0}
    needed = {i for i, kind in enumerate(kinds) if kind not in EMPTY_LAYER_TYPES}
    # Layers that run in loops have several numbers in a cache.
    if hasattr(config, "num_layers_per_stack") or not layers:
        return
    if not needed <= layers or max(layers) >= max(len(kinds), config.num_hidden_layers):
        raise UsageError(
            f"{name} has the layers {ranges(layers)}, and its config has {len(kinds)}: layers were removed or added. "
            f"Set the config's num_hidden_layers (and layer_types) to those of the model, and layer_idx of their "
            f"attention to 0, 1, 2, ..."
        )


def layer_devices(model: PreTrainedModel, num_layers: int) -> list[torch.device]:
    """The device on which each layer of the decoder attends: that of its weights, or that to which accelerate moves
    offloaded ones. A device map (`from_pretrained(..., device_map="auto")`) divides layers among several.
    """
    devices = [model.device] * num_layers
    divided = len({str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}) > 1
    if not divided and model.device.type != "meta":
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
