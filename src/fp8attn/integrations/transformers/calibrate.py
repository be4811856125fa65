"""Static scales and means of Q, K and V from text, and how well scales cover other text.

No cache needs them: pages have their own scales. Calibrated ones are for models whose K or V have large offsets, for engines that want
static scales, and for finding the layers that lose most in 8 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from ...calibration import LayerObserver, Method, Options, ScalesReport, concatenate, counters
from ...calibration.checkpoint import Checkpoint, Text
from ...errors import UsageError
from ...layout import DEFAULT_KEY_DTYPE, KeyDtype
from ...scales import SEVERAL, KVScales, LayerScales
from .config import FULL, LayerSpec, decoder_config, layers_of
from .observe import Batch, observing, tensors_of

MEANS_TOKENS = 32768  # means are computed from the first batches, up to this many tokens
CHUNK = 32768  # tokens of a forward. A later chunk attends with a mask, for which most attention kernels are slower.
LONGEST = 32768  # tokens of a packed sequence, at most, if the model's context is longer
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

    The state has a constant size, so a text may have any length. With the methods "percentile" and "mse" and with means, the first 32,768
    tokens run twice. Whoever calibrates for long contexts calibrates on long texts (`pack_tokens`): with RoPE, K depends on the position.

    The model runs with a cache that receives K (after RoPE) and V, and an attention function that receives Q and calls the model's own.
    There are no hooks or patches, and the model is left as it was.

    Args:
        model: a transformers causal language model.
        batches: `input_ids [B, S]`, or mappings with `input_ids` and `attention_mask [B, S]` (0 means padding, which is not counted). Any
            iterable, also a generator; the batches are read once.
        method: `"absmax"`; `"percentile"` of the magnitudes of all tokens and channels of a head; or `"mse"`. With the last two, larger
            values saturate.
        percentile: in (0, 100]; the result is at most 0.8% above the exact percentile.
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
        The scales of all full-attention layers (sliding layers stay in 16 bits), the SQNR of K and V of each, and the layers whose K has an
        offset that no static mean removes (`k_offsets`); the same in every process. `q_scale` is None if the model computes its attention
        itself.
    Raises:
        TypeError: `model` is no transformers model, or a batch has no tensors.
        UsageError: no tokens; an unknown method or key_dtype; a model without plain K and V (`layers_of`); heads that are divided over
            processes without `tensor_parallel`; a checkpoint of another calibration.
        ValueError: NaN or Inf in Q, K or V.
    """
    specs = _layers(model)
    options = Options(method, percentile, key_dtype, rotate_keys, means)
    if chunk < 1:
        raise UsageError(f"chunk must be a positive number of tokens; got {chunk}")
    total = len(batches) if isinstance(batches, Sequence) else None
    observers = {index: LayerObserver(options) for index, spec in enumerate(specs) if spec.kind == FULL}
    file = None if checkpoint is None else _checkpoint(checkpoint, model, options, (tensor_parallel, data_parallel))
    looked, counted, stream = Text(), Text(), iter(batches)

    def tick() -> None:
        _check_finite(observers)
        if progress is not None:
            progress(counted.count, total)

    def save() -> None:
        if file is not None:
            file.save(
                {f"{index}.{name}": x for index, layer in observers.items() for name, x in layer.state_dict().items()}, looked, counted
            )

    resumed = None if file is None else file.load()
    _agree(-1 if resumed is None else resumed[2].count, tensor_parallel, data_parallel)
    with observing(model, chunk=chunk) as run:
        if file is not None and resumed is not None:
            tensors, looked, counted = resumed
            again = _replay(stream, file, looked, counted)
            for index, layer in observers.items():
                layer.load_state_dict(_of_layer(tensors, index), model.device)
        else:
            seen, again = 0, []
            for batch in stream:
                run(batch, lambda index, which, x: observers[index].look(which, x))
                ids, mask = tensors_of(batch)
                seen += ids.numel() if mask is None else int(mask.bool().sum())
                looked.add(ids, mask)
                if options.twice:
                    again.append(batch)
                else:
                    counted.add(ids, mask)
                tick()
                if seen >= MEANS_TOKENS:
                    break
            observers = {index: layer for index, layer in observers.items() if layer.moments["k"].count is not None}
            if not observers:
                raise UsageError("calibration saw no tokens; pass at least one batch with input_ids [B, S] and tokens that are not padding")
            _check_heads(observers, specs, tensor_parallel)
            for layer in observers.values():
                if data_parallel is not None:
                    for moments in layer.moments.values():
                        moments.all_reduce(data_parallel)
                layer.settle()
            save()
        for batch in chain(again, stream):
            run(batch, lambda index, which, x: observers[index].add(which, x))
            counted.add(*tensors_of(batch))
            tick()
            if counted.count % EVERY == 0:
                save()
    found = {}
    for index, layer in observers.items():
        if data_parallel is not None:
            layer.all_reduce(data_parallel)
        found[index] = {name: concatenate(x, tensor_parallel) for name, x in layer.results(data_parallel).items()}
    if file is not None:
        file.remove()
    return _scales(model, specs, options, found, next(iter(observers.values())).tokens)


