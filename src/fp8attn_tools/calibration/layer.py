"""The observers of one layer's Q, K and V, and the scales that follow from them."""

from __future__ import annotations

import torch

from fp8attn.formats.codec import E4M3, Codec

from .moments import Moments
from .observer import Observer


class LayerObserver:
    """Observes Q, K and V of one layer, and computes scales and means.

    The means are of the tokens before `settle`. They do not change afterwards, whatever the tokens that follow: any
    constant may be subtracted.

    Args:
        keys: how the cache stores K.
        rotate_keys: whether the cache rotates K.
        means: False: all means are zero.
    """

    def __init__(self, keys: Codec, rotate_keys: bool, means: bool) -> None:
        self.means, self.settled = means, False
        self.moments = {"k": Moments(rotate_keys, rope=True), "v": Moments()}
        self.observers = {
            "q": Observer(keys, rotate_keys),
            "k": Observer(keys, rotate_keys, sampled=True),
            "v": Observer(E4M3, sampled=True),
        }

    def add(self, which: str, x: torch.Tensor) -> None:
        """Observe tokens `x [T, num_heads, head_dim]` of `"q"`, `"k"` or `"v"`."""
        if which in self.moments and not self.settled:
            self.moments[which].add(x)
        self.observers[which].add(x)

    def settle(self) -> None:
        """Compute the means from the tokens so far. A second call changes nothing."""
        if self.settled:
            return
        self.settled = True
        for which, moments in self.moments.items() if self.means else ():
            observer = self.observers[which]
            mean = moments.mean()
            observer.mean = mean if mean.any() else None
            observer.amax = moments.amax(mean)  # of the same tokens, without the mean

    @property
    def tokens(self) -> int:
        """Tokens that were observed."""
        return self.observers["k"].tokens

    def largest(self) -> dict[str, torch.Tensor]:
        """By name, a number on the device that is NaN or infinite if the tensor had such a value."""
        return {which: observer.amax.sum() for which, observer in self.observers.items() if observer.amax is not None}

    def results(self) -> dict[str, torch.Tensor]:
        """Scales, means, `k_offset [num_kv_heads]` (`Moments.offsets`), and `k_noise` and `v_noise` (`Observer.noise`),
        on the CPU. The first axis of each is the head."""
        results = {}
        for which, observer in self.observers.items():
            if observer.amax is None:  # a model whose attention cannot be observed: no Q
                continue
            scale = results[f"{which}_scale"] = observer.scale()
            if which in self.moments:
                low = self.moments[which].low
                assert low is not None
                mean = results[f"{which}_mean"] = torch.zeros_like(low) if observer.mean is None else observer.mean
                results[f"{which}_noise"] = observer.noise(scale)
                if which == "k":
                    results["k_offset"] = self.moments[which].offsets(mean)
        return {name: tensor.cpu() for name, tensor in results.items()}
