"""What a model's weights decide in an `FP8Cache`: static means, the rotation of E4M3 keys, which layers stay in 16
bits, and how keys follow from values.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from ...cache.layer import lasting
from ...formats.codec import codec_of
from ...scales import KVScales, ranges
from ..k_eq_v import key_matrix
from .biases import LayerBiases, layer_biases, spread_layers
from .config import LayerSpec
from .decoder import decoder_modules
from .layers import CacheOptions

NO_BIASES = LayerBiases()


class Weights(NamedTuple):
    """What was read from the weights.

    Attributes:
        biases: what biases do to K and V, by layer. With calibrated scales, their means are subtracted instead of those
            of the biases.
        unrotated: the layers whose E4M3 keys the rotation would make worse, because it would spread a large error over
            all channels: K has an offset that no mean removes, or large channels of K meet small channels of Q.
        losing: the layers whose keys lose accuracy in 8 bits (`LayerBiases.loses`), of those that can be in 8 bits.
    """

    biases: dict[int, LayerBiases]
    unrotated: set[int]
    losing: list[int]


def read_weights(
    model: PreTrainedModel, specs: list[LayerSpec], options: CacheOptions, scales: KVScales | None
) -> Weights:
    """Read the weights of a model with layers of `specs`, for a cache with these options and calibrated scales."""
    if any(spec.rank is not None for spec in specs):  # latents have no biases, and are always rotated
        return Weights({}, set(), [])
    k_means = {} if scales is None else {index: layer.k_mean for index, layer in scales.layers.items()}
    biases = layer_biases(model, options.max_cache_len, k_means)
    unrotated: set[int] = set()
    if not codec_of(options.key_dtype).is_integer:  # the error of a code is relative
        unrotated = spread_layers(model) | {index for index, layer in biases.items() if layer.stands_out}
    losing = [i for i, layer in sorted(biases.items()) if layer.loses and specs[i].in_pages_of(options.max_cache_len)]
    return Weights(biases, unrotated, losing)


def layers_in_16_bits(weights: Weights, specs: list[LayerSpec], options: CacheOptions) -> list[int]:
    """The layers that stay in 16 bits, if the user has not said which do: those that lose, unless none would be left in
    8 bits, or attention must not depend on the batch, as PyTorch's in 16 bits does.
    """
    in_pages = sum(spec.in_pages_of(options.max_cache_len) for spec in specs)
    return [] if options.batch_invariant or len(weights.losing) == in_pages else weights.losing


@lasting
def key_matrices(model: PreTrainedModel, specs: list[LayerSpec]) -> dict[int, torch.Tensor]:
    """`k_eq_v.key_matrix` of each layer whose keys follow from its values, if its weights are loaded."""
    follow = {index: spec.turned for index, spec in enumerate(specs) if spec.latent_pages is not None}
    found: dict[int, torch.Tensor] = {}
    for _, module in decoder_modules(model) if follow else ():
        index, norm = vars(module).get("layer_idx", -1), getattr(module, "k_norm", None)
        if index in follow and norm is not None and not norm.weight.is_meta:
            found[index] = key_matrix(norm.weight, follow[index])
    return found


def warn_unread(model: PreTrainedModel, weights: Weights, layers: list[int]) -> None:
    """Warn about biases of these layers that cannot be read."""
    if unread := [index for index in layers if weights.biases.get(index, NO_BIASES).unread]:
        warnings.warn(
            f"biases of {type(model).__name__} that change K or V in layers {ranges(unread)} cannot be read, "
            f"because the weights are not loaded or the layers have a form that fp8attn does not know. These "
            f"layers have no static means, and lose accuracy if the biases are large. Calibrate: FP8Cache(model, "
            f"scales=fp8attn_tools.calibrate(model, batches))",
            stacklevel=3,
        )


def warn_losing(model: PreTrainedModel, weights: Weights, in_16_bits: list[int], options: CacheOptions) -> None:
    """Warn about the layers that lose: which of them stay `in_16_bits`, or why none do."""
    losing, name = weights.losing, type(model).__name__
    if not losing:
        return
    why = (
        f"RoPE rotates large biases of their keys, so no mean removes them, and 8 bits would be up to "
        f"{max(weights.biases[index].k_step for index in losing):.0f} times as coarse"
    )
    if in_16_bits:
        warnings.warn(
            f"FP8Cache keeps layers {ranges(in_16_bits)} of {name} in 16 bits, with twice the memory of 8. {why}. Pass "
            f"skip_layers={in_16_bits} for the same without this warning, or skip_layers=() for 8 bits in all layers",
            stacklevel=3,
        )
    else:
        no_16_bits = "batch_invariant=True has no layer in 16 bits"
        warnings.warn(
            f"layers {ranges(losing)} of {name} lose accuracy in 8 bits. {why}. They stay in 8 bits: "
            f"{no_16_bits if options.batch_invariant else 'otherwise no layer would be'}. Use transformers' own cache "
            f"(DynamicCache(config=model.config)), name layers to keep in 16 bits (skip_layers=[...]), or pass "
            f"skip_layers=() for the same without this warning",
            stacklevel=3,
        )
