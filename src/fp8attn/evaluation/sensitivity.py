"""What 8 bits cost in each layer, and which layers to leave in 16 bits.

    report = sensitivity(model, windows)
    chosen = choose(report, max_kl=0.001)
    FP8Cache.for_model(model, skip_layers=chosen)  # or AttentionPolicy(skip=chosen), or vllm serve with vllm_arguments(report, chosen)

Each layer is measured alone: only its K and V are in 8 bits. The layers are then ranked, the most sensitive first, and the model is measured
again with the first n of them in 16 bits and all others in 8 bits, for every n. `choose` takes one of these sets, so the divergence of a
choice is a measured one. Parts do not add up to it: the errors of two layers can cancel, or one can make the other worse.

Of N layers, this takes about 2.25 N forwards of the same tokens: N with a single layer in 8 bits, N with the sets, and one of the
16-bit model for every `GROUP` of these. Memory: the caches of `GROUP + 1` runs of one window, and two runs' logits of one chunk.

**Which arithmetic.** A forward of `chunk` tokens goes through the kernels that a cache of this model uses. Few query rows are exact: only
what is stored is rounded. On a Hopper GPU many rows (more than 128 a KV head) are rounded to 8 bits, too, as in a prefill; the report's
`rounds_queries` is then true. A 16-bit model has another limit: any change of the order of a sum changes its predictions. The report's
`floor` is that divergence, and a layer below it cannot be told from another. So measure in float32, where this is no limit, with
`backend="reference"` on a GPU: the default of `make_cache` for such a model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from .. import backends
from ..errors import UsageError
from ..integrations.transformers import ATTN_IMPLEMENTATION, FP8Cache
from ..integrations.transformers.config import FULL, WINDOWED_LAYER_TYPES, check_attention_interface, decoder_config, layers_of
from ..layout import PAGE_SIZE, page_bytes
from .caches import CHUNK, forward
from .perplexity import by_token
from .record import write_json

FORMAT = "fp8attn.sensitivity.1"  # the entry `format` in a file
GROUP = 8  # runs that share a forward of the 16-bit model
MakeSkipping = Callable[[Sequence[int]], Cache]


@dataclass(frozen=True)
class LayerSensitivity:
    """What 8 bits cost in one layer.

    Attributes:
        layer: its number in the model.
        sqnr_db: of the attention module's output (after its output projection), with K and V in 8 bits, beside the output in 16 bits from the
            same inputs: the ratio of signal to error, in dB. Infinite if there is no error.
        kl: mean KL divergence of the 16-bit model's predictions from those with only this layer in 8 bits, in nats per token.
        standard_error: of `kl`, from its scatter over the tokens.
        bytes_8_bit, bytes_16_bit: of a token's K and V in this layer.
    """

    layer: int
    sqnr_db: float
    kl: float
    standard_error: float
    bytes_8_bit: float
    bytes_16_bit: float


@dataclass(frozen=True)
class Sensitivity:
    """What 8 bits cost in each full-attention layer of a model, alone and together.

    Attributes:
        layers: in the model's order.
        cumulated_kl: `cumulated_kl[n]` is the KL divergence, in nats per token, with the first n layers of `ranking` in 16 bits and all others
            in 8 bits. The first entry is of all layers in 8 bits, the last one of the least sensitive layer alone.
        floor: the same divergence if one attention output is changed by its last bit: what rounding in the model's dtype makes of nothing.
        tokens: the number of predictions that were compared; `context`: the tokens of a window; `chunk`: of a forward.
        windowed: the numbers of layers with a window. `FP8Cache` keeps them in 16 bits whatever is chosen.
        model, dtype, cache: the model's name, the dtype of its arithmetic, and what the measured cache is called.
        rounds_queries: whether queries were in 8 bits, too.
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
    rounds_queries: bool

    @property
    def ranking(self) -> tuple[int, ...]:
        """The numbers of the layers, the one that costs most in 8 bits first."""
        return tuple(row.layer for row in sorted(self.layers, key=lambda row: -row.kl))

    def bytes_per_token(self, skip_layers: Sequence[int] = ()) -> float:
        """Bytes of one more token in all full-attention layers, with these layers in 16 bits and all others in 8 bits."""
        return sum(row.bytes_16_bit if row.layer in skip_layers else row.bytes_8_bit for row in self.layers)

    def kl(self, skip_layers: Sequence[int] = ()) -> float:
        """The measured KL divergence with these layers in 16 bits, in nats per token.

        Raises:
            UsageError: this set was not measured. `divergence` measures any set.
        """
        count = len(set(skip_layers))
        if count >= len(self.layers) or {*skip_layers} != {*self.ranking[:count]}:
            raise UsageError(
                f"layers {sorted(skip_layers)} in 16 bits were not measured, only the first ones of the ranking {self.ranking}; "
                "divergence(model, windows, skip_layers) measures any set"
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
            read = json.loads(Path(path).read_text())
            if read.pop("format") != FORMAT:
                raise KeyError("format")
            rows = [{name: math.inf if value is None else value for name, value in row.items()} for row in read.pop("layers")]
            lists = {name: tuple(read.pop(name)) for name in ("cumulated_kl", "windowed")}
            return cls(layers=tuple(LayerSensitivity(**row) for row in rows), **lists, **read)
        except OSError as error:
            raise UsageError(f"cannot read {path} ({error.strerror}); Sensitivity.save writes such a file") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path} is no report of the format {FORMAT}; Sensitivity.save writes it") from error


