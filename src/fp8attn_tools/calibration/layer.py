"""The observers of one layer's Q, K and V, and the scales that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp8attn.errors import UsageError
from fp8attn.formats.codec import DEFAULT_KEY_DTYPE, E4M3, KeyDtype, codec_of

from .moments import Moments
from .observer import METHODS, Method, Observer

# Q's histograms count one token of so many. Q has several times as many heads as K, and its scale is for other engines only, in E4M3, whose
# error hardly depends on the scale. The number is odd, so that it is not always the same token of a sequence.
QUERIES = 7


@dataclass(frozen=True)
class Options:
    """How scales are chosen, and how the cache will store K. `calibrate` describes them.

    Raises:
        UsageError: an unknown method or key_dtype; a percentile outside (0, 100].
    """

    method: Method = "absmax"
    percentile: float = 99.99
    key_dtype: KeyDtype = DEFAULT_KEY_DTYPE
    rotate_keys: bool = True
    means: bool = True

    def __post_init__(self) -> None:
        codec_of(self.key_dtype)  # raises UsageError
        if self.method not in METHODS:
            raise UsageError(f"method must be one of {METHODS}; got {self.method!r}")
        if not 0 < self.percentile <= 100:
            raise UsageError(f"percentile must be in (0, 100]; got {self.percentile}")

    @property
    def counted(self) -> bool:
        """Whether the method needs histograms."""
        return self.method != "absmax"

    def __str__(self) -> str:
        return f"percentile {self.percentile:g}" if self.method == "percentile" else self.method


class LayerObserver:
    """Observes Q, K and V of one layer, and computes scales and means.

    First `look` at the tokens that means are computed from, then `settle`, then `add` all other tokens. If `again` is then true, `forget`
    and `add` all tokens: a histogram counts `|x - mean|`, so it needs the mean first.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.moments = {"k": Moments(options.rotate_keys, rope=True), "v": Moments()}
        self._observe()

    def _observe(self) -> None:
        options = self.options
        keys = codec_of(options.key_dtype)
        every = int(options.counted)
        self.observers = {
            "q": Observer(keys, options.rotate_keys, counted=every * QUERIES),
            "k": Observer(keys, options.rotate_keys, counted=every, sampled=True),
            "v": Observer(E4M3, counted=every, sampled=True),
        }

    def look(self, which: str, x: torch.Tensor) -> None:
        """See tokens `x [T, num_heads, head_dim]` of `"q"`, `"k"` or `"v"` that means are computed from."""
        if which in self.moments:
            self.moments[which].add(x)
        self.observers[which].add(x)

    def add(self, which: str, x: torch.Tensor) -> None:
        """See tokens `x [T, num_heads, head_dim]` of `"q"`, `"k"` or `"v"`, after `settle`."""
        self.observers[which].add(x)

    def settle(self) -> None:
        """Compute the means. They do not change afterwards, whatever the tokens that follow: any constant may be subtracted."""
        if not self.options.means:
            return
        for which, moments in self.moments.items():
            observer = self.observers[which]
            mean = moments.mean()
            observer.mean = mean if mean.any() else None
            observer.amax = moments.amax(mean)  # `look` found it without the mean

    @property
    def again(self) -> bool:
        """Whether the tokens of `look` must be counted again: with histograms, if there is a mean. The largest `|x - mean|` follows from
        the extremes of channels, for any mean."""
        return self.options.counted and any(observer.mean is not None for observer in self.observers.values())

    def forget(self) -> None:
        """Forget all tokens, but not the means."""
        means = {which: observer.mean for which, observer in self.observers.items()}
        self._observe()
        for which, observer in self.observers.items():
            observer.mean = means[which]

    @property
    def tokens(self) -> int:
        """Tokens that were counted."""
        return self.observers["k"].tokens

    def largest(self) -> dict[str, torch.Tensor]:
        """By name, a number on the device that is NaN or infinite if the tensor had such a value."""
        return {which: observer.amax.sum() for which, observer in self.observers.items() if observer.amax is not None}

    def results(self) -> dict[str, torch.Tensor]:
        """Scales, means, `k_offset [num_kv_heads]` (`Moments.offsets`), and `k_noise` and `v_noise` (`Observer.noise`), on the CPU. The
        first axis of each is the head."""
        results = {}
        for which, observer in self.observers.items():
            if observer.amax is None:  # a model whose attention cannot be observed: no Q
                continue
            scale = results[f"{which}_scale"] = observer.scale(self.options.method, self.options.percentile)
            if which in self.moments:
                low = self.moments[which].low
                assert low is not None
                mean = results[f"{which}_mean"] = torch.zeros_like(low) if observer.mean is None else observer.mean
                results[f"{which}_noise"] = observer.noise(scale)
                if which == "k":
                    results["k_offset"] = self.moments[which].offsets(mean)
        return {name: tensor.cpu() for name, tensor in results.items()}
