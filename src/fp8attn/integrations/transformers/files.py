"""`FP8Cache` in a file: the pages, which `cache.storage` writes, the 16-bit layers, and the name of the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from ...cache import PagedKVCache, storage
from ...errors import UsageError
from ...formats.codec import KeyDtype
from ...formats.spec import spec_of
from .config import LayerSpec, decoder_config
from .layers import FP8Layer, groups_of

# The attributes of transformers' own layers; the last two are the numbers of tokens of sliding windows and static
# layers.
_STATE = ("keys", "values", "cumulative_length", "cumulative_length_int")


class CacheFile(NamedTuple):
    """A file of `save`.

    Attributes:
        tensors, layers: as `storage.read` returns them.
        identity: of the model that it is for (`identity_of`).
        key_dtype: the format of the keys of all FP8 layers.
    """

    path: str | Path
    tensors: dict[str, torch.Tensor]
    layers: storage.Layers
    identity: dict[str, Any]
    key_dtype: KeyDtype


def save(
    path: str | Path,
    layers: list[Any],
    identity: dict[str, Any],
    seqs: Sequence[int] | None,
    tokens: torch.Tensor | None,
) -> None:
    """Write sequences of all `layers` of a cache (`FP8Cache.save`), for the model of this identity."""
    groups = groups_of(layers)
    if any(group.unused for group in groups):
        raise ValueError("this cache holds no tokens yet: run the prompt through the model first, and save then")
    tensors: dict[str, torch.Tensor] = {}
    packed: storage.Layers = {}
    for group in groups:
        more_tensors, more_layers = group.paged.contents(seqs, [layer.index for layer in group.layers])
        tensors, packed = tensors | more_tensors, packed | more_layers
    paged = groups[0].paged
    rows = list(range(paged.num_seqs)) if seqs is None else paged.table.indices(seqs)
    for index, layer in enumerate(layers):
        if not isinstance(layer, FP8Layer) and getattr(layer, "keys", None) is not None:
            # A layer that records its past has more than the next token sees.
            first = 1 - layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else 0
            for name in _STATE:
                value = getattr(layer, name, None)
                if isinstance(value, torch.Tensor) and value.dim():
                    tensors[f"layers.{index}.{name}"] = value[rows, :, first:].cpu().contiguous()
                elif value is not None:
                    tensors[f"layers.{index}.{name}"] = torch.as_tensor(value).cpu()
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for name, state in states_of(layer).items():
                kind, number = name.split(".")
                if kind == "conv_states":
                    state = pad(state, (layer.conv_kernel_size[int(number)] - state.shape[-1], 0))
                tensors[f"layers.{index}.{name}"] = state[rows].cpu().contiguous()
    if tokens is not None:
        shape = paged.num_seqs, paged.lengths[0]
        if tuple(tokens.shape) != shape:
            raise UsageError(
                f"tokens must be the ids [B, length] = {list(shape)} of what the cache holds; got {list(tokens.shape)}"
            )
        tensors["tokens"] = tokens[rows].cpu().long().contiguous()
    metadata = {"model": identity, "max_cache_len": groups[0].options.max_cache_len}
    storage.write(path, tensors, packed, {name: json.dumps(value) for name, value in metadata.items()})


def read(path: str | Path, max_cache_len: int | None) -> CacheFile:
    """Read a file of `save`, for a cache with this `max_cache_len`.

    Raises:
        UsageError: as `FP8Cache.load`.
    """
    tensors, layers, metadata = storage.read(path)
    if "model" not in metadata:
        raise UsageError(
            f"{path} holds pages without a model: fp8attn.PagedKVCache.load reads it, FP8Cache.load what FP8Cache.save "
            f"wrote"
        )
    try:
        identity, saved_len = (json.loads(metadata[name]) for name in ("model", "max_cache_len"))
        windowed = any(layer["window"] for layer in layers.values())
        key_dtype, *_ = [spec_of(layer["spec"]).k.name for layer in layers.values()]
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is incomplete or not as written ({error!r}); {storage.AGAIN}") from error
    if max_cache_len != saved_len and (windowed or any(name.startswith("layers.") for name in tensors)):
        raise UsageError(
            f"{path} has {'windows' if windowed else '16-bit layers'} of a cache with max_cache_len={saved_len}, which "
            f"cannot become those of another: load it with this max_cache_len"
        )
    return CacheFile(path, tensors, layers, identity, key_dtype)


def restore(
    file: CacheFile,
    layers: list[Any],
    identity: dict[str, Any],
    devices: list[torch.device],
    tokens: torch.Tensor | None,
) -> None:
    """Give the layers of a new cache what is in a file (`FP8Cache.load`).

    Args:
        tokens: `[B, S]` ids of the prompt, which must begin with those of the file. None: they are not compared.
    """
    path, tensors, groups = file.path, file.tensors, groups_of(layers)
    saved = file.identity | {"FP8 layers": list(file.layers)}
    given = identity | {"FP8 layers": sorted(layer.index for group in groups for layer in group.layers)}
    if differences := [
        f"{name} is {saved.get(name)!r} in the file and {given.get(name)!r} in the model"
        for name in saved | given
        if saved.get(name) != given.get(name)
    ]:
        raise UsageError(
            f"{path} is from another model: {'; '.join(differences)}. Load it with that model, or prefill the prompt "
            f"with this one"
        )
    if tokens is not None:
        _check_tokens(tensors.get("tokens"), tokens, path)
    for group in groups:
        group.paged = PagedKVCache.from_contents(
            tensors, {layer.index: file.layers[layer.index] for layer in group.layers}, path,
            max_seqlen=group.options.max_cache_len, device=group.device, backend=group.options.backend,
        )  # fmt: skip
        group.unused = False
        if group.paged.window != group.window:
            raise UsageError(
                f"{path} is from a model whose layers {[layer.index for layer in group.layers]} have a window of "
                f"{group.paged.window}; those of the given model have {group.window}. Load it with that model, or "
                f"prefill the prompt with this one"
            )
    for index, layer in enumerate(layers):
        start = f"layers.{index}."
        state = {
            name.removeprefix(start): value.to(devices[index])
            for name, value in tensors.items()
            if name.startswith(start)
        }
        if "keys" in state:
            _restore(layer, {name: state.pop(name) for name in _STATE if name in state})
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            _restore_states(layer, state)


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


def identity_of(model: PreTrainedModel, specs: list[LayerSpec]) -> dict[str, Any]:
    """What is compared of a model, which has layers of `specs`, as JSON has it. Only the last part of its name is used,
    because folders differ between machines."""
    config = decoder_config(model.config)
    specs = [spec for spec in specs if spec.is_full] or [spec for spec in specs if spec.in_pages]
    shapes = list(dict.fromkeys((x.num_q_heads, x.num_kv_heads, x.head_dim) for x in specs))
    heads, kv_heads, head_dim = shapes[0] if len(shapes) == 1 else (list(x) for x in zip(*shapes, strict=True))
    values = {
        "type": config.model_type, "layers": config.num_hidden_layers, "name": Path(config.name_or_path).name,
        "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim,
        "rope": getattr(config, "rope_parameters", None), "dtype": str(model.dtype),
    }  # fmt: skip
    return json.loads(json.dumps(values, default=str))
