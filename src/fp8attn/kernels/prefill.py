"""FP8 attention for Hopper: many queries over the pages, FP32 accumulation at every tile. See docs/kernels.md.

    s = (q_fp8 . k_fp8) * (q_scale * k_scale * softmax_scale)        one factor a row and tile
    acc = acc * (alpha * v_scale_before / v_scale) + p_fp8 v_fp8     the partial starts from zero: the tensor core's short accumulator
    out = acc * v_scale / L + v_mean * l / L                         never holds more than 128 products

A CTA is three (two at head_dim 256, and at 128 where that takes less time) warpgroups that multiply, 64 query rows each, and one warp that
claims work, reads the page table and feeds them by TMA. Registers, not shared memory, are what is short: comments say where an expression
stands as it does because of them.
"""

# ruff: noqa: SIM108 - an `if` on a constexpr is no choice between values
from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from .. import rotation
from ..layout import FP8, KVPages
from .combine import MAX_SPLITS, combine
from .gluon import (
    advance,
    arrive_with_words,
    fence_async_shared,
    fetch,
    fetch_words,
    gdc_wait,
    gl,
    gluon,
    mbarrier,
    mma_v2,
    reinterpret,
    send,
    send_wait,
    sync,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .launch import Constants, Counters, Tiles, View, constants, launch, num_sms
from .pages import allocate_k, fetch_k, fetch_v, page_bytes, tiles, v_layout
from .rotation import block_size

ROWS = gl.constexpr(64)  # query rows of a warpgroup: the height of its MMA
TILE = gl.constexpr(128)  # keys of a tile: a page
P_SHIFT = gl.constexpr(8.0)  # weights are held as 2^8 p: E4M3 keeps 17 binades below them
# Rows that see fewer keys are multiplied twice, for roundings of Q and P do not average away: prompts, whose other rows see more, and
# queries that all see the same keys.
FEW = gl.constexpr(256)
FEW_IN_ALL = gl.constexpr(640)
TINY = gl.constexpr(2.0**-100)  # the least that a row of queries is scaled by
LOW_SIGNS, HIGH_SIGNS = (gl.constexpr(bits) for bits in (rotation.LOW_SIGNS, rotation.HIGH_SIGNS))
ROTATED = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))  # 16 channels of rotated queries
UNSEEN = gl.constexpr(-1e28)  # a row's maximum before it has seen a key: finite, so that differences are
HIDDEN = gl.constexpr(float("-inf"))  # a masked score
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 32]))  # the rows' sums: eight equal columns
# INT8 products are summed onto the bits of this number: then the bits of every sum are those of MAGIC + s in FP32 (|s| < 2^22 up to
# head_dim 256), with no instruction that converts.
MAGIC = gl.constexpr(12582912.0)
LN2 = gl.constexpr(math.log(2))
LOG2E = gl.constexpr(math.log2(math.e))

# What the producer tells the multiplying warps of an item, one int32 each. Its rows from FIRST on, and below COUNT, are queries.
TILES, LAST, BATCH, TOKEN, COUNT, POSITION, LENGTH, HEAD, KV_HEAD, LEFT, ANGLES, FIRST = (gl.constexpr(i) for i in range(12))
FIELDS = gl.constexpr(16)


def _exp2_asm(n: int, cubics: int) -> str:
    """PTX for `n` exponentials, `cubics` of them evenly spread polynomials on the FMA pipe, which idles while ex2 is the bottleneck.

    2^x = 2^round(x) * 2^f, |f| <= 1/2: a cubic of relative error 1e-4 (E4M3 keeps 2^-4). A NaN stays one.
    """
    chosen = {int((i + 0.5) * n / cubics) for i in range(cubics)}
    lines = []
    for i in range(n):
        out, x = f"${i}", f"${n + i}"
        if i in chosen:
            lines.append(
                f"max.NaN.ftz.f32 t, {x}, 0fC2FA0000; add.ftz.f32 r, t, 0f4B400000; sub.ftz.f32 b, r, 0f4B400000; sub.ftz.f32 f, t, b;"
                " fma.rn.ftz.f32 p, f, 0f3D645DC0, 0f3E763E2F; fma.rn.ftz.f32 p, p, f, 0f3F317218; fma.rn.ftz.f32 p, p, f, 0f3F800000;"
                f" mov.b32 i, r; shl.b32 i, i, 23; add.s32 i, i, 0x3F800000; mov.b32 t, i; mul.ftz.f32 {out}, p, t;"
            )
        else:
            lines.append(f"ex2.approx.ftz.f32 {out}, {x};")
    return "{ .reg .f32 t, r, b, f, p; .reg .s32 i;\n" + "\n".join(lines) + "}"


def _fill_asm(part: int) -> str:
    """PTX for 16 registers that hold `MAGIC + 0 * c`, with another c for each: ptxas would move equal ones, by a pipe of half the speed."""
    lines = (f"fma.rn.f32 ${i}, ${16 + i}, 0f{0x3F800000 + (16 * part + i << 16):08X}, magic;" for i in range(16))
    return "{ .reg .f32 magic; mov.f32 magic, 0f4B400000;\n" + "\n".join(lines) + "}"


FILL_0, FILL_1, FILL_2, FILL_3 = (gl.constexpr(_fill_asm(part)) for part in range(4))
FILL_REGS = gl.constexpr(",".join(["=r"] * 16 + ["f"] * 16))
_EX2 = [gl.constexpr(_exp2_asm(16, cubics)) for cubics in range(3)]
EX2_0, EX2_1, EX2_2 = _EX2
EX2_REGS = gl.constexpr(",".join(["=f"] * 16 + ["f"] * 16))

TO_FP8 = gl.constexpr(
    "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; mov.b32 $0, {lo, hi}; }"
)
LOGISTIC = gl.constexpr("{ .reg .f32 t; ex2.approx.ftz.f32 t, $1; add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }")  # 1 / (1 + 2^x)
# What TO_FP8 rounds off, itself rounded to FP8.
REST_TO_FP8 = gl.constexpr("""{ .reg .b16 lo, hi, h0, h1, h2, h3; .reg .b32 a, b; .reg .f32 x0, x1, x2, x3;
cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3;
cvt.rn.f16x2.e4m3x2 a, lo; cvt.rn.f16x2.e4m3x2 b, hi; mov.b32 {h0, h1}, a; mov.b32 {h2, h3}, b;
cvt.f32.f16 x0, h0; cvt.f32.f16 x1, h1; cvt.f32.f16 x2, h2; cvt.f32.f16 x3, h3;
sub.f32 x0, $1, x0; sub.f32 x1, $2, x1; sub.f32 x2, $3, x2; sub.f32 x3, $4, x3;
cvt.rn.satfinite.e4m3x2.f32 lo, x1, x0; cvt.rn.satfinite.e4m3x2.f32 hi, x3, x2; mov.b32 $0, {lo, hi}; }""")

# RoPE of a pair: every product and sum rounds by itself, as torch's do.
TURN_PAIR = gl.constexpr("""{ .reg .f32 x, y; mul.rn.f32 x, $2, $4; mul.rn.f32 y, $3, $5; sub.rn.f32 $0, x, y;
mul.rn.f32 x, $3, $4; mul.rn.f32 y, $2, $5; add.rn.f32 $1, x, y; }""")


# Rows of scores in registers


@gluon.jit
def _exp2(x, CUBICS: gl.constexpr):
    if CUBICS == 0:
        y = gl.inline_asm_elementwise(EX2_0, EX2_REGS, [x], dtype=gl.float32, is_pure=True, pack=16)
    elif CUBICS == 1:
        y = gl.inline_asm_elementwise(EX2_1, EX2_REGS, [x], dtype=gl.float32, is_pure=True, pack=16)
    else:
        y = gl.inline_asm_elementwise(EX2_2, EX2_REGS, [x], dtype=gl.float32, is_pure=True, pack=16)
    return y


@gluon.jit
def _pin(x):
    """`x`, computed here and not later: a volatile move."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _as_operand(p, P: gl.constexpr):
    """Weights as the left operand of P V: V's tokens lie in `layout.V_ORDER`, so these are the same registers, renamed."""
    p = p.reshape([ROWS, TILE // 16, 2, 4, 2]).permute(0, 1, 3, 2, 4).reshape([ROWS, TILE])
    return gl.convert_layout(p, P, assert_trivial=True)


@gluon.jit
def _to_fp8(x):
    return gl.inline_asm_elementwise(TO_FP8, "=r,f,f,f,f", [x], dtype=gl.float8e4nv, is_pure=True, pack=4)


@gluon.jit
def _rest_to_fp8(x):
    return gl.inline_asm_elementwise(REST_TO_FP8, "=r,f,f,f,f", [x], dtype=gl.float8e4nv, is_pure=True, pack=4)


@gluon.jit
def _weights(s, factor, m, CUBICS: gl.constexpr, CAP: gl.constexpr, INT: gl.constexpr):
    """One tile of online softmax: weights 2^8 p, the row's new maximum, and what sums under the old one shrink by. With INT the scores
    are `MAGIC + s`."""
    if CAP:
        m_new = gl.maximum(m, gl.max(s, 1))
        x = s - (m_new - P_SHIFT)[:, None]
    elif INT:
        # Positive numbers compare as integers do, for which there is a maximum of three; a masked score is negative.
        top = gl.max(s.to(gl.int32, bitcast=True), 1).to(gl.float32, bitcast=True)
        m_new = gl.maximum(m, (top - MAGIC) * factor)
        x = s * factor[:, None] - (m_new - P_SHIFT + MAGIC * factor)[:, None]
    else:
        m_new = gl.maximum(m, gl.max(s, 1) * factor)
        x = s * factor[:, None] - (m_new - P_SHIFT)[:, None]
    alpha = gl.exp2(m - m_new)  # maxima ignore NaN (heeding it costs 7% of the kernel); weights keep it
    return _exp2(x, CUBICS), alpha, m_new


@gluon.jit
def _add_up(p8, ones_s, total, ACC: gl.constexpr):
    """Begin `total` (+)= row sums of FP8 weights, eight times each: a product with ones costs less than 64 additions.

    They are the weights that P V multiplies, so what rounding does to all of them alike cancels.
    """
    p8 = gl.convert_layout(p8, gl.DotOperandLayout(0, SUMS, 4), assert_trivial=True)
    return warpgroup_mma(p8, ones_s.permute([1, 0]), total, use_acc=ACC, is_async=True)


@gluon.jit
def _grow(z, alpha, total):
    """The rows' sums with another tile's; a thread keeps one of its two equal columns."""
    total, _ = total.reshape([ROWS, 4, 2]).split()
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, z.type.layout), assert_trivial=True)
    return z * alpha[:, None] + gl.convert_layout(total, z.type.layout, assert_trivial=True)


@gluon.jit
def _nothing():
    """What `_add_up` and `_grow` start from."""
    total = gl.zeros([ROWS, 8], gl.float32, SUMS)
    z, _ = total.reshape([ROWS, 4, 2]).split()
    return total, z


@gluon.jit
def _row_sums(z, S: gl.constexpr):
    return gl.convert_layout(gl.max(z, 1), gl.SliceLayout(1, S), assert_trivial=True)


