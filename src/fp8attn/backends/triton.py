"""The portable kernels, for every GPU that Triton compiles for."""

from __future__ import annotations

import importlib.util
import os

import torch

from ..errors import UsageError
from ..formats.spec import PageSpec
from ..pages import KVPages
from ..params import AttentionParams, BackendName
from .base import Writer, attend_tokens, refused_dtype

TRITON_INSTALLED = importlib.util.find_spec("triton") is not None


class Triton(Writer):
    """Attention of `kernels/portable/`, in 16-bit arithmetic."""

    name: BackendName = "triton"

    def __init__(self) -> None:
        super().__init__()
        from ..kernels.latent import latent_attention
        from ..kernels.portable import portable_attention

        self._kernel, self._latent = portable_attention, latent_attention

    @staticmethod
    def supports(spec: PageSpec, dtype: torch.dtype, device: torch.device) -> str | None:
        if not TRITON_INSTALLED:
            return "Triton is not installed (pip install triton)"
        if device.type not in ("cuda", "xpu") and os.environ.get("TRITON_INTERPRET") != "1":
            return f"no Triton on {device.type} (TRITON_INTERPRET=1 interprets it there, slowly, for tests)"
        return refused_dtype(dtype) or spec.refusal

    def attention(
        self,
        q: torch.Tensor,
        pages: KVPages,
        params: AttentionParams,
        out: torch.Tensor | None = None,
        new_keys: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if params.batch_invariant:
            raise UsageError(
                "backend 'triton' cannot keep batch_invariant: with Triton 3.9 some rows had other bits in another "
                "batch. Pass backend='reference', or run on a Hopper GPU, whose kernels take a head_dim of up to 256"
            )
        return attend_tokens(self._latent if pages.format.spec.v_in_k else self._kernel, q, pages, params, out)
