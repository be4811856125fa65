"""FP8 attention for Hopper, for many queries: FP32 accumulation after every tile (docs/prefill.md).

    s = (q_fp8 . k_fp8) * (q_scale * k_scale * softmax_scale)        one factor for each row and tile
    acc = acc * (alpha * v_scale_before / v_scale) + p_fp8 v_fp8     p v starts from zero for each tile, so the tensor
    core's short out = acc * v_scale / L + v_mean * l / L                         accumulator sums at most 128 products

Host: `cut` (how a problem is divided), `plan` (a launch's numbers), `prefill_attention`. Device, from the outside in:
`kernel`, `producer` (with `schedule`), `multiply`, `queries`, `tiles` (with `softmax`), `epilogue`.
All of them use `registers` (sizes and layouts), `plan.PrefillOptions`, and the aggregates `items.Items`, `items.Means`,
`ring.PrefillRing`, `queries.PrefillQueries`, `queries.Rows` and `epilogue.PrefillOutput`.
"""

from __future__ import annotations

import torch

from ...formats.codec import FP8
from ...pages import KVPages
from ...params import AttentionParams
from ..combine import combine
from ..common import LOG2E, power_of_two
from ..launch import Tiles, launch
from . import cut, plan
from .kernel import prefill_kernel
from .plan import PrefillProblem, make_prefill_plan

__all__ = ["cut", "packed_attention", "packs", "plan", "prefill_attention"]


