"""The caches that are compared, by name, and running a model with one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypedDict

import torch
import transformers
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    QuantizedCache,
)

from fp8attn.errors import UsageError
from fp8attn.formats.codec import E4M3, KeyDtype
from fp8attn.integrations.transformers import FP8Cache
from fp8attn.integrations.transformers.config import cache_keyword, decoder_config, layers_of
from fp8attn.params import BackendName
from fp8attn.scales import KVScales

from .names import CACHES, UNIFORM


class Format(TypedDict, total=False):
    """The format of keys, as arguments of `FP8Cache`. An absent one has its default."""

    key_dtype: KeyDtype
    rotate_keys: bool


FORMATS: dict[str, Format] = {  # by the name of a cache of fp8attn, the format of its keys
    "fp8": {},
    "fp8-int8-keys": {"key_dtype": "int8"},
    "fp8-e4m3-keys": {"key_dtype": "e4m3"},
    "fp8-e4m3-plain": {"key_dtype": "e4m3", "rotate_keys": False},
}
KEY_FORMATS = ("fp8-e4m3-keys", "fp8-e4m3-plain", "fp8-static")  # only of keys and values: latents have one format
CHUNK = 512  # tokens of a prefill's forward: bounds the memory of logits and scores
MakeCache = Callable[[], Cache]
LOAD = "pass scales=KVScales.load(path)"


def _stored(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16)


class _StoresBF16(CacheLayerMixin):
    """Makes a layer store K and V in bfloat16, whatever the model's dtype is, and return them in the model's dtype."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(_stored(key_states), _stored(value_states))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(_stored(key_states), _stored(value_states), *args, **kwargs)
        return keys.to(key_states.dtype), values.to(value_states.dtype)


class BF16Layer(_StoresBF16, DynamicLayer):
    """A full-attention layer that stores bfloat16."""


class BF16SlidingLayer(_StoresBF16, DynamicSlidingWindowLayer):
    """A sliding window that stores bfloat16."""


class BF16Cache(DynamicCache):
    """The 16-bit baseline. It stores bfloat16 even if the model computes in float32, as on a CPU."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        replaced = {
            DynamicLayer: lambda _: BF16Layer(),
            DynamicSlidingWindowLayer: lambda old: BF16SlidingLayer(old.sliding_window),
        }
        self.layers: list[CacheLayerMixin] = [
            replaced.get(type(layer), lambda old: old)(layer) for layer in self.layers
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of K and V held."""
        return sum(x.nbytes for layer in self.layers for x in (layer.keys, layer.values) if x is not None)


class _StoresE4M3(CacheLayerMixin):
    """Makes a layer store K and V in E4M3, with one scale for all of K and one for all of V, as in other libraries.
    Returned in the model's dtype. `keys` and `values` hold bytes, because torch cannot concatenate E4M3 on a CPU.

    Args:
        scale: both scales; a value beyond 448 times the scale saturates. None: the largest magnitude of the first
            forward becomes 448. A later value that is larger becomes what torch's cast returns, NaN or 448
            (`Fp8QuantizedLayer` of transformers 5.23).
        first_exact: return K and V of the first forward before rounding, as transformers does.
    """

    def __init__(self, *given: Any, scale: float | None = 1.0, first_exact: bool = False) -> None:
        super().__init__(*given)
        self.scale, self.first_exact = scale, first_exact

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append K and V `[B, num_kv_heads, S, head_dim]`, and return those that these tokens may see, dequantized."""
        new, first = (key_states, value_states), not self.is_initialized
        if first:
            self.scales = [self._first_scale(x) for x in new]
        stored = [self._cast(x, scale).view(torch.uint8) for x, scale in zip(new, self.scales, strict=True)]
        held = super().update(*stored, *args, **kwargs)
        if first and self.first_exact:
            return new
        keys, values = (
            (x.view(E4M3.dtype).float() * scale).to(new[0].dtype) for x, scale in zip(held, self.scales, strict=True)
        )
        return keys, values

    def _first_scale(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is not None:
            return torch.tensor(self.scale, dtype=torch.float32, device=x.device)
        return (x.abs().amax().float() / E4M3.max).clamp_min(torch.finfo(torch.float32).tiny)

    def _cast(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (x.float() / scale).to(E4M3.dtype) if self.scale is None else E4M3.quantize(x, scale)


class E4M3Layer(_StoresE4M3, DynamicLayer):
    """A full-attention layer that stores E4M3."""


class E4M3SlidingLayer(_StoresE4M3, DynamicSlidingWindowLayer):
    """A sliding window that stores E4M3."""


class E4M3Cache(DynamicCache):
    """A cache whose layers store E4M3.

    Args:
        windows: layers with a sliding window store E4M3, too; else they stay in 16 bits.
        options: `scale` and `first_exact`, of `_StoresE4M3`.
    """

    def __init__(
        self, config: Any, *, skip_layers: Collection[int] = (), windows: bool = False, **options: Any
    ) -> None:
        super().__init__(config=config)
        replaced: dict[type, Callable[[Any], CacheLayerMixin]] = {DynamicLayer: lambda _: E4M3Layer(**options)}
        if windows:
            replaced[DynamicSlidingWindowLayer] = lambda old: E4M3SlidingLayer(old.sliding_window, **options)
        self.layers: list[CacheLayerMixin] = [
            layer if number in skip_layers else replaced.get(type(layer), lambda old: old)(layer)
            for number, layer in enumerate(self.layers)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of K and V held."""
        return sum(x.nbytes for layer in self.layers for x in (layer.keys, layer.values) if x is not None)


