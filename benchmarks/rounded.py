"""Caches of other systems by definition: K and V rounded as their kernels round them, and attention that rounds nothing
else.

A rounding maps K or V `[..., head_dim]` to the values that a cache gives back; a cache has one for K and one for V. It
depends on one token of one head, so sliding windows are rounded like the other layers.

vLLM 0.33's per-token-head caches (`kv_cache_dtype` of that name; `vllm/v1/attention/ops`), for each token and head:

- `int8_per_token_head`: `code = trunc(x / scale ± 0.5)`, in -128 to 127, with `scale = max(amax / 127, 1e-6)` in FP32.
- `fp8_per_token_head`: `code = e4m3(x / scale)`, with `scale = max(amax / 448, 1e-6)` in FP32.
- `int4_per_token_head`: x is multiplied by random signs and a Hadamard matrix, and rounded to the model's dtype. Then
  `code = trunc(x / scale + zero ± 0.5)`, in 0 to 15, with `scale = max((max - min) / 15, 1e-6)`, whose low four bits
  hold `zero`, and are read as zeros.

Their kernels keep Q and the softmax weights in 16 bits in prompts and in decode steps alike. Here weights stay in FP32,
and so do rotated queries, which favors these caches by the error of BF16.

llama.cpp's `q8_0` (`-ctk q8_0 -ctv q8_0`; `quantize_row_q8_0_ref` in `ggml-quants.c`, rotations of #21038 in
`llama-kv-cache.cpp`), for
each 32 channels of a token and head: `code = round(x / scale)`, halves away from zero, with `scale = amax / 127`, which
is kept in FP16. Before, K is multiplied by the orthogonal Hadamard matrix of the largest power of two that divides
head_dim, and V, 64 channels at a time, by that of 64. Some of its kernels round queries to INT8, too; here they do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from fp8attn.formats.codec import E4M3
from fp8attn.integrations.transformers import fp8_kv_attention, fp8_kv_mask

Rounding = Callable[[torch.Tensor], torch.Tensor]
SMALLEST = 1e-6  # scale
SIGNS_SEED = 0x9E3779B9  # of the first of its rotations, the only one in use


def _half_away(x: torch.Tensor) -> torch.Tensor:
    """Round to integers, halves away from zero, as adding 0.5 and truncating does."""
    return torch.where(x >= 0, x + 0.5, x - 0.5).trunc()


def int8_per_token_head(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp_min(SMALLEST)
    return _half_away(x * (1 / scale)).clamp(-128, 127) * scale


def fp8_per_token_head(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    scale = (x.abs().amax(-1, keepdim=True) / E4M3.max).clamp_min(SMALLEST)
    return E4M3.quantize(x * (1 / scale)).float() * scale


def int4_per_token_head(x: torch.Tensor) -> torch.Tensor:
    dtype, dim, signs = x.dtype, x.shape[-1], _signs(x.shape[-1], x.device)
    x = _hadamard(x.float() * signs).to(dtype).float()
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = ((high - low) / 15).clamp_min(SMALLEST)
    zero = _half_away(-low / scale).clamp(0, 15)
    code = _half_away(x * (1 / scale) + zero).clamp(0, 15)
    read = (scale.view(torch.int32) & -16).view(torch.float32)
    return _hadamard((code - zero) * read) * signs / dim


def q8_0(x: torch.Tensor, rotated: int) -> torch.Tensor:
    """`q8_0` behind a rotation of `rotated` channels at a time."""
    blocks = _hadamard(x.float().unflatten(-1, (-1, rotated))) * rotated**-0.5
    blocks = blocks.reshape(*x.shape[:-1], -1, 32)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    code = _half_away(torch.where(scale > 0, blocks / scale, 0))
    read = (code * scale.half().float()).reshape(*x.shape[:-1], -1, rotated)
    return (_hadamard(read) * rotated**-0.5).reshape(x.shape)


def q8_0_keys(x: torch.Tensor) -> torch.Tensor:
    return q8_0(x, x.shape[-1] & -x.shape[-1])  # the largest power of two that divides head_dim


def q8_0_values(x: torch.Tensor) -> torch.Tensor:
    return q8_0(x, 64)


def _signs(dim: int, device: torch.device) -> torch.Tensor:
    halves = torch.full((dim,), 0.5)
    return (2 * torch.bernoulli(halves, generator=torch.Generator().manual_seed(SIGNS_SEED)) - 1).to(device)


def _hadamard(x: torch.Tensor) -> torch.Tensor:
    """`x` times the Hadamard matrix of ones, not normalized: twice is `head_dim` times `x`.
    head_dim is a power of two.
    """
    dim, half = x.shape[-1], 1
    while half < dim:
        a, b = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack([a + b, a - b], -2).flatten(-3)
        half *= 2
    return x


ROUNDINGS: dict[str, tuple[Rounding, Rounding]] = {  # of K and of V, by implementation of a benchmark
    "vllm-int8-per-token-head": (int8_per_token_head, int8_per_token_head),
    "vllm-fp8-per-token-head": (fp8_per_token_head, fp8_per_token_head),
    "vllm-int4-per-token-head": (int4_per_token_head, int4_per_token_head),
    "llama-cpp-q8-0": (q8_0_keys, q8_0_values),
}


class _Rounds(CacheLayerMixin):
    """Makes a layer hold what roundings leave of K and V."""

    roundings: tuple[Rounding, Rounding]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        of_keys, of_values = self.roundings
        return super().update(of_keys(key_states), of_values(value_states), *args, **kwargs)


class RoundedLayer(_Rounds, DynamicLayer):
    """A full-attention layer whose K and V are rounded."""


class RoundedSlidingLayer(_Rounds, DynamicSlidingWindowLayer):
    """A sliding window whose K and V are rounded."""


class RoundedCache(DynamicCache):
    """A cache whose layers all hold rounded K and V, in the dtype that the rounding gives. `ROUNDED_KV` reads it."""

    def __init__(self, config: Any, roundings: tuple[Rounding, Rounding]) -> None:
        super().__init__(config=config)
        replaced = {
            DynamicLayer: lambda _: RoundedLayer(),
            DynamicSlidingWindowLayer: lambda old: RoundedSlidingLayer(old.sliding_window),
        }
        self.layers: list[CacheLayerMixin] = [replaced[type(layer)](layer) for layer in self.layers]
        for layer in self.layers:
            layer.roundings = roundings


def in_the_dtype_of_keys(module, query, key, *args, **kwargs) -> tuple[torch.Tensor, None]:
    """`fp8_kv_attention` in the dtype of K and V: FP32 where BF16 would round them again."""
    return fp8_kv_attention(module, query.to(key.dtype), key, *args, **kwargs)[0].to(query.dtype), None


ROUNDED_KV = "fp8_kv_rounded"  # what transformers calls it
AttentionInterface.register(ROUNDED_KV, in_the_dtype_of_keys)
AttentionMaskInterface.register(ROUNDED_KV, fp8_kv_mask)
