"""Statistics of K and V that calibration gathers: per channel sums and extremes, per head histograms of magnitudes.

Static means follow from the sums. With a mean, the largest `|x - mean|` of a head is exact without a second pass, because it is at the
minimum or the maximum of one of the channels. A percentile needs a second pass, which counts `|x - mean|` into bins.
"""

from __future__ import annotations

import torch

from .numerics import E4M3, INT8_MAX, encode, needed_scale, on_grid, sqnr_db
from .rotation import rotate
from .scales import SEVERAL

SAMPLED_TOKENS = 1024  # of each layer, kept to measure the SQNR on
# RoPE rotates an offset by an angle of 2 a over a text; its mean is then sin(a) / a of its size. If tan(a) < 2 a, that is a < 1.166, no
# token is farther from the mean than from zero, so subtracting the mean makes no page's scale larger. There the mean's square is at least
# this share of the offset's.
MIN_SHARE_OF_OFFSET = 0.62


class Range:
    """Sums of powers, minimum, maximum and a small sample of the tokens of one tensor.

    Args:
        dtype: the 8-bit dtype that it is stored in.
        rotated: whether it is rotated before it is stored (`rotation.rotate`).
        rope: whether RoPE has been applied to it.
    """

    def __init__(self, dtype: torch.dtype, rotated: bool = False, rope: bool = False) -> None:
        self.dtype, self.rotated, self.rope = dtype, rotated, rope
        self.largest_code = INT8_MAX if dtype == torch.int8 else E4M3.max
        self.count = 0  # tokens; the other sums exist once it is not zero
        self._low: torch.Tensor
        self._high: torch.Tensor
        self._sums: list[torch.Tensor]
        self._given: torch.dtype
        self._mean: torch.Tensor | None = None
        self._sample: list[torch.Tensor] = []

    def add(self, x: torch.Tensor, sampled: int, name: str) -> None:
        """Count `x [T, num_heads, head_dim]`, and keep up to `sampled` of its tokens in the sample.

        Raises:
            ValueError: x has NaN or Inf; the message begins with `name`.
        """
        if not len(x):
            return
        self._given, x = x.dtype, x.float()
        self._mean = None
        y = self._stored(x)
        low, high = y.amin(0), y.amax(0)
        wide = x.double()
        sums = [wide.sum(0), wide.square().sum(0)]
        for a, b in _pairings(wide) if self.rope else ():
            power = a.square() + b.square()
            sums += [power.sum(0), power.square().sum(0)]
        if not torch.isfinite(sums[0]).all():
            raise ValueError(f"{name} has NaN or Inf; run the model in bfloat16 or float32 (float16 overflows at 65504)")
        if self.count:
            low, high = torch.minimum(low, self._low), torch.maximum(high, self._high)
            sums = [new + old for new, old in zip(sums, self._sums, strict=True)]
        self._low, self._high, self._sums = low, high, sums
        self.count += len(x)
        wanted = min(sampled, SAMPLED_TOKENS - sum(map(len, self._sample)), len(x))
        self._sample.append(x[torch.arange(wanted, device=x.device) * len(x) // max(wanted, 1)])

    def _stored(self, x: torch.Tensor) -> torch.Tensor:
        return rotate(x) if self.rotated else x

    @property
    def mean(self) -> torch.Tensor:
        """The static mean `[num_heads, head_dim]` float32, before the rotation. It is zero in channels whose mean is less than several
        deviations, and in pairs that RoPE rotates too far."""
        if self._mean is None:
            mean, square = (total / self.count for total in self._sums[:2])
            variance = (square - mean.square()).clamp_min(0)
            if self.rope:
                both = []  # for each convention: variance, offset and mean of the pair that each channel is in
                for (offset, noise), (a, b), spread in zip(self._offsets(), _pairings(mean), _SPREAD, strict=True):
                    both.append(torch.stack([spread(y) for y in (noise, offset, a.square() + b.square())]))
                found = torch.where(both[0][:1] <= both[1][:1], *both)
                variance = torch.minimum(variance, found[0])  # RoPE makes an offset look like variance
                mean = torch.where(found[2] >= MIN_SHARE_OF_OFFSET * found[1], mean, 0.0)
            mean = torch.where(mean.abs() >= SEVERAL * variance.sqrt(), mean, 0.0)
            mean = mean.float()
            self._mean = mean if self.rotated else on_grid(mean, torch.maximum(self._high, -self._low), self._given)
        return self._mean

    @property
    def amax(self) -> torch.Tensor:
        """`[num_heads]`: the largest stored magnitude of each head, exactly."""
        mean = self._stored(self.mean)
        return torch.maximum(self._high - mean, mean - self._low).amax(1)

    def centered(self, x: torch.Tensor) -> torch.Tensor:
        """`x [T, num_heads, head_dim]` as it is stored, before quantization."""
        return self._stored(x.float()) - self._stored(self.mean)

    def offset(self) -> float:
        """The largest offset of a pair of channels that remains after subtracting `mean`, in deviations."""
        largest = 0.0
        for (offset, noise), (a, b) in zip(self._offsets(), _pairings(self.mean.double()), strict=True):
            left = (offset - a.square() - b.square()).clamp_min(0)
            largest = max(largest, float((left / noise.clamp_min(1e-6 * offset)).nan_to_num(0.0).max().sqrt()))
        return largest

    def _offsets(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The squared offset and the variance of each pair of channels, `[num_heads, head_dim / 2]`, for both conventions of pairs.

        RoPE keeps the length r of a pair. Let the pair be an offset b plus noise of deviation s in both channels, rotated by any angle.
        Then `E[r^2] = b^2 + 2 s^2` and `Var[r^2] = 4 s^2 b^2 + 4 s^4`, which give b and s.
        """
        found = []
        for total, total_of_squares in (self._sums[2:4], self._sums[4:6]):
            square = total / self.count
            spread = (total_of_squares / self.count - square.square()).clamp_min(0)
            noise = (square - (square.square() - spread).clamp_min(0).sqrt()) / 2
            found.append((square - 2 * noise, noise))
        return found

    def sqnr_db(self, scale: torch.Tensor) -> float:
        """Signal to quantization-noise ratio of the sample with static scales `[num_heads]`, in dB; infinite if nothing is lost."""
        x, mean = self._stored(torch.cat(self._sample)), self._stored(self.mean)
        scale = needed_scale(scale * self.largest_code, self.dtype)[:, None]
        return sqnr_db(encode(x - mean, 1.0 / scale, self.dtype) * scale + mean, x)


# From one value per pair to one per channel, for each convention of `_pairings`.
_SPREAD = (lambda x: torch.cat([x, x], -1), lambda x: x.repeat_interleave(2, -1))


def _pairings(x: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """The channels of `x [..., head_dim]` in pairs: half of head_dim apart (NeoX, Llama), and neighbors (GPT-J)."""
    half = x.shape[-1] // 2
    return (x[..., :half], x[..., half:]), (x[..., ::2], x[..., 1::2])


class Histogram:
    """Counts of magnitudes per head, in 512 bins per octave, from the maximum down to 2^-16 of it. The last bin has all smaller values.

    The bits of a positive float, read as an integer, grow with it. So their upper part is the number of a bin, without a logarithm.
    """

    SHIFT = 23 - 9  # keeps 9 bits of the mantissa
    OCTAVES = 16

    def __init__(self, amax: torch.Tensor) -> None:
        self._amax = amax
        self._bins = self.OCTAVES << 9
        self._last = amax.view(torch.int32) >> self.SHIFT  # [num_heads]: the maximum's bin
        self._counts = torch.zeros(len(amax), self._bins, dtype=torch.int64, device=amax.device)

    def add(self, x: torch.Tensor) -> None:
        """Count `x [T, num_heads, head_dim]`."""
        bits = x.abs().contiguous().view(torch.int32) >> self.SHIFT
        below = (self._last[:, None] - bits).clamp(0, self._bins - 1).transpose(0, 1).flatten(1)  # [num_heads, T * head_dim]
        self._counts += torch.stack([torch.bincount(head, minlength=self._bins) for head in below])

    def quantile(self, q: float) -> torch.Tensor:
        """`[num_heads]`: the upper end of the smallest bin that at least a share `q` of the values does not exceed."""
        above = self._counts.cumsum(1)  # [num_heads, bins], from the maximum downwards
        total = above[:, -1:]
        allowed = total - torch.ceil(q * total.double()).long()  # how many may be larger
        below = (above <= allowed).sum(1, dtype=torch.int32).clamp_max(self._bins - 1)
        edge = ((self._last - below + 1).clamp_min(0) << self.SHIFT).view(torch.float32)
        return torch.minimum(edge, self._amax)
