"""FlashAttention-3: its own build and vLLM's."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from fp8attn.kernels import fa3 as builds
from fp8attn.layout import FP8

from ..problem import DEVICE, Shape, offsets


def _forward(build: str, shape: Shape | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given) -> Callable[[], torch.Tensor]:
    """A call of a FlashAttention-3 by the names in its schema; scales are one in FP8.

    `shape`: of a prompt, whose keys one CTA reads; None: the build chooses how many CTAs read the keys.
    """
    found = builds.find({"fa3": "fa3_fwd_interface", "vllm": "vllm"}[build])
    args = list(found.neutral)
    if q.dtype == FP8:
        kv_heads, num_seqs = k.shape[-2], len(given["cu_seqlens_q"]) - 1 if "cu_seqlens_q" in given else len(q)
        given |= {f"{name}_descale": _ones(num_seqs, kv_heads) for name in "qkv"}
    given |= {"q": q, "k": k, "v": v, "softmax_scale": shape.softmax_scale if shape else q.shape[-1] ** -0.5}
    given["num_splits"] = 0 if shape is None or max(shape.queries) <= 16 else 1
    for name, x in given.items():
        args[found.positions[name]] = x
    return lambda: found.op(*args)[0]


def attention(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
    """FlashAttention-3's forward.

    Args:
        q: `[T, num_q_heads, head_dim]`; k, v: `[tokens, num_kv_heads, head_dim]`; float8_e4m3fn or 16 bits.
    """
    lengths = {}
    if shape.uniform:
        q, k, v = (x.unflatten(0, (len(shape.keys), -1)) for x in (q, k, v))
    else:
        lengths = {"cu_seqlens_q": offsets(shape.queries), "cu_seqlens_k": offsets(shape.keys)}
        lengths |= {"max_seqlen_q": max(shape.queries), "max_seqlen_k": max(shape.keys)}
    call = _forward("fa3", shape, q, k, v, is_causal=shape.causal, **lengths)
    return lambda: call().reshape(-1, shape.q_heads, shape.dim)


def cached(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """FlashAttention-3's KV-cache path in 16 bits, causal; `[batch, n, num_q_heads, head_dim]`.

    Args:
        q: `[batch, n, num_q_heads, head_dim]`, the last `n` tokens of each sequence.
        k, v: `[batch, capacity, num_kv_heads, head_dim]`, the last dimension contiguous.
        used: `[batch]` int32, how many of these tokens count.
    """
    return _forward("fa3", None, q, k, v, is_causal=True, seqused_k=used)()


def vllm_attention(
    shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor | None = None, used: torch.Tensor | None = None
) -> Callable[[], torch.Tensor]:
    """vLLM's FlashAttention-3.

    Args:
        q: `[T, num_q_heads, head_dim]`.
        k, v: `[tokens, num_kv_heads, head_dim]`, or a cache of equal capacity for every sequence `[batch, capacity, num_kv_heads,
            head_dim]`, or pages `[pages, page_size, num_kv_heads, head_dim]` with their `table`.
        table: `[batch, columns]` int32.
        used: `[batch]` int32, tokens of each sequence in a cache or in pages; None: those of the shape.
    """
    lengths = {"cu_seqlens_q": offsets(shape.queries), "max_seqlen_q": max(shape.queries)}
    if k.dim() == 3:
        lengths |= {"cu_seqlens_k": offsets(shape.keys), "max_seqlen_k": max(shape.keys)}
    else:
        lengths["seqused_k"] = torch.tensor(shape.keys, dtype=torch.int32, device=DEVICE) if used is None else used
    if table is not None:
        lengths |= {"page_table": table, "max_seqlen_k": table.shape[1] * k.shape[1]}
    call = _forward("vllm", shape, q, k, v, is_causal=shape.causal, **lengths)
    return lambda: call().reshape(-1, shape.q_heads, shape.dim)


@lru_cache
def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device=DEVICE)
