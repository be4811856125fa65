"""SageAttention's kernel for SM90: Q and K in INT8, V in FP8, the products of P and V summed in two levels.

Its own quantization, written again (`sageattention.core.sageattn_qk_int8_pv_fp8_cuda_sm90`): K without its mean; a
scale for each thread that holds rows of Q (two rows of 16, 8 apart) and of K (32 of 128); a scale for each channel of
V. Only the kernel is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from fp8attn.formats.codec import E4M3, FP8

from ..problem import DEVICE, Run, Shape
from . import dense
from .peer import TORCH_LIBRARIES, Call, Peer, Source, load_ops

SOURCE = Source(
    name="sage_sm90",
    source="https://github.com/thu-ml/SageAttention@d1a57a5",
    files=(str(Path(__file__).with_suffix(".cu")),),
    includes=(".",),
    flags=("--use_fast_math",),
    needs=(*TORCH_LIBRARIES, "cuda"),
)
ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)  # of 16 tokens in V
BLOCK = 128  # keys


def attention(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    dense.check(shape)
    q, k, v = dense.batched(shape, q, k, v)  # [B, H, S, D]
    length = k.shape[2]
    q8, q_scale, of_q = _by_thread(q, 16, lambda row: row % 8, 8)
    k8, k_scale, of_k = _by_thread(k.float() - k.float().mean(2, keepdim=True), BLOCK, lambda row: row % 8 // 2, 4)
    v_scale = v.abs().amax(2).float() / E4M3.max  # [B, H, D]
    v8 = (v.float() / v_scale[:, :, None]).to(FP8)
    padded = torch.zeros(*v.shape[:2], -(-length // BLOCK) * BLOCK, v.shape[3], device=DEVICE, dtype=torch.uint8)
    padded[:, :, :length] = v8.view(torch.uint8)
    columns = padded.unflatten(2, (-1, 16))[:, :, :, list(ORDER)].flatten(2, 3).transpose(2, 3).contiguous().view(FP8)
    out = torch.empty_like(q)
    args = (q8, k8, columns, out, q_scale, k_scale, v_scale, dense.masked(shape), shape.softmax_scale)

    def call() -> torch.Tensor:
        torch.ops.fp8attn_sage.attend(*args)
        return dense.rows(out)

    given = [dense.rows(x) for x in (q8 * of_q, k8 * of_k, v8.float() * v_scale[:, :, None])]
    return Run(call, given[0], shape.split(*given[1:]))


def _by_thread(
    x: torch.Tensor, block: int, owner: Callable, threads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """INT8 rows, the scales of the threads `[B, H, blocks * threads]` (of 64 rows at least), and those of the rows
    `[B, H, S, 1]`.

    Args:
        x: `[B, H, S, D]`.
        owner: the thread in a block that holds a row of it.
    """
    batch, heads, length, _ = x.shape
    largest = torch.zeros(batch, heads, -(-length // max(block, 64)) * max(block, 64), device=DEVICE)
    largest[:, :, :length] = x.abs().amax(-1).float()
    row = torch.arange(largest.shape[2], device=DEVICE)
    thread = row // block * threads + owner(row % block)
    scale = torch.zeros(batch, heads, int(thread.max()) + 1, device=DEVICE)
    scale = scale.scatter_reduce(2, thread.expand_as(largest), largest, "amax") / 127 + 1e-7
    of_rows = scale[:, :, thread[:length], None]
    return (x.float() / of_rows).round().to(torch.int8), scale, of_rows


PEER = Peer(
    calls={"sage": Call(attention, "SageAttention", "#b392ac", prefill=True, levels=2)},
    needs=(SOURCE,),
    load=partial(load_ops, "sage_sm90"),
    release=lambda: SOURCE.source.removeprefix("https://github.com/"),
)
