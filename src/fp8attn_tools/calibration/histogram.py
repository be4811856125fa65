"""A histogram of magnitudes over the whole range of floating point, and the scales that follow from it.

A magnitude is rounded to BF16 and counted under its bits, of which there are 2^15. So the range needs no first pass, histograms of any two
texts have the same bins, and no value of a BF16 tensor is changed. A bin is 2^-8 to 2^-7 of its values wide.
"""

from __future__ import annotations

from functools import cache

import torch

from fp8attn.formats.codec import E4M3, Codec

BINS = 1 << 15
INFINITE = 0x7F80  # the bin of infinity; NaN is above
WINDOW = 32 * 128  # bins of 32 octaves
TOGETHER = 16  # scales whose errors are computed together: a GPU waits for the launches of fewer
COARSE, FINE, OCTAVES = 8, 64, 16  # scales that are tried for each octave: first, then near the best; and how far below the maximum


class Histogram:
    """Counts of the magnitudes of each head.

    Args:
        every: count one token of so many. The shares stay, and so do quantiles and the least error, but for the chance of which tokens.
    """

    def __init__(self, every: int = 1) -> None:
        self.every, self.seen = every, 0  # tokens
        self.counts: torch.Tensor | None = None  # [num_heads, BINS] int64

    def add(self, x: torch.Tensor) -> None:
        """Count `x [num_heads, T, head_dim]`, without waiting for the device."""
        heads = len(x)
        if self.counts is None:
            self.counts = torch.zeros(heads, BINS, dtype=torch.int64, device=x.device)
        begin, self.seen = -self.seen % self.every, self.seen + x.shape[1]
        bins = (x[:, begin :: self.every].bfloat16().reshape(heads, -1).view(torch.int16) & (BINS - 1)).long()
        new = torch.zeros_like(self.counts, dtype=torch.int32)  # torch's atomic additions of int64 are slow: a loop of comparisons
        self.counts += new.scatter_add_(1, bins, new.new_ones(()).expand_as(bins))

    def quantile(self, q: float) -> torch.Tensor:
        """`[num_heads]` float32: the upper end of the smallest bin that at least a share `q` of the values does not exceed."""
        assert self.counts is not None
        sums = self.counts.cumsum(1)
        needed = torch.ceil(q * sums[:, -1:].double()).long()
        found = (sums < needed).sum(1).clamp_max(BINS - 1)
        return _edges().to(found.device)[found + 1].float()

    def best_scale(self, amax: torch.Tensor, codec: Codec) -> torch.Tensor:
        """The scales that minimize the mean squared error of rounding and saturation (`squared_error`).

        The error has many local minima. So scales over 16 octaves below the one without saturation are compared, 8 for each octave; then 64
        for each octave around the best. The first comparison merges 8 bins into one.

        Args:
            amax: `[num_heads]`, the largest magnitudes.
            codec: of the values.
        Returns:
            `[num_heads]` float32.
        """
        top = amax.double() / codec.max
        octaves = torch.arange(COARSE * OCTAVES + 1, device=amax.device, dtype=torch.float64).expand(len(top), -1) / COARSE
        best = self._least(top, octaves, codec, 8)
        near = torch.arange(-FINE // COARSE, FINE // COARSE + 1, device=amax.device, dtype=torch.float64) / FINE
        best = self._least(top, (best[:, None] + near).clamp_min(0), codec, 1)  # not above the scale without saturation
        return (top * 2.0**-best).float()

    def _least(self, top: torch.Tensor, octaves: torch.Tensor, codec: Codec, merged: int) -> torch.Tensor:
        """Which of the `octaves [num_heads, N]` below the scales `top [num_heads]` has the least error, `[num_heads]`."""
        counts, edges = self._window(merged)
        errors = [_error_of(counts[:, None], edges[:, None], top[:, None] * 2.0**-some, codec) for some in octaves.split(TOGETHER, 1)]
        return octaves.gather(1, torch.cat(errors, 1).argmin(1, keepdim=True))[:, 0]

    def squared_error(self, scale: torch.Tensor, codec: Codec) -> torch.Tensor:
        """The sum of the squared errors of all values with static scales, `[num_heads]` float64.

        It is the exact integral for values that are spread evenly over each bin. Values of less than 2^-31 of the largest are left out.

        Args:
            scale: `[num_heads]`, positive; of zero only where all values are zero.
            codec: of the values.
        """
        return _error_of(*self._window(1), scale, codec)

    def _window(self, merged: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The counts of the 32 octaves up to each head's largest value, `[num_heads, N]` float64, and the ends of their bins,
        `[num_heads, N + 1]`. Each covers `merged` bins of the histogram."""
        assert self.counts is not None
        used = (self.counts[:, :INFINITE] > 0) * torch.arange(INFINITE, device=self.counts.device)
        first = (used.amax(1) // merged * merged + merged - WINDOW).clamp(merged, INFINITE - WINDOW)[:, None]
        offsets = torch.arange(WINDOW + 1, device=self.counts.device)
        counts = self.counts.gather(1, first + offsets[:-1]).unflatten(1, (-1, merged)).sum(2)
        return counts.double(), _edges().to(self.counts.device)[first + offsets[::merged]]


def _error_of(counts: torch.Tensor, edges: torch.Tensor, scale: torch.Tensor, codec: Codec) -> torch.Tensor:
    """The sum of the squared errors of `counts [..., N]` values that are spread evenly between `edges [..., N + 1]`."""
    scale = scale.double().clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    integral = _error_integral(edges / scale, codec) * scale**3
    return (counts * (integral.diff() / edges.diff())).sum(-1)


@cache
def _edges() -> torch.Tensor:
    """`[BINS + 1]` float64: the lower ends of the bins, halfway between neighboring BF16 numbers."""
    values = (torch.arange(INFINITE, dtype=torch.int32) << 16).view(torch.float32).double()
    values = torch.cat([values, values.new_tensor([2.0**128])])  # what the next BF16 number would be
    edges = torch.cat([values.new_zeros(1), (values[1:] + values[:-1]) / 2])
    return torch.cat([edges, values.new_full((BINS + 1 - len(edges),), torch.inf)])


def _error_integral(t: torch.Tensor, codec: Codec) -> torch.Tensor:
    """`integral of (u - round(u))^2 du from 0 to t`, for the codes of `codec`; t is float64 and >= 0.

    In an interval of equally spaced codes u that begins at a code, n whole steps and a rest r (in steps, from the nearest code) have the
    integral `u^3 (n / 12 + r^3 / 3)`. Above the largest code r is not bounded: that is saturation.
    """
    if codec.is_integer:
        code = (t + 0.5).floor().clamp_max(codec.max)
        return code / 12 + (t - code) ** 3 / 3
    # E4M3 has 8 steps of 2^(e-3) in each octave [2^e, 2^(e+1)), and 8 subnormal steps of 2^-9 below 2^-6, as if in an octave of e = -7.
    e = (torch.frexp(t).exponent - 1).clamp(-7, E4M3.max_exponent).double()
    normal = e >= -6
    step = 2.0 ** (torch.where(normal, e, -6.0) - 3)
    start = torch.where(normal, 2.0**e, 0.0)
    below = torch.where(normal, 2.0**-27 + (8.0**e - 8.0**-6) / 7 / 512, 0.0) * (8 / 12)  # the octaves below this one
    code = ((t - start) / step + 0.5).floor()
    code = torch.minimum(code, torch.where(e == E4M3.max_exponent, 6.0, 8.0))  # 448 is 6 steps above 256
    return below + step**3 * (code / 12 + ((t - start) / step - code) ** 3 / 3)
