"""What a static scale depends on, gathered from one tensor of one layer: Q, K or V.

An `Observer` sees every token once, and keeps state of constant size.
"""

from __future__ import annotations

import torch

from fp8attn.formats.codec import MIN_SCALE, Codec

from .rotation import rotate_many

PIECE = 1 << 24  # elements that are processed at a time, which bounds the memory of intermediate results
SAMPLED = 1024  # tokens that are kept, at most, to measure the SQNR on


class Sample:
    """A bounded number of tokens, evenly over all that were seen: those whose number is a multiple of a stride that
    doubles when needed.
    """

    def __init__(self) -> None:
        self.kept: torch.Tensor | None = None  # [N, num_heads, head_dim], in the dtype of the tensor
        self.stride, self.seen = 1, 0

    def add(self, x: torch.Tensor) -> None:
        """See `x [T, num_heads, head_dim]`."""
        while self.seen + len(x) > self.stride * SAMPLED:
            self.stride *= 2
            self.kept = None if self.kept is None else self.kept[::2]
        new = x[-self.seen % self.stride :: self.stride]
        self.kept = new.clone() if self.kept is None else torch.cat([self.kept, new])
        self.seen += len(x)


class Observer:
    """The largest magnitude of each head, of one tensor as it is stored: without `mean`, rotated.

    Args:
        rotated: whether it is rotated before it is stored (`rotation.rotate`).
        sampled: keep a sample of the tokens, which `noise` needs.
    Attributes:
        mean: `[num_heads, head_dim]`, subtracted before the rotation; None: zero. Set it before the first `add`.
    """

    def __init__(self, codec: Codec, rotated: bool = False, *, sampled: bool = False) -> None:
        self.codec, self.rotated = codec, rotated
        self.sample = Sample() if sampled else None
        self.mean: torch.Tensor | None = None
        self.tokens = 0
        self.amax: torch.Tensor | None = None  # [num_heads] float32

    def add(self, x: torch.Tensor) -> None:
        """Count `x [T, num_heads, head_dim]`, without waiting for the device."""
        self.tokens += len(x)
        for piece in x.split(max(1, PIECE // x[0].numel())):
            amax = torch.linalg.vector_norm(self.stored(piece.transpose(0, 1)), torch.inf, (1, 2)).float()
            self.amax = amax if self.amax is None else torch.maximum(self.amax, amax)
        if self.sample is not None:
            self.sample.add(x)

    def stored(self, x: torch.Tensor) -> torch.Tensor:
        """`x [num_heads, T, head_dim]` as it is stored, before quantization: FP32 if it is not as given."""
        # Heads are first, as they are in the memory of one sequence's Q, K and V: then the rotation is one product,
        # without a copy.
        mean = None if self.mean is None else self.mean[:, None]
        if self.rotated:
            y = rotate_many(x)
            return y if mean is None else y - rotate_many(mean)
        return x if mean is None else x.float() - mean

    def scale(self) -> torch.Tensor:
        """The static scales `[num_heads]` float32, with which the largest magnitude is the largest code."""
        assert self.amax is not None
        return (self.amax / self.codec.max).clamp_min(MIN_SCALE)

    def noise(self, scale: torch.Tensor) -> torch.Tensor:
        """Sums of squares of the sample and of its errors with static scales as a cache stores them, `[num_heads, 2]`
        float64.
        """
        assert self.sample is not None and self.sample.kept is not None
        x = self.sample.kept.transpose(0, 1)
        y = self.stored(x).float()
        scale = self.codec.needed_scale(scale * self.codec.max)[:, None, None]
        error = self.codec.encode(y, 1.0 / scale) * scale - y
        return torch.stack([z.double().square().sum((1, 2)) for z in (x, error)], 1)  # the rotation keeps lengths
