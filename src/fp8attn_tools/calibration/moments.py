"""Sums and extremes of the channels of K or V, from which static means follow."""

from __future__ import annotations

import torch

from fp8attn.scales import SEVERAL

from .rotation import rotate_many

# RoPE rotates an offset by an angle of 2 a over a text; its mean is then sin(a) / a of its size. If tan(a) < 2 a, that
# is a < 1.166, no token is farther from the mean than from zero, so subtracting the mean makes no page's scale larger.
# There the mean's square is at least this share of the offset's.
MIN_SHARE_OF_OFFSET = 0.62
# From one value per pair to one per channel, for each convention of `_pairings`.
_SPREAD = (lambda x: torch.cat([x, x], -1), lambda x: x.repeat_interleave(2, -1))


class Moments:
    """Sums of powers, minimum and maximum of each channel.

    Args:
        rotated: whether the tensor is rotated before it is stored (`rotation.rotate`).
        rope: whether RoPE has been applied to it. Then the sums of pairs of channels are kept, too.
    """

    def __init__(self, rotated: bool = False, rope: bool = False) -> None:
        self.rotated, self.rope = rotated, rope
        self.count = 0  # tokens
        self.sums: torch.Tensor | None = (
            None  # [6 or 2, num_heads, head_dim] float64; pairs are repeated for both of their channels
        )
        self.low: torch.Tensor | None = None  # [num_heads, head_dim] float32, as the tensor is stored
        self.high: torch.Tensor | None = None
        self.given = torch.float32  # dtype of the tensor

    def add(self, x: torch.Tensor) -> None:
        """Count `x [T, num_heads, head_dim]`.

        Products are rounded to FP32, and summed in float64 without a copy in float64. A product of two BF16 numbers is
        exact in FP32.
        """
        self.given = x.dtype
        x = x.float()
        stored = rotate_many(x) if self.rotated else x
        low, high = stored.amin(0), stored.amax(0)
        square = x.square()
        sums = [x.sum(0, dtype=torch.float64), square.sum(0, dtype=torch.float64)]
        for (a, b), spread in zip(_pairings(square), _SPREAD, strict=True) if self.rope else ():
            power = a + b
            sums += [spread(power.sum(0, dtype=torch.float64)), spread(power.square_().sum(0, dtype=torch.float64))]
        self.count += len(x)
        self.sums = torch.stack(sums) if self.sums is None else self.sums + torch.stack(sums)
        self.low = low if self.low is None else torch.minimum(self.low, low)
        self.high = high if self.high is None else torch.maximum(self.high, high)

    def mean(self) -> torch.Tensor:
        """The static mean `[num_heads, head_dim]` float32, before the rotation. It is zero in channels whose mean is
        less than several deviations, and in pairs that RoPE rotates too far."""
        assert self.sums is not None and self.low is not None and self.high is not None
        mean, square = self.sums[0] / self.count, self.sums[1] / self.count
        variance = (square - mean.square()).clamp_min(0)
        if self.rope:
            # for each convention: variance, squared offset and squared mean of the pair that each channel is in
            both = []
            for (offset, noise), (a, b), spread in zip(self._offsets(), _pairings(mean), _SPREAD, strict=True):
                both.append(torch.stack([noise, offset, spread(a.square() + b.square())]))
            found = torch.where(both[0][:1] <= both[1][:1], *both)
            variance = torch.minimum(variance, found[0])  # RoPE makes an offset look like variance
            mean = torch.where(found[2] >= MIN_SHARE_OF_OFFSET * found[1], mean, 0.0)
        mean = torch.where(mean.abs() >= SEVERAL * variance.sqrt(), mean, 0.0).float()
        return mean if self.rotated else on_grid(mean, torch.maximum(self.high, -self.low), self.given)

    def amax(self, mean: torch.Tensor) -> torch.Tensor:
        """`[num_heads]`: the largest stored magnitude of each head after subtracting `mean`, exactly: it is at the
        minimum or the maximum of one of the channels."""
        assert self.low is not None and self.high is not None
        mean = rotate_many(mean) if self.rotated else mean
        return torch.maximum(self.high - mean, mean - self.low).amax(1)

    def offsets(self, mean: torch.Tensor) -> torch.Tensor:
        """`[num_heads]`: the largest offset of a pair of channels that remains after subtracting `mean`,
        in deviations.
        """
        largest = []
        for (offset, noise), (a, b), spread in zip(self._offsets(), _pairings(mean.double()), _SPREAD, strict=True):
            left = (offset - spread(a.square() + b.square())).clamp_min(0)
            largest.append((left / noise.clamp_min(1e-6 * offset)).nan_to_num(0.0).amax(1).sqrt())
        return torch.maximum(*largest)

    def _offsets(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The squared offset and the variance of the pair of each channel, `[num_heads, head_dim]`, for both
        conventions of pairs.

        RoPE keeps the length r of a pair. Let the pair be an offset b plus noise of deviation s in both channels,
        rotated by any angle. Then `E[r^2] = b^2 + 2 s^2` and `Var[r^2] = 4 s^2 b^2 + 4 s^4`, which give b and s.
        """
        assert self.sums is not None
        found = []
        for total, total_of_squares in (self.sums[2:4], self.sums[4:6]):
            square = total / self.count
            spread = (total_of_squares / self.count - square.square()).clamp_min(0)
            noise = (square - (square.square() - spread).clamp_min(0).sqrt()) / 2
            found.append((square - 2 * noise, noise))
        return found


def _pairings(x: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """The channels of `x [..., head_dim]` in pairs: half of head_dim apart (NeoX, Llama), and neighbors (GPT-J)."""
    half = x.shape[-1] // 2
    return (x[..., :half], x[..., half:]), (x[..., ::2], x[..., 1::2])


def on_grid(mean: torch.Tensor, amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`mean` rounded to a multiple of the ulp (the spacing of numbers) of `dtype` at `amax`, the largest magnitude of
    the input.

    One BF16 number in 16 is halfway between two FP8 numbers. Such ties round to even, up as often as down. After the
    subtraction of a multiple of the ulp they still do. After the subtraction of any other number, they all round the
    same way. For V this is a bias of 0.001 standard deviations in every output, and averaging over keys does not remove
    it.
    """
    if dtype == torch.float32:
        return mean  # the input's ulp is the mean's ulp
    magic = binade(amax) * (1.5 * 2.0**23 * torch.finfo(dtype).eps)  # the last bit of numbers of this size is the ulp
    return (mean + magic) - magic


def binade(x: torch.Tensor) -> torch.Tensor:
    """The power of two at or below each `x >= 0` in FP32; 0 for subnormals."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)
