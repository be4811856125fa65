"""Calls of a FlashAttention-3, whose builds share one interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fp8attn.backends import fa3 as builds
from fp8attn.formats.codec import FP8

from ..measure import MOST_DECODED
from ..problem import Run, Shape
from .rounded import by_heads


def forward(
    build: str,
    shape: Shape,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scales: Sequence[torch.Tensor] = (),
    **options,
) -> Callable[[], torch.Tensor]:
    """A call of a build by the names in its schema; it returns `[T, num_q_heads, head_dim]`.

    Args:
        build: one of `fp8attn.backends.fa3.BUILDS`.
        shape: of prompts alone: one CTA reads all keys of a tile. With decode steps the build chooses how many do.
        scales: of Q, K and V in FP8, `[num_kv_heads]` each.
    """
    run = builds.find(build).run
    if q.dtype == FP8:
        options |= {f"{name}_descale": x.expand(len(shape.keys), -1) for name, x in zip("qkv", scales, strict=True)}
    options |= {"q": q, "k": k, "v": v, "softmax_scale": shape.softmax_scale, "is_causal": shape.causal}
    options["num_splits"] = 0 if min(shape.queries) <= MOST_DECODED else 1
    return lambda: run(**options)[0].reshape(-1, shape.q_heads, shape.dim)


def runs_of(attend: Callable) -> Callable[..., Run]:
    """A peer's `run` in 16 bits, by a function `attend(shape, q, k, v)` that returns a call."""
    return lambda shape, q, k, v: Run(attend(shape, q, k, v), q, shape.split(k, v))


def runs_in_fp8(attend: Callable) -> Callable[..., Run]:
    """The same in FP8, with a scale for each KV head."""

    def run(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
        (q8, *scales), (k8, k_scale), (v8, v_scale) = (by_heads(x, shape.kv_heads) for x in (q, k, v))
        call = attend(shape, q8.bits, k8.bits, v8.bits, scales=(*scales, k_scale, v_scale))
        return Run(call, q8, shape.split(k8, v8))

    return run
