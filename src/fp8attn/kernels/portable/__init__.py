"""Attention over 8-bit pages in plain Triton, for prefill and decode: 8-bit storage, 16-bit arithmetic, FP32
accumulation.

Only the cache is rounded to 8 bits. K, in INT8 or E4M3, and V are exact in FP16. If K is rotated, Q is rotated in FP32.
Q is rounded to FP16 after a power of two for each row brings it into range. The weights P are multiplied by 2^15, so
that FP16 keeps all its digits down to weights of 2^-29. The denominator sums the rounded weights, so that their errors
cancel where V is constant.

Means cost nothing per key: `q . (k + k_mean)` is `q . k` plus one constant per row. A softmax does not depend on that
constant; the LSE, sinks and a softcap do. v_mean is added to the normalized output. A page's k_scale is a part of the
row's factor. Its v_scale is the accumulator's unit, which changes from page to page in the rescaling by the running
maximum (FlashAttention-2, arXiv:2307.08691).

The query heads of one KV head are packed into the rows of a tile (row r: token r // G, head r % G), so that decode
shares each K and V byte between them. Long sequences are split over programs (Flash-Decoding). Each program computes
its share of the pages on the device, and `combine` adds the parts. If a tile has so few rows that warps can share it
only by splitting keys, each warp gets a quarter of the keys, with its own maximum, denominator and accumulator (a
batched matrix product whose batch is the warp). Then the loop has no exchange between warps, and their results are
combined once, at the end.

Host: `portable_attention`, the call; `block_of`, the tiles. Device: `kernel`, and `tiles`, its loop. Both: `Block` and
`PortableOptions`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ...formats.page_layout import PAGE_SIZE, PageLayout
from ...formats.spec import PageSpec
from ...pages import KVPages
from ...params import AttentionParams
from ..combine import combine, num_splits
from ..common import power_of_two
from ..launch import ConstexprFields, launch, make_constants
from ..machine import machine
from .kernel import portable_kernel

CLEARING = 64  # programs that write zeros after the last sequence of a ragged batch


@dataclass(frozen=True)
class Block(ConstexprFields):
    """How a block of rows is computed, a constexpr parameter (`block_of`)."""

    rows: int
    tile: int  # keys of a tile
    key_warps: int  # that split a tile's keys; 1: none does
    num_warps: int
    num_stages: int  # of the pipeline
    shares: int = 1  # programs that share V's channels
    # of a program's channels, whose products with V are one after the other: a product needs registers beside the
    # accumulator
    parts: int = 1
    scratch: bool = False  # Q is copied to be loaded


@dataclass(frozen=True)
class PortableOptions(ConstexprFields):
    """The one constexpr parameter of the kernel. The host makes it, and device code reads it."""

    spec: PageSpec
    layout: PageLayout  # a field, so that the kernel's key in Triton's cache covers it
    block: Block
    rotate: bool  # queries, as the keys are
    width: int  # head_dim, padded to a power of two
    group: int  # query heads of a KV head
    causal: bool
    window: bool
    softcap: bool
    split: bool  # the keys are divided among programs
    native: bool  # the target converts E4M3 by itself (`codec`)

    @property
    def channels(self) -> int:
        """The channels of V that a program multiplies at a time."""
        return self.width // (self.block.shares * self.block.parts)


@lru_cache
def block_of(head_dim: int, rows: int, shared_memory: int, hopper: bool) -> Block:
    """The block for `rows` packed rows of each KV head (queries times group), if a program may have `shared_memory`
    bytes.

    The frequent cases do not spill registers (`test_compile.py` checks it). GPUs with much shared memory (Hopper,
    Blackwell) also have instructions that read operands from it. On other GPUs tiles are smaller, because operands need
    registers.
    """
    wide = head_dim > 128
    if head_dim > 256 and rows > 64 and hopper:
        # Hopper's instructions take 64 rows for 4 warps, whose registers hold 256 channels of V, and the product of
        # 128. So two programs have the same rows, and both compute their weights.
        return Block(128, 64, 1, 8, 1, shares=2, parts=2, scratch=True)
    if head_dim > 256:
        # The accumulator and a tile's product are 32 rows of 512 channels: all that the registers of 8 warps hold.
        tile = 64 if shared_memory >= 90_000 else 32
        if rows <= 16:
            return Block(16, tile, 1, 8, 3 if shared_memory >= 200_000 else 2)
        return Block(32, tile, 1, 8, 1 if tile == 64 else 2)
    if shared_memory >= 200_000:
        if rows <= 16:
            return Block(16, 64, 1, 4, 4) if wide else Block(16, 128, 4, 4, 3)
        if rows <= 64:
            return Block(64, 64, 1, 8 if wide else 4, 2)
        return Block(128, 64, 1, 8, 2)
    if rows <= 16:
        return Block(16, 64, 1, 8, 3) if wide else Block(16, 128, 4, 4, 3)
    if rows <= 64 or wide:
        return Block(64, 32, 1, 8 if wide else 4, 2)
    return Block(128, 32, 1, 8, 3)


def portable_attention(
    q: torch.Tensor,
    pages: KVPages,
    params: AttentionParams,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.attention`, with a relative error of up to 3e-4 plus the rounding of the output's dtype."""
    cu_seqlens_q, max_seqlen_q, causal = params.cu_seqlens_q, params.max_seqlen_q, params.causal
    window, softcap, sinks, leftpad_k = params.window, params.softcap, params.sinks, params.leftpad_k
    num_tokens, num_q_heads, head_dim = q.shape
    kv_format = pages.format
    device = q.device
    if out is None:
        out = torch.empty((num_tokens, num_q_heads, head_dim), dtype=q.dtype, device=device)
    lse = torch.empty((num_tokens, num_q_heads), dtype=torch.float32, device=device)
    if not num_tokens:
        return out, lse
    group = num_q_heads // pages.num_kv_heads
    gpu = machine(device)
    block = block_of(head_dim, max_seqlen_q * group, gpu.shared_memory, gpu.hopper)
    blocks = -(-max_seqlen_q * group // block.rows)
    max_pages = pages.page_table.shape[1]
    if window:
        max_pages = min(max_pages, (window + max_seqlen_q) // PAGE_SIZE + 2)
    programs = pages.num_seqs * pages.num_kv_heads * blocks * block.shares
    splits = num_splits(programs, max_pages, gpu.num_sms * (8 // block.num_warps))
    num_rows = num_tokens * num_q_heads
    if splits > 1:
        target = torch.empty((splits, num_rows, head_dim), dtype=torch.float32, device=device)
        target_lse = torch.empty((2, splits, num_rows), dtype=torch.float32, device=device)
    else:
        target, target_lse = out, lse
    scratch = (
        torch.empty((num_tokens, num_q_heads, head_dim), dtype=torch.float16, device=device) if block.scratch else None
    )
    args = (
        q, pages.pool, kv_format.stored_k_mean, kv_format.v_mean, pages.page_table, pages.cache_seqlens, cu_seqlens_q,
        None if splits > 1 else sinks, leftpad_k, scratch, target, target_lse, q.stride(0), q.stride(1),
        pages.page_table.stride(0),
        max_seqlen_q, pages.num_kv_heads, pages.num_seqs, blocks, splits, num_rows, float(params.softmax_scale),
        float(softcap), window,
    )  # fmt: skip
    options = PortableOptions(
        kv_format.spec, kv_format.layout, block, kv_format.rotate, power_of_two(head_dim), group, causal, window > 0,
        softcap > 0, splits > 1, gpu.native_e4m3,
    )  # fmt: skip
    constants = make_constants(
        "attend", device, OPTIONS=options, num_warps=block.num_warps, num_stages=block.num_stages, enable_fp_fusion=True
    )
    programs = programs * splits + (CLEARING if cu_seqlens_q is not None else 0)
    launch(portable_kernel, (programs,), args, constants)
    if splits > 1:
        combine(target, target_lse, sinks, out, lse)
    return out, lse
