"""`scaled_dot_product_attention` in FP8, with torch's signature and semantics.

K and V are quantized in one pass (`strategies`). Queries stay in their dtype until the attention kernel rounds them. A
call that has a `fallback_reason` goes to torch's own function in the inputs' dtype, so no mask and no dropout is
ignored.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from .._torch_ops import register, unobserved
from ..backends import Backend, find, unsupported_reason
from ..backends.base import refused_dtype
from ..checks import check_flags, check_is_tensor, check_number
from ..derivatives import derivative_reason
from ..formats.codec import DEFAULT_KEY_DTYPE, KeyDtype, codec_of
from ..formats.kv_format import KVFormat
from ..formats.rope import DenseRope, Rope, dense_rope, rope_of
from ..params import DENSE_BACKENDS, MOST_DENSE, BackendName, DenseBackendName, check_backend
from ..precompile import calls, first
from .strategies import over_pages, over_rows, padded, padded_size

logger = logging.getLogger(__name__)

DIFFER = "query, key and value differ in dtype or device"
DTYPES = torch.bfloat16, torch.float16, torch.float32  # which FP8 takes, and which autocast casts


def fallback_reason(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str | None:
    """Why a call of `scaled_dot_product_attention` goes to torch's own function, in the inputs' dtype; None: it runs in
    FP8.

    It depends on shapes, dtypes (under autocast, those that torch's SDPA computes in) and the device, never on values.
    """
    if attn_mask is not None:
        return "a mask is given; FP8 attention is causal or full"
    if dropout_p > 0.0:
        return "dropout is for training, FP8 attention for inference"
    if (reason := derivative_reason(query, key, value)) is not None:
        return reason
    if query.is_nested or key.is_nested or value.is_nested:
        return "nested tensors are not supported"
    dtype, k_dtype, v_dtype, device = query.dtype, key.dtype, value.dtype, query.device
    if (low := _autocast_dtype(device)) is not None:
        dtype, k_dtype, v_dtype = (low if each in DTYPES else each for each in (dtype, k_dtype, v_dtype))
    if key.device != device or value.device != device:
        return DIFFER
    refuse = _refusal if unobserved(query) else _refusal.__wrapped__  # symbolic sizes are no keys of a cache
    positive = scale is None or scale > 0.0
    return refuse((dtype, k_dtype, v_dtype), device, query.shape, key.shape, value.shape, positive, enable_gqa)


@lru_cache(maxsize=4096)
def _refusal(
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype], device: torch.device, q_shape: torch.Size,
    k_shape: torch.Size, v_shape: torch.Size, positive: bool, enable_gqa: bool,
) -> str | None:  # fmt: skip
    """The `fallback_reason` of query, key and value of these dtypes and shapes, on one device. `positive`: the scale
    is.
    """
    dtype = dtypes[0]
    if dtypes[1] != dtype or dtypes[2] != dtype:
        return DIFFER
    # torch broadcasts such shapes, or raises its own error.
    dims = len(q_shape)
    if len(k_shape) != dims or len(v_shape) != dims or dims < 2:
        return "query, key and value differ in their number of dimensions"
    if q_shape[:-3] != k_shape[:-3]:
        return "query and key differ in batch"
    if k_shape[:-1] != v_shape[:-1]:
        return "key and value differ in batch, in their number of heads or in length"
    if q_shape[-1] != k_shape[-1]:
        return "query and key differ in head_dim"
    if 0 in q_shape or 0 in k_shape or 0 in v_shape:
        return "a dimension is empty"
    if dims > 2 and q_shape[-3] != k_shape[-3] and (not enable_gqa or q_shape[-3] % k_shape[-3]):
        return (
            "query and key differ in their number of heads: pass enable_gqa=True, and a multiple of key's heads as "
            "query's"
        )
    if q_shape[-1] > MOST_DENSE or v_shape[-1] > MOST_DENSE:
        return f"a head_dim above {MOST_DENSE} is not supported"
    if not positive:
        return "the scale is not positive"
    if device.type == "cpu":
        return None if dtype in DTYPES else f"on a CPU FP8 attention takes bfloat16, float16 and float32, not {dtype}"
    # Dynamo cannot query the machine. The op does so when it runs, and raises an error if no backend can run.
    return refused_dtype(dtype) if torch.compiler.is_compiling() else unsupported_reason("triton", device, dtype)


def _checked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, is_causal: bool,
    enable_gqa: bool, key_dtype: KeyDtype, rotate_keys: bool, backend: DenseBackendName,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Query, key and value as autocast casts them. Raise ValueError for arguments that are none of their type."""
    codec_of(key_dtype)  # raises UsageError
    check_backend(backend, DENSE_BACKENDS)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            check_is_tensor(x, name, "[B, H, S, D]")
    if not type(is_causal) is type(enable_gqa) is type(rotate_keys) is bool:
        check_flags(is_causal=is_causal, enable_gqa=enable_gqa, rotate_keys=rotate_keys)
    if scale is not None and not torch.compiler.is_compiling():
        check_number(scale, "scale", " (None for 1 / sqrt(head_dim))")
    return autocast(query, key, value)


def log_fallback(reason: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Log at DEBUG that a call goes to torch's own function. Dynamo cannot trace a logger: in compiled code it logs
    nothing.
    """
    if not torch.compiler.is_compiling() and logger.isEnabledFor(logging.DEBUG):
        logger.debug("torch's own scaled_dot_product_attention computes %s: %s", _described(query, key, value), reason)


def _described(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str:
    """The names, shapes, dtypes and devices of the given tensors, for an error."""
    tensors = (("query", query), ("key", key), ("value", value))
    return ", ".join(
        f"{name} {'nested' if x.is_nested else list(x.shape)} {x.dtype} on {x.device}" for name, x in tensors
    )


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast casts SDPA's inputs to on `device`; None: it is off."""
    kind = device.type
    enabled = kind in ("cpu", "cuda", "xpu") and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if enabled else None


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors, all on one device, in the dtypes in which torch's SDPA computes. They change only inside
    `torch.autocast`.
    """
    low = _autocast_dtype(tensors[0].device)
    return tensors if low is None else tuple(x.to(low) if x.dtype in DTYPES else x for x in tensors)


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    key_dtype: KeyDtype = DEFAULT_KEY_DTYPE,
    rotate_keys: bool = True,
    backend: DenseBackendName = "auto",
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` in FP8. K and V are quantized in the call.

        out = softmax(mask(scale * query key^T)) value

    Args:
        query: `[..., Hq, L, E]` bfloat16 or float16 (also float32 on a CPU), any strides. `torch.autocast` casts all
            three, as in torch.
        key, value: `[..., H, S, E]` and `[..., H, S, Ev]` in query's dtype. E and Ev are at most 256. If they differ or
            are not in `formats.spec.HEAD_DIMS` up to 256, the tensors are copied and padded with zeros.
        attn_mask, dropout_p: a call with a mask or with dropout goes to torch's SDPA, like every call that has a
            `fallback_reason`. The reason is logged at the level DEBUG.
        is_causal: query i sees keys 0 to i, aligned to the first key, as in torch.
            (`scaled_dot_product_attention_quantized` aligns to the last key.)
        scale: default `1 / sqrt(E)`.
        enable_gqa: Hq may be a multiple of H.
        key_dtype: the format of keys, as `PagedKVCache` takes it. Values are E4M3. `"fa3"` has no INT8, so its keys are
            always E4M3.
        rotate_keys: rotate queries and keys before quantization (`rotation.rotate`). This makes rounding errors smaller
            and does not change scores.
        backend: `"auto"`, `"hopper"`, `"triton"`, `"reference"`, or `"fa3"`, an installed FlashAttention-3
            (`backends/fa3.py`). A backend other than `"auto"` refuses calls that have a `fallback_reason`.
    Returns:
        `[..., Hq, L, Ev]` in query's dtype and memory order.
    Raises:
        ValueError: the key_dtype is unknown, or a named backend cannot run here or cannot serve this call; the message
            has the reason.
    """
    query, key, value = _checked(query, key, value, scale, is_causal, enable_gqa, key_dtype, rotate_keys, backend)
    reason = fallback_reason(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if reason is not None:
        if backend != "auto":
            raise ValueError(
                f"backend {backend!r} cannot serve this call: {reason}; with backend='auto' it goes to torch's own "
                f"SDPA. Got {_described(query, key, value)}"
            )
        log_fallback(reason, query, key, value)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    options = None, None, is_causal, scale, key_dtype, rotate_keys, backend
    return in_batches(run_dense, query, key, value, *options)


def in_batches(
    run: Callable[..., torch.Tensor], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *options: Any
) -> torch.Tensor:
    """`run` of query, key and value as `[B, H, S, D]`. The result has the other dimensions of query."""
    out = run(batched(query), batched(key), batched(value), *options)
    return out if query.dim() == 4 else out.view(*query.shape[:-1], value.shape[-1])


def rope_scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rope_cos: torch.Tensor,
    rope_sin: torch.Tensor,
    *,
    key_rope_cos: torch.Tensor | None = None,
    key_rope_sin: torch.Tensor | None = None,
    rope_interleaved: bool = False,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    key_dtype: KeyDtype = DEFAULT_KEY_DTYPE,
    rotate_keys: bool = True,
    backend: DenseBackendName = "auto",
) -> torch.Tensor:
    """`scaled_dot_product_attention` with RoPE (`rope.apply_rope`) on queries and keys.

    The launch that quantizes K and V applies it. Keys are rounded once, after RoPE. Queries are first rounded to their
    dtype after RoPE, as if the caller had applied RoPE. (`"fa3"` rounds keys to their dtype, too, and applies RoPE in
    torch.)

    Args:
        query, key, value: `[B, H, S, D]`, as `scaled_dot_product_attention` takes them.
        rope_cos, rope_sin: `[L, R / 2]` and other forms (`rope.dense_rope`), tables for the queries. For a position
            offset, pass a slice of longer tables.
        key_rope_cos, key_rope_sin: tables for the keys, `[S, R / 2]` and other forms. None: those of the queries.
        rope_interleaved: pairs are `(0, 1), (2, 3), ...` (GPT-J); otherwise `(0, R/2), (1, R/2 + 1), ...` (NeoX,
            Llama).
        is_causal, scale, enable_gqa, key_dtype, rotate_keys, backend: as `scaled_dot_product_attention` takes them.
    Returns:
        `[B, Hq, L, Ev]` in query's dtype and memory order.
    Raises:
        ValueError: the tables do not fit, the key_dtype is unknown, the backend cannot run here, or the call has a
            `fallback_reason` (then apply RoPE first, and call `scaled_dot_product_attention`).
    """
    key_rope = rope_of(key_rope_cos, key_rope_sin, rope_interleaved, prefix="key_")
    query, key, value = _checked(query, key, value, scale, is_causal, enable_gqa, key_dtype, rotate_keys, backend)
    reason = fallback_reason(query, key, value, None, 0.0, is_causal, scale, enable_gqa)
    if reason is None and query.dim() != 4:
        reason = "query, key and value must have four dimensions"
    if reason is not None:
        raise ValueError(
            f"FP8 attention cannot serve this call: {reason}; apply RoPE to query and key, and call "
            f"scaled_dot_product_attention. Got {_described(query, key, value)}"
        )
    rope = rope_of(rope_cos, rope_sin, rope_interleaved)
    if rope is None:
        raise ValueError("give rope_cos and rope_sin together; scaled_dot_product_attention needs none")
    q, k, v = batched(query), batched(key), batched(value)
    q_rope, k_rope = dense_rope(q, rope), dense_rope(k, key_rope or rope)
    return run_dense(q, k, v, q_rope, k_rope, is_causal, scale, key_dtype, rotate_keys, backend)


def run_dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_rope: Rope | None, k_rope: Rope | None, *options: Any
) -> torch.Tensor:
    """`attend_dense`, as one torch op while it is traced. So a graph contains no pages, whose number torch.export would
    fix.
    """
    if unobserved(q):
        return attend_dense(q, k, v, q_rope, k_rope, *options)
    (q_cos, q_sin, interleaved), (k_cos, k_sin, _) = q_rope or (None, None, False), k_rope or (None, None, False)
    return torch.ops.fp8attn.sdpa(q, k, v, q_cos, q_sin, k_cos, k_sin, interleaved, *options)


def attend_dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_rope: Rope | None, k_rope: Rope | None, is_causal: bool,
    scale: float | None,
    key_dtype: KeyDtype, rotate_keys: bool, backend: DenseBackendName,
) -> torch.Tensor:  # fmt: skip
    """Attention of checked tensors `[B, H, S, D]` of one batch size: cut, pad, quantize, attend."""
    (_, _, q_len, head_dim), (_, num_kv_heads, kv_len, _), v_dim = q.shape, k.shape, v.shape[3]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    if is_causal and q_len < kv_len:  # no query sees the keys after these
        kv_len = q_len
        k, v = k[:, :, :q_len], v[:, :, :q_len]
        if k_rope is not None:
            k_rope = Rope(k_rope.cos[:, :q_len], k_rope.sin[:, :q_len], k_rope.interleaved)
    size = padded_size(head_dim, v_dim)
    if not head_dim == v_dim == size:
        q, k, v = padded(q, size), padded(k, size), padded(v, size)
    rope = None if q_rope is None or k_rope is None else DenseRope(k_rope, q_rope, q, torch.empty_like(q))
    if backend == "fa3":
        attend = over_rows(k, v, scale, rotate_keys, rope)
    else:
        new = kv_len if rope is None else 0  # with RoPE, the launch before attention writes the queries, too
        paged, format = _served(
            q.device, q.dtype, backend, q.shape, num_kv_heads, new, is_causal, key_dtype, rotate_keys
        )
        attend = over_pages(paged, paged.from_dense(k, v, format, rope), scale, new)
    q = q if rope is None else rope.out
    if is_causal and q_len > kv_len:  # rows after the last key see all keys
        out = torch.empty_like(q)
        for rows, causal in ((slice(kv_len), True), (slice(kv_len, None), False)):
            out[:, :, rows] = attend(q[:, :, rows], causal)
    else:
        out = attend(q, is_causal)
    return out if v_dim == size else out[..., :v_dim].clone()


