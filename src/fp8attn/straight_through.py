"""The K and V that an 8-bit cache returns, with gradients: to train a model for the cache, or to score RL samples as
they were sampled.
"""

from __future__ import annotations

from typing import Any

import torch

from .formats.codec import DEFAULT_KEY_DTYPE, KeyDtype
from .formats.page_layout import PAGE_SIZE
from .ops import from_dense
from .params import BackendName


def fake_quantize(
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    k_mean: torch.Tensor | None = None,
    v_mean: torch.Tensor | None = None,
    key_dtype: KeyDtype = DEFAULT_KEY_DTYPE,
    rotate_keys: bool = True,
    backend: BackendName = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize and dequantize K and V: the same bits as `fp8attn.from_dense(k, v)` followed by `KVPages.read`, in their
    dtype.

    The gradient ignores the rounding (straight-through estimator, Bengio et al., arXiv:1308.3432).
    A token's values depend on the tokens before it on its page of 128 tokens, which set the scale, and on tokens after
    it if they make the scale grow.

    Args:
        k, v: `[B, num_kv_heads, S, head_dim]` from the first token of each sequence, in a dtype that
            `fp8attn.from_dense` takes.
        k_mean, v_mean, key_dtype, rotate_keys, backend: as `fp8attn.from_dense` takes them.
    Returns:
        K and V, each `[B, num_kv_heads, S, head_dim]` in the dtype of k and v.
    Raises:
        ValueError: a shape, dtype or backend does not fit; the message says what would.
    """
    options = dict(k_mean=k_mean, v_mean=v_mean, key_dtype=key_dtype, rotate_keys=rotate_keys, backend=backend)
    return _StraightThrough.apply(k, v, options)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pages = from_dense(k, v, **options)
        batch, _, length, _ = k.shape
        # Read all sequences as one sequence whose table names every page, with one gather.
        tokens = PAGE_SIZE * pages.num_pages
        table = pages.page_table.view(1, -1)
        merged = pages.with_tables(table, table.new_full((1,), tokens))
        k, v = (
            x.unflatten(0, (batch, -1))[:, :length].transpose(1, 2).contiguous()
            for x in merged.read(0, tokens, k.dtype)
        )
        return k, v

    @staticmethod
    def backward(ctx: Any, grad_k: torch.Tensor, grad_v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return grad_k, grad_v, None
