"""What orders accesses to a CTA's shared memory: a conflict that nothing orders is an error, in whatever order the
warps happen to run.

Every warp has a vector of clocks, one for each agent: what it knows to have happened. Agents are warps, and what copies
and multiplies for
them: the products of a warpgroup, the copies of a warp by TMA to global memory and by `cp.async`, and barriers, which
stand for the copies by TMA that they count (a barrier's clock is its number of ended phases). Barriers pass clocks on.
An access conflicts with a write, and a write with a read, unless the warp knows the clock of the other.

Two proxies (PTX ISA 8.7, "Proxies") add rules. TMA and products (the async proxy) do not see what warps write until
these have executed `fence.proxy.async`. And a load whose data have not arrived is not ordered before a copy by TMA over
the same bytes, whatever barrier lies
between: data count as arrived when a register is used, or at a fence.
"""

from __future__ import annotations

import numpy as np

BARRIERS = 64  # at most
Words = np.ndarray | slice  # indices of the words of shared memory


def words(address: np.ndarray, size: int) -> np.ndarray:
    """The words of `size` bytes at each address."""
    first = address >> 2
    return first if size <= 4 else (first[:, None] + np.arange(size // 4)).ravel()


class Phase:
    """A barrier's clocks.

    Attributes:
        agent: the barrier.
        ended: number of phases that have ended.
        arriving, published: what those who arrived in this phase knew; and those of the phase before.
        waited: the clocks of the warps that have waited for the phase before.
        fenced: whether TMA sees that it is initialized.
        warp: that has initialized it.
    """

    def __init__(self, agent: int, agents: int, warp: int) -> None:
        self.agent, self.ended, self.warp, self.fenced = agent, 0, warp, False
        self.arriving, self.published = np.zeros(agents, np.int32), np.zeros(agents, np.int32)
        self.waited: dict[int, int] = {}


class Order:
    """The order of one CTA's accesses.

    Args:
        warps: of the CTA.
        size: bytes of shared memory.
    """

    def __init__(self, warps: int, size: int) -> None:
        groups = -(-warps // 4)
        self.products, self.sends, self.copies, self.barriers = (
            warps,
            warps + groups,
            2 * warps + groups,
            3 * warps + groups,
        )
        self.agents = self.barriers + BARRIERS
        self.known = np.zeros((warps, self.agents), np.int32)
        np.fill_diagonal(self.known, 1)
        self.groups = [0] * warps  # of products, that a warp has committed
        self.committed: dict[tuple[int, int], np.ndarray] = {}  # what was known then, by warpgroup and group
        self.copied = [0] * warps  # arrivals with copies of cp.async
        self.flying: list[set[str]] = [
            set() for _ in range(warps)
        ]  # registers whose load, from bytes of TMA, may not have ended
        self.phases: dict[int, Phase] = {}
        self.writer = np.zeros(size >> 2, np.int16)
        self.written = np.zeros(size >> 2, np.int32)
        self.read = np.zeros((self.copies, size >> 2), np.int32)
        self.unfenced = np.zeros(size >> 2, np.int8)  # the warp that wrote it, plus one

    # Accesses

    def load(self, warp: int, at: Words, targets: list[str]) -> None:
        self._after_write(warp, at)
        self.read[warp, at] = self.known[warp, warp]
        if (self.writer[at] >= self.barriers).any():
            self.flying[warp].update(targets)

    def store(self, warp: int, at: np.ndarray, changed: np.ndarray | bool = True) -> None:
        """Warps may write the same number without order: so the writes of words that do not change may be left out."""
        at = at[changed | (self.written[at] <= self.known[warp, self.writer[at]])]
        self._write(warp, at, warp, self.known[warp, warp])
        self.unfenced[at] = warp + 1

    def copy(self, warp: int, at: Words) -> None:
        """A `cp.async`."""
        self._write(warp, at, self.copies + warp, self.copied[warp] + 1)
        self.unfenced[at] = warp + 1

    def fetch(self, warp: int, at: Words, barrier: int) -> None:
        """A copy of TMA to shared memory."""
        phase = self.phases[barrier]
        assert phase.fenced, f"no fence has shown TMA the barrier at {barrier}"
        self._fenced(at)
        self._write(warp, at, phase.agent, phase.ended + 1)

    def send(self, warp: int, at: Words, group: int) -> None:
        """A copy of TMA from shared memory."""
        self._fenced(at)
        self._after_write(warp, at)
        self.read[self.sends + warp, at] = group

    def multiply(self, warp: int, at: Words) -> None:
        """An operand of `wgmma`."""
        self._fenced(at)
        self._after_write(warp, at)
        self.read[self.products + warp // 4, at] = self.groups[warp] + 1

    def _fenced(self, at: Words) -> None:
        assert not (by := self.unfenced[at]).any(), (
            f"no fence has shown the async proxy what warp {int(by.max()) - 1} wrote"
        )

    def _after_write(self, warp: int, at: Words) -> None:
        writer = self.writer[at]
        early = self.written[at] > self.known[warp, writer]
        assert not early.any(), f"race: nothing orders this after a write by {self._name(int(writer[early][0]))}"

    def _write(self, warp: int, at: Words, agent: int, clock: int) -> None:
        self._after_write(warp, at)
        early = self.read[:, at] > self.known[warp, : self.copies, None]
        assert not early.any(), (
            f"race: nothing orders this write after a read by {self._name(int(early.any(1).argmax()))}"
        )
        self.writer[at], self.written[at], self.unfenced[at] = agent, clock, 0

    def _name(self, agent: int) -> str:
        kinds = (
            (0, "warp"),
            (self.products, "products of warpgroup"),
            (self.sends, "TMA of warp"),
            (self.copies, "cp.async of warp"),
        )
        first, kind = max(x for x in (*kinds, (self.barriers, "TMA for barrier")) if x[0] <= agent)
        return f"{kind} {agent - first}"

    # What orders them

    def fence(self, warp: int) -> None:
        self.unfenced[self.unfenced == warp + 1] = 0
        self.flying[warp].clear()
        for phase in self.phases.values():
            phase.fenced |= phase.warp == warp

    def _release(self, warp: int) -> np.ndarray:
        """What the warp knows; what it does from now on is not among it."""
        assert not (flying := self.flying[warp]), (
            f"the data of {sorted(flying)} may arrive after TMA has overwritten them: a fence is missing"
        )
        known = self.known[warp].copy()
        self.known[warp, warp] += 1
        return known

    def meet(self, warps: list[int]) -> None:
        """A named barrier."""
        known = np.max([self._release(warp) for warp in warps], 0)
        for warp in warps:
            self._learn(warp, known)

    def _learn(self, warp: int, known: np.ndarray) -> None:
        np.maximum(self.known[warp], known, out=self.known[warp])

    def commit(self, warp: int) -> None:
        """End a group of products."""
        self.groups[warp] += 1
        key, known = (warp // 4, self.groups[warp]), self._release(warp)
        self.committed[key] = np.maximum(self.committed[key], known) if key in self.committed else known

    def multiplied(self, warp: int, pending: int) -> None:
        """All groups of products have ended but the last `pending`. All warps of the warpgroup have begun them then."""
        ended = self.groups[warp] - pending
        if ended > 0:
            self._learn(warp, self.committed[warp // 4, ended])
            agent = self.products + warp // 4
            self.known[warp, agent] = max(self.known[warp, agent], ended)

    def sent(self, warp: int, ended: int) -> None:
        """The first `ended` groups of TMA's copies have left."""
        self.known[warp, self.sends + warp] = max(self.known[warp, self.sends + warp], ended)

    def init(self, warp: int, barrier: int) -> None:
        self.phases[barrier] = Phase(self.barriers + len(self.phases), self.agents, warp)

    def arrive(self, warp: int, barrier: int) -> None:
        arriving = self.phases[barrier].arriving
        np.maximum(arriving, self._release(warp), out=arriving)

    def arrive_with_copies(self, warp: int, barrier: int) -> None:
        self.copied[warp] += 1
        self.phases[barrier].arriving[self.copies + warp] = self.copied[warp]

    def end(self, barrier: int) -> None:
        """The barrier's phase ends. Warps that wait for the one before must have passed in any order: a wait names only
        the parity.
        """
        phase = self.phases[barrier]
        for warp, clock in phase.waited.items():
            assert phase.arriving[warp] >= clock, (
                f"warp {warp} may miss phase {phase.ended} of the barrier at {barrier}"
            )
        phase.ended += 1
        phase.published, phase.arriving, phase.waited = phase.arriving, np.zeros_like(phase.arriving), {}
        phase.published[phase.agent] = phase.ended

    def wait(self, warp: int, barrier: int) -> None:
        """A wait that has ended."""
        phase = self.phases[barrier]
        self._learn(warp, phase.published)
        phase.waited[warp] = int(self.known[warp, warp])