@lru_cache(maxsize=4096)
def _served(
    device: torch.device, dtype: torch.dtype, backend: BackendName, shape: tuple[int, ...], num_kv_heads: int,
    new_keys: int, is_causal: bool, key_dtype: KeyDtype, rotate_keys: bool,
) -> tuple[Backend, KVFormat]:  # fmt: skip
    """The backend of a call with queries of this shape, and the format of its pages. Before the first such call on a
    GPU, its two kernels are compiled side by side.

    Args:
        new_keys: the length of K; 0: the call has RoPE, and other kernels.
    """
    batch, heads, q_len, head_dim = shape
    format = KVFormat.of(head_dim, key_dtype, rotate_keys)
    paged = find(backend, device, dtype, format.name)
    if new_keys and paged.name != "reference" and device.type != "cpu":
        layer = calls.Layer(heads, num_kv_heads, head_dim, dtype, paged.name, key_dtype, rotate_keys)
        tokens = min(q_len, new_keys) if is_causal else q_len
        attend = partial(calls.attend_new, layer, batch, tokens, is_causal, new_keys)
        first.prepare(device, [attend, partial(calls.from_dense, layer, new_keys)])
    return paged, format


def batched(x: torch.Tensor) -> torch.Tensor:
    """As `[B, H, S, D]` with the last dimension contiguous: a view if the strides allow it, else a copy."""
    if x.dim() > 4:
        x = x.flatten(0, -4)
    while x.dim() < 4:
        x = x.unsqueeze(0)
    return x if x.stride(-1) == 1 else x.contiguous()


def _sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_cos: torch.Tensor | None, q_sin: torch.Tensor | None,
    k_cos: torch.Tensor | None,
    k_sin: torch.Tensor | None, interleaved: bool, *options: Any,
) -> torch.Tensor:  # fmt: skip
    return attend_dense(q, k, v, rope_of(q_cos, q_sin, interleaved), rope_of(k_cos, k_sin, interleaved), *options)


def sdpa_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any) -> torch.Tensor:
    v_dim = v.shape[3]
    size = padded_size(q.shape[3], v_dim)
    out = torch.empty_like(padded(q, size).transpose(1, 2)).transpose(1, 2)
    return out if v_dim == size else out[..., :v_dim].clone()


register(
    "sdpa(Tensor q, Tensor k, Tensor v, Tensor? q_cos, Tensor? q_sin, Tensor? k_cos, Tensor? k_sin, bool "
    "rope_interleaved, bool is_causal, float? scale, str key_dtype, bool rotate_keys, str backend) -> Tensor",
    _sdpa,
    sdpa_fake,
)