def choose(report: Sensitivity, *, max_kl: float | None = None, max_bytes_per_token: float | None = None) -> tuple[int, ...]:
    """The layers to leave in 16 bits under a budget.

    Args:
        report: of `sensitivity`.
        max_kl: a KL divergence in nats per token. As few layers as possible are left in 16 bits.
        max_bytes_per_token: bytes of one more token in all full-attention layers (`Sensitivity.bytes_per_token`; `fp8attn plan` shows what
            they are with all layers in 8 and in 16 bits). The divergence is the smallest that fits.
    Returns:
        The numbers of the layers, in order, for `FP8Cache(skip_layers=...)` and `AttentionPolicy(skip=...)`. `report.kl(chosen)` is their
        measured divergence. At least one layer is in 8 bits.
    Raises:
        UsageError: not exactly one budget, or nothing meets it.
    """
    if (max_kl is None) == (max_bytes_per_token is None):
        raise UsageError(f"choose takes one budget, max_kl or max_bytes_per_token; got {max_kl} and {max_bytes_per_token}")
    sets = [report.ranking[:count] for count in range(len(report.layers))]
    if max_kl is not None:
        enough = [number for number, kl in enumerate(report.cumulated_kl) if kl <= max_kl]
        if not enough:
            raise UsageError(
                f"no choice of layers has a KL divergence of at most {max_kl:g} nats per token: the smallest measured is "
                f"{min(report.cumulated_kl):.2g}, and {report.floor:.2g} is from rounding in {report.dtype} alone. Allow more, or use "
                "a 16-bit cache (DynamicCache(config=model.config))"
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
    """The arguments of `vllm serve` for an FP8 cache that leaves the same layers in 16 bits: these, and the layers with a window.

    vLLM's own FP8 cache stores keys and values in E4M3, not rotated. To choose for it, measure such a cache (`cache_factory` makes `"scale-1"`
    and `"fp8-e4m3-plain"`).
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
    progress: Callable[[int, int], None] | None = None,
) -> Sensitivity:
    """Measure what 8 bits cost in each full-attention layer, alone and cumulated in the order of the choice (see the module).

    The baseline is the model with transformers' own cache, in its own dtype. Take text of the kind that the model will see, and windows as
    long as its prompts: errors can grow with the context.

    Args:
        model: a transformers causal language model in evaluation mode. Its attention implementation is set to `fp8_kv`.
        windows: `[N, S + 1]` token ids, as `perplexity` takes them: S predictions of each window are compared.
        make_cache: makes the cache to measure, empty, with the layers of a sequence of numbers in 16 bits. None: `FP8Cache.for_model`, with
            `backend="reference"` if the model is not in 16 bits.
        name: what the report calls this cache.
        chunk: tokens of a forward.
        progress: called with (forwards done, number of forwards).
    Raises:
        UsageError: a model that `FP8Cache` cannot serve or that is in training mode; no windows of two tokens or more.
        ValueError: a divergence is not a number, because logits are NaN or infinite.
    """
    specs = layers_of(model.config)
    full = [number for number, spec in enumerate(specs) if spec.kind == FULL]
    make = _default(model) if make_cache is None else make_cache
    runs = _Runs(model, windows, chunk, full, make, 2 * len(full), progress)
    queries = chunk * specs[full[0]].num_q_heads // specs[full[0]].num_kv_heads
    with runs.watching():
        nudged, *alone = runs.measure([_Run(nudged=full[0]), *(_Run((layer,), compared=layer) for layer in full)])
        means = [float(kl.mean()) for kl in alone]
        if not all(map(math.isfinite, means)):
            bad = [layer for layer, kl in zip(full, means, strict=True) if not math.isfinite(kl)]
            raise ValueError(f"the KL divergence is not a number with layer {bad[0]} in 8 bits: the model's logits are NaN or infinite")
        order = [full[at] for at in sorted(range(len(full)), key=lambda at: -means[at])]
        together = runs.measure([_Run(tuple(order[count:])) for count in range(len(full) - 1)])
    rows = tuple(
        LayerSensitivity(
            layer=layer,
            sqnr_db=runs.sqnr_db(layer),
            kl=mean,
            standard_error=_standard_error(kl),
            bytes_8_bit=specs[layer].num_kv_heads * page_bytes(specs[layer].head_dim) / PAGE_SIZE,
            bytes_16_bit=4.0 * specs[layer].num_kv_heads * specs[layer].head_dim,
        )
        for layer, mean, kl in zip(full, means, alone, strict=True)
    )
    return Sensitivity(
        layers=rows,
        cumulated_kl=(*(float(kl.mean()) for kl in together), min(means)),
        floor=float(nudged.mean()),
        tokens=nudged.numel(),
        context=windows.shape[1] - 1,
        chunk=chunk,
        windowed=tuple(number for number, spec in enumerate(specs) if spec.kind in WINDOWED_LAYER_TYPES),
        model=model.config.name_or_path,
        dtype=str(model.dtype).removeprefix("torch."),
        cache=name,
        rounds_queries=_rounds_queries(model, make(()), queries),
    )


def divergence(
    model: Any,
    windows: torch.Tensor,
    choices: Sequence[Sequence[int]],
    make_cache: MakeSkipping | None = None,
    *,
    chunk: int = CHUNK,
    progress: Callable[[int, int], None] | None = None,
) -> list[tuple[float, float]]:
    """The KL divergence of the 16-bit model's predictions from the 8-bit cache's, for each choice of layers in 16 bits.

    A report's own divergences are of the tokens that ranked the layers. This measures a choice on other tokens.

    Args:
        choices: numbers of the layers in 16 bits; `()` is all layers in 8 bits.
        model, windows, make_cache, chunk, progress: as `sensitivity` takes them.
    Returns:
        For each choice the mean over the tokens and its standard error, in nats per token.
    """
    full = [number for number, spec in enumerate(layers_of(model.config)) if spec.kind == FULL]
    make = _default(model) if make_cache is None else make_cache
    runs = _Runs(model, windows, chunk, full, make, len(choices), progress)
    found = runs.measure([_Run(tuple(layer for layer in full if layer not in choice)) for choice in choices])
    return [(float(kl.mean()), _standard_error(kl)) for kl in found]


@dataclass(frozen=True)
class _Run:
    """One run of all windows.

    Attributes:
        in_8_bits: the layers whose K and V are in 8 bits; none: a 16-bit cache.
        kept: layers whose attention outputs are kept for the next runs.
        compared: the layer whose attention output is compared with the kept one.
        nudged: the layer whose attention output is changed by its last bit.
    """

    in_8_bits: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    compared: int | None = None
    nudged: int | None = None


class _Runs:
    """Runs a model on the same windows, with different layers in 8 bits.

    In a run in which only one layer is in 8 bits, that layer's inputs are those of the 16-bit model, bit for bit. So both its outputs come from
    the same inputs, and their difference is what 8 bits cost there.
    """

    def __init__(
        self,
        model: Any,
        windows: torch.Tensor,
        chunk: int,
        full: Sequence[int],
        make: MakeSkipping,
        count: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        if windows.dim() != 2 or not windows.shape[0] or windows.shape[1] < 2:
            raise UsageError(f"windows must be [N, S + 1] token ids with N and S at least 1; got {list(windows.shape)}")
        if model.training:
            raise UsageError("the model is in training mode, in which dropout changes its predictions; call model.eval()")
        check_attention_interface(decoder_config(model.config))
        model.set_attn_implementation(ATTN_IMPLEMENTATION)
        self.model, self.windows, self.chunk, self.full, self.make = model, windows, chunk, full, make
        self.progress, self.done = progress, 0
        first = len(full) + 1 if count == 2 * len(full) else count  # `sensitivity` measures in two parts
        baselines = sum(-(-part // GROUP) for part in (first, count - first))
        self.total = (count + baselines) * len(windows) * -(-(windows.shape[1] - 1) // chunk)
        self.run = _Run()
        self.outputs: dict[int, torch.Tensor] = {}
        self.power = {layer: [0.0, 0.0] for layer in full}  # of the signal, and of the error

    def measure(self, runs: Sequence[_Run]) -> list[torch.Tensor]:
        """The KL divergence of the 16-bit model's prediction from each run's, `[N, S]` in nats."""
        found = []
        for begin in range(0, len(runs), GROUP):
            group = runs[begin : begin + GROUP]
            baseline = _Run(kept=tuple(run.compared for run in group if run.compared is not None))
            named = {str(number): (_Running(self, run), self._maker(run)) for number, run in enumerate((baseline, *group))}
            by_name, _ = by_token(named, self.windows, step=self.chunk)
            found += [by_name[name][1] for name in list(named)[1:]]
        return found

    def _maker(self, run: _Run) -> Callable[[], Cache]:
        if not run.in_8_bits:
            return lambda: DynamicCache(config=self.model.config)
        return lambda: self.make([layer for layer in self.full if layer not in run.in_8_bits])

    def forward(self, run: _Run, **inputs: Any) -> Any:
        """A forward of one run, and progress."""
        self.run = run
        out = self.model(**inputs)
        self.done += 1
        if self.progress:
            self.progress(self.done, self.total)
        return out

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See the outputs of the attention modules, by forward hooks, until the block ends."""
        modules = _attention_modules(self.model, self.windows[:1, :1], self.full)
        handles = [module.register_forward_hook(lambda m, a, out, n=layer: self._see(n, out)) for layer, module in modules.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _see(self, layer: int, output: Any) -> Any:
        """The output of a layer's attention module, which the model passes on unless this returns another."""
        out = output[0] if isinstance(output, tuple) else output
        if layer in self.run.kept:
            self.outputs[layer] = out
        elif layer == self.run.compared:
            exact, rounded = self.outputs.pop(layer).double(), out.double()
            for at, x in enumerate((exact, rounded - exact)):
                self.power[layer][at] += float(x.square().sum())
        elif layer == self.run.nudged:
            out = out * (1 + torch.finfo(out.dtype).eps)
            return (out, *output[1:]) if isinstance(output, tuple) else out
        return None

    def sqnr_db(self, layer: int) -> float:
        """Of the layer's attention output over all windows, in dB."""
        signal, error = self.power[layer]
        return 10 * math.log10(signal / error) if signal and error else math.inf


@dataclass(frozen=True)
class _Running:
    """The model as `by_token` calls it, in one run."""

    runs: _Runs
    run: _Run
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", self.runs.model.device)

    def __call__(self, **inputs: Any) -> Any:
        return self.runs.forward(self.run, **inputs)


def _attention_modules(model: Any, tokens: torch.Tensor, full: Sequence[int]) -> dict[int, nn.Module]:
    """By layer, its attention module: the innermost one that is running when the layer's cache is called.

    So no names of modules are needed. It takes a forward of `tokens [1, S]`.
    """
    running: list[nn.Module] = []
    found: dict[int, nn.Module] = {}

    class Asking(DynamicLayer):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

        def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            found[self.index] = running[-1]
            return super().update(*args, **kwargs)

    def leave(*_: Any) -> None:
        running.pop()

    cache = DynamicCache(config=model.config)
    for layer in full:
        cache.layers[layer] = Asking(layer)
    handles = [module.register_forward_pre_hook(lambda m, a: running.append(m)) for module in model.modules()]
    handles += [module.register_forward_hook(leave) for module in model.modules()]
    try:
        forward(model, tokens.to(model.device), cache)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _default(model: Any) -> MakeSkipping:
    backend = "auto" if model.dtype in (torch.bfloat16, torch.float16) else "reference"
    return lambda skip: FP8Cache.for_model(model, skip_layers=skip, backend=backend)


def _rounds_queries(model: Any, cache: Cache, rows: int) -> bool:
    """Whether a cache's attention rounds queries, if there are so many rows for each KV head."""
    if not isinstance(cache, FP8Cache):
        return False
    return backends.find(cache.shared.backend, model.device, model.dtype).takes_fp8_queries(rows)


def _standard_error(x: torch.Tensor) -> float:
    return float(x.std(correction=0)) / math.sqrt(x.numel())
