"""FlashMLA, attention over latents: DeepSeek's kernel in BF16, and vLLM's dense one in E4M3 (`--kv-cache-dtype fp8` on
Hopper), whose sums are in the tensor core over all tokens of a block. Only `benchmarks.latent` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fp8attn.formats.codec import FP8

from ..problem import DEVICE, Run, Shape
from .peer import Call, Peer, Wheel, load_ops

WHEEL = Wheel(
    "vllm==0.26.0",
    {"flashmla": "vllm/_flashmla_C.abi3.so", "flashmla_fp8": "vllm/_flashmla_extension_C.abi3.so"},
)
PAGE = 64  # tokens of its pages
RANK = 512


def inputs(shape: Shape, latents: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The cache `[pages, 64, 1, 576]`, lengths and page table."""
    if not shape.uniform or shape.dim != 576:
        raise ValueError("measured in batches of one length, with latents of 512 channels and 64 of RoPE")
    batch, length = len(shape.keys), shape.keys[0]
    columns = -(-length // PAGE)
    cache = torch.zeros(batch, columns * PAGE, shape.dim, dtype=dtype, device=DEVICE)
    for seq in range(batch):
        cache[seq, :length] = latents[seq * length : (seq + 1) * length, 0].to(dtype)
    table = torch.arange(batch * columns, dtype=torch.int32, device=DEVICE).view(batch, columns)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
    return cache.view(-1, PAGE, 1, shape.dim), lengths, table


def run_over(cache: torch.Tensor, shape: Shape, q: torch.Tensor, call: Callable[[], torch.Tensor]) -> Run:
    """The run of a call that gives `[T, heads, 512]`, over the cache of `inputs`."""

    def held(seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = cache.view(len(shape.keys), -1, 1, shape.dim)[seq, : shape.keys[seq]]
        return rows, rows[..., :RANK]

    return Run(call, q, held)


def attend_bf16(
    q: torch.Tensor, cache: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, scale: float,
    plan: Sequence[torch.Tensor | None] = (None, None),
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:  # fmt: skip
    """DeepSeek's kernel.

    Args:
        q: `[batch, queries, heads, 576]`, BF16; the last query sees the last token.
        cache: `[pages, 64, 1, 576]`, BF16.
        lengths: `[batch]` int32.
        table: `[batch, columns]` int32, the pages of each sequence.
        plan: what a call with these shapes and lengths returned.
    Returns:
        `[batch, queries, heads, 512]` BF16, and the plan.
    """
    out, _, *plan = torch.ops._flashmla_C.dense_decode_fwd(q, cache, RANK, lengths, table, scale, True, *plan, None)
    return out, plan


def attend_fp8(
    q: torch.Tensor, cache: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, scale: float,
    plan: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:  # fmt: skip
    """vLLM's kernel, with scales of 1: arguments as `attend_bf16`, `q` and `cache` in E4M3."""
    ops = torch.ops._flashmla_extension_C
    if plan is None:
        parts = ops.get_mla_decoding_metadata_dense_fp8(lengths, q.shape[1] * q.shape[2], 1)
        plan = *parts, *torch.ones(2, 1, device=q.device)
    return ops.fwd_kvcache_mla_fp8(q, cache, RANK, lengths, table, scale, True, *plan)[0], plan


def bf16(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    """Its call over BF16 latents `k [tokens, 1, 576]`, whose first channels are `v`. Its plan is not timed."""
    return _run_of(attend_bf16, shape, q, k, torch.bfloat16)


def fp8(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    """vLLM's call over the same latents in E4M3. Its plan and Q's rounding are not timed."""
    return _run_of(attend_fp8, shape, q, k, FP8)


def _run_of(attend: Callable, shape: Shape, q: torch.Tensor, latents: torch.Tensor, dtype: torch.dtype) -> Run:
    cache, lengths, table = inputs(shape, latents, dtype)
    q = q.to(dtype)
    args = q.unflatten(0, (len(shape.keys), -1)).contiguous(), cache, lengths, table, shape.softmax_scale
    _, plan = attend(*args)
    return run_over(cache, shape, q, lambda: attend(*args, plan)[0].flatten(0, 1))


def _load() -> None:
    for name in WHEEL.libraries:
        load_ops(name)


PEER = Peer(
    calls={
        "flashmla-bf16": Call(bf16, "FlashMLA BF16", "#7d8597"),
        "vllm-flashmla-fp8": Call(fp8, "vLLM's FlashMLA", "#e07a5f", levels=1),
    },
    needs=(WHEEL,),
    load=_load,
    release=lambda: str(WHEEL),
)