@gluon.jit
def _visible(s, factor, shift, cap, edge, tile, S: gl.constexpr, WG: gl.constexpr, MASK: gl.constexpr, LO: gl.constexpr,
             CAP: gl.constexpr, INT: gl.constexpr):  # fmt: skip
    """Raw scores after the cap (then in powers of two, `factor` and `shift` applied) and the mask."""
    if CAP and INT:
        s = s - MAGIC
    if CAP:  # cap * tanh(y / cap) = cap - 2 cap / (2^(2 y log2(e) / cap) + 1), which is exact enough where tanh.approx is not
        y = s * (factor * (2.0 * LOG2E / cap))[:, None] + (shift * (2.0 * LOG2E / cap))[:, None]
        s = cap - 2.0 * cap * gl.inline_asm_elementwise(LOGISTIC, "=f,f", [y], dtype=gl.float32, is_pure=True, pack=1)
    if MASK:
        info_s, slot, causal, window = edge  # read here, lest the whole tiles' loop carry it
        last = _last_key(info_s, slot, causal, S, WG)
        key = gl.arange(0, TILE, gl.SliceLayout(0, S))[None, :]
        # Bits 1 and 2 of a thread's columns are its own, the others the same in all threads: compare with constants.
        own = key & 6
        key = key & ~6
        seen = key <= (last - tile * TILE)[:, None] - own
        if LO:
            first = gl.maximum(last - window + 1, _field(info_s, slot, LEFT))
            seen = seen & (key >= (first - tile * TILE)[:, None] - own)
        s = gl.where(seen, s, HIDDEN)
    return s


@gluon.jit
def _number(memory):
    """The one number in `memory`, read by all threads."""
    return gl.max(memory.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _field(info_s, slot, i: gl.constexpr):
    """One of the integers that the producer announced an item with."""
    return _number(info_s.index(slot * FIELDS + i))


@gluon.jit
def _count(info_s, slot, WG: gl.constexpr):
    """Rows of a warpgroup that are queries, its first ones; none where that is zero or less."""
    return gl.where(_field(info_s, slot, FIRST) > WG * ROWS, 0, _field(info_s, slot, COUNT) - WG * ROWS)


@gluon.jit
def _last_key(info_s, slot, causal, S: gl.constexpr, WG: gl.constexpr):
    """The last key that each row sees."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, S)) + (WG * ROWS + ((1 - causal) << 30))
    return gl.minimum(_field(info_s, slot, POSITION) + row, _field(info_s, slot, LENGTH) - 1)


@gluon.jit
def _fill(zero, ASM: gl.constexpr):
    """MAGIC's bits in the place of every zero."""
    return gl.inline_asm_elementwise(ASM, FILL_REGS, [zero], dtype=gl.int32, is_pure=True, pack=16)


@gluon.jit
def _scores(q, k, m):
    """Q K, begun; `m` are the rows' maxima so far, of which nothing is used but that they are finite."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 32])
    if k.dtype == gl.int8:
        zero, _ = gl.broadcast((m * 0.0)[:, None], gl.zeros([ROWS, TILE], gl.float32, S))
        a, b, c, d = _split(zero, 4)
        s = _join((_fill(a, FILL_0), _fill(b, FILL_1), _fill(c, FILL_2), _fill(d, FILL_3)))
        s = gl.convert_layout(s, S, assert_trivial=True)
        s = warpgroup_mma(q, k.permute([1, 0]), s, use_acc=True, is_async=True)
    else:
        s = warpgroup_mma(q, k.permute([1, 0]), gl.zeros([ROWS, TILE], gl.float32, S), use_acc=False, is_async=True)
    return s


@gluon.jit
def _scored(s):
    """Scores when their products have been waited for: in FP32, `MAGIC + s` of integers."""
    if s.dtype == gl.int32:
        s = s.to(gl.float32, bitcast=True)
    return s


@gluon.jit
def _scores_twice(q, rest, k):
    """Q K, done, in FP32, of both parts of Q."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 32])
    if k.dtype == gl.int8:  # the rest counts 1 / 256: all of it is an integer below 2^30
        s = warpgroup_mma(q, k.permute([1, 0]), gl.zeros([ROWS, TILE], gl.int32, S), use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s]) * 256
        s = warpgroup_mma_wait(0, deps=[warpgroup_mma(rest, k.permute([1, 0]), s, use_acc=True, is_async=True)])
        s = s.to(gl.float32) * (1 / 256)
    else:
        s = warpgroup_mma(rest, k.permute([1, 0]), gl.zeros([ROWS, TILE], gl.float32, S), use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[warpgroup_mma(q, k.permute([1, 0]), s, use_acc=True, is_async=True)])
    return s


@gluon.jit
def _weigh(q, rest_s, ring, bars, q_factor, shift, cap, edge, tile, m, stage, phase, P: gl.constexpr, WG: gl.constexpr,
           STAGES: gl.constexpr, CUBICS: gl.constexpr, MASK: gl.constexpr, LO: gl.constexpr, CAP: gl.constexpr,
           REST: gl.constexpr):  # fmt: skip
    """A tile's weights as operands of P V, in FP32 and FP8; what sums and the output so far shrink by; the rows' new maxima.

    With REST `rest_s` holds, for every other index, what rounding cut off the queries: their products come on top.
    """
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 32])
    k_s, _, scale_s, _ = ring
    k_full, k_empty, _, _ = bars
    INT: gl.constexpr = k_s.dtype == gl.int8 and not REST
    mbarrier.wait(k_full.index(stage), phase)
    factor = q_factor * _number(scale_s.index(stage))
    ratio = _number(scale_s.index(STAGES + stage))
    if REST:
        # `tile >> 30` is zero, and ptxas cannot know: descriptors that it kept would leave no uniform registers to the ring's place.
        s = _scores_twice(q, rest_s.index(2 * WG + (tile >> 30)), k_s.index(stage + (tile >> 30)))
    else:
        s = _scored(warpgroup_mma_wait(0, deps=[_scores(q, k_s.index(stage), m)]))
    mbarrier.arrive(k_empty.index(stage))
    s = _visible(s, factor, shift, cap, edge, tile, S, WG, MASK, LO, CAP, INT)
    p, alpha, m = _weights(s, factor, m, CUBICS, CAP, INT)
    # Volatile: it stays before the next wait, and without what it cuts off the FP32 weights end there.
    p = _as_operand(p, P)
    p8 = gl.inline_asm_elementwise(TO_FP8, "=r,f,f,f,f", [p], dtype=gl.float8e4nv, is_pure=False, pack=4)
    return p, p8, alpha, alpha * ratio, m


# One tile: two warpgroups, head_dim up to 128


@gluon.jit
def _step(q, ring, bars, s, factor, ratio, q_factor, shift, cap, edge, tile, m, z, acc, kst, kph, vst, vph,
          WG: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CUBICS: gl.constexpr, MASK: gl.constexpr, LO: gl.constexpr,
          CAP: gl.constexpr):  # fmt: skip
    """Softmax and P V of the tile whose scores are `s`, while the next tile's Q K (masked as `tile`) is multiplied."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 32])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 32])
    k_s, v_s, scale_s, ones_s = ring
    k_full, k_empty, v_full, v_empty = bars
    INT: gl.constexpr = k_s.dtype == gl.int8
    p, alpha, m = _weights(s, factor, m, CUBICS, CAP, INT)
    p8 = _to_fp8(_as_operand(p, gl.DotOperandLayout(0, OUT, 4)))
    none, _ = _nothing()
    mbarrier.wait(v_full.index(vst), vph)
    total = _add_up(p8, ones_s, none, False)
    t = warpgroup_mma(p8, v_s.index(vst).permute([1, 0]), gl.zeros([ROWS, D], gl.float32, OUT), use_acc=False, is_async=True)
    mbarrier.wait(k_full.index(kst), kph)
    s_next = _scores(q, k_s.index(kst), m)
    shrink = gl.convert_layout(alpha * ratio, gl.SliceLayout(1, OUT), assert_trivial=True)
    k_scale = _number(scale_s.index(kst))
    ratio = _number(scale_s.index(STAGES + kst))
    t, total = warpgroup_mma_wait(1, deps=[t, total])
    mbarrier.arrive(v_empty.index(vst))
    z = _grow(z, alpha, total)
    acc = acc * shrink[:, None] + t
    factor = q_factor * k_scale
    s = _scored(warpgroup_mma_wait(0, deps=[s_next]))
    mbarrier.arrive(k_empty.index(kst))
    s = _visible(s, factor, shift, cap, edge, tile, S, WG, MASK, LO, CAP, INT)
    kst, kph = advance(kst, kph, STAGES)
    vst, vph = advance(vst, vph, STAGES)
    return s, factor, ratio, m, z, acc, kst, kph, vst, vph


@gluon.jit
def _attend(q, ring, bars, q_factor, shift, cap, edge, top, n_hi, n_free, n_lo, stage, phase,
            WG: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CUBICS: gl.constexpr, LO: gl.constexpr,
            CAP: gl.constexpr):  # fmt: skip
    """Tiles `top`, `top - 1`, ...: first those that end
    beyond some row's last key, then whole ones, then those with keys left of a window."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 32])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 32])
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 4)
    k_s, v_s, scale_s, ones_s = ring
    k_full, k_empty, v_full, v_empty = bars
    kst = stage
    kph = phase
    vst = stage
    vph = phase
    acc = gl.zeros([ROWS, D], gl.float32, OUT)
    m = gl.full([ROWS], UNSEEN, gl.float32, gl.SliceLayout(1, S))
    none, z = _nothing()
    mbarrier.wait(k_full.index(kst), kph)
    INT: gl.constexpr = k_s.dtype == gl.int8
    s = _scores(q, k_s.index(kst), m)
    factor = q_factor * _number(scale_s.index(kst))
    ratio = _number(scale_s.index(STAGES + kst))
    s = _scored(warpgroup_mma_wait(0, deps=[s]))
    mbarrier.arrive(k_empty.index(kst))
    s = _visible(s, factor, shift, cap, edge, top, S, WG, True, LO, CAP, INT)
    kst, kph = advance(kst, kph, STAGES)
    tile = top - 1
    for _ in range(n_hi):
        s, factor, ratio, m, z, acc, kst, kph, vst, vph = _step(
            q, ring, bars, s, factor, ratio, q_factor, shift, cap, edge, tile, m, z, acc, kst, kph, vst, vph,
            WG, D, STAGES, CUBICS, True, LO, CAP)  # fmt: skip
        tile -= 1
    for _ in range(n_free):
        s, factor, ratio, m, z, acc, kst, kph, vst, vph = _step(
            q, ring, bars, s, factor, ratio, q_factor, shift, cap, edge, tile, m, z, acc, kst, kph, vst, vph,
            WG, D, STAGES, CUBICS, False, LO, CAP)  # fmt: skip
    if LO:
        tile -= n_free
        for _ in range(n_lo):
            s, factor, ratio, m, z, acc, kst, kph, vst, vph = _step(
                q, ring, bars, s, factor, ratio, q_factor, shift, cap, edge, tile, m, z, acc, kst, kph, vst, vph,
                WG, D, STAGES, CUBICS, True, LO, CAP)  # fmt: skip
            tile -= 1
    p, alpha, m = _weights(s, factor, m, CUBICS, CAP, INT)
    p8 = _to_fp8(_as_operand(p, P))
    mbarrier.wait(v_full.index(vst), vph)
    total = _add_up(p8, ones_s, none, False)
    t = warpgroup_mma(p8, v_s.index(vst).permute([1, 0]), gl.zeros([ROWS, D], gl.float32, OUT), use_acc=False, is_async=True)
    t, total = warpgroup_mma_wait(0, deps=[t, total])
    mbarrier.arrive(v_empty.index(vst))
    acc = acc * gl.convert_layout(alpha * ratio, gl.SliceLayout(1, OUT), assert_trivial=True)[:, None] + t
    return acc, m, _row_sums(_grow(z, alpha, total), S), kst, kph


# One tile: three warpgroups


