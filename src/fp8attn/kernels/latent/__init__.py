"""Latents (MLA) in plain Triton, on any GPU: what writes their pages, and attention in 16-bit arithmetic.

`hopper/` has attention for Hopper.

`append_latents` writes the bytes of `formats.latent.quantize`. `latent_attention` is `fp8attn.latent.attention` in
three launches: absorbed queries are rotated once and rounded to FP16, after a power of two for each row brings them
into range; parts of the keys are attended to; and `combine` adds the parts and restores the result (rotation, factor,
mean).

| file | what |
|---|---|
| `__init__.py` | the launches |
| `append.py` | what writes pages |
| `attention.py` | queries, and attention to a part of the keys |

Codes of INT8 are exact in FP16, and a tile of them is the operand of both products. The scale of a token multiplies its
scores, and its weights before they are rounded, in units of the largest scale of a tile. The heads of a KV head are
packed into the rows of a tile, as in `portable`.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ...formats.page_layout import PAGE_SIZE, PageLayout
from ...pages import KVPages
from ...params import Append, AttentionParams
from ..combine import combine, num_splits
from ..common import power_of_two
from ..launch import ConstexprFields, launch, make_constants
from ..machine import machine
from .append import append_kernel
from .attention import attention_kernel, queries_kernel

ELEMENTS = 4096  # of latents that a program of an append, or of the queries' kernel, holds


@dataclass(frozen=True)
class LatentOptions(ConstexprFields):
    """The one constexpr parameter of the kernels. The host makes it, and device code reads it."""

    layout: PageLayout
    rank: int
    rope: int
    rope_in_codes: bool  # the key with RoPE is in codes, too
    rows: int  # of a program: tokens of an append, queries times heads of attention
    native: bool  # the target converts BF16 and E4M3 by itself (`Machine.native_e4m3`)
    advance: bool = True  # the lengths do not count the new tokens yet
    alone: bool = False  # a program writes all new tokens of a sequence, and advances its length
    group: int = 1  # query heads of a KV head
    tile: int = 1  # keys
    causal: bool = True
    window: bool = False


def append_latents(pages: KVPages, latent: torch.Tensor, rope: torch.Tensor, step: Append) -> None:
    """`fp8attn.latent.append` with the same bits, except for those of a NaN."""
    device, spec, heads = latent.device, pages.spec, pages.num_kv_heads
    rank, rope_dim = spec.widths
    tokens = min(power_of_two(step.max_seqlen), ELEMENTS // rank)
    blocks = -(-step.max_seqlen // tokens)
    options = LatentOptions(
        pages.format.layout, rank, rope_dim, spec.rope_in_codes, tokens, machine(device).native_e4m3, step.advance,
        blocks * heads == 1,
    )  # fmt: skip
    constants = make_constants("append latents", device, OPTIONS=options, num_warps=4, enable_fp_fusion=False)
    args = (
        latent, rope, pages.pool, pages.format.v_mean, pages.format.factor, pages.page_table, pages.cache_seqlens,
        step.cu_seqlens, *latent.stride()[:2], *rope.stride()[:2], pages.page_table.stride(0), step.max_seqlen, heads,
        blocks,
    )  # fmt: skip
    launch(append_kernel, (pages.num_seqs * heads * blocks,), args, constants)
    if step.advance and not options.alone:
        lengths = pages.cache_seqlens
        with torch.inference_mode() if lengths.is_inference() else nullcontext():  # as in `kernels.append`
            lengths.add_(step.max_seqlen if step.cu_seqlens is None else step.cu_seqlens.diff())


@lru_cache
def config(rank: int, rows: int, shared_memory: int) -> tuple[int, int, int]:
    """The rows and the keys of a tile, and the warps, for `rows` packed rows of each KV head.

    The accumulator and a tile's product share the registers, and the queries and a tile's codes in FP16 the shared
    memory of a program.
    """
    most = max(16, min(32, 16384 // rank)) if shared_memory >= 160_000 else 16
    return max(16, min(most, power_of_two(rows))), 32 if rank <= 512 else 16, 8 if rank >= 256 else 4


def latent_attention(
    q: torch.Tensor, pages: KVPages, params: AttentionParams, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fp8attn.latent.attention`, with a relative error of up to 3e-4 plus the rounding of the output's dtype."""
    num_tokens, num_q_heads, _ = q.shape
    device, spec, heads, group = q.device, pages.spec, pages.num_kv_heads, num_q_heads // pages.num_kv_heads
    rank, rope = spec.widths
    out = torch.empty((num_tokens, num_q_heads, rank), dtype=q.dtype, device=device) if out is None else out
    lse = torch.empty((num_tokens, num_q_heads), dtype=torch.float32, device=device)
    if not num_tokens:
        return out, lse
    num_rows, max_pages = num_tokens * num_q_heads, pages.page_table.shape[1]
    rows, tile, num_warps = config(rank, params.max_seqlen_q * group, machine(device).shared_memory)
    blocks = -(-params.max_seqlen_q * group // rows)
    if params.window:
        max_pages = min(max_pages, (params.window + params.max_seqlen_q) // PAGE_SIZE + 2)
    splits = num_splits(blocks * heads * pages.num_seqs, max_pages, machine(device).num_sms)
    stored = torch.empty((num_rows, rank + rope), dtype=torch.float16, device=device)  # the queries
    factors = torch.empty((2, num_rows), dtype=torch.float32, device=device)  # of scores; the scores of the mean
    parts = torch.empty((splits, num_rows, rank), dtype=torch.float32, device=device)
    parts_lse = torch.full((2, splits, num_rows), -torch.inf, dtype=torch.float32, device=device)  # no key was seen

    together = max(1, ELEMENTS // rank // 2)
    layout, native = pages.format.layout, machine(device).native_e4m3
    options = LatentOptions(layout, rank, rope, spec.rope_in_codes, together, native, group=group)
    constants = make_constants("queries of latents", device, OPTIONS=options, num_warps=4)
    args = (
        q, pages.format.v_mean, pages.format.factor, stored, factors, q.stride(0), q.stride(1), num_rows, num_q_heads,
        float(params.softmax_scale),
    )  # fmt: skip
    launch(queries_kernel, (-(-num_rows // together),), args, constants)

    options = replace(options, rows=rows, tile=tile, causal=params.causal, window=params.window > 0)
    constants = make_constants(
        "attend to latents", device, OPTIONS=options, num_warps=num_warps, num_stages=2, enable_fp_fusion=True
    )
    args = (
        stored, factors, pages.pool, pages.page_table, pages.cache_seqlens, params.cu_seqlens_q, params.leftpad_k,
        parts, parts_lse, pages.page_table.stride(0), params.max_seqlen_q, heads, blocks, splits, num_rows,
        params.window,
    )  # fmt: skip
    launch(attention_kernel, (pages.num_seqs * heads * blocks * splits,), args, constants)
    combine(parts, parts_lse, None, out, lse, pages)
    return out, lse
