"""Queries in shared memory: the rotation, the scale of each row, and rounding to 8 bits; and the error of this
rounding.
"""

from __future__ import annotations

from triton.language import PropagateNan

from ..common import v_position
from ..gluon import aggregate, arrive, fence_async_shared, gl, gluon, mma_v2, sync
from ..ptx import MAGIC, rest_to_fp8, to_fp8
from ..rotation import HIGH_SIGNS, block_size, negative_in_step
from .items import LENGTH, POSITION, Items, channels_of_mean
from .registers import FEW, join, scores_layout

PROPAGATE_NAN = gl.constexpr(PropagateNan.ALL)
TINY = gl.constexpr(2.0**-100)  # the smallest scale of a row of queries


@gluon.constexpr_function
def block(rows):
    """16 channels of rotated queries, in the order of `store_signs`."""
    return gl.NVMMADistributedLayout([2, 0], [rows // 16, 1], [16, 8])


@gluon.constexpr_function
def words(rows, width):
    """`width` channels of rows, of which a thread has four neighbors in every 16, so that their codes are a word."""
    blocks = [[0, 16 << bit] for bit in range((width // 16).bit_length() - 1)]
    warps = [[16 << bit, 0] for bit in range((rows // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], *blocks], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], warps, [], [rows, width]
    )


@aggregate
class PrefillQueries:
    """Shared memory of an item's queries, some rows for each partition."""

    codes: gl.shared_memory_descriptor  # [partitions, rows, width]: 8 bits (FP8 queries: the same memory as `raw`)
    # [partitions, rows, width] of 16 bits, or [2 * partitions, rows, width] of FP8, for two items
    raw: gl.shared_memory_descriptor
    rest: gl.shared_memory_descriptor  # [2 * partitions, rows, width], 8 bits: the memory of `raw`
    mean_score: gl.shared_memory_descriptor  # float32 [partitions, rows], from the beginning of an item to its end
    factor: gl.shared_memory_descriptor  # float32 [partitions, rows], likewise, with three warpgroups
    # [16, 16], the dtype of `raw`: steps of the rotation (`store_signs`), or None
    signs: gl.shared_memory_descriptor | gl.constexpr
    full: gl.shared_memory_descriptor  # barriers, one for each partition: rows and the item's fields are there
    empty: gl.shared_memory_descriptor  # barriers, one for each partition: the memory of rows and fields is free
    Q16: gl.constexpr  # queries have 16 bits
    # Q's rounding error is multiplied in rows that see few keys; rotated INT8 is as exact as K itself without it.
    REST: gl.constexpr

    @gluon.jit
    def release(self, PARTITION: gl.constexpr):
        """Let the producer request the partition's rows of the next item."""
        sync()
        arrive(self.empty.index(PARTITION))


@aggregate
class Rows:
    """A partition's rows of an item: the inputs of its scores and masks."""

    PARTITION: gl.constexpr  # the partition's index
    first: gl.constexpr  # the index of its first row in the item
    items: Items
    slot: gl.tensor
    causal: gl.tensor
    window: gl.tensor
    q: gl.shared_memory_descriptor  # [rows, width], 8 bits
    factor: gl.tensor  # [rows], of scores, but for K's scale
    mean_score: gl.tensor  # [rows], the score against K's mean
    cap: gl.tensor
    queries: PrefillQueries
    OPTIONS: gl.constexpr  # `PrefillOptions`

    @gluon.jit
    def last_key(self, LAYOUT: gl.constexpr):
        """The last key that each row sees."""
        row = gl.arange(0, self.q.shape[0], LAYOUT) + (self.first + ((1 - self.causal) << 30))
        return gl.minimum(self.items.get(self.slot, POSITION) + row, self.items.get(self.slot, LENGTH) - 1)

    @gluon.jit
    def rest_of_few(self, rest):
        """8 bits `[rows, N]`, with zeros in rows that do not see few keys."""
        few = self.last_key(gl.SliceLayout(1, rest.type.layout)) < FEW
        return gl.where(few[:, None], rest.to(gl.int8, bitcast=True), 0).to(rest.dtype, bitcast=True)


# The rotation of keys and queries


@gluon.jit
def store_signs(signs):
    """Write `H diag(sign)` of 16 channels, transposed, to `signs [16, 16]`. Columns are in the order in which `mma_v2`
    gives a thread four neighbors."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [gl.num_warps(), 1], [1, 0])
    channel = gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))[None, :]
    signs.store(gl.where(negative_in_step(channel, v_position(column)) > 0, -1.0, 1.0).to(signs.dtype))


@gluon.jit
def hadamard_blocks(blocks, STEP: gl.constexpr, N: gl.constexpr):
    """The steps of the Hadamard transform over blocks `STEP`, `2 STEP`, ... below N apart."""
    if STEP >= N:
        return blocks
    else:
        mixed = ()
        for j in gl.static_range(len(blocks)):
            if j & STEP:
                mixed += (blocks[j - STEP] - blocks[j],)
            else:
                mixed += (blocks[j] + blocks[j + STEP],)
        return hadamard_blocks(mixed, 2 * STEP, N)


@gluon.jit
def load_rows(raw, signs, options: gl.constexpr):
    """A partition's rows of 16-bit queries in FP32, 16 channels at a time, rotated without the factor `block ** -0.5`
    (`rotation.rotate`)."""
    WIDTH: gl.constexpr = options.width
    ROWS: gl.constexpr = options.rows
    BLOCK: gl.constexpr = block(ROWS)
    WORDS: gl.constexpr = words(ROWS, 16)
    blocks = ()
    if options.rotate:
        plus = signs.load(gl.DotOperandLayout(1, BLOCK, 2))
        minus = (plus.to(gl.int16, bitcast=True) ^ -0x8000).to(plus.dtype, bitcast=True)
        none = gl.zeros([ROWS, 16], gl.float32, BLOCK)
        for j in gl.static_range(WIDTH // 16):
            x = raw.slice(16 * j, 16, 1).load(gl.DotOperandLayout(0, BLOCK, 2))
            x = mma_v2(x, minus if (HIGH_SIGNS >> (j % 8)) & 1 else plus, none)
            x = x.reshape([ROWS, 2, 4, 2]).permute(0, 2, 1, 3).reshape([ROWS, 16])
            blocks += (gl.convert_layout(x, WORDS, assert_trivial=True),)
        blocks = hadamard_blocks(blocks, 1, block_size(options.head_dim) // 16)
    else:
        for j in gl.static_range(WIDTH // 16):
            blocks += (raw.slice(16 * j, 16, 1).load(WORDS).to(gl.float32),)
    return blocks


# Eight bits


@gluon.jit
def larger(a, b):
    """The maximum, which is NaN if either is."""
    return gl.maximum(a, b, PROPAGATE_NAN)


@gluon.jit
def largest_magnitude(blocks):
    """The largest magnitude of each row, of the last dimension; NaN if the row has a NaN."""
    x = gl.abs(blocks[0])
    for j in gl.static_range(1, len(blocks)):
        x = larger(x, gl.abs(blocks[j]))
    return gl.reduce(x, len(x.shape) - 1, larger)


@gluon.jit
def store_codes(codes, blocks):
    """Store blocks of codes as rows, and let TMA and the tensor cores see them."""
    LAYOUT: gl.constexpr = words(codes.shape[0], codes.shape[1])
    codes.store(gl.convert_layout(join(blocks), LAYOUT, assert_trivial=True))
    fence_async_shared()


@gluon.jit
def rounded(x):
    """The nearest integers for |x| < 2^22, in the last bits of FP32."""
    return x + MAGIC


@gluon.jit
def powers_of_two(largest):
    """The scale of rows for E4M3 and its inverse: `Float.needed_scale`, computed from bits."""
    bits = largest.to(gl.int32, bitcast=True)
    exponent = (bits >> 23) - 135 + ((bits & 0x7FFFFF) > 0x600000).to(gl.int32)
    exponent = gl.minimum(gl.maximum(exponent, -60), 120)
    return ((127 - exponent) << 23).to(gl.float32, bitcast=True), ((127 + exponent) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def round_rows(codes, blocks):
    """Round rows to 8 bits into `codes`, and return their factors."""
    largest = largest_magnitude(blocks)
    if codes.dtype == gl.int8:
        largest = larger(largest, TINY)
        up = 127.0 / largest
        # INT8 has no NaN and no Inf: a row with one of them has the factor NaN.
        factor = largest * (1 / 127) + largest * 0.0
    else:
        up, factor = powers_of_two(largest)
    eight = ()
    for j in gl.static_range(len(blocks)):
        x = blocks[j] * up[:, None]
        eight += (rounded(x).to(gl.int32, bitcast=True).to(gl.int8) if codes.dtype == gl.int8 else to_fp8(x),)
    store_codes(codes, eight)
    return factor


@gluon.jit
def load_queries(queries, codes, PARTITION: gl.constexpr, k_mean, scale, options: gl.constexpr):
    """Round a partition's rows to 8 bits into `codes`, unless they are FP8 already.

    Returns the factors of their scores and, unless `k_mean` is None, their scores with it (as exponents of two).
    """
    SCORES: gl.constexpr = scores_layout(options)
    ROWS: gl.constexpr = options.rows
    WORDS: gl.constexpr = words(ROWS, 16)
    if queries.Q16:
        blocks = load_rows(queries.raw.index(PARTITION), queries.signs, options)
        if options.rotate:
            scale = scale * block_size(options.head_dim) ** -0.5
        factor = round_rows(codes, blocks) * scale
        mean_score = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, WORDS))
        if k_mean is not None:
            for j in gl.static_range(len(blocks)):
                mean = channels_of_mean(k_mean, 16 * j, 16, options, gl.SliceLayout(0, WORDS))
                mean_score += gl.sum(blocks[j] * mean[None, :], 1) * scale
    else:
        A: gl.constexpr = gl.DotOperandLayout(0, SCORES, 4)
        factor = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, A)) * scale
        mean_score = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, A))
        if k_mean is not None:
            x = codes.load(A).to(gl.float32)
            mean = channels_of_mean(k_mean, 0, options.width, options, gl.SliceLayout(0, A))
            mean_score = gl.sum(x * mean[None, :], 1) * scale
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    return gl.convert_layout(factor, ROW, assert_trivial=True), gl.convert_layout(mean_score, ROW, assert_trivial=True)


@gluon.jit
def keep_rest(rows):
    """Write the rounding error of 16-bit queries, in 8 bits, to the queries' own memory. For INT8 the unit is 1 / 256.

    ptxas: d256. The rows are loaded again, because keeping them in registers would spill.
    """
    options: gl.constexpr = rows.OPTIONS
    queries = rows.queries
    rest = queries.rest.index(2 * rows.PARTITION)
    blocks = load_rows(queries.raw.index(rows.PARTITION), queries.signs, options)
    largest = largest_magnitude(blocks)
    sync()  # all of this partition's rows are read
    if rest.dtype == gl.int8:
        up = 127.0 / larger(largest, TINY)
    else:
        up, _ = powers_of_two(largest)
    eight = ()
    for j in gl.static_range(len(blocks)):
        x = blocks[j] * up[:, None]
        if rest.dtype == gl.int8:
            cut = (x - (rounded(x) - MAGIC)) * 256.0
            cut = rounded(gl.minimum(cut, 127.0)).to(gl.int32, bitcast=True).to(gl.int8)
        else:
            cut = rest_to_fp8(x)
        if options.batch_invariant:
            cut = rows.rest_of_few(cut)
        eight += (cut,)
    store_codes(rest, eight)
    sync()  # here, or Triton would wait in every tile
