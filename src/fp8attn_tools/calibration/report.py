"""How well static scales cover a text: which values saturate, and which are rounded to zero, of each layer and head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fp8attn.errors import UsageError
from fp8attn.formats.codec import E4M3, Codec, Float, codec_of
from fp8attn.scales import LayerScales, ranges

from .observer import PIECE, Observer

# A scale of `amax / 127` times 127 may be less than amax by a rounding error. Such values are not counted as saturated.
TOLERANCE = 1 + 2.0**-20


@dataclass(frozen=True, eq=False)
class Coverage:
    """Shares of all values of one tensor (Q, K or V of a layer), `[num_heads]` float64 each.

    Attributes:
        saturated: values whose magnitude is larger than the scale times the largest code (448 for E4M3, 127 for INT8).
        underflow: values other than zero that round to zero: magnitudes of at most 2^-10 times the scale for E4M3, half
            the scale for INT8.
    """

    saturated: torch.Tensor
    underflow: torch.Tensor


@dataclass(frozen=True)
class Worst:
    """The head of a layer's tensor where most values saturate, or most are rounded to zero."""

    layer: int
    tensor: str
    head: int
    saturated: float
    underflow: float


@dataclass(frozen=True, eq=False, repr=False)
class ScalesReport:
    """How well static scales cover a text that they were not made from.

    The scales are taken as they are. A cache of fp8attn rounds scales of E4M3 up to powers of two, so fewer values
    saturate in it.

    Attributes:
        layers: by layer index and tensor (`"q"`, `"k"`, `"v"`), the `Coverage`. Q is absent if the scales have none, or
            the model's attention cannot be observed.
    """

    layers: Mapping[int, Mapping[str, Coverage]]
    tokens: int

    def __repr__(self) -> str:
        (most,) = self.worst(1)
        return (
            f"ScalesReport(layers {ranges(self.layers)}, {self.tokens} tokens, at most {most.saturated:.2%} of a head "
            f"saturated: {most.tensor.upper()} of layer {most.layer}, head {most.head})"
        )

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensors that were observed, in the order K, V, Q."""
        return tuple(which for which in "kvq" if any(which in found for found in self.layers.values()))

    def map(self, tensor: str, what: str) -> torch.Tensor:
        """The shares of all layers and heads, `[layers, num_heads]` float64, in the order of `layers`."""
        return torch.stack([getattr(found[tensor], what) for found in self.layers.values()])

    def rows(self) -> list[dict[str, Any]]:
        """One entry for each layer and tensor, for JSON."""
        return [
            {
                "layer": layer,
                "tensor": tensor,
                "saturated": coverage.saturated.tolist(),
                "underflow": coverage.underflow.tolist(),
            }
            for layer, found in self.layers.items()
            for tensor, coverage in found.items()
        ]

    def worst(self, count: int, what: str = "saturated") -> list[Worst]:
        """The `count` heads, of any layer and tensor, with the largest shares of saturated values or of underflow."""
        heads = [
            Worst(layer, tensor, head, float(coverage.saturated[head]), float(coverage.underflow[head]))
            for layer, found in self.layers.items()
            for tensor, coverage in found.items()
            for head in range(len(coverage.saturated))
        ]
        return sorted(heads, key=lambda head: -getattr(head, what))[:count]


class Counter:
    """Counts saturated values and underflow of one tensor with static scales.

    Args:
        scale: `[num_heads]`.
        mean: `[num_heads, head_dim]`; None: zero.
        codec, rotated: as `Observer` takes them.
    """

    def __init__(self, scale: torch.Tensor, mean: torch.Tensor | None, codec: Codec, rotated: bool) -> None:
        self._as_stored = Observer(codec, rotated)
        self._mean = mean if mean is not None and mean.any() else None
        self._limit = scale * codec.max * TOLERANCE
        self._least = scale * (codec.smallest_subnormal / 2 if isinstance(codec, Float) else 0.5)
        self.counts: torch.Tensor | None = None  # [3, num_heads] int64: all values, saturated ones, underflow

    def add(self, x: torch.Tensor) -> None:
        """Count `x [T, num_heads, head_dim]`, without waiting for the device.

        Raises:
            UsageError: another number of heads than the scales have.
        """
        if x.shape[1] != len(self._limit):
            raise UsageError(
                f"the scales have {len(self._limit)} heads, and the model has {x.shape[1]} in this process; pass the "
                f"scales of this model, and a model whose heads are not divided over processes"
            )
        if self.counts is None:
            self._limit, self._least = (y.to(x.device)[:, None, None] for y in (self._limit, self._least))
            self._as_stored.mean = None if self._mean is None else self._mean.to(x.device)
        for piece in x.split(max(1, PIECE // x[0].numel())):
            size = self._as_stored.stored(piece.transpose(0, 1)).abs()
            saturated = (size > self._limit).sum((1, 2))
            underflow = ((size <= self._least) & (size > 0)).sum((1, 2))
            counts = torch.stack([torch.full_like(saturated, size[0].numel()), saturated, underflow])
            self.counts = counts if self.counts is None else self.counts + counts

    def coverage(self) -> Coverage:
        """The shares of what was counted."""
        assert self.counts is not None
        values, saturated, underflow = self.counts.cpu().double()
        return Coverage(saturated / values, underflow / values)


def counters(scales: LayerScales) -> dict[str, Counter]:
    """The `Counter`s of a layer with these scales: K and V, and Q if they have a `q_scale`."""
    keys = codec_of(scales.key_dtype)
    found = {
        "k": Counter(scales.k_scale, scales.k_mean, keys, scales.rotate_keys),
        "v": Counter(scales.v_scale, scales.v_mean, E4M3, False),
    }
    if scales.q_scale is not None:
        found["q"] = Counter(scales.q_scale, None, keys, scales.rotate_keys)
    return found
