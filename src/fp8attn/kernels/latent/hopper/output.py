"""The sums of weighted latents: warps that multiply the tiles' codes, transposed, with the weights.

    O^T [channels, rows] += C^T [channels, tokens] P^T [tokens, rows]

The left operand is in registers. A thread loads four channels of 16 tokens and transposes them, four bytes by four.
Nothing is converted to 16 bits. With two digits of weights, O^T is in INT32 over all tiles, and shifted right when a
row's unit grows. With one digit, every tile's sum is added in FP32.
"""

from __future__ import annotations

from ...gluon import gl, gluon, warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait
from ...ptx import meet_and_arrive_at, pin, wait_at
from .load import PART, PIECE_EMPTY, ROWS, SUMS_FULL, TILE, WEIGHTS_EMPTY, WEIGHTS_FULL

# Word i: token i of channels 0..3. After it, word j: channel j of tokens 0..3.
TRANSPOSE = gl.constexpr("""{ .reg .b32 a, b, c, d;
prmt.b32 a, $4, $5, 0x5140; prmt.b32 b, $6, $7, 0x5140; prmt.b32 c, $4, $5, 0x7362; prmt.b32 d, $6, $7, 0x7362;
prmt.b32 $0, a, b, 0x5410; prmt.b32 $1, a, b, 0x7632; prmt.b32 $2, c, d, 0x5410; prmt.b32 $3, c, d, 0x7632; }""")
# The same, plus 128.
TRANSPOSE_UNSIGNED = gl.constexpr("""{ .reg .b32 a, b, c, d;
prmt.b32 a, $4, $5, 0x5140; prmt.b32 b, $6, $7, 0x5140; prmt.b32 c, $4, $5, 0x7362; prmt.b32 d, $6, $7, 0x7362;
xor.b32 a, a, 0x80808080; xor.b32 b, b, 0x80808080; xor.b32 c, c, 0x80808080; xor.b32 d, d, 0x80808080;
prmt.b32 $0, a, b, 0x5410; prmt.b32 $1, a, b, 0x7632; prmt.b32 $2, c, d, 0x5410; prmt.b32 $3, c, d, 0x7632; }""")


@gluon.constexpr_function
def _words_layout(warps):
    """Of a slice of a tile `[64 tokens, 32 channels for each warp]`: a thread has 4 channels of 16 tokens. No bank is
    used twice: lanes' channels differ in bits 2 to 4, and their tokens in bits 1 and 2, which the swizzle adds to bits
    5 and 6 of the address.
    """
    channels = [[0, 32 << i] for i in range(warps.bit_length() - 1)]
    tokens = [[1, 0], [8, 0], [16, 0], [32, 0]]
    lanes = [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], *tokens], lanes, channels, [], [TILE.value, 32 * warps])


@gluon.constexpr_function
def _output_layout(warps, rows):
    """Of two blocks of O^T, `[32 channels for each warp, rows]`: a thread has 4 channels in a row."""
    channels = [[32 << i, 0] for i in range(warps.bit_length() - 1)]
    in_thread = [[1, 0], [2, 0], [0, 1], *([0, 1 << i] for i in range(3, rows.bit_length() - 1))]
    return gl.DistributedLinearLayout(
        in_thread, [[0, 2], [0, 4], [4, 0], [8, 0], [16, 0]], channels, [], [32 * warps, rows]
    )


@gluon.jit
def _operands(codes, MMA: gl.constexpr, ASM: gl.constexpr):
    """A slice of a tile's codes `[64, channels]`, transposed, as two left operands. Row 16 w + 8 h + g of operand b is
    channel 32 w + 4 g + 2 b + h."""
    WARPS: gl.constexpr = gl.num_warps()
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    x = codes.load(_words_layout(WARPS))
    x = gl.inline_asm_elementwise(ASM, "=r,=r,=r,=r,r,r,r,r", [x], dtype=gl.int8, is_pure=True, pack=16)
    x = x.reshape([2, 2, 2, 4, 2, WARPS, 8, 4]).permute(5, 4, 6, 0, 1, 3, 7, 2).reshape([16 * WARPS, TILE, 2])
    a, b = x.split()
    return gl.convert_layout(a, A, assert_trivial=True), gl.convert_layout(b, A, assert_trivial=True)


