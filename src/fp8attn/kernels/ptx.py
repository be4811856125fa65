"""Inline PTX for Hopper's instructions that Triton does not have, or only as longer sequences."""

from __future__ import annotations

from .gluon import gl, gluon

# INT8 products are added to the bits of this number. Then the bits of a sum s are those of MAGIC + s in FP32 (|s| <
# 2^22 up to head_dim 256), without an instruction that converts.
MAGIC = gl.constexpr(12582912.0)
MAGIC_BITS = gl.constexpr(0x4B400000)
MAGIC_PTX = "0f4B400000"

EXP2_REGISTERS = gl.constexpr(",".join(["=f"] * 16 + ["f"] * 16))
FILL_REGISTERS = gl.constexpr(",".join(["=r"] * 16 + ["f"] * 16))

TO_FP8 = gl.constexpr(
    "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; mov.b32 $0, "
    "{lo, hi}; }"
)
# The rounding error of TO_FP8, rounded to FP8.
REST_TO_FP8 = gl.constexpr("""{ .reg .b16 lo, hi, h0, h1, h2, h3; .reg .b32 a, b; .reg .f32 x0, x1, x2, x3;
cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3;
cvt.rn.f16x2.e4m3x2 a, lo; cvt.rn.f16x2.e4m3x2 b, hi; mov.b32 {h0, h1}, a; mov.b32 {h2, h3}, b;
cvt.f32.f16 x0, h0; cvt.f32.f16 x1, h1; cvt.f32.f16 x2, h2; cvt.f32.f16 x3, h3;
sub.f32 x0, $1, x0; sub.f32 x1, $2, x1; sub.f32 x2, $3, x2; sub.f32 x3, $4, x3;
cvt.rn.satfinite.e4m3x2.f32 lo, x1, x0; cvt.rn.satfinite.e4m3x2.f32 hi, x3, x2; mov.b32 $0, {lo, hi}; }""")
# FP8 values, and the FP8 values of what their rounding cut off, by way of FP16: half as many instructions as in FP32.
# ptxas: the pairs are taken from the packed word by a shift. Read as `lo` and `hi`, each costs a permutation and some a
# move.
SPLIT_TO_FP8 = gl.constexpr("""{ .reg .b16 lo, hi; .reg .b32 a, b, c, d; cvt.rn.f16x2.f32 a, $3, $2;
cvt.rn.f16x2.f32 b, $5, $4; cvt.rn.satfinite.e4m3x2.f16x2 lo, a; cvt.rn.satfinite.e4m3x2.f16x2 hi, b;
mov.b32 $0, {lo, hi};
cvt.u16.u32 lo, $0; shr.u32 d, $0, 16; cvt.u16.u32 hi, d;
cvt.rn.f16x2.e4m3x2 c, lo; cvt.rn.f16x2.e4m3x2 d, hi; sub.rn.f16x2 a, a, c; sub.rn.f16x2 b, b, d;
cvt.rn.satfinite.e4m3x2.f16x2 lo, a; cvt.rn.satfinite.e4m3x2.f16x2 hi, b; mov.b32 $1, {lo, hi}; }""")
# The last bytes of shared memory get their own addresses, 16 bytes a thread.
STORE_ADDRESSES = gl.constexpr("""{ .reg .b32 size, thread, a, b; mov.u32 a, global_smem;
mov.u32 size, %dynamic_smem_size; mov.u32 thread, %tid.x; add.u32 a, a, size; and.b32 a, a, -16;
shl.b32 thread, thread, 4; sub.u32 a, a, thread; sub.u32 a, a, 16;
add.u32 b, a, 8; st.shared.v4.b32 [a], {a, a, b, b}; mov.b32 $0, 0; }""")
WAIT = gl.constexpr("""{ .reg .pred done;
waitLoop:
mbarrier.try_wait.parity.shared.b64 done, [$1], $2;
@!done bra.uni waitLoop;
mov.b32 $0, 0; }""")
ARRIVE = gl.constexpr("""{ .reg .pred first; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0;
@first mbarrier.arrive.shared.b64 _, [$1]; mov.b32 $0, 0; }""")
INIT = gl.constexpr("""{ .reg .pred first; .reg .b32 thread; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0;
@first mbarrier.init.shared.b64 [$1], $2; mov.b32 $0, 0; }""")
DELAY_SECOND = gl.constexpr("""{ .reg .pred second, early; .reg .b32 thread, start, now; mov.u32 thread, %tid.x;
setp.ge.u32 second, thread, 128; mov.u32 start, %clock;
delayLoop:
mov.u32 now, %clock; sub.u32 now, now, start; setp.lt.and.u32 early, now, $1, second;
@early bra delayLoop;
mov.b32 $0, 0; }""")
LOGISTIC = gl.constexpr(
    "{ .reg .f32 t; ex2.approx.ftz.f32 t, $1; add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }"
)


