"""Copies the pages of a page table to consecutive pages in today's form, for one prefill: INT8 K and E4M3 V with a page's exact scales.

A program copies K or V of one head of a page. Arithmetic is on pairs of FP16 numbers. `layout.copied` defines the bits.
"""

from __future__ import annotations

import torch

from fp8attn import KVPages
from fp8attn.formats.codec import E4M3
from fp8attn.formats.kv_format import KVFormat
from fp8attn.formats.page_layout import PAGE_SIZE, PageLayout
from fp8attn.kernels.codec import needed_scale
from fp8attn.kernels.gluon import gl, gluon
from fp8attn.kernels.launch import launch, make_constants

from .layout import TokenPages, nbytes

WARPS = 4
V_CODEC = gl.constexpr(E4M3)
# Codes to FP16 as in `decode.INT8_TO_FP16`. FP16 counts by 1 from 1024 on, so a sum with 1536 is rounded to an integer, in its last byte.
K_WORD = gl.constexpr("""{ .reg .b32 x, a, b, magic, offset, round; mov.b32 magic, 0x64646464; mov.b32 offset, 0x64806480;
mov.b32 round, 0x66006600; xor.b32 x, $1, 0x80808080; prmt.b32 a, x, magic, 0x4140; prmt.b32 b, x, magic, 0x4342;
sub.rn.f16x2 a, a, offset; sub.rn.f16x2 b, b, offset; fma.rn.f16x2 a, a, $2, round; fma.rn.f16x2 b, b, $3, round;
prmt.b32 $0, a, b, 0x6420; }""")
V_WORD = gl.constexpr("""{ .reg .b32 x, a, b, magic, offset; .reg .b16 lo, hi; mov.b32 magic, 0x64646464; mov.b32 offset, 0x64806480;
xor.b32 x, $1, 0x80808080; prmt.b32 a, x, magic, 0x4140; prmt.b32 b, x, magic, 0x4342;
sub.rn.f16x2 a, a, offset; sub.rn.f16x2 b, b, offset; mul.rn.f16x2 a, a, $2; mul.rn.f16x2 b, b, $3;
cvt.rn.satfinite.e4m3x2.f16x2 lo, a; cvt.rn.satfinite.e4m3x2.f16x2 hi, b; mov.b32 $0, {lo, hi}; }""")


@gluon.constexpr_function
def _rows(width, warps):
    """Of K `[128, width]`, in loads of 16 bytes."""
    lanes = width // 16
    return gl.BlockedLayout([1, 16], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def _load_scales(scales_ptr, end, LAYOUT: gl.constexpr):
    """128 token scales in the order of positions; zero behind the end, where they may be NaN."""
    i = gl.arange(0, 128, LAYOUT)
    token = i // 32 * 32 + i % 4 * 8 + i // 4 % 8
    return gl.where(token < end, gl.load(scales_ptr + i).to(gl.float32), 0.0)


@gluon.jit
def _ratios(scales_ptr, end, IS_V: gl.constexpr):
    """The ratios of 128 token scales to a page's scale in the order of positions, and the page's scale."""
    # Every warp finds the largest by itself.
    largest = gl.max(_load_scales(scales_ptr, end, gl.BlockedLayout([4], [32], [gl.num_warps()], [0])), 0)
    scale = _load_scales(scales_ptr, end, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    if IS_V:
        page = needed_scale(largest * 127.0, V_CODEC)
        ratio = scale * (0x7F000000 - page.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)
    else:
        page = largest
        ratio = gl.div_rn(scale, largest + scale * 0.0)
    return ratio, page


@gluon.jit
def _copy_keys(source, target, scales_ptr, header, end, D: gl.constexpr):
    ROWS: gl.constexpr = _rows(D, gl.num_warps())
    at = gl.arange(0, 128, gl.SliceLayout(1, ROWS))[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, ROWS))[None, :]
    codes = gl.load(source + at)
    ratio, scale = _ratios(scales_ptr, end, False)
    ratio = gl.convert_layout(ratio.reshape([4, 8, 4]).permute(0, 2, 1).reshape([128]), gl.SliceLayout(1, ROWS))
    ratio, _ = gl.broadcast(ratio.to(gl.float16)[:, None], codes)
    gl.store(target + at, gl.inline_asm_elementwise(K_WORD, "=r,r,r,r", [codes, ratio], dtype=gl.int8, is_pure=True, pack=4))
    word = gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    gl.store(header + word, gl.where(word == 0, scale, 0.0), mask=word != 1)


@gluon.jit
def _copy_values(source, target, scales_ptr, header, end, D: gl.constexpr):
    GROUPS: gl.constexpr = gl.BlockedLayout([1, 1, 16], [1, 32, 1], [gl.num_warps(), 1, 1], [2, 1, 0])
    group = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, GROUPS)))[:, None, None]
    channel = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(2, GROUPS)))[None, :, None]
    at = 128 * D + (group * D + channel) * 16 + gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, GROUPS)))[None, None, :]
    codes = gl.load(source + at)
    ratio, scale = _ratios(scales_ptr, end, True)
    # The bits of a position are those of the token in the order 6 5 2 1 0 4 3. A group of V has them in the order 2 1 3 0.
    ratio = ratio.reshape([2, 2, 2, 2, 2, 2, 2]).permute(0, 1, 5, 2, 3, 6, 4).reshape([8, 16])
    ratio, _ = gl.broadcast(gl.convert_layout(ratio, gl.SliceLayout(1, GROUPS)).to(gl.float16)[:, None, :], codes)
    gl.store(target + at, gl.inline_asm_elementwise(V_WORD, "=r,r,r,r", [codes, ratio], dtype=gl.int8, is_pure=True, pack=4))
    gl.store(header + 1, scale)