@gluon.jit
def _store(memory, piece, parts_ptr, SLICE: gl.constexpr, a, b, options: gl.constexpr):
    """Stores the rows of two blocks of O^T `[channels, rows]` to their part `[rows, rank]`: FP32, or FP16 with one
    digit, whose error is larger."""
    WARPS: gl.constexpr = gl.num_warps()
    WIDTH: gl.constexpr = 32 * WARPS
    R: gl.constexpr = options.rows
    OUT: gl.constexpr = _output_layout(WARPS, R)
    o = gl.join(a, b).reshape([WARPS, 2, 8, R, 2]).permute(0, 2, 4, 1, 3).reshape([WIDTH, R])
    o = gl.convert_layout(o, OUT, assert_trivial=True)
    channel = SLICE * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(1, OUT))
    row = gl.arange(0, R, gl.SliceLayout(0, OUT))
    first = parts_ptr + memory.get(piece, PART).to(gl.int64) * options.rank
    inside = (row < memory.get(piece, ROWS))[None, :] & (channel >= 0)[:, None]
    part = memory.parts_of(piece, row, options)[None, :]
    gl.store(first + part * options.rank + channel[:, None], o.to(parts_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _accumulate_two_digits(memory, parts_ptr, options: gl.constexpr):
    """O^T of the pieces, in four blocks of channels."""
    WARPS: gl.constexpr = gl.num_warps()
    WIDTH: gl.constexpr = 32 * WARPS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 64, 32])
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 32, 32])
    ONE: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])
    piece = 0
    tile = 0
    tiles = memory.tiles_of(piece)
    while tiles >= 0:
        a0 = gl.zeros([16 * WARPS, 64], gl.int32, MMA)
        a1 = gl.zeros([16 * WARPS, 64], gl.int32, MMA)
        a2 = gl.zeros([16 * WARPS, 64], gl.int32, MMA)
        a3 = gl.zeros([16 * WARPS, 64], gl.int32, MMA)
        end = tile + tiles
        while tile < end:
            # A row's unit has grown, as at the first tile.
            wait_at(memory.at(WEIGHTS_FULL, tile & 1), (tile >> 1) & 1)
            shift = memory.change.index(tile & 1).slice(0, 32, 0).load(gl.SliceLayout(0, HALF))[None, :]
            a0 = _shifted(a0, shift, MMA, HALF)
            a1 = _shifted(a1, shift, MMA, HALF)
            r2 = warpgroup_mma_init(_shifted(a2, shift, MMA, HALF))
            r3 = warpgroup_mma_init(_shifted(a3, shift, MMA, HALF))
            begin = tile
            same = tile < end
            while same:
                slot = tile & 1
                memory.wait_tile(tile)
                codes = memory.codes.index(memory.stage(tile))
                weights = memory.weights.index(slot).permute([1, 0])
                x0, x1 = _operands(codes.slice(0, WIDTH, 1), MMA, TRANSPOSE)
                r2, r3 = warpgroup_mma_wait(0, deps=[r2, r3])  # of the tile before
                if tile > begin:
                    meet_and_arrive_at(memory.at(WEIGHTS_EMPTY, slot ^ 1))
                a0 = warpgroup_mma(x0, weights, a0, use_acc=True, is_async=True)
                a1 = warpgroup_mma(x1, weights, a1, use_acc=True, is_async=True)
                x2, x3 = _operands(codes.slice(WIDTH, WIDTH, 1), MMA, TRANSPOSE)
                a0, a1 = warpgroup_mma_wait(0, deps=[a0, a1])  # ptxas: without it, it serializes all products
                r2 = warpgroup_mma(x2, weights, r2, use_acc=True, is_async=True)
                r3 = warpgroup_mma(x3, weights, r3, use_acc=True, is_async=True)
                memory.release_tile(tile)
                tile += 1
                same = tile < end
                if same:
                    wait_at(memory.at(WEIGHTS_FULL, tile & 1), (tile >> 1) & 1)
                    same = gl.max(memory.change.index(tile & 1).load(ONE), 0) == 0
            a2, a3 = warpgroup_mma_wait(0, deps=[r2, r3])
            meet_and_arrive_at(memory.at(WEIGHTS_EMPTY, (tile - 1) & 1))
        wait_at(memory.at(SUMS_FULL, piece & 1), (piece >> 1) & 1)
        factor = memory.sums.index((piece & 1) * 2).load(gl.SliceLayout(0, HALF))[None, :]
        _store(memory, piece, parts_ptr, 0, _joined(a0, HALF) * factor, _joined(a1, HALF) * factor, options)
        _store(memory, piece, parts_ptr, 1, _joined(a2, HALF) * factor, _joined(a3, HALF) * factor, options)
        meet_and_arrive_at(memory.at(PIECE_EMPTY, piece & 1))
        piece += 1
        tiles = memory.tiles_of(piece)