@gluon.jit
def _tile(q, ring, bars, q_factor, factor_s, shift, cap, edge, tile, m, z, acc, stage, phase,
          WG: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CUBICS: gl.constexpr, MASK: gl.constexpr, Q16: gl.constexpr,
          LO: gl.constexpr, CAP: gl.constexpr):  # fmt: skip
    """A whole tile, one thing after the other: the other two warpgroups fill the pipes meanwhile."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 32])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 32])
    k_s, v_s, scale_s, ones_s = ring
    k_full, k_empty, v_full, v_empty = bars
    mbarrier.wait(k_full.index(stage), phase)
    s = _scores(q, k_s.index(stage), m)
    if Q16:
        q_factor = factor_s.load(gl.SliceLayout(1, S))  # no registers for it between tiles
    factor = q_factor * _number(scale_s.index(stage))
    ratio = _number(scale_s.index(STAGES + stage))
    s = _scored(warpgroup_mma_wait(0, deps=[s]))
    mbarrier.arrive(k_empty.index(stage))
    INT: gl.constexpr = k_s.dtype == gl.int8
    s = _visible(s, factor, shift, cap, edge, tile, S, WG, MASK, LO, CAP, INT)
    p, alpha, m = _weights(s, factor, m, CUBICS, CAP, INT)
    # Volatile: it stays before the next wait, and the FP32 weights end there.
    p = _as_operand(p, gl.DotOperandLayout(0, OUT, 4))
    p8 = gl.inline_asm_elementwise(TO_FP8, "=r,f,f,f,f", [p], dtype=gl.float8e4nv, is_pure=False, pack=4)
    mbarrier.wait(v_full.index(stage), phase)
    total, _ = _nothing()
    total = _add_up(p8, ones_s, total, False)
    if v_s.shape[1] < D:  # in halves, as `_attend_few` wants them
        HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D // 2, 32])
        zero = gl.zeros([ROWS, D // 2], gl.float32, HALF)
        p8 = gl.convert_layout(p8, gl.DotOperandLayout(0, HALF, 4), assert_trivial=True)
        t0 = warpgroup_mma(p8, v_s.index(2 * stage).permute([1, 0]), zero, use_acc=False, is_async=True)
        t1 = warpgroup_mma(p8, v_s.index(2 * stage + 1).permute([1, 0]), zero, use_acc=False, is_async=True)
        z = _grow(z, alpha, warpgroup_mma_wait(2, deps=[total]))
        t0, t1 = warpgroup_mma_wait(0, deps=[t0, t1])
        t = _whole(t0, t1, OUT)
    else:
        t = warpgroup_mma(p8, v_s.index(stage).permute([1, 0]), gl.zeros([ROWS, D], gl.float32, OUT), use_acc=False, is_async=True)
        z = _grow(z, alpha, warpgroup_mma_wait(1, deps=[total]))
        t = warpgroup_mma_wait(0, deps=[t])
    mbarrier.arrive(v_empty.index(stage))
    acc = acc * gl.convert_layout(alpha * ratio, gl.SliceLayout(1, OUT), assert_trivial=True)[:, None] + t
    stage, phase = advance(stage, phase, STAGES)
    return m, z, acc, stage, phase


@gluon.jit
def _attend_in_turn(q, ring, bars, q_factor, factor_s, shift, cap, edge, tile, n_hi, n_free, n_lo, stage, phase,
                    WG: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CUBICS: gl.constexpr, Q16: gl.constexpr, LO: gl.constexpr,
                    CAP: gl.constexpr):  # fmt: skip
    """As `_attend`."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 32])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 32])
    acc = gl.zeros([ROWS, D], gl.float32, OUT)
    m = gl.full([ROWS], UNSEEN, gl.float32, gl.SliceLayout(1, S))
    _, z = _nothing()
    for _ in range(gl.maximum(n_hi + 1, 1)):  # `maximum` says that it is entered: ptxas computes in it what is read behind it
        m, z, acc, stage, phase = _tile(
            q, ring, bars, q_factor, factor_s, shift, cap, edge, tile, m, z, acc, stage, phase,
            WG, D, STAGES, CUBICS, True, Q16, LO, CAP)  # fmt: skip
        tile -= 1
    for _ in range(n_free):
        m, z, acc, stage, phase = _tile(
            q, ring, bars, q_factor, factor_s, shift, cap, edge, tile, m, z, acc, stage, phase,
            WG, D, STAGES, CUBICS, False, Q16, LO, CAP)  # fmt: skip
    if LO:
        tile -= n_free
        for _ in range(n_lo):
            m, z, acc, stage, phase = _tile(
                q, ring, bars, q_factor, factor_s, shift, cap, edge, tile, m, z, acc, stage, phase,
            WG, D, STAGES, CUBICS, True, Q16, LO, CAP)  # fmt: skip
            tile -= 1
    return acc, m, _row_sums(z, S), stage, phase


@gluon.jit
def _whole(a, b, LAYOUT: gl.constexpr):
    """Two halves of the channels as one tile: the same registers."""
    return gl.convert_layout(gl.join(a, b).permute([0, 2, 1]).reshape([ROWS, 2 * a.shape[1]]), LAYOUT, assert_trivial=True)


@gluon.jit
def _add_both(acc, shrink, zero, rest, p8, v):
    """`acc * shrink` and the products of both parts of P."""
    t = warpgroup_mma(rest, v.permute([1, 0]), zero, use_acc=False, is_async=True)
    t = warpgroup_mma_wait(0, deps=[warpgroup_mma(p8, v.permute([1, 0]), t, use_acc=True, is_async=True)])
    return _pin(acc * shrink + t)


