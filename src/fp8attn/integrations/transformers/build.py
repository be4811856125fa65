"""What an `FP8Cache` is made of: layers in 8 and in 16 bits, by the model and the options."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING

from ...errors import UsageError
from ...formats.codec import KeyDtype, codec_of
from ...formats.spec import PageSpec
from ...params import BackendName, check_backend
from ...scales import KVScales
from .config import LayerSpec, decoder_config, layers_of, unsupported_reason
from .devices import layer_devices
from .kept import KeptLayer
from .layers import FP8HybridLayer, FP8Layer, FP8Layers, FP8SlidingLayer


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
            f"PEFT's {method} puts a cache of its own in place of this one; use the model without past_key_values"
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


def make_layers(
    model: PreTrainedModel, max_cache_len: int | None, scales: KVScales | None,
    skip_layers: Iterable[int] | Callable[[int], bool],
    key_dtype: KeyDtype, rotate_keys: bool, exact: bool, batch_invariant: bool, backend: BackendName,
) -> tuple[list[Any], list[FP8Layers], list[LayerSpec]]:  # fmt: skip
    """The layers of a cache, without means from the model's weights; what those in FP8 share, by shape, window and
    device; and what the config says of the layers. It checks all options.

    Raises:
        TypeError, UsageError: as `FP8Cache`.
    """
    if max_cache_len is not None and (not isinstance(max_cache_len, int) or max_cache_len < 1):
        raise UsageError(f"max_cache_len must be a positive whole number of tokens (None grows); got {max_cache_len!r}")
    if scales is not None and not isinstance(scales, KVScales):
        raise TypeError(f"scales must be KVScales, as of KVScales.load(path); got {type(scales).__name__}")
    codec_of(key_dtype)  # raises UsageError
    check_backend(backend)
    if (reason := unsupported_reason(model.config)) is not None:
        raise UsageError(reason)
    specs, config = layers_of(model.config), decoder_config(model.config)
    skipped = _skipped(skip_layers, config.num_hidden_layers)
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
            key_dtype=key_dtype,
            rotate_keys=rotate_keys,
        )
    plain = (
        DYNAMIC_LAYER_TYPE_MAPPING
        if max_cache_len is None
        else {**STATIC_LAYER_TYPE_MAPPING, "full_attention": KeptLayer}
    )
    length = {} if max_cache_len is None else {"max_cache_len": max_cache_len}
    layers: list[Any] = []
    groups: dict[tuple[tuple[int, int, int | None], torch.device], FP8Layers] = {}
    for index, (spec, device) in enumerate(zip(specs, layer_devices(model, len(specs)), strict=True)):
        if not spec.in_pages_of(max_cache_len) or skipped(index):
            layers.append(plain[spec.kind](**{**spec.options, **length}))
            continue
        if not spec.has_pages:
            raise UsageError(
                f"layer {index}: {PageSpec.of(spec.head_dim).refusal}. Keep such layers in 16 bits: "
                f"skip_layers={[i for i, each in enumerate(specs) if each.is_full and not each.has_pages]}"
            )
        key = (spec.num_kv_heads, spec.head_dim, spec.window), device
        if key not in groups:
            groups[key] = FP8Layers(config, max_cache_len, key_dtype, exact, batch_invariant, backend, *key)
        group = groups[key]
        own = None if scales is None or spec.is_windowed else scales.layer(index)
        if spec.is_windowed:
            layers.append(FP8SlidingLayer(index, group, scales=None, rotate_keys=rotate_keys))
        elif spec.kind == "hybrid":
            states = spec.options.get("number_of_states", 1)
            layers.append(FP8HybridLayer(index, group, scales=own, rotate_keys=rotate_keys, number_of_states=states))
        else:
            layers.append(FP8Layer(index, group, scales=own, rotate_keys=rotate_keys))
    if not groups and max_cache_len is not None and not any(spec.is_full for spec in specs):
        raise UsageError(
            f"every layer of {config.model_type!r} has a sliding window, and a static cache "
            f"(max_cache_len={max_cache_len}) keeps windows in 16 bits. Use FP8Cache(model) without max_cache_len, or "
            f"transformers' own StaticCache(config=model.config, max_cache_len=...)"
        )
    if not groups:
        raise UsageError(
            "no layer would be in FP8: skip_layers keeps every full-attention layer in 16 bits, and those with long "
            "windows. Use transformers' own cache "
            "(DynamicCache(config=model.config))"
        )
    return layers, list(groups.values()), specs


def _skipped(skip_layers: Iterable[int] | Callable[[int], bool], num_layers: int) -> Callable[[int], bool]:
    if callable(skip_layers):
        return skip_layers
    numbers = list(skip_layers) if isinstance(skip_layers, Iterable) else []
    if not isinstance(skip_layers, Iterable) or not all(isinstance(n, int) for n in numbers):
        raise UsageError(
            f"skip_layers is a sequence of layers' numbers, or a function of a number; got {skip_layers!r}"
        )
    wrong = [n for n in numbers if not -num_layers <= n < num_layers]
    if wrong:
        raise UsageError(f"skip_layers names {wrong}, and the model has layers 0 to {num_layers - 1} (-1 is the last)")
    return {n % num_layers for n in numbers}.__contains__
