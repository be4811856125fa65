"""What a model's weights decide in an `FP8Cache`: static means, the rotation of E4M3 keys, and which layers stay in 16
bits.
"""

from __future__ import annotations

import warnings
from functools import cached_property

from transformers import PreTrainedModel

from ...formats.codec import codec_of
from ...scales import KVScales, ranges
from .biases import LayerBiases, layer_biases, spread_layers
from .config import layers_of
from .layers import FP8Layers


class Weights:
    """The weights of a model, which are read when the first question is asked, and then once.

    Args:
        model: the model of the cache.
        context: the cache's `max_cache_len`.
        scales: calibrated scales, whose means are subtracted in the place of those of biases.
        batch_invariant: of the cache. Attention of layers in 16 bits is PyTorch's, which is not.
    """

    def __init__(
        self, model: PreTrainedModel, context: int | None, scales: KVScales | None, batch_invariant: bool
    ) -> None:
        self.model, self.context, self.scales, self.batch_invariant = model, context, scales, batch_invariant

    @cached_property
    def biases(self) -> dict[int, LayerBiases]:
        """What biases do to K and V, by layer."""
        means = {} if self.scales is None else {index: layer.k_mean for index, layer in self.scales.layers.items()}
        return layer_biases(self.model, self.context, means)

    @cached_property
    def losing(self) -> tuple[int, ...]:
        """The layers whose keys lose accuracy in 8 bits (`LayerBiases.loses`), of those that can be in 8 bits."""
        losing = [index for index, found in sorted(self.biases.items()) if found.loses]
        specs = layers_of(self.model.config) if losing else []
        return tuple(index for index in losing if specs[index].in_pages_of(self.context))

    def keeps(self, index: int) -> bool:
        """Whether a layer stays in 16 bits, if the user has not said which do: those that lose, unless none would be
        left in 8 bits.
        """
        if self.batch_invariant or index not in self.losing:
            return False
        return len(self.losing) < sum(spec.in_pages_of(self.context) for spec in layers_of(self.model.config))

    def set_static(self, groups: list[FP8Layers]) -> None:
        """Set the means and the rotation of these layers, which have no calibrated scales, and warn about biases that
        cannot be read.
        """
        layers = [layer for group in groups for layer in group.layers]
        relative = not codec_of(groups[0].key_dtype).is_integer  # the error of a code
        spread = spread_layers(self.model) if relative else ()
        for layer in layers:
            found = self.biases.get(layer.index)
            if found is not None:
                layer.k_mean, layer.v_mean = found.k_mean, found.v_mean
            if relative and (layer.index in spread or (found is not None and found.stands_out)):
                layer.rotate_keys = False
        if unread := sorted(
            layer.index for layer in layers if layer.index in self.biases and self.biases[layer.index].unread
        ):
            warnings.warn(
                f"biases of {type(self.model).__name__} that change K or V in layers {ranges(unread)} cannot be read, "
                f"because the weights are not loaded or the layers have a form that fp8attn does not know. These "
                f"layers have no static means, and lose accuracy if the biases are large. Calibrate: FP8Cache(model, "
                f"scales=fp8attn_tools.calibrate(model, batches))",
                stacklevel=3,
            )

    def say_kept(self, fp8_layers: tuple[int, ...]) -> None:
        """Warn about the layers that lose: which of them stay in 16 bits, or why they are among the `fp8_layers`."""
        if not self.losing:
            return
        most = max(self.biases[index].k_step for index in self.losing)
        why = (
            f"RoPE rotates large biases of their keys, so no mean removes them, and 8 bits would be up to {most:.0f} "
            f"times as coarse"
        )
        name, kept = type(self.model).__name__, [index for index in self.losing if index not in fp8_layers]
        if kept:
            warnings.warn(
                f"FP8Cache keeps layers {ranges(kept)} of {name} in 16 bits, with twice the memory of 8. {why}. Pass "
                f"skip_layers={kept} for the same without this warning, or skip_layers=() for 8 bits in all layers",
                stacklevel=3,
            )
        else:
            reason = (
                "batch_invariant=True has no layer in 16 bits"
                if self.batch_invariant
                else "otherwise no layer would be"
            )
            warnings.warn(
                f"layers {ranges(self.losing)} of {name} lose accuracy in 8 bits. {why}. They stay in 8 bits: "
                f"{reason}. Use transformers' own cache (DynamicCache(config=model.config)), name layers to keep in 16 "
                f"bits (skip_layers=[...]), or pass skip_layers=() for the same without this warning",
                stacklevel=3,
            )
