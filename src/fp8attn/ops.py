"""The functions on pages: check the arguments, choose a backend, run it; as a torch op where something traces or intercepts those.

They work on device state alone and never read it back to the host (but for `reference`, which is a loop over sequences), so they can be
compiled and captured in CUDA graphs. `append` and `attention` are a cache's. `from_dense` (public as `KVPages.from_dense`), `apply_rope`
and `quantize_rows` take dense `[B, H, S, D]` tensors, contiguous or transposed, as models pass them to attention.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd import forward_ad

from ._torch_ops import resolve, unobserved
from .backends import find, load
from .layout import FIELDS, FP8, HEAD_DIMS, KeyDtype, KVPages, check_tensor, key_type
from .params import AttentionParams, BackendName
from .rope import check_device, check_rope, dense_tables


def append(
    pages: KVPages,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    rope_cos: torch.Tensor | None = None,
    rope_sin: torch.Tensor | None = None,
    rope_interleaved: bool = False,
    static_scales: bool = False,
    backend: BackendName = "auto",
) -> torch.Tensor | None:
    """Quantize new tokens onto the end of every sequence: `x_8bit = round((x - mean) / scale)`; K is rotated first (`rotation.rotate`),
    after RoPE, where the pages' `rotate_keys` says so.

    A page's scale is set by its first token, with headroom, and grows when a later token does not fit (`numerics.settle`). So what is
    stored does not depend on how tokens are divided over calls. The table must name a page for every token:
    `PagedKVCache.append` sees to that, and is what most users want.

    Args:
        pages: the cache; its bytes and lengths are changed in place.
        k, v: `[T, num_kv_heads, head_dim]`, the sequences' new tokens one after another, last dimension contiguous.
        q: `[T, num_q_heads, head_dim]`, the same tokens' queries, to be rotated as K is; needs `rope_cos` and `rope_sin`.
        cu_seqlens: `[num_seqs + 1]` int32, where each sequence's tokens begin in T. None: every sequence has T / num_seqs.
        max_seqlen: the most new tokens of any sequence; needed with `cu_seqlens`. It must not be less: tokens would be left out.
        rope_cos, rope_sin: `[T, R / 2]`: K is rotated first (see `rope.apply_rope`); V never is.
        rope_interleaved: which channels are pairs.
        static_scales: the pages' scales are given and stay (calibrated); larger values saturate.
        backend: `"auto"`, `"hopper"`, `"triton"` or `"reference"`.
    Returns:
        The rotated queries `[T, num_q_heads, head_dim]` in q's dtype, for `attention`; None without `q`.
    Raises:
        ValueError: a shape, dtype or backend that does not fit, with what would.
        RuntimeError: a gradient is wanted.
    """
    name = check_append(pages, k, v, q, rope_cos, rope_sin, backend)
    max_seqlen = _longest(k, pages, cu_seqlens, max_seqlen, "cu_seqlens", "max_seqlen")
    return run_append(
        name, pages, k, v, q=q, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, rope_cos=rope_cos, rope_sin=rope_sin,
        rope_interleaved=rope_interleaved, static_scales=static_scales,
    )  # fmt: skip


def attention(
    q: torch.Tensor,
    pages: KVPages,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    rope_cos: torch.Tensor | None = None,
    rope_sin: torch.Tensor | None = None,
    rope_interleaved: bool = False,
    return_lse: bool = False,
    backend: BackendName = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of new queries over the cache: `softmax(mask(softcap(softmax_scale * q k^T))) v`.

    The queries of a sequence are its last tokens, already appended: query `i` of `n` has position `cache_seqlens - n + i`. One call serves
    prefill, chunked prefill and decode.

    Args:
        q: `[T, num_q_heads, head_dim]`, last dimension contiguous; `num_q_heads` a multiple of `num_kv_heads` (GQA, MQA).
        pages: the cache.
        backend: `"auto"`, `"hopper"`, `"triton"` or `"reference"`.

    `AttentionParams` describes the other arguments. Here `softmax_scale` may be None (then it is `1 / sqrt(head_dim)`), and `window` and
    `softcap` (then there is none). `max_seqlen_q` is needed with `cu_seqlens_q` alone. `window` needs `causal`. `append` can apply RoPE to
    queries as well, in the same launch as to K: pass those without tables.

    Returns:
        `out` of q's shape and dtype, contiguous. Rows that see no key are zero, and so are rows behind the last sequence's. With
        `return_lse` also `lse [T, num_q_heads]` float32: `-inf` in rows that see neither a key nor a sink, unspecified behind the last
        sequence's.
    Raises:
        ValueError: a shape, dtype, option or backend that does not fit, with what would.
        RuntimeError: a gradient is wanted.
    """
    if q.dim() == 4:
        raise ValueError(
            f"q must be [T, num_q_heads, head_dim]; got four dimensions {tuple(q.shape)}: pass q.transpose(1, 2).flatten(0, 1) if q is "
            "[B, num_q_heads, S, head_dim], q.flatten(0, 1) if it is [B, S, num_q_heads, head_dim]"
        )
    max_seqlen_q = _longest(q, pages, cu_seqlens_q, max_seqlen_q, "cu_seqlens_q", "max_seqlen_q")
    _check_tokens(q, "q", pages.device)
    _, num_q_heads, q_dim = q.shape
    num_kv_heads, head_dim = pages.num_kv_heads, pages.head_dim
    if num_q_heads % num_kv_heads or q_dim != head_dim:
        raise ValueError(f"q must be [T, num_q_heads, {head_dim}] with num_q_heads a multiple of {num_kv_heads}; got {tuple(q.shape)}")
    if window is not None and (not causal or window < 1):
        raise ValueError(
            f"window counts the visible keys of a causal query, so it needs causal=True and window >= 1; got {causal=}, {window=}"
        )
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be positive (None for no cap); got {softcap}")
    if sinks is not None:
        check_tensor(sinks, "sinks, one logit per query head,", (num_q_heads,), None, q.device)
    if leftpad_k is not None:
        check_tensor(leftpad_k, "leftpad_k, one count per sequence,", (pages.num_seqs,), torch.int32, q.device)
    if rope_cos is not None or rope_sin is not None:
        _given_together(rope_cos, rope_sin)
        check_rope(q, rope_cos, rope_sin)
    scale = 1 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
    params = AttentionParams(
        cu_seqlens_q, max_seqlen_q, causal, scale, window or 0, softcap or 0.0, sinks, leftpad_k, rope_cos, rope_sin, rope_interleaved,
        return_lse,
    )  # fmt: skip
    if unobserved(q):
        out, lse = find(backend, q.device, q.dtype).attention(q, pages, params)
    else:
        out, lse = torch.ops.fp8attn.attention(q, *pages.state, *params, resolve(backend, q))
    return (out, lse) if return_lse else out


