"""Static scales and means of K and V from a few batches of text.

No cache needs them: pages have their own scales. Calibrated ones are for models whose K or V have large offsets, for engines that want
static scales, and for finding the layers that lose most in 8 bits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, Cache, DynamicLayer

from ...errors import UsageError
from ...layout import DEFAULT_KEY_DTYPE, FP8, KeyDtype, key_type
from ...numerics import MIN_SCALE
from ...scales import SEVERAL, KVScales, LayerScales
from ...statistics import SAMPLED_TOKENS, Histogram, Range
from .config import FULL, LayerSpec, layers_of

Method = Literal["absmax", "percentile"]
METHODS: tuple[Method, ...] = get_args(Method)
Batch = torch.Tensor | Mapping[str, torch.Tensor]
Observe = Callable[[int, torch.Tensor, torch.Tensor], None]


def calibrate(
    model: Any,
    batches: Iterable[Batch],
    *,
    method: Method = "absmax",
    percentile: float = 99.99,
    key_dtype: KeyDtype = DEFAULT_KEY_DTYPE,
    rotate_keys: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> KVScales:
    """Find static scales and means of K and V.

    The mean of head h and channel d is `E[x]` if that is several deviations, else 0. The scale of head h is `max |x - mean| / M`, or a
    percentile instead of the maximum; M is 448 for E4M3 and 127 for INT8. K's scale is for K as it is stored.

    The model runs with a cache that receives K (after RoPE) and V. There are no hooks or patches, and the model is not changed. K and V of
    a whole batch are in memory for one layer at a time. Only statistics are kept.

    Args:
        model: a transformers causal language model.
        batches: `input_ids [B, S]`, or mappings with `input_ids` and `attention_mask [B, S]` (0 means padding, which is not counted).
        method: `"absmax"`, or `"percentile"` of the magnitudes of all tokens and channels of a head. Larger values saturate.
        percentile: in (0, 100]; the result is within 0.2% of the exact percentile.
        key_dtype, rotate_keys: how the cache will store K (`PagedKVCache`).
        progress: called with (batches done, number of batches).
    Returns:
        The scales of all full-attention layers (sliding layers stay in 16 bits), the SQNR of K and V of each, and the layers whose K has an
        offset that no static mean removes (`k_offsets`).
    Raises:
        TypeError: `model` is no transformers model, or a batch has no tensors.
        UsageError: no tokens; an unknown method or key_dtype; a model without plain K and V (`layers_of`).
        ValueError: NaN or Inf in K or V.
    """
    specs = _layers(model)
    k_type = key_type(key_dtype)
    if method not in METHODS:
        raise UsageError(f"method must be one of {METHODS}; got {method!r}")
    if not 0 < percentile <= 100:
        raise UsageError(f"percentile must be in (0, 100]; got {percentile}")
    given = [_as_mapping(batch) for batch in batches]
    passes = 1 if method == "absmax" else 2
    every = max(1, SAMPLED_TOKENS // max(1, len(given)))
    ranges = {index: (Range(k_type, rotate_keys, rope=True), Range(FP8)) for index, spec in enumerate(specs) if spec.kind == FULL}

    def run(number: int, see: Observe) -> None:
        def done(count: int) -> None:
            if progress is not None:
                progress(number * len(given) + count, passes * len(given))

        _run(model, specs, given, see, done)

    def first(index: int, k: torch.Tensor, v: torch.Tensor) -> None:
        for name, found, x in zip("KV", ranges[index], (k, v), strict=True):
            found.add(x, every, f"{name} of layer {index}")

    run(0, first)
    ranges = {index: pair for index, pair in ranges.items() if pair[0].count}
    if not ranges:
        raise UsageError("calibration saw no tokens; pass at least one batch with input_ids [B, S] and tokens that are not padding")
    top = {index: [found.amax for found in pair] for index, pair in ranges.items()}
    if method == "percentile":
        histograms = {index: [Histogram(amax) for amax in pair] for index, pair in top.items()}

        def second(index: int, k: torch.Tensor, v: torch.Tensor) -> None:
            for histogram, found, x in zip(histograms[index], ranges[index], (k, v), strict=True):
                histogram.add(found.centered(x))

        run(1, second)
        top = {index: [histogram.quantile(percentile / 100) for histogram in pair] for index, pair in histograms.items()}

    scales, sqnr, offsets = {}, {}, {}
    for index, (k, v) in ranges.items():
        k_scale, v_scale = ((amax / found.largest_code).clamp_min(MIN_SCALE) for amax, found in zip(top[index], (k, v), strict=True))
        # Layers may be on several devices.
        scales[index] = LayerScales(k_scale.cpu(), v_scale.cpu(), k.mean.cpu(), v.mean.cpu(), key_dtype, rotate_keys)
        sqnr[index] = (k.sqnr_db(k_scale), v.sqnr_db(v_scale))
        if (offset := k.offset()) >= SEVERAL:
            offsets[index] = offset
    num_kv_heads, head_dim = next(iter(scales.values())).k_mean.shape
    return KVScales(
        scales,
        num_layers=len(specs),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        model_id=getattr(model.config, "_name_or_path", ""),
        tokens=next(iter(ranges.values()))[0].count,
        method=method if method == "absmax" else f"percentile {percentile:g}",
        sqnr_db=sqnr,
        k_offsets=offsets,
    )


def _layers(model: Any) -> list[LayerSpec]:
    config = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"calibrate takes a transformers causal language model (AutoModelForCausalLM); got {type(model).__name__}")
    return layers_of(config)


def _as_mapping(batch: Batch) -> dict[str, torch.Tensor | None]:
    """`input_ids` and `attention_mask`, which may be None."""
    names = ("input_ids", "attention_mask")
    given: dict[str, torch.Tensor | None]
    given = {name: batch.get(name) for name in names} if isinstance(batch, Mapping) else {"input_ids": batch}
    if wrong := [x for x in given.values() if x is not None and not isinstance(x, torch.Tensor)]:
        raise TypeError(
            f"a batch must be a tensor input_ids [B, S], or a mapping with such tensors; got {type(wrong[0]).__name__}. "
            'Tokenize text first: tokenizer(text, return_tensors="pt")'
        )
    ids, mask = given["input_ids"], given.get("attention_mask")
    if ids is None or ids.dim() != 2 or (mask is not None and mask.shape != ids.shape):
        got = "none" if ids is None else f"{list(ids.shape)} and mask {None if mask is None else list(mask.shape)}"
        raise UsageError(f"a batch must have input_ids [B, S], and optionally an attention_mask of the same shape; got {got}")
    return given


@torch.no_grad()
def _run(model: Any, specs: list[LayerSpec], batches: list[dict[str, Any]], see: Observe, done: Callable[[int], None]) -> None:
    """Run one forward per batch. `see(layer, K, V)` gets the tokens that are not padding, `[T, num_kv_heads, head_dim]` each."""
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
                if "position_ids" in accepted:  # as in `generate`: padding has no position
                    inputs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp_min(0)
            else:
                mask = torch.ones_like(ids)
            if "logits_to_keep" in accepted:
                inputs["logits_to_keep"] = 1  # logits are not used, and with a large vocabulary they take gigabytes
            model(**inputs, past_key_values=_observing_cache(specs, see, mask.bool()), use_cache=True)
            done(number)
    finally:
        for module, training in modes:
            module.training = training


def _observing_cache(specs: list[LayerSpec], see: Observe, real: torch.Tensor) -> Cache:
    """A cache for one forward. Its full-attention layers keep nothing and pass K and V on to `see`; the others are transformers' own.

    Args:
        real: bool `[B, S]`, False where a token is padding.
    """

    class ObservedLayer(DynamicLayer):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            if key_states.shape != value_states.shape:
                raise UsageError(
                    f"layer {self.index} caches a K {list(key_states.shape)} and a V {list(value_states.shape)}; fp8attn needs K and V of "
                    "one shape. Use transformers' own cache for this model (DynamicCache(config=model.config))"
                )
            see(self.index, *(x.transpose(1, 2)[real.to(x.device)] for x in (key_states, value_states)))
            return key_states, value_states

    return Cache(
        layers=[
            ObservedLayer(index) if spec.kind == FULL else DYNAMIC_LAYER_TYPE_MAPPING[spec.kind](**spec.options)
            for index, spec in enumerate(specs)
        ]
    )
