"""The peers: other systems' attention, as callables on one problem.

Binaries come from `.peers/` (`make peers`). What is not there, or cannot do a case, is left out with the reason printed. Pages hold 64
tokens.

| name | is | scales | accumulates FP8 products |
|---|---|---|---|
| `fa3-fp8`, `fa3-bf16` | FlashAttention-3 (`fa3-fwd`), the kernel behind PyTorch's quantized SDPA | a KV head | in the tensor core |
| `vllm-fa3-fp8`, `vllm-fa3-bf16` | vLLM's FlashAttention-3; `-paged` over pages | a KV head | in two levels |
| `cudnn-fp8` | cuDNN's FP8 graph, the newest cuDNN if it is collected; its output is FP8 too | a tensor, P by 256 | in the tensor core |
| `hpc-ops` | Tencent's HPC-Ops over pages: two kernels, as `flashinfer` | Q: a token and head; K, V: a tensor | in two levels |
| `flashinfer` | FlashInfer over pages: TensorRT-LLM's fmha_v2 for prompts, XQA for decode steps | a tensor | in the tensor core |
| `sage` | SageAttention's SM90 kernel, quantization excluded; Q and K in INT8 | rows of a thread; V: a channel | in two levels |
| `cudnn-bf16`, `flash-bf16` | `scaled_dot_product_attention` by cuDNN, and by torch's FlashAttention-2 | | |
| `torchao` | torchao's FP8 attention over `fa3-fp8`'s kernel: BF16 in and out, quantization included | a head | in the tensor core |

A module a system has the calls and says what they are given; `binaries` loads what they need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from ..measure import left_out
from ..problem import Run, Shape
from . import dense, fa3, flashinfer, hpc, sage
from .binaries import available


class Peer(NamedTuple):
    run: Callable[..., Run]  # `run(shape, q, k, v)` of 16 bits gives a run of the peer, which rounds them as it needs them
    needs: str | None = None  # one of `available()`; None: torch has it


PEERS = {
    "fa3-fp8": Peer(fa3.runs_in_fp8(lambda *args, **options: fa3.attention(*args, **options)), "fa3"),
    "cudnn-fp8": Peer(dense.cudnn_fp8, "cudnn"),
    "vllm-fa3-fp8": Peer(fa3.runs_in_fp8(fa3.vllm_dense), "vllm-fa3"),
    "vllm-fa3-fp8-paged": Peer(fa3.runs_in_fp8(fa3.vllm_paged), "vllm-fa3"),
    "hpc-ops": Peer(hpc.attention, "hpc-ops"),
    "flashinfer": Peer(flashinfer.attention, "flashinfer"),
    "sage": Peer(sage.attention, "sage"),
    "fa3-bf16": Peer(fa3.runs_of(lambda *args: fa3.attention(*args)), "fa3"),
    "vllm-fa3-bf16": Peer(fa3.runs_of(fa3.vllm_dense), "vllm-fa3"),
    "vllm-fa3-bf16-paged": Peer(fa3.runs_of(fa3.vllm_paged), "vllm-fa3"),
    "cudnn-bf16": Peer(dense.cudnn_bf16),
    "flash-bf16": Peer(dense.flash_bf16),
    "torchao": Peer(dense.torchao, "torchao"),
}
PREFILL = ("fa3-fp8", "cudnn-fp8", "vllm-fa3-fp8", "hpc-ops", "flashinfer", "sage", "fa3-bf16", "cudnn-bf16")
DECODE = ("vllm-fa3-fp8", "vllm-fa3-fp8-paged", "hpc-ops", "flashinfer", "vllm-fa3-bf16")


def runs(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, names: Iterable[str] = PREFILL) -> dict[str, Run]:
    """The installed peers that support the problem, on the same `q`, `k` and `v` in 16 bits."""
    found = {}
    for name in names:
        peer = PEERS[name]
        if peer.needs is not None and peer.needs not in available():
            continue
        try:
            found[name] = peer.run(shape, q, k, v)
        except Exception as problem:  # cuDNN's graphs raise types of their own
            left_out(name, problem)
    return found
