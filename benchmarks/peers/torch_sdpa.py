"""torch's `scaled_dot_product_attention` in BF16, by cuDNN."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..problem import Run, Shape
from . import dense
from .peer import Call, Peer


def attention(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    dense.check(shape)
    given = dense.batched(shape, q, k, v)
    options = {"is_causal": dense.masked(shape), "enable_gqa": shape.q_heads != shape.kv_heads}

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return dense.rows(scaled_dot_product_attention(*given, **options))

    return Run(call, q, shape.split(k, v))


PEER = Peer(
    calls={"cudnn-bf16": Call(attention, "cuDNN BF16", "#b8bfca", prefill=True)},
    release=lambda: f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}",
)
