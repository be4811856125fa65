"""How a dense call is computed. Each strategy quantizes K and V, or takes 8-bit ones, and returns a function of the
queries.

There are two: a `Backend` attends over pages that exist for this call, or FlashAttention-3 attends over 8-bit tensors
in their own memory order. Tensors are `[B, heads, S, head_dim]` of any strides, with a contiguous last dimension.
Causal is aligned to the last key.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..backends import Backend, fa3, find
from ..formats.codec import E4M3, FP8
from ..formats.kv_format import KVFormat
from ..formats.rope import DenseRope, apply_rope
from ..formats.spec import HEAD_DIMS, PageSpec
from ..pages import KVPages
from ..params import MOST_DENSE, AttentionParams, DenseBackendName

Attend = Callable[[torch.Tensor, bool], torch.Tensor]  # from queries and whether attention is causal
Scale = torch.Tensor | None  # `[B, num_kv_heads]` float32; None: ones


def fp8_strategy(
    backend: DenseBackendName,
    k: torch.Tensor,
    v: torch.Tensor,
    q_scale: Scale,
    k_scale: Scale,
    v_scale: Scale,
    softmax_scale: float,
) -> Attend:
    """Attention of E4M3 queries over E4M3 K and V. The output is BF16."""
    if backend == "fa3":
        fa3.check(k.device, torch.bfloat16)
        return lambda q, causal: fa3.attention(
            q, k, v, q_scale, k_scale, v_scale, causal=causal, softmax_scale=softmax_scale
        )
    format = KVFormat(PageSpec.of(k.shape[3], E4M3.name).name, rotate=False)
    paged = find(backend, k.device, torch.bfloat16, format.name)
    # The bytes are stored unchanged, with scales of one, which `q_scale`, `k_scale` and `v_scale` multiply. These can
    # be any positive numbers: kernels require that the scales of V in a sequence and head differ by powers of two, and
    # here they are equal.
    pages = paged.from_dense(k, v, format)
    batch = len(k)
    both = k_scale if q_scale is None else q_scale if k_scale is None else q_scale * k_scale
    least = 2.0**-40 / max(abs(softmax_scale), 1.0)
    for scales, factor, zero in ((pages.k_scale, both, least), (pages.v_scale, v_scale, 2.0**-126)):
        if factor is not None:
            scales.unflatten(0, (batch, -1)).copy_(_positive(factor, zero)[:, None])
    return over_pages(paged, pages, softmax_scale)


def _positive(factor: torch.Tensor, zero: float) -> torch.Tensor:
    """Factors as the scales of pages, which kernels need positive: at least `zero`, a number that rounds to zero in
    what it multiplies. Negative ones become NaN, because to find and refuse them would wait for a GPU."""
    return torch.where(factor >= 0.0, factor.clamp_min(zero), torch.nan)


def over_pages(backend: Backend, pages: KVPages, softmax_scale: float, new_keys: int = 0) -> Attend:
    """Attention by a backend over pages that exist for this call. `new_keys` is `Backend.attention`'s."""

    def attend(q: torch.Tensor, causal: bool) -> torch.Tensor:
        params = AttentionParams(None, q.shape[2], causal, softmax_scale)
        out, _ = backend.attention(q.transpose(1, 2), pages, params, new_keys=new_keys)
        return out.transpose(1, 2)

    return attend


def over_rows(
    k: torch.Tensor, v: torch.Tensor, softmax_scale: float, rotate_keys: bool, rope: DenseRope | None
) -> Attend:
    """Attention by FlashAttention-3 over K and V that are quantized here, without their means.

    Single-level accumulation loses accuracy if V has a mean (`accumulation`), so V's mean is subtracted and added to
    the output. K's mean shifts all scores of a query by the same number, which cancels in the softmax.
    """
    fa3.check(k.device, k.dtype)
    if rope is not None:  # in torch, and K is rounded to its dtype
        (cos, sin, interleaved), (q_cos, q_sin, _) = rope.k, rope.q
        k = apply_rope(k, cos[:, None], sin[:, None], interleaved=interleaved)
        rope.out.copy_(apply_rope(rope.queries, q_cos[:, None], q_sin[:, None], interleaved=interleaved))
    k, k_scale, _ = fa3.quantize(k, rotate_keys=rotate_keys, subtract_mean=True, heads_per_scale=1)
    v, v_scale, v_mean = fa3.quantize(v, rotate_keys=False, subtract_mean=True, heads_per_scale=1)
    assert v_mean is not None

    def attend(q: torch.Tensor, causal: bool) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        q_fp8, q_scale, _ = fa3.quantize(q, rotate_keys=rotate_keys, subtract_mean=False, heads_per_scale=group)
        out = fa3.attention(q_fp8, k, v, q_scale, k_scale, v_scale, causal=causal, softmax_scale=softmax_scale)
        out.unflatten(1, (-1, group)).add_(v_mean[:, :, None, None])
        return out.to(q.dtype)

    return attend


def padded_size(head_dim: int, v_dim: int) -> int:
    """The smallest head_dim of dense calls that is large enough for queries and values of these sizes."""
    largest = max(head_dim, v_dim)
    for size in HEAD_DIMS:
        if largest <= size <= MOST_DENSE:
            return size
    raise ValueError(f"no kernel takes a head_dim of {head_dim} and {v_dim}")


def padded(x: torch.Tensor, size: int) -> torch.Tensor:
    """`x [B, H, S, D]` padded with zeros to `size` channels, in the same memory order, with a contiguous last
    dimension.
    """
    if x.shape[3] == size:
        return x if x.stride(3) == 1 else x.contiguous()
    if x.dtype == FP8:
        return padded(x.view(torch.uint8), size).view(FP8)  # the byte 0 is zero; torch cannot pad FP8
    if x.stride(1) < x.stride(2):
        return F.pad(x.transpose(1, 2), (0, size - x.shape[3])).transpose(1, 2)
    return F.pad(x, (0, size - x.shape[3]))
