"""K and V in shuffled pages of 64 tokens, as engines keep them for the peers that read pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..problem import DEVICE, Shape

SIZE = 64  # tokens; HPC-Ops reads no other in FP8


@dataclass(frozen=True)
class Pages:
    """K and V of a layer.

    Attributes:
        pool: `[pages, 2, num_kv_heads, SIZE, head_dim]`, or with tokens before heads in memory. K is first.
        k, v: `[pages, SIZE, num_kv_heads, head_dim]`, views of the pool.
        table: `[num_seqs, columns]` int32.
        used: `[num_seqs]` int32, the sequences' lengths.
    """

    pool: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    used: torch.Tensor


def fill(shape: Shape, k: torch.Tensor, v: torch.Tensor, *, heads_first: bool) -> Pages:
    """Pages that hold `k` and `v [tokens, num_kv_heads, head_dim]`. They are in random order; behind a sequence's end
    they are zero.

    Args:
        heads_first: the tokens of a page's head are neighbors in memory.
    """
    counts = [-(-n // SIZE) for n in shape.keys]
    where = torch.randperm(sum(counts), device=DEVICE).int()
    rows = torch.cat([torch.arange(n, device=DEVICE) + SIZE * sum(counts[:seq]) for seq, n in enumerate(shape.keys)])
    size = (2, shape.kv_heads, SIZE, shape.dim) if heads_first else (2, SIZE, shape.kv_heads, shape.dim)
    pool = torch.zeros(len(where), *size, device=DEVICE, dtype=torch.uint8 if k.element_size() == 1 else k.dtype)
    by_token = pool.transpose(2, 3) if heads_first else pool  # [pages, 2, SIZE, num_kv_heads, head_dim]
    index, slot = where[rows // SIZE].long(), rows % SIZE
    for i, x in enumerate((k, v)):
        by_token[index, i, slot] = x.view(pool.dtype)
    table = torch.zeros(len(counts), max(counts), device=DEVICE, dtype=torch.int32)
    for seq, ids in enumerate(where.split(counts)):
        table[seq, : len(ids)] = ids
    views = [x.view(k.dtype) for x in (by_token[:, 0], by_token[:, 1])]
    return Pages(pool.view(k.dtype), *views, table, torch.tensor(shape.keys, dtype=torch.int32, device=DEVICE))
