"""What fits: bytes per token, the longest context and the largest batch, BF16 beside FP8."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .layout import HEAD_DIMS, PAGE_SIZE, page_bytes

CACHES = ("bf16", "fp8")
ENTRY = 4  # bytes of a page's entry in the page table, and of a length
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


@dataclass(frozen=True)
class CacheShape:
    """What a model's KV cache consists of.

    Attributes:
        full_layers: layers that keep every token.
        num_kv_heads, head_dim: the shape of a layer's K, and of its V.
        windows: the window of each sliding layer, in tokens. They stay in 16 bits under either cache.
        other_layers: layers without K and V of their own (linear attention, layers that share another's cache): not counted.
    """

    full_layers: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int, ...] = ()
    other_layers: int = 0

    def __post_init__(self) -> None:
        if min(self.full_layers, self.num_kv_heads, self.head_dim, *self.windows) < 1:
            raise ValueError(f"full_layers, num_kv_heads, head_dim and windows must be positive; got {self}")
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"no FP8 cache for head_dim {self.head_dim}; it must be one of {HEAD_DIMS}")

    @property
    def num_layers(self) -> int:
        return self.full_layers + len(self.windows) + self.other_layers

    def bytes_per_token(self, cache: str) -> float:
        """Bytes that one more token costs once sliding windows are full: in FP8 its share of a page, `2 * H * D` and a little a layer."""
        if _check(cache) == "bf16":
            return 4.0 * self.full_layers * self.num_kv_heads * self.head_dim
        return (self.full_layers * self._page_cost + ENTRY) / PAGE_SIZE

    def nbytes(self, cache: str, context: int, batch: int = 1) -> int:
        """Bytes of a cache of `batch` sequences of `context` tokens: every one that `PagedKVCache.nbytes` counts.

        FP8, with INT8 and with E4M3 keys: whole pages of 128 tokens, their entries in the page table, which serves all layers, and each
        layer's lengths; means, which are static, are not counted. BF16: the elements.
        Sliding layers: `min(context, window)` tokens in 16 bits.
        """
        per_head = 2 * self.num_kv_heads * self.head_dim
        sliding = batch * 2 * per_head * sum(min(context, window) for window in self.windows)
        if _check(cache) == "bf16":
            return sliding + batch * 2 * per_head * context * self.full_layers
        pages = -(-context // PAGE_SIZE)
        return sliding + batch * (self.full_layers * (pages * self._page_cost + ENTRY) + pages * ENTRY)

    @property
    def _page_cost(self) -> int:
        """Bytes of a page of all KV heads of a layer."""
        return self.num_kv_heads * page_bytes(self.head_dim)


@dataclass(frozen=True)
class Fit:
    """What one kind of cache makes of a memory.

    Attributes:
        cache: `"bf16"` or `"fp8"`.
        bytes_per_token: of one sequence.
        cache_bytes: what the asked context and batch take.
        longest_context: tokens that fit at the asked batch.
        largest_batch: sequences that fit at the asked context.
    """

    cache: str
    bytes_per_token: float
    cache_bytes: int
    longest_context: int
    largest_batch: int


def plan(shape: CacheShape, memory: int, *, weights: int = 0, context: int = 32768, batch: int = 1) -> tuple[Fit, ...]:
    """What fits beside the weights, for each of `CACHES`. Activations and fragmentation are not counted: leave them room in `memory`.

    Args:
        shape: the model's cache.
        memory: bytes of the device, or the part of them that you give to the model.
        weights: bytes of the parameters.
        context: tokens of a sequence, for `largest_batch`.
        batch: sequences, for `longest_context`.
    Raises:
        ValueError: the weights alone do not fit; a number that is not positive.
    """
    if min(memory, context, batch) < 1 or weights < 0:
        raise ValueError(f"memory, context and batch must be positive; got {memory}, {context}, {batch} and weights {weights}")
    free = memory - weights
    if free <= 0:
        raise ValueError(f"the weights ({human(weights)}) do not fit into {human(memory)}; give more --memory, or --weights per GPU")
    return tuple(
        Fit(
            cache,
            shape.bytes_per_token(cache),
            shape.nbytes(cache, context, batch),
            _largest(lambda tokens, cache=cache: shape.nbytes(cache, tokens, batch), free),
            _largest(lambda sequences, cache=cache: shape.nbytes(cache, context, sequences), free),
        )
        for cache in CACHES
    )


def shape_of(config: Any) -> CacheShape:
    """The cache of a transformers config.

    Raises:
        ValueError: the model is an encoder-decoder, has no plain K and V to keep (multi-head latent attention), has no layer whose cache
            grows (all are sliding, for example), or has layers of several shapes.
    """
    from transformers.cache_utils import get_layer_types_and_kwargs

    if config.is_encoder_decoder:
        raise ValueError(
            f"{config.model_type!r} is an encoder-decoder, whose cross-attention cache FP8Cache does not hold; "
            "use transformers' own cache (EncoderDecoderCache)"
        )
    config = config.get_text_config(decoder=True)
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(f"{config.model_type} caches a latent vector (multi-head latent attention), not K and V: fp8attn does not apply")
    kinds, kwargs = get_layer_types_and_kwargs(config)
    if isinstance(kwargs, dict):  # transformers < 5.20: one set of options for all layers
        kwargs = [kwargs] * len(kinds)
    layers = getattr(config, "per_layer_config", None) or [config] * len(kinds)
    full = [layer for layer, kind in zip(layers, kinds, strict=True) if kind == "full_attention"]
    if not full:
        raise ValueError(
            f"no layer would be in FP8: every layer of {config.model_type!r} is of a kind whose cache does not grow "
            f"({', '.join(sorted(set(kinds)))}). Use transformers' own cache (DynamicCache(config=model.config))"
        )
    shapes = {_heads(layer) for layer in full}
    if len(shapes) > 1:
        raise ValueError(f"the layers of {config.model_type} differ in (num_kv_heads, head_dim): {sorted(shapes)}; plan them one by one")
    windowed = ("sliding_attention", "chunked_attention")
    windows = tuple(options["sliding_window"] for kind, options in zip(kinds, kwargs, strict=True) if kind in windowed)
    return CacheShape(len(full), *shapes.pop(), windows, len(kinds) - len(full) - len(windows))


def _heads(config: Any) -> tuple[int, int]:
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def count_weights(model: str, config: Any) -> tuple[int, str]:
    """Bytes of a model's parameters, and where the number is from: the files of a folder, or else the architecture in 16 bits."""
    files = list(Path(model).glob("*.safetensors")) if Path(model).is_dir() else []
    if files:
        return sum(file.stat().st_size for file in files), "size of the files"
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):  # shapes alone: no memory, no download
        built = AutoModelForCausalLM.from_config(config)
    return 2 * sum(p.numel() for p in built.parameters()), "counted from the architecture, 16 bits each"


def parse_bytes(text: str) -> int:
    """`"80GB"`, `"24GiB"` or a plain number of bytes.

    Raises:
        ValueError: none of these.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*((?:[KMGT]I?)?)B?\s*", text.upper())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write it as 80GB, 24GiB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2]])


def human(nbytes: float) -> str:
    """Bytes for people, in binary units."""
    unit = min(4, max(0, int(nbytes).bit_length() - 1) // 10)
    return f"{nbytes / 1024**unit:.{1 if unit else 0}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def _check(cache: str) -> str:
    if cache not in CACHES:
        raise ValueError(f"cache must be one of {CACHES}; got {cache!r}")
    return cache


def _largest(cost: Callable[[int], int], free: int) -> int:
    """The largest n with `cost(n) <= free`, for a cost that grows with n."""
    if cost(1) > free:
        return 0
    high = 1
    while cost(high) <= free:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= free else (low, middle)
    return low