def check_scales(
    model: Any, batches: Iterable[Batch], scales: KVScales, *, chunk: int = CHUNK, progress: Progress | None = None
) -> ScalesReport:
    """Report how well static scales cover a text: the shares of values that saturate, and that round to zero, of each layer and head.

    Args:
        model, batches, chunk, progress: as `calibrate` takes them. The text should not be the one that the scales are from.
        scales: of this model.
    Returns:
        The `ScalesReport`.
    Raises:
        TypeError, UsageError: as `calibrate`; or the scales are of another model.
    """
    specs = _layers(model)
    full = next(spec for spec in specs if spec.kind == FULL)
    scales.check(
        num_layers=len(specs), num_kv_heads=full.num_kv_heads, head_dim=full.head_dim, model_id=decoder_config(model.config).name_or_path
    )
    counting = {index: counters(layer) for index, layer in scales.layers.items()}

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
        index: {which: counter.coverage() for which, counter in found.items() if counter.counts is not None}
        for index, found in counting.items()
    }
    return ScalesReport(seen, tokens)


def pack_tokens(documents: Iterable[Sequence[int] | torch.Tensor], length: int, *, separator: int | None = None) -> Iterator[torch.Tensor]:
    """Concatenate token ids of documents, and cut them into sequences of one length: batches for `calibrate`, without padding.

    Args:
        documents: token ids of each; any iterable. Only one sequence is in memory.
        length: tokens of a sequence (`context_of`).
        separator: a token id between two documents, such as `tokenizer.eos_token_id`; None: no token.
    Returns:
        `input_ids [1, length]`, one after another; the last one has the tokens that are left.
    Raises:
        UsageError: the length is less than 1.
    """
    if length < 1:
        raise UsageError(f"length must be a positive number of tokens; got {length}")
    held: list[int] = []
    for number, document in enumerate(documents):
        ids = document.tolist() if isinstance(document, torch.Tensor) else list(document)
        held += ids if separator is None or not number else [separator, *ids]
        whole = len(held) - len(held) % length
        for begin in range(0, whole, length):
            yield torch.tensor(held[begin : begin + length])[None]
        del held[:whole]
    if held:
        yield torch.tensor(held)[None]


def context_of(config: PreTrainedConfig, longest: int = LONGEST) -> int:
    """Tokens of a sequence to calibrate on: the model's context, at most `longest`."""
    return min(getattr(decoder_config(config), "max_position_embeddings", None) or longest, longest)


def _layers(model: Any) -> list[LayerSpec]:
    config = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"calibrate takes a transformers causal language model (AutoModelForCausalLM); got {type(model).__name__}")
    return layers_of(config)


