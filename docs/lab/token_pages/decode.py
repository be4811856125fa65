"""The product's decode kernel (`kernels/decode`), over pages with a scale for every token. What differs from it is marked.

The scales of a page come by one more TMA copy, counted by K's barrier. K's multiply the columns of scores before anything else sees these.
V's multiply the weights after the row sum: in FP32, divided by the largest power of two that is not above the page's largest, so weights
stay below 2^15, and the accumulator is in units of that power. The multiplication is exact up to the one rounding to FP16 that the
product has, too. FP16's normal numbers reach 2^-28 of the largest product of weight and scale.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from fp8attn.formats.page_layout import PAGE_SIZE, V_GROUP
from fp8attn.kernels.codec import ratio_of_powers
from fp8attn.kernels.common import HIDDEN_FINITE, LOG2E, UNSEEN
from fp8attn.kernels.decode import plan
from fp8attn.kernels.decode.combine import DecodeOutput, Parts, clear_rest, combine_ranges, store_head
from fp8attn.kernels.decode.consume import WEIGHT_BITS, _load_v, _mask, _scores, _tanh, _weights_operand
from fp8attn.kernels.decode.load import PRODUCER_REGISTERS
from fp8attn.kernels.decode.queries import DecodeQueries, load_mean, mma_layout
from fp8attn.kernels.decode.work import DecodeBatch, assign
from fp8attn.kernels.gluon import (
    aggregate,
    fence_async_shared,
    fetch,
    gdc_wait,
    gl,
    gluon,
    mbarrier,
    mma_v2,
    reinterpret,
    sync,
    tensor_descriptor,
)
from fp8attn.kernels.launch import Tiles, launch, make_constants
from fp8attn.kernels.pages import BUNDLE, PAGE, ROW, allocate_k, fetch_k, v_layout
from fp8attn.kernels.view import View
from fp8attn.params import AttentionParams

from .layout import SCALES, TokenPages

SCALE_COUNT = gl.constexpr(SCALES)
# The codes are the last bits of FP16 numbers from 1024 on; 1152 is 1024 and the 128 that the sign's bit adds (`codec.from_int8`).
INT8_TO_FP16 = gl.constexpr("""{ .reg .b32 x, magic, offset; mov.b32 magic, 0x64646464; mov.b32 offset, 0x64806480;
xor.b32 x, $2, 0x80808080;
prmt.b32 $0, x, magic, 0x4140; prmt.b32 $1, x, magic, 0x4342; sub.rn.f16x2 $0, $0, offset; sub.rn.f16x2 $1, $1, offset; }""")
BIASED_TO_FP16 = gl.constexpr(INT8_TO_FP16.value.replace("xor.b32 x, $2, 0x80808080", "mov.b32 x, $2"))  # of codes plus 128


@aggregate
class TokenRing:
    """`DecodeRing` with the scales of 128 tokens."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor  # [2 * stages, 128]: K's and V's of a stage
    k_full: gl.shared_memory_descriptor  # this one counts the scales, too
    v_full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.jit
    def open(self):
        for stage in gl.static_range(self.STAGES):
            mbarrier.init(self.k_full.index(stage), 1)
            mbarrier.init(self.v_full.index(stage), 1)
            mbarrier.init(self.empty.index(stage), 1)
        fence_async_shared()


@gluon.constexpr_function
def scales_layout():
    """Of 128 scales: token bits by bits of the position (`layout.by_position`)."""
    return gl.SharedLinearLayout([[8], [16], [1], [2], [4], [32], [64]], alignment=128)


@gluon.constexpr_function
def all_scales(warps):
    """128 scales in every warp, the four of each thread in one word of 64 bits."""
    return gl.DistributedLinearLayout([[8], [16]], [[1], [2], [4], [32], [64]], [[0]] * (warps.bit_length() - 1), [], [128])


@gluon.jit
def make_ring(k_desc, WIDTH: gl.constexpr, STAGES: gl.constexpr):
    k = allocate_k(k_desc, STAGES)
    v = gl.allocate_shared_memory(gl.int8, [STAGES, WIDTH, PAGE], v_layout(WIDTH))
    scales = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, PAGE], scales_layout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    return TokenRing(k, v, scales, k_full, v_full, empty, STAGES)


