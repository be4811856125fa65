"""The ring of tiles between the producer and the multiplying warpgroups."""

from __future__ import annotations

from ..gluon import advance, aggregate, gl, gluon
from ..ptx import arrive_at, init_at, wait_at
from .memory import number


@aggregate
class Place:
    """The position of a partition in the ring: the stage, and the parity of the barrier phase that it waits for."""

    stage: gl.tensor
    phase: gl.tensor


# Barriers, one of each a stage. K_FULL's phase ends when the scales are there, too. Every warp that multiplies arrives at EMPTY ones.
K_FULL, V_FULL, K_EMPTY, V_EMPTY = (gl.constexpr(i) for i in range(4))


@aggregate
class Ring:
    """Stages for a tile of K and of V each. The producer fills empty stages, and every warp that multiplies reads full ones."""

    k: gl.shared_memory_descriptor  # [STAGES, 128, width]
    v: gl.shared_memory_descriptor  # [STAGES * parts, width / parts, 128]: each part of V's channels is one product
    scales: gl.shared_memory_descriptor  # float32 [2 * STAGES, 1]: of K; of V of the tile before, in units of this one's
    ones: gl.shared_memory_descriptor  # E4M3 [8, 128]: ones, whose product with the weights is their sums
    barriers: gl.shared_memory_descriptor  # [4 * STAGES, 1]
    address: gl.tensor  # of the barriers
    STAGES: gl.constexpr

    @gluon.jit
    def open(self, WARPS: gl.constexpr):
        """Initialize the barriers. `WARPS` is the number of warps that multiply."""
        for i in gl.static_range(4 * self.STAGES):
            init_at(self.address + 8 * i, 1 if i < 2 * self.STAGES else WARPS)

    @gluon.jit
    def next(self, place):
        stage, phase = advance(place.stage, place.phase, self.STAGES)
        return Place(stage, phase)

    # The producer's

    @gluon.jit
    def barrier(self, KIND: gl.constexpr, place):
        return self.barriers.index(KIND * self.STAGES + place.stage)

    # Those of the warps that multiply. They do not wait for each other.

    @gluon.jit
    def at(self, KIND: gl.constexpr, place):
        return self.address + (KIND * self.STAGES + place.stage) * 8

    @gluon.jit
    def wait_k(self, place):
        wait_at(self.at(K_FULL, place), place.phase)

    @gluon.jit
    def release_k(self, place):
        arrive_at(self.at(K_EMPTY, place))

    @gluon.jit
    def wait_v(self, place):
        wait_at(self.at(V_FULL, place), place.phase)

    @gluon.jit
    def release_v(self, place):
        arrive_at(self.at(V_EMPTY, place))

    @gluon.jit
    def k_scale(self, place):
        return number(self.scales.index(place.stage))

    @gluon.jit
    def v_ratio(self, place):
        """The V scale of the tile before, in units of this one's."""
        return number(self.scales.index(self.STAGES + place.stage))