def from_dense(
    k: torch.Tensor,
    v: torch.Tensor,
    rope_cos: torch.Tensor | None,
    rope_sin: torch.Tensor | None,
    rope_interleaved: bool,
    k_mean: torch.Tensor | None,
    v_mean: torch.Tensor | None,
    key_dtype: KeyDtype,
    rotate_keys: bool,
    backend: BackendName,
) -> KVPages:
    """`KVPages.from_dense`, which describes the arguments."""
    _check_dense(k, "k")
    _check_dense(v, "v")
    if k.shape != v.shape or k.dtype != v.dtype or k.device != v.device or k.shape[3] not in HEAD_DIMS or not k.numel():
        raise ValueError(
            f"k and v must be of one shape [B, num_kv_heads, S, head_dim], dtype and device, not empty, head_dim one of {HEAD_DIMS}; "
            f"got {tuple(k.shape)} {k.dtype} on {k.device} and {tuple(v.shape)} {v.dtype} on {v.device}"
        )
    for name, mean in (("k_mean", k_mean), ("v_mean", v_mean)):
        if mean is not None:
            check_tensor(mean, name, (k.shape[1], k.shape[3]), torch.float32, k.device)
    if k.dtype == FP8:
        raise ValueError(
            f"k and v are {FP8} already: pass them in 16 bits, before they are rounded, or attend over them as they are with "
            "fp8attn.scaled_dot_product_attention_quantized"
        )
    cos, sin = _tables(k, rope_cos, rope_sin, rope_interleaved)
    return run_from_dense(
        resolve(backend, k), k, v, rope_cos=cos, rope_sin=sin, rope_interleaved=rope_interleaved, k_mean=k_mean, v_mean=v_mean,
        key_dtype=key_type(key_dtype), rotate_keys=rotate_keys,
    )  # fmt: skip


def apply_rope(
    x: torch.Tensor, rope_cos: torch.Tensor, rope_sin: torch.Tensor, *, rope_interleaved: bool = False, backend: BackendName = "auto"
) -> torch.Tensor:
    """RoPE on a dense `x [B, H, S, D]`, with the tables of `KVPages.from_dense`; the result has the order in memory of `x`.

    Raises:
        ValueError: a shape, dtype or backend that does not fit, with what would.
        RuntimeError: a gradient is wanted.
    """
    _check_dense(x, "x")
    cos, sin = _tables(x, rope_cos, rope_sin, rope_interleaved)
    if unobserved(x):
        return find(backend, x.device, x.dtype).apply_rope(x, cos, sin, rope_interleaved)
    return torch.ops.fp8attn.apply_rope(x, cos, sin, rope_interleaved, resolve(backend, x))


