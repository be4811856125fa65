"""Attention of a few query tokens over 8-bit latents (MLA) on Hopper. A latent is key and value of all heads.

    scores = q_latent . latent + q_rope . key_rope        out = sum over tokens of softmax(scores) latent

A page has 128 tokens: codes `[128, rank]` INT8, of latents less a static mean, divided by a static factor for each
block of channels, and rotated; the keys with RoPE `[128, rope]` FP16, or in codes, too; scales of tokens `[128]` FP32.
No latent is converted to 16 bits. Queries and weights are INT8 too: two digits each up to 32 heads of a KV head, which
cost nothing where memory bounds, and one above. Sums of products are exact within a tile of 64 tokens at least.

Three kernels, each launched while the one before it runs: `queries` rounds, `kernel` attends over ranges of pages, and
`combine` adds the parts. Work is decode's list of pages (`decode.work`): the grid depends on capacities only.

Host: `plan`, `latent_decode`. Device code of `kernel`, by warps: `load`, `softmax`, `output`.
"""

from __future__ import annotations

import torch

from ....pages import KVPages
from ....params import AttentionParams
from ...launch import Tiles, launch
from .combine import latent_combine_kernel
from .kernel import latent_kernel
from .plan import MMA_ROWS, make_latent_plan
from .queries import latent_queries_kernel

__all__ = ["latent_decode", "takes"]

RANKS = (256, 512)
# Query tokens x heads of a sequence that this kernel serves: in any batch; as was measured (2.6 to 10 times as fast as
# the portable kernel); and of all sequences, for which memory is allocated as if each had the most.
ROWS, MAX_ROWS, MAX_BATCH_ROWS = 1024, 8192, 65536


def takes(pages: KVPages, params: AttentionParams, num_q_heads: int) -> bool:
    """Whether `latent_decode` has what a call needs: the rank, few query rows, no window. Several KV heads have as many
    query tokens in each sequence, and no mean and no factor.
    """
    format = pages.format
    most = max(ROWS, min(MAX_ROWS, MAX_BATCH_ROWS // max(pages.num_seqs, 1)))
    return (
        pages.spec.v_dim in RANKS and params.max_seqlen_q * num_q_heads <= most and not params.window
        and (pages.num_kv_heads == 1 or params.cu_seqlens_q is format.v_mean is format.factor is None)
    )  # fmt: skip


def latent_decode(
    q: torch.Tensor, pages: KVPages, params: AttentionParams, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fp8attn.latent.attention` of calls that `takes` lets through, in three launches without a read-back to the host.

    With up to 32 heads of a KV head the relative error is up to 1e-3, plus the rounding of the output's dtype; with
    more, queries and weights have 8 bits.
    """
    heads, max_q = pages.num_kv_heads, params.max_seqlen_q
    if heads == 1:
        return _attend(q, pages, params, out)
    # Each KV head of a sequence is a sequence. With one query token nothing is copied.
    q = q.unflatten(1, (heads, -1)).unflatten(0, (-1, max_q)).transpose(1, 2).flatten(0, 2)
    found, lse = (
        x.unflatten(0, (-1, heads, max_q)).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        for x in _attend(q, pages, params)
    )
    return found if out is None else out.copy_(found), lse


def _attend(
    q: torch.Tensor, pages: KVPages, params: AttentionParams, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`latent_decode` of `q [sequences * KV heads * tokens, heads of a KV head, rank + rope]`."""
    device, (num_tokens, heads, _), num_seqs = q.device, q.shape, pages.num_seqs
    (rank, rope), pool, table, lengths = pages.spec.widths, pages.pool, pages.page_table, pages.cache_seqlens
    mean, factor, max_q, bounds = pages.format.v_mean, pages.format.factor, params.max_seqlen_q, params.cu_seqlens_q
    num_places = num_seqs * pages.num_kv_heads
    if out is None:
        out = torch.empty(num_tokens, heads, rank, dtype=q.dtype, device=device)
    lse = torch.empty(num_tokens, heads, dtype=torch.float32, device=device)
    if not num_tokens or not table.shape[1] or not len(pool):
        return out.zero_(), lse.fill_(float("-inf"))
    ragged = bounds is not None
    leftpad = params.leftpad_k
    plan = make_latent_plan(
        device, pool.shape, pages.spec, heads, num_tokens, num_places, max_q, params.causal, ragged, leftpad is not None
    )
    codes = torch.empty(plan.blocks * MMA_ROWS, rank, dtype=torch.int8, device=device)
    rope_dtype = torch.int8 if pages.spec.rope_in_codes else torch.float16
    q_rope = torch.empty(plan.blocks * MMA_ROWS, rope, dtype=rope_dtype, device=device)
    numbers = torch.empty(plan.numbers, dtype=torch.float32, device=device)
    more = torch.empty(num_tokens * heads, 2, dtype=torch.int32, device=device)
    bounds = bounds if ragged else lengths  # not read without bounds
    args = (
        q, *q.stride()[:2], bounds, mean, factor, codes, q_rope, numbers, plan.parts, num_places, max_q, plan.row_tiles,
        float(params.softmax_scale),
    )  # fmt: skip
    launch(latent_queries_kernel, plan.round_grid, args, plan.round)
    args = (
        Tiles(codes, plan.q), Tiles(q_rope, plan.q_rope) if rope else None, Tiles(pool, plan.codes),
        Tiles(pool, plan.rope) if rope else None, Tiles(pool, plan.scales), table, table.stride(0), lengths, bounds,
        lengths if leftpad is None else leftpad, numbers, more, num_seqs, num_tokens, max_q, plan.row_tiles,
        plan.workers, plan.parts,
    )  # fmt: skip
    launch(latent_kernel, plan.grid, args, plan.attend)
    args = (numbers, more, bounds, mean, factor, out, lse, plan.parts, num_places, num_tokens, plan.row_tiles)
    launch(latent_combine_kernel, plan.combine_grid, args, plan.combine)
    return out, lse