@gluon.jit(do_not_specialize=["table_stride", "heads", "columns"])
def copy_kernel(pool_ptr, table_ptr, table_stride, lengths_ptr, out_ptr, heads, columns, D: gl.constexpr, SIZE: gl.constexpr,
                LAYOUT: gl.constexpr):  # fmt: skip
    program = gl.program_id(0)  # one dimension, which the emulator runs
    is_v = program % 2
    head = program // 2 % heads
    column = program // (2 * heads) % columns
    seq = program // (2 * heads * columns)
    end = gl.load(lengths_ptr + seq) - column * 128
    if end > 0:
        page = gl.load(table_ptr + seq * table_stride + column)
        source = pool_ptr.to(gl.pointer_type(gl.int8), bitcast=True) + (page.to(gl.int64) * heads + head) * SIZE
        target = out_ptr.to(gl.pointer_type(gl.int8), bitcast=True) + ((seq * columns + column).to(gl.int64) * heads + head) * LAYOUT.nbytes
        scales_ptr = (source + 2 * 128 * D).to(gl.pointer_type(gl.bfloat16), bitcast=True)
        header = (target + LAYOUT.header_offset).to(gl.pointer_type(gl.float32), bitcast=True)
        if is_v == 0:
            _copy_keys(source, target, scales_ptr, header, end, D)
        else:
            _copy_values(source, target, scales_ptr + 128, header, end, D)


def target_of(pages: TokenPages, most: int) -> KVPages:
    """The pages that `copy` writes, for sequences of up to `most` tokens."""
    num_seqs, heads, device = len(pages.page_table), pages.pool.shape[1], pages.pool.device
    columns = -(-most // PAGE_SIZE)
    layout = PageLayout.of(pages.head_dim)
    pool = torch.empty(num_seqs * columns, heads, layout.nbytes, dtype=torch.uint8, device=device)
    table = torch.arange(num_seqs * columns, dtype=torch.int32, device=device).view(num_seqs, columns)
    return KVPages.trusted(pool, table, pages.lengths, KVFormat.of(pages.head_dim, "int8", True))


def copy(pages: TokenPages, target: KVPages) -> None:
    num_seqs, columns = target.page_table.shape
    heads, head_dim, device = pages.pool.shape[1], pages.head_dim, pages.pool.device
    given = make_constants("copy", device, D=head_dim, SIZE=nbytes(head_dim), LAYOUT=PageLayout.of(head_dim), num_warps=WARPS)
    args = pages.pool, pages.page_table, pages.page_table.stride(0), pages.lengths, target.pool, heads, columns
    launch(copy_kernel, (2 * heads * columns * num_seqs,), args, given)
