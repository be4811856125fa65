"""What a static scale depends on, gathered from one tensor of one layer: Q, K or V.

An `Observer` sees every token once, and keeps state of constant size. Its heads are independent, so processes that have different heads
(tensor parallel) concatenate their results. Processes that have different text (data parallel) merge their states.
"""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

import torch
import torch.distributed as dist

from fp8attn.formats.codec import MIN_SCALE, Codec

from .histogram import Histogram
from .mergeable import Mergeable, Operation, select
from .rotation import rotate_many

Method = Literal["absmax", "percentile", "mse"]
METHODS: tuple[Method, ...] = get_args(Method)
PIECE = 1 << 24  # elements that are processed at a time, which bounds the memory of intermediate results
SAMPLED = 1024  # tokens that are kept, at most, to measure the SQNR on


class Sample:
    """A bounded number of tokens, evenly over all that were seen: those whose number is a multiple of a stride that doubles when needed."""

    def __init__(self) -> None:
        self.kept: torch.Tensor | None = None  # [N, num_heads, head_dim], in the dtype of the tensor
        self.stride, self.seen = 1, 0

    def add(self, x: torch.Tensor) -> None:
        """See `x [T, num_heads, head_dim]`."""
        while self.seen + len(x) > self.stride * SAMPLED:
            self.stride *= 2
            self.kept = None if self.kept is None else self.kept[::2]
        new = x[-self.seen % self.stride :: self.stride]
        self.kept = new.clone() if self.kept is None else torch.cat([self.kept.to(new.device), new])
        self.seen += len(x)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The tensors by name."""
        return {} if self.kept is None else {"kept": self.kept, "place": torch.tensor([self.stride, self.seen])}

    def load_state_dict(self, tensors: dict[str, torch.Tensor], device: torch.device | str = "cpu") -> None:
        """Continue from the tensors of `state_dict`."""
        if tensors:
            self.kept = tensors["kept"].to(device)
            self.stride, self.seen = tensors["place"].tolist()


class Observer(Mergeable):
    """Largest magnitudes, and with `counted` a histogram of all magnitudes, of one tensor as it is stored: without `mean`, rotated.

    Args:
        codec: how it is stored.
        rotated: whether it is rotated before it is stored (`rotation.rotate`).
        counted: keep a histogram of one token of so many, which the methods "percentile" and "mse" need; 0: none.
        sampled: keep a sample of the tokens, which `noise` needs.
    Attributes:
        mean: `[num_heads, head_dim]`, subtracted before the rotation; None: zero. Set it before the first `add`.
        tokens: number of tokens seen.
    """

    STATE: ClassVar[dict[str, Operation]] = {"tokens": "sum", "amax": "max"}

    def __init__(self, codec: Codec, rotated: bool = False, *, counted: int = 0, sampled: bool = False) -> None:
        self.codec, self.rotated = codec, rotated
        self.histogram = Histogram(counted) if counted else None
        self.sample = Sample() if sampled else None
        self.mean: torch.Tensor | None = None
        self.tokens: torch.Tensor | None = None  # int64
        self.amax: torch.Tensor | None = None  # [num_heads] float32

    def add(self, x: torch.Tensor) -> None:
        """Count `x [T, num_heads, head_dim]`, without waiting for the device."""
        new = Observer(self.codec)
        new.tokens = torch.full((), len(x), dtype=torch.int64, device=x.device)
        for piece in x.split(max(1, PIECE // x[0].numel())):
            y = self.stored(piece.transpose(0, 1))
            amax = torch.linalg.vector_norm(y, torch.inf, (1, 2)).float()
            new.amax = amax if new.amax is None else torch.maximum(new.amax, amax)
            if self.histogram is not None:
                self.histogram.add(y)
        self.merge(new)
        if self.sample is not None:
            self.sample.add(x)

    def stored(self, x: torch.Tensor) -> torch.Tensor:
        """`x [num_heads, T, head_dim]` as it is stored, before quantization: FP32 if it is not as given."""
        # Heads are first, as they are in the memory of one sequence's Q, K and V: then the rotation is one product, without a copy.
        mean = None if self.mean is None else self.mean.to(x.device)[:, None]  # after loading, the device may be another one
        if self.rotated:
            y = rotate_many(x)
            return y if mean is None else y - rotate_many(mean)
        return x if mean is None else x.float() - mean

    def merge(self, other: Observer) -> None:
        """Add what another observer of the same heads has seen. Samples are not merged."""
        super().merge(other)
        if self.histogram is not None and other.histogram is not None:
            self.histogram.merge(other.histogram)

    def all_reduce(self, group: dist.ProcessGroup) -> None:
        """Merge the observers of all processes of a group, except samples."""
        super().all_reduce(group)
        if self.histogram is not None:
            self.histogram.all_reduce(group)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The tensors by name."""
        parts = {"histogram": self.histogram, "sample": self.sample}
        inner = {f"{name}.{key}": x for name, part in parts.items() if part is not None for key, x in part.state_dict().items()}
        return super().state_dict() | inner | ({} if self.mean is None else {"mean": self.mean})

    def load_state_dict(self, tensors: dict[str, torch.Tensor], device: torch.device | str = "cpu") -> None:
        """Continue from the tensors of `state_dict`."""
        super().load_state_dict(tensors, device)
        self.mean = tensors["mean"].to(device) if "mean" in tensors else None
        for name, part in (("histogram", self.histogram), ("sample", self.sample)):
            if part is not None:
                part.load_state_dict(select(tensors, name), device)

    def scale(self, method: Method, percentile: float) -> torch.Tensor:
        """The static scales `[num_heads]` float32 by a method."""
        assert self.amax is not None
        top = self.codec.max
        if method == "absmax":
            scale = self.amax / top
        else:
            assert self.histogram is not None
            if method == "percentile":
                scale = torch.minimum(self.histogram.quantile(percentile / 100), self.amax) / top
            else:
                scale = self.histogram.best_scale(self.amax, self.codec)
        return scale.clamp_min(MIN_SCALE)

    def noise(self, scale: torch.Tensor) -> torch.Tensor:
        """Sums of squares of the sample and of its errors with static scales as a cache stores them, `[num_heads, 2]` float64."""
        assert self.sample is not None and self.sample.kept is not None
        x = self.sample.kept.transpose(0, 1)
        y = self.stored(x).float()
        scale = self.codec.needed_scale(scale * self.codec.max)[:, None, None]
        error = self.codec.encode(y, 1.0 / scale) * scale - y
        return torch.stack([z.double().square().sum((1, 2)) for z in (x, error)], 1)  # the rotation keeps lengths
