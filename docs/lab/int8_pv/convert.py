"""Two warps beside the producer bring codes with a token's scale to the scale of their page, in shared memory, before they are multiplied.

`code * ratio` is rounded to the nearest integer by one FP16 multiply-add: codes have 7 bits, the ratio of two scales 11, and 1280 + n and
1152 + n have n in the low byte, as a signed byte or with 128 added.
"""

from __future__ import annotations

from fp8attn.kernels.gluon import gl, gluon
from fp8attn.kernels.prefill.ring import Place, number
from fp8attn.kernels.ptx import wait_at

WARPS = gl.constexpr(2)
CHUNK = gl.constexpr(1024)  # bytes that both warps convert at a time, 16 a thread
CHUNKS = gl.constexpr(16)  # of a tile
RAW_K = gl.constexpr(4)  # barriers of a stage, after those of the ring: TMA has written K; V
RAW_V = gl.constexpr(5)

# All of shared memory gets its addresses, 16 bytes at a time.
STORE_ALL_ADDRESSES = gl.constexpr("""{ .reg .b32 end, thread, a; .reg .pred more; mov.u32 a, global_smem; mov.u32 end, %dynamic_smem_size;
add.u32 end, end, a; mov.u32 thread, %tid.x; shl.b32 thread, thread, 4; add.u32 a, a, thread; mov.b32 $0, 0;
storeLoop:
setp.lt.u32 more, a, end;
@more st.shared.v4.b32 [a], {a, a, a, a};
add.u32 a, a, 2048;
@more bra storeLoop; }""")
# All lanes' writes are visible to the tensor cores before one arrives.
ARRIVE_CONVERTED = gl.constexpr("""{ .reg .pred first; .reg .b32 lane; fence.proxy.async.shared::cta; bar.warp.sync 0xffffffff;
mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; @first mbarrier.arrive.shared.b64 _, [$1]; mov.b32 $0, 0; }""")


@gluon.constexpr_function
def to_page(signed: bool, words: list[str], ratios: list[str]) -> list[str]:
    """Of words of four codes, with the ratios of their first two and of their last two."""
    lines = []
    for i, word in enumerate(words):
        if signed:
            lines.append(f"xor.b32 {word}, {word}, 0x80808080;")
        for half, order in (("lo", 0x4140), ("hi", 0x4342)):
            lines.append(f"prmt.b32 {half}, {word}, magic, {order:#x};")
            lines.append(f"add.rn.f16x2 {half}, {half}, minus;")
        lines.append(f"fma.rn.f16x2 lo, lo, {ratios[2 * i]}, plus; fma.rn.f16x2 hi, hi, {ratios[2 * i + 1]}, plus;")
        lines.append(f"prmt.b32 {word}, lo, hi, 0x6420;")
    return lines


@gluon.constexpr_function
def convert_k_ptx():
    """$1: the thread's first 16 bytes of K; $2: the ratio of their token, FP16. A chunk has eight tokens."""
    lines = ["{ .reg .b32 lo, hi, magic, minus, plus;", "mov.b32 magic, 0x64646464; mov.b32 minus, 0xE480E480; mov.b32 plus, 0x65006500;"]
    for i in range(CHUNKS.value):
        lines.append(f".reg .b32 {', '.join(f'x{i}_{j}' for j in range(4))}, r{i}; .reg .b16 h{i};")
    for i in range(CHUNKS.value):
        x = [f"x{i}_{j}" for j in range(4)]
        lines.append(f"ld.shared.v4.b32 {{{', '.join(x)}}}, [$1+{CHUNK.value * i}];")
        lines.append(f"ld.shared.b16 h{i}, [$2+{16 * i}]; mov.b32 r{i}, {{h{i}, h{i}}};")
        lines += to_page(True, x, [f"r{i}"] * 8)
        lines.append(f"st.shared.v4.b32 [$1+{CHUNK.value * i}], {{{', '.join(x)}}};")
    return "\n".join([*lines, "mov.b32 $0, 0; }"])


@gluon.constexpr_function
def convert_v_ptx():
    """$1: the thread's first 16 bytes of V, the codes of 16 tokens; $2: the ratios of the page's tokens, FP16. Eight chunks are of
    different tokens, and the next eight of the same again, of other channels."""
    lines = ["{ .reg .b32 lo, hi, magic, minus, plus;", "mov.b32 magic, 0x64646464; mov.b32 minus, 0xE480E480; mov.b32 plus, 0x64806480;"]
    for i in range(CHUNKS.value // 2):
        r = [f"r{i}_{j}" for j in range(8)]
        lines.append(f".reg .b32 {', '.join(r)};")
        for half in range(2):
            lines.append(f"ld.shared.v4.b32 {{{', '.join(r[4 * half : 4 * half + 4])}}}, [$2+{32 * i + 16 * half}];")
        for part in range(2):
            at = CHUNK.value * (i + CHUNKS.value // 2 * part)
            x = [f"x{i}_{part}_{j}" for j in range(4)]
            lines.append(f".reg .b32 {', '.join(x)};")
            lines.append(f"ld.shared.v4.b32 {{{', '.join(x)}}}, [$1+{at}];")
            lines += to_page(False, x, r)
            lines.append(f"st.shared.v4.b32 [$1+{at}], {{{', '.join(x)}}};")
    return "\n".join([*lines, "mov.b32 $0, 0; }"])


@gluon.jit
def store_all_addresses():
    gl.inline_asm_elementwise(STORE_ALL_ADDRESSES, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def in_place(PTX: gl.constexpr, address, ratio):
    gl.inline_asm_elementwise(PTX, "=r,r,r", [address, ratio], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def arrive_converted(address):
    gl.inline_asm_elementwise(ARRIVE_CONVERTED, "=r,r", [address], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def convert(ring, alive, k_base, v_base, k_ratios, v_ratios, options: gl.constexpr):
    """Convert tiles in the order in which they come, until one is not alive. The numbers are addresses of first stages."""
    thread = gl.arange(0, WARPS * 32, gl.BlockedLayout([1], [32], [WARPS], [0]))
    stage = 0
    phase = 0
    place = Place(stage, phase)
    wait_at(ring.at(RAW_K, place), place.phase)
    live = number(alive.index(place.stage))
    while live != 0:
        at = place.stage * (CHUNK * CHUNKS) + thread * 16
        numbers = place.stage * 256
        in_place(convert_k_ptx(), k_base + at, k_ratios + numbers + thread // 8 * 2)
        arrive_converted(ring.address + place.stage * 8)
        if options.converted > 1:
            wait_at(ring.at(RAW_V, place), place.phase)
            in_place(convert_v_ptx(), v_base + at, v_ratios + numbers + thread * 0)
            arrive_converted(ring.address + (ring.STAGES + place.stage) * 8)
        place = ring.next(place)
        wait_at(ring.at(RAW_K, place), place.phase)
        live = number(alive.index(place.stage))