def prefill_attention(
    q: torch.Tensor,
    pages: KVPages,
    params: AttentionParams,
    out: torch.Tensor | None = None,
    new_keys: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention over the pages in FP8 with FP32 accumulation. docs/prefill.md describes the rounding.

    Nothing is read back from the device, so lengths, tables and scales may change between replays of a CUDA graph.
    Equal inputs give equal bits.

    Args:
        q: `[T, num_q_heads, head_dim]` or `[num_seqs, S, num_q_heads, head_dim]`. bfloat16 or float16 queries are
            rotated if K is, scaled by row and rounded to K's dtype. float8_e4m3fn queries are used without a change.
        new_keys: as `Backend.attention` takes it.
    Returns:
        `out` of q's shape, in q's dtype (bfloat16 for FP8 queries), and `lse` float32, in the memory order of
        `ops.attention`. Without `return_lse`, `lse` may be None.
    Raises:
        ValueError: FP8 queries over keys that are INT8 or rotated.
    """
    # The kernel finds a row's largest score before it multiplies by the scale, which must be positive.
    if params.softmax_scale <= 0.0:
        positive = params._replace(softmax_scale=abs(params.softmax_scale) or 1.0)
        return prefill_attention(_times_sign(q, params.softmax_scale), pages, positive, out)
    cu_seqlens_q, return_lse, softcap = params.cu_seqlens_q, params.return_lse, params.softcap
    sinks, leftpad_k = params.sinks, params.leftpad_k
    if q.dtype == FP8 and (pages.format.rotate or pages.format.k.dtype != FP8):
        raise ValueError(
            "FP8 queries are multiplied as they are, so keys must be E4M3 and not rotated: pass 16-bit queries to "
            "these pages"
        )
    device, kv_format = q.device, pages.format
    *rows, head_dim = shape = q.shape
    pool, table = pages.pool, pages.page_table
    pool_shape, (num_seqs, columns) = pool.shape, table.shape
    dtype = torch.bfloat16 if q.dtype == FP8 else q.dtype
    # ptxas: d256-e4m3-no-lse, d256-ragged-no-lse. Without an LSE it spills in their loops, so these launches write one
    # that is not read.
    return_lse |= power_of_two(head_dim) == 256 and (pages.format.k.dtype == FP8 or cu_seqlens_q is not None)
    if out is None:
        out = torch.empty_like(q, dtype=dtype) if len(rows) == 3 else torch.empty(*shape, dtype=dtype, device=device)
        # The layout of queries cannot be copied where strides overlap, or are arbitrary because a dimension has one
        # element.
        if out.stride(-1) != 1:
            out = torch.empty(shape, dtype=dtype, device=device)
    lse = torch.empty(*rows, dtype=torch.float32, device=device) if return_lse else None
    if not q.numel():
        return out, lse
    if not pool_shape[0] or not columns:  # no keys anywhere
        if return_lse:
            lse.copy_(torch.full_like(lse, -torch.inf) if sinks is None else sinks.float().expand_as(lse))
        return out.zero_(), lse
    problem = PrefillProblem(
        shape=shape, strides=q.stride(), out_strides=out.stride(), pool=pool_shape, spec=kv_format.name,
        num_seqs=num_seqs, columns=columns, table_stride=table.stride(0), ragged=cu_seqlens_q is not None,
        max_seqlen_q=params.max_seqlen_q, causal=params.causal, window=params.window, softcap=softcap > 0,
        leftpad=leftpad_k is not None, rotate=kv_format.rotate, exact=params.exact,
        batch_invariant=params.batch_invariant, q8=q.dtype == FP8, lse=return_lse,
    )  # fmt: skip
    plan = make_prefill_plan(device, problem)
    if plan.last:
        return _two_launches(q, pages, params, out, plan.last), None
    if q.data_ptr() & 15 or not plan.fetched:
        q = q.clone(memory_format=torch.contiguous_format)
        plan = make_prefill_plan(device, problem._replace(strides=q.stride()))
        new_keys = 0
    splits = plan.numbers.parts
    if not plan.early:
        new_keys = 0
    sinks = None if sinks is None else sinks.float()
    target, target_lse = out, lse
    if splits > 1:
        if not return_lse:  # `combine` writes it
            lse = torch.empty(*rows, dtype=torch.float32, device=device)
        target = torch.empty(splits, lse.numel(), head_dim, dtype=torch.float32, device=device)
        target_lse = torch.empty(2, splits, lse.numel(), dtype=torch.float32, device=device)
    args = (
        Tiles(q, plan.queries), Tiles(pool, plan.k), Tiles(pool, plan.v),
        *((None, target) if plan.outputs is None else (Tiles(out, plan.outputs), None)),
        target_lse, pool, kv_format.stored_k_mean, kv_format.v_mean,
        *((None, None) if new_keys else (table, pages.cache_seqlens)),
        cu_seqlens_q, None if splits > 1 else sinks, None if leftpad_k is None else leftpad_k.int(), plan.counter,
        *plan.numbers, params.softmax_scale * LOG2E.value, softcap * LOG2E.value, new_keys,
    )  # fmt: skip
    launch(prefill_kernel, plan.grid, args, plan.constants)
    if splits > 1:
        combine(target, target_lse, sinks, out, lse)
    return out, lse


def _times_sign(q: torch.Tensor, scale: float) -> torch.Tensor:
    """`q` if the scale is positive, `-q` if it is negative, zeros if it is zero."""
    if q.dtype == FP8:
        return (q.view(torch.uint8) ^ 0x80).view(FP8) if scale else torch.zeros_like(q)
    return -q if scale else q * 0.0  # a NaN stays


def _two_launches(
    q: torch.Tensor, pages: KVPages, params: AttentionParams, out: torch.Tensor, last: int
) -> torch.Tensor:
    """`prefill_attention` of all but the first `last` queries of each sequence, and then of these."""

    def some(x: torch.Tensor, part: slice) -> torch.Tensor:
        return (x if x.dim() == 4 else x.unflatten(0, (len(pages.page_table), -1)))[:, part]

    for part, count in ((slice(last, None), params.max_seqlen_q - last), (slice(last), last)):
        prefill_attention(some(q, part), pages, params._replace(max_seqlen_q=count), some(out, part))
    return out


def packs(params: AttentionParams) -> bool:
    """Whether `packed_attention` takes these options."""
    # A sink belongs to a query head. A window's first tile is computed from positions, which packed rows have not.
    return params.max_seqlen_q == 1 and params.cu_seqlens_q is None and not params.window and params.sinks is None


def packed_attention(
    q: torch.Tensor, pages: KVPages, params: AttentionParams, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`prefill_attention` of one query of every sequence, `[num_seqs, num_q_heads, head_dim]`, with the same bits.

    The query heads of a KV head are rows of one item, which all see all keys. So their K and V are read once.
    """
    group = q.shape[1] // pages.num_kv_heads

    def packed(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (-1, group)).transpose(1, 2)

    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    params = params._replace(max_seqlen_q=group, causal=False)
    _, lse = prefill_attention(packed(q), pages, params, packed(out))
    return out, None if lse is None else lse.transpose(1, 2).flatten(1)
