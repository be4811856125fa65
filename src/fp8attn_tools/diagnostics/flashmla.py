"""vLLM's attention over latents in E4M3 (`--kv-cache-dtype fp8` on Hopper): its build of DeepSeek's FlashMLA.

The library of an installed vLLM is loaded alone, without an import of vllm. `accumulation.py` measures how it sums.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from fp8attn.backends.fa3 import op_of

NAME = "vLLM's FlashMLA"
PAGE = 64  # tokens of its pages
OPS = "_flashmla_extension_C"


@cache
def find() -> tuple[Any, Any]:
    """The op that plans a call, and the one that attends.

    Raises:
        LookupError: vLLM is not installed, or has none.
    """
    names = "get_mla_decoding_metadata_dense_fp8", "fwd_kvcache_mla_fp8"
    plan, attend = (op_of(OPS, name, "vllm", f"{OPS}*.so") for name in names)
    return plan, attend


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention with softmax_scale 1, all scales 1 and no mask.

    Args:
        q: `[B, heads, queries, rank + rope]` float8_e4m3fn.
        k: `[1, 1, S, rank + rope]` float8_e4m3fn, the latents and their keys with RoPE of every sequence. Its sequences
            share pages.
        v: `[1, 1, S, rank]`, the first channels of `k`.
    Returns:
        `[B, heads, queries, rank]` bfloat16.
    Raises:
        LookupError: as `find`.
    """
    plan, attend = find()
    batch, heads, queries, _ = q.shape
    length = k.shape[2]
    columns = -(-length // PAGE)
    pages = torch.zeros(columns * PAGE, k.shape[3], dtype=torch.uint8, device=k.device)
    pages[:length] = k[0, 0].view(torch.uint8)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=k.device)
    table = torch.arange(columns, dtype=torch.int32, device=k.device).repeat(batch, 1)
    one = torch.ones(1, device=k.device)
    out, _ = attend(
        q.transpose(1, 2).contiguous(), pages.view(k.dtype).view(columns, PAGE, 1, -1), v.shape[3], lengths, table, 1.0,
        False, *plan(lengths, queries * heads, 1), one, one,
    )  # fmt: skip
    return out.transpose(1, 2)
