"""The interface of backends, and the code that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from ..formats.codec import FP8
from ..formats.kv_format import KVFormat
from ..formats.rope import DenseRope
from ..formats.spec import PageSpec
from ..pages import KVPages
from ..params import Append, AttentionParams, BackendName

Attention = Callable[[torch.Tensor, KVPages, AttentionParams, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]


class Backend(Protocol):
    """The interface of a backend: all operations on pages. An instance imports the backend's kernels; the class imports
    none.

    `ops` has checked the arguments. `reference.py` defines the results of each method.
    """

    name: BackendName

    @staticmethod
    def supports(spec: PageSpec, dtype: torch.dtype, device: torch.device) -> str | None:
        """Why the backend cannot serve pages of `spec` and inputs of `dtype` on `device`; None if it can."""

    def append(self, pages: KVPages, k: torch.Tensor, v: torch.Tensor, options: Append) -> None:
        """Write tokens `[T, num_kv_heads, head_dim]` at the ends of the sequences. Latents and their keys with RoPE
        take the places of K and V, each with its own number of channels (`PageSpec.widths`).
        """

    def from_dense(self, k: torch.Tensor, v: torch.Tensor, format: KVFormat, rope: DenseRope | None = None) -> KVPages:
        """Pages of dense K and V `[B, num_kv_heads, S, head_dim]`. E4M3 inputs keep their bytes, with scales of one.

        With `rope`, which E4M3 inputs do not have, K is rotated in FP32 before it is rounded, and the queries are
        written to `rope.out`.
        """
        ...

    def attention(
        self,
        q: torch.Tensor,
        pages: KVPages,
        params: AttentionParams,
        out: torch.Tensor | None = None,
        new_keys: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`(out, lse)` of queries `[T, num_q_heads, head_dim]`, written to `out` if there is one. Over latents, `out`
        has the channels of the latent alone. Without `params.return_lse`, lse is unspecified.

        `out` is contiguous, at a multiple of 16 bytes. Dense calls pass none. Their queries are
        `[num_seqs, S, num_q_heads, head_dim]` of any strides, and the result has the memory order of q. They may be
        E4M3; the result is then bfloat16.

        `new_keys` is the length of K if `from_dense` made these pages, and all else that attention reads was written
        before that launch: a kernel may then begin before the pages are written, and needs neither their table nor
        lengths. 0: nothing is known of them.
        """
        ...


class Writer:
    """The methods that write pages, with the same kernels on every GPU."""

    def __init__(self) -> None:
        from ..kernels.append import append, from_dense

        self.append = append
        self.from_dense = from_dense


def refused_dtype(dtype: torch.dtype) -> str | None:
    """Why kernels of GPUs cannot take inputs of `dtype`; None if they can."""
    if dtype in (torch.bfloat16, torch.float16):
        return None
    return f"the kernels take bfloat16 and float16, not {dtype} (cast a model: model.bfloat16())"


def empty_rows(q: torch.Tensor, pages: KVPages, out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and LSE of rows that see no key."""
    out = q.new_zeros((*q.shape[:-1], pages.spec.v_dim)) if out is None else out.zero_()
    return out, q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float32)


def attend_tokens(
    kernel: Attention, q: torch.Tensor, pages: KVPages, params: AttentionParams, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`Backend.attention` with a kernel that takes only queries `[T, num_q_heads, head_dim]` and always
    returns an LSE.
    """
    if not params.max_seqlen_q or not pages.page_table.shape[0]:  # no sequence has a query: all rows are padding
        return empty_rows(q, pages, out)
    if q.dim() == 3:
        return kernel(q, pages, params, out)
    q = q.to(torch.bfloat16) if q.dtype == FP8 else q
    out, lse = (x.unflatten(0, q.shape[:2]) for x in kernel(q.flatten(0, 1), pages, params, None))
    like = torch.empty_like(q)
    return (out if out.stride() == like.stride() else like.copy_(out)), lse
