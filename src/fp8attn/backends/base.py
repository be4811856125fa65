"""What a backend is, and what backends share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from ..layout import KVPages
from ..params import AttentionParams

Attention = Callable[[torch.Tensor, KVPages, AttentionParams], tuple[torch.Tensor, torch.Tensor | None]]
ApplyRope = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]


class Backend(Protocol):
    """An implementation of everything that works on pages. Making an instance imports its kernels; the class itself imports none.

    Arguments are checked already (`ops`). What each method computes is defined in `reference.py`.
    """

    name: str

    @staticmethod
    def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
        """Why it cannot serve `dtype` inputs on `device`; None if it can."""

    def append(
        self, pages: KVPages, k: torch.Tensor, v: torch.Tensor, *, q: torch.Tensor | None, q_out: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None, max_seqlen: int, rope_cos: torch.Tensor | None, rope_sin: torch.Tensor | None,
        rope_interleaved: bool, static_scales: bool,
    ) -> None:  # fmt: skip
        """Write tokens `[T, num_kv_heads, head_dim]` to the ends of the sequences, and Q after RoPE to `q_out`."""

    def from_dense(
        self, k: torch.Tensor, v: torch.Tensor, *, rope_cos: torch.Tensor | None, rope_sin: torch.Tensor | None, rope_interleaved: bool,
        k_mean: torch.Tensor | None, v_mean: torch.Tensor | None, key_dtype: torch.dtype, rotate_keys: bool,
    ) -> KVPages:  # fmt: skip
        """Pages of dense K and V `[B, num_kv_heads, S, head_dim]`. E4M3 inputs keep their bytes, under scales of one."""
        ...

    def apply_rope(self, x: torch.Tensor, rope_cos: torch.Tensor, rope_sin: torch.Tensor, rope_interleaved: bool) -> torch.Tensor:
        """RoPE on a dense `[B, H, S, D]` by tables `[B, S, R / 2]`."""
        ...

    def quantize_rows(
        self, x: torch.Tensor, *, rope_cos: torch.Tensor | None, rope_sin: torch.Tensor | None, rope_interleaved: bool, rotate_keys: bool,
        means: bool, heads_per_scale: int, dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """A dense `[B, H, S, D]` in 8 bits, its scales and means."""
        ...

    def takes_fp8_queries(self, rows: int) -> bool:
        """Whether `attention` takes E4M3 queries, of so many query rows a KV head (query tokens x GQA group)."""
        ...

    def attention(self, q: torch.Tensor, pages: KVPages, params: AttentionParams) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`(out, lse)` of queries `[T, num_q_heads, head_dim]`. Without `params.return_lse` lse is anything.

        Dense calls pass `[num_seqs, S, num_q_heads, head_dim]` of any strides, with RoPE tables `[num_seqs, S, R / 2]`, and get `out` in
        q's order in memory.
        """
        ...


def empty_rows(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of rows that see no key."""
    return q.new_zeros(q.shape), q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float32)


def rotated(apply_rope: ApplyRope, q: torch.Tensor, params: AttentionParams) -> tuple[torch.Tensor, AttentionParams]:
    """Queries after RoPE, a launch of its own, for kernels that do not apply it; and what is left of the options."""
    cos, sin, interleaved = params.rope_cos, params.rope_sin, params.rope_interleaved
    if q.dim() == 4:
        q = apply_rope(q.transpose(1, 2), cos, sin, interleaved).transpose(1, 2)
    else:
        q = apply_rope(q.transpose(0, 1)[None], cos[None], sin[None], interleaved)[0].transpose(0, 1)
    return q, params._replace(rope_cos=None, rope_sin=None)


def attend_tokens(
    kernel: Attention, apply_rope: ApplyRope, q: torch.Tensor, pages: KVPages, params: AttentionParams
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`Backend.attention` by a kernel that takes queries `[T, num_q_heads, head_dim]` alone, applies no RoPE and always returns an LSE."""
    if not params.max_seqlen_q or not pages.page_table.shape[0]:  # no sequence has a query: an engine's idle step, whose rows are padding
        return empty_rows(q)
    if params.rope_cos is not None:
        q, params = rotated(apply_rope, q, params)
    if q.dim() == 3:
        return kernel(q, pages, params)
    out, lse = (x.unflatten(0, q.shape[:2]) for x in kernel(q.flatten(0, 1), pages, params))
    like = torch.empty_like(q)
    return (out if out.stride() == like.stride() else like.copy_(out)), lse
