"""Append and attention over latents (MLA) in plain PyTorch, on any device. `formats/latent.py` has the equations.

The tests compare every kernel with these functions. On a CPU they are also what a model runs.
"""

from __future__ import annotations

import torch

from .formats.latent import absorb, quantize, restore, to_rope
from .formats.page_layout import PAGE_SIZE, latent_of
from .formats.rotation import rotate
from .pages import KVPages
from .params import Append, AttentionParams

KEY_BLOCK = 16 * PAGE_SIZE  # tokens whose codes are floating-point numbers at a time: what the cache of a CPU holds
ROW_BLOCK = 4096  # rows of scores in memory at a time: queries of all heads


@torch.inference_mode()  # outside of this mode, torch does not write to its tensors
def append(pages: KVPages, latent: torch.Tensor, rope: torch.Tensor, options: Append) -> None:
    """Quantize latents `[T, num_kv_heads, rank]`, write them and their keys with RoPE `[T, num_kv_heads, rope]` at the
    ends of the sequences, and advance `cache_seqlens`.

    `ops.append` describes the other arguments.
    """
    mean, factor, spec = pages.format.v_mean, pages.format.factor, pages.spec
    codes, scales = quantize(latent.float(), mean, factor, rope.float() if spec.rope_in_codes else None)
    codes, rope = codes.split(spec.widths, -1) if spec.rope_in_codes else (codes, to_rope(rope))
    stored = latent_of(pages.pool, pages.format.layout)
    bounds = pages.bounds(options.cu_seqlens, options.max_seqlen)
    for seq, length in enumerate(pages.cache_seqlens.tolist()):
        new = slice(bounds[seq], bounds[seq + 1])
        count = new.stop - new.start
        first = length if options.advance else length - count
        if not count or first < 0:  # no new tokens, or a sequence that pads the batch
            continue
        token = torch.arange(first, first + count, device=latent.device)
        page, row = pages.page_table[seq].long()[token // PAGE_SIZE], token % PAGE_SIZE
        for part, x in zip(stored, (codes, rope, scales), strict=True):
            part[page, :, row] = x[new]
        if options.advance:
            pages.cache_seqlens[seq] += count


def attention(
    q: torch.Tensor,
    pages: KVPages,
    params: AttentionParams,
    out: torch.Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of absorbed queries `[T, num_q_heads, rank + rope]`, which reads the codes of `KEY_BLOCK` tokens at a
    time.

    Returns `out [T, num_q_heads, rank]` and the LSE. Kernel errors are differences from the result with
    `compute_dtype=torch.float64` and `out_dtype=torch.float64`.
    """
    format, rank, window = pages.format, pages.spec.v_dim, params.window
    result = q.new_zeros((*q.shape[:2], rank), dtype=out_dtype or q.dtype) if out is None else out.zero_()
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    bounds = pages.bounds(params.cu_seqlens_q, params.max_seqlen_q)
    skipped = params.leftpad_k.tolist() if params.leftpad_k is not None else [0] * pages.num_seqs
    q = q.to(compute_dtype).unflatten(1, (pages.num_kv_heads, -1)) * params.softmax_scale  # [T, Hkv, G, rank + rope]
    mean, factor = (x if x is None else x[:, None] for x in (format.v_mean, format.factor))
    # All scores of a query have the product with the mean: it moves only the LSE.
    shift = q.new_zeros(q.shape[:-1]) if mean is None else (q[..., :rank] * mean.to(q.dtype)).sum(-1)
    rope = rotate(q[..., rank:]) if pages.spec.rope_in_codes else q[..., rank:]
    q = torch.cat([absorb(q[..., :rank], factor), rope], -1)
    for seq, length in enumerate(pages.cache_seqlens.tolist()):
        queries = bounds[seq + 1] - bounds[seq]
        # The bits of a matrix product depend on its shape.
        size = 1 if params.batch_invariant else max(1, ROW_BLOCK // lse.shape[1])
        for start in range(0, queries, size):
            stop = min(start + size, queries)
            rows = slice(bounds[seq] + start, bounds[seq] + stop)
            position = length - queries + torch.arange(start, stop, device=q.device)
            first = max(skipped[seq], length - queries + start - window + 1) if window else skipped[seq]
            end = max(length - queries + stop, 0) if params.causal else length
            keys = range(min(max(first, 0), end), end)
            with torch.autocast(q.device.type, enabled=False):
                y, total, largest = _sums(
                    q[rows].permute(1, 2, 0, 3), pages, pages.page_table[seq], keys, position, params
                )
            y, total, largest = y.permute(2, 0, 1, 3), total.permute(2, 0, 1), largest.permute(2, 0, 1)
            y = restore(y / total.masked_fill(total == 0.0, 1.0)[..., None], mean, factor)
            y = y.masked_fill(total[..., None] == 0.0, 0.0)  # rows that see no key
            result[rows] = y.flatten(1, 2).to(result.dtype)
            lse[rows] = (largest + total.log() + shift[rows]).flatten(1, 2).float()
    return result, lse


def _sums(
    q: torch.Tensor, pages: KVPages, table: torch.Tensor, keys: range, position: torch.Tensor,
    params: AttentionParams,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The sums of the softmax over keys of one sequence, by blocks with a running maximum.

    Args:
        q: `[num_kv_heads, group, S, rank + rope]`, scaled and absorbed.
        table: the sequence's row of the page table.
        position: `[S]`, of the queries.
    Returns:
        sums of weights times stored latents, in the rotated basis `[num_kv_heads, group, S, rank]`; sums of weights and
        largest scores `[num_kv_heads, group, S]`. A row that sees no key has 0, 0 and 0.
    """
    shape, rank, stored = q.shape[:-1], pages.spec.v_dim, latent_of(pages.pool, pages.format.layout)
    rows = q.flatten(1, 2)  # [Hkv, G * S, rank + rope]
    y, total, largest = q.new_zeros(*shape, rank), q.new_zeros(shape), q.new_full(shape, -torch.inf)
    for begin in range(keys.start // PAGE_SIZE * PAGE_SIZE, keys.stop if keys else 0, KEY_BLOCK):
        first, stop = max(begin, keys.start), min(begin + KEY_BLOCK, keys.stop)
        ids = table[begin // PAGE_SIZE : -(-stop // PAGE_SIZE)].long()
        codes, rope, scales = (
            x[ids].to(q.dtype).transpose(0, 1).flatten(1, 2)[:, first - begin : stop - begin] for x in stored
        )  # [Hkv, keys, ...]
        key = torch.arange(first, stop, device=q.device)
        beside = rows[..., rank:] @ rope.mT
        beside = beside * scales[:, None] if pages.spec.rope_in_codes else beside
        scores = (rows[..., :rank] @ codes.mT) * scales[:, None] + beside
        hidden = key > position[:, None] if params.causal else torch.zeros_like(key > position[:, None])
        if params.window:
            hidden = hidden | (key <= position[:, None] - params.window)
        scores = scores.view(*shape, -1).masked_fill(hidden, -torch.inf)
        before, largest = largest, torch.maximum(largest, scores.amax(-1))
        origin = largest.masked_fill(largest == -torch.inf, 0.0)
        p = torch.exp(scores - origin[..., None])
        decay = torch.exp(before - origin)
        total = total * decay + p.sum(-1)
        # A token with a NaN has a scale of NaN, which must not reach rows that do not see it.
        weights = (p * scales[:, None, None]).masked_fill(hidden, 0.0)
        y = y * decay[..., None] + (weights.flatten(1, 2) @ codes).view(*shape, rank)
    return y, total, largest.masked_fill(largest == -torch.inf, 0.0)
