"""Statistics of two caches on the same samples: Wilson's interval, Newcombe's interval for paired shares, McNemar's
exact test.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fp8attn.errors import UsageError

from .outcomes import Outcome

Z95 = 1.959963984540054  # the 97.5% point of the normal distribution, for 95% intervals


@dataclass(frozen=True)
class Paired:
    """Two caches compared on the samples that both answered.

    Attributes:
        both, only_first, only_second, neither: the number of samples that these had right (every answer found).
        difference: the second's share of right samples minus the first's; `interval`: its 95% interval (Newcombe 1998,
            method 10).
        p: the p-value of McNemar's exact two-sided test of equal shares.
        discordant: the outcomes (the first's, the second's) of the samples that only one had right.
    """

    first: str
    second: str
    both: int
    only_first: int
    only_second: int
    neither: int
    difference: float
    interval: tuple[float, float]
    p: float
    discordant: tuple[tuple[Outcome, Outcome], ...]

    @property
    def samples(self) -> int:
        """The number of samples."""
        return self.both + self.only_first + self.only_second + self.neither


def wilson(right: int, samples: int) -> tuple[float, float]:
    """The 95% interval of a share of `right` in `samples` (Wilson 1927)."""
    share, square = right / samples, Z95 * Z95
    center = (share + square / (2 * samples)) / (1 + square / samples)
    half = Z95 * math.sqrt(share * (1 - share) / samples + square / (4 * samples * samples)) / (1 + square / samples)
    return max(0.0, center - half), min(1.0, center + half)


def mcnemar(only_first: int, only_second: int) -> float:
    """The two-sided probability that a fair coin falls at least as unevenly as the discordant samples did."""
    flips = only_first + only_second
    tail = sum(math.comb(flips, k) for k in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / 2**flips)


def newcombe(both: int, only_first: int, only_second: int, neither: int) -> tuple[float, float]:
    """The 95% interval of the first's share minus the second's, for paired samples (Newcombe 1998, Stat. Med. 17:2635,
    method 10).
    """
    samples = both + only_first + only_second + neither
    first, second = both + only_first, both + only_second
    p1, p2 = first / samples, second / samples
    (l1, u1), (l2, u2) = wilson(first, samples), wilson(second, samples)
    product = first * (samples - first) * second * (samples - second)
    agreement: float = both * neither - only_first * only_second
    if agreement > 0:
        agreement = max(agreement - samples / 2, 0)
    phi = agreement / math.sqrt(product) if product else 0.0
    low = (p1 - l1) ** 2 - 2 * phi * (p1 - l1) * (u2 - p2) + (u2 - p2) ** 2
    high = (u1 - p1) ** 2 - 2 * phi * (u1 - p1) * (p2 - l2) + (p2 - l2) ** 2
    return p1 - p2 - math.sqrt(max(low, 0)), p1 - p2 + math.sqrt(max(high, 0))


def compare(outcomes: Iterable[Outcome], first: str, second: str) -> Paired:
    """Pair the outcomes of two caches by sample.

    Raises:
        UsageError: they have no sample in common.
    """
    outcomes = list(outcomes)
    mine, theirs = ({o.sample: o for o in outcomes if o.cache == name} for name in (first, second))
    pairs = [(outcome, theirs[sample]) for sample, outcome in mine.items() if sample in theirs]
    if not pairs:
        raise UsageError(f"the caches {first!r} and {second!r} have no sample in common; ask both the same samples")
    counts = {(a, b): sum((x.right, y.right) == (a, b) for x, y in pairs) for a in (True, False) for b in (True, False)}
    both, only_first, only_second, neither = (
        counts[k] for k in ((True, True), (True, False), (False, True), (False, False))
    )
    return Paired(
        first=first,
        second=second,
        both=both,
        only_first=only_first,
        only_second=only_second,
        neither=neither,
        difference=(only_second - only_first) / len(pairs),
        interval=newcombe(both, only_second, only_first, neither),
        p=mcnemar(only_first, only_second),
        discordant=tuple(pair for pair in pairs if pair[0].right != pair[1].right),
    )


def discordant(outcomes: Sequence[Outcome]) -> list[tuple[Outcome, Outcome]]:
    """The samples that only one of the first cache and another had right, for each other: (the first's outcome, the
    other's).
    """
    first, *others = dict.fromkeys(outcome.cache for outcome in outcomes)
    return [pair for other in others for pair in compare(outcomes, first, other).discordant]
