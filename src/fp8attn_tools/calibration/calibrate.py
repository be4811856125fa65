"""Static scales and means of Q, K and V from text, and how well scales cover other text.

No cache needs them: pages have their own scales. Calibrated ones are for models whose K or V have large offsets, for
engines that want static scales, and for finding the layers that lose most in 8 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig

from fp8attn.errors import UsageError
from fp8attn.formats.codec import DEFAULT_KEY_DTYPE, KeyDtype, codec_of
from fp8attn.integrations.transformers.config import LayerSpec, decoder_config, layers_of
from fp8attn.scales import SEVERAL, KVScales, LayerScales

from . import LayerObserver, ScalesReport, counters
from .run import Batch, count_tokens, observing

MEANS_TOKENS = 32768  # means are computed from the first batches, up to this many tokens
CHUNK = 32768  # tokens of a forward. A later chunk attends with a mask, for which most attention kernels are slower.
Progress = Callable[[int, int | None], None]


def calibrate(
    model: Any,
    batches: Iterable[Batch],
    *,
    key_dtype: KeyDtype = DEFAULT_KEY_DTYPE,
    rotate_keys: bool = True,
    means: bool = True,
    chunk: int = CHUNK,
    progress: Progress | None = None,
) -> KVScales:
    """Find static scales and means of K and V, and static scales of Q.

    The mean of head h and channel d is `E[x]` over the first 32,768 tokens (in whole batches) if that is several
    deviations, else 0. The scale of head h is `max |x - mean| / M` over all tokens, M being 448 for E4M3 and 127 for
    INT8. Scales of K and Q are for these as they are stored or multiplied: after RoPE, rotated with `rotate_keys`.

    The state has a constant size, so a text may have any length. For long contexts, calibrate on long texts
    (`pack_tokens`): with RoPE, K depends on the position.

    The model runs with a cache that receives K (after RoPE) and V, and an attention function that receives Q and calls
    the model's own. There are no hooks or patches, and the model is left as it was.

    Args:
        model: a transformers causal language model in one process, on one device or several (`device_map="auto"`).
        batches: `input_ids [B, S]`, or mappings with `input_ids` and `attention_mask [B, S]` (0 means padding, which is
            not counted). Any iterable, also a generator; the batches are read once.
        key_dtype, rotate_keys: how the cache will store K (`PagedKVCache`).
        means: False: all means are zero, for engines that subtract none.
        chunk: tokens of a forward. Longer batches run in several, through a cache that keeps their K and V, so that the
            memory of activations is bounded.
        progress: called with (batches done, number of batches, None if `batches` has no length).
    Returns:
        The scales of all full-attention layers (the pages of windows set their own), the SQNR of K and V of each, and
        the layers whose K has an offset that no static mean removes (`k_offsets`). `q_scale` is None if the model
        computes its attention itself.
    Raises:
        TypeError: `model` is no transformers model, `batches` no iterable of batches, or a batch has no tensors.
        UsageError: no tokens; an unknown key_dtype; a model without plain K and V (`layers_of`).
        ValueError: NaN or Inf in Q, K or V.
    """
    specs = _specs(model)
    _check_batches(batches)
    keys = codec_of(key_dtype)
    if chunk < 1:
        raise UsageError(f"chunk must be a positive number of tokens; got {chunk}")
    layers = {index: LayerObserver(keys, rotate_keys, means) for index, spec in enumerate(specs) if spec.is_full}
    report, tokens = _progress_of(batches, progress), 0
    with observing(model, chunk=chunk) as run:
        for number, batch in enumerate(batches, 1):
            run(batch, lambda index, which, x: layers[index].add(which, x))
            _check_finite(layers)
            tokens += count_tokens(batch)
            if tokens >= MEANS_TOKENS:
                _settle(layers)
            report(number)
    if not tokens:
        raise UsageError(
            "calibration saw no tokens; pass at least one batch with input_ids [B, S] and tokens that are not padding"
        )
    _settle(layers)
    return _scales(layers, len(specs), key_dtype, rotate_keys, getattr(model.config, "_name_or_path", ""))


def _settle(layers: Mapping[int, LayerObserver]) -> None:
    for layer in layers.values():
        layer.settle()


def _progress_of(batches: Iterable[Batch], progress: Progress | None) -> Callable[[int], None]:
    """A function that reports the number of batches that are done, and how many there are if that is known."""
    total = len(batches) if isinstance(batches, Sequence) else None
    return lambda done: None if progress is None else progress(done, total)


def _check_finite(layers: Mapping[int, LayerObserver]) -> None:
    """Refuse NaN and Inf in what the layers have seen. It waits for the device once."""
    largest = {(which, index): x for index, layer in layers.items() for which, x in layer.largest().items()}
    if not largest:  # only padding
        return
    device = next(iter(largest.values())).device
    finite = torch.isfinite(torch.stack([x.to(device, non_blocking=True) for x in largest.values()])).tolist()
    if not all(finite):
        which, index = list(largest)[finite.index(False)]
        raise ValueError(
            f"{which.upper()} of layer {index} has NaN or Inf; run the model in bfloat16 or float32 (float16 overflows "
            f"at 65504)"
        )


def _scales(
    layers: Mapping[int, LayerObserver], num_layers: int, key_dtype: KeyDtype, rotate_keys: bool, model_id: str
) -> KVScales:
    """The scales of all layers and heads, from their observations."""
    scales, sqnr, offsets = {}, {}, {}
    for index, layer in layers.items():
        x = layer.results()
        scales[index] = LayerScales(
            x["k_scale"], x["v_scale"], x["k_mean"], x["v_mean"], key_dtype, rotate_keys, x.get("q_scale")
        )
        powers = (x[f"{which}_noise"].sum(0).tolist() for which in "kv")
        k, v = (10 * math.log10(signal / noise) if noise else math.inf for signal, noise in powers)
        sqnr[index] = (k, v)
        if (offset := float(x["k_offset"].max())) >= SEVERAL:
            offsets[index] = offset
    first = next(iter(layers))
    num_kv_heads, head_dim = scales[first].k_mean.shape
    return KVScales(
        scales,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        model_id=model_id,
        tokens=layers[first].tokens,
        method="absmax",
        sqnr_db=sqnr,
        k_offsets=offsets,
    )


def check_scales(
    model: Any,
    batches: Iterable[Batch],
    scales: KVScales,
    *,
    chunk: int = CHUNK,
    progress: Progress | None = None,
) -> ScalesReport:
    """Report how well static scales cover a text: the shares of values that saturate, and that round to zero, of each
    layer and head.

    Args:
        model, batches, chunk, progress: as `calibrate` takes them. The text should not be the one of the scales.
    Returns:
        The `ScalesReport`.
    Raises:
        TypeError, UsageError: as `calibrate`; or the scales are none, or of another model.
    """
    specs = _specs(model)
    _check_batches(batches)
    if not isinstance(scales, KVScales):
        raise TypeError(
            f"scales must be a KVScales, as calibrate returns it or KVScales.load reads it; got {type(scales).__name__}"
        )
    full = next(spec for spec in specs if spec.is_full)
    scales.check(
        num_layers=len(specs),
        num_kv_heads=full.num_kv_heads,
        head_dim=full.head_dim,
        model_id=decoder_config(model.config).name_or_path,
    )
    counting = {index: counters(layer) for index, layer in scales.layers.items()}

    def see(index: int, which: str, x: torch.Tensor) -> None:
        if index in counting and which in counting[index]:
            counting[index][which].add(x)

    report, tokens = _progress_of(batches, progress), 0
    with observing(model, chunk=chunk) as run:
        for number, batch in enumerate(batches, 1):
            run(batch, see)
            tokens += count_tokens(batch)
            report(number)
    if not tokens:
        raise UsageError(
            "the text has no tokens; pass at least one batch with input_ids [B, S] and tokens that are not padding"
        )
    seen = {
        index: {which: counter.coverage() for which, counter in found.items() if counter.counts is not None}
        for index, found in counting.items()
    }
    return ScalesReport(seen, tokens)


def _check_batches(batches: Any) -> None:
    if not isinstance(batches, Iterable) or isinstance(batches, (Mapping, str, torch.Tensor)):
        raise TypeError(
            f"batches must be an iterable of tensors input_ids [B, S], or of mappings with them; got "
            f"{type(batches).__name__}. Put a single batch into a list: [input_ids]"
        )


def check_calibrated(config: PreTrainedConfig) -> None:
    """Refuse a model that has no static scales, by its config.

    Raises:
        UsageError: its attention caches latents; or as `layers_of`.
    """
    if any(spec.rank is not None for spec in layers_of(config)):
        raise UsageError(
            f"{decoder_config(config).model_type!r} caches latents, whose scales are of single tokens: there is "
            f"nothing to calibrate. Use FP8Cache(model) without scales"
        )


def _specs(model: Any) -> list[LayerSpec]:
    """The layers of a model. Raises UsageError if there is none to calibrate."""
    config = _config(model)
    if (processes := getattr(model, "tp_size", None) or 1) > 1:
        raise UsageError(
            f'the model\'s heads are divided over {processes} processes; load it in one process, with device_map="auto"'
        )
    specs = layers_of(config)
    check_calibrated(config)
    if not any(spec.is_full for spec in specs):
        raise UsageError(
            f"only full-attention layers are calibrated, and every layer of {config.model_type!r} has a window: use "
            f"FP8Cache without scales, whose pages set their own"
        )
    return specs


def _config(model: Any) -> PreTrainedConfig:
    config = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(
            f"calibrate takes a transformers causal language model (AutoModelForCausalLM); got {type(model).__name__}"
        )
    return config
