"""A tile of INT8 K and INT8 V: scores, weights in integers of 0 to 252, their exact product, and its sum in FP32.

V's codes are stored plus 128, as unsigned bytes. So the product of P and V is not negative, and below 2^23: its bits are those of a
subnormal FP32 number, which a multiply-add takes as it is. No accumulator is set before the product, and nothing is converted after it.
What the 128 add is 128 times the sum of P, which is subtracted from the output at the end.
"""

from __future__ import annotations

from fp8attn.kernels.gluon import ARRIVE_MEETS, aggregate, gl, gluon, mma_v2, sync, warpgroup_mma, warpgroup_mma_wait
from fp8attn.kernels.prefill.registers import TILE, accumulator, as_operand, join, split, whole
from fp8attn.kernels.prefill.ring import number
from fp8attn.kernels.prefill.softmax import begin_scores, mask_scores, no_maximum, no_sums
from fp8attn.kernels.ptx import MAGIC, exp2, pin

MOST = gl.constexpr(252.0)  # the largest weight; what is left to 255 is for the error of exp2's argument
SUBNORMAL = gl.constexpr(-16.022720076500082)  # log2(252) - 24: weights whose FP16 bits are integers
SMALL = gl.constexpr(2.0**-40)  # the unit of scores that were subnormal
BIAS = gl.constexpr(255.0 * 255.0 * 32.0 * 2.0**-149)  # what `bias` adds
DEEP = gl.constexpr(60.0)  # a tile's unit is at least 2^-60 of the largest weight so far

TO_U8 = gl.constexpr("{ .reg .b32 a, b; cvt.rn.f16x2.f32 a, $2, $1; cvt.rn.f16x2.f32 b, $4, $3; prmt.b32 $0, a, b, 0x6420; }")
TO_HALF = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
# 1024 + p c: an FP16 number whose low byte is the rounded product.
HALF_TO_U8 = gl.constexpr("""{ .reg .b32 a, b, m; mov.b32 m, 0x64006400; fma.rn.f16x2 a, $1, $3, m; fma.rn.f16x2 b, $2, $4, m;
prmt.b32 $0, a, b, 0x6420; }""")
LARGEST_REGISTERS = gl.constexpr(",".join(["=r"] * 16 + ["r"] * 16))