def cache_factory(
    name: str,
    model: Any,
    *,
    scales: KVScales | None = None,
    max_cache_len: int | None = None,
    skip_layers: Collection[int] | None = None,
    backend: BackendName = "auto",
) -> MakeCache:
    """A function that makes an empty cache of this name for a model.

    Args:
        name: `bf16`: the baseline. `fp8`: fp8attn's default. `fp8-int8-keys`, `fp8-e4m3-keys`: fp8attn with keys in
            that format, whatever the default is. `fp8-e4m3-plain`: with E4M3 keys that are not rotated. `fp8-static`:
            with calibrated `scales`, and keys in the format of these scales. `scale-1`: a plain cast of K and V to
            E4M3. `transformers-fp8`: transformers' own FP8 cache (its first prefill attends in 16 bits, and it has one
            scale per tensor, from the first tokens).
        model: a transformers model. The weights give fp8attn's caches static means (`FP8Cache`).
        max_cache_len: tokens that fp8attn's caches allocate from the start. None: they grow.
        skip_layers: numbers of the layers to keep in 16 bits, for fp8attn's caches and `scale-1`. None: those that
            `FP8Cache` chooses, and for `scale-1` none.
    Raises:
        UsageError: no cache has this name; `scales` are missing, or passed to a cache that does not use them; a cache
            that takes no `skip_layers` gets some; the cache has a format of keys, and the model caches latents.
    """
    if name not in CACHES:
        raise UsageError(f"no cache is called {name!r}; choose from {', '.join(CACHES)}")
    if (scales is not None) != (name == "fp8-static"):
        raise UsageError(
            f"the cache 'fp8-static' needs scales; {LOAD}" if scales is None else f"the cache {name!r} takes no scales"
        )
    if skip_layers and name in UNIFORM:
        raise UsageError(f"the cache {name!r} holds all layers in one format; it takes no skip_layers")
    if name in KEY_FORMATS and any(layer.rank is not None for layer in layers_of(model.config)):
        raise UsageError(
            f"the cache {name!r} is a format of keys and values, and {decoder_config(model.config).model_type!r} "
            f"caches latents; choose from {', '.join(cache for cache in CACHES if cache not in KEY_FORMATS)}"
        )
    if name == "bf16":
        return lambda: BF16Cache(model.config)
    if name == "scale-1":
        return lambda: E4M3Cache(model.config, skip_layers=skip_layers or ())
    if name == "transformers-fp8":
        if not hasattr(cache_utils, "Fp8QuantizedLayer"):
            raise UsageError(
                f"the cache 'transformers-fp8' needs transformers 5.23 or newer; {transformers.__version__} is "
                f"installed"
            )
        return lambda: QuantizedCache("fp8", model.config)
    options: dict[str, Any] = {"max_cache_len": max_cache_len, "skip_layers": skip_layers, "backend": backend}
    if scales is not None:
        return lambda: FP8Cache(
            model, scales=scales, key_dtype=scales.key_dtype, rotate_keys=scales.rotate_keys, **options
        )
    return lambda: FP8Cache(model, **FORMATS[name], **options)


