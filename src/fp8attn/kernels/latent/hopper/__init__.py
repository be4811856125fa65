"""Attention of a few query tokens over 8-bit latents (MLA) on Hopper. A latent is key and value of all heads.

    scores = q_latent . latent + q_rope . key_rope        out = sum over tokens of softmax(scores) latent

A page has 128 tokens: codes `[128, rank]` INT8, of latents less a static mean, divided by a static factor for each
block of channels, and rotated; the keys with RoPE `[128, rope]` FP16; scales of tokens `[128]` FP32. No latent is
converted to 16 bits. Queries and weights are INT8 too: two digits each up to 32 heads, which cost nothing where memory
bounds, and one above. Sums of products are exact within a tile of 64 tokens at least.

Three kernels, each launched while the one before it runs: `queries` rounds, `kernel` attends over ranges of pages, and
`combine` adds the parts. Work is decode's list of pages, with one KV head (`decode.work`): the grid depends on
capacities only.

Host: `plan`, `attend`. Device code of `kernel`, by warps: `load`, `softmax`, `output`.
"""

from __future__ import annotations

import torch

from ...launch import Tiles, launch
from .combine import latent_combine_kernel
from .kernel import latent_kernel
from .plan import MMA_ROWS, make_latent_plan
from .queries import latent_queries_kernel

__all__ = ["attend"]


def attend(
    q: torch.Tensor,
    pool: torch.Tensor,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    rank: int,
    rope: int,
    softmax_scale: float,
    *,
    mean: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int = 1,
    causal: bool = True,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of queries over latent pages, in three launches without a read-back to the host.

    Args:
        q: `[T, heads, rank + rope]` bfloat16 or float16, not rotated, its last stride 1: the absorbed query, and its
            part with RoPE.
        pool: `[pages, 1, 128 * (rank + 2 * rope + 4)]` uint8.
        page_table: `[sequences, columns]` int32.
        cache_seqlens: `[sequences]` int32, tokens of each sequence, those of `q` included.
        rank: 256 or 512. rope: 0, 32, 64 or 128.
        mean, factor: `[rank]` and `[rank / 128]` float32. A latent is its codes times the token's scale, rotated back,
            times the factor of each block of 128 channels, plus the mean. None: 0, and 1.
        cu_seqlens_q: `[sequences + 1]` int32, bounds of the sequences' queries. None: each has `max_seqlen_q`.
        causal: the last query of a sequence sees all its tokens, and the one before it all but the last.
        out: `[T, heads, rank]`, contiguous.

    Returns:
        out, in q's dtype; LSE `[T, heads]` float32, natural. A row that sees no token is 0, and its LSE -inf.
    """
    device, (num_tokens, heads, _), num_seqs = q.device, q.shape, page_table.shape[0]
    if out is None:
        out = torch.empty(num_tokens, heads, rank, dtype=q.dtype, device=device)
    lse = torch.empty(num_tokens, heads, dtype=torch.float32, device=device)
    if not num_tokens or not page_table.shape[1] or not len(pool):
        return out.zero_(), lse.fill_(float("-inf"))
    ragged = cu_seqlens_q is not None
    plan = make_latent_plan(device, pool.shape, rank, rope, heads, num_tokens, num_seqs, max_seqlen_q, causal, ragged)
    codes = torch.empty(plan.blocks * MMA_ROWS, rank, dtype=torch.int8, device=device)
    q_rope = torch.empty(plan.blocks * MMA_ROWS, rope, dtype=torch.float16, device=device)
    numbers = torch.empty(plan.numbers, dtype=torch.float32, device=device)
    more = torch.empty(num_tokens * heads, 2, dtype=torch.int32, device=device)
    bounds = cu_seqlens_q if ragged else cache_seqlens  # not read without bounds
    args = (
        q, *q.stride()[:2], bounds, mean, factor, codes, q_rope, numbers, plan.parts, num_seqs, max_seqlen_q,
        plan.row_tiles, float(softmax_scale),
    )  # fmt: skip
    launch(latent_queries_kernel, plan.round_grid, args, plan.round)
    args = (
        Tiles(codes, plan.q), Tiles(q_rope, plan.q_rope) if rope else None, Tiles(pool, plan.codes),
        Tiles(pool, plan.rope) if rope else None, Tiles(pool, plan.scales), page_table, page_table.stride(0),
        cache_seqlens, bounds, numbers, more, num_seqs, num_tokens, max_seqlen_q, plan.row_tiles, plan.workers,
        plan.parts,
    )  # fmt: skip
    launch(latent_kernel, plan.grid, args, plan.attend)
    args = (numbers, more, bounds, mean, factor, out, lse, plan.parts, num_seqs, num_tokens, plan.row_tiles)
    launch(latent_combine_kernel, plan.combine_grid, args, plan.combine)
    return out, lse
