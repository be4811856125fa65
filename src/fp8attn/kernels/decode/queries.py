"""Loads the queries, rotates them, and rounds them to the 16-bit operand of the product with K."""

from __future__ import annotations

from ..common import LOG2E
from ..gluon import aggregate, gl, gluon
from ..rotation import block_size, log2, negative

MAX_INTEGER = gl.constexpr(127 * 256.0)  # of a query as an integer of two bytes, each of them in [-128, 127]


@gluon.constexpr_function
def mma_layout(warps):
    """Of [warp, tokens or channels, rows]."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@gluon.jit
def load_mean(mean_ptr, head, d, D: gl.constexpr):
    """The mean of channels `d` of a KV head; zeros if there is none."""
    mean = (d * 0).to(gl.float32)
    if mean_ptr is not None:
        mean = gl.load(mean_ptr + head * D + d, mask=d < D, other=0.0)
    return mean


@aggregate
class DecodeQueries:
    """The queries, K's mean and the scale of the softmax."""

    q: gl.tensor  # pointer to [tokens, heads, head_dim]
    stride_t: gl.tensor | gl.constexpr  # constexpr if it is 1
    stride_h: gl.tensor | gl.constexpr
    k_mean: gl.tensor | gl.constexpr  # pointer to [KV heads, head_dim], or None
    scale: gl.tensor  # of the softmax

    @gluon.jit
    def load(self, batch, seq, head):
        """Q `[rows, channels]` of a row tile, and the mean of the head's K, by channel."""
        options: gl.constexpr = batch.OPTIONS
        LAYOUT: gl.constexpr = _rows_layout(options.width, gl.num_warps())
        d = gl.arange(0, options.width, gl.SliceLayout(0, LAYOUT))
        row = batch.row0 + gl.arange(0, options.rows, gl.SliceLayout(1, LAYOUT))
        token = (seq.query + row // options.group).to(gl.int64)
        first = token * self.stride_t + (head * options.group + row % options.group).to(gl.int64) * self.stride_h
        inside = batch.inside(row, seq)[:, None] & (d < options.head_dim)[None, :]
        mean = load_mean(self.k_mean, head, d, options.head_dim)
        return gl.load(self.q + first[:, None] + d[None, :], mask=inside, other=0.0), mean

    @gluon.jit
    def operand(self, q, k_mean, VECTOR: gl.constexpr, INT8: gl.constexpr, options: gl.constexpr):
        """The result of `load` as the operand that `scores` takes, the same in every warp; by row, the factor that
        makes the products exponents of two; and by row, the score of K's mean, as an exponent of two.

        The operand includes the sign of the softmax scale. So the factor is positive, and the largest score can be
        found before the factor is applied. A row of only tiny values is scaled as if its largest were 2^-60, so that no
        factor underflows.
        """
        OPERAND: gl.constexpr = gl.DotOperandLayout(1, VECTOR.parent, 4)
        q = q.to(gl.float32)
        if options.rotate:
            q = _rotate(q, options.head_dim)
        mean_score = gl.zeros([gl.num_warps(), q.shape[0]], gl.float32, VECTOR)
        if self.k_mean is not None:
            mean_score = _in_every_warp(gl.sum(q * k_mean[None, :], 1) * (self.scale * LOG2E), VECTOR)
        # NaN is larger than all numbers here.
        largest = gl.maximum(gl.max(gl.abs(q).to(gl.int32, bitcast=True), 1), 67 << 23)
        sign = gl.where(self.scale < 0, -1.0, 1.0)
        if INT8:
            largest = largest.to(gl.float32, bitcast=True)
            # The last 16 bits of the sum are the integer nearest to the product: a high and a low byte, both of them
            # signed.
            bits = (q * (sign * MAX_INTEGER / largest)[:, None] + 1.5 * 2**23).to(gl.int32, bitcast=True)
            q = (
                gl.join(((bits + 128) >> 8).to(gl.int8), bits.to(gl.int8))
                .permute(2, 0, 1)
                .reshape([2 * q.shape[0], q.shape[1]])
            )
            factor = largest * (gl.abs(self.scale) * (LOG2E / MAX_INTEGER))
        else:
            # An exact power of two, which brings the row's largest value into [2^14, 2^15). Values down to 2^-29 of it
            # keep all their bits.
            exponent = largest >> 23
            up = ((268 - exponent) << 23).to(gl.float32, bitcast=True)
            down = ((exponent - 14) << 23).to(gl.float32, bitcast=True)
            q = (q * up[:, None]).to(gl.float16)
            factor = down * (gl.abs(self.scale) * LOG2E)
        UNIT: gl.constexpr = 128 // q.dtype.primitive_bitwidth  # elements that `ldmatrix` reads together, 16 bytes
        memory = gl.allocate_shared_memory(q.dtype, q.shape, gl.SwizzledSharedLayout(UNIT, 1, 8, [1, 0]), q)
        q = memory.permute([1, 0]).load(gl.SliceLayout(0, OPERAND))
        if not INT8:  # here and not above. ptxas: otherwise each page copies the loaded registers to others
            q *= sign.to(gl.float16)
        return _repeat(q, OPERAND), _in_every_warp(factor, VECTOR), mean_score


@gluon.constexpr_function
def _rows_layout(width, warps):
    """Of [rows, channels], without copies: eight channels in a thread, a row in neighboring threads."""
    lanes = width // 8
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def _in_every_warp(x, LAYOUT: gl.constexpr):
    """`x` with a first dimension of warps, which all have the same values."""
    return _repeat(gl.convert_layout(x, gl.SliceLayout(0, LAYOUT)), LAYOUT)


@gluon.jit
def _repeat(x, LAYOUT: gl.constexpr):
    """`x` with a first dimension of warps, which all have it already."""
    WARPS: gl.constexpr = gl.num_warps()
    x = gl.expand_dims(x, 0)
    SHAPE: gl.constexpr = [WARPS] + x.shape[1:]  # noqa: RUF005 - Triton knows no starred elements
    return gl.broadcast(x, gl.zeros(SHAPE, x.dtype, LAYOUT))[0]


@gluon.jit
def _rotate(q, D: gl.constexpr):
    """`rotation.rotate` of Q `[rows, channels]` in FP32, to the same bits. Padding is in separate blocks and remains
    zero.
    """
    ROWS: gl.constexpr = q.shape[0]
    WIDTH: gl.constexpr = q.shape[1]
    LAYOUT: gl.constexpr = q.type.layout
    STEPS: gl.constexpr = log2(block_size(D))
    FACTOR: gl.constexpr = 2.0 ** (-0.5 * STEPS)
    q *= gl.where(negative(gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))), -FACTOR, FACTOR)[None, :]
    for step in gl.static_range(STEPS):
        pairs = q.reshape([ROWS, WIDTH >> (step + 1), 2, 1 << step])
        second = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, pairs.type.layout))))[
            None, None, :, None
        ]
        sign = gl.broadcast(gl.where(second > 0, -1.0, 1.0), pairs)[0]
        # The other number of a pair is the sum of both minus this one. As integers this is exact, and becomes a shuffle
        # at most.
        bits = pairs.to(gl.int32, bitcast=True)
        other = (gl.sum(bits, 2)[:, :, None, :] - bits).to(gl.float32, bitcast=True)
        q = gl.fma(pairs, sign, other).reshape([ROWS, WIDTH])
    return gl.convert_layout(q, LAYOUT, assert_trivial=True)
