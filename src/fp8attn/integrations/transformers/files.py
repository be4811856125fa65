"""`FP8Cache` in a file: the pages, which `cache.storage` writes, the 16-bit layers, and the name of the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from ...cache import PagedKVCache, storage
from ...errors import UsageError
from ...formats.codec import KeyDtype
from ...params import BackendName
from .config import LayerSpec, decoder_config
from .devices import layer_devices
from .layers import FP8Layer, FP8Layers


class Held(Protocol):
    """What is saved of an `FP8Cache`."""

    groups: list[FP8Layers]
    layers: list[CacheLayerMixin]
    identity: dict[str, Any]

    @property
    def fp8_layers(self) -> tuple[int, ...]: ...


Loaded = TypeVar("Loaded", bound=Held)

# The attributes of transformers' own layers; the last two are the numbers of tokens of sliding windows and static
# layers.
_STATE = ("keys", "values", "cumulative_length", "cumulative_length_int")


def save(cache: Held, path: str | Path, seqs: Sequence[int] | None, tokens: torch.Tensor | None) -> None:
    """Write sequences of all layers (`FP8Cache.save`)."""
    paged = cache.groups[0].paged
    if paged is None or any(group.paged is None for group in cache.groups):
        raise ValueError("this cache holds no tokens yet: run the prompt through the model first, and save then")
    tensors: dict[str, torch.Tensor] = {}
    layers: storage.Layers = {}
    for group in cache.groups:
        assert group.paged is not None
        more, own = storage.pack(group.paged, seqs, [layer.index for layer in group.layers])
        tensors, layers = tensors | more, layers | own
    rows = list(range(paged.num_seqs)) if seqs is None else paged.table.indices(seqs)
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, FP8Layer) and getattr(layer, "keys", None) is not None:
            for name in _STATE:
                value = getattr(layer, name, None)
                if isinstance(value, torch.Tensor) and value.dim():
                    tensors[f"layers.{index}.{name}"] = value[rows].cpu().contiguous()
                elif value is not None:
                    tensors[f"layers.{index}.{name}"] = torch.as_tensor(value).cpu()
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            tensors |= {
                f"layers.{index}.{name}": state[rows].cpu().contiguous() for name, state in states_of(layer).items()
            }
    if tokens is not None:
        held = paged.num_seqs, paged.lengths[0]
        if tuple(tokens.shape) != held:
            raise UsageError(
                f"tokens must be the ids [B, length] = {list(held)} of what the cache holds; got {list(tokens.shape)}"
            )
        tensors["tokens"] = tokens[rows].cpu().long().contiguous()
    written = {"model": cache.identity, "max_cache_len": cache.groups[0].max_cache_len}
    storage.write(path, tensors, layers, {name: json.dumps(value) for name, value in written.items()})


def load(
    build: Callable[[list[int], KeyDtype], Loaded], path: str | Path, model: PreTrainedModel,
    tokens: torch.Tensor | None,
    max_cache_len: int | None, device: torch.device | str | None, backend: BackendName,
) -> Loaded:  # fmt: skip
    """The cache of a file of `save` (`FP8Cache.load`). `build` makes an empty one with these FP8 layers and keys of
    this format.
    """
    devices = layer_devices(model, decoder_config(model.config).num_hidden_layers)
    if device is not None:
        devices = [torch.device(device)] * len(devices)
    if any(each.type == "meta" for each in devices):
        raise UsageError(
            "the model's weights are offloaded, so the device that it runs on is not known; give it: load(..., "
            "device='cuda')"
        )
    tensors, layers, metadata = storage.read(path)
    if "model" not in metadata:
        raise UsageError(
            f"{path} holds pages without a model: fp8attn.PagedKVCache.load reads it, FP8Cache.load what FP8Cache.save "
            f"wrote"
        )
    try:
        saved, saved_len = (json.loads(metadata[name]) for name in ("model", "max_cache_len"))
        windows, (key_dtype, *_) = (
            [own["window"] for own in layers.values()],
            [own["key_dtype"] for own in layers.values()],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is incomplete or not as written ({error!r}); {storage.AGAIN}") from error
    windowed, fp8_layers = any(windows), list(layers)
    if max_cache_len != saved_len and (windowed or any(name.startswith("layers.") for name in tensors)):
        raise UsageError(
            f"{path} has {'windows' if windowed else '16-bit layers'} of a cache with max_cache_len={saved_len}, which "
            f"cannot become those of another: load it with this max_cache_len"
        )
    cache = build(fp8_layers, key_dtype)
    given = cache.identity, list(cache.fp8_layers)
    if given != (saved, fp8_layers):
        raise UsageError(
            f"{path} is from another model: {saved}, with FP8 layers {fp8_layers}; the given model is {given[0]}, with "
            f"{given[1]}. Load it with that model, or prefill the prompt with this one"
        )
    if tokens is not None:
        _check_tokens(tensors.get("tokens"), tokens, path)
    for group in cache.groups:
        on, own = devices[group.layers[0].index], {layer.index: layers[layer.index] for layer in group.layers}
        group.paged = storage.unpack(
            PagedKVCache, tensors, own, path, max_seqlen=max_cache_len, device=on, backend=backend
        )
        if group.paged.window != group.window:
            raise UsageError(
                f"{path} is from a model whose layers {[layer.index for layer in group.layers]} have a window of "
                f"{group.paged.window}; those of the given model have {group.window}. Load it with that model, or "
                f"prefill the prompt with this one"
            )
        for fp8_layer, pages in zip(group.layers, group.paged.layers, strict=True):
            fp8_layer.rotate_keys = pages.format.rotate
    for index, layer in enumerate(cache.layers):
        start = f"layers.{index}."
        mine = {
            name.removeprefix(start): value.to(devices[index])
            for name, value in tensors.items()
            if name.startswith(start)
        }
        if "keys" in mine:
            _restore(layer, {name: mine[name] for name in _STATE if name in mine})
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            _restore_states(layer, {name: value for name, value in mine.items() if name not in _STATE})
    return cache


def states_of(layer: LinearAttentionCacheLayerMixin) -> dict[str, torch.Tensor]:
    """The states `[B, ...]` of a linear layer that has seen tokens, by the name of the attribute and the number of the
    state.
    """
    return {
        f"{name}.{number}": state
        for name in ("conv_states", "recurrent_states")
        for number, state in getattr(layer, name).items()
        if state is not None and layer.has_previous_state[number]
    }


def _restore_states(layer: LinearAttentionCacheLayerMixin, states: dict[str, torch.Tensor]) -> None:
    """Give a new linear layer the states of `states_of`."""
    for name, state in states.items():
        kind, number = name.split(".")
        layer.lazy_initialization(**{kind: state, "state_idx": int(number)})
        getattr(layer, kind)[int(number)].copy_(state)
        layer.has_previous_state[int(number)] = True


def _check_tokens(saved: torch.Tensor | None, tokens: torch.Tensor, path: str | Path) -> None:
    """Raise UsageError unless a prompt begins with the tokens of a file."""
    if saved is None:
        raise UsageError(
            f"{path} was saved without its tokens: save it with cache.save(path, tokens=ids), or load it without "
            f"tokens="
        )
    if tokens.dim() != 2 or len(tokens) != len(saved):
        raise UsageError(
            f"{path} holds {len(saved)} sequences, and tokens must be the ids [B, S] of as many; got "
            f"{list(tokens.shape)}"
        )
    length = saved.shape[1]
    if not torch.equal(tokens[:, :length].cpu().long(), saved):
        raise UsageError(
            f"{path} is from another prompt: it holds {length} tokens, and the {tokens.shape[1]} given tokens do not "
            f"begin with them. Prefill this prompt, and save it to another file"
        )


def _restore(layer: CacheLayerMixin, state: dict[str, torch.Tensor]) -> None:
    """Restore the tensors of one of transformers' own layers. Static layers keep their tensors and get the values."""
    layer.lazy_initialization(state["keys"], state["values"])
    for name, value in state.items():
        old = getattr(layer, name)
        if isinstance(old, torch.Tensor) and old.shape == value.shape:
            old.copy_(value)
        else:
            setattr(layer, name, value if isinstance(old, torch.Tensor) else int(value))


def identity(model: PreTrainedModel, specs: list[LayerSpec]) -> dict[str, Any]:
    """What is compared of a model, which has layers of `specs`, as JSON has it. Only the last part of its name is used,
    because folders differ between machines."""
    config = decoder_config(model.config)
    specs = [spec for spec in specs if spec.is_full] or [spec for spec in specs if spec.in_pages]
    shapes = list(dict.fromkeys((x.num_q_heads, x.num_kv_heads, x.head_dim) for x in specs))
    heads, kv_heads, head_dim = shapes[0] if len(shapes) == 1 else (list(x) for x in zip(*shapes, strict=True))
    found = {
        "type": config.model_type, "layers": config.num_hidden_layers, "name": Path(config.name_or_path).name,
        "heads": heads,
        "kv_heads": kv_heads, "head_dim": head_dim, "rope": getattr(config, "rope_parameters", None),
        "dtype": str(model.dtype),
    }  # fmt: skip
    return json.loads(json.dumps(found, default=str))