@aggregate
class TokenSource:
    """`DecodeSource` with a descriptor of the scales."""

    k_desc: tensor_descriptor
    v_desc: tensor_descriptor
    scales_desc: tensor_descriptor
    table: gl.tensor
    table_stride: gl.tensor

    @gluon.jit
    def request(self, ring, stage, slot):
        """Starts to copy K, V and the scales of `slot` (page x heads + head) to a stage that is free."""
        V_SHAPE: gl.constexpr = [ring.STAGES] + self.v_desc.block_type.shape  # noqa: RUF005
        V_LAYOUT: gl.constexpr = self.v_desc.layout
        SCALES_LAYOUT: gl.constexpr = self.scales_desc.layout
        mbarrier.expect(ring.k_full.index(stage), self.k_desc.block_type.nbytes + 2 * SCALE_COUNT)
        scales = reinterpret(ring.scales, gl.bfloat16, [ring.STAGES, 1, SCALE_COUNT], SCALES_LAYOUT)
        fetch(self.scales_desc, [slot, 0], ring.k_full.index(stage), scales.index(stage))
        fetch_k(self.k_desc, slot, ring.k_full.index(stage), ring.k.index(stage))
        mbarrier.expect(ring.v_full.index(stage), self.v_desc.block_type.nbytes)
        v = reinterpret(ring.v, gl.int8, V_SHAPE, V_LAYOUT)
        fetch(self.v_desc, [slot, 0, 0, 0, 0], ring.v_full.index(stage), v.index(stage))


@gluon.jit
def request_first(ring, batch, work, source):
    seq = batch.sequence(work.seq)
    i, j = batch.portion(work.begin, seq.num_pages, work.low, work.high)
    requested = (work.begin < work.high) & (i < j) & (seq.length > 0)
    if requested:
        source.request(ring, 0, gl.load(source.table + work.seq * source.table_stride + seq.first_page + i) * batch.heads + work.head)
    return requested