@gluon.jit
def _attend_few(q, rest_s, ring, bars, q_factor, shift, cap, edge, tile, n, stage, phase,
                WG: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CUBICS: gl.constexpr, Q16: gl.constexpr, LO: gl.constexpr,
                CAP: gl.constexpr):  # fmt: skip
    """`_attend` where rows of few keys do not average roundings away: Q and P are multiplied twice, what FP8 cuts off them as well."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 32])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 32])
    _, v_s, _, ones_s = ring
    _, _, v_full, v_empty = bars
    acc = gl.zeros([ROWS, D], gl.float32, OUT)
    m = gl.full([ROWS], UNSEEN, gl.float32, gl.SliceLayout(1, S))
    none, z = _nothing()
    for _ in range(n):
        p, p8, alpha, shrink, m = _weigh(
            q, rest_s, ring, bars, q_factor, shift, cap, edge, tile, m, stage, phase,
            gl.DotOperandLayout(0, OUT, 4), WG, STAGES, CUBICS, True, LO, CAP, Q16)  # fmt: skip
        rest = gl.inline_asm_elementwise(REST_TO_FP8, "=r,f,f,f,f", [p], dtype=gl.float8e4nv, is_pure=False, pack=4)
        mbarrier.wait(v_full.index(stage), phase)
        total = _add_up(p8, ones_s, _add_up(rest, ones_s, none, False), True)
        z = _grow(z, alpha, warpgroup_mma_wait(0, deps=[total]))
        shrink = gl.convert_layout(shrink, gl.SliceLayout(1, OUT), assert_trivial=True)
        if v_s.shape[1] < D:  # in halves, for want of registers; see `_tile_wide`
            HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D // 2, 32])
            zero = gl.zeros([ROWS, D // 2], gl.float32, HALF)
            shrink = gl.convert_layout(shrink, gl.SliceLayout(1, HALF), assert_trivial=True)[:, None]
            p8 = gl.convert_layout(p8, gl.DotOperandLayout(0, HALF, 4), assert_trivial=True)
            rest = gl.convert_layout(rest, gl.DotOperandLayout(0, HALF, 4), assert_trivial=True)
            a0, a1 = acc.reshape([ROWS, 2, D // 2]).permute([0, 2, 1]).split()
            a0 = _add_both(gl.convert_layout(a0, HALF, assert_trivial=True), shrink, zero, rest, p8, v_s.index(2 * stage))
            mbarrier.wait(v_full.index(stage), phase)
            a1 = _add_both(gl.convert_layout(a1, HALF, assert_trivial=True), shrink, zero, rest, p8, v_s.index(2 * stage + 1))
            acc = _whole(a0, a1, OUT)
        else:
            acc = _add_both(acc, shrink[:, None], gl.zeros([ROWS, D], gl.float32, OUT), rest, p8, v_s.index(stage))
        mbarrier.arrive(v_empty.index(stage))
        stage, phase = advance(stage, phase, STAGES)
        tile -= 1
    return acc, m, _row_sums(z, S), stage, phase


# One tile: head_dim 256


@gluon.jit
def _tile_wide(q, rest_s, ring, bars, q_factor, shift, cap, edge, tile, m, z, a0, a1, a2, a3, stage, phase,
               WG: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CUBICS: gl.constexpr, MASK: gl.constexpr, LO: gl.constexpr,
               CAP: gl.constexpr, FEW: gl.constexpr, REST: gl.constexpr):  # fmt: skip
    """A whole tile. P V in four slices of channels, for want of registers; the other warpgroup fills the tensor core meanwhile.

    ptxas would overlap the slices and spill. The volatile moves, and waits that have already been passed (each ends a basic block),
    keep the life of one slice's partial apart from the next but one.
    """
    Q: gl.constexpr = D // 4
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, Q, 32])
    _, v_s, _, ones_s = ring
    _, _, v_full, v_empty = bars
    p, p8, alpha, shrink, m = _weigh(
        q, rest_s, ring, bars, q_factor, shift, cap, edge, tile, m, stage, phase,
        gl.DotOperandLayout(0, OUT, 4), WG, STAGES, CUBICS, MASK, LO, CAP, REST)  # fmt: skip
    if FEW:
        rest = gl.inline_asm_elementwise(REST_TO_FP8, "=r,f,f,f,f", [p], dtype=gl.float8e4nv, is_pure=False, pack=4)
    shrink = gl.convert_layout(shrink, gl.SliceLayout(1, OUT), assert_trivial=True)[:, None]
    zero = gl.zeros([ROWS, Q], gl.float32, OUT)
    mbarrier.wait(v_full.index(stage), phase)
    none, _ = _nothing()
    if FEW:
        total = _add_up(p8, ones_s, _add_up(rest, ones_s, none, False), True)
        z = _grow(z, alpha, warpgroup_mma_wait(0, deps=[total]))
        a0 = _add_both(a0, shrink, zero, rest, p8, v_s.index(4 * stage))
        mbarrier.wait(v_full.index(stage), phase)
        a1 = _add_both(a1, shrink, zero, rest, p8, v_s.index(4 * stage + 1))
        mbarrier.wait(v_full.index(stage), phase)
        a2 = _add_both(a2, shrink, zero, rest, p8, v_s.index(4 * stage + 2))
        mbarrier.wait(v_full.index(stage), phase)
        a3 = _add_both(a3, shrink, zero, rest, p8, v_s.index(4 * stage + 3))
    else:
        total = _add_up(p8, ones_s, none, False)
        t0 = warpgroup_mma(p8, v_s.index(4 * stage).permute([1, 0]), zero, use_acc=False, is_async=True)
        z = _pin(_grow(z, alpha, warpgroup_mma_wait(1, deps=[total])))
        t1 = warpgroup_mma(p8, v_s.index(4 * stage + 1).permute([1, 0]), zero, use_acc=False, is_async=True)
        t0 = warpgroup_mma_wait(1, deps=[t0])
        t0 = warpgroup_mma_wait(1, deps=[t0])
        a0 = _pin(a0 * shrink + t0)
        mbarrier.wait(v_full.index(stage), phase)
        t2 = warpgroup_mma(p8, v_s.index(4 * stage + 2).permute([1, 0]), zero, use_acc=False, is_async=True)
        t1 = warpgroup_mma_wait(1, deps=[t1])
        a1 = _pin(a1 * shrink + t1)
        mbarrier.wait(v_full.index(stage), phase)
        t3 = warpgroup_mma(p8, v_s.index(4 * stage + 3).permute([1, 0]), zero, use_acc=False, is_async=True)
        t2 = warpgroup_mma_wait(1, deps=[t2])
        a2 = a2 * shrink + t2
        t3 = warpgroup_mma_wait(0, deps=[t3])
        a3 = a3 * shrink + t3
    mbarrier.arrive(v_empty.index(stage))
    stage, phase = advance(stage, phase, STAGES)
    return m, z, a0, a1, a2, a3, stage, phase


@gluon.jit
def _attend_wide(q, rest_s, ring, bars, q_factor, shift, cap, edge, top, n_hi, n_free, n_lo, stage, phase,
                 WG: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CUBICS: gl.constexpr, LO: gl.constexpr, CAP: gl.constexpr,
                 FEW: gl.constexpr, REST: gl.constexpr):  # fmt: skip
    """As `_attend` and `_attend_few`; tile `top` is one of the masked ones here."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 32])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D // 4, 32])
    a0 = gl.zeros([ROWS, D // 4], gl.float32, OUT)
    a1 = gl.zeros([ROWS, D // 4], gl.float32, OUT)
    a2 = gl.zeros([ROWS, D // 4], gl.float32, OUT)
    a3 = gl.zeros([ROWS, D // 4], gl.float32, OUT)
    m = gl.full([ROWS], UNSEEN, gl.float32, gl.SliceLayout(1, S))
    _, z = _nothing()
    tile = top
    if FEW:
        n_hi += n_free + n_lo
    for _ in range(n_hi + 1 if FEW else gl.maximum(n_hi + 1, 1)):  # as in `_attend_in_turn`
        m, z, a0, a1, a2, a3, stage, phase = _tile_wide(
            q, rest_s, ring, bars, q_factor, shift, cap, edge, tile, m, z, a0, a1, a2, a3, stage, phase,
            WG, D, STAGES, CUBICS, True, LO, CAP, FEW, REST)  # fmt: skip
        tile -= 1
    if not FEW:
        for _ in range(n_free):
            m, z, a0, a1, a2, a3, stage, phase = _tile_wide(
                q, rest_s, ring, bars, q_factor, shift, cap, edge, tile, m, z, a0, a1, a2, a3, stage, phase,
                WG, D, STAGES, CUBICS, False, LO, CAP, False, False)  # fmt: skip
        if LO:
            tile -= n_free
            for _ in range(n_lo):
                m, z, a0, a1, a2, a3, stage, phase = _tile_wide(
                    q, rest_s, ring, bars, q_factor, shift, cap, edge, tile, m, z, a0, a1, a2, a3, stage, phase,
                    WG, D, STAGES, CUBICS, True, LO, CAP, False, False)  # fmt: skip
                tile -= 1
    return a0, a1, a2, a3, m, _row_sums(z, S), stage, phase


# Queries in, output out


@gluon.jit
def _split(x, N: gl.constexpr):
    """`x [ROWS, C]` as N tiles of neighbouring channels: the same registers."""
    if N == 1:
        return (x,)
    else:
        a, b = x.reshape([ROWS, 2, x.shape[1] // 2]).permute([0, 2, 1]).split()
        return _split(a, N // 2) + _split(b, N // 2)


@gluon.jit
def _join(tiles):
    """What `_split` took apart."""
    if len(tiles) == 1:
        return tiles[0]
    else:
        a = _join(tiles[: len(tiles) // 2])
        b = _join(tiles[len(tiles) // 2 :])
        return gl.join(a, b).permute([0, 2, 1]).reshape([ROWS, 2 * a.shape[1]])


@gluon.jit
def _turn_pairs(a, b, cos, sin, row, first: gl.constexpr, STEP: gl.constexpr):
    """RoPE on pairs of channels, from the pair `first` on; `row` is where each row's angles begin."""
    row = gl.convert_layout(row, gl.SliceLayout(1, a.type.layout), assert_trivial=True)
    at = row[:, None] + (first + gl.arange(0, a.shape[1], gl.SliceLayout(0, a.type.layout))[None, :]) * STEP
    x, y = gl.inline_asm_elementwise(
        TURN_PAIR, "=f,=f,f,f,f,f",
        [a.to(gl.float32), b.to(gl.float32), gl.load(cos + at).to(gl.float32), gl.load(sin + at).to(gl.float32)],
        dtype=(gl.float32, gl.float32), is_pure=True, pack=1)  # fmt: skip
    return x.to(a.dtype), y.to(b.dtype)


@gluon.jit
def _turn_q(q16_s, cos, sin, stride, last, D: gl.constexpr, HALF: gl.constexpr, INTERLEAVED: gl.constexpr, STEP: gl.constexpr):
    """RoPE on a warpgroup's rows of Q where they stand, with the bits of `reference.rotate`; `last` is the last that is a query.

    Channels are taken as tiles of so many that pairs are a whole number of tiles apart: then a thread has both of a pair, and what goes
    with what is a matter of names. Lanes lie down the rows first: eight rows of 16 bytes meet no bank of shared memory twice, and the
    angles of a row come as one line.
    """
    PAIRS: gl.constexpr = HALF & -HALF if (HALF & -HALF) < 32 else 32  # of a tile
    OWN: gl.constexpr = PAIRS // 2 if PAIRS < 16 else 8  # of a thread, one after the other
    WIDTH: gl.constexpr = 2 * PAIRS if INTERLEAVED else PAIRS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2 * OWN if INTERLEAVED else OWN], [32 * OWN // PAIRS, PAIRS // OWN], [4, 1], [0, 1])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    row = gl.minimum(row, last) * (stride * 8)  # what lies behind the last query has no angles, and counts for nothing
    x = _split(q16_s.load(LAYOUT), D // WIDTH)
    first = ()
    second = ()
    for i in gl.static_range(HALF // PAIRS):
        if INTERLEAVED:
            a, b = x[i].reshape([ROWS, PAIRS, 2]).split()
            a, b = _turn_pairs(a, b, cos, sin, row, PAIRS * i, STEP)
            first += (gl.convert_layout(gl.join(a, b).reshape([ROWS, WIDTH]), x[i].type.layout, assert_trivial=True),)
        else:
            a, b = _turn_pairs(x[i], x[HALF // PAIRS + i], cos, sin, row, PAIRS * i, STEP)
            first += (a,)
            second += (b,)
    x = first + second + x[2 * HALF // WIDTH :]
    q16_s.store(gl.convert_layout(_join(x), LAYOUT, assert_trivial=True))


@gluon.jit
def _mean(mean, first: gl.constexpr, N: gl.constexpr, DH: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Channels of a mean: of its copy in shared memory (head_dim 256 has no room for one: of itself); zeros behind the last."""
    if D < 256:
        x = mean.slice(first, N).load(LAYOUT)
    elif first + N <= DH:
        x = gl.load(mean + first + gl.arange(0, N, LAYOUT))
    else:
        channel = first + gl.arange(0, N, LAYOUT)
        x = gl.load(mean + channel, mask=channel < DH, other=0.0)
    return x


@gluon.jit
def _mixer(DTYPE: gl.constexpr, zero):
    """`H diag(sign)` of 16 channels, transposed, as the right operand of `mma_v2`. `zero` is 0, which ptxas cannot know: what it could
    compute ahead of the items would keep registers."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(1, ROTATED, 2)
    channel = gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))[:, None] + zero
    odd = channel & gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))[None, :]
    odd = odd ^ (odd >> 2)
    odd = (odd ^ (odd >> 1) ^ (LOW_SIGNS >> channel)) & 1
    return gl.where(odd > 0, -1.0, 1.0).to(DTYPE)


@gluon.jit
def _mix(blocks, STEP: gl.constexpr, N: gl.constexpr):
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
        return _mix(mixed, 2 * STEP, N)


@gluon.jit
def _rows_of_q(q16_s, zero, DH: gl.constexpr, D: gl.constexpr, ROTATE: gl.constexpr):
    """A warpgroup's rows of Q in FP32, 16 channels at a time; rotated, but for the factor `block ** -0.5` (`rotation.rotate`)."""
    blocks = ()
    if ROTATE:
        mixer = _mixer(q16_s.dtype, zero)
        for j in gl.static_range(D // 16):
            x = q16_s.slice(16 * j, 16, 1).load(gl.DotOperandLayout(0, ROTATED, 2))
            x = mma_v2(x, mixer, gl.zeros([ROWS, 16], gl.float32, ROTATED))
            if (HIGH_SIGNS >> (j % 8)) & 1:
                blocks += (-x,)
            else:
                blocks += (x,)
        blocks = _mix(blocks, 1, block_size(DH) // 16)
    else:
        for j in gl.static_range(D // 16):
            blocks += (q16_s.slice(16 * j, 16, 1).load(ROTATED).to(gl.float32),)
    return blocks


@gluon.jit
def _largest(blocks):
    """The largest magnitude of each row; NaN counts for nothing."""
    x = gl.abs(blocks[0])
    for j in gl.static_range(1, len(blocks)):
        x = gl.maximum(x, gl.abs(blocks[j]))
    return gl.max(x, 1)


@gluon.jit
def _rounded(x):
    """The nearest integers, |x| < 2^22, as they are in the last bits of FP32."""
    return x + MAGIC


@gluon.jit
def _load_q(q_s, q16_s, k_mean, scale, zero, DH: gl.constexpr, D: gl.constexpr, Q16: gl.constexpr, ROTATE: gl.constexpr,
            SHIFT: gl.constexpr):  # fmt: skip
    """Rotate rows, scale them (E4M3: by powers of two), round them to 8 bits into `q_s`; their factors, and with SHIFT their scores
    against K's mean (in powers of two)."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    if Q16:
        blocks = _rows_of_q(q16_s, zero, DH, D, ROTATE)
        if ROTATE:
            scale = scale * block_size(DH) ** -0.5
        largest = _largest(blocks)
        if q_s.dtype == gl.int8:
            largest = gl.maximum(largest, TINY)
            up = 127.0 / largest
            q_factor = largest * (1 / 127)
            broken = blocks[0] * 0.0  # NaN has no code: the row's factor says it
            for j in gl.static_range(1, D // 16):
                broken += blocks[j] * 0.0
            q_factor += gl.sum(broken, 1)
            for j in gl.static_range(D // 16):
                codes = _rounded(blocks[j] * up[:, None]).to(gl.int32, bitcast=True).to(gl.int8)
                q_s.slice(16 * j, 16, 1).store(codes)
        else:
            up, q_factor = _powers(largest)
            for j in gl.static_range(D // 16):
                q_s.slice(16 * j, 16, 1).store(_to_fp8(blocks[j] * up[:, None]))
        fence_async_shared()
        q_factor = q_factor * scale
        shift = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, ROTATED))
        if SHIFT:
            for j in gl.static_range(D // 16):
                shift += gl.sum(blocks[j] * _mean(k_mean, 16 * j, 16, DH, D, gl.SliceLayout(0, ROTATED))[None, :], 1) * scale
    else:
        A: gl.constexpr = gl.DotOperandLayout(0, S, 4)
        q_factor = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, A)) * scale
        shift = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, A))
        if SHIFT:
            x = q_s.load(A).to(gl.float32)
            shift = gl.sum(x * _mean(k_mean, 0, D, DH, D, gl.SliceLayout(0, A))[None, :], 1) * scale
    return gl.convert_layout(q_factor, ROW, assert_trivial=True), gl.convert_layout(shift, ROW, assert_trivial=True)


@gluon.jit
def _powers(largest):
    """By how much to scale rows for E4M3, and its inverse: `numerics.power_of_two_scale`, in bits."""
    bits = largest.to(gl.int32, bitcast=True)
    exponent = (bits >> 23) - 135 + ((bits & 0x7FFFFF) > 0x600000).to(gl.int32)
    exponent = gl.minimum(gl.maximum(exponent, -60), 120)
    return ((127 - exponent) << 23).to(gl.float32, bitcast=True), ((127 + exponent) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _keep_rest(rest_s, q16_s, zero, DH: gl.constexpr, D: gl.constexpr, ROTATE: gl.constexpr):
    """What rounding cut off Q, in 8 bits, in the memory of its 16 bits: of INT8 in units of 1 / 256."""
    blocks = _rows_of_q(q16_s, zero, DH, D, ROTATE)
    largest = _largest(blocks)
    sync()  # all of this warpgroup's rows are read
    if rest_s.dtype == gl.int8:
        up = 127.0 / gl.maximum(largest, TINY)
        for j in gl.static_range(D // 16):
            x = blocks[j] * up[:, None]
            rest = (x - (_rounded(x) - MAGIC)) * 256.0
            codes = _rounded(gl.minimum(rest, 127.0)).to(gl.int32, bitcast=True).to(gl.int8)
            rest_s.slice(16 * j, 16, 1).store(codes)
    else:
        up, _ = _powers(largest)
        for j in gl.static_range(D // 16):
            rest_s.slice(16 * j, 16, 1).store(_rest_to_fp8(blocks[j] * up[:, None]))
    fence_async_shared()


@gluon.jit
def _log2(x):
    """Of a normal `x`: one instruction, where Triton's cares for the range."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _reciprocal(x):
    """Of a normal `x`, likewise: what Triton divides by comes to the same bits."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _send(out_d, out_s, at, y):
    """A warpgroup's rows of the output by TMA, which leaves out what lies beside a sequence's queries or behind the last channel."""
    SHAPE: gl.constexpr = [ROWS, y.shape[1]]
    FLAT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE, out_d.dtype)
    send_wait(0)  # who sent the item before waits until it has left this memory,
    sync()  # and the others for them
    reinterpret(out_s, out_d.dtype, SHAPE, FLAT).store(y.to(out_d.dtype))
    fence_async_shared()  # each thread shows TMA what it wrote,
    sync()  # before some start the copy
    send(out_d, at, out_s)


@gluon.jit
def _write(out, at, v_mean, acc, inverse, share, unseen, blind, count, first: gl.constexpr, N: gl.constexpr, DH: gl.constexpr,
           D: gl.constexpr, SHARE: gl.constexpr, WG: gl.constexpr):  # fmt: skip
    """Channels `first` to `first + N` of the output: `acc * inverse + v_mean * share`, zero in rows that saw no key; `blind` is whether
    there are any, or None where there may be. `at` is where the rows begin: batch, token, head."""
    if first < DH:
        OUT: gl.constexpr = acc.type.layout
        inverse = gl.convert_layout(inverse, gl.SliceLayout(1, OUT), assert_trivial=True)[:, None]
        unseen = gl.convert_layout(unseen, gl.SliceLayout(1, OUT), assert_trivial=True)[:, None]
        y = acc * inverse
        if v_mean is not None:
            v_mean = _mean(v_mean, first, N, DH, D, gl.SliceLayout(0, OUT))
            if SHARE:
                share = gl.convert_layout(share, gl.SliceLayout(1, OUT), assert_trivial=True)[:, None]
                y += v_mean[None, :] * share
            else:
                y += v_mean[None, :]
        if blind is None:
            y = gl.where(unseen, 0.0, y)
        elif blind:  # volatile moves, or the branch would become the 64 selections that it saves
            y = gl.where(unseen, 0.0, _pin(y))
        out_d, out_s, out_ptr, stride_b, stride_t, stride_h = out
        batch, token, head = at
        if out_d is not None:
            if count > 0:  # TMA refuses to store rows that all lie before the first
                _send(out_d, out_s.index(WG), [batch, token, head, 0], y)
        else:
            y = y.to(out_ptr.dtype.element_ty)
            if D < 256 and y.dtype.primitive_bitwidth == 16:  # whole rows, by way of shared memory (head_dim 256 has none left)
                y = gl.convert_layout(y, gl.BlockedLayout([1, 8], [256 // N, N // 8], [4, 1], [1, 0]))
            row = gl.arange(0, ROWS, gl.SliceLayout(1, y.type.layout))
            channel = first + gl.arange(0, N, gl.SliceLayout(0, y.type.layout))
            mask = (row < count)[:, None]
            if first + N > DH:
                mask = mask & (channel < DH)[None, :]
            # Strides come in units of 16 bytes: that they are multiples makes for wide stores.
            out_ptr += (batch.to(gl.int64) * stride_b + token.to(gl.int64) * stride_t + head.to(gl.int64) * stride_h) * 8
            gl.store(out_ptr + (row * (stride_t * 8))[:, None] + channel[None, :], y, mask=mask)


@gluon.jit
def _multiply(q_s, q16_s, rest_s, ring, info_s, last_s, means_s, shift_s, factor_s, q_bars, bars, out, lse_ptr, k_mean_ptr, v_mean_ptr,
              sinks_ptr, num_tokens, num_q_heads, causal, window, plane, scale, cap, rope, WG: gl.constexpr,
              WGS: gl.constexpr, DH: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CUBICS: gl.constexpr, Q16: gl.constexpr,
              LO: gl.constexpr, CAP: gl.constexpr, SPLIT: gl.constexpr, HALF: gl.constexpr, INTERLEAVED: gl.constexpr,
              STEP: gl.constexpr, ROTATE: gl.constexpr, SHIFT: gl.constexpr):  # fmt: skip
    """A multiplying warpgroup: its 64 rows of every item that the producer announces."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 32])
    k_full, k_empty, v_full, v_empty = bars
    q_full, q_empty = q_bars
    item = 0
    stage = 0
    phase = 0
    mbarrier.wait(q_full.index(WG), 0)
    tiles = _field(info_s, 0, TILES)
    while tiles > 0:
        slot = item & 1
        last = _field(info_s, slot, LAST)
        count = _count(info_s, slot, WG)
        position = _field(info_s, slot, POSITION)
        length = _field(info_s, slot, LENGTH)
        # Of the keys that its rows see, the last ones (hi) and the first ones (lo).
        bottom = last - tiles + 1
        edge = (info_s, slot, causal, window)
        hi_min = position + WG * ROWS + ((1 - causal) << 30)
        hi_max = gl.minimum(hi_min + ROWS - 1, length - 1)
        hi_min = gl.minimum(hi_min, length - 1)
        if LO or SPLIT:
            blind = None  # a row between others may see no key
        else:
            blind = hi_min < 0  # the first row sees fewest
        few = hi_min < gl.where(causal > 0, FEW, FEW_IN_ALL)
        if SPLIT:
            few = few & (length > 0)
        if D < 256:
            k_mean = means_s.index(slot)
        elif SHIFT:
            k_mean = k_mean_ptr + _field(info_s, slot, KV_HEAD) * DH
        else:
            k_mean: gl.constexpr = None
        q = q_s.index(WG if Q16 else slot * WGS + WG)
        if HALF:
            cos_ptr, sin_ptr, angle_stride_b, angle_stride_t = rope
            if count > 0:  # rows before a sequence have no angles
                token = _field(info_s, slot, TOKEN) + WG * ROWS
                angles = _field(info_s, slot, ANGLES).to(gl.int64) * angle_stride_b + token.to(gl.int64) * angle_stride_t
                _turn_q(
                    q16_s.index(WG), cos_ptr + angles * 8, sin_ptr + angles * 8, angle_stride_t, count - 1,
                    D, HALF, INTERLEAVED, STEP)  # fmt: skip
        q_factor, shift = _load_q(q, q16_s.index(WG), k_mean, scale, item >> 30, DH, D, Q16, ROTATE, SHIFT)
        if SHIFT and not CAP:
            shift_s.index(WG).store(shift)  # wanted again at the end: no registers for it until then

        whole = gl.maximum(hi_min + 1, 0) // TILE  # tiles before this one end where every row still sees
        top = gl.maximum(gl.minimum(gl.maximum(hi_max, 0) // TILE, last), bottom)
        if count <= 0:
            top = bottom
        first_free = bottom
        if LO:
            lo_max = gl.maximum(gl.maximum(hi_max - window + 1, _field(info_s, slot, LEFT)), 0)
            first_free = gl.minimum(gl.maximum((lo_max + TILE - 1) // TILE, bottom), last + 1)
        n_hi = gl.maximum(top - gl.maximum(whole, bottom), 0)
        n_free = gl.maximum(gl.minimum(top, whole) - first_free, 0)
        n_lo = top - bottom - n_hi - n_free

        # Tiles that only the other warpgroups' rows see.
        for _ in range(last - top):
            mbarrier.wait(k_full.index(stage), phase)
            mbarrier.arrive(k_empty.index(stage))
            mbarrier.wait(v_full.index(stage), phase)
            mbarrier.arrive(v_empty.index(stage))
            stage, phase = advance(stage, phase, STAGES)
        if few:
            if Q16:
                _keep_rest(rest_s.index(2 * WG), q16_s.index(WG), item >> 30, DH, D, ROTATE)
            else:
                mbarrier.arrive(q_empty.index(WG))  # the next item's FP8 rows have memory of their own
            if D == 256:
                a0, a1, a2, a3, m, z, stage, phase = _attend_wide(
                    q, rest_s, ring, bars, q_factor, shift, cap, edge, top, n_hi, n_free, n_lo, stage, phase,
                    WG, D, STAGES, CUBICS, LO, CAP, True, Q16)  # fmt: skip
            else:
                a0, m, z, stage, phase = _attend_few(
                    q, rest_s, ring, bars, q_factor, shift, cap, edge, top, top - bottom + 1, stage, phase,
                    WG, D, STAGES, CUBICS, Q16, LO, CAP)  # fmt: skip
            if Q16:
                mbarrier.arrive(q_empty.index(WG))
        else:
            mbarrier.arrive(q_empty.index(WG))
            if D == 256:
                a0, a1, a2, a3, m, z, stage, phase = _attend_wide(
                    q, rest_s, ring, bars, q_factor, shift, cap, edge, top, n_hi, n_free, n_lo, stage, phase,
                    WG, D, STAGES, CUBICS, LO, CAP, False, False)  # fmt: skip
            elif WGS == 3:
                if Q16:
                    factor_s.index(WG).store(q_factor)
                a0, m, z, stage, phase = _attend_in_turn(
                    q, ring, bars, q_factor, factor_s.index(WG), shift, cap, edge, top, n_hi, n_free, n_lo, stage, phase,
                    WG, D, STAGES, CUBICS, Q16, LO, CAP)  # fmt: skip
            else:
                a0, m, z, stage, phase = _attend(
                    q, ring, bars, q_factor, shift, cap, edge, top, n_hi, n_free, n_lo, stage, phase,
                    WG, D, STAGES, CUBICS, LO, CAP)  # fmt: skip

        count = _count(info_s, slot, WG)
        head = _field(info_s, slot, HEAD)
        batch = _field(info_s, slot, BATCH)
        token = _field(info_s, slot, TOKEN) + WG * ROWS
        unseen = z < 1.0  # a largest weight is 2^8; masked ones are 0 or 2^-117, and a sum with a NaN in it is not small
        v_scale = _number(last_s.index(slot))
        if CAP:
            shift = shift * 0.0  # already in the scores
        elif SHIFT:
            shift = shift_s.index(WG).load(gl.SliceLayout(1, S))
        if sinks_ptr is not None:
            sink = gl.load(sinks_ptr + head).to(gl.float32) * LOG2E - shift
            top_m = gl.maximum(m, sink)
            weights = z * gl.exp2(m - top_m)
            total = weights + gl.exp2(sink - top_m + P_SHIFT)
            inverse = gl.exp2(m - top_m) * v_scale / total
            share = weights / total
            lse = (gl.where(unseen, sink, top_m - P_SHIFT + _log2(total)) + shift) * LN2
        else:
            inverse = v_scale * _reciprocal(z)
            share = inverse
            lse = gl.where(unseen, HIDDEN, (m - P_SHIFT + _log2(z) + shift) * LN2)
        if lse_ptr is not None:
            here = gl.arange(0, ROWS, gl.SliceLayout(1, S))
            lse_at = (batch * num_tokens + token).to(gl.int64) * num_q_heads + head
            if SPLIT:  # as `combine` takes it
                lse = gl.where(unseen, HIDDEN, m - P_SHIFT + _log2(z))
                gl.store(lse_ptr + plane.to(gl.int64) + lse_at + here * num_q_heads, shift, mask=here < count)
            gl.store(lse_ptr + lse_at + here * num_q_heads, lse, mask=here < count)
        if SPLIT:  # nobody reads what a part without keys would write
            count = gl.where(_field(info_s, slot, LENGTH) > 0, count, 0)
        SHARE: gl.constexpr = sinks_ptr is not None
        at = (batch, token, head)
        if v_mean_ptr is None:
            v_mean: gl.constexpr = None
        elif D < 256:
            v_mean = means_s.index(2 + slot)
        else:
            v_mean = v_mean_ptr + _field(info_s, slot, KV_HEAD) * DH
        if D == 256:
            _write(out, at, v_mean, a0, inverse, share, unseen, blind, count, 0, D // 4, DH, D, SHARE, WG)
            _write(out, at, v_mean, a1, inverse, share, unseen, blind, count, D // 4, D // 4, DH, D, SHARE, WG)
            _write(out, at, v_mean, a2, inverse, share, unseen, blind, count, D // 2, D // 4, DH, D, SHARE, WG)
            _write(out, at, v_mean, a3, inverse, share, unseen, blind, count, D // 4 * 3, D // 4, DH, D, SHARE, WG)
        else:
            _write(out, at, v_mean, a0, inverse, share, unseen, blind, count, 0, D, DH, D, SHARE, WG)
        item += 1
        mbarrier.wait(q_full.index(WG), item & 1)
        tiles = _field(info_s, item & 1, TILES)
    if out[0] is not None:
        send_wait(0)  # a CTA's shared memory ends with it


# Work, and its bytes


@gluon.jit
def _put(info_s, slot, i: gl.constexpr, x):
    info_s.index(slot * FIELDS + i).store(gl.full([1], x, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def _claim(counter_ptr):
    """The next number of the launch's counter: one lane asks."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    ticket = gl.atomic_add(counter_ptr + lane, gl.full([32], 1, gl.int32, lane.type.layout), mask=lane == 0, sem="relaxed")
    return gl.sum(gl.where(lane == 0, ticket, 0), 0)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _outset():
    """Where `_seek` begins: no sequence has a float's largest exponent."""
    return 255, -1, 0, 0


@gluon.jit
def _seek(place, claim, cu_ptr, lens_ptr, num_tokens, num_seqs, num_q_heads, window, BLOCK: gl.constexpr):
    """The sequence of a ragged batch that item `claim` is of, and where the next claim's search begins, which asks for no item before it.

    Sequences go by the power of two below the keys that their longest items see, largest first, in order where it is the same: a launch
    ends when its last item does. 32 of them are looked at together; those without queries have no items.

    Args:
        place: `_outset()` or what was returned: an exponent, the largest below it that was met since, the first of 32 sequences, and
            the items before them.
    Returns:
        The place; the sequence, or `num_seqs + 1` behind the last item; the items before it; its first query; its queries.
    """
    exponent, below, first, before = place
    seq = num_seqs + 1
    base = before
    start = 0
    q_len = 0
    while (seq > num_seqs) & (exponent >= 0):
        one = first + gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
        begin = gl.load(cu_ptr + one, mask=one <= num_seqs, other=num_tokens)
        queries = gl.load(cu_ptr + one + 1, mask=one < num_seqs, other=num_tokens) - begin
        keys = gl.minimum(gl.load(lens_ptr + one, mask=one < num_seqs, other=0), window + BLOCK)
        items = (queries + BLOCK - 1) // BLOCK * num_q_heads
        own = gl.where(items > 0, gl.maximum(keys, 0).to(gl.float32).to(gl.int32, bitcast=True) >> 23, -1)
        items = gl.where(own == exponent, items, 0)
        end = before + gl.associative_scan(items, 0, _add)
        here = (claim < end) & (claim >= end - items)
        base = gl.max(end, 0)
        if claim < base:
            seq = gl.max(gl.where(here, one, 0), 0)
            base = gl.max(gl.where(here, end - items, 0), 0)
            start = gl.max(gl.where(here, begin, 0), 0)
            q_len = gl.max(gl.where(here, queries, 0), 0)
        else:
            before = base
            below = gl.maximum(below, gl.max(gl.where(own < exponent, own, -1), 0))
            first += 32
            if first > num_seqs:
                exponent = below
                below = -1
                first = 0
    return (exponent, below, first, before), seq, base, start, q_len


@gluon.jit
def _advance_to(claim, at, seqs, heads, cu_ptr, lens_ptr, num_tokens, num_seqs, num_q_heads, window, BLOCK: gl.constexpr):
    """The sequence that item `claim` is of, from that of the claim before: a dense batch is one, of all sequences' `heads`.

    Args:
        at: `_seek`'s place (dense: unused), the sequence, the items before it, its first query, its queries, its blocks of queries.
        seqs: sequences, and what the sequence is behind the last item.
    Returns:
        As `at`.
    """
    place, seq, base, start, q_len, blocks = at
    while (seq < seqs) & (claim >= base + blocks * heads):
        if cu_ptr is None:
            base += blocks * heads
            seq += 1
        else:
            place, seq, base, start, q_len = _seek(place, claim, cu_ptr, lens_ptr, num_tokens, num_seqs, num_q_heads, window, BLOCK)
            blocks = (q_len + BLOCK - 1) // BLOCK
    return place, seq, base, start, q_len, blocks


@gluon.jit
def _header(header_ptr, slot, DH: gl.constexpr):
    """The scale of K of `slot`; V's is behind it. `header_ptr` is the first slot's."""
    return header_ptr + slot.to(gl.int64) * (page_bytes(DH) // 4)


@gluon.jit
def _produce(q_d, k_d, v_d, q_s, ring, info_s, last_s, means_s, q_bars, bars, header_ptr, k_mean_ptr, v_mean_ptr, table_ptr,
             lens_ptr, cu_ptr, left_ptr, counter_ptr, num_tokens, max_q, num_seqs, num_q_heads, num_kv_heads, table_width, causal,
             window, parts, least, together, WGS: gl.constexpr, DH: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, Q16: gl.constexpr,
             LO: gl.constexpr, SPLIT: gl.constexpr, HALF: gl.constexpr, SHIFT: gl.constexpr):  # fmt: skip
    """The feeding warp: claims items (64 * WGS query rows of one head), announces them, and keeps the ring of tiles full.

    With SPLIT an item is one of `parts` parts of its tiles, of `least` or more, and its output one of as many.
    """
    BLOCK: gl.constexpr = WGS * ROWS
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    k_s, v_s, scale_s, _ = ring
    k_full, k_empty, v_full, v_empty = bars
    q_full, q_empty = q_bars
    group = num_q_heads // num_kv_heads
    none = gl.full([1], 0, gl.int32, LANES)
    stage = 0
    phase = 1
    item = 0
    # Items in order: sequence by sequence, of a ragged batch those of many keys first; in one, `together` heads at a time (whose K and V
    # L2 holds), of these the last block of queries first, which sees most keys. Blocks end where the last query's warpgroup does: so the
    # one that is not full, which takes no less time for it, is the first block, of fewest keys, and begins before the sequence.
    claim = gl.program_id(0)
    part = 0
    if SPLIT:
        part = claim % parts
        claim = claim // parts
    seq = 0
    base = 0  # items before this sequence
    start = 0
    place = _outset()
    if cu_ptr is not None:
        q_len = 0
        seqs = num_seqs + 1  # rows behind the last sequence belong to one more, that has no keys
        heads = num_q_heads
    else:
        q_len = max_q
        seqs = 1
        heads = num_seqs * num_q_heads
    blocks = (q_len + BLOCK - 1) // BLOCK
    place, seq, base, start, q_len, blocks = _advance_to(
        claim, (place, seq, base, start, q_len, blocks), seqs, heads, cu_ptr, lens_ptr, num_tokens, num_seqs, num_q_heads, window,
        BLOCK)  # fmt: skip
    while seq < seqs:
        rest = claim - base
        lot = rest // (together * blocks)
        rest -= lot * together * blocks
        some = gl.minimum(heads - lot * together, together)
        head = lot * together + rest % some
        begin = (q_len + ROWS - 1) // ROWS * ROWS - (rest // some + 1) * BLOCK
        owner = seq
        batch = 0
        token = start + begin
        if cu_ptr is None:
            owner = head // num_q_heads
            head -= owner * num_q_heads
            batch = owner
        held = gl.minimum(owner, num_seqs - 1)
        length = gl.load(lens_ptr + held)
        kv_head = head // group
        # What asks for no length is on its way before that is there. A copy may land before its barrier expects it: the phase does not end
        # without that arrival, and until then the count of bytes is below zero.
        slot = item & 1
        for i in gl.static_range(WGS):
            mbarrier.wait(q_empty.index(i), slot ^ 1)
        if D < 256:
            channel = gl.arange(0, D, gl.BlockedLayout([D // 32], [32], [1], [0]))
            if v_mean_ptr is not None:  # zeros where the mask is not
                fetch_words(means_s.index(2 + slot), v_mean_ptr + kv_head * DH + channel, mask=channel < DH)
            if SHIFT:
                fetch_words(means_s.index(slot), k_mean_ptr + kv_head * DH + channel, mask=channel < DH)
        for i in gl.static_range(WGS):
            fetch(q_d, [batch, token + i * ROWS, head, 0], q_full.index(i), q_s.index(i if Q16 else slot * WGS + i))
        length = gl.where(owner < num_seqs, length, 0)
        first = gl.maximum(-begin, 0)  # whole warpgroups
        position = length - q_len + begin
        last = length - 1
        if causal:
            last = gl.minimum(last, position + BLOCK - 1)
        last = gl.maximum(last, 0) // TILE
        bottom = 0
        left = 0
        if LO:
            if left_ptr is not None:
                left = gl.load(left_ptr + held)
            bottom = gl.minimum(gl.maximum(gl.maximum(position + first - window + 1, left), 0) // TILE, last)
        slab = batch  # of the output
        if SPLIT:
            tiles = gl.maximum((last - bottom + parts) // parts, least)
            bottom += part * tiles
            length = gl.where(bottom > last, 0, length)  # nothing is left for this part
            bottom = gl.minimum(bottom, last)
            last = gl.minimum(bottom + tiles - 1, last)
            slab += part * (num_seqs if cu_ptr is None else 1)
        # The first tile's page, and the next one's; the item is announced while they come, the scales asked for when they have.
        table = table_ptr + held.to(gl.int64) * table_width
        page = gl.load(table + last)
        ahead = gl.load(table + gl.maximum(last - 1, bottom))
        _put(info_s, slot, TILES, last - bottom + 1)
        _put(info_s, slot, LAST, last)
        _put(info_s, slot, BATCH, slab)
        _put(info_s, slot, TOKEN, token)
        _put(info_s, slot, COUNT, q_len - begin)
        _put(info_s, slot, POSITION, position)
        _put(info_s, slot, LENGTH, length)
        _put(info_s, slot, HEAD, head)
        _put(info_s, slot, KV_HEAD, kv_head)
        _put(info_s, slot, LEFT, left)
        _put(info_s, slot, FIRST, first)
        if HALF:
            _put(info_s, slot, ANGLES, batch)
        sync()
        if D < 256 and (SHIFT or v_mean_ptr is not None):
            for i in gl.static_range(WGS):
                arrive_with_words(q_full.index(i))
        for i in gl.static_range(WGS):
            mbarrier.expect(q_full.index(i), ROWS * D * (q_d.dtype.primitive_bitwidth // 8))
        at = page * num_kv_heads + kv_head
        scales = _header(header_ptr, at + none, DH)
        k_scale = gl.load(scales, mask=none + length > 0, other=1.0)  # an empty sequence's page is any page
        v_scale = gl.load(scales + 1)
        # No alias, which Triton 3.6 would not see the loop change, and no sum, which would wait for it: loaded twice (and not as one).
        before = gl.load(scales + 1, cache_modifier=".ca")
        for j in range(last - bottom + 1):
            mbarrier.wait(k_empty.index(stage), phase)
            fetch_k(k_d, at, k_full.index(stage), k_s.index(stage))  # before its scale is there
            # Beside the tile: its scale of K, and the V scale of the tile before in units of its own.
            scale_s.index(stage).store(k_scale)
            # Scales differ by powers of two, so their ratio is a difference of exponents: exact.
            ratio = before.to(gl.int32, bitcast=True) - v_scale.to(gl.int32, bitcast=True) + 0x3F800000
            scale_s.index(STAGES + stage).store(ratio.to(gl.float32, bitcast=True))
            last_s.index(slot).store(v_scale)
            before = v_scale
            sync()  # one lane's arrival announces what all lanes wrote
            mbarrier.expect(k_full.index(stage), TILE * D)
            here = at
            at = ahead * num_kv_heads + kv_head
            scales = _header(header_ptr, at + none, DH)
            k_scale = gl.load(scales)
            v_scale = gl.load(scales + 1)
            ahead = gl.load(table + gl.maximum(last - 2 - j, bottom))
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), TILE * D)
            fetch_v(v_d, here, v_full.index(stage), v_s, stage, STAGES)
            stage, phase = advance(stage, phase, STAGES)
        item += 1
        # Not before: items differ, and who has just begun a long one would keep the next from others.
        claim = gl.num_programs(0) + _claim(counter_ptr)
        if SPLIT:
            part = claim % parts
            claim = claim // parts
        place, seq, base, start, q_len, blocks = _advance_to(
            claim, (place, seq, base, start, q_len, blocks), seqs, heads, cu_ptr, lens_ptr, num_tokens, num_seqs, num_q_heads, window,
            BLOCK)  # fmt: skip
    if SPLIT:
        claim = claim * parts + part
        base = base * parts
    if claim == base + gl.num_programs(0) - 1:  # the launch's last claim: leave the counter as it was found
        gl.store(counter_ptr, 0)
    slot = item & 1
    for i in gl.static_range(WGS):
        mbarrier.wait(q_empty.index(i), slot ^ 1)
    _put(info_s, slot, TILES, 0)
    sync()
    for i in gl.static_range(WGS):
        mbarrier.arrive(q_full.index(i), count=1)


NUMBERS = (
    "out_stride_b", "out_stride_t", "out_stride_h", "num_tokens", "max_q", "num_seqs", "num_q_heads", "num_kv_heads", "table_width",
    "causal", "window", "parts", "least", "together", "plane", "scale", "cap",
    "angle_stride_b", "angle_stride_t",
)  # fmt: skip


@gluon.jit(do_not_specialize=NUMBERS)  # one kernel for all shapes
def _prefill(q_d, k_d, v_d, out_d, out_ptr, lse_ptr, pool_ptr, k_mean_ptr, v_mean_ptr, table_ptr, lens_ptr, cu_ptr,
             sinks_ptr, left_ptr, counter_ptr, out_stride_b, out_stride_t, out_stride_h, num_tokens, max_q, num_seqs, num_q_heads,
             num_kv_heads, table_width, causal, window, parts, least, together, plane, scale, cap, cos_ptr, sin_ptr, angle_stride_b,
             angle_stride_t, DH: gl.constexpr, D: gl.constexpr, WGS: gl.constexpr, STAGES: gl.constexpr, CUBICS: gl.constexpr,
             LO: gl.constexpr, CAP: gl.constexpr, SPLIT: gl.constexpr, HALF: gl.constexpr, INTERLEAVED: gl.constexpr,
             STEP: gl.constexpr, ROTATE: gl.constexpr, REGS: gl.constexpr, FEED: gl.constexpr):  # fmt: skip
    Q16: gl.constexpr = q_d.dtype.primitive_bitwidth == 16
    # K's mean: weights alone do without.
    SHIFT: gl.constexpr = k_mean_ptr is not None and (lse_ptr is not None or CAP or sinks_ptr is not None)
    header_ptr = (pool_ptr + 256 * DH).to(gl.pointer_type(gl.float32))
    rope = (cos_ptr, sin_ptr, angle_stride_b, angle_stride_t)
    FLAT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], q_d.dtype)
    TURNS: gl.constexpr = 1 if Q16 else 2  # 16-bit rows leave their memory when they are rounded, FP8 rows when they were multiplied
    q_in = gl.allocate_shared_memory(q_d.dtype, [TURNS * WGS, 1, ROWS, 1, D], q_d.layout)
    q16_s = reinterpret(q_in, q_d.dtype, [TURNS * WGS, ROWS, D], FLAT)
    if Q16:
        BYTES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], k_d.dtype)
        q_s = gl.allocate_shared_memory(k_d.dtype, [WGS, ROWS, D], BYTES)
        rest_s = reinterpret(q_in, k_d.dtype, [2 * WGS, ROWS, D], BYTES)
    else:
        q_s = q16_s
        rest_s = q16_s
    PARTS: gl.constexpr = v_d.block_type.shape[1]  # of V's channels, each of them one product
    ring = (
        allocate_k(k_d, STAGES),
        gl.allocate_shared_memory(gl.float8e4nv, [STAGES * PARTS, D // PARTS, TILE], v_layout(D // PARTS)),
        gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.float8e4nv, [8, TILE], gl.NVMMASharedLayout.get_default_for([8, TILE], gl.float8e4nv)),
    )
    ones = gl.full([8, TILE], 0x38, gl.uint8, gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))
    ring[3].store(ones.to(gl.float8e4nv, bitcast=True))
    fence_async_shared()
    means_s = gl.allocate_shared_memory(
        gl.float32, [4, D if D < 256 else 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )  # K's, V's of two items
    info_s = gl.allocate_shared_memory(gl.int32, [2 * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    last_s = gl.allocate_shared_memory(gl.float32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    shift_s = gl.allocate_shared_memory(gl.float32, [WGS, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    factor_s = gl.allocate_shared_memory(gl.float32, [WGS, 64] if WGS == 3 else [WGS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if out_d is not None:
        out_s = gl.allocate_shared_memory(out_d.dtype, [WGS, 1, ROWS, 1, D], out_d.layout)
    else:
        out_s: gl.constexpr = None
    out = (out_d, out_s, out_ptr, out_stride_b, out_stride_t, out_stride_h)
    q_full = gl.allocate_shared_memory(gl.int64, [WGS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [WGS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(WGS):
        mbarrier.init(q_full.index(i), 1)
        mbarrier.init(q_empty.index(i), 1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), 1)
        mbarrier.init(v_full.index(i), 1)
        mbarrier.init(k_empty.index(i), WGS)
        mbarrier.init(v_empty.index(i), WGS)
    q_bars = (q_full, q_empty)
    bars = (k_full, k_empty, v_full, v_empty)
    gdc_wait()  # launched while the kernel before ends: from here on memory is read that it wrote, and written that it read
    if WGS == 2:
        gl.warp_specialize([
            (_multiply, (q_s, q16_s, rest_s, ring, info_s, last_s, means_s, shift_s, factor_s, q_bars, bars, out, lse_ptr, k_mean_ptr,
                         v_mean_ptr, sinks_ptr, num_tokens, num_q_heads, causal, window, plane, scale, cap, rope, 0, WGS, DH,
                         D, STAGES, CUBICS, Q16, LO, CAP, SPLIT, HALF, INTERLEAVED, STEP, ROTATE, SHIFT)),
            (_multiply, (q_s, q16_s, rest_s, ring, info_s, last_s, means_s, shift_s, factor_s, q_bars, bars, out, lse_ptr, k_mean_ptr,
                         v_mean_ptr, sinks_ptr, num_tokens, num_q_heads, causal, window, plane, scale, cap, rope, 1, WGS, DH,
                         D, STAGES, CUBICS, Q16, LO, CAP, SPLIT, HALF, INTERLEAVED, STEP, ROTATE, SHIFT)),
            (_produce, (q_d, k_d, v_d, q_in, ring, info_s, last_s, means_s, q_bars, bars, header_ptr, k_mean_ptr, v_mean_ptr,
                        table_ptr, lens_ptr, cu_ptr, left_ptr, counter_ptr, num_tokens, max_q, num_seqs, num_q_heads, num_kv_heads,
                        table_width, causal, window, parts, least, together, WGS, DH, D, STAGES, Q16, LO, SPLIT, HALF, SHIFT)),
        ], [4, 1], [REGS, FEED])  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply, (q_s, q16_s, rest_s, ring, info_s, last_s, means_s, shift_s, factor_s, q_bars, bars, out, lse_ptr, k_mean_ptr,
                         v_mean_ptr, sinks_ptr, num_tokens, num_q_heads, causal, window, plane, scale, cap, rope, 0, WGS, DH,
                         D, STAGES, CUBICS, Q16, LO, CAP, SPLIT, HALF, INTERLEAVED, STEP, ROTATE, SHIFT)),
            (_multiply, (q_s, q16_s, rest_s, ring, info_s, last_s, means_s, shift_s, factor_s, q_bars, bars, out, lse_ptr, k_mean_ptr,
                         v_mean_ptr, sinks_ptr, num_tokens, num_q_heads, causal, window, plane, scale, cap, rope, 1, WGS, DH,
                         D, STAGES, CUBICS, Q16, LO, CAP, SPLIT, HALF, INTERLEAVED, STEP, ROTATE, SHIFT)),
            (_multiply, (q_s, q16_s, rest_s, ring, info_s, last_s, means_s, shift_s, factor_s, q_bars, bars, out, lse_ptr, k_mean_ptr,
                         v_mean_ptr, sinks_ptr, num_tokens, num_q_heads, causal, window, plane, scale, cap, rope, 2, WGS, DH,
                         D, STAGES, CUBICS, Q16, LO, CAP, SPLIT, HALF, INTERLEAVED, STEP, ROTATE, SHIFT)),
            (_produce, (q_d, k_d, v_d, q_in, ring, info_s, last_s, means_s, q_bars, bars, header_ptr, k_mean_ptr, v_mean_ptr,
                        table_ptr, lens_ptr, cu_ptr, left_ptr, counter_ptr, num_tokens, max_q, num_seqs, num_q_heads, num_kv_heads,
                        table_width, causal, window, parts, least, together, WGS, DH, D, STAGES, Q16, LO, SPLIT, HALF, SHIFT)),
        ], [4, 4, 1], [REGS, REGS, FEED])  # fmt: skip


# The launch


@dataclass(frozen=True)
class Shape:
    """How the kernel is cut for one (padded) head_dim; measured, see docs/kernels.md."""

    warpgroups: int
    parts: int  # of V's channels, each of them one product: one to a half or a quarter where registers are short
    stages: int
    cubics: int  # of every 16 exponentials, how many run on the FMA pipe
    regs: int  # of a multiplying thread; what is left of 64 K goes to the feeding warp
    feed: int
    # What a CTA takes, in microseconds: a tile, and an item besides (16-bit queries).
    tile: float
    item: float


# A third warpgroup saves a tenth of a tile's time for its rows, but items begin and end more slowly, and there are fewer to go around.
SHAPES = {
    64: (Shape(3, 1, 3, 0, 160, 24, tile=1.3, item=5.0),),
    128: (Shape(2, 1, 3, 1, 240, 24, tile=1.1, item=4.0), Shape(3, 2, 3, 0, 160, 24, tile=1.52, item=5.9)),
    256: (Shape(2, 4, 2, 0, 240, 24, tile=2.2, item=6.0),),
}
COMBINE = 6.0, 0.9e-6  # microseconds of a combination, and for a byte of the parts of the output that it puts together
PART, LONG_PART = 8, 128  # tiles of a part, at least: of items that leave SMs idle, and of others
PADDED = {64: 64, 80: 128, 96: 128, 128: 128, 192: 256, 256: 256}  # TMA fills up with zeros
NO_WINDOW = 1 << 30
# Heads of Q whose items stand in one order: as many as L2 holds K and V of, up to MOST. (Of groups, which share theirs, no more.) Causal
# items differ in length and go longest first, which balances SMs if each has CLAIMS of them, or the order LEAST heads. Measured.
MOST, LEAST, CLAIMS = 32, 8, 10
SHARED = 32 << 20  # bytes of K and V that L2 holds beside all else


def attention(
    q: torch.Tensor,
    pages: KVPages,
    *,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int,
    causal: bool,
    softmax_scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    leftpad_k: torch.Tensor | None,
    rope_cos: torch.Tensor | None = None,
    rope_sin: torch.Tensor | None = None,
    rope_interleaved: bool = False,
    return_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention over the pages in FP8 with FP32 accumulation; see `ops.attention` and, for what is rounded, docs/kernels.md.

    Nothing is read back from the device: lengths, tables and scales may change between replays of a CUDA graph. Equal inputs give
    equal bits.

    Args:
        q: `[T, num_q_heads, head_dim]` or `[num_seqs, S, num_q_heads, head_dim]` bfloat16 or float16, rotated as K is, scaled
            per row and rounded to K's dtype here; or float8_e4m3fn, taken as it is.
        rope_cos, rope_sin: `[T, R / 2]` or `[num_seqs, S, R / 2]`, such that `turns` says yes: Q is turned first, and rounded to its dtype.
        return_lse: without it `lse` may be None, and an item costs less.
    Returns:
        `out` of q's shape, in q's dtype (bfloat16 for FP8 queries), and `lse` float32; `ops.attention` says their order of memory.
    Raises:
        ValueError: FP8 queries with tables, or over keys that are INT8 or rotated.
    """
    if rope_cos is not None and q.dtype == FP8:
        raise ValueError("FP8 queries cannot be turned, they are rounded already: rotate them before they are quantised")
    if q.dtype == FP8 and (pages.rotate_keys or pages.key_dtype != FP8):
        raise ValueError("FP8 queries are multiplied as they are, so keys must be E4M3 and not rotated: pass 16-bit queries to these pages")
    device = q.device
    *rows, head_dim = shape = q.shape
    num_pages, num_kv_heads = pages.pool.shape[:2]
    table = pages.page_table
    dtype = torch.bfloat16 if q.dtype == FP8 else q.dtype
    # Two kinds of launches write an LSE that nobody reads: without it ptxas spills in their loops (-20%).
    return_lse |= PADDED[head_dim] == 256 and (q.dtype == FP8 or cu_seqlens_q is not None)
    out = torch.empty_like(q, dtype=dtype) if len(rows) == 3 else torch.empty(*shape, dtype=dtype, device=device)
    lse = torch.empty(*rows, dtype=torch.float32, device=device) if return_lse else None
    if out.stride(-1) != 1:  # queries whose strides overlap, or say nothing of dimensions of one element, may have no layout to copy
        out = torch.empty(shape, dtype=dtype, device=device)
    if not q.numel():
        return out, lse
    if not num_pages or not table.shape[1]:  # no keys anywhere
        if return_lse:
            lse.copy_(torch.full_like(lse, -torch.inf) if sinks is None else sinks.float().expand_as(lse))
        return out.zero_(), lse
    if q.data_ptr() & 15 or not _tma_takes(shape, q.stride(), q.itemsize):
        q = q.clone(memory_format=torch.contiguous_format)
    rope = None
    if rope_cos is not None:
        if rope_cos.stride() != rope_sin.stride() or any(stride % 8 for stride in rope_cos.stride()[:-1]):
            rope_cos, rope_sin = rope_cos.contiguous(), rope_sin.contiguous()
        rope = rope_cos.shape[-1], rope_cos.stride(), rope_interleaved
    queries, outputs, width, part, splits, grid, counter, numbers, angle_strides, given = plan(
        device, shape, q.stride(), out.stride(), num_kv_heads, table.shape, table.stride(0), cu_seqlens_q is not None, max_seqlen_q, causal,
        window, softcap > 0, leftpad_k is not None, rope, pages.rotate_keys,
    )  # fmt: skip
    sinks = None if sinks is None else sinks.float()
    target, target_lse = out, lse
    if splits > 1:
        if not return_lse:  # `combine` writes it
            lse = torch.empty(*rows, dtype=torch.float32, device=device)
        target = torch.empty(splits, lse.numel(), head_dim, dtype=torch.float32, device=device)
        target_lse = torch.empty(2, splits, lse.numel(), dtype=torch.float32, device=device)
    args = (
        Tiles(q, queries), *tiles(pages, width, part),
        *((None, target) if outputs is None else (Tiles(out, outputs), None)),
        target_lse, pages.pool, pages.k_mean, pages.v_mean, table, pages.cache_seqlens, cu_seqlens_q,
        None if splits > 1 else sinks, None if leftpad_k is None else leftpad_k.int(), counter,
        *numbers, softmax_scale * LOG2E.value, softcap * LOG2E.value, rope_cos, rope_sin, *angle_strides,
    )  # fmt: skip
    launch(_prefill, grid, args, given)
    if splits > 1:
        combine(target, target_lse, sinks, out, lse)
    return out, lse


class Plan(NamedTuple):
    """What the host works out of a problem's shape, once."""

    queries: View
    outputs: View | None  # the output, where TMA stores it
    width: int  # head_dim, padded
    part: int  # V's channels in one product
    splits: int  # parts of the keys, which `combine` puts together
    grid: tuple[int]
    counter: Counters
    numbers: tuple[int, ...]  # the kernel's, from `out_stride_b` to `plane`
    angle_strides: tuple[int, int]
    constants: Constants


@lru_cache(maxsize=4096)
def plan(
    device: torch.device,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    out_strides: tuple[int, ...],
    num_kv_heads: int,
    table: tuple[int, int],
    table_stride: int,
    ragged: bool,
    max_seqlen_q: int,
    causal: bool,
    window: int,
    softcap: bool,
    leftpad: bool,
    rope: tuple[int, tuple[int, ...], bool] | None,
    rotate_keys: bool,
) -> Plan:
    """The plan for queries and an output of this shape and these strides over a page table of that shape and stride; `rope` is R / 2, the
    tables' strides and `rope_interleaved`."""
    *_, num_q_heads, head_dim = shape
    num_seqs, table_width = table
    q_strides, out_strides = _strides(shape, strides), _strides(shape, out_strides)
    half, (*angle_strides, step), interleaved = rope or (0, (0,) * (len(shape) - 2) + (1,), False)
    if len(shape) == 4:
        batch, tokens = shape[:2]
    else:  # a batch of sequences of one length, or of one that `cu_seqlens_q` takes apart
        batch, tokens = (1, shape[0]) if ragged else (num_seqs, max_seqlen_q)
        q_strides, out_strides, angle_strides = ((tokens * x[0], *x) for x in (q_strides, out_strides, angle_strides))
    width = PADDED[head_dim]
    sms = num_sms(device)
    seen = min(table_width, (window + 3 * ROWS.value) // TILE.value + 2) if window else table_width  # tiles, at most
    problem = Problem(num_seqs, num_q_heads, head_dim, tokens if ragged else 0, max_seqlen_q, seen, causal and not window)
    cut, splits = min(_cuts(width, sms, problem), key=lambda cut: _microseconds(*cut, sms, problem))
    rows = cut.warpgroups * ROWS.value
    if ragged:  # at most: every sequence, and the rows behind the last, have a block that is not full
        items = num_q_heads * (tokens // rows + num_seqs + 1)
    else:
        items = num_seqs * num_q_heads * -(-tokens // rows)
    # Keys may be far fewer than the table has room for. Parts that only were to make waves even are then worth nothing.
    least = PART if items < sms else max(PART, seen // splits // 2)
    together = min(LEAST, -(-CLAIMS * sms * rows // max(1, max_seqlen_q))) if causal else 1
    together = min(max(together, SHARED // (2 * head_dim * TILE.value * seen)), MOST)
    if splits > 1:  # `[splits * batch, tokens, num_q_heads, head_dim]`
        out_strides = tokens * num_q_heads * head_dim, num_q_heads * head_dim, head_dim
    numbers = (
        *[stride // 8 for stride in out_strides], tokens, max_seqlen_q, num_seqs, num_q_heads, num_kv_heads, table_stride, int(causal),
        window or NO_WINDOW, splits, least, together, splits * batch * tokens * num_q_heads,
    )  # fmt: skip
    queries = View((batch, tokens, num_q_heads, head_dim), (*q_strides, 1), (1, ROWS.value, 1, width))
    outputs = None
    # Ragged blocks have other sequences' rows beside their own, parts are in FP32, and head_dim 256 leaves no shared memory.
    if not ragged and splits == 1 and width < 256:
        outputs = View((batch, tokens, num_q_heads, head_dim), (*out_strides, 1), (1, ROWS.value, 1, width))
    given = constants(
        "prefill", device, DH=head_dim, D=width, WGS=cut.warpgroups, STAGES=cut.stages, CUBICS=cut.cubics, LO=window > 0 or leftpad,
        CAP=softcap, SPLIT=splits > 1, HALF=half, INTERLEAVED=interleaved and half > 0, STEP=step, ROTATE=rotate_keys, REGS=cut.regs,
        FEED=cut.feed, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    grid = (min(items * splits, sms),)
    angles = tuple([stride // 8 for stride in angle_strides])
    return Plan(queries, outputs, width, width // cut.parts, splits, grid, Counters(1), numbers, angles, given)


class Problem(NamedTuple):
    """What decides how a launch is cut, of what the host knows."""

    num_seqs: int
    num_q_heads: int
    head_dim: int
    tokens: int  # of a ragged batch, or 0
    max_seqlen_q: int
    seen: int  # tiles, where most are
    causal: bool  # and the first query of a sequence sees fewer


def _cuts(width: int, sms: int, problem: Problem) -> Iterable[tuple[Shape, int]]:
    """The ways to cut a problem: a shape, and into how many parts the keys.

    Of items that fill the GPU parts can only make the last wave fuller. How many keys each sequence of a ragged batch has only the device
    knows, so there they are left whole.
    """
    for shape in SHAPES[width]:
        items = max(1, problem.num_seqs * problem.num_q_heads * -(-problem.max_seqlen_q // (shape.warpgroups * ROWS.value)))
        if items < sms:
            most = min(problem.seen // PART, 4 * sms // items, MAX_SPLITS)
        else:
            most = 1 if problem.tokens else min(problem.seen // LONG_PART, 4)
        for splits in range(1, max(1, most) + 1):
            yield shape, splits


def _microseconds(shape: Shape, splits: int, sms: int, problem: Problem) -> float:
    """What a launch takes, about: see docs/kernels.md, "How a problem is cut"."""
    num_seqs, num_q_heads, head_dim, tokens, max_seqlen_q, seen, causal = problem
    rows = shape.warpgroups * ROWS.value
    most = -(-max_seqlen_q // rows)  # blocks of a sequence
    blocks = tokens / rows + num_seqs / 2 if tokens else num_seqs * most
    items = num_q_heads * blocks * splits
    fewest = max(1, seen - (most - 1) * rows // TILE.value) if causal else seen
    longest = shape.item + shape.tile * seen / splits
    shortest = shape.item + shape.tile * fewest / splits
    # Long items go first, so those that wait for the last of them have just done a short one.
    time = max(longest, (items * (longest + shortest) / 2 + -items % sms * shortest) / sms)
    if splits > 1:
        once, byte = COMBINE
        time += once + byte * 4 * head_dim * num_q_heads * (tokens or num_seqs * max_seqlen_q) * splits
    return time


def turns(rope_cos: torch.Tensor) -> bool:
    """Whether the kernel turns queries by such tables itself, whose rows it reads sixteen bytes at a time."""
    return rope_cos.shape[-1] % 8 == 0


def _strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Of all dimensions but the last; of those of one element, whose own may be anything, one that TMA takes."""
    *sizes, last = shape
    return tuple([stride if size > 1 else last for size, stride in zip(sizes, strides, strict=False)])


@lru_cache(maxsize=4096)
def _tma_takes(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether TMA, which counts in 16 bytes, can fetch queries as they lie."""
    return strides[-1] == 1 and all(stride and not stride * itemsize & 15 for stride in _strides(shape, strides))
