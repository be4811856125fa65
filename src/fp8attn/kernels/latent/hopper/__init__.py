"""Attention over 8-bit latents (MLA) on Hopper. A latent is key and value of all heads.

    scores = q_latent . latent + q_rope . key_rope        out = sum over tokens of softmax(scores) latent

A page has 128 tokens: codes `[128, rank]` INT8, of latents less a static mean, divided by a static factor for each
block of channels, and rotated; the keys with RoPE `[128, rope]` FP16, or in codes, too; scales of tokens `[128]` FP32.
No latent is converted to 16 bits. Queries and weights are INT8 too: two digits each for few rows of a KV head, which
cost nothing where memory bounds, and one for many. Sums of products are exact within a tile of 64 tokens at least.

Three kernels, each launched while the one before it runs: `queries` rounds, `kernel` attends over ranges of pages, and
`combine` adds the parts. Work is decode's list of pages (`decode.work`): the grid depends on capacities only. In a
prompt, a CTA attends for 64 rows to all that they see, and `combine` has only a rotation to undo.

Host: `plan`, `latent_decode`. Device code of `kernel`, by warps: `load`, `softmax`, `output`.
"""

from __future__ import annotations

import torch

from ....pages import KVPages
from ....params import AttentionParams
from ...launch import Tiles, launch
from .combine import latent_combine_kernel
from .kernel import latent_kernel
from .plan import make_latent_plan
from .queries import latent_queries_kernel

__all__ = ["latent_decode", "takes"]

RANKS = (256, 512)
# Memory is allocated as if all sequences had as many query rows (tokens x heads) as the one with the most: so many rows
# of each, or of all, or times as many as there are.
ROWS, BATCH_ROWS, TIMES = 1024, 65536, 4


def takes(q: torch.Tensor, pages: KVPages, params: AttentionParams) -> bool:
    """Whether `latent_decode` has what a call needs: the rank, no window, and sequences with so many queries that most
    of the memory which is allocated for them is used.
    """
    tokens, heads = q.shape[:-2].numel(), q.shape[-2]
    padded, most = pages.num_seqs * params.max_seqlen_q, max(BATCH_ROWS, ROWS * pages.num_seqs)
    return pages.spec.v_dim in RANKS and not params.window and padded * heads <= max(most, TIMES * tokens * heads)


def latent_decode(
    q: torch.Tensor, pages: KVPages, params: AttentionParams, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fp8attn.latent.attention` of calls that `takes` lets through, in three launches without a read-back to the host.

    Up to 32 heads of a KV head and 1,023 rows of it (query tokens x heads), the relative error is up to 1e-3, plus the
    rounding of the output's dtype. With more, queries and weights have 8 bits.
    """
    device, (num_tokens, heads, _), num_seqs = q.device, q.shape, pages.num_seqs
    (rank, rope), pool, table, lengths = pages.spec.widths, pages.pool, pages.page_table, pages.cache_seqlens
    mean, factor, max_q, bounds = pages.format.v_mean, pages.format.factor, params.max_seqlen_q, params.cu_seqlens_q
    if out is None:
        out = torch.empty(num_tokens, heads, rank, dtype=q.dtype, device=device)
    lse = torch.empty(num_tokens, heads, dtype=torch.float32, device=device)
    if not num_tokens or not table.shape[1] or not len(pool):
        return out.zero_(), lse.fill_(float("-inf"))
    ragged = bounds is not None
    leftpad = params.leftpad_k
    plan = make_latent_plan(
        device, pool.shape, pages.spec, heads // pages.num_kv_heads, num_tokens, num_seqs, max_q, params.causal, ragged,
        leftpad is not None,
    )  # fmt: skip
    codes = torch.empty(plan.q.shape, dtype=torch.int8, device=device)
    q_rope = torch.empty(plan.q_rope.shape, dtype=plan.rope.dtype, device=device)
    numbers = torch.empty(plan.numbers, dtype=torch.float32, device=device)
    more = torch.empty(num_tokens * heads, 2, dtype=torch.int32, device=device)
    # A prompt's rows have one part each, whose memory is that of the output.
    dtype = torch.float16 if plan.options.digits == 1 else torch.float32
    parts = out.view(dtype) if plan.options.prompt else torch.empty(plan.parts, rank, dtype=dtype, device=device)
    bounds = bounds if ragged else lengths  # not read without bounds
    args = (
        q, *q.stride()[:2], bounds, mean, factor, codes, q_rope, numbers, plan.parts, num_seqs, max_q, plan.row_tiles,
        float(params.softmax_scale),
    )  # fmt: skip
    launch(latent_queries_kernel, plan.round_grid, args, plan.round)
    args = (
        Tiles(codes, plan.q), Tiles(q_rope, plan.q_rope) if rope else None, Tiles(pool, plan.codes),
        Tiles(pool, plan.rope) if rope else None, Tiles(pool, plan.scales), table, table.stride(0), lengths, bounds,
        lengths if leftpad is None else leftpad, parts, numbers, more, num_seqs, num_tokens, max_q, plan.row_tiles,
        plan.workers, plan.parts,
    )  # fmt: skip
    launch(latent_kernel, plan.grid, args, plan.attend)
    args = (parts, numbers, more, bounds, mean, factor, out, lse, plan.parts, num_seqs, num_tokens, plan.row_tiles)
    launch(latent_combine_kernel, plan.combine_grid, args, plan.combine)
    return out, lse
