"""Attention on operands that are FP8 already, with the signature of PyTorch's experimental op and two-level
accumulation.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

from .._torch_ops import register, unobserved
from ..checks import check_flags, check_is_tensor, check_number, check_tensor
from ..derivatives import check_derivatives, derivative_reason
from ..formats.codec import FP8
from ..params import DENSE_BACKENDS, MOST_DENSE, DenseBackendName, check_backend
from .strategies import Scale, fp8_strategy, padded, padded_size

PER_HEAD = 0  # torch's DescaleType.PER_HEAD, a member of an IntEnum


def scaled_dot_product_attention_quantized(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    q_descale_type: int = PER_HEAD,
    k_descale_type: int = PER_HEAD,
    v_descale_type: int = PER_HEAD,
    *,
    backend: DenseBackendName = "auto",
) -> torch.Tensor:
    """Attention on E4M3 operands, a replacement of
    `torch.nn.attention.experimental._scaled_dot_product_attention_quantized`.

        out = softmax(scale * q_descale * k_descale * query key^T) value * v_descale

    PyTorch's op sums a whole row in the tensor core, which keeps 14 bits of the sum. `"hopper"` sums 128 products there
    and adds these sums in FP32. Up to 128 query rows for each KV head it computes in 16 bits (docs/kernels.md).

    Args:
        query: `[B, Hq, L, E]` float8_e4m3fn, any strides.
        key, value: `[B, H, S, E]` and `[B, H, S, Ev]` float8_e4m3fn, any strides. E and Ev are at most 256, and Hq is a
            multiple of H.
        is_causal: query i sees keys 0 to i + S - L, as in PyTorch's op. Rows that see no key are zero.
        scale: default `1 / sqrt(E)`.
        q_descale, k_descale, v_descale: `[B, H]` float32, not negative; None: ones. The query heads of a GQA group
            share one. A negative one raises on a CPU; on a GPU, where that would wait, its head is NaN (with `"fa3"`:
            as that kernel computes it).
        q_descale_type, k_descale_type, v_descale_type: `PER_HEAD`, PyTorch's only type.
        backend: `"auto"`, `"hopper"`, `"triton"`, `"reference"`, or `"fa3"`, an installed FlashAttention-3.
    Returns:
        `[B, Hq, L, Ev]` bfloat16, in the memory order of query if Ev = E.
    Raises:
        ValueError: a shape, dtype, device or backend does not fit; the message says what would.
        RuntimeError: a transform of torch.func is active (vmap, grad, jvp). An input that requires a gradient causes a
            warning.
    """
    tensors = {"query": query, "key": key, "value": value}
    for name, x in tensors.items():
        check_is_tensor(x, name, "[B, H, S, D]")
        if x.dtype != FP8 or x.device != query.device:
            raise ValueError(
                f"{name} must be {FP8} on {query.device} (fp8attn.scaled_dot_product_attention takes 16 bits and "
                f"quantizes); got {x.dtype} on {x.device}"
            )
    shapes = tuple(query.shape), tuple(key.shape), tuple(value.shape)
    if (
        not query.dim() == key.dim() == value.dim() == 4
        or key.shape[:3] != value.shape[:3]
        or query.shape[::3] != key.shape[::3]
        or not key.shape[1]
        or query.shape[1] % key.shape[1]
        or max(query.shape[3], value.shape[3]) > MOST_DENSE
    ):
        raise ValueError(
            f"query, key and value must be [B, Hq, L, E], [B, H, S, E] and [B, H, S, Ev] with Hq a multiple of H, E "
            f"and Ev up to {MOST_DENSE}; got {shapes[0]}, {shapes[1]} and {shapes[2]}"
        )
    check_flags(is_causal=is_causal)
    if scale is not None and not torch.compiler.is_compiling():
        check_number(scale, "scale", " (None for 1 / sqrt(E))")
    check_backend(backend, DENSE_BACKENDS)
    kinds = {"q": q_descale_type, "k": k_descale_type, "v": v_descale_type}
    descales = {"q": q_descale, "k": k_descale, "v": v_descale}
    for name, descale in descales.items():
        if kinds[name] != PER_HEAD:
            raise ValueError(f"{name}_descale_type must be DescaleType.PER_HEAD ({PER_HEAD}), got {kinds[name]}")
        if descale is not None:
            shape = query.shape[0], key.shape[1]
            check_tensor(
                descale, f"{name}_descale [B, H]", shape, torch.float32, query.device, contiguous=False
            )  # fmt: skip
    inputs: list[Any] = [query, key, value, *descales.values()]
    if derivative_reason(*(x for x in inputs if x is not None)) is not None:
        inputs = [None if x is None else x.detach() for x in inputs]
        check_derivatives(*(x for x in inputs if x is not None))  # a transform of torch.func is active
        warnings.warn(
            "scaled_dot_product_attention_quantized has no derivative: no gradient will reach its inputs", stacklevel=2
        )
    scale = 1 / math.sqrt(query.shape[3]) if scale is None else scale
    run = _attend if unobserved(query) else torch.ops.fp8attn.sdpa_quantized
    query, key, value, q_descale, k_descale, v_descale = inputs
    return run(query, key, value, is_causal, scale, q_descale, k_descale, v_descale, backend)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float, q_descale: Scale,
    k_descale: Scale, v_descale: Scale, backend: DenseBackendName,
) -> torch.Tensor:  # fmt: skip
    """The computation, with checked arguments."""
    for name, descale in (("q", q_descale), ("k", k_descale), ("v", v_descale)):
        if descale is not None and descale.device.type == "cpu" and (descale < 0.0).any():
            raise ValueError(
                f"{name}_descale must not be negative; got {descale.min().item()}: negate {name}'s own values"
            )
    if not query.numel() or not value.numel():
        return _empty_out(query, key, value).zero_()
    size = padded_size(query.shape[3], value.shape[3])
    q, k, v = (padded(x, size) for x in (query, key, value))
    out = fp8_strategy(backend, k, v, q_descale, k_descale, v_descale, scale)(q, is_causal)
    if q is query and value.shape[3] == size:
        return out
    return _empty_out(query, key, value).copy_(out[..., : value.shape[3]])


def _empty_out(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
    if query.shape[3] == value.shape[3]:
        return torch.empty_like(query, dtype=torch.bfloat16)
    return query.new_empty((*query.shape[:3], value.shape[3]), dtype=torch.bfloat16)


register(
    "sdpa_quantized(Tensor query, Tensor key, Tensor value, bool is_causal, float scale, Tensor? q_descale, Tensor? "
    "k_descale, Tensor? v_descale, str backend) -> Tensor",
    _attend,
    _empty_out,
)
