"""Static scales and means of Q, K and V from text, and how well scales cover other text.

No cache needs them: pages have their own scales. Calibrated ones are for models whose K or V have large offsets, for engines that want
static scales, and for finding the layers that lose most in 8 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from fp8attn.errors import UsageError
from fp8attn.formats.codec import DEFAULT_KEY_DTYPE, KeyDtype
from fp8attn.integrations.transformers.config import LayerSpec, decoder_config, layers_of
from fp8attn.scales import SEVERAL, KVScales, LayerScales

from . import LayerObserver, Method, Options, ScalesReport, concatenate, counters, select
from .checkpoint import Checkpoint, Text
from .run import Batch, See, observing, tensors_of

MEANS_TOKENS = 32768  # means are computed from the first batches, up to this many tokens
CHUNK = 32768  # tokens of a forward. A later chunk attends with a mask, for which most attention kernels are slower.
EVERY = 16  # batches between two checkpoints
Progress = Callable[[int, int | None], None]


def calibrate(
    model: Any,
    batches: Iterable[Batch],
    *,
    method: Method = "absmax",
    percentile: float = 99.99,
    key_dtype: KeyDtype = DEFAULT_KEY_DTYPE,
    rotate_keys: bool = True,
    means: bool = True,
    chunk: int = CHUNK,
    checkpoint: str | Path | None = None,
    tensor_parallel: dist.ProcessGroup | None = None,
    data_parallel: dist.ProcessGroup | None = None,
    progress: Progress | None = None,
) -> KVScales:
    """Find static scales and means of K and V, and static scales of Q.

    The mean of head h and channel d is `E[x]` over the first 32,768 tokens (in whole batches) if that is several deviations, else 0. The
    scale of head h is `max |x - mean| / M` over all tokens, M being 448 for E4M3 and 127 for INT8; or a percentile instead of the maximum;
    or the scale with the least mean squared error. Scales of K and Q are for these as they are stored or multiplied: after RoPE, rotated
    with `rotate_keys`.

    The state has a constant size, so a text may have any length. With the methods "percentile" and "mse", the first 32,768 tokens run twice
    if a mean is not zero. For long contexts, calibrate on long texts (`pack_tokens`): with RoPE, K depends on the position.

    The model runs with a cache that receives K (after RoPE) and V, and an attention function that receives Q and calls the model's own.
    There are no hooks or patches, and the model is left as it was.

    Args:
        model: a transformers causal language model.
        batches: `input_ids [B, S]`, or mappings with `input_ids` and `attention_mask [B, S]` (0 means padding, which is not counted). Any
            iterable, also a generator; the batches are read once.
        method: `"absmax"`; `"percentile"` of the magnitudes of all tokens and channels of a head; or `"mse"`. With the last two, larger
            values saturate.
        percentile: in (0, 100]; the result is at most 0.8% above the exact percentile. Of Q it is that of every seventh token.
        key_dtype, rotate_keys: how the cache will store K (`PagedKVCache`).
        means: False: all means are zero, for engines that subtract none.
        chunk: tokens of a forward. Longer batches run in several, through a cache that keeps their K and V, so that the memory of
            activations is bounded.
        checkpoint: a file from which the same call continues after it was killed, with the same result. It is written every 16 batches, and
            deleted at the end. Each process of a group has its own, with its rank in the name.
        tensor_parallel: the processes that the model's heads are divided over, in order. All have the same batches. Their results are
            gathered.
        data_parallel: processes that have the same heads and different batches, at least one each. Their observations are merged.
        progress: called with (batches done, number of batches, None if `batches` has no length).
    Returns:
        The scales of all full-attention layers (the pages of windows set their own), the SQNR of K and V of each, and the layers whose K
        has an offset that no static mean removes (`k_offsets`); the same in every process. `q_scale` is None if the model computes its
        attention itself.
    Raises:
        TypeError: `model` is no transformers model, `batches` no iterable of batches, or a batch has no tensors.
        UsageError: no tokens; an unknown method or key_dtype; a model without plain K and V (`layers_of`); heads that are divided over
            processes without `tensor_parallel`; a checkpoint of another calibration.
        ValueError: NaN or Inf in Q, K or V.
    """
    specs = _specs(model)
    _check_batches(batches)
    options = Options(method, percentile, key_dtype, rotate_keys, means)
    if chunk < 1:
        raise UsageError(f"chunk must be a positive number of tokens; got {chunk}")
    groups = _Groups(tensor_parallel, data_parallel)
    file = None if checkpoint is None else _checkpoint(checkpoint, model, options, groups)
    run = _Run(specs, options, groups, file, progress, len(batches) if isinstance(batches, Sequence) else None)
    with observing(model, chunk=chunk) as forward:
        run.observe(forward, iter(batches), model.device)
    scales = run.scales(getattr(model.config, "_name_or_path", ""))
    if file is not None:
        file.remove()
    return scales


class _Groups(NamedTuple):
    """Processes that calibrate together, as `calibrate` takes them."""

    tensor: dist.ProcessGroup | None
    data: dist.ProcessGroup | None


class _Run:
    """One call of `calibrate`.

    Args:
        specs: the model's layers.
        total: number of batches; None: not known.
    """

    def __init__(
        self,
        specs: list[LayerSpec],
        options: Options,
        groups: _Groups,
        file: Checkpoint | None,
        progress: Progress | None,
        total: int | None,
    ) -> None:
        self.specs, self.options, self.groups, self.file, self.progress, self.total = specs, options, groups, file, progress, total
        self.layers = {index: LayerObserver(options) for index, spec in enumerate(specs) if spec.is_full}
        self.looked, self.counted = Text(), Text()  # the batches that means are from; those that are in the observers

    def observe(self, forward: Callable[[Batch, See], None], stream: Iterator[Batch], device: torch.device) -> None:
        """Run all batches, or those that the checkpoint does not have."""
        state = None if self.file is None else self.file.load()
        self._agree(-1 if state is None else state[2].count)
        again = self._look(forward, stream) if state is None else self._resume(*state, stream, device)
        for batch in chain(again, stream):
            forward(batch, lambda index, which, x: self.layers[index].add(which, x))
            self.counted.add(*tensors_of(batch))
            self._done()
            if self.counted.count % EVERY == 0:
                self._save()

    def _look(self, forward: Callable[[Batch, See], None], stream: Iterator[Batch]) -> list[Batch]:
        """Compute means from the first batches, and return those that must run again."""
        seen, again = 0, []
        for batch in stream:
            forward(batch, lambda index, which, x: self.layers[index].look(which, x))
            ids, mask = tensors_of(batch)
            seen += ids.numel() if mask is None else int(mask.bool().sum())
            self.looked.add(ids, mask)
            self.counted.add(ids, mask)
            again.append(batch)
            self._done()
            if seen >= MEANS_TOKENS:
                break
        if not seen:
            raise UsageError("calibration saw no tokens; pass at least one batch with input_ids [B, S] and tokens that are not padding")
        for index, layer in self.layers.items():
            processes = 1 if self.groups.tensor is None else dist.get_world_size(self.groups.tensor)
            # Only where there are several processes: some configs (Falcon's) do not say how many KV heads there are.
            if dist.is_available() and dist.is_initialized() and layer.num_kv_heads * processes != self.specs[index].num_kv_heads:
                raise UsageError(
                    f"layer {index} has {layer.num_kv_heads} KV heads in each of {processes} processes, and the config says "
                    f"{self.specs[index].num_kv_heads}. Pass the process group that the heads are divided over as tensor_parallel"
                )
            layer.settle(self.groups.data)
        wanted = torch.tensor([any(layer.again for layer in self.layers.values())])
        if concatenate(wanted, self.groups.tensor).any():  # of one process's heads: all run the model together
            self.counted = Text()
            for layer in self.layers.values():
                layer.forget()
        else:
            again = []
        self._save()
        return again

    def _resume(
        self, tensors: dict[str, torch.Tensor], looked: Text, counted: Text, stream: Iterator[Batch], device: torch.device
    ) -> list[Batch]:
        """Continue from a checkpoint. Read the batches that it has seen, check them, and return those that it has not counted."""
        assert self.file is not None
        self.looked, self.counted = looked, counted
        for index, layer in self.layers.items():
            layer.load_state_dict(select(tensors, str(index)), device)
        given, again = Text(), []
        seen = sorted((looked, counted), key=lambda text: text.count)
        for text in seen:
            for batch in islice(stream, text.count - given.count):
                given.add(*tensors_of(batch))
                if given.count > counted.count:
                    again.append(batch)
            self.file.check(text, given)
        return again

    def _agree(self, counted: int) -> None:
        """Raise UsageError in every process if the checkpoints of some do not fit together, instead of waiting forever for each other.

        Args:
            counted: number of batches in this process's checkpoint; -1: it has none.
        """
        same = concatenate(torch.tensor([counted]), self.groups.tensor)
        begun = concatenate(torch.tensor([counted >= 0]), self.groups.data)
        if len(same.unique()) > 1 or len(begun.unique()) > 1:
            raise UsageError(
                "the checkpoints of the processes do not fit together: they were killed while writing. Delete them to begin again"
            )

    def _done(self) -> None:
        """After each batch: refuse NaN and Inf, which waits for the device once, and report progress."""
        largest = {(which, index): x for index, layer in self.layers.items() for which, x in layer.largest().items()}
        if largest:
            device = next(iter(largest.values())).device
            finite = torch.isfinite(torch.stack([x.to(device, non_blocking=True) for x in largest.values()])).tolist()
            if not all(finite):
                which, index = list(largest)[finite.index(False)]
                raise ValueError(
                    f"{which.upper()} of layer {index} has NaN or Inf; run the model in bfloat16 or float32 (float16 overflows at 65504)"
                )
        if self.progress is not None:
            self.progress(self.counted.count, self.total)

    def _save(self) -> None:
        if self.file is not None:
            tensors = {f"{index}.{name}": x for index, layer in self.layers.items() for name, x in layer.state_dict().items()}
            self.file.save(tensors, self.looked, self.counted)

    def scales(self, model_id: str) -> KVScales:
        """The scales of all layers and heads, from the observations of all processes."""
        scales, sqnr, offsets = {}, {}, {}
        for index, layer in self.layers.items():
            found = layer.results(self.groups.data)
            x = {name: concatenate(tensor, self.groups.tensor) for name, tensor in found.items()}
            scales[index] = LayerScales(
                x["k_scale"], x["v_scale"], x["k_mean"], x["v_mean"], self.options.key_dtype, self.options.rotate_keys, x.get("q_scale")
            )
            powers = (x[f"{which}_noise"].sum(0).tolist() for which in "kv")
            k, v = (10 * math.log10(signal / noise) if noise else math.inf for signal, noise in powers)
            sqnr[index] = (k, v)
            if (offset := float(x["k_offset"].max())) >= SEVERAL:
                offsets[index] = offset
        first = next(iter(self.layers))
        num_kv_heads, head_dim = scales[first].k_mean.shape
        return KVScales(
            scales,
            num_layers=len(self.specs),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            model_id=model_id,
            tokens=self.layers[first].tokens,
            method=str(self.options),
            sqnr_db=sqnr,
            k_offsets=offsets,
        )


def _checkpoint(path: str | Path, model: Any, options: Options, groups: _Groups) -> Checkpoint:
    """The checkpoint of this process."""
    path, process = Path(path), "the only one"
    if any(groups):
        rank, size = dist.get_rank(), dist.get_world_size()
        path, process = path.with_name(f"{path.stem}.{rank}-of-{size}{path.suffix}"), f"{rank} of {size}"
    return Checkpoint(path, {"model": model.config.to_json_string(), "options": options, "process": process})


def check_scales(
    model: Any,
    batches: Iterable[Batch],
    scales: KVScales,
    *,
    chunk: int = CHUNK,
    tensor_parallel: dist.ProcessGroup | None = None,
    progress: Progress | None = None,
) -> ScalesReport:
    """Report how well static scales cover a text: the shares of values that saturate, and that round to zero, of each layer and head.

    Args:
        model, batches, chunk, tensor_parallel, progress: as `calibrate` takes them. The text should not be the one of the scales.
        scales: of this model.
    Returns:
        The `ScalesReport`.
    Raises:
        TypeError, UsageError: as `calibrate`; or the scales are none, or of another model.
    """
    specs = _specs(model)
    _check_batches(batches)
    if not isinstance(scales, KVScales):
        raise TypeError(f"scales must be a KVScales, as calibrate returns it or KVScales.load reads it; got {type(scales).__name__}")
    full = next(spec for spec in specs if spec.is_full)
    scales.check(
        num_layers=len(specs), num_kv_heads=full.num_kv_heads, head_dim=full.head_dim, model_id=decoder_config(model.config).name_or_path
    )
    counting = {index: counters(layer, tensor_parallel) for index, layer in scales.layers.items()}

    def see(index: int, which: str, x: torch.Tensor) -> None:
        if index in counting and which in counting[index]:
            counting[index][which].add(x)

    total = len(batches) if isinstance(batches, Sequence) else None
    tokens = 0
    with observing(model, chunk=chunk) as run:
        for number, batch in enumerate(batches, 1):
            run(batch, see)
            ids, mask = tensors_of(batch)
            tokens += ids.numel() if mask is None else int(mask.bool().sum())
            if progress is not None:
                progress(number, total)
    if not tokens:
        raise UsageError("the text has no tokens; pass at least one batch with input_ids [B, S] and tokens that are not padding")
    seen = {
        index: {which: counter.coverage(tensor_parallel) for which, counter in found.items() if counter.counts is not None}
        for index, found in counting.items()
    }
    return ScalesReport(seen, tokens)


def _check_batches(batches: Any) -> None:
    if not isinstance(batches, Iterable) or isinstance(batches, (Mapping, str)):
        raise TypeError(
            f"batches must be an iterable of tensors input_ids [B, S], or of mappings with them; got {type(batches).__name__}. "
            "Put a single batch into a list: [input_ids]"
        )


def _specs(model: Any) -> list[LayerSpec]:
    """The layers of a model. Raises UsageError if there is none to calibrate."""
    config = _config(model)
    specs = layers_of(config)
    if not any(spec.is_full for spec in specs):
        raise UsageError(
            f"only full-attention layers are calibrated, and every layer of {config.model_type!r} has a window: use FP8Cache without "
            "scales, whose pages set their own"
        )
    return specs


def _config(model: Any) -> PreTrainedConfig:
    config = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"calibrate takes a transformers causal language model (AutoModelForCausalLM); got {type(model).__name__}")
    return config
