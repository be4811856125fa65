"""The ring of tiles in shared memory between the producer and the warps that multiply."""

from __future__ import annotations

from ..gluon import ARRIVE_MEETS, advance, aggregate, arrive, gl, gluon, sync
from ..memory import number
from ..ptx import arrive_at, init_at, wait_at


@aggregate
class Place:
    """The position of a partition in the ring: the stage, and the parity of the barrier phase that it waits for."""

    stage: gl.tensor
    phase: gl.tensor


# Barriers, one of each a stage. K_FULL's phase ends when the scales are there, too.
K_FULL, V_FULL, K_EMPTY, V_EMPTY = (gl.constexpr(i) for i in range(4))


@aggregate
class PrefillRing:
    """Stages for a tile of K and of V each. The producer fills empty stages, and every warp that multiplies reads full
    ones.
    """

    k: gl.shared_memory_descriptor  # [STAGES, tile, width]
    v: gl.shared_memory_descriptor  # [STAGES * parts, width / parts, tile]: each part of V's channels is one product
    # float32 [2 * STAGES, 1]: of K; of V of the tile before, in units of this one's
    scales: gl.shared_memory_descriptor
    ones: gl.shared_memory_descriptor  # E4M3 [8, tile]: ones, whose product with the weights is their sums
    barriers: gl.shared_memory_descriptor  # [4 * STAGES, 1]
    address: gl.tensor  # of the barriers
    STAGES: gl.constexpr

    @gluon.jit
    def open(self, ARRIVALS: gl.constexpr):
        """Initialize the barriers. `ARRIVALS` is how often a tile is released: by each warp of the only partition that
        multiplies, or by each partition of one warpgroup."""
        for i in gl.static_range(4 * self.STAGES):
            init_at(self.address + 8 * i, 1 if i < 2 * self.STAGES else ARRIVALS)

    @gluon.jit
    def next(self, place):
        stage, phase = advance(place.stage, place.phase, self.STAGES)
        return Place(stage, phase)

    # The producer's

    @gluon.jit
    def barrier(self, KIND: gl.constexpr, place):
        return self.barriers.index(KIND * self.STAGES + place.stage)

    # Those of the warps that multiply. Two warpgroups of one partition do not wait for each other. Three warpgroups are
    # 2 to 5% slower if each warp arrives for itself.

    @gluon.jit
    def at(self, KIND: gl.constexpr, place):
        return self.address + (KIND * self.STAGES + place.stage) * 8

    @gluon.jit
    def wait(self, KIND: gl.constexpr, place):
        wait_at(self.at(KIND, place), place.phase)

    @gluon.jit
    def release(self, KIND: gl.constexpr, place):
        if gl.num_warps() > 4:
            arrive_at(self.at(KIND, place))
        else:
            # All warps have read the tile's scales before K is released. Only products read V, and they end for all
            # warps of a warpgroup together.
            if KIND == K_EMPTY and not ARRIVE_MEETS:
                sync()
            arrive(self.barrier(KIND, place))

    @gluon.jit
    def k_scale(self, place):
        return number(self.scales.index(place.stage))

    @gluon.jit
    def v_ratio(self, place):
        """The V scale of the tile before, in units of this one's."""
        return number(self.scales.index(self.STAGES + place.stage))
