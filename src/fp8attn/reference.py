"""Append and attention in plain PyTorch, on any device, without Triton. The tests compare every kernel with these
functions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .formats import rotation
from .formats.codec import FP8, Codec
from .formats.kv_format import KVFormat
from .formats.page_layout import PAGE_SIZE, pack_k, pack_v, unpack_k, unpack_v
from .formats.rope import DenseRope, apply_rope
from .numerics import settle
from .pages import KVPages
from .params import Append, AttentionParams

QUERY_BLOCK = 512  # rows of scores in memory at a time


@torch.inference_mode()  # outside of this mode, torch does not write to its tensors
def append(pages: KVPages, k: torch.Tensor, v: torch.Tensor, options: Append) -> None:
    """Quantize `k` and `v`, write them at the ends of the sequences, and advance `cache_seqlens`.

    `ops.append` describes the arguments.
    """
    format = pages.format
    k = rotation.rotate(k.float()) if format.rotate else k.float()
    k = k if format.stored_k_mean is None else k - format.stored_k_mean
    v = v.float() if format.v_mean is None else v.float() - format.v_mean
    bounds = pages.bounds(options.cu_seqlens, options.max_seqlen)
    for seq, (start, length) in enumerate(zip(bounds, pages.cache_seqlens.tolist(), strict=False)):
        end = bounds[seq + 1]
        if not options.advance:
            length -= end - start
        if start == end or length < 0:  # no new tokens, or a sequence that pads the batch
            continue
        first, offset = divmod(length, PAGE_SIZE)
        last = (length + end - start - 1) // PAGE_SIZE
        ids = pages.page_table[seq, first : last + 1].long()
        taken = pages.with_pool(pages.pool[ids])
        # The tokens past the end, too: attention multiplies them by zero, and 0 * NaN would be NaN.
        taken.v.view(torch.uint8)[0 if offset == 0 else 1 :] = 0
        for x, codec, codes, scale, pack, unpack in (
            (k[start:end], format.k, taken.k, taken.k_scale, pack_k, unpack_k),
            (v[start:end], format.v, taken.v, taken.v_scale, pack_v, unpack_v),
        ):
            _append_tokens(x, codec, codes, scale, offset, pack, unpack, options.static_scales)
        if not (format.k.has_nan or options.static_scales):  # INT8 has no code for NaN: it makes its page's scale NaN
            broken = k.new_zeros(taken.num_pages * PAGE_SIZE, k.shape[1], dtype=torch.bool)
            broken[offset : offset + end - start] = k[start:end].isnan().any(-1)
            taken.k_scale.masked_fill_(broken.unflatten(0, (-1, PAGE_SIZE)).any(1), torch.nan)
        pages.pool[ids] = taken.pool
        if options.advance:
            pages.cache_seqlens[seq] += end - start


def from_dense(k: torch.Tensor, v: torch.Tensor, format: KVFormat, rope: DenseRope | None = None) -> KVPages:
    """Pages of dense K and V (`fp8attn.from_dense`), by an append to an empty cache. E4M3 inputs keep their bytes."""
    batch, heads, length, head_dim = k.shape
    columns = -(-length // PAGE_SIZE)
    empty = KVPages.empty(batch * columns, heads, head_dim, batch, columns, k.device)
    pages = KVPages.trusted(empty.pool, empty.page_table, empty.cache_seqlens, format)
    given_bytes = k.dtype == FP8
    if given_bytes:
        for scale in (pages.k_scale, pages.v_scale):
            scale.fill_(1.0)
    if rope is not None:
        k, q = (
            apply_rope(x.float(), cos[:, None], sin[:, None], interleaved=interleaved)
            for x, (cos, sin, interleaved) in ((k, rope.k), (rope.queries, rope.q))
        )
        rope.out.copy_(q)
    k, v = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))
    append(pages, k, v, Append(None, length, static_scales=given_bytes))
    return pages


def _append_tokens(
    x: torch.Tensor, codec: Codec, pages: torch.Tensor, scale: torch.Tensor, offset: int,
    pack: Callable[[torch.Tensor], torch.Tensor], unpack: Callable[[torch.Tensor], torch.Tensor], static_scales: bool,
) -> None:  # fmt: skip
    """Write FP32 tokens `x [n, H, D]` as codes into `pages [P, H, ...]`, from token `offset` of the first page, with
    scales `[P, H]`.
    """
    heads = x.shape[1]
    age = torch.zeros(len(pages) * PAGE_SIZE, dtype=torch.int8, device=x.device)
    age[:offset] = 2
    age[offset : offset + len(x)] = 1
    new = x.new_zeros(len(age), *x.shape[1:])
    new[offset : offset + len(x)] = x
    old = unpack(pages.float()).unflatten(0, (-1, PAGE_SIZE)).transpose(1, 2).flatten(0, 1)
    codes, settled = settle(
        new.unflatten(0, (-1, PAGE_SIZE)).transpose(1, 2).flatten(0, 1), old, scale.flatten(),
        age.view(-1, 1, PAGE_SIZE).expand(-1, heads, -1).flatten(0, 1), codec, static_scales,
    )  # fmt: skip
    codes = codes if codec.has_nan else codes.nan_to_num(0.0)
    written = pack(codes.unflatten(0, (-1, heads)).transpose(1, 2).flatten(0, 1).to(codec.dtype).view(torch.uint8))
    is_token = pack((age > 0)[:, None, None].expand(len(age), *x.shape[1:]))
    pages.view(torch.uint8).copy_(torch.where(is_token, written, pages.view(torch.uint8)))
    scale.copy_(settled.view_as(scale))


def attention(
    q: torch.Tensor,
    pages: KVPages,
    params: AttentionParams,
    out: torch.Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float32,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the dequantized cache.

    Kernel errors are differences from the result with `compute_dtype=torch.float64` and `out_dtype=torch.float64`.
    """
    window, softcap, sinks = params.window, params.softcap, params.sinks
    out = q.new_zeros(q.shape, dtype=out_dtype or q.dtype) if out is None else out.zero_()
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    bounds = pages.bounds(params.cu_seqlens_q, params.max_seqlen_q)
    skipped = params.leftpad_k.tolist() if params.leftpad_k is not None else [0] * pages.num_seqs
    group = q.shape[1] // pages.num_kv_heads
    for seq, length in enumerate(pages.cache_seqlens.tolist()):
        q_len = bounds[seq + 1] - bounds[seq]
        if not q_len:
            continue
        # Pages left of the window may have been given back.
        first = max(0, length - q_len - window + 1) // PAGE_SIZE * PAGE_SIZE if window else 0
        k, v = (x.transpose(0, 1) for x in pages.read(seq, length, compute_dtype, first))  # [Hkv, S, D]
        all_keys = k, v, torch.arange(first, length, device=q.device)
        size = 1 if params.batch_invariant else QUERY_BLOCK
        for start in range(0, q_len, size):
            rows = slice(bounds[seq] + start, bounds[seq] + min(start + size, q_len))
            k, v, key = all_keys
            if params.batch_invariant:  # the bits of a matrix product depend on its shape
                end = length - q_len + start + 1 if params.causal else length
                left = max(first, skipped[seq], end - window if window else 0)
                its = slice(left - first, max(left, end) - first)
                k, v, key = k[:, its], v[:, its], key[its]
            block = q[rows].to(compute_dtype).unflatten(1, (-1, group)).permute(1, 2, 0, 3)  # [Hkv, G, S, D]
            scores = _product(block.flatten(1, 2), k.transpose(1, 2)) * params.softmax_scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.unflatten(1, (group, -1)).flatten(0, 1)  # [Hq, S, keys]
            # The last query has the position of the last key.
            position = (length - q_len + start + torch.arange(scores.shape[1], device=q.device))[:, None]
            seen = (key >= skipped[seq]).expand(len(position), -1)
            if params.causal:
                seen = seen & (key <= position)
            if window:
                seen = seen & (key > position - window)
            scores = scores.masked_fill(~seen, -torch.inf)
            if sinks is not None:
                column = sinks.to(compute_dtype)[:, None, None].expand(-1, scores.shape[1], 1)
                scores = torch.cat([scores, column], -1)
            # The largest score is subtracted, because it is exact. The logarithm of the sum is rounded: at scores of
            # 2e5 the weights would add up to 1.004, and values of 65504 would exceed float16. A row that sees nothing
            # has no weights: zeros, not 0 / 0.
            largest = scores.amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:2], -torch.inf)
            largest = largest.masked_fill(largest == -torch.inf, 0.0)
            p = torch.exp(scores - largest[..., None])
            total = p.sum(-1)
            p = p[..., : len(key)] / total.masked_fill(total == 0.0, 1.0)[..., None]
            result = _product(p.unflatten(0, (-1, group)).flatten(1, 2), v)  # [Hkv, G * S, D]
            out[rows] = result.unflatten(1, (group, -1)).permute(2, 0, 1, 3).flatten(1, 2).to(out.dtype)
            lse[rows] = (largest + total.log()).T.float()
    return out, lse


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b` in their dtype, also inside `torch.autocast`."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b
