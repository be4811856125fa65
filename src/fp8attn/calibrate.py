"""Scales and means from a few batches of text.

A cache needs none of this: its pages have their own scales. Calibrated values are for models whose K or V have large offsets, for engines
that want static scales, and for seeing which layers 8 bits hurt.

One pass takes, per channel, sums of x and of its powers, and the minimum and the maximum of x as it is stored. Means follow, and with
them the exact `max |x - mean|` of a head, which is at one of its channels' two ends: no second look at the data. A percentile needs one: it
counts `|x - mean|` into bins.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from .layout import DEFAULT_KEY_DTYPE, FP8, key_type
from .numerics import E4M3, INT8_MAX, MIN_SCALE, encode, needed_scale, on_grid, sqnr_db
from .rotation import rotate
from .scales import SEVERAL, KVScales, LayerScales

METHODS = ("absmax", "percentile")
SAMPLED_TOKENS = 1024  # of each layer, kept to measure the SQNR on
# An offset that RoPE turns by 2 a in all has a mean of sin(a) / a of its size. Where tan(a) < 2 a, a < 1.166, no token is farther from that
# mean than from zero, and so no page's scale is larger for it: where the mean has 0.62 of the offset's square.
WORTH = 0.62
Batch = torch.Tensor | Mapping[str, torch.Tensor]


def calibrate(
    model: Any,
    batches: Iterable[Batch],
    *,
    method: str = "absmax",
    percentile: float = 99.99,
    key_dtype: str = DEFAULT_KEY_DTYPE,
    rotate_keys: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> KVScales:
    """Static scales and means of K and V: `mean[h, d] = E[x]` where it is several deviations and 0 elsewhere, and
    `scale[h] = max |x - mean| / M`, or a percentile instead of the maximum; M is 448 for E4M3 and 127 for INT8. K's scale is of K as it is
    stored.

    The model runs through a cache that sees K (after RoPE) and V where attention reads them. Nothing is hooked or patched, and the model
    is left as it was. K and V of a whole batch are in memory one layer at a time; nothing but statistics is kept.

    Args:
        model: a transformers causal language model.
        batches: `input_ids [B, S]`, or mappings with `input_ids` and `attention_mask [B, S]` (0 = padding, which is not counted).
        method: `"absmax"`, or `"percentile"` of the magnitudes over all tokens and channels of a head: what is larger saturates.
        percentile: in (0, 100]; found within 0.2% of its value.
        key_dtype, rotate_keys: how the cache will store K (`PagedKVCache`).
        progress: called with (batches done, batches in all).
    Returns:
        The scales of all full-attention layers (sliding layers stay in 16 bits), with the SQNR of K and V of each, and the layers whose K
        has an offset that no static mean removes (`k_offsets`).
    Raises:
        TypeError: no transformers model, or a batch that holds no tensors.
        ValueError: no tokens, NaN or Inf in K or V, an unknown method or key_dtype, a model without plain K and V.
    """
    _check_model(model)
    k_type = key_type(key_dtype)
    if method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}; got {method!r}")
    if not 0 < percentile <= 100:
        raise ValueError(f"percentile must be in (0, 100]; got {percentile}")
    batches = [_as_mapping(batch) for batch in batches]
    passes = 1 if method == "absmax" else 2
    steps = passes * len(batches)
    every = max(1, SAMPLED_TOKENS // max(1, len(batches)))
    layers: dict[int, tuple[_Range, _Range]] = {}

    def first(index: int, tokens: tuple[torch.Tensor, torch.Tensor]) -> None:
        pair = layers.setdefault(index, (_Range(k_type, rotate_keys, rope=True), _Range(FP8)))
        for name, seen, x in zip("KV", pair, tokens, strict=True):
            seen.add(x, every, f"{name} of layer {index}")

    num_layers = _run(model, batches, first, lambda done: progress and progress(done, steps))
    if not layers or not next(iter(layers.values()))[0].count:
        raise ValueError("calibration saw no tokens: give at least one batch with input_ids of a model that has full-attention layers")
    top = {index: [seen.amax for seen in pair] for index, pair in layers.items()}
    if method == "percentile":
        counts = {index: tuple(_Histogram(seen.amax) for seen in pair) for index, pair in layers.items()}

        def second(index: int, tokens: tuple[torch.Tensor, torch.Tensor]) -> None:
            for histogram, seen, x in zip(counts[index], layers[index], tokens, strict=True):
                histogram.add(seen.centered(x))

        _run(model, batches, second, lambda done: progress and progress(len(batches) + done, steps))
        top = {index: [histogram.quantile(percentile / 100) for histogram in pair] for index, pair in counts.items()}

    scales, sqnr, offsets = {}, {}, {}
    for index in sorted(layers):
        k, v = layers[index]
        k_scale, v_scale = ((amax / seen.largest_code).clamp_min(MIN_SCALE) for amax, seen in zip(top[index], (k, v), strict=True))
        # Layers may be on several devices.
        scales[index] = LayerScales(k_scale.cpu(), v_scale.cpu(), k.mean.cpu(), v.mean.cpu(), key_dtype, rotate_keys)
        sqnr[index] = (k.sqnr_db(k_scale), v.sqnr_db(v_scale))
        if (offset := k.offset()) >= SEVERAL:
            offsets[index] = offset
    heads, head_dim = next(iter(scales.values())).k_mean.shape
    return KVScales(
        scales,
        num_layers,
        heads,
        head_dim,
        getattr(model.config, "_name_or_path", ""),
        next(iter(layers.values()))[0].count,
        method if method == "absmax" else f"percentile {percentile:g}",
        sqnr,
        offsets,
    )


def _check_model(model: Any) -> None:
    config = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise TypeError(f"calibrate takes a transformers causal language model (AutoModelForCausalLM); got {type(model).__name__}")
    if config.is_encoder_decoder:
        raise ValueError(f"{config.model_type!r} is an encoder-decoder; calibrate takes causal language models (AutoModelForCausalLM)")


def _as_mapping(batch: Batch) -> dict[str, torch.Tensor]:
    """`input_ids` and, where there is one, `attention_mask`."""
    names = ("input_ids", "attention_mask")
    given = {name: batch.get(name) for name in names} if isinstance(batch, Mapping) else {"input_ids": batch}
    if wrong := [x for x in given.values() if x is not None and not isinstance(x, torch.Tensor)]:
        raise TypeError(
            f"a batch must be a tensor input_ids [B, S], or a mapping with such tensors; got {type(wrong[0]).__name__}. "
            'Tokenize text first: tokenizer(text, return_tensors="pt")'
        )
    ids, mask = given["input_ids"], given.get("attention_mask")
    if ids is None or ids.dim() != 2 or (mask is not None and mask.shape != ids.shape):
        got = "none" if ids is None else f"{list(ids.shape)} and mask {None if mask is None else list(mask.shape)}"
        raise ValueError(f"a batch must have input_ids [B, S], and an attention_mask of that shape if any; got {got}")
    return given


@torch.no_grad()
def _run(model: Any, batches: list[dict], see: Callable[[int, tuple], None], done: Callable[[int], None]) -> int:
    """One forward a batch; `see(layer, (K, V))` gets the tokens that are not padding, each `[T, num_kv_heads, head_dim]`.

    Returns how many layers the model has, observed or not.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    accepted = inspect.signature(model.forward).parameters
    try:
        for number, batch in enumerate(batches, 1):
            ids, mask = batch["input_ids"].to(model.device), batch.get("attention_mask")
            inputs = {"input_ids": ids}
            if mask is not None and not mask.all():
                mask = mask.to(model.device)
                inputs["attention_mask"] = mask
                if "position_ids" in accepted:  # as `generate` numbers them: padding takes no positions
                    inputs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp_min(0)
            else:
                mask = torch.ones_like(ids)
            kept = mask.bool()
            if "logits_to_keep" in accepted:
                inputs["logits_to_keep"] = 1  # nobody reads them, and a large vocabulary's take gigabytes

            def observe(index: int, k: torch.Tensor, v: torch.Tensor, kept: torch.Tensor = kept) -> None:
                if k.shape != v.shape:
                    raise ValueError(
                        f"layer {index} caches {list(k.shape)} and {list(v.shape)}; fp8attn needs K and V of one shape, which multi-head "
                        "latent attention does not keep"
                    )
                see(index, tuple(x.transpose(1, 2)[kept.to(x.device)] for x in (k, v)))

            cache = _observing_cache(model.config, observe)
            model(**inputs, past_key_values=cache, use_cache=True)
            done(number)
        return len(cache) if batches else 0
    finally:
        for module, training in modes:
            module.training = training