@gluon.jit
def produce(ring, batch, work, requested, source):
    index, head, begin = work.seq, work.head, work.begin
    done = requested.to(gl.int32)
    tile = done
    while begin < work.high:
        seq = batch.sequence(index)
        i, j = batch.portion(begin, seq.num_pages, work.low, work.high)
        for page in range(seq.first_page + i + done, seq.first_page + j):
            stage = tile % ring.STAGES
            slot = gl.load(source.table + index * source.table_stride + page) * batch.heads + head
            mbarrier.wait(ring.empty.index(stage), ((tile // ring.STAGES) & 1) ^ 1)
            if seq.length > 0:
                source.request(ring, stage, slot)
            else:
                mbarrier.arrive(ring.k_full.index(stage), count=1)
                mbarrier.arrive(ring.v_full.index(stage), count=1)
            tile += 1
        done = 0
        begin += seq.places
        index, head = batch.following(index, head, seq.num_pages)


@gluon.jit
def _attend(ring, tile, page, q, factor, mean_score, softcap, mask, token, acc, row_max, row_sum, v_unit, options: gl.constexpr,
            BIASED: gl.constexpr):  # fmt: skip
    """`consume._attend`: the lines with `k_scale`, `v_scale` and `v_page` differ."""
    WARPS: gl.constexpr = gl.num_warps()
    MMA: gl.constexpr = acc.type.layout
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 4)
    TOKEN: gl.constexpr = gl.SliceLayout(2, MMA)
    stage = tile % ring.STAGES
    phase = (tile // ring.STAGES) & 1
    mbarrier.wait(ring.k_full.index(stage), phase)
    k_scale = ring.scales.index(2 * stage).reshape([WARPS, PAGE // WARPS]).load(TOKEN).to(gl.float32)
    v_scale = ring.scales.index(2 * stage + 1).reshape([WARPS, PAGE // WARPS]).load(TOKEN).to(gl.float32)
    # Positive numbers are in the order of their bits; without the mantissa's it is a power of two.
    largest = gl.max(ring.scales.index(2 * stage + 1).load(all_scales(WARPS)).to(gl.int16, bitcast=True).to(gl.int32), 0)
    v_page = (largest & 0x7F80) << 16
    v_scale *= (0x7F000000 - v_page).to(gl.float32, bitcast=True)
    v_page = v_page.to(gl.float32, bitcast=True)
    k = ring.k.index(stage).reshape([WARPS, PAGE // WARPS, options.width]).load(A)
    if options.early_v:
        v = _load_v(ring, stage, phase, A)
    s = _scores(k, q, options.rows, MMA) * k_scale[:, :, None]
    c = factor
    if options.softcap:
        s = _tanh((s * c[:, None, :] + mean_score[:, None, :]) * (1.0 / softcap)) * softcap
        c = factor * 0.0 + 1.0
    if mask.cuts(page):
        s = gl.where(mask.sees(page * PAGE + token), s * c[:, None, :], HIDDEN_FINITE)
        c = factor * 0.0 + 1.0
    new_max = gl.maximum(row_max, gl.max(s, 1) * c - WEIGHT_BITS)
    rescale = gl.exp2(row_max - new_max)
    p = gl.exp2(s * c[:, None, :] - new_max[:, None, :])
    row_sum = row_sum * rescale + gl.sum(p, 1)
    rescale = rescale * ratio_of_powers(v_unit, v_page)
    if not options.early_v:
        v = _load_v(ring, stage, phase, A)
    CONVERT: gl.constexpr = BIASED_TO_FP16 if BIASED else INT8_TO_FP16
    v = gl.inline_asm_elementwise(CONVERT, "=r,=r,r", [v], dtype=gl.float16, is_pure=True, pack=4)
    acc = mma_v2(v, _weights_operand(p * v_scale[:, :, None], B), acc * rescale[:, None, :])
    return acc, new_max, row_sum, v_page


@gluon.jit
def consume(ring, batch, work, parts, first_q, first_k_mean, queries, output, softcap, options: gl.constexpr, BIASED: gl.constexpr):
    """`consume.consume`, unchanged except for the `_attend` that it calls."""
    ROWS: gl.constexpr = options.rows
    WIDTH: gl.constexpr = options.width
    WARPS: gl.constexpr = gl.num_warps()
    TOKENS: gl.constexpr = PAGE // WARPS
    MMA: gl.constexpr = mma_layout(WARPS)
    VECTOR: gl.constexpr = gl.SliceLayout(1, MMA)
    INT8: gl.constexpr = True
    MEAN_SCORES: gl.constexpr = queries.k_mean is not None
    CHANNELS: gl.constexpr = min(WIDTH // 32, 4)
    MERGED: gl.constexpr = gl.BlockedLayout([WARPS, CHANNELS, 1], [1, 32, 1], [1, 1, WARPS], [1, 2, 0])
    SUMS: gl.constexpr = gl.SliceLayout(1, MERGED)
    PAIRS: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([WARPS, CHANNELS, 1, 2], [1, 32, 1, 1], [1, 1, WARPS, 1], [3, 1, 2, 0]))
    PAIR: gl.constexpr = gl.SliceLayout(0, PAIRS)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, MMA)))
    token = (warp[:, None] * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(2, MMA)))[None, :])[:, :, None]
    channel = gl.arange(0, WIDTH, gl.SliceLayout(1, gl.SliceLayout(0, MERGED)))
    step = (batch.row0 + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, MMA))))[None, None, :] // batch.GROUP
    first_start = work.worker_of(work.begin)
    raw_q, k_mean = first_q, first_k_mean
    index, head, begin = work.seq, work.head, work.begin
    tile = 0
    while begin < work.high:
        seq = batch.sequence(index)
        i, j = batch.portion(begin, seq.num_pages, work.low, work.high)
        if i < j:
            if begin > work.begin:
                raw_q, k_mean = queries.load(batch, seq, head, options)
            q, factor, mean_score = queries.operand(raw_q, k_mean, VECTOR, INT8, options)
            mask = _mask(batch, seq, step, options.causal)
            acc = gl.zeros([WARPS, WIDTH, ROWS], gl.float32, MMA)
            row_max = gl.full([WARPS, ROWS], UNSEEN, gl.float32, VECTOR)
            row_sum = gl.zeros([WARPS, ROWS], gl.float32, VECTOR)
            mean_score_one = gl.zeros([ROWS], gl.float32, gl.SliceLayout(0, SUMS))
            if MEAN_SCORES:
                mean_score_one = gl.max(gl.convert_layout(mean_score, SUMS), 0)
            v_unit = seq.length.to(gl.float32) * 0.0 + 1.0
            for page in range(seq.first_page + i, seq.first_page + j):
                acc, row_max, row_sum, v_unit = _attend(
                    ring, tile, page, q, factor, mean_score, softcap, mask, token, acc, row_max, row_sum, v_unit, options, BIASED
                )
                tile += 1

            v_mean = load_mean(output.v_mean, head, channel, options.head_dim)
            o = gl.convert_layout(acc, MERGED)
            all_max, all_sum = gl.split(gl.convert_layout(gl.join(row_max, row_sum), PAIRS))
            all_max = gl.convert_layout(all_max, SUMS)
            all_sum = gl.convert_layout(all_sum, SUMS)
            max_one = gl.max(all_max, 0)
            weight = gl.exp2(all_max - max_one[None, :])
            sum_one = gl.sum(all_sum * weight, 0)
            o = gl.sum(o * (weight * v_unit)[:, None, :], 0)
            if i + seq.num_pages == j:
                store_head(o, max_one, sum_one, mean_score_one, v_mean, batch, seq, head, output, options)
            else:
                part = work.worker + gl.where(i == 0, work.workers, 0)
                parts.store(part, o, max_one, sum_one, mean_score_one, batch, seq, channel, PAIR, MEAN_SCORES, options)
                start = gl.where(i > 0, first_start, work.worker)
                sync()
                done = gl.atomic_add(parts.pages + start, j - i, sem="acq_rel", scope="gpu") + j - i
                sync()
                if done == seq.num_pages:
                    gl.store(parts.pages + start, 0)
                    last = work.worker_of(begin + seq.num_pages - 1)
                    combine_ranges(start, last, batch, seq, head, work.workers, parts, output, MEAN_SCORES, options)
        begin += seq.places
        index, head = batch.following(index, head, seq.num_pages)


@gluon.jit(do_not_specialize=["table_stride", "num_seqs", "heads", "max_q", "num_tokens", "window", "workers", "plane"])
def token_decode_kernel(q_ptr, q_stride_t, q_stride_h, k_desc, v_desc, scales_desc, table_ptr, table_stride, lengths_ptr, bounds_ptr,
                        leftpad_ptr, sinks_ptr, out_ptr, lse_ptr, part_ptr, plane, state_ptr, num_seqs, heads, max_q, num_tokens, window,
                        workers, scale, softcap, OPTIONS: gl.constexpr, BIASED: gl.constexpr):  # fmt: skip
    """`decode_kernel`, without means."""
    ROWS: gl.constexpr = OPTIONS.rows
    row_tiles = 1
    if not OPTIONS.one_row_tile:
        row_tiles = (max_q * OPTIONS.group + ROWS - 1) // ROWS
    row_tile = gl.program_id(0) % row_tiles
    worker = gl.program_id(0) // row_tiles
    batch = DecodeBatch(
        lengths_ptr, bounds_ptr, leftpad_ptr, num_seqs, heads, max_q, window, row_tile * ROWS, OPTIONS.group, OPTIONS.ragged,
        OPTIONS.window, OPTIONS.leftpad, OPTIONS.whole_pages, OPTIONS.head_pages,
    )  # fmt: skip
    first = row_tile * (2 * workers) * ROWS
    sums_ptr = part_ptr + plane * OPTIONS.width
    parts = Parts(part_ptr + first * OPTIONS.width, sums_ptr + 2 * first, sums_ptr + 2 * plane + first, state_ptr + row_tile * workers)
    source = TokenSource(k_desc, v_desc, scales_desc, table_ptr, table_stride)
    queries = DecodeQueries(q_ptr, q_stride_t, q_stride_h, None, scale)
    output = DecodeOutput(out_ptr, lse_ptr, None, sinks_ptr)
    ring = make_ring(k_desc, OPTIONS.width, OPTIONS.stages)
    ring.open()
    gdc_wait()
    count = batch.counts(0, OPTIONS.block)
    work = assign(batch, count, worker, workers, OPTIONS.block)
    first_q, first_k_mean = queries.load(batch, batch.sequence(work.seq), work.head, OPTIONS)
    requested = request_first(ring, batch, work, source)
    gl.warp_specialize([
        (consume, (ring, batch, work, parts, first_q, first_k_mean, queries, output, softcap, OPTIONS, BIASED)),
        (produce, (ring, batch, work, requested, source)),
    ], [1], [PRODUCER_REGISTERS])  # fmt: skip
    if OPTIONS.ragged:
        clear_rest(batch, num_tokens, output, OPTIONS)


@lru_cache(maxsize=64)
def views(shape: tuple[int, ...], head_dim: int, width: int) -> tuple[View, View, View]:
    """K, V and the scales of a page, as TMA copies them (`kernels.pages._views`)."""
    num_pages, heads, size = shape
    slots, bundles = num_pages * heads, min(width, head_dim) // BUNDLE
    return (
        View((slots, PAGE_SIZE, head_dim), (size, head_dim, 1), (1, PAGE_SIZE, width), dtype=torch.int8),
        View((slots, 1, PAGE_SIZE // V_GROUP, bundles, ROW), (size, width * V_GROUP, head_dim * V_GROUP, ROW, 1),
             (1, 1, PAGE_SIZE // V_GROUP, width // BUNDLE, ROW), swizzled=False, dtype=torch.int8, offset=PAGE_SIZE * head_dim),
        View((slots, SCALES), (size // 2, 1), (1, SCALES), swizzled=False, dtype=torch.bfloat16, offset=2 * PAGE_SIZE * head_dim),
    )  # fmt: skip


def token_decode(q: torch.Tensor, pages: TokenPages, params: AttentionParams, biased: bool = False) -> tuple[Any, Any]:
    """`decode.decode_attention` over pages with a scale for every token. K is rotated. `biased`: V's codes are stored plus 128."""
    cu_seqlens_q, max_seqlen_q, causal = params.cu_seqlens_q, params.max_seqlen_q, params.causal
    window, softcap = params.window, params.softcap
    device = q.device
    num_tokens, num_q_heads, head_dim = q.shape
    table, lengths = pages.page_table, pages.lengths
    num_seqs, heads = len(table), pages.pool.shape[1]
    out = torch.empty_like(q)
    lse = torch.empty(num_tokens, num_q_heads, dtype=torch.float32, device=device)
    group = num_q_heads // heads
    workers, grid, counters, plane, width, given = plan.make_decode_plan(
        device, heads * num_seqs, head_dim, group, max_seqlen_q * group, num_seqs, causal and max_seqlen_q > 1, cu_seqlens_q is not None,
        window > 0, softcap > 0, False, False, True,
    )  # fmt: skip
    parts = torch.empty(plane * (width + 3), dtype=torch.float32, device=device)
    stride_t, stride_h, _ = q.stride()
    args = (
        q, stride_t, stride_h, *(Tiles(pages.pool, view) for view in views(tuple(pages.pool.shape), head_dim, width)),
        table, table.stride(0), lengths, lengths if cu_seqlens_q is None else cu_seqlens_q, lengths, lengths,
        out, lse, parts, plane, counters, num_seqs, heads, max_seqlen_q, num_tokens, window, workers,
        float(params.softmax_scale), softcap * LOG2E.value,
    )  # fmt: skip
    launch(token_decode_kernel, grid, args, make_constants("token decode", device, BIASED=biased, **given))
    return out, lse
