"""HPC-Ops (Tencent): attention over pages in FP8, as vLLM's backend for it calls it.

Q has a scale a token and head, K and V one each; P is scaled by 256. Both kernels sum products of P and V in two
levels: with V of mean 1 they are 0.2% off at 128k tokens. head_dim 128, causal, the softmax scale `1 / sqrt(head_dim)`.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib import import_module

import torch

from ..measure import MOST_DECODED
from ..problem import DEVICE, Run, Shape, offsets
from . import pages
from .peer import FOLDER, TORCH_LIBRARIES, Call, Peer, Source, load_ops
from .rounded import by_heads, by_token

SOURCES = "src/attention"
SOURCE = Source(
    name="hpc_ops",
    source="https://github.com/Tencent/hpc-ops@6e2eced",
    files=(
        *(f"{SOURCES}/{name}" for name in ("entry.cc", "prefill/prefill.cc", "decode/decode.cc",
        "decode/assign_task.cu")),
        "src/utils/utils.cc", f"{SOURCES}/prefill/warp_spec_with_kvcache_fp8_dim128.cu",
        f"{SOURCES}/decode/sm90/dynamic/smallm_fp8_qpertoken_perhead_kvpertensor_dim128_dynamic.cu",
    ),
    includes=(".", "3rd/cutlass/include"),
    flags=("-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED", "-DNDEBUG"),
    needs=(*TORCH_LIBRARIES, "cuda"),
    missing="_ZN3hpc9attention",
    keep=("hpc/attention.py", "hpc_attention.py"),
)  # fmt: skip
SCALES = 1  # `QuantType.QPERTOKEN_PERHEAD_KPERTENSOR_VPERTENSOR`
LEAST_TOKENS = 512  # of a part of a sequence, for one CTA: the library's default


def attention(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    """A decode step, or prompts."""
    if shape.dim != 128:
        raise ValueError("head_dim is 128")
    return (decode if max(shape.queries) <= MOST_DECODED else prefill)(shape, q, k, v)


def prefill(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    if not shape.causal:
        raise ValueError("its mask is causal")
    (q8, k8, v8), held, q_scale, scales = _given(shape, q, k, v)
    cache = pages.fill(shape, k8.bits, v8.bits, heads_first=True)
    longest, heads = max(shape.queries), q.shape[1]
    padded = torch.zeros(len(shape.keys), heads, -(-longest // 128) * 128, device=DEVICE)  # [num_seqs, heads, queries]
    for seq, count in enumerate(shape.queries):
        padded[seq, :, :count] = q_scale[shape.rows(seq)].T
    bounds, op = offsets(shape.queries), torch.ops.hpc.attention_with_kvcache_prefill_fp8
    args = (q8.bits, cache.k, cache.v, padded, *scales, bounds, cache.table, cache.used, longest, SCALES, None)
    return Run(lambda: op(*args), q8, held)


def decode(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    """A decode step. Which CTA reads what is planned before, once for all layers of a step, as in vLLM."""
    if set(shape.queries) != {1} or shape.q_heads // shape.kv_heads not in (4, 8):
        raise ValueError("one query a sequence, and 4 or 8 query heads a KV head")
    (q8, k8, v8), held, q_scale, scales = _given(shape, q, k, v)
    cache = pages.fill(shape, k8.bits, v8.bits, heads_first=True)
    plan = _plan(shape.keys, shape.kv_heads)
    flags = torch.zeros(len(shape.keys), shape.kv_heads, dtype=torch.int32, device=DEVICE)
    op = torch.ops.hpc.attention_decode_fp8
    args = (
        q8.bits,
        cache.k,
        cache.v,
        cache.table,
        cache.used,
        q_scale,
        *scales,
        0,
        True,
        SCALES,
        True,
        plan,
        flags,
        None,
    )
    return Run(lambda: op(*args), q8, held)


def _given(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    """Q, K and V in FP8; K and V of a sequence; Q's scales `[T, num_q_heads]`, and K's and V's `[1]`."""
    q8 = by_token(q)
    (k8, k_scale), (v8, v_scale) = by_heads(k, 1), by_heads(v, 1)
    return (q8, k8, v8), shape.split(k8, v8), q8.scale[..., 0].contiguous(), (k_scale, v_scale)


@lru_cache
def _plan(keys: tuple[int, ...], kv_heads: int) -> torch.Tensor:
    from hpc_attention import assign_attention_decode_task, get_attention_decode_task_workspace

    plan = get_attention_decode_task_workspace(len(keys), max(keys), kv_heads, LEAST_TOKENS)
    used = torch.tensor(keys, dtype=torch.int32, device=DEVICE)
    assign_attention_decode_task(used, plan, kv_heads, 1, True, LEAST_TOKENS)
    return plan


def load() -> None:
    """Load the ops, and their repository's module of calls as `hpc_attention`."""
    load_ops("hpc_ops")
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    import_module("hpc_attention")


PEER = Peer(
    calls={"hpc-ops": Call(attention, "HPC-Ops", "#3d5a80", prefill=True, decode=True, levels=2)},
    needs=(SOURCE,),
    load=load,
    release=lambda: SOURCE.source.removeprefix("https://github.com/"),
)
