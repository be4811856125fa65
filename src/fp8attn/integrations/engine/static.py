"""What is static in the pages of a layer: means, and calibrated scales."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from ...formats.rotation import rotate
from ...scales import KVScales
from .options import Options


@dataclass(frozen=True)
class ServedModel:
    """The whole model that an engine serves.

    Attributes:
        name: its folder, or its id in the cache of the Hugging Face Hub.
        context: positions that a sequence may have, over which means of biases are averaged.
        num_layers, num_kv_heads: of all processes.
    """

    name: str
    revision: str | None
    context: int
    num_layers: int
    num_kv_heads: int


class StaticState(NamedTuple):
    """What is static in a layer's pages, on the CPU.

    Attributes:
        stored_k_mean, v_mean: `[num_kv_heads, head_dim]` float32, as `KVPages` has them. Both are None if both are
            zero.
        page_scales: `[num_kv_heads, 2]` float32, the scales of K and V of every page; None: each page has its own.
    """

    stored_k_mean: torch.Tensor | None = None
    v_mean: torch.Tensor | None = None
    page_scales: torch.Tensor | None = None


def static_state(options: Options, model: ServedModel, number: int | None, heads: slice, head_dim: int) -> StaticState:
    """What is static in a layer: from the file of the option `scales`, or without one the means of the model's biases.

    Args:
        number: the layer's index in the model; None: it has none, and nothing is static.
        heads: the KV heads of this process, if tensor parallelism divides them.
    Raises:
        UsageError: the file is missing or damaged, or of another model, key_dtype or rotation.
    """
    if options.scales is not None:
        return _calibrated(options, options.scales, model, number, heads, head_dim)
    from .biases import means_of  # it needs transformers

    biases = None if number is None else means_of(model.name, model.revision, model.context).get(number)
    if biases is None:
        return StaticState()
    k_mean, v_mean = biases.k_mean, biases.v_mean
    return _both(
        None if k_mean is None else rotate(k_mean[heads]), None if v_mean is None else v_mean[heads].contiguous()
    )


def _both(stored_k_mean: torch.Tensor | None, v_mean: torch.Tensor | None) -> StaticState:
    """The state with both means, one of which may be zeros, or none: `warmup` compiles no kernels of one mean."""
    if stored_k_mean is None and v_mean is not None:
        stored_k_mean = torch.zeros_like(v_mean)
    if v_mean is None and stored_k_mean is not None:
        v_mean = torch.zeros_like(stored_k_mean)
    return StaticState(stored_k_mean, v_mean)


def _calibrated(
    options: Options, file: str, model: ServedModel, number: int | None, heads: slice, head_dim: int
) -> StaticState:
    scales = _load(file)
    scales.check(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=head_dim,
        key_dtype=options.key_dtype,
        rotate_keys=True,
    )
    if number is None or number not in scales:  # layers with a window have none
        return StaticState()
    layer = scales.layer(number)
    stored_k_mean, v_mean = rotate(layer.k_mean[heads]), layer.v_mean[heads].contiguous()
    if options.static_scales:  # kernels of static scales have both means (`warmup`)
        return StaticState(stored_k_mean, v_mean, layer.page_scales[heads])
    return _both(stored_k_mean if stored_k_mean.any() else None, v_mean if v_mean.any() else None)


@lru_cache(maxsize=1)
def _load(path: str) -> KVScales:
    return KVScales.load(path)
