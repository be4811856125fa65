"""Pages of latents for tests, whose unused bytes are poisoned, and attention over them in float64."""

from __future__ import annotations

import torch

import fp8attn
from fp8attn import PAGE_SIZE, KVPages
from fp8attn.formats.spec import PageSpec
from tests.support.kernel_cases import POISON, cumulative

__all__ = ["cumulative", "empty", "expected", "filled", "statics", "tokens"]


def statics(spec: PageSpec, heads: int = 1, device="cpu") -> dict[str, torch.Tensor]:
    """A mean and factors of blocks that differ by an order of magnitude."""
    factor = 10.0 ** torch.linspace(-0.5, 0.5, spec.v_dim // 128, device=device)
    return {"v_mean": torch.randn(heads, spec.v_dim, device=device), "factor": factor.expand(heads, -1).contiguous()}


def empty(lengths: list[int], spec: PageSpec, heads: int = 1, static: bool = False, device="cpu") -> KVPages:
    """Pages for `lengths`, shuffled. All bytes are poisoned: RoPE's channels and the scales are NaN."""
    columns = max(1, -(-max(lengths) // PAGE_SIZE))
    seqs = len(lengths)
    more = statics(spec, heads, device) if static else {}
    pages = KVPages.empty(seqs * columns + 2, heads, spec, seqs, columns, device, **more)
    pages.page_table.copy_(torch.randperm(pages.num_pages, device=device)[: seqs * columns].view(seqs, columns))
    pages.pool.fill_(POISON | 0x80)
    return pages


def tokens(n: int, spec: PageSpec, dtype=torch.float32, heads: int = 1, device="cpu") -> tuple[torch.Tensor, ...]:
    """Latents of tokens of several sizes, and their keys with RoPE."""
    size = torch.exp2(torch.randint(-1, 2, (n, 1, 1), device=device).float())
    x, rope = (torch.randn(n, heads, width, device=device) for width in spec.widths)
    return (x * size).to(dtype), rope.to(dtype)


def filled(lengths: list[int], spec: PageSpec, heads: int = 1, static: bool = False, device="cpu") -> KVPages:
    """Pages with random tokens."""
    pages = empty(lengths, spec, heads, static, device)
    fp8attn.append(
        pages, *tokens(sum(lengths), spec, torch.float32, heads, device), cu_seqlens=cumulative(lengths, device),
        max_seqlen=max(lengths), backend="reference",
    )  # fmt: skip
    return pages


def expected(
    q: torch.Tensor, pages: KVPages, queries: list[int], scale: float, *, causal: bool = True,
    window: int | None = None, leftpad: list[int] | None = None, **neutral: object,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention over the dequantized pages in float64, from the definition: `out [T, heads, rank]`, and the LSE."""
    outs, lses, group = [], [], q.shape[1] // pages.num_kv_heads
    for seq, (rows, length) in enumerate(zip(q.double().split(queries), pages.cache_seqlens.tolist(), strict=True)):
        x, rope = pages.read(seq, length, torch.float64)
        key = torch.cat([x, rope], -1).repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->qhk", rows, key) * scale
        at, token = length - len(rows) + torch.arange(len(rows))[:, None], torch.arange(length)
        hidden = token < (leftpad[seq] if leftpad else 0)
        hidden = hidden | (token > at) if causal else hidden.expand(len(rows), -1)
        hidden = hidden | (token <= at - window) if window else hidden
        scores = scores.masked_fill(hidden[:, None].to(q.device), -torch.inf)
        weights = scores.softmax(-1).nan_to_num() if length else scores
        outs.append(torch.einsum("qhk,khd->qhd", weights, x.repeat_interleave(group, 1)))
        lses.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(lses)
