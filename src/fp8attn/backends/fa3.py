"""An installed FlashAttention-3. It serves dense calls only, over 8-bit rows."""

from __future__ import annotations

import torch

from .. import reference
from ..formats.codec import E4M3
from ..kernels import fa3


class FlashAttention3:
    """The installed FlashAttention-3. It cannot read pages, because V is transposed there. So it is not a `Backend`, and
    `dense/strategies.py` calls it."""

    name = "fa3"

    @staticmethod
    def unsupported_reason(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return fa3.unsupported_reason(device, dtype)

    def quantize_rows(
        self, x: torch.Tensor, *, rotate_keys: bool, subtract_mean: bool, heads_per_scale: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The E4M3 codes, scales and means of a dense `[B, H, S, D]`, in x's memory order."""
        quantize = reference.quantize_rows
        if not x.is_cpu:
            from ..kernels.quantize_rows import quantize_rows as quantize
        return quantize(x, rotate_keys=rotate_keys, subtract_mean=subtract_mean, heads_per_scale=heads_per_scale, codec=E4M3)

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_scale: torch.Tensor | None,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
        causal: bool,
        softmax_scale: float,
    ) -> torch.Tensor:
        """Attention of float8_e4m3fn `[B, heads, S, head_dim]`, with scales `[B, num_kv_heads]`. Causal is aligned to the last key.

        Returns:
            `[B, num_q_heads, S_q, head_dim]` bfloat16, in the memory order of q.
        """
        out = torch.empty_like(q, dtype=torch.bfloat16)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        fa3.attention(q, k, v, q_scale, k_scale, v_scale, causal=causal, softmax_scale=softmax_scale, out=out.transpose(1, 2))
        return out
