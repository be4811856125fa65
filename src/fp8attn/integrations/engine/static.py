"""What is static in the pages of a layer: means, and calibrated scales."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

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
    if number is None:
        return StaticState()
    layer: Any  # with means; a layer with a window has no calibrated ones
    if options.scales is not None:
        scales = _load(options.scales)
        scales.check(
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=head_dim,
            key_dtype=options.key_dtype,
            rotate_keys=True,
        )
        layer = scales.layers.get(number)
    else:
        from .biases import means_of  # it needs transformers

        layer = means_of(model.name, model.revision, model.context).get(number)
    means = (None, None) if layer is None else (layer.k_mean, layer.v_mean)
    if not (given := [mean for mean in means if mean is not None]):
        return StaticState()
    # Both, one of which may be zeros, or none: `warmup` compiles no kernels of one mean, nor static scales without.
    k_mean, v_mean = (torch.zeros_like(given[0]) if mean is None else mean for mean in means)
    state = StaticState(rotate(k_mean[heads]), v_mean[heads].contiguous())
    if options.scales is not None and options.static_scales:
        return state._replace(page_scales=layer.page_scales[heads])
    return state if any(mean.any() for mean in given) else StaticState()


@lru_cache(maxsize=1)
def _load(path: str) -> KVScales:
    return KVScales.load(path)