def cache_names(choice: str, scales: KVScales | None = None) -> tuple[str, ...]:
    """The names in `choice`: one name, several joined by commas, or `both` for BF16 and FP8.

    With scales, `fp8` means `fp8-static`. If `choice` has `fp8-static`, too, `fp8` is the cache whose pages have their
    own scales.

    Raises:
        UsageError: no cache has this name; no cache in `choice` uses the scales.
    """
    parts = [part.strip() for part in choice.split(",")]
    names = tuple(dict.fromkeys(name for part in parts for name in (("bf16", "fp8") if part == "both" else (part,))))
    for name in names:
        if name not in CACHES:
            raise UsageError(
                f"no cache is called {name!r}; choose bf16, fp8, both, or from {', '.join(CACHES)} (several with "
                f"commas)"
            )
    if scales is None or "fp8-static" in names:
        return names
    if "fp8" not in names:
        raise UsageError(f"no cache of {choice!r} uses the scales; add fp8-static, or leave the scales out")
    return tuple("fp8-static" if name == "fp8" else name for name in names)


@torch.no_grad()
def forward(
    model: Any, tokens: torch.Tensor, cache: Cache, *, logits: int = 0, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Run `tokens [B, S]` through the model, append them to `cache`, and return logits.

    Args:
        logits: the number of last positions whose logits are returned; 0: all.
        mask: `[B, T]`, of the tokens in the cache and the new ones, 0 where a token is padding (on the left). None: no
            padding.
    Returns:
        `[B, logits or S, vocabulary]`.
    """
    given: dict[str, Any] = {cache_keyword(model): cache}
    if mask is not None:
        positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -tokens.shape[1] :]
        given |= {"attention_mask": mask, "position_ids": positions}
    return model(input_ids=tokens, use_cache=True, logits_to_keep=logits, **given).logits


def forward_stored(model: Any, tokens: torch.Tensor, cache: Cache) -> torch.Tensor:
    """`forward`, in which every token reads the cache, its own K and V included.

    The first forward of an `FP8Cache` attends to exact latents if it has several tokens. So the first token gets a
    forward of its own.
    """
    sizes = [tokens.shape[1]]
    if isinstance(cache, FP8Cache) and cache.groups[0].spec.v_in_k and not cache.get_seq_length():
        sizes = [1, tokens.shape[1] - 1]
    return torch.cat([forward(model, part, cache) for part in tokens.split(sizes, 1) if part.shape[1]], 1)


def prefill(
    model: Any, tokens: torch.Tensor, cache: Cache, *, chunk: int = CHUNK, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Append `tokens [B, S]` to `cache` in chunks, and return the last logits `[B, vocabulary]`. With `mask` the cache
    must be empty.
    """
    end = 0
    for part in tokens.split(chunk, 1):
        end += part.shape[1]
        last = forward(model, part, cache, logits=1, mask=None if mask is None else mask[:, :end])
    return last[:, -1]


def decode_greedily(
    model: Any,
    last: torch.Tensor,
    cache: Cache,
    count: int,
    mask: torch.Tensor | None = None,
    done: Callable[[torch.Tensor], bool] = lambda ids: False,
) -> tuple[torch.Tensor, int]:
    """Decode greedily, token by token, each through the cache.

    Args:
        last: the logits `[B, vocabulary]` of the last token in `cache`.
        count: the most tokens to decode.
        mask: as `forward` takes it, of the tokens in the cache.
        done: called after every token with all new ids `[B, n]`; True ends the decoding.
    Returns:
        `[B, n]` ids, n <= count, and how many of each row were appended to the cache.
    """
    out = [last.argmax(-1, keepdim=True)]
    while len(out) < count and not done(torch.cat(out, 1)):
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        out.append(forward(model, out[-1], cache, logits=1, mask=mask)[:, -1].argmax(-1, keepdim=True))
    return torch.cat(out, 1), len(out) - 1


def greedy(model: Any, tokens: torch.Tensor, cache: Cache, count: int, *, chunk: int = CHUNK) -> torch.Tensor:
    """The greedy continuation `[B, count]` of `tokens [B, S]`."""
    return decode_greedily(model, prefill(model, tokens, cache, chunk=chunk), cache, count)[0]
