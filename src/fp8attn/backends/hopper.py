"""The kernels for Hopper: `decode` for few query rows, `prefill` for many, and `latent.hopper` over latents."""

from __future__ import annotations

import importlib.metadata
import re
from functools import cache
from importlib import import_module

import torch

from ..errors import UsageError
from ..formats.spec import PageSpec
from ..kernels.machine import no_hopper_reason
from ..pages import KVPages
from ..params import AttentionParams, BackendName
from . import triton
from .base import Writer, attend_tokens, empty_rows, refused_dtype

MOST_CHANNELS = 256  # K and V of a page with more do not fit into shared memory twice


def refusal(spec: PageSpec) -> str | None:
    """Why these kernels do not take pages of `spec`, on any GPU; None if they do."""
    if spec.refusal is None and not spec.v_in_k and spec.k_dim > MOST_CHANNELS:
        return (
            f"the kernels for Hopper take a head_dim of up to {MOST_CHANNELS}, not {spec.k_dim}; the backend 'triton' "
            f"takes it"
        )
    return spec.refusal


class Hopper(Writer):
    """`decode` serves few query rows, whose speed memory bandwidth limits; they stay in 16 bits. `prefill` serves many,
    whose speed arithmetic limits; it rounds them to 8 bits. With `batch_invariant` it serves all.

    Over latents, `latent.hopper` serves both. What it does not take (`takes`) goes to the portable kernel."""

    name: BackendName = "hopper"

    def __init__(self) -> None:
        super().__init__()
        from ..kernels import decode, latent, prefill
        from ..kernels.latent import hopper

        self._decode, self._prefill, self._latent, self._latent_decode = decode, prefill, latent, hopper

    @staticmethod
    def supports(spec: PageSpec, dtype: torch.dtype, device: torch.device) -> str | None:
        if (reason := no_hopper_reason(device, "the kernels are")) is not None:
            return reason
        if not _has_gluon():
            return "Triton is not installed, or is older than 3.6 and has no Gluon for Hopper (pip install -U triton)"
        return refused_dtype(dtype) or refusal(spec)

    def attention(
        self,
        q: torch.Tensor,
        pages: KVPages,
        params: AttentionParams,
        out: torch.Tensor | None = None,
        new_keys: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if pages.spec.v_in_k:
            return self._latents(q, pages, params, out)
        invariant = params.batch_invariant
        if not invariant and params.max_seqlen_q * (q.shape[-2] // pages.num_kv_heads) <= self._decode.MAX_ROWS:
            return attend_tokens(self._decode.decode_attention, q, pages, params, out)
        if not pages.page_table.shape[0] or not params.max_seqlen_q:  # no sequence has a query
            return empty_rows(q, pages, out)
        if invariant and q.dim() == 3 and self._prefill.packs(params):
            return self._prefill.packed_attention(q, pages, params, out)
        return self._prefill.prefill_attention(q, pages, params, out, new_keys)

    def _latents(
        self, q: torch.Tensor, pages: KVPages, params: AttentionParams, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if params.batch_invariant:
            raise UsageError(
                "attention over latents cannot keep batch_invariant on a GPU: parts of a sequence begin where the "
                "lengths of the others put them. Leave it out, or pass backend='reference'"
            )
        takes = self._latent_decode.takes(q, pages, params)
        kernel = self._latent_decode.latent_decode if takes else self._latent.latent_attention
        return attend_tokens(kernel, q, pages, params, out)


@cache
def _has_gluon() -> bool:
    """Whether the installed Triton has the Gluon that the kernels need. Triton is not imported."""
    if not triton.TRITON_INSTALLED:
        return False
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # Triton's source tree is on the path
        version = import_module("triton").__version__
    major, minor = (int(part) for part in re.findall(r"\d+", version)[:2])
    return (major, minor) >= (3, 6)
