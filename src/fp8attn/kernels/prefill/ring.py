"""The ring of tiles between the producer and the multiplying warpgroups."""

from __future__ import annotations

from ..gluon import advance, aggregate, arrive, gl, gluon, sync
from ..ptx import arrive_at, init_at, wait_at
from .memory import number


@aggregate
class Place:
    """The position of a partition in the ring: the stage, and the parity of the barrier phase that it waits for."""

    stage: gl.tensor
    phase: gl.tensor


# Barriers, one of each a stage. K's FULL phase ends when the scales are there, too.
FULL, EMPTY = gl.constexpr(0), gl.constexpr(1)


@aggregate
class Ring:
    """Stages for a tile of K and of V each. The producer fills empty stages, and every warp that multiplies reads full ones."""

    k: gl.shared_memory_descriptor  # [STAGES, 128, width]
    v: gl.shared_memory_descriptor  # [STAGES * parts, width / parts, 128]: each part of V's channels is one product
    scales: gl.shared_memory_descriptor  # float32 [2 * STAGES, 1]: of K; of V of the tile before, in units of this one's
    ones: gl.shared_memory_descriptor  # E4M3 [8, 128]: ones, whose product with the weights is their sums
    of_k: gl.shared_memory_descriptor  # [2 * STAGES, 1]: barriers, FULL ones before EMPTY ones
    of_v: gl.shared_memory_descriptor
    k_address: gl.tensor  # of these barriers
    v_address: gl.tensor
    STAGES: gl.constexpr

    @gluon.jit
    def open(self, ARRIVALS: gl.constexpr):
        """Initialize the barriers. `ARRIVALS` is how often a tile is released: by each warp of the only partition that multiplies, or by
        each partition of one warpgroup."""
        for i in gl.static_range(2 * self.STAGES):
            init_at(self.k_address + 8 * i, 1 if i < self.STAGES else ARRIVALS)
            init_at(self.v_address + 8 * i, 1 if i < self.STAGES else ARRIVALS)

    @gluon.jit
    def next(self, place):
        stage, phase = advance(place.stage, place.phase, self.STAGES)
        return Place(stage, phase)

    @gluon.jit
    def k_barrier(self, KIND: gl.constexpr, place):
        return self.of_k.index(KIND * self.STAGES + place.stage)

    @gluon.jit
    def v_barrier(self, KIND: gl.constexpr, place):
        return self.of_v.index(KIND * self.STAGES + place.stage)

    # Of the warps that multiply. Two warpgroups of one partition do not wait for each other. Three warpgroups are 2 to 5% slower if
    # each warp arrives for itself.

    @gluon.jit
    def wait_k(self, place):
        wait_at(self.k_address + place.stage * 8, place.phase)

    @gluon.jit
    def release_k(self, place):
        if gl.num_warps() > 4:
            arrive_at(self.k_address + (self.STAGES + place.stage) * 8)
        else:
            sync()  # all warps have read the tile's scales
            arrive(self.k_barrier(EMPTY, place))

    @gluon.jit
    def wait_v(self, place):
        wait_at(self.v_address + place.stage * 8, place.phase)

    @gluon.jit
    def release_v(self, place):
        if gl.num_warps() > 4:
            arrive_at(self.v_address + (self.STAGES + place.stage) * 8)
        else:
            arrive(self.v_barrier(EMPTY, place))  # only products read V, and they end for all warps of a warpgroup together

    @gluon.jit
    def k_scale(self, place):
        return number(self.scales.index(place.stage))

    @gluon.jit
    def v_ratio(self, place):
        """The V scale of the tile before, in units of this one's."""
        return number(self.scales.index(self.STAGES + place.stage))