@gluon.constexpr_function
def exp2_of(n, cubics):
    """PTX for `n` exponentials. `cubics` of them, evenly spread, are polynomials on the FMA pipe, which is idle while
    ex2 limits the speed.

    2^x = 2^round(x) * 2^f with |f| <= 1/2, and 2^f is a cubic with a relative error of 1e-4 (E4M3 keeps 2^-4). NaN
    stays NaN.
    """
    chosen = {int((i + 0.5) * n / cubics) for i in range(cubics)}
    lines = []
    for i in range(n):
        out, x = f"${i}", f"${n + i}"
        if i in chosen:
            lines.append(
                f"max.NaN.ftz.f32 t, {x}, 0fC2FA0000; add.ftz.f32 r, t, {MAGIC_PTX}; sub.ftz.f32 b, r, {MAGIC_PTX}; "
                f"sub.ftz.f32 f, t, b; fma.rn.ftz.f32 p, f, 0f3D645DC0, 0f3E763E2F; fma.rn.ftz.f32 p, p, f, "
                f"0f3F317218; fma.rn.ftz.f32 p, p, f, 0f3F800000; mov.b32 i, r; shl.b32 i, i, 23; add.s32 i, i, "
                f"0x3F800000; mov.b32 t, i; mul.ftz.f32 {out}, p, t;"
            )
        else:
            lines.append(f"ex2.approx.ftz.f32 {out}, {x};")
    return "{ .reg .f32 t, r, b, f, p; .reg .s32 i;\n" + "\n".join(lines) + "}"


@gluon.constexpr_function
def fill_of(part):
    """PTX for 16 registers that contain `MAGIC + 0 * c`, with a different c for each.

    ptxas: it would copy equal values by moves, which use a pipe of half the speed.
    """
    lines = (f"fma.rn.f32 ${i}, ${16 + i}, 0f{0x3F800000 + (16 * part + i << 16):08X}, magic;" for i in range(16))
    return "{ .reg .f32 magic; mov.f32 magic, " + MAGIC_PTX + ";\n" + "\n".join(lines) + "}"


@gluon.jit
def exp2(x, CUBICS: gl.constexpr):
    """2^x. Of each 16 values of a thread, CUBICS are polynomials."""
    return gl.inline_asm_elementwise(exp2_of(16, CUBICS), EXP2_REGISTERS, [x], dtype=gl.float32, is_pure=True, pack=16)


@gluon.jit
def fill_magic(zero, PART: gl.constexpr):
    """MAGIC's bits instead of every zero. `PART` differs between tiles of 16 registers."""
    return gl.inline_asm_elementwise(fill_of(PART), FILL_REGISTERS, [zero], dtype=gl.int32, is_pure=True, pack=16)


@gluon.jit
def to_fp8(x, PURE: gl.constexpr = True):
    """E4M3, rounded to nearest even and saturated. It is volatile, so it is computed here and not later."""
    return gl.inline_asm_elementwise(TO_FP8, "=r,f,f,f,f", [x], dtype=gl.float8e4nv, is_pure=PURE, pack=4)


@gluon.jit
def rest_to_fp8(x):
    """The rounding error of `to_fp8(x)`, in E4M3."""
    return gl.inline_asm_elementwise(REST_TO_FP8, "=r,f,f,f,f", [x], dtype=gl.float8e4nv, is_pure=True, pack=4)


@gluon.jit
def split_to_fp8(x):
    """E4M3 values of `x`, and of their rounding errors; together they have 8 bits. Volatile, as `to_fp8(x, False)`."""
    return gl.inline_asm_elementwise(
        SPLIT_TO_FP8, "=r,=r,f,f,f,f", [x], dtype=(gl.float8e4nv, gl.float8e4nv), is_pure=False, pack=4
    )


@gluon.jit
def logistic(x):
    """1 / (1 + 2^x)"""
    return gl.inline_asm_elementwise(LOGISTIC, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def log2(x):
    """log2 of a normal `x`, in one instruction. Triton's function also handles other values."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def reciprocal(x):
    """The reciprocal of a normal `x`, in one instruction, with the same bits as Triton's division."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def store_addresses():
    """Store 8-byte words to the end of shared memory, 16 bytes a thread: the low half of each is its own address."""
    gl.inline_asm_elementwise(STORE_ADDRESSES, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def init_at(address, count):
    """The CTA's first thread initializes the mbarrier at `address`. (Triton adds a barrier of all warps after each one
    of an array.)
    """
    gl.inline_asm_elementwise(INIT, "=r,r,r", [address, gl.to_tensor(count)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_at(address, phase):
    """Wait for a phase of the mbarrier at `address`. Each warp waits for itself.

    Triton adds a barrier of all warps of the partition to each `mbarrier.wait` in a loop, so that none of them gets two
    phases ahead.
    """
    gl.inline_asm_elementwise(WAIT, "=r,r,r", [address, phase], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def arrive_at(address):
    """A thread of each warp arrives at the mbarrier at `address`."""
    gl.inline_asm_elementwise(ARRIVE, "=r,r", [address], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def meet_and_arrive_at(address):
    """A thread of each warp arrives at the mbarrier at `address`, after all threads of its warp are here."""
    gl.inline_asm_elementwise("bar.warp.sync -1;", "=r,r", [address], dtype=gl.int32, is_pure=False, pack=1)
    arrive_at(address)


@gluon.jit
def delay_second(cycles):
    """The second warpgroup of the CTA's first partition spends so many cycles here."""
    gl.inline_asm_elementwise(DELAY_SECOND, "=r,r", [gl.to_tensor(cycles)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def uniform(x):
    """An int32 that all lanes of a warp have, in a form that ptxas keeps in uniform registers."""
    return gl.inline_asm_elementwise(
        "redux.sync.max.s32 $0, $1, -1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def uniform_zero():
    """Zero, which the compiler does not know to be zero: what is computed from it is computed here, and not before a
    loop."""
    return gl.inline_asm_elementwise(
        "redux.sync.max.s32 $0, $1, -1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def pin(x):
    """`x`, computed here and not later: a volatile move."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def transpose_8x8(x):
    """Transpose each 8x8 block of FP16 values, of which a thread has one 32-bit register."""
    return gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x], dtype=gl.float16, is_pure=True, pack=2
    )
