"""Whole models with nothing but their attention swapped: what `scaled_dot_product_attention` is while a context lasts.

| name | is |
|---|---|
| `fa3-bf16` | FlashAttention-3 |
| `cudnn-bf16` | torch's, by cuDNN |
| `fp8attn` | `fp8attn.fp8_attention`, quantisation included; what its policy leaves out is FlashAttention-3, where that is here |
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from fp8attn import AttentionPolicy, fp8_attention

from . import peers
from .problem import Shape

SDPA = torch.nn.functional.scaled_dot_product_attention


class ThroughFA3(TorchFunctionMode):
    """`scaled_dot_product_attention` by FlashAttention-3 in 16 bits."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return (fa3_sdpa if func is SDPA else func)(*args, **(kwargs or {}))


def fa3_sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False) -> torch.Tensor:
    """`[B, H, S, D]`, as torch's; of what the benchmarks' models ask for."""
    batch, q_heads, q_len, dim = query.shape
    kv_heads, kv_len = key.shape[1:3]
    shape = Shape((kv_len,) * batch, (q_len,) * batch, q_heads, kv_heads, dim, is_causal)
    assert attn_mask is None and not dropout_p and scale in (None, shape.softmax_scale) and not (is_causal and q_len != kv_len)
    out = peers.fa3(shape, *(x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)))()
    return out.unflatten(0, (batch, q_len)).transpose(1, 2)


def bf16_systems() -> dict[str, Callable[[], AbstractContextManager]]:
    """The peers that are here, by name."""
    systems: dict[str, Callable] = {"cudnn-bf16": lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)}
    return systems | ({"fa3-bf16": ThroughFA3} if "fa3" in peers.available() else {})


def inside(systems: dict[str, Callable], policy: AttentionPolicy) -> Callable[[], AbstractContextManager]:
    """`fp8_attention` with the last of the systems around it."""

    @contextmanager
    def context():
        with list(systems.values())[-1](), fp8_attention(policy):
            yield

    return context


def within(context: Callable[[], AbstractContextManager], call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """`call` in a fresh `context()` each time."""

    def inside_it() -> torch.Tensor:
        with context():
            return call()

    return inside_it


def beside_best(rows: list[dict]) -> list[dict]:
    """Ours gets the best BF16 system of its case, and that one's time over its own."""
    others = [row for row in rows if not row["impl"].startswith("fp8attn")]
    for row in rows:
        if row not in others and others:
            best = min(others, key=lambda other: other["ms"])
            row |= {"beside": best["impl"], "speedup": round(best["ms"] / row["ms"], 4)}
    return rows
