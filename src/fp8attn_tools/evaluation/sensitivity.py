"""What 8 bits cost in each layer, and which layers to leave in 16 bits.

    report = sensitivity(model, windows)
    chosen = choose(report, max_kl=0.001)
    cache = FP8Cache(model, skip_layers=chosen)

Each layer is measured alone: only its K and V are in 8 bits. That ranks the layers. Then the model is measured with the
first n layers of the ranking in 16 bits and all others in 8 bits, for every n. `choose` takes one of these sets, so a
choice's divergence is measured. It is not the sum of its parts, because the errors of layers interact.

For L layers, that is about 2.25 L forwards of the tokens: L with one layer in 8 bits, L with the sets, and one of the
16-bit model for each 8 of these. The caches of 9 runs of one window are in memory, and two runs' logits of one chunk.

**Which arithmetic is measured.** That of the cache for a forward of `chunk` tokens. On a CPU it is the `reference`
backend's, in FP32. On a GPU, few query rows are exact, so only what is stored is rounded. On Hopper, more than 128
query rows of a KV head are in 8 bits, too, as in a prefill.

**16-bit models have a floor.** Any other order of summation changes their predictions by more than 8 bits do in most
layers. The report's `floor` is that divergence. So measure a model in FP32, on a GPU with `backend="reference"`:
`make_cache` does so by default if the model is in FP32.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache

from fp8attn.errors import UsageError
from fp8attn.formats.page_layout import PAGE_SIZE
from fp8attn.integrations.transformers import ATTN_IMPLEMENTATION, FP8Cache
from fp8attn.integrations.transformers.config import LayerSpec, layers_of, unsupported_reason
from fp8attn.params import BackendName

from .caches import CHUNK, MakeCache
from .perplexity import by_token, standard_error
from .record import write_json

FORMAT = "fp8attn.sensitivity.2"  # the entry `format` in a file
GROUP = 8  # runs that share a forward of the 16-bit model
MakeSkipping = Callable[[Sequence[int]], Cache]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class LayerSensitivity:
    """What 8 bits cost in one layer.

    Attributes:
        kl: mean KL divergence of the 16-bit model's predictions from those with only this layer in 8 bits, in nats per
            token.
        standard_error: of `kl`, from its scatter over the tokens; NaN for one token.
        bytes_8_bit, bytes_16_bit: of a token's K and V, or of its latent, in this layer.
    """

    layer: int
    kl: float
    standard_error: float
    bytes_8_bit: float
    bytes_16_bit: float


@dataclass(frozen=True)
class Sensitivity:
    """What 8 bits cost in each layer of a model that can be in 8 bits, alone and together.

    Attributes:
        layers: in the model's order.
        cumulated_kl: `cumulated_kl[n]` is the mean KL divergence in nats per token with the first n layers of `ranking`
            in 16 bits and all others in 8 bits. In the first entry all layers are in 8 bits, in the last one only the
            least sensitive.
        floor: the divergence of the 16-bit model if its embeddings are changed by their last bit.
        tokens: the number of predictions that were compared.
        context, chunk: tokens of a window, and of a forward.
        windowed: the numbers of layers with a window that the cache keeps in 16 bits whatever is chosen.
        model, dtype, cache: names of the model, of its dtype, and of the cache that was measured.
    """

    layers: tuple[LayerSensitivity, ...]
    cumulated_kl: tuple[float, ...]
    floor: float
    tokens: int
    context: int
    chunk: int
    windowed: tuple[int, ...]
    model: str
    dtype: str
    cache: str

    @property
    def ranking(self) -> tuple[int, ...]:
        """The numbers of the layers, the one that costs most in 8 bits first."""
        return tuple(row.layer for row in sorted(self.layers, key=lambda row: -row.kl))

    def bytes_per_token(self, skip_layers: Sequence[int] = ()) -> float:
        """Bytes of one more token in all layers that grow, with these layers in 16 bits and all others in 8 bits."""
        return sum(row.bytes_16_bit if row.layer in skip_layers else row.bytes_8_bit for row in self.layers)

    def kl(self, skip_layers: Sequence[int] = ()) -> float:
        """The measured KL divergence with these layers in 16 bits, in nats per token.

        Raises:
            UsageError: this set was not measured. `divergence` measures any set.
        """
        count = len(set(skip_layers))
        if count >= len(self.layers) or {*skip_layers} != {*self.ranking[:count]}:
            raise UsageError(
                f"layers {sorted(skip_layers)} in 16 bits were not measured, only the first ones of the ranking "
                f"{self.ranking}; divergence(model, windows, skip_layers) measures any set"
            )
        return self.cumulated_kl[count]

    def save(self, path: str | Path) -> None:
        """Write the report as JSON, and make the folders above."""
        write_json(path, {"format": FORMAT, **vars(self), "layers": [vars(row) for row in self.layers]})

    @classmethod
    def load(cls, path: str | Path) -> Sensitivity:
        """Read what `save` wrote.

        Raises:
            UsageError: there is no such file, or it is no report of this format.
        """
        try:
            read: dict[str, Any] = json.loads(Path(path).read_text())
            if read.pop("format") != FORMAT:
                raise KeyError("format")
            read["layers"] = [LayerSensitivity(**row) for row in read["layers"]]
            lists = {name: tuple(value) for name, value in read.items() if isinstance(value, list)}
            return cls(**(read | lists))
        except OSError as error:
            raise UsageError(f"cannot read {path} ({error.strerror}); Sensitivity.save writes such a file") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path} is no report of the format {FORMAT}; Sensitivity.save writes it") from error


def check_budget(config: Any, max_bytes_per_token: float) -> None:
    """Refuse a budget that no choice of layers meets, before anything is measured.

    Raises:
        UsageError: it is less than a token takes with all layers in 8 bits.
    """
    least = sum(_bytes_8_bit(spec) for spec in layers_of(config))
    if max_bytes_per_token < least:
        raise UsageError(
            f"no choice of layers takes at most {max_bytes_per_token:g} bytes per token: with all in 8 bits it is "
            f"{least:,.0f}"
        )


def _bytes_8_bit(spec: LayerSpec) -> float:
    """Of one more token, in pages. A window does not grow."""
    return spec.num_kv_heads * spec.pages.layout.nbytes / PAGE_SIZE if spec.is_full else 0.0


def _bytes_16_bit(spec: LayerSpec) -> float:
    """The same in 16 bits."""
    return 2.0 * spec.num_kv_heads * sum(spec.pages.widths) if spec.is_full else 0.0


def choose(
    report: Sensitivity, *, max_kl: float | None = None, max_bytes_per_token: float | None = None
) -> tuple[int, ...]:
    """The layers to leave in 16 bits under a budget.

    Args:
        max_kl: a KL divergence in nats per token. As few layers as possible are left in 16 bits.
        max_bytes_per_token: bytes of one more token in all layers that grow (`Sensitivity.bytes_per_token`;
            `fp8attn plan` shows what they are with all layers in 8 and in 16 bits). The divergence is the smallest that
            fits.
    Returns:
        The numbers of the layers, in order, for `FP8Cache(skip_layers=...)` and `AttentionPolicy(skip=...)`.
        `report.kl(chosen)` is their measured divergence. At least one layer is in 8 bits.
    Raises:
        UsageError: not exactly one budget, or nothing meets it.
    """
    if (max_kl is None) == (max_bytes_per_token is None):
        raise UsageError(
            f"choose takes one budget, max_kl or max_bytes_per_token; got {max_kl} and {max_bytes_per_token}"
        )
    sets = [report.ranking[:count] for count in range(len(report.layers))]
    if max_kl is not None:
        enough = [number for number, kl in enumerate(report.cumulated_kl) if kl <= max_kl]
        if not enough:
            raise UsageError(
                f"no choice of layers has a KL divergence of at most {max_kl:g} nats per token: the smallest measured "
                f"is {min(report.cumulated_kl):.2g}, and {report.floor:.2g} is from rounding in {report.dtype} alone. "
                f"Allow more, or use a 16-bit cache (DynamicCache(config=model.config))"
            )
        return tuple(sorted(sets[enough[0]]))
    assert max_bytes_per_token is not None
    fitting = [number for number, kept in enumerate(sets) if report.bytes_per_token(kept) <= max_bytes_per_token]
    if not fitting:
        raise UsageError(
            f"no choice of layers takes at most {max_bytes_per_token:g} bytes per token: with all in 8 bits it is "
            f"{report.bytes_per_token():,.0f}, and with all in 16 bits {report.bytes_per_token(report.ranking):,.0f}"
        )
    return tuple(sorted(sets[min(fitting, key=report.cumulated_kl.__getitem__)]))


def vllm_arguments(report: Sensitivity, skip_layers: Sequence[int]) -> str:
    """Arguments of `vllm serve` for its own FP8 cache with these layers in 16 bits, and those that the measured cache
    keeps in them.

    That cache casts K and V to E4M3 with one scale a layer. To choose layers for it, measure such a cache:
    `cache_factory("scale-1", ...)`.
    """
    numbers = sorted({*skip_layers, *report.windowed})
    flag = " ".join(["--kv-cache-dtype-skip-layers", *map(str, numbers)])
    return "--kv-cache-dtype fp8" + (f" {flag}" if numbers else "")


def sensitivity(
    model: Any,
    windows: torch.Tensor,
    make_cache: MakeSkipping | None = None,
    *,
    name: str = "fp8",
    chunk: int = CHUNK,
    progress: Progress | None = None,
) -> Sensitivity:
    """Measure what 8 bits cost in each layer that can be in 8 bits, alone and cumulated in the order of the choice (see
    the module).

    The baseline is the model with transformers' own cache, in its own dtype. Take text of the kind that the model will
    see, and windows as
    long as its prompts: errors can grow with the context.

    Args:
        model: a transformers causal language model in evaluation mode. Its attention implementation is set to `fp8_kv`.
        windows: `[N, S + 1]` token ids, as `perplexity` takes them: S predictions of each window are compared.
        make_cache: makes the cache to measure, empty, with the layers of a sequence of numbers in 16 bits. None: an
            `FP8Cache`, with `backend="reference"` if the model is not in 16 bits.
        name: what the report calls this cache.
        chunk: tokens of a forward.
        progress: called with (forwards done, number of forwards).
    Raises:
        UsageError: a model that `FP8Cache` cannot serve or that is in training mode; no windows of two tokens or more.
        ValueError: a divergence is not a number, because logits are NaN or infinite.
    """
    make = _default(model) if make_cache is None else make_cache
    specs, full = layers_of(model.config), _layers_in_8_bits(model, make)
    runs = _Runs(model, windows, chunk, counts=(1 + len(full), len(full) - 1), progress=progress)

    def of(in_8_bits: Sequence[int]) -> tuple[Any, MakeCache]:
        return model, partial(make, [layer for layer in full if layer not in in_8_bits])

    nudged, *alone = runs.measure([(_Nudged(model), runs.baseline), *(of([layer]) for layer in full)])
    means = {layer: float(kl.mean()) for layer, kl in zip(full, alone, strict=True)}
    if bad := [layer for layer, mean in means.items() if not math.isfinite(mean)]:
        raise ValueError(f"the KL divergence with layer {bad[0]} in 8 bits is no number: logits are NaN or infinite")
    ranking = sorted(full, key=lambda layer: -means[layer])
    together = runs.measure([of(ranking[count:]) for count in range(len(full) - 1)])
    rows = tuple(
        LayerSensitivity(
            layer=layer,
            kl=means[layer],
            standard_error=standard_error(kl),
            bytes_8_bit=_bytes_8_bit(specs[layer]),
            bytes_16_bit=_bytes_16_bit(specs[layer]),
        )
        for layer, kl in zip(full, alone, strict=True)
    )
    return Sensitivity(
        layers=rows,
        cumulated_kl=(*(float(kl.mean()) for kl in together), means[ranking[-1]]),
        floor=float(nudged.mean()),
        tokens=nudged.numel(),
        context=windows.shape[1] - 1,
        chunk=chunk,
        windowed=tuple(number for number, spec in enumerate(specs) if spec.window is not None and number not in full),
        model=model.config.name_or_path,
        dtype=str(model.dtype).removeprefix("torch."),
        cache=name,
    )


def divergence(
    model: Any,
    windows: torch.Tensor,
    choices: Sequence[Sequence[int]],
    make_cache: MakeSkipping | None = None,
    *,
    chunk: int = CHUNK,
    progress: Progress | None = None,
) -> list[tuple[float, float]]:
    """The KL divergence of the 16-bit model's predictions from the 8-bit cache's, for each choice of layers in 16 bits.

    A report's own divergences were measured on the tokens that ranked the layers. This measures a choice on other
    tokens.

    Args:
        choices: numbers of the layers in 16 bits; `()` is all layers in 8 bits.
        model, windows, make_cache, chunk, progress: as `sensitivity` takes them.
    Returns:
        For each choice the mean over the tokens and its standard error, in nats per token.
    Raises:
        UsageError: as `sensitivity`, or a number is not that of a layer that can be in 8 bits.
    """
    make = _default(model) if make_cache is None else make_cache
    full = _layers_in_8_bits(model, make)
    if unknown := sorted({layer for choice in choices for layer in choice} - {*full}):
        raise UsageError(f"layers {unknown} are none that can be in 8 bits; those are {list(full)}")
    runs = _Runs(model, windows, chunk, counts=[len(choices)], progress=progress)
    found = runs.measure([(model, partial(make, choice)) for choice in choices])
    return [(float(kl.mean()), standard_error(kl)) for kl in found]


def _layers_in_8_bits(model: Any, make_cache: MakeSkipping) -> tuple[int, ...]:
    """The numbers of a model's layers whose K and V such a cache can have in 8 bits: those with full attention, and in
    an `FP8Cache` those with a long sliding window."""
    windows = isinstance(make_cache(()), FP8Cache)
    return tuple(
        number for number, spec in enumerate(layers_of(model.config)) if spec.is_full or (windows and spec.in_pages)
    )


class _Runs:
    """A model and the tokens that all its runs get.

    Args:
        model: in evaluation mode. Its attention implementation is set to `fp8_kv`.
        windows: `[N, S + 1]` token ids.
        chunk: tokens of a forward.
        counts: the number of runs of each call of `measure`, for `progress`.
        progress: called with (forwards done, number of forwards).
    Raises:
        UsageError: a model that `FP8Cache` cannot serve or that is in training mode; no windows of two tokens or more.
    """

    def __init__(
        self, model: Any, windows: torch.Tensor, chunk: int, *, counts: Sequence[int], progress: Progress | None
    ) -> None:
        if windows.dim() != 2 or not windows.shape[0] or windows.shape[1] < 2:
            raise UsageError(f"windows must be [N, S + 1] token ids with N and S at least 1; got {list(windows.shape)}")
        if model.training:
            raise UsageError(
                "the model is in training mode, in which dropout changes its predictions; call model.eval()"
            )
        if (reason := unsupported_reason(model.config)) is not None:
            raise UsageError(reason)
        model.set_attn_implementation(ATTN_IMPLEMENTATION)
        self.model, self.windows, self.chunk, self.progress = model, windows, chunk, progress
        runs = sum(count + -(-count // GROUP) for count in counts)  # with those of the 16-bit model
        self.done, self.forwards = 0, runs * len(windows) * -(-(windows.shape[1] - 1) // chunk)

    def baseline(self) -> Cache:
        """An empty 16-bit cache, transformers' own."""
        return DynamicCache(config=self.model.config)

    def measure(self, runs: Sequence[tuple[Any, MakeCache]]) -> list[torch.Tensor]:
        """The KL divergence of the 16-bit model's predictions from each run's, `[N, S]` in nats."""
        found = []
        for begin in range(0, len(runs), GROUP):
            group = [(self.model, self.baseline), *runs[begin : begin + GROUP]]
            report = partial(self._report, len(group))
            by_run, _ = by_token(
                {str(number): run for number, run in enumerate(group)}, self.windows, step=self.chunk, progress=report
            )
            found += [kl for _, kl, _ in list(by_run.values())[1:]]
        return found

    def _report(self, forwards: int, *_: int) -> None:
        self.done += forwards
        if self.progress:
            self.progress(self.done, self.forwards)


class _Nudged:
    """A model whose embeddings are changed by their last bit, as `by_token` calls it."""

    def __init__(self, model: Any) -> None:
        self.model, self.device, self.forward = model, model.device, model.forward

    def __call__(self, **inputs: Any) -> Any:
        def nudge(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
            return out * (1 + torch.finfo(out.dtype).eps)

        handle = self.model.get_input_embeddings().register_forward_hook(nudge)
        try:
            return self.model(**inputs)
        finally:
            handle.remove()


def _default(model: Any) -> MakeSkipping:
    backend: BackendName = "auto" if model.dtype in (torch.bfloat16, torch.float16) else "reference"
    return lambda skip_layers: FP8Cache(model, skip_layers=skip_layers, backend=backend)