def _observing_cache(config: Any, observe: Callable[[int, torch.Tensor, torch.Tensor], None]) -> Any:
    """A transformers cache for one forward whose full-attention layers keep nothing and call `observe(layer, K, V)`.

    Sliding and linear layers get the layer that transformers would give them.
    """
    from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, Cache, DynamicLayer, get_layer_types_and_kwargs

    class ObservedLayer(DynamicLayer):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
            observe(self.index, key_states, value_states)
            return key_states, value_states

    kinds, kwargs = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    if isinstance(kwargs, dict):  # transformers < 5.20: one set of options for all layers
        kwargs = [kwargs] * len(kinds)
    return Cache(
        layers=[
            ObservedLayer(index) if kind == "full_attention" else DYNAMIC_LAYER_TYPE_MAPPING[kind](**options)
            for index, (kind, options) in enumerate(zip(kinds, kwargs, strict=True))
        ]
    )


class _Range:
    """Sums of powers, minimum, maximum and a small sample of the tokens of one tensor.

    Args:
        dtype: what it is stored in.
        rotated: whether it is rotated first.
        rope: whether RoPE has turned it.
    """

    def __init__(self, dtype: torch.dtype, rotated: bool = False, rope: bool = False) -> None:
        self.dtype, self.rotated, self.rope = dtype, rotated, rope
        self.largest_code = INT8_MAX if dtype == torch.int8 else E4M3.max
        self.count = 0
        self._sample: list[torch.Tensor] = []

    def add(self, x: torch.Tensor, sampled: int, name: str) -> None:
        """Take in `x [T, H, D]`, `sampled` of its tokens into the sample."""
        if not len(x):
            return
        self._given, x = x.dtype, x.float()
        self._mean = None
        y = self._stored(x)
        low, high = y.amin(0), y.amax(0)
        wide = x.double()
        sums = [wide.sum(0), wide.square().sum(0)]
        for a, b in _pairings(wide) if self.rope else ():
            power = a.square() + b.square()
            sums += [power.sum(0), power.square().sum(0)]
        if not torch.isfinite(sums[0]).all():
            raise ValueError(f"{name} holds NaN or Inf; run the model in bfloat16 or float32 (float16 overflows at 65504)")
        if self.count:
            low, high = torch.minimum(low, self._low), torch.maximum(high, self._high)
            sums = [new + old for new, old in zip(sums, self._sums, strict=True)]
        self._low, self._high, self._sums = low, high, sums
        self.count += len(x)
        room = min(sampled, SAMPLED_TOKENS - sum(map(len, self._sample)), len(x))
        self._sample.append(x[torch.arange(room, device=x.device) * len(x) // max(room, 1)])

    def _stored(self, x: torch.Tensor) -> torch.Tensor:
        return rotate(x) if self.rotated else x

    @property
    def mean(self) -> torch.Tensor:
        """`[H, D]` float32, of what the model makes: zero where it is less than several deviations, or where RoPE turns too far."""
        if self._mean is None:
            mean, square = (total / self.count for total in self._sums[:2])
            variance = (square - mean.square()).clamp_min(0)
            if self.rope:
                found = []  # by convention: variance, offset and mean of the pair that each channel is in
                for (offset, noise), (a, b), spread in zip(self._offsets(), _pairings(mean), _SPREAD, strict=True):
                    found.append(torch.stack([spread(y) for y in (noise, offset, a.square() + b.square())]))
                found = torch.where(found[0][:1] <= found[1][:1], *found)
                variance = torch.minimum(variance, found[0])  # RoPE makes an offset look like variance
                mean = torch.where(found[2] >= WORTH * found[1], mean, 0.0)
            mean = torch.where(mean.abs() >= SEVERAL * variance.sqrt(), mean, 0.0)
            mean = mean.float()
            self._mean = mean if self.rotated else on_grid(mean, torch.maximum(self._high, -self._low), self._given)
        return self._mean

    @property
    def amax(self) -> torch.Tensor:
        """`[H]`: the largest magnitude that is stored in each head, exactly."""
        mean = self._stored(self.mean)
        return torch.maximum(self._high - mean, mean - self._low).amax(1)

    def centered(self, x: torch.Tensor) -> torch.Tensor:
        """`x [T, H, D]` as it is stored, before quantization."""
        return self._stored(x.float()) - self._stored(self.mean)

    def offset(self) -> float:
        """The largest offset of a pair of channels that `mean` leaves, in deviations."""
        largest = 0.0
        for (offset, noise), (a, b) in zip(self._offsets(), _pairings(self.mean.double()), strict=True):
            left = (offset - a.square() - b.square()).clamp_min(0)
            largest = max(largest, float((left / noise.clamp_min(1e-6 * offset)).nan_to_num(0.0).max().sqrt()))
        return largest

    def _offsets(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The squared offset and the variance of each pair of channels, `[H, D / 2]`, with pairs as both conventions have them.

        RoPE keeps a pair's length r. If the pair is an offset b and noise of deviation s in both channels, wherever RoPE has turned it,
        then `E[r^2] = b^2 + 2 s^2` and `Var[r^2] = 4 s^2 b^2 + 4 s^4`, which give b and s.
        """
        found = []
        for total, total_of_squares in (self._sums[2:4], self._sums[4:6]):
            square = total / self.count
            spread = (total_of_squares / self.count - square.square()).clamp_min(0)
            noise = (square - (square.square() - spread).clamp_min(0).sqrt()) / 2
            found.append((square - 2 * noise, noise))
        return found

    def sqnr_db(self, scale: torch.Tensor) -> float:
        """SQNR of the sample under static scales `[H]`, in dB; infinite where nothing is lost."""
        x, mean = self._stored(torch.cat(self._sample)), self._stored(self.mean)
        scale = needed_scale(scale * self.largest_code, self.dtype)[:, None]
        return sqnr_db(encode(x - mean, 1.0 / scale, self.dtype) * scale + mean, x)


# From a channel of each pair to both, as `_pairings` has them.
_SPREAD = (lambda x: torch.cat([x, x], -1), lambda x: x.repeat_interleave(2, -1))


def _pairings(x: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """The channels of `x [..., D]` in pairs: those half of D apart (NeoX, Llama), and neighbors (GPT-J)."""
    half = x.shape[-1] // 2
    return (x[..., :half], x[..., half:]), (x[..., ::2], x[..., 1::2])


class _Histogram:
    """Counts of magnitudes per head, 512 bins to the octave, from the maximum down to 2^-16 of it; what is smaller is in the last.

    A positive float's bits, read as an integer, grow with it, and their upper part numbers such bins with no logarithm.
    """

    SHIFT = 23 - 9  # keeps 9 bits of the mantissa
    OCTAVES = 16

    def __init__(self, amax: torch.Tensor) -> None:
        self._amax = amax
        self._bins = self.OCTAVES << 9
        self._last = amax.view(torch.int32) >> self.SHIFT  # [H]: where the maximum falls
        self._counts = torch.zeros(len(amax), self._bins, dtype=torch.int64, device=amax.device)

    def add(self, x: torch.Tensor) -> None:
        """Count `x [T, H, D]`."""
        bits = x.abs().contiguous().view(torch.int32) >> self.SHIFT
        below = (self._last[:, None] - bits).clamp(0, self._bins - 1).transpose(0, 1).flatten(1)  # [H, T * D]
        self._counts += torch.stack([torch.bincount(head, minlength=self._bins) for head in below])

    def quantile(self, q: float) -> torch.Tensor:
        """`[H]`: the smallest bin's upper end that at least `q` of the values do not exceed."""
        above = self._counts.cumsum(1)  # [H, bins], from the maximum downwards
        total = above[:, -1:]
        allowed = total - torch.ceil(q * total.double()).long()  # how many may be larger
        below = (above <= allowed).sum(1, dtype=torch.int32).clamp_max(self._bins - 1)
        edge = ((self._last - below + 1).clamp_min(0) << self.SHIFT).view(torch.float32)
        return torch.minimum(edge, self._amax)
