"""How much fits into memory: bytes per token, the longest context and the largest batch, with a BF16 and with an FP8
cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from fp8attn.cache.page_table import pages_of_window
from fp8attn.checks import LARGEST
from fp8attn.errors import UsageError
from fp8attn.formats.page_layout import PAGE_SIZE
from fp8attn.formats.spec import PageSpec

CACHES = ("bf16", "fp8")
ENTRY = 4  # bytes of a page's entry in the page table, and of a length
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


@dataclass(frozen=True)
class CacheShape:
    """The shape of a model's KV cache.

    Attributes:
        full_layers: layers that keep every token.
        num_kv_heads, head_dim: the shape of a layer's K, and of its V. Latents are one KV head, whose head_dim is the
            rank and the channels of the key with RoPE: 512 + 64 in DeepSeek V3.
        windows: the window of each sliding layer that an FP8 cache has in pages, in tokens.
        windows_16_bit: the window of each other sliding or chunked layer. These layers stay in 16 bits in either cache.
        other_layers: layers without K and V of their own (linear attention, or K and V shared with another layer). They
            are not counted.
        rank: channels of the latents that the layers cache in the place of K and V; None: K and V.
    """

    full_layers: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int, ...] = ()
    windows_16_bit: tuple[int, ...] = ()
    other_layers: int = 0
    rank: int | None = None

    def __post_init__(self) -> None:
        layers = self.full_layers if self.full_layers or not self.windows else 1
        if min(layers, self.num_kv_heads, self.head_dim, *self.windows, *self.windows_16_bit) < 1:
            raise UsageError(f"full_layers, num_kv_heads, head_dim and windows must be positive; got {self}")
        if (refusal := self.pages.refusal) is not None:
            raise UsageError(f"no FP8 cache: {refusal}")

    @property
    def pages(self) -> PageSpec:
        """What a page of one KV head holds."""
        if self.rank is None:
            return PageSpec.of(self.head_dim)
        return PageSpec.latent(self.rank, self.head_dim - self.rank)

    @property
    def num_layers(self) -> int:
        return self.full_layers + len(self.windows) + len(self.windows_16_bit) + self.other_layers

    def bytes_per_token(self, cache: str) -> float:
        """Bytes of one more token once sliding windows are full.

        In FP8 this is a token's share of a page: a little over `2 * H * D` a layer, and `rank + 2 * rope + 4` of
        latents.
        """
        if _check(cache) == "bf16":
            return float(self.full_layers * self._cost_in_16_bits)
        return (self.full_layers * self._page_cost + ENTRY * self._tables) / PAGE_SIZE

    def nbytes(self, cache: str, context: int, batch: int = 1) -> int:
        """Bytes of a cache of `batch` sequences of `context` tokens, as `PagedKVCache.nbytes` counts them.

        FP8, with INT8 or E4M3 keys: whole pages of 128 tokens, their entries in the page table, which serves all
        layers, and one length per sequence and layer. Static means are not counted. Layers of one window have one page
        table. Windows have their pages after a step of decoding; during the forward of a prompt they have those of all
        its tokens. BF16: the elements. Sliding layers
        in 16 bits: `min(context, window)` tokens.
        """
        per_token = self._cost_in_16_bits
        windows = self.windows_16_bit if _check(cache) == "fp8" else (*self.windows, *self.windows_16_bit)
        in_16_bits = batch * per_token * sum(min(context, window) for window in windows)
        if cache == "bf16":
            return in_16_bits + batch * per_token * context * self.full_layers
        pages = -(-context // PAGE_SIZE)
        full = self.full_layers * (pages * self._page_cost + ENTRY) + (pages * ENTRY if self.full_layers else 0)
        windowed = sum(min(pages, pages_of_window(window)) * self._page_cost + ENTRY for window in self.windows)
        return in_16_bits + batch * (full + windowed + len(set(self.windows)) * pages * ENTRY)

    @property
    def _tables(self) -> int:
        """Page tables of a cache."""
        return bool(self.full_layers) + len(set(self.windows))

    @property
    def _page_cost(self) -> int:
        """Bytes of a page of all KV heads of a layer."""
        return self.num_kv_heads * self.pages.layout.nbytes

    @property
    def _cost_in_16_bits(self) -> int:
        """Bytes of a token of a layer in 16 bits."""
        return 2 * self.num_kv_heads * sum(self.pages.widths)


@dataclass(frozen=True)
class Fit:
    """How much fits with one type of cache.

    Attributes:
        bytes_per_token: of one sequence.
        cache_bytes: bytes of a cache of the given context and batch.
        longest_context: tokens that fit at the given batch.
        largest_batch: sequences that fit at the given context.
    """

    cache: str
    bytes_per_token: float
    cache_bytes: int
    longest_context: int
    largest_batch: int


def plan(shape: CacheShape, memory: int, *, weights: int = 0, context: int = 32768, batch: int = 1) -> tuple[Fit, ...]:
    """How much fits into memory beside the weights, with each of `CACHES`.

    Activations and fragmentation are not counted: pass less `memory` than the device has.

    Args:
        shape: the model's cache (`fp8attn_tools.shape.shape_of(config)`).
        memory: bytes of the device that the model may use.
        weights: bytes of the parameters.
        context: tokens of a sequence, for `largest_batch`.
        batch: sequences, for `longest_context`.
    Raises:
        UsageError: the weights do not fit, or a number is not positive.
    """
    if min(memory, context, batch) < 1 or weights < 0:
        raise UsageError(
            f"memory, context and batch must be positive; got {memory}, {context}, {batch} and weights {weights}"
        )
    free = memory - weights
    if free <= 0:
        raise UsageError(
            f"the weights ({human(weights)}) do not fit into a memory of {human(memory)}; pass more memory, or the "
            f"weights of one GPU"
        )

    def fit(cache: str) -> Fit:
        return Fit(
            cache,
            shape.bytes_per_token(cache),
            shape.nbytes(cache, context, batch),
            _largest(lambda tokens: shape.nbytes(cache, tokens, batch), free),
            _largest(lambda sequences: shape.nbytes(cache, context, sequences), free),
        )

    return tuple(fit(cache) for cache in CACHES)


def parse_bytes(text: str) -> int:
    """`"80GB"`, `"24GiB"` or a plain number of bytes.

    Raises:
        UsageError: the text is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*((?:[KMGT]I?)?)B?\s*", text.upper())
    if match is None:
        raise UsageError(f"{text!r} is not a size; write it as 80GB, 24GiB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2]])


def human(nbytes: float) -> str:
    """Bytes in binary units: `14.9 GiB`."""
    unit = min(4, max(0, int(nbytes).bit_length() - 1) // 10)
    return f"{nbytes / 1024**unit:.{1 if unit else 0}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def _check(cache: str) -> str:
    if cache not in CACHES:
        raise UsageError(f"cache must be one of {CACHES}; got {cache!r}")
    return cache


def _largest(cost: Callable[[int], int], free: int) -> int:
    """The largest n with `cost(n) <= free`, for a cost that grows with n."""
    if cost(1) > free:
        return 0
    high = 1
    while cost(high) <= free:
        if high >= LARGEST:  # the cost of windows does not grow
            return LARGEST
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= free else (low, middle)
    return low