@gluon.jit
def _digits(x):
    """The sums of the high and of the low digits."""
    return x.reshape([x.shape[0], 2, 32]).permute(0, 2, 1).split()


@gluon.jit
def _shifted(x, shift, MMA: gl.constexpr, HALF: gl.constexpr):
    """Sums of both digits, shifted right. The bits that the high one loses go to the low one: cut off, they would be a
    bias of half of 256 units in all channels, which the rotation gathers in one."""
    high, low = _digits(x)
    high = gl.convert_layout(high, HALF, assert_trivial=True)
    low = gl.convert_layout(low, HALF, assert_trivial=True)
    lost = high & ((1 << shift) - 1)  # times 256, shifted right: below 256
    low = (low >> shift) + ((lost << gl.maximum(8 - shift, 0)) >> gl.maximum(shift - 8, 0))
    x = gl.join(high >> shift, low).permute(0, 2, 1).reshape(x.shape)
    return gl.convert_layout(x, MMA, assert_trivial=True)


@gluon.jit
def _joined(x, LAYOUT: gl.constexpr):
    """The sum of both digits of each row, FP32."""
    high, low = _digits(x)
    return gl.convert_layout(high.to(gl.float32) * 256.0 + low.to(gl.float32), LAYOUT, assert_trivial=True)


@gluon.jit
def _accumulate_one_digit(memory, parts_ptr, options: gl.constexpr):
    """O^T of the pieces, in four blocks of channels. A tile's sum is below 2^23, so its bits are those of a subnormal
    FP32 number, which needs no conversion."""
    WARPS: gl.constexpr = gl.num_warps()
    WIDTH: gl.constexpr = 32 * WARPS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 64, 32])
    ROW: gl.constexpr = gl.SliceLayout(0, MMA)
    zero = gl.zeros([16 * WARPS, 64], gl.int32, MMA)
    piece = 0
    tile = 0
    tiles = memory.tiles_of(piece)
    while tiles >= 0:
        acc = ()
        for _ in gl.static_range(4):
            acc += (gl.zeros([16 * WARPS, 64], gl.float32, MMA),)
        end = tile + tiles
        while tile < end:
            slot = tile & 1
            memory.wait_tile(tile)
            codes = memory.codes.index(memory.stage(tile))
            x = _operands(codes.slice(0, WIDTH, 1), MMA, TRANSPOSE_UNSIGNED)
            wait_at(memory.at(WEIGHTS_FULL, slot), (tile >> 1) & 1)
            weights = memory.weights.index(slot).permute([1, 0])
            new = ()
            for i in gl.static_range(4):
                if i == 2:
                    x = _operands(codes.slice(WIDTH, WIDTH, 1), MMA, TRANSPOSE_UNSIGNED)
                t = warpgroup_mma(x[i % 2], weights, zero, use_acc=False, is_async=True)
                t = warpgroup_mma_wait(0, deps=[t])
                ratio = memory.change.index(slot).load(ROW).to(gl.float32, bitcast=True)[None, :]
                new += (pin(acc[i] * ratio + t.to(gl.float32, bitcast=True)),)
                if i == 2:
                    memory.release_tile(tile)
            acc = new
            meet_and_arrive_at(memory.at(WEIGHTS_EMPTY, slot))
            tile += 1
        wait_at(memory.at(SUMS_FULL, piece & 1), (piece >> 1) & 1)
        factor = memory.sums.index((piece & 1) * 2).load(ROW)[None, :]
        bias = memory.sums.index((piece & 1) * 2 + 1).load(ROW)[None, :]
        for i in gl.static_range(2):
            a = acc[2 * i] * 2.0**126 * factor - bias
            b = acc[2 * i + 1] * 2.0**126 * factor - bias
            _store(memory, piece, parts_ptr, i, a, b, options)
        meet_and_arrive_at(memory.at(PIECE_EMPTY, piece & 1))
        piece += 1
        tiles = memory.tiles_of(piece)


@gluon.jit
def accumulate(memory, parts_ptr, options: gl.constexpr):
    """The warps that accumulate: O^T of all pieces, written to their parts."""
    if options.digits == 2:
        _accumulate_two_digits(memory, parts_ptr, options)
    else:
        _accumulate_one_digit(memory, parts_ptr, options)