def _replay(stream: Iterator[Batch], file: Checkpoint, looked: Text, counted: Text) -> list[Batch]:
    """Read the batches that a checkpoint has seen, check them, and return those that it has not counted yet."""
    given, rest = Text(), []
    for batch in islice(stream, max(looked.count, counted.count)):
        given.add(*tensors_of(batch))
        for seen in (looked, counted):
            if seen.count == given.count:
                file.check(seen, given)
        if given.count > counted.count:
            rest.append(batch)
    for seen in (looked, counted):
        if seen.count > given.count:
            file.check(seen, given)
    return rest


def _check_finite(observers: dict[int, LayerObserver]) -> None:
    """Raise ValueError if a tensor had NaN or Inf. It waits for the device once."""
    largest = {(which, index): x for index, layer in observers.items() for which, x in layer.largest().items()}
    if largest:
        device = next(iter(largest.values())).device
        finite = torch.isfinite(torch.stack([x.to(device, non_blocking=True) for x in largest.values()])).tolist()
        if not all(finite):
            which, index = list(largest)[finite.index(False)]
            raise ValueError(
                f"{which.upper()} of layer {index} has NaN or Inf; run the model in bfloat16 or float32 (float16 overflows at 65504)"
            )


def _check_heads(observers: dict[int, LayerObserver], specs: list[LayerSpec], group: dist.ProcessGroup | None) -> None:
    """Raise UsageError if the heads that this process has, times the number of processes, are not those of the config."""
    processes = 1 if group is None else dist.get_world_size(group)
    for index, layer in observers.items():
        low = layer.moments["k"].low
        assert low is not None
        if len(low) * processes != specs[index].num_kv_heads:
            raise UsageError(
                f"layer {index} has {len(low)} KV heads in each of {processes} processes, and the config says {specs[index].num_kv_heads}. "
                "Pass the process group that the heads are divided over as tensor_parallel"
            )


def _checkpoint(path: str | Path, model: Any, options: Options, groups: Sequence[dist.ProcessGroup | None]) -> Checkpoint:
    path, place = Path(path), "one process"
    if any(group is not None for group in groups):
        rank, size = dist.get_rank(), dist.get_world_size()
        path, place = path.with_name(f"{path.stem}.{rank}-of-{size}{path.suffix}"), f"{rank} of {size}"
    return Checkpoint(path, {"model": model.config.to_json_string(), "options": options, "process": place})


def _agree(counted: int, tensor_parallel: dist.ProcessGroup | None, data_parallel: dist.ProcessGroup | None) -> None:
    """Raise UsageError in every process if the checkpoints of some do not fit together, instead of waiting forever for each other."""
    same = concatenate(torch.tensor([counted]), tensor_parallel)
    begun = concatenate(torch.tensor([counted >= 0]), data_parallel)
    if len(same.unique()) > 1 or len(begun.unique()) > 1:
        raise UsageError("the checkpoints of the processes do not fit together: they were killed while writing. Delete them to begin again")


def _of_layer(tensors: dict[str, torch.Tensor], index: int) -> dict[str, torch.Tensor]:
    prefix = f"{index}."
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def _scales(model: Any, specs: list[LayerSpec], options: Options, found: dict[int, dict[str, torch.Tensor]], tokens: int) -> KVScales:
    """The results of all layers (`LayerObserver.results`, all heads) as `KVScales`."""
    scales, sqnr, offsets = {}, {}, {}
    for index, x in found.items():
        scales[index] = LayerScales(
            x["k_scale"], x["v_scale"], x["k_mean"], x["v_mean"], options.key_dtype, options.rotate_keys, x.get("q_scale")
        )
        k, v = (10 * math.log10(signal / noise) if noise else math.inf for signal, noise in (x[f"{y}_noise"].sum(0).tolist() for y in "kv"))
        sqnr[index] = (k, v)
        if (offset := float(x["k_offset"].max())) >= SEVERAL:
            offsets[index] = offset
    num_kv_heads, head_dim = next(iter(scales.values())).k_mean.shape
    return KVScales(
        scales,
        num_layers=len(specs),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        model_id=getattr(model.config, "_name_or_path", ""),
        tokens=tokens,
        method=str(options),
        sqnr_db=sqnr,
        k_offsets=offsets,
    )
