"""The caches that are compared, by name, and how a model is run through one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, QuantizedCache

from ..integrations.transformers import FP8Cache
from ..numerics import E4M3, quantize
from ..scales import KVScales

FORMATS = {  # of keys, by the name of the cache that has it
    "fp8": {},
    "fp8-int8-keys": {"key_dtype": "int8"},
    "fp8-e4m3-keys": {"key_dtype": "e4m3"},
    "fp8-e4m3-plain": {"key_dtype": "e4m3", "rotate_keys": False},
}
NAMES = ("bf16", *FORMATS, "fp8-static", "scale-1", "transformers-fp8")
CHUNK = 512  # tokens of a prefill's forward: bounds the memory of logits and scores
MakeCache = Callable[[], Cache]


def _stored(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16)


class _StoresBF16:
    """Makes a layer keep K and V in bfloat16 whatever the model computes in, and give them back in that dtype."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(_stored(key_states), _stored(value_states))

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(_stored(key_states), _stored(value_states), *args, **kwargs)
        return keys.to(key_states.dtype), values.to(value_states.dtype)


class BF16Layer(_StoresBF16, DynamicLayer):
    """A full-attention layer that stores bfloat16."""


class BF16SlidingLayer(_StoresBF16, DynamicSlidingWindowLayer):
    """A sliding window that stores bfloat16."""


