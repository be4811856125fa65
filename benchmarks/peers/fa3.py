"""FlashAttention-3 (`fa3-fwd`), the kernel behind PyTorch's quantized SDPA: one scale a KV head, sums in the tensor
core.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..problem import Shape, offsets
from .flash import forward, runs_in_fp8, runs_of
from .peer import Call, Peer, Wheel, load_ops

WHEEL = Wheel("fa3-fwd==0.0.3", {"fa3_fwd": "fa3_fwd/_C.abi3.so"})


def attention(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> Callable[[], torch.Tensor]:
    """Its forward over rows.

    Args:
        q: `[T, num_q_heads, head_dim]`; k, v: `[tokens, num_kv_heads, head_dim]`; float8_e4m3fn or 16 bits.
    """
    if shape.uniform:
        q, k, v = (x.unflatten(0, (len(shape.keys), -1)) for x in (q, k, v))
    else:
        options |= {"cu_seqlens_q": offsets(shape.queries), "cu_seqlens_k": offsets(shape.keys)}
        options |= {"max_seqlen_q": max(shape.queries), "max_seqlen_k": max(shape.keys)}
    return forward("fa3_fwd_interface", shape, q, k, v, **options)


PEER = Peer(
    calls={
        "fa3-fp8": Call(runs_in_fp8(attention), "FA3", "#f2a65a", prefill=True, levels=1),
        "fa3-bf16": Call(runs_of(attention), "FA3 BF16", "#7d8597", prefill=True),
    },
    needs=(WHEEL,),
    load=partial(load_ops, "fa3_fwd"),
    release=lambda: str(WHEEL),
)