@gluon.constexpr_function
def by_lane(rows, each=32):
    """Numbers of the columns of a tile as `[4, each]`: a thread reads a row."""
    warps = [[0, 0]] * ((rows // 16).bit_length() - 1)
    return gl.DistributedLinearLayout([[0, 1 << i] for i in range(each.bit_length() - 1)], [[1, 0], [2, 0], [0, 0], [0, 0], [0, 0]],
                                      warps, [], [4, each])  # fmt: skip


@gluon.constexpr_function
def interleaved(inner, each=32):
    """Their memory: `inner` numbers (16 bytes) of every row in turn. So the four threads of a load read 64 bytes side by side, in banks of
    their own. Whole rows, one after the other, put all four in the same banks."""
    columns = [[0, 1 << i] for i in range(each.bit_length() - 1)]
    inner = inner.bit_length() - 1
    return gl.SharedLinearLayout([*columns[:inner], [1, 0], [2, 0], *columns[inner:]], alignment=128)


@aggregate
class Columns:
    """Shared memory of the scales of a tile's tokens."""

    k: (
        gl.shared_memory_descriptor | gl.constexpr
    )  # a token's: int32 [STAGES, 4, 16] or float32 [STAGES * 2, 4, 32]; 32 tokens': float32 [STAGES * 64, 1]
    v: gl.shared_memory_descriptor | gl.constexpr  # float16 [STAGES, 4, 32]
    full: gl.shared_memory_descriptor | gl.constexpr  # int8 [128, 32], all bits set, for `bias`
    LOADED: gl.constexpr  # whether K's offsets are in memory, or computed from its ratios

    @gluon.jit
    def of_scores(self, stage, BIASED: gl.constexpr, ROWS: gl.constexpr):
        """K's ratios, and offsets: what the ratios make of MAGIC, or of BIAS, is taken off."""
        if self.LOADED:
            ratio = self.row(self.k.index(2 * stage), ROWS)
            offset = self.row(self.k.index(2 * stage + 1), ROWS)
        else:
            ratio = self.row(self.k.index(stage), ROWS)
            offset = ratio * (-BIAS if BIASED else -MAGIC) + (MAGIC * SMALL if BIASED else MAGIC)
        return ratio, offset

    @gluon.jit
    def row(self, memory, ROWS: gl.constexpr):
        """Numbers of columns, or words of two: the first is the low half, in BF16, and the second the whole word, in FP32."""
        if self.LOADED:
            x = memory.load(by_lane(ROWS)).reshape([4, 16, 2])
        else:
            x = memory.load(by_lane(ROWS, 16))
            x = gl.join((x << 16).to(gl.float32, bitcast=True), x.to(gl.float32, bitcast=True))
        x = x.permute([1, 0, 2]).reshape([TILE])
        return gl.convert_layout(x, gl.SliceLayout(0, accumulator(ROWS, TILE)), assert_trivial=True)[None, :]

    @gluon.jit
    def of_weights(self, stage, ROWS: gl.constexpr, P: gl.constexpr):
        x = self.v.index(stage).load(by_lane(ROWS)).reshape([4, 8, 4]).permute([1, 0, 2]).reshape([TILE])
        return gl.convert_layout(x, gl.SliceLayout(0, P), assert_trivial=True)[None, :]


@gluon.constexpr_function
def largest_of_eight():
    """PTX: of 16 integers of two rows, in pairs, the first two become the largest of the rows. ptxas joins them to maxima of three."""
    lines = []
    for row in range(2):
        mine = [16 + 4 * i + 2 * row + j for i in range(4) for j in range(2)]
        lines.append(f"max.s32 a, ${mine[0]}, ${mine[1]};")
        lines += [f"max.s32 a, a, ${i};" for i in mine[2:-1]]
        lines.append(f"max.s32 ${2 * row}, a, ${mine[-1]};")
    return "{ .reg .s32 a; " + " ".join(lines) + " }"


@gluon.jit
def largest_of_four(x, ROWS: gl.constexpr, N: gl.constexpr):
    """The largest of every four tiles of eight columns in `x [ROWS, 8 N]`, of a thread's own columns: `[ROWS, N / 4, 4]`."""
    x = gl.inline_asm_elementwise(largest_of_eight(), LARGEST_REGISTERS, [x], dtype=gl.int32, is_pure=True, pack=16)
    x, _ = x.reshape([ROWS, N // 4, 2, 2, 4, 2]).permute([0, 1, 4, 2, 3, 5]).split()
    x, _ = x.split()
    x, _ = x.permute([0, 1, 2, 3]).split()
    return x


@gluon.jit
def row_max(x, ROWS: gl.constexpr):
    """The largest of a thread's own columns of INT32 `x [ROWS, C]`, as FP32 `[ROWS, 4]`."""
    x = x.reshape([ROWS, x.shape[1] // 8, 4, 2])
    return gl.max(gl.max(x, 3), 1).to(gl.float32, bitcast=True)


@gluon.jit
def begin_bias(columns, options: gl.constexpr):
    """Begin the product of two matrices of 255, which makes all sums positive. It is unsigned (`host.unsigned`), and needs no K."""
    s = gl.zeros([options.rows, TILE], gl.int32, accumulator(options.rows, TILE))
    return warpgroup_mma(columns.full.slice(0, options.rows, 0), columns.full.permute([1, 0]), s, use_acc=False, is_async=True)


@gluon.jit
def begin(rows, ring, s, m, place, options: gl.constexpr):
    """Begin Q K of a tile when K is there; `s` is the product of `begin_bias`, which has ended."""
    ring.wait_k(place)
    if options.k_form == "bias":
        s = warpgroup_mma(rows.q, ring.k.index(place.stage).permute([1, 0]), s, use_acc=True, is_async=True)
    else:
        s = begin_scores(rows.q, ring.k.index(place.stage), m, options)
    return s


@gluon.jit
def begin_both(rows, ring, columns, m, place, options: gl.constexpr):
    """Begin Q K of a tile, with nothing else to multiply before it."""
    s = None
    if options.k_form == "bias":
        # It ends before Q K adds to it, a product of other types: see the log, 'The race'.
        s = warpgroup_mma_wait(0, deps=[begin_bias(columns, options)])
    return begin(rows, ring, s, m, place, options)


@gluon.jit
def finish(s, columns, place, options: gl.constexpr):
    """Wait for Q K. Returns `offset + s` with a token's scale applied if it has one, and the scales of 32 tokens if these have."""
    ROWS: gl.constexpr = options.rows
    BIASED: gl.constexpr = options.k_form == "bias"
    TOKEN: gl.constexpr = BIASED or options.k_form == "fma"
    group = ()
    if TOKEN and options.partitions == 1:  # loaded while the products run: there are registers
        ratio, offset = columns.of_scores(place.stage, BIASED, ROWS)
    s = warpgroup_mma_wait(0, deps=[s]).to(gl.float32, bitcast=True)
    if TOKEN:
        if options.partitions > 1:
            ratio, offset = columns.of_scores(place.stage, BIASED, ROWS)
        # Volatile: the numbers have arrived before the stage is released.
        s, ratio = gl.broadcast(s, ratio)
        s, offset = gl.broadcast(s, offset)
        s = gl.inline_asm_elementwise("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [s, ratio, offset], dtype=gl.float32, is_pure=False, pack=1)
    if options.k_form == "group":
        for i in gl.static_range(4):
            group += (pin(number(columns.k.index(64 * place.stage + i))),)
    return s, group


@gluon.jit
def weights(s, factor, m, unit, group, options: gl.constexpr):
    """Weights; the factor of sums so far; the largest scores so far; the tile's unit: its largest score, but not far below."""
    ROWS: gl.constexpr = options.rows
    ROW: gl.constexpr = m.type.layout
    UP: gl.constexpr = SUBNORMAL if options.v_form == "page" else 0.0
    OFFSET: gl.constexpr = MAGIC * SMALL if options.k_form == "bias" else MAGIC
    if options.k_form == "group":
        parts = split(s, 4)
        top = gl.full([ROWS], float("-inf"), gl.float32, ROW)[:, None]
        tops = ()
        for i in gl.static_range(4):
            t = row_max(parts[i].to(gl.int32, bitcast=True), ROWS)
            tops += (t,)
        f = gl.convert_layout(factor, gl.SliceLayout(1, tops[0].type.layout), assert_trivial=True)[:, None]
        top = (tops[0] - OFFSET) * (f * group[0])
        for i in gl.static_range(1, 4):
            top = gl.maximum(top, (tops[i] - OFFSET) * (f * group[i]))
        top = gl.convert_layout(gl.max(top, 1), ROW, assert_trivial=True)
    elif options.partitions == 1:
        top = largest_of_four(s.to(gl.int32, bitcast=True), ROWS, 16)
        top = gl.max(gl.max(top, 1), 1).to(gl.float32, bitcast=True)
        top = (gl.convert_layout(top, ROW, assert_trivial=True) - OFFSET) * factor
    else:
        top = (gl.max(s.to(gl.int32, bitcast=True), 1).to(gl.float32, bitcast=True) - OFFSET) * factor
    m = gl.maximum(m, top)
    new = gl.maximum(top, m - DEEP)
    shrink = gl.exp2(unit - new)
    if options.k_form == "group":
        xs = ()
        for i in gl.static_range(4):
            f = gl.convert_layout(factor, gl.SliceLayout(1, parts[i].type.layout), assert_trivial=True) * group[i]
            c = gl.convert_layout(new, gl.SliceLayout(1, parts[i].type.layout), assert_trivial=True)
            xs += (parts[i] * f[:, None] - (c - UP + OFFSET * f)[:, None],)
        x = gl.convert_layout(join(xs), s.type.layout, assert_trivial=True)
    else:
        x = s * factor[:, None] - (new - UP + OFFSET * factor)[:, None]
    return exp2(x, options.cubics), shrink, m, new


@gluon.constexpr_function
def synchronous(rows):
    """The registers of a product by `mma.sync`, whose 16 rows are those of a warp of a warpgroup's product."""
    return gl.NVMMADistributedLayout([2, 0], [rows // 16, 1], [16, 8])


@gluon.jit
def sums_of(p, like):
    """The sums of FP16 weights, or of integers: one of eight equal columns for each thread of four."""
    ROWS: gl.constexpr = p.shape[0]
    MMA: gl.constexpr = synchronous(ROWS)
    KIND: gl.constexpr = 2 if p.dtype == gl.float16 else 4
    ones = gl.full([TILE, 8], 1, p.dtype, gl.DotOperandLayout(1, MMA, KIND))
    p = gl.convert_layout(p, gl.DotOperandLayout(0, MMA, KIND), assert_trivial=True)
    total = mma_v2(p, ones, gl.zeros([ROWS, 8], gl.float32 if p.dtype == gl.float16 else gl.int32, MMA))
    total, _ = total.reshape([ROWS, 4, 2]).split()
    return gl.convert_layout(total.to(gl.float32, bitcast=True), like, assert_trivial=True)


@gluon.jit
def row_sum(p8, ones):
    none = gl.zeros([p8.shape[0], 8], gl.int32, accumulator(p8.shape[0], 8))
    p8 = gl.convert_layout(p8, gl.DotOperandLayout(0, accumulator(p8.shape[0], 8), 4), assert_trivial=True)
    return warpgroup_mma(p8, ones.permute([1, 0]), none, use_acc=False, is_async=True)


@gluon.jit
def rescaled(sums, shrink, total):
    return sums * gl.convert_layout(shrink, gl.SliceLayout(1, sums.type.layout), assert_trivial=True)[:, None] + total


@gluon.jit
def to_bytes(p, shrink, sums, ring, columns, place, options: gl.constexpr, P: gl.constexpr):
    """Weights as unsigned bytes; the rows' sums of weights, unless they are sums of these. V is there."""
    if options.v_form == "page":
        # Volatile, so the FP32 weights end here.
        p8 = gl.inline_asm_elementwise(TO_U8, "=r,f,f,f,f", [as_operand(p, P)], dtype=gl.int8, is_pure=False, pack=4)
        ring.wait_v(place)
    else:
        half = gl.inline_asm_elementwise(TO_HALF, "=r,f,f", [p], dtype=gl.float16, is_pure=False, pack=2)
        sums = rescaled(sums, shrink, sums_of(half, sums.type.layout))
        if options.partitions > 1:
            ring.wait_v(place)
        half, ratio = gl.broadcast(as_operand(half, P), columns.of_weights(place.stage, options.rows, P))
        p8 = gl.inline_asm_elementwise(HALF_TO_U8, "=r,r,r,r,r", [half, ratio], dtype=gl.int8, is_pure=False, pack=4)
    return p8, sums


@gluon.jit
def both_sums(sums, bias, shrink, v_ratio, total, options: gl.constexpr):
    """The rows' sums of weights, and of the integers that multiplied V, with another tile's sums of integers."""
    bias = rescaled(bias, shrink * v_ratio, total)
    if options.v_form == "page":
        sums = rescaled(sums, shrink, total)
    return sums, bias


@gluon.jit
def one_column(total, like):
    total, _ = total.to(gl.float32, bitcast=True).reshape([total.shape[0], 4, 2]).split()
    return gl.convert_layout(total, like, assert_trivial=True)


@gluon.jit
def tile_in_turn(rows, ring, columns, queries, tile, m, unit, sums, bias, acc, place, options: gl.constexpr, MASK: gl.constexpr):
    """Compute a whole tile: three warpgroups."""
    ROWS: gl.constexpr = options.rows
    OUT: gl.constexpr = accumulator(ROWS, options.width)
    s = begin_both(rows, ring, columns, m, place, options)
    # From memory: there are no registers for it between tiles.
    factor = queries.factor.index(rows.PARTITION).load(gl.SliceLayout(1, accumulator(ROWS, TILE))) * ring.k_scale(place)
    v_ratio = ring.v_ratio(place)
    s, group = finish(s, columns, place, options)
    ring.release_k(place)
    s = mask_scores(s, factor, rows, tile, options, MASK, True)
    p, shrink, m, unit = weights(s, factor, m, unit, group, options)
    p8, sums = to_bytes(p, shrink, sums, ring, columns, place, options, gl.DotOperandLayout(0, OUT, 4))
    if options.synchronous:
        sums, bias = both_sums(sums, bias, shrink, v_ratio, sums_of(p8, sums.type.layout), options)
    else:
        total = row_sum(p8, ring.ones)
    HALF: gl.constexpr = accumulator(ROWS, options.width // 2)
    none = gl.zeros([ROWS, options.width // 2], gl.int32, HALF)
    p8 = gl.convert_layout(p8, gl.DotOperandLayout(0, HALF, 4), assert_trivial=True)
    t0 = warpgroup_mma(p8, ring.v.index(2 * place.stage).permute([1, 0]), none, use_acc=False, is_async=True)
    t1 = warpgroup_mma(p8, ring.v.index(2 * place.stage + 1).permute([1, 0]), none, use_acc=False, is_async=True)
    if not options.synchronous:
        total = one_column(warpgroup_mma_wait(2, deps=[total]), sums.type.layout)
        sums, bias = both_sums(sums, bias, shrink, v_ratio, total, options)
    t0, t1 = warpgroup_mma_wait(0, deps=[t0, t1])
    t = whole(t0, t1, OUT).to(gl.float32, bitcast=True)
    if options.v_form == "token" and not ARRIVE_MEETS:
        sync()
    ring.release_v(place)
    acc = acc * gl.convert_layout(shrink * v_ratio, gl.SliceLayout(1, OUT), assert_trivial=True)[:, None] + t
    return m, unit, sums, bias, acc, ring.next(place)


@gluon.jit
def in_turn(rows, ring, columns, queries, tile, n_hi, n_free, place, options: gl.constexpr):
    """The loop over tiles. Returns sums in units of `unit`: of weights times codes + 128, of weights, of the integers that multiplied V."""
    acc = gl.zeros([options.rows, options.width], gl.float32, accumulator(options.rows, options.width))
    m = no_maximum(options.rows)
    unit = m
    _, sums = no_sums(options.rows)
    _, bias = no_sums(options.rows)
    for _ in range(gl.maximum(n_hi + 1, 1)):
        m, unit, sums, bias, acc, place = tile_in_turn(
            rows, ring, columns, queries, tile, m, unit, sums, bias, acc, place, options, True)  # fmt: skip
        tile -= 1
    for _ in range(n_free):
        m, unit, sums, bias, acc, place = tile_in_turn(
            rows, ring, columns, queries, tile, m, unit, sums, bias, acc, place, options, False)  # fmt: skip
    return acc, unit, sums, bias, place


@gluon.jit
def overlapped_tile(rows, ring, columns, s, group, factor, v_ratio, tile, m, unit, sums, bias, acc, k_place, v_place,
                    options: gl.constexpr, NEXT: gl.constexpr, MASK: gl.constexpr):  # fmt: skip
    """Softmax and P V of the tile whose scores are `s`; with NEXT, while the next tile's Q K (masked as `tile`) is multiplied."""
    ROWS: gl.constexpr = options.rows
    OUT: gl.constexpr = accumulator(ROWS, options.width)
    if options.v_form == "token":
        ring.wait_v(v_place)
    p, shrink, m, unit = weights(s, factor, m, unit, group, options)
    p8, sums = to_bytes(p, shrink, sums, ring, columns, v_place, options, gl.DotOperandLayout(0, OUT, 4))
    BIASED: gl.constexpr = NEXT and options.k_form == "bias"
    if BIASED:
        s = begin_bias(columns, options)
    if options.synchronous:
        sums, bias = both_sums(sums, bias, shrink, v_ratio, sums_of(p8, sums.type.layout), options)
    else:
        total = row_sum(p8, ring.ones)
    none = gl.zeros([ROWS, options.width], gl.int32, OUT)
    t = warpgroup_mma(p8, ring.v.index(v_place.stage).permute([1, 0]), none, use_acc=False, is_async=True)
    scaled = gl.convert_layout(shrink * v_ratio, gl.SliceLayout(1, OUT), assert_trivial=True)
    LEFT: gl.constexpr = 1 if NEXT else 0
    ratio = v_ratio
    if BIASED:  # it ends before Q K adds to it, while P V runs
        s = warpgroup_mma_wait(1 if options.synchronous else 2, deps=[s])
    if NEXT:
        s = begin(rows, ring, s, m, k_place, options)
        factor = rows.factor * ring.k_scale(k_place)
        v_ratio = ring.v_ratio(k_place)
    if options.synchronous:
        t = warpgroup_mma_wait(LEFT, deps=[t])
    else:
        t, total = warpgroup_mma_wait(LEFT, deps=[t, total])
    ring.release_v(v_place)
    if not options.synchronous:
        sums, bias = both_sums(sums, bias, shrink, ratio, one_column(total, sums.type.layout), options)
    acc = acc * scaled[:, None] + t.to(gl.float32, bitcast=True)
    if NEXT:
        s, group = finish(s, columns, k_place, options)
        ring.release_k(k_place)
        s = mask_scores(s, factor, rows, tile, options, MASK, True)
    return s, group, factor, v_ratio, m, unit, sums, bias, acc, ring.next(k_place), ring.next(v_place)


@gluon.jit
def overlapped(rows, ring, columns, tile, n_hi, n_free, place, options: gl.constexpr):
    """`in_turn` of two warpgroups."""
    k_place = place
    v_place = place
    acc = gl.zeros([options.rows, options.width], gl.float32, accumulator(options.rows, options.width))
    m = no_maximum(options.rows)
    unit = m
    _, sums = no_sums(options.rows)
    _, bias = no_sums(options.rows)
    s = begin_both(rows, ring, columns, m, k_place, options)
    factor = rows.factor * ring.k_scale(k_place)
    v_ratio = ring.v_ratio(k_place)
    s, group = finish(s, columns, k_place, options)
    ring.release_k(k_place)
    s = mask_scores(s, factor, rows, tile, options, True, True)
    k_place = ring.next(k_place)
    tile -= 1
    for _ in range(n_hi):
        s, group, factor, v_ratio, m, unit, sums, bias, acc, k_place, v_place = overlapped_tile(
            rows, ring, columns, s, group, factor, v_ratio, tile, m, unit, sums, bias, acc, k_place, v_place, options, True,
            True)  # fmt: skip
        tile -= 1
    for _ in range(n_free):
        s, group, factor, v_ratio, m, unit, sums, bias, acc, k_place, v_place = overlapped_tile(
            rows, ring, columns, s, group, factor, v_ratio, tile, m, unit, sums, bias, acc, k_place, v_place, options, True,
            False)  # fmt: skip
        tile -= 1
    s, group, factor, v_ratio, m, unit, sums, bias, acc, _, v_place = overlapped_tile(
        rows, ring, columns, s, group, factor, v_ratio, tile, m, unit, sums, bias, acc, k_place, v_place, options, False,
        False)  # fmt: skip
    return acc, unit, sums, bias, k_place
