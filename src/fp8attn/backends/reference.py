"""The reference as a backend, for any device, without Triton."""

from __future__ import annotations

import torch

from .. import latent, reference
from ..formats.spec import PageSpec
from ..pages import KVPages
from ..params import Append, AttentionParams, BackendName
from .base import attend_tokens


class Reference:
    """`reference.py`, a loop over sequences in plain PyTorch."""

    name: BackendName = "reference"
    from_dense = staticmethod(reference.from_dense)

    @staticmethod
    def supports(spec: PageSpec, dtype: torch.dtype, device: torch.device) -> str | None:
        if dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            return f"inputs must be floating point of 16, 32 or 64 bits, not {dtype}"
        return spec.refusal

    def append(self, pages: KVPages, k: torch.Tensor, v: torch.Tensor, options: Append) -> None:
        (latent if pages.spec.v_in_k else reference).append(pages, k, v, options)

    def attention(
        self,
        q: torch.Tensor,
        pages: KVPages,
        params: AttentionParams,
        out: torch.Tensor | None = None,
        new_keys: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return attend_tokens((latent if pages.spec.v_in_k else reference).attention, q, pages, params, out)
