"""HPC-Ops (Tencent): attention over pages in FP8, as vLLM's backend for it calls it.

Q has a scale a token and head, K and V one each; P is scaled by 256. Both kernels sum products of P and V in two levels: with V of mean 1
they are 0.2% off at 128k tokens. head_dim 128, causal, the softmax scale `1 / sqrt(head_dim)`.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from ..measure import MOST_DECODED
from ..problem import DEVICE, Run, Shape, offsets
from . import pages
from .rounded import by_heads, by_token

SCALES = 1  # `QuantType.QPERTOKEN_PERHEAD_KPERTENSOR_VPERTENSOR`
LEAST_TOKENS = 512  # of a part of a sequence, for one CTA: the library's default


def attention(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    """A decode step, or prompts."""
    if shape.dim != 128:
        raise ValueError("head_dim is 128")
    return (decode if max(shape.queries) <= MOST_DECODED else prefill)(shape, q, k, v)


def prefill(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    if not shape.causal:
        raise ValueError("its mask is causal")
    (q8, k8, v8), held, q_scale, scales = _given(shape, q, k, v)
    cache = pages.fill(shape, k8.bits, v8.bits, heads_first=True)
    longest, heads = max(shape.queries), q.shape[1]
    padded = torch.zeros(len(shape.keys), heads, -(-longest // 128) * 128, device=DEVICE)  # [num_seqs, heads, queries]
    for seq, count in enumerate(shape.queries):
        padded[seq, :, :count] = q_scale[shape.rows(seq)].T
    bounds, op = offsets(shape.queries), torch.ops.hpc.attention_with_kvcache_prefill_fp8
    args = (q8.bits, cache.k, cache.v, padded, *scales, bounds, cache.table, cache.used, longest, SCALES, None)
    return Run(lambda: op(*args), q8, held)


def decode(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    """A decode step. Which CTA reads what is planned before, once for all layers of a step, as in vLLM."""
    if set(shape.queries) != {1} or shape.q_heads // shape.kv_heads not in (4, 8):
        raise ValueError("one query a sequence, and 4 or 8 query heads a KV head")
    (q8, k8, v8), held, q_scale, scales = _given(shape, q, k, v)
    cache = pages.fill(shape, k8.bits, v8.bits, heads_first=True)
    plan = _plan(shape.keys, shape.kv_heads)
    flags = torch.zeros(len(shape.keys), shape.kv_heads, dtype=torch.int32, device=DEVICE)
    op = torch.ops.hpc.attention_decode_fp8
    args = (q8.bits, cache.k, cache.v, cache.table, cache.used, q_scale, *scales, 0, True, SCALES, True, plan, flags, None)
    return Run(lambda: op(*args), q8, held)


def _given(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    """Q, K and V in FP8; K and V of a sequence; Q's scales `[T, num_q_heads]`, and K's and V's `[1]`."""
    if shape.scales != 1:
        raise ValueError("its softmax scale is fixed")
    q8 = by_token(q)
    (k8, k_scale), (v8, v_scale) = by_heads(k, 1), by_heads(v, 1)
    return (q8, k8, v8), shape.split(k8, v8), q8.scale[..., 0].contiguous(), (k_scale, v_scale)


@lru_cache
def _plan(keys: tuple[int, ...], kv_heads: int) -> torch.Tensor:
    from hpc_attention import assign_attention_decode_task, get_attention_decode_task_workspace

    plan = get_attention_decode_task_workspace(len(keys), max(keys), kv_heads, LEAST_TOKENS)
    used = torch.tensor(keys, dtype=torch.int32, device=DEVICE)
    assign_attention_decode_task(used, plan, kv_heads, 1, True, LEAST_TOKENS)
    return plan
