"""Runs of a model with different layers in 8 bits, on the same tokens, compared with the 16-bit model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from fp8attn.errors import UsageError
from fp8attn.integrations.transformers import ATTN_IMPLEMENTATION, FP8Cache
from fp8attn.integrations.transformers.config import layers_of, unsupported_reason

from .caches import forward
from .perplexity import by_token

GROUP = 8  # runs that share a forward of the 16-bit model
MakeSkipping = Callable[[Sequence[int]], Cache]


def layers_in_8_bits(model: Any, make_cache: MakeSkipping) -> tuple[int, ...]:
    """The numbers of a model's layers whose K and V such a cache can have in 8 bits: those with full attention, and in an `FP8Cache` those
    with a long sliding window."""
    windows = isinstance(make_cache(()), FP8Cache)
    return tuple(number for number, spec in enumerate(layers_of(model.config)) if spec.is_full or (windows and spec.is_windowed))


class LayerRuns:
    """A model, the tokens that all its runs get, and a function that makes a cache with given layers in 16 bits.

    Args:
        model: a transformers causal language model in evaluation mode. Its attention implementation is set to `fp8_kv`.
        windows: `[N, S + 1]` token ids, as `by_token` takes them.
        make_cache: makes an empty cache with the layers of these numbers in 16 bits.
        chunk: tokens of a forward.
        counts: the number of runs of each call of `measure`, for `progress`.
        progress: called with (forwards done, number of forwards).
    Attributes:
        full: the numbers of the layers that the cache can have in 8 bits.
    Raises:
        UsageError: a model that `FP8Cache` cannot serve or that is in training mode; no windows of two tokens or more.
    """

    def __init__(
        self,
        model: Any,
        windows: torch.Tensor,
        make_cache: MakeSkipping,
        *,
        chunk: int,
        counts: Sequence[int],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        if windows.dim() != 2 or not windows.shape[0] or windows.shape[1] < 2:
            raise UsageError(f"windows must be [N, S + 1] token ids with N and S at least 1; got {list(windows.shape)}")
        if model.training:
            raise UsageError("the model is in training mode, in which dropout changes its predictions; call model.eval()")
        self.full = layers_in_8_bits(model, make_cache)
        if (reason := unsupported_reason(model.config)) is not None:
            raise UsageError(reason)
        model.set_attn_implementation(ATTN_IMPLEMENTATION)
        self.model, self.windows, self.make_cache, self.chunk = model, windows, make_cache, chunk
        runs = sum(count + -(-count // GROUP) for count in counts)  # with those of the 16-bit model
        self.progress, self.done, self.forwards = progress, 0, runs * len(windows) * -(-(windows.shape[1] - 1) // chunk)
        self.running: Run | None = None
        self.outputs: dict[int, torch.Tensor] = {}  # of attention in the 16-bit model, by layer
        self.power = {layer: [0.0, 0.0] for layer in self.full}  # of the output, and of its error

    def measure(self, runs: Sequence[Run]) -> list[torch.Tensor]:
        """The KL divergence of the 16-bit model's predictions from each run's, `[N, S]` in nats."""
        found = []
        for begin in range(0, len(runs), GROUP):
            group = runs[begin : begin + GROUP]
            baseline = Run(self, kept=[run.compared for run in group])
            named = {str(number): (run, run.make_cache) for number, run in enumerate((baseline, *group))}
            by_run, _ = by_token(named, self.windows, step=self.chunk)
            found += [by_run[name][1] for name in list(named)[1:]]
        return found

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Until the block ends, `compared` and `nudged` of runs see the outputs of attention modules, by forward hooks."""
        handles = [
            module.register_forward_hook(lambda module, args, output, layer=layer: self._see(layer, output))
            for layer, module in self._attention_modules().items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _attention_modules(self) -> dict[int, nn.Module]:
        """By layer, its attention module: the innermost one that is running when the layer's cache is called.

        So no name of a module is needed. It takes a forward of one token.
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

        def leave(*_: Any) -> None:  # a hook that returned the module would replace its output
            running.pop()

        cache = DynamicCache(config=self.model.config)
        for layer in self.full:
            cache.layers[layer] = Asking(layer)
        modules = list(self.model.modules())
        handles = [module.register_forward_pre_hook(lambda module, args: running.append(module)) for module in modules]
        handles += [module.register_forward_hook(leave) for module in modules]
        try:
            forward(self.model, self.windows[:1, :1].to(self.model.device), cache)
        finally:
            for handle in handles:
                handle.remove()
        return found

    def _see(self, layer: int, output: Any) -> Any:
        """The output of a layer's attention module. The model passes it on, unless this returns another."""
        run, out = self.running, output[0] if isinstance(output, tuple) else output
        if run is None:
            return None
        if layer in run.kept:
            self.outputs[layer] = out
        elif layer == run.compared:
            exact, found = self.outputs.pop(layer).double(), out.double()
            for at, x in enumerate((exact, found - exact)):
                self.power[layer][at] += float(x.square().sum())
        elif layer == run.nudged:
            out = out * (1 + torch.finfo(out.dtype).eps)
            return (out, *output[1:]) if isinstance(output, tuple) else out
        return None

    def sqnr_db(self, layer: int) -> float:
        """Of the layer's attention output in the runs that compared it, in dB; infinite without an error."""
        signal, error = self.power[layer]
        return 10 * math.log10(signal / error) if signal and error else math.inf


class Run:
    """The model as `by_token` calls it, in one run.

    Args:
        runs: the model and its windows.
        in_8_bits: the layers whose K and V are in 8 bits; none: a 16-bit cache, transformers' own.
        compared: the layer whose attention output is compared with the 16-bit model's. If only this layer is in 8 bits, both outputs are of
            the same inputs: all layers before it are in 16 bits.
        kept: layers whose attention output is kept for the runs that compare it.
        nudged: the layer whose attention output is changed by its last bit.
    """

    def __init__(
        self,
        runs: LayerRuns,
        in_8_bits: Sequence[int] = (),
        *,
        compared: int | None = None,
        kept: Sequence[int | None] = (),
        nudged: int | None = None,
    ) -> None:
        self.runs, self.in_8_bits, self.compared, self.kept, self.nudged = runs, in_8_bits, compared, kept, nudged

    @property
    def device(self) -> torch.device:
        """The model's."""
        return self.runs.model.device

    @property
    def forward(self) -> Any:
        """The model's, whose parameters `cache_keyword` reads."""
        return self.runs.model.forward

    def make_cache(self) -> Cache:
        """An empty cache with this run's layers in 8 bits."""
        if not self.in_8_bits:
            return DynamicCache(config=self.runs.model.config)
        return self.runs.make_cache([layer for layer in self.runs.full if layer not in self.in_8_bits])

    def __call__(self, **inputs: Any) -> Any:
        """The model's forward."""
        runs = self.runs
        runs.running = self
        try:
            out = runs.model(**inputs)
        finally:
            runs.running = None
        runs.done += 1
        if runs.progress:
            runs.progress(runs.done, runs.forwards)
        return out
