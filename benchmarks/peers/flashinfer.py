"""FlashInfer: XQA for decode steps and fmha_v2 for prompts, both of TensorRT-LLM, over pages in FP8.

`make peers` compiles the two modules that FlashInfer's JIT would compile for these shapes; they are called with the arguments of
`flashinfer.decode.xqa_batch_decode_with_kv_cache` and `flashinfer.prefill.trtllm_fmha_v2_prefill`. XQA takes Q in BF16, rounds it itself,
and has one scale for K and V together; fmha_v2 takes Q in FP8 and one scale for each of Q, K and V. Both sum all tokens in the tensor core.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from ..build_peers import FMHA_DIMS
from ..measure import MOST_DECODED
from ..problem import DEVICE, Run, Shape, offsets
from . import pages
from .rounded import Rounded, by_heads

SEMAPHORES = 8 << 20  # bytes, zero, before XQA's workspace
WORKSPACE = 256 << 20
GROUP = 4  # query heads a KV head, for which XQA is compiled


def attention(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    """A decode step, or prompts."""
    return (decode if max(shape.queries) <= MOST_DECODED else prefill)(shape, q, k, v)


def prefill(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    if shape.dim not in FMHA_DIMS:
        raise ValueError(f"compiled for head_dim {FMHA_DIMS}")
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = (by_heads(x, 1) for x in (q, k, v))
    cache = pages.fill(shape, k8.bits, v8.bits, heads_first=True)
    k_pages, v_pages = cache.pool.unbind(1)
    out = torch.empty_like(q)
    bounds = offsets(shape.queries), offsets(shape.keys)
    scales = float(q_scale * k_scale) * shape.softmax_scale, float(v_scale)
    mask, run, room = "causal" if shape.causal else "padding", _module("fmha").run, _workspace()

    def call() -> torch.Tensor:
        run(
            q8.bits, k_pages, v_pages, out, room, WORKSPACE, cache.table, pages.SIZE, cache.used, *bounds, "q_paged_kv_hnd",
            max(shape.queries), max(shape.keys), len(shape.keys), mask, 1.0, *scales, -1, 0, False, 0.0, 0.0, None, None,
        )  # fmt: skip
        return out

    return Run(call, q8, shape.split(k8, v8))


def decode(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    if set(shape.queries) != {1} or shape.q_heads != GROUP * shape.kv_heads or shape.dim != 128:
        raise ValueError(f"compiled for one query, {GROUP} query heads a KV head and head_dim 128")
    both, scale = by_heads(torch.stack((k, v), 1).flatten(1, 2), 1)
    k8, v8 = both.bits.unflatten(1, (2, -1)).unbind(1)
    cache = pages.fill(shape, k8, v8, heads_first=True)
    q = q.bfloat16()
    out, room, sms = torch.empty_like(q), _workspace(), torch.cuda.get_device_properties(DEVICE).multi_processor_count
    semaphores, scratch = room[:SEMAPHORES], room[SEMAPHORES:]
    q_scale, kv_scale, longest = shape.softmax_scale * shape.dim**0.5, float(scale), cache.table.shape[1] * pages.SIZE
    run = _module("xqa").xqa_wrapper

    def call() -> torch.Tensor:
        run(
            True, sms, shape.kv_heads, 0, q_scale, None, out[:, None], 1.0, q[:, None], None, cache.k, cache.v, None, None, cache.table,
            longest, cache.used[:, None], len(shape.keys), kv_scale, None, 1, None, None, semaphores, scratch, True,
        )  # fmt: skip
        return out

    return Run(call, q, shape.split(Rounded(k8, scale[None, None]), Rounded(v8, scale[None, None])))


@lru_cache
def _module(name: str):
    import tvm_ffi

    from .binaries import library

    return tvm_ffi.load_module(str(library(f"flashinfer_{name}")))


@lru_cache
def _workspace() -> torch.Tensor:
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=DEVICE)
