"""vLLM's FlashAttention-3: one scale a KV head, sums in two levels. `-paged` reads pages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..measure import MOST_DECODED
from ..problem import DEVICE, Shape, offsets
from . import pages
from .flash import forward, runs_in_fp8, runs_of
from .peer import Call, Peer, Wheel, load_ops

WHEEL = Wheel("vllm==0.22.0", {"vllm_fa3": "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"})


def dense(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> Callable[[], torch.Tensor]:
    """Its forward over rows, or in a decode step of equal lengths over a cache
    `[batch, tokens, num_kv_heads, head_dim]`.

    Args:
        q: `[T, num_q_heads, head_dim]`; k, v: `[tokens, num_kv_heads, head_dim]`; float8_e4m3fn or 16 bits.
    """
    options |= {"cu_seqlens_q": offsets(shape.queries), "max_seqlen_q": max(shape.queries)}
    if max(shape.queries) <= MOST_DECODED and shape.uniform:
        k, v = (x.unflatten(0, (len(shape.keys), -1)) for x in (k, v))
        options["seqused_k"] = torch.tensor(shape.keys, dtype=torch.int32, device=DEVICE)
    else:
        options |= {"cu_seqlens_k": offsets(shape.keys), "max_seqlen_k": max(shape.keys)}
    return forward("vllm", shape, q, k, v, **options)


def paged(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> Callable[[], torch.Tensor]:
    """Its forward over shuffled pages."""
    cache = pages.fill(shape, k, v, heads_first=False)
    options |= {"cu_seqlens_q": offsets(shape.queries), "max_seqlen_q": max(shape.queries), "seqused_k": cache.used}
    options |= {"page_table": cache.table, "max_seqlen_k": cache.table.shape[1] * pages.SIZE}
    return forward("vllm", shape, q, cache.k, cache.v, **options)


PEER = Peer(
    calls={
        "vllm-fa3-fp8": Call(runs_in_fp8(dense), "vLLM's FA3", "#e07a5f", prefill=True, decode=True, levels=2),
        "vllm-fa3-fp8-paged": Call(runs_in_fp8(paged), "vLLM's FA3, paged", "#b5543d", decode=True, levels=2),
        "vllm-fa3-bf16": Call(runs_of(dense), "vLLM's FA3 BF16", "#7d8597", decode=True),
        "vllm-fa3-bf16-paged": Call(runs_of(paged), "vLLM's FA3 BF16, paged", "#b8bfca"),
    },
    needs=(WHEEL,),
    load=partial(load_ops, "vllm_fa3"),
    release=lambda: str(WHEEL),
)