class BF16Cache(DynamicCache):
    """The 16-bit baseline: what a model in bfloat16 keeps, also where a CPU computes in float32."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        replaced = {DynamicLayer: lambda _: BF16Layer(), DynamicSlidingWindowLayer: lambda old: BF16SlidingLayer(old.sliding_window)}
        self.layers = [replaced.get(type(layer), lambda old: old)(layer) for layer in self.layers]

    @property
    def nbytes(self) -> int:
        """Bytes of K and V held."""
        return sum(x.nbytes for layer in self.layers for x in (layer.keys, layer.values) if x is not None)


class E4M3Layer(DynamicLayer):
    """K and V in E4M3 with one scale for all of K and one for all of V, as other libraries keep them; read in the model's dtype.

    Args:
        scale: both scales; a value beyond 448 times that saturates. None: the largest magnitude of the first forward becomes 448, and a
            later value that does not fit becomes what torch's cast gives, NaN or 448 (`Fp8QuantizedLayer` of transformers 5.23).
        first_exact: the first forward gets K and V as they came, before they are rounded, as in transformers.
    """

    def __init__(self, scale: float | None = 1.0, *, first_exact: bool = False) -> None:
        super().__init__()
        self.scale, self.first_exact = scale, first_exact

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        """Put new K and V `[B, num_kv_heads, S, head_dim]` behind those held; all of them, dequantized."""
        new, first = (key_states, value_states), not self.is_initialized
        if first:
            self.lazy_initialization(*new)
            self.scales = [self._first_scale(x) for x in new]
        stored = [self._cast(x, scale).view(torch.uint8) for x, scale in zip(new, self.scales, strict=True)]
        if not first:  # bytes, because a CPU does not join E4M3
            stored = [torch.cat([old.view(torch.uint8), x], 2) for old, x in zip((self.keys, self.values), stored, strict=True)]
        self.keys, self.values = (x.view(E4M3.dtype) for x in stored)
        if first and self.first_exact:
            return new
        return tuple((x.float() * scale).to(self.dtype) for x, scale in zip((self.keys, self.values), self.scales, strict=True))

    def _first_scale(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is not None:
            return torch.tensor(self.scale, device=x.device)
        return (x.abs().amax().float() / E4M3.max).clamp_min(torch.finfo(torch.float32).tiny)

    def _cast(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (x.float() / scale).to(E4M3.dtype) if self.scale is None else quantize(x, scale)


class E4M3Cache(DynamicCache):
    """A cache whose full-attention layers are `E4M3Layer`s with these options; sliding windows stay in 16 bits."""

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__(config=config)
        self.layers = [E4M3Layer(**options) if type(layer) is DynamicLayer else layer for layer in self.layers]

    @property
    def nbytes(self) -> int:
        """Bytes of K and V held."""
        return sum(x.nbytes for layer in self.layers for x in (layer.keys, layer.values) if x is not None)


def cache_factory(
    name: str, config: Any, *, model: Any = None, scales: KVScales | None = None, max_cache_len: int | None = None
) -> MakeCache:
    """A function that makes an empty cache of the kind `name` for a model of that config.

    Args:
        name: `bf16`: the baseline. `fp8`: ours. `fp8-int8-keys`, `fp8-e4m3-keys`: ours, with keys in that format whatever the default is.
            `fp8-e4m3-plain`: with E4M3 keys that are not rotated. `fp8-static`: with calibrated `scales`, and keys in the format that
            these are for. `scale-1`: a plain cast of K and V to E4M3. `transformers-fp8`: the one in transformers (its first prefill
            attends in 16 bits, and its one scale per tensor is that of the first tokens).
        config: the model's config.
        model: the model, whose biases give our caches static means (`FP8Cache.for_model`). None: no means but those of `scales`.
        scales: for `fp8-static`.
        max_cache_len: tokens that our caches allocate from the start. None: they grow.
    Raises:
        ValueError: no such name; scales missing, or given where they are not used.
    """
    if name not in NAMES:
        raise ValueError(f"no cache is called {name!r}; choose from {', '.join(NAMES)}")
    if (scales is not None) != (name == "fp8-static"):
        raise ValueError("the cache 'fp8-static' needs scales (--scales FILE)" if scales is None else f"the cache {name!r} takes no scales")
    if name == "bf16":
        return lambda: BF16Cache(config)
    if name == "scale-1":
        return lambda: E4M3Cache(config)
    if name == "transformers-fp8":
        if not hasattr(cache_utils, "Fp8QuantizedLayer"):
            raise ValueError(f"transformers {transformers.__version__} has no FP8 cache of its own; 5.23 has")
        return lambda: QuantizedCache("fp8", config)
    if scales is not None:
        return lambda: FP8Cache(
            config, max_cache_len=max_cache_len, scales=scales, key_dtype=scales.key_dtype, rotate_keys=scales.rotate_keys
        )
    if model is not None:
        return lambda: FP8Cache.for_model(model, max_cache_len=max_cache_len, **FORMATS[name])
    return lambda: FP8Cache(config, max_cache_len=max_cache_len, **FORMATS[name])


def cache_names(choice: str, scales: KVScales | None = None) -> tuple[str, ...]:
    """The caches that `choice` names: names joined by commas, or `both` for BF16 and FP8.

    With scales, `fp8` means `fp8-static`, unless `fp8-static` is named too: then `fp8` is the cache whose pages have their own scales.

    Raises:
        ValueError: no such cache; scales that no cache takes.
    """
    names = ("bf16", "fp8") if choice == "both" else tuple(choice.split(","))
    for name in names:
        if name not in NAMES:
            raise ValueError(f"no cache is called {name!r}; choose bf16, fp8, both, or from {', '.join(NAMES)} (several with commas)")
    if scales is None or "fp8-static" in names:
        return names
    if "fp8" not in names:
        raise ValueError(f"scales are given, and no cache of {choice!r} takes them; add fp8-static, or leave the scales out")
    return tuple("fp8-static" if name == "fp8" else name for name in names)


@torch.no_grad()
def forward(model: Any, tokens: torch.Tensor, cache: Cache, *, logits: int = 0, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Run `tokens [B, S]` through the model onto the end of `cache`, and return the last `logits` positions' logits (0: all).

    Args:
        mask: `[B, T]`, 0 where one of the T tokens in the cache and the new S is padding (on the left); None: nowhere.
    Returns:
        `[B, logits or S, vocabulary]`.
    """
    padded = {}
    if mask is not None:
        positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -tokens.shape[1] :]
        padded = {"attention_mask": mask, "position_ids": positions}
    return model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=logits, **padded).logits


def prefill(model: Any, tokens: torch.Tensor, cache: Cache, *, chunk: int = CHUNK, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Put `tokens [B, S]` into an empty `cache` (or onto a full one, without `mask`) in chunks; the last logits `[B, vocabulary]`."""
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
    """The likeliest continuation, token by token, each through the cache.

    Args:
        last: the logits `[B, vocabulary]` of the last token in `cache`.
        count: tokens to make, at most.
        mask: of what is in the cache, as `forward` takes it.
        done: is asked after every token, with all so far, whether that is enough.
    Returns:
        `[B, n]` ids, n <= count, and how many of each row were put into the cache.
    """
    out = [last.argmax(-1, keepdim=True)]
    while len(out) < count and not done(torch.cat(out, 1)):
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        out.append(forward(model, out[-1], cache, logits=1, mask=mask)[:, -1].argmax(-1, keepdim=True))
    return torch.cat(out, 1), len(out) - 1


def greedy(model: Any, tokens: torch.Tensor, cache: Cache, count: int, *, chunk: int = CHUNK) -> torch.Tensor:
    """`[B, count]`: the likeliest continuation of `tokens [B, S]`."""
    return decode_greedily(model, prefill(model, tokens, cache, chunk=chunk), cache, count)[0]
