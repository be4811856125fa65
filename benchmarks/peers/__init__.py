"""The peers: other systems' attention, as callables on one problem.

Binaries come from `.peers/` (`make peers`). What is not there, or cannot do a case, is left out with the reason printed. Scales are one:
FP8 data of spread one needs no others.

| name | is | accumulates FP8 products |
|---|---|---|
| `fa3-fp8`, `fa3-bf16` | FlashAttention-3 (`fa3-fwd`), the kernel behind PyTorch's quantized SDPA | in the tensor core |
| `vllm-fa3-fp8`, `vllm-fa3-bf16` | vLLM's FlashAttention-3 | in two levels |
| `cudnn-fp8` | cuDNN's FP8 graph; its output is FP8 too | in the tensor core |
| `cudnn-bf16`, `flash-bf16` | `scaled_dot_product_attention` by cuDNN, and by torch's FlashAttention-2 | |
| `torchao` | torchao's FP8 attention over `fa3-fp8`'s kernel: BF16 in and out, quantization included | in the tensor core |

`fa3` and `dense` have the callables; `binaries` loads what they need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch

from fp8attn.layout import FP8

from ..measure import left_out
from ..problem import Run, Shape
from . import dense, fa3
from .binaries import available


class Peer(NamedTuple):
    attend: Callable  # `attend(shape, q, k, v)` gives a call
    needs: str | None = None  # one of `available()`; None: torch has it
    fp8: bool = False  # takes Q, K and V in FP8
    dense: bool = False  # takes only sequences of equal lengths


PEERS = {
    "fa3-fp8": Peer(fa3.attention, "fa3", fp8=True),
    "cudnn-fp8": Peer(dense.cudnn_fp8, "cudnn", fp8=True, dense=True),
    "vllm-fa3-fp8": Peer(fa3.vllm_attention, "vllm-fa3", fp8=True),
    "fa3-bf16": Peer(fa3.attention, "fa3"),
    "cudnn-bf16": Peer(dense.cudnn_bf16, dense=True),
    "flash-bf16": Peer(dense.flash_bf16, dense=True),
    "torchao": Peer(dense.torchao, "torchao", dense=True),
}
KERNELS = ("fa3-fp8", "cudnn-fp8", "vllm-fa3-fp8", "fa3-bf16", "cudnn-bf16")  # torchao is no kernel: it quantizes too


def runs(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, names: Iterable[str] = KERNELS) -> dict[str, Run]:
    """The installed peers that support the problem, on the same `q`, `k` and `v` in BF16, which each peer converts to its dtype."""
    found, low = {}, None
    for name in names:
        peer = PEERS[name]
        if peer.needs is not None and peer.needs not in available():
            continue
        if peer.fp8 and low is None:
            low = [x.to(FP8) for x in (q, k, v)]
        given = low if peer.fp8 else [q, k, v]
        try:
            if peer.dense:
                dense.check(shape)
            found[name] = Run(peer.attend(shape, *given), given[0], partial(_held, shape, *given[1:]))
        except Exception as problem:  # cuDNN's graphs raise types of their own
            left_out(name, problem)
    return found


def _held(shape: Shape, k: torch.Tensor, v: torch.Tensor, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    return k.split(shape.keys)[seq], v.split(shape.keys)[seq]
