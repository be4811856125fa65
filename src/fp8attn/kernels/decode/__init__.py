"""Attention of a few query tokens over the cache, on Hopper. Memory bandwidth limits its speed, and its results are
exact.

The arithmetic is 16-bit with FP32 accumulation, on the tensor cores. The operands are swapped: a tile's tokens (then
V's channels) are the MMA's 16 rows, and the query rows (query tokens x GQA group) are its 8 columns. So eight query
rows need no padding, and the accumulator of a warp is `[head_dim, 8]`.

    S^T [tokens, rows] = K [tokens, d] Q^T [d, rows]        O^T [d, rows] += V [d, tokens] P^T [tokens, rows]

Each of four warps has a quarter of a tile's tokens, and its own running maximum, sum and output, so the loop has no
exchange between warps. E4M3 is converted to FP16 in registers. INT8 keys are not converted: queries are rounded to
16-bit integers, with a scale for each row, and the two bytes of these are multiplied apart and summed exactly in INT32.
V is transposed and in `V_ORDER`: four bytes of a channel are the four tokens of one thread's A fragment. P^T's
fragments are the accumulators of the scores, transposed 8x8 by `movmatrix`.

Work is one flat list of (sequence, head, tile), which is cut into ranges. Every CTA computes its range from
`cache_seqlens`. If several ranges share a head, the CTA that ends last combines their results, in order.

Host: `plan` (the numbers of a launch), `decode_attention`. Device, from the outside in: `kernel`, `load` (the
producer), `consume`, `queries`, `combine`. All of them use `work` (the tiles of each worker) and `plan.DecodeOptions`.
"""

from __future__ import annotations

import torch

from ...pages import KVPages
from ...params import AttentionParams
from ..common import LOG2E
from ..launch import Tiles, launch
from . import plan
from .kernel import decode_kernel
from .plan import DecodeNumbers, DecodeProblem, make_decode_plan

__all__ = ["MAX_ROWS", "decode_attention", "plan"]

MAX_ROWS = 128  # query tokens x GQA group that this kernel is meant for


def decode_attention(
    q: torch.Tensor,
    pages: KVPages,
    params: AttentionParams,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.attention` for up to 128 rows (query tokens x GQA group) per sequence, in one launch without a
    read-back to the host.
    """
    cu_seqlens_q, max_q, window, softcap = params.cu_seqlens_q, params.max_seqlen_q, params.window, params.softcap
    sinks, leftpad_k = params.sinks, params.leftpad_k
    device = q.device
    num_tokens, num_q_heads, head_dim = q.shape
    table, lengths, kv_format = pages.page_table, pages.cache_seqlens, pages.format
    pool, (num_seqs, columns) = pages.pool, table.shape
    num_pages, heads, _ = pool_shape = pool.shape
    if out is None:
        out = torch.empty(num_tokens, num_q_heads, head_dim, dtype=q.dtype, device=device)
    lse = torch.empty(num_tokens, num_q_heads, dtype=torch.float32, device=device)
    if not num_tokens or not num_pages or not columns:
        return out.zero_(), lse.copy_(sinks if sinks is not None else torch.tensor(float("-inf")))
    problem = DecodeProblem(
        pool=pool_shape, spec=kv_format.name, group=num_q_heads // heads, num_seqs=num_seqs, max_q=max_q,
        causal=params.causal and max_q > 1, ragged=cu_seqlens_q is not None, window=window > 0,
        softcap=softcap > 0, sinks=sinks is not None, leftpad=leftpad_k is not None, rotate=kv_format.rotate,
    )  # fmt: skip
    plan = make_decode_plan(device, problem)
    numbers = DecodeNumbers(num_seqs, heads, max_q, num_tokens, window, plan.workers)
    stride_t, stride_h, _ = q.stride()
    args = (
        q, stride_t, stride_h,
        Tiles(pool, plan.k), Tiles(pool, plan.v), pool, kv_format.stored_k_mean, kv_format.v_mean, table,
        table.stride(0), lengths,
        # The lengths are passed instead of optional tensors that are None; the kernel does not read them.
        lengths if cu_seqlens_q is None else cu_seqlens_q, lengths if leftpad_k is None else leftpad_k,
        lengths if sinks is None else sinks,
        out, lse, torch.empty(plan.scratch, dtype=torch.float32, device=device), plan.plane, plan.counters, *numbers,
        float(params.softmax_scale), softcap * LOG2E.value,
    )  # fmt: skip
    launch(decode_kernel, plan.grid, args, plan.constants)
    return out, lse
