"""The ring of tiles between the producer and the multiplying warpgroups."""

from __future__ import annotations

from ..gluon import advance, aggregate, arrive, gl, gluon, mbarrier, sync
from .memory import number


@aggregate
class Place:
    """The position of a partition in the ring: the stage, and the parity of the barrier phase that it waits for."""

    stage: gl.tensor
    phase: gl.tensor


@aggregate
class Ring:
    """Stages for a tile of K and of V each. The producer fills empty stages, and every warpgroup reads full ones."""

    k: gl.shared_memory_descriptor  # [STAGES, 128, width]
    v: gl.shared_memory_descriptor  # [STAGES * parts, width / parts, 128]: each part of V's channels is one product
    scales: gl.shared_memory_descriptor  # float32 [2 * STAGES, 1]: of K; of V of the tile before, in units of this one's
    ones: gl.shared_memory_descriptor  # E4M3 [8, 128]: ones, whose product with the weights is their sums
    k_full: gl.shared_memory_descriptor  # barriers; k_full's phase ends when the scales are there, too
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.jit
    def open(self, WARPGROUPS: gl.constexpr):
        """Initialize the barriers."""
        for stage in gl.static_range(self.STAGES):
            mbarrier.init(self.k_full.index(stage), 1)
            mbarrier.init(self.v_full.index(stage), 1)
            mbarrier.init(self.k_empty.index(stage), WARPGROUPS)
            mbarrier.init(self.v_empty.index(stage), WARPGROUPS)

    @gluon.jit
    def next(self, place):
        stage, phase = advance(place.stage, place.phase, self.STAGES)
        return Place(stage, phase)

    @gluon.jit
    def wait_k(self, place):
        mbarrier.wait(self.k_full.index(place.stage), place.phase)

    @gluon.jit
    def release_k(self, place):
        sync()  # all warps have read the tile's scales
        arrive(self.k_empty.index(place.stage))

    @gluon.jit
    def wait_v(self, place):
        mbarrier.wait(self.v_full.index(place.stage), place.phase)

    @gluon.jit
    def release_v(self, place):
        arrive(self.v_empty.index(place.stage))  # only products read V, and they end for all warps of a warpgroup together

    @gluon.jit
    def k_scale(self, place):
        return number(self.scales.index(place.stage))

    @gluon.jit
    def v_ratio(self, place):
        """The V scale of the tile before, in units of this one's."""
        return number(self.scales.index(self.STAGES + place.stage))
