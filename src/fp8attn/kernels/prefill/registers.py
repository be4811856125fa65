"""The sizes and layouts of tiles that all files of the kernel share, and reinterpretations of registers, which move no
value.
"""

from __future__ import annotations

from ..gluon import gl, gluon

ROWS = gl.constexpr(64)  # query rows of a warpgroup: the height of its MMA
FEW = gl.constexpr(256)  # rows of prompts that see fewer keys are multiplied twice (`multiply`)
# The number of tokens that TMA sees in the output of a ragged batch (`plan.ragged_rows`).
ENDLESS = gl.constexpr(1 << 30)


@gluon.constexpr_function
def accumulator(rows, columns):
    """The registers of a product `[rows, columns]`, of which each warpgroup computes 64 rows."""
    return gl.NVMMADistributedLayout([3, 0], [rows // 16, 1], [16, columns, 32])


@gluon.constexpr_function
def scores_layout(options):
    """The registers of a tile's scores, `[rows, tile]`."""
    return accumulator(options.rows, options.tile)


@gluon.jit
def split(x, N: gl.constexpr):
    """`x [rows, C]` as N tiles of neighboring channels."""
    if N == 1:
        return (x,)
    else:
        a, b = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]).split()
        return split(a, N // 2) + split(b, N // 2)


@gluon.jit
def join(tiles):
    """The inverse of `split`."""
    if len(tiles) == 1:
        return tiles[0]
    else:
        a = join(tiles[: len(tiles) // 2])
        b = join(tiles[len(tiles) // 2 :])
        return gl.join(a, b).permute([0, 2, 1]).reshape([a.shape[0], 2 * a.shape[1]])


@gluon.jit
def as_operand(p, P: gl.constexpr):
    """Weights as the left operand of P V. V's tokens are in `page_layout.V_ORDER`, so a thread already has its part."""
    p = p.reshape([p.shape[0], p.shape[1] // 16, 2, 4, 2]).permute(0, 1, 3, 2, 4).reshape([p.shape[0], p.shape[1]])
    return gl.convert_layout(p, P, assert_trivial=True)
