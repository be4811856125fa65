"""What an `FP8Cache` is made of: layers in 8 and in 16 bits, by the model and the options."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING

from ...backends import unsupported_reason as unsupported_backend
from ...errors import UsageError
from ...formats.codec import DEFAULT_KEY_DTYPE
from ...formats.spec import PageSpec
from ...scales import KVScales
from .config import LayerSpec, decoder_config, layers_of, unsupported_reason
from .decoder import check_layers
from .kept import KeptLayer
from .layers import CacheOptions, FP8HybridLayer, FP8Layer, FP8Layers, FP8SlidingLayer
from .weights import NO_BIASES, Weights, key_matrices


def edge_layers(first: int = 0, last: int = 0) -> tuple[int, ...]:
    """The numbers of the `first` and the `last` layers of a model, for `skip_layers`: `edge_layers(1, 2)` is
    `(0, -2, -1)`.
    """
    return (*range(first), *range(-last, 0))


def transformers_model(model: Any) -> PreTrainedModel:
    """The transformers model in `model`, which may be a PEFT model.

    Raises:
        TypeError: there is none.
        UsageError: a PEFT method that has a cache of its own.
    """
    method = getattr(getattr(model, "active_peft_config", None), "peft_type", None)
    if method in ("PREFIX_TUNING", "CARTRIDGE"):
        raise UsageError(
            f"PEFT's {method.value} puts a cache of its own in place of this one: call the model without this cache"
        )
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if isinstance(base, PreTrainedModel):
        return base
    if isinstance(model, PreTrainedConfig):
        raise TypeError(
            f"FP8Cache takes the model, and got its config ({type(model).__name__}): biases, which decide its static "
            f"means, are in the weights. Call FP8Cache(model, ...)"
        )
    raise TypeError(
        f"FP8Cache takes a transformers model (or a PEFT model of one); got {type(model).__name__}. For a compiled or "
        f"wrapped model, pass the model inside"
    )


def served_layers(model: PreTrainedModel, options: CacheOptions, scales: KVScales | None) -> list[LayerSpec]:
    """What the config says of the layers of a model that `FP8Cache` can serve with these options.

    Raises:
        TypeError, UsageError: as `FP8Cache`.
    """
    if scales is not None and not isinstance(scales, KVScales):
        raise TypeError(f"scales must be KVScales, as of KVScales.load(path); got {type(scales).__name__}")
    check_layers(model)
    if (reason := unsupported_reason(model.config)) is not None:
        raise UsageError(reason)
    specs, config = layers_of(model.config), decoder_config(model.config)
    if scales is not None:
        full = next((spec for spec in specs if spec.is_full), None)
        if full is None:
            raise UsageError(
                f"scales are for full-attention layers, and every layer of {config.model_type!r} has a window: leave "
                f"them out"
            )
        scales.check(
            num_layers=config.num_hidden_layers,
            num_kv_heads=full.num_kv_heads,
            head_dim=full.head_dim,
            model_id=config.name_or_path,
            key_dtype=options.key_dtype,
            rotate_keys=options.rotate_keys,
        )
    return specs


def latent_keys(
    model: PreTrainedModel,
    specs: list[LayerSpec],
    options: CacheOptions,
    scales: KVScales | None,
    devices: list[torch.device],
) -> dict[int, torch.Tensor]:
    """`key_matrices` of the layers that have pages of latents: where nothing asks for another format, and attention
    reads latents as fast as K and V. The portable kernels take twice the time.
    """
    other = not options.rotate_keys or options.key_dtype != DEFAULT_KEY_DTYPE or options.batch_invariant
    if scales is not None or other or options.backend not in ("auto", "reference"):
        return {}
    return {
        index: matrix
        for index, matrix in key_matrices(model, specs).items()
        if options.backend == "reference"
        or devices[index].type == "cpu"
        or unsupported_backend("hopper", devices[index], model.dtype, specs[index].latent_pages) is None
    }


def make_layers(
    model: PreTrainedModel,
    specs: list[LayerSpec],
    options: CacheOptions,
    scales: KVScales | None,
    weights: Weights,
    skip_layers: Iterable[int],
    devices: list[torch.device],
    keys: dict[int, torch.Tensor],
) -> list[Any]:
    """The layers of a cache. Those in FP8 share an `FP8Layers`, by shape, window and device. Those in `keys` have
    `key_matrices`, and pages of latents.

    Raises:
        UsageError: as `FP8Cache`.
    """
    config, static = decoder_config(model.config), options.max_cache_len is not None
    skipped = _numbers(skip_layers, config.num_hidden_layers)
    plain = {**STATIC_LAYER_TYPE_MAPPING, "full_attention": KeptLayer} if static else DYNAMIC_LAYER_TYPE_MAPPING
    length = {"max_cache_len": options.max_cache_len} if static else {}
    layers: list[Any] = []
    groups: dict[tuple[int, PageSpec, int | None, torch.device], FP8Layers] = {}
    if any(spec.rank is not None for spec in specs) and (scales is not None or not options.rotate_keys):
        raise UsageError(
            f"{config.model_type!r} caches latents, which are rotated and have a scale for each token: leave out "
            f"scales and rotate_keys"
        )
    for index, (spec, device) in enumerate(zip(specs, devices, strict=True)):
        if not spec.in_pages_of(options.max_cache_len) or index in skipped:
            layers.append(plain[spec.kind](**{**spec.options, **length}))
            continue
        if not spec.has_pages:
            raise UsageError(
                f"layer {index}: {spec.pages.refusal}. Keep such layers in 16 bits: "
                f"skip_layers={[i for i, each in enumerate(specs) if each.is_full and not each.has_pages]}"
            )
        pages = PageSpec.of(spec.head_dim if spec.rank is None else spec.pages, options.key_dtype)
        if index in keys:
            assert spec.latent_pages is not None
            pages = spec.latent_pages
        key = spec.num_kv_heads, pages, spec.window, device
        if key not in groups:
            groups[key] = FP8Layers(config, options, pages, spec.window, device)
        group = groups[key]
        kind = FP8SlidingLayer if spec.is_windowed else FP8HybridLayer if spec.kind == "hybrid" else FP8Layer
        if scales is not None and spec.is_full:
            layers.append(kind(index, spec, group, scales.layer(index), NO_BIASES, options.rotate_keys))
        else:
            rotate_keys = options.rotate_keys and index not in weights.unrotated
            biases = NO_BIASES if index in keys else weights.biases.get(index, NO_BIASES)
            layers.append(kind(index, spec, group, None, biases, rotate_keys))
            layers[-1].key_matrix = keys.get(index)
    if not groups and static and not any(spec.is_full for spec in specs):
        raise UsageError(
            f"every layer of {config.model_type!r} has a sliding window, and a static cache "
            f"(max_cache_len={options.max_cache_len}) keeps windows in 16 bits. Use FP8Cache(model) without "
            f"max_cache_len, or transformers' own StaticCache(config=model.config, max_cache_len=...)"
        )
    if not groups:
        raise UsageError(
            "no layer would be in FP8: skip_layers keeps every full-attention layer in 16 bits, and those with long "
            "windows. Use transformers' own cache (DynamicCache(config=model.config))"
        )
    return layers


def _numbers(skip_layers: Iterable[int], num_layers: int) -> set[int]:
    """The numbers of layers, from 0, which may be given from the end."""
    numbers = list(skip_layers) if isinstance(skip_layers, Iterable) else [None]
    if not all(isinstance(n, int) for n in numbers):
        raise UsageError(f"skip_layers is a sequence of layers' numbers; got {skip_layers!r}")
    if wrong := [n for n in numbers if not -num_layers <= n < num_layers]:
        raise UsageError(f"skip_layers names {wrong}, and the model has layers 0 to {num_layers - 1} (-1 is the last)")
    return {n % num_layers for n in numbers}
