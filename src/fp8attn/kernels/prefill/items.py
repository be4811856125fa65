"""Items of work, which the producer announces to the warps that multiply, and the static means that they need.

An item is the query rows of one head that the partitions multiply, over their tiles of keys. Two items are in flight,
in two slots.
"""

from __future__ import annotations

from ..gluon import aggregate, gl, gluon
from ..memory import number

# An item's fields, one int32 each. Its rows from FIRST on, and below COUNT, are queries.
TILES, LAST, BATCH, TOKEN, COUNT, POSITION, LENGTH, HEAD, KV_HEAD, LEFT, _, FIRST = (gl.constexpr(i) for i in range(12))
FIELDS = gl.constexpr(16)


@aggregate
class Items:
    """Shared memory for two announced items."""

    fields: gl.shared_memory_descriptor  # int32 [2 * FIELDS, 1]
    # float32 [2, 1]: the scale of V of the last tile, which is the unit of the output
    v_unit: gl.shared_memory_descriptor

    @gluon.jit
    def get(self, slot, FIELD: gl.constexpr):
        return number(self.fields.index(slot * FIELDS + FIELD))

    @gluon.jit
    def put(self, slot, FIELD: gl.constexpr, x):
        """Write an item's fields. Only the producer's warp calls it."""
        self.fields.index(slot * FIELDS + FIELD).store(gl.full([1], x, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))

    @gluon.jit
    def count(self, slot, first: gl.constexpr):
        """How many of a partition's rows, which are those from `first` on, are queries (its first rows); none if it is
        zero or less.
        """
        return gl.where(self.get(slot, FIRST) > first, 0, self.get(slot, COUNT) - first)


@aggregate
class Means:
    """K's mean, if it is needed (weights do not need it), and V's mean, if there is one.

    The means of an item are copied to shared memory. With head_dim 256, shared memory is full, and they are read from
    global memory.
    """

    memory: gl.shared_memory_descriptor  # float32 [4, width]: K's of two items, V's of two items
    k: gl.tensor | gl.constexpr  # float32 [num_kv_heads, head_dim], pointers or None
    v: gl.tensor | gl.constexpr
    USES_K: gl.constexpr  # K's mean is needed

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
