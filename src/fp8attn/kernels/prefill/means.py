"""The static means of K and V."""

from __future__ import annotations

from ..gluon import aggregate, gl, gluon
from .items import KV_HEAD


@aggregate
class Means:
    """K's mean where it is needed (weights alone do without) and V's mean, if there are any.

    An item's are copied to shared memory. head_dim 256 leaves no shared memory for them: there they are read from global memory.
    """

    memory: gl.shared_memory_descriptor  # float32 [4, width]: K's of two items, V's of two items
    k: gl.tensor | gl.constexpr  # float32 [num_kv_heads, head_dim], pointers or None
    v: gl.tensor | gl.constexpr
    SHIFT: gl.constexpr  # K's mean is needed

    @gluon.jit
    def of_k(self, items, slot, options: gl.constexpr):
        """Of an item's head, if it is needed: memory, or a pointer."""
        if options.width < 256:
            return self.memory.index(slot)
        else:
            return self.k + items.get(slot, KV_HEAD) * options.head_dim

    @gluon.jit
    def of_v(self, items, slot, options: gl.constexpr):
        """Likewise, if there is one."""
        if options.width < 256:
            return self.memory.index(2 + slot)
        else:
            return self.v + items.get(slot, KV_HEAD) * options.head_dim


@gluon.jit
def channels_of_mean(mean, first: gl.constexpr, N: gl.constexpr, options: gl.constexpr, LAYOUT: gl.constexpr):
    """Channels `first` to `first + N` of what `Means.of_k` or `of_v` returned; zeros behind the last."""
    if options.width < 256:
        x = mean.slice(first, N).load(LAYOUT)
    elif first + N <= options.head_dim:
        x = gl.load(mean + first + gl.arange(0, N, LAYOUT))
    else:
        channel = first + gl.arange(0, N, LAYOUT)
        x = gl.load(mean + channel, mask=channel < options.head_dim, other=0.0)
    return x
