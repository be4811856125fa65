"""FlashAttention-3: its own build and vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from fp8attn.formats.codec import FP8
from fp8attn.kernels import fa3 as builds

from ..measure import MOST_DECODED
from ..problem import DEVICE, Run, Shape, offsets
from . import pages
from .rounded import by_heads


def _forward(
    build: str, shape: Shape | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: Sequence[torch.Tensor] = (), **given
) -> Callable[[], torch.Tensor]:
    """A call of a FlashAttention-3 by the names in its schema.

    Args:
        shape: of prompts alone: one CTA reads all keys of a tile; None, or with decode steps: the build chooses how many.
        scales: of Q, K and V in FP8, `[num_kv_heads]` each; none: they are one.
    """
    found = builds.find({"fa3": "fa3_fwd_interface", "vllm": "vllm"}[build])
    args = list(found.neutral)
    if q.dtype == FP8:
        kv_heads, num_seqs = k.shape[-2], len(given["cu_seqlens_q"]) - 1 if "cu_seqlens_q" in given else len(q)
        scales = [x.expand(num_seqs, -1) for x in scales] or [_ones(num_seqs, kv_heads)] * 3
        given |= {f"{name}_descale": x for name, x in zip("qkv", scales, strict=True)}
    given |= {"q": q, "k": k, "v": v, "softmax_scale": shape.softmax_scale if shape else q.shape[-1] ** -0.5}
    given["num_splits"] = 0 if shape is None or min(shape.queries) <= MOST_DECODED else 1
    for name, x in given.items():
        args[found.positions[name]] = x
    return lambda: found.op(*args)[0]


def attention(
    shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: Sequence[torch.Tensor] = ()
) -> Callable[[], torch.Tensor]:
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
    call = _forward("fa3", shape, q, k, v, scales, is_causal=shape.causal, **lengths)
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
    shape: Shape,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor | None = None,
    used: torch.Tensor | None = None,
    scales: Sequence[torch.Tensor] = (),
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
    call = _forward("vllm", shape, q, k, v, scales, is_causal=shape.causal, **lengths)
    return lambda: call().reshape(-1, shape.q_heads, shape.dim)


def runs_of(attend: Callable) -> Callable[..., Run]:
    """Of `attention` or `vllm_attention`, what gives a run of the problem in the 16 bits given."""
    return lambda shape, q, k, v: Run(attend(shape, q, k, v), q, shape.split(k, v))


def runs_in_fp8(attend: Callable) -> Callable[..., Run]:
    """The same in FP8, with a scale for each KV head."""

    def run(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
        (q8, *scales), (k8, k_scale), (v8, v_scale) = (by_heads(x, shape.kv_heads) for x in (q, k, v))
        call = attend(shape, q8.bits, k8.bits, v8.bits, scales=(*scales, k_scale, v_scale))
        return Run(call, q8, shape.split(k8, v8))

    return run


def vllm_dense(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> Callable[[], torch.Tensor]:
    """vLLM's kernel over a cache of equal lengths without pages, if this is a decode step."""
    if max(shape.queries) <= MOST_DECODED and shape.uniform:
        k, v = (x.unflatten(0, (len(shape.keys), -1)) for x in (k, v))
    return vllm_attention(shape, q, k, v, **options)


def vllm_paged(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> Callable[[], torch.Tensor]:
    """vLLM's kernel over shuffled pages."""
    cache = pages.fill(shape, k, v, heads_first=False)
    return vllm_attention(shape, q, cache.k, cache.v, cache.table, cache.used, **options)


@lru_cache
def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device=DEVICE)
