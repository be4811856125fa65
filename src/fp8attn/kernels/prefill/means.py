"""The static means of K and V."""

from __future__ import annotations

from ..gluon import aggregate, gl, gluon
from .items import KV_HEAD


@aggregate
class Means:
    """K's mean, if it is needed (weights do not need it), and V's mean, if there is one.

    The means of an item are copied to shared memory. With head_dim 256, shared memory is full, and they are read from global memory.
    """

    memory: gl.shared_memory_descriptor  # float32 [4, width]: K's of two items, V's of two items
    k: gl.tensor | gl.constexpr  # float32 [num_kv_heads, head_dim], pointers or None
    v: gl.tensor | gl.constexpr
    SHIFT: gl.constexpr  # K's mean is needed

    @gluon.jit
    def of_k(self, items, slot, options: gl.constexpr):
        """K's mean of an item's head, if it is needed: shared memory, or a pointer."""
        if options.width < 256:
            return self.memory.index(slot)
        else:
            return self.k + items.get(slot, KV_HEAD) * options.head_dim

    @gluon.jit
    def of_v(self, items, slot, options: gl.constexpr):
        """V's mean of an item's head, if there is one: shared memory, or a pointer."""
        if options.width < 256:
            return self.memory.index(2 + slot)
        else:
            return self.v + items.get(slot, KV_HEAD) * options.head_dim


@gluon.jit
def channels_of_mean(mean, first: gl.constexpr, N: gl.constexpr, options: gl.constexpr, LAYOUT: gl.constexpr):
    """Channels `first` to `first + N` of a mean from `Means.of_k` or `of_v`; zeros after the last channel."""
    if options.width < 256:
        x = mean.slice(first, N).load(LAYOUT)
    elif first + N <= options.head_dim:
        x = gl.load(mean + first + gl.arange(0, N, LAYOUT))
    else:
        channel = first + gl.arange(0, N, LAYOUT)
        x = gl.load(mean + channel, mask=channel < options.head_dim, other=0.0)
    return x