def quantize_rows(
    x: torch.Tensor,
    *,
    rope_cos: torch.Tensor | None = None,
    rope_sin: torch.Tensor | None = None,
    rope_interleaved: bool = False,
    rotate_keys: bool = False,
    means: bool = False,
    heads_per_scale: int = 1,
    dtype: KeyDtype = "e4m3",
    backend: BackendName = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """A dense tensor in 8 bits in its own order of memory, for kernels that know no pages: `x ~ x_8bit * scale + mean`.

    Args:
        x: `[B, H, S, D]`, any strides but for the last dimension, which is contiguous; nothing empty.
        rope_cos, rope_sin, rope_interleaved: apply RoPE first (`KVPages.from_dense`).
        rotate_keys: then rotate it (`rotation.rotate`): keys, and queries likewise. The equation and the mean are of the rotated tensor.
        means: subtract each head's mean over the sequence (of K and V: it does not change attention but by `mean` added to the output,
            for V). All of it, not a sample's: what is left of V's is what single-level sums lose (`accumulation`).
        heads_per_scale: neighboring heads that share a scale (the queries of a KV head).
        dtype: `"e4m3"` or `"int8"`.
    Returns:
        `x_8bit [B, H, S, D]` float8_e4m3fn or int8, in the order of memory of `x`; `scale [B, H / heads_per_scale]` float32 (of E4M3
        powers of two); `mean [B, H, D]` float32, None without `means`.
    Raises:
        ValueError: a shape, dtype or backend that does not fit, with what would.
        RuntimeError: a gradient is wanted.
    """
    _check_dense(x, "x")
    if not x.numel() or heads_per_scale < 1 or x.shape[1] % heads_per_scale:
        raise ValueError(
            f"x must not be empty, and heads_per_scale must be a divisor of its heads; got x {tuple(x.shape)} and {heads_per_scale=}"
        )
    cos, sin = _tables(x, rope_cos, rope_sin, rope_interleaved)
    options = dict(
        rope_cos=cos, rope_sin=sin, rope_interleaved=rope_interleaved, rotate_keys=rotate_keys, means=means,
        heads_per_scale=heads_per_scale, dtype=key_type(dtype),
    )  # fmt: skip
    if unobserved(x):
        return find(backend, x.device, x.dtype).quantize_rows(x, **options)
    x_8bit, scale, mean = torch.ops.fp8attn.quantize_rows(x, *options.values(), resolve(backend, x))
    return x_8bit, scale, mean if means else None


def run_append(
    name: str, pages: KVPages, k: torch.Tensor, v: torch.Tensor, *, q: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
    max_seqlen: int, rope_cos: torch.Tensor | None, rope_sin: torch.Tensor | None, rope_interleaved: bool, static_scales: bool,
) -> torch.Tensor | None:  # fmt: skip
    """`append` by the backend `name`, of checked arguments; without `cu_seqlens` every sequence has `max_seqlen` new tokens."""
    make = torch.empty if max_seqlen else torch.zeros  # an idle step launches nothing that writes
    q_out = None if q is None else make(q.shape, dtype=q.dtype, device=q.device)
    if unobserved(k):
        load(name).append(
            pages, k, v, q=q, q_out=q_out, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, rope_cos=rope_cos, rope_sin=rope_sin,
            rope_interleaved=rope_interleaved, static_scales=static_scales,
        )  # fmt: skip
    else:
        torch.ops.fp8attn.append(
            k, v, *pages.state, q, q_out, cu_seqlens, max_seqlen, rope_cos, rope_sin, rope_interleaved, static_scales, name
        )  # fmt: skip
    return q_out


def run_from_dense(name: str, k: torch.Tensor, v: torch.Tensor, **options: Any) -> KVPages:
    """`from_dense` by the backend `name`, of checked arguments: all options, with tables as `rope.dense_tables` makes them."""
    if unobserved(k):
        return load(name).from_dense(k, v, **options)
    pool, table, lengths = torch.ops.fp8attn.from_dense(k, v, *options.values(), name)
    fixed = (options[field] for field in FIELDS[3:])
    return KVPages(pool, table, lengths, *fixed)


def check_append(cache, k, v, q, rope_cos, rope_sin, backend: str) -> str:
    """All of `append`'s checks that need no lengths: raises as it does, returns the backend's name. `cache` is whatever has
    `num_kv_heads`, `head_dim` and `device`: the pages, or a `PagedKVCache` that may have none yet."""
    device = cache.device
    _check_tokens(k, "k", device)
    if k.shape != v.shape or k.shape[1:] != (cache.num_kv_heads, cache.head_dim) or k.dtype != v.dtype:
        raise ValueError(
            f"k and v must both be [T, {cache.num_kv_heads}, {cache.head_dim}] and of one dtype; "
            f"got {tuple(k.shape)} {k.dtype} and {tuple(v.shape)} {v.dtype}"
        )
    _check_tokens(v, "v", device)
    _given_together(rope_cos, rope_sin)
    if rope_cos is not None:
        check_rope(k, rope_cos, rope_sin)
    if q is not None:
        _check_tokens(q, "q", device)
        if rope_cos is None or q.shape[::2] != k.shape[::2]:
            raise ValueError(
                f"append applies RoPE to q, so q must be [{k.shape[0]}, num_q_heads, {k.shape[2]}] and come with rope_cos and rope_sin; "
                f"got {tuple(q.shape)} {'without' if rope_cos is None else 'with'} them; leave q out if it needs no RoPE"
            )
    return resolve(backend, k)


def _check_tokens(x: torch.Tensor, name: str, device: torch.device) -> None:
    if x.dim() != 3 or x.stride(-1) != 1:
        raise ValueError(
            f"{name} must be [T, heads, head_dim] with the last dimension contiguous; got shape {tuple(x.shape)}, strides {x.stride()}"
        )
    if x.device != device:
        raise ValueError(f"the cache is on {device} and {name} is on {x.device}; move one of them")
    check_derivatives(x)


def derivative_reason(*tensors: torch.Tensor) -> str | None:
    """Why FP8, which has neither derivatives nor batching rules, cannot take these tensors; None: it can."""
    if torch.is_grad_enabled():
        for x in tensors:  # `any` costs a microsecond more
            if x.requires_grad:
                return "a gradient is wanted, and no gradient flows through FP8; use torch.no_grad() or torch.inference_mode()"
    if torch._C._are_functorch_transforms_active():  # as torch.autograd.Function checks it; there is no public function
        return "a transform of torch.func is active (vmap, grad, jvp, ...), and FP8 attention has no rule for it"
    # Dynamo guards on the level, but its tensors have no tangents: what is compiled inside of a level may be called with some.
    if forward_ad._current_level >= 0 and (torch.compiler.is_compiling() or any(map(_has_tangent, tensors))):
        return "a forward-mode derivative is wanted, and no tangent flows through FP8"
    return None


def _has_tangent(x: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(x).tangent is not None


def check_derivatives(*tensors: torch.Tensor) -> None:
    """Raises RuntimeError where a derivative is wanted or a transform of torch.func is active."""
    reason = derivative_reason(*tensors)
    if reason is not None:
        raise RuntimeError(f"FP8 pages are for inference: {reason}")


def _check_dense(x: torch.Tensor, name: str) -> None:
    if x.dim() != 4 or x.stride(3) != 1:
        raise ValueError(
            f"{name} must be [B, heads, S, head_dim] with the last dimension contiguous; got shape {tuple(x.shape)}, strides {x.stride()}"
        )
    check_derivatives(x)


def _given_together(rope_cos, rope_sin) -> None:
    if (rope_cos is None) != (rope_sin is None):
        raise ValueError(f"give rope_cos and rope_sin together, or neither; rope_{'cos' if rope_cos is None else 'sin'} is None")


def _tables(x: torch.Tensor, rope_cos, rope_sin, rope_interleaved: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The tables for a dense `x` as the kernels take them, `[B, S, R / 2]`."""
    _given_together(rope_cos, rope_sin)
    if rope_cos is None:
        return None, None
    check_device(x, rope_cos, rope_sin)
    batch, _, length, head_dim = x.shape
    return dense_tables(rope_cos, rope_sin, batch, length, head_dim, rope_interleaved)


def _longest(x: torch.Tensor, pages: KVPages, cu_seqlens, max_seqlen, cu_name: str, max_name: str) -> int:
    """The longest sequence of new tokens; every sequence's length where `cu_seqlens` is None."""
    if cu_seqlens is not None:
        if max_seqlen is None:
            raise ValueError(f"{cu_name} needs {max_name}, the most tokens of one of its sequences, as a Python int")
        if isinstance(max_seqlen, torch.Tensor) or max_seqlen < 0:
            raise ValueError(f"{max_name} must be a Python int >= 0, because the host sizes launches by it; got {max_seqlen!r}")
        check_tensor(cu_seqlens, cu_name, (pages.num_seqs + 1,), torch.int32, x.device)
        return max_seqlen
    if not x.shape[0]:
        return 0
    if not pages.num_seqs or x.shape[0] % pages.num_seqs:
        raise ValueError(f"{x.shape[0]} tokens do not divide over {pages.num_seqs} sequences; give {cu_name} and {max_name}")
    return x.shape[0] // pages.num_seqs
