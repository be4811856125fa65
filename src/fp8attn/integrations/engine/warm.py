"""Compiles and loads the kernels of a model before the first request, so that no request waits for a compiler."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from ...params import options_of
from ...precompile import Kernel, compile_kernels
from ...precompile.calls import MOST, Layer
from .layer import EngineLayer

logger = logging.getLogger(__name__)
_warm: set[Layer] = set()  # whose kernels this process has


def warm_up(layers: Iterable[EngineLayer], dtype: torch.dtype, device: torch.device, longest: int = MOST) -> None:
    """Compile and load the kernels of these layers side by side, for all that they have in common.

    Args:
        longest: the most new tokens of a sequence for which these layers call attention.
    """
    import triton  # an engine for CPUs may lack it

    layers = list(layers)
    means = any(layer.has_means for layer in layers)
    shapes = {shape for layer in layers for shape in _shapes(layer, dtype, means, longest)} - _warm
    if not shapes:
        return
    begun = time.perf_counter()
    folder = Path(triton.knobs.cache.dir)
    folder.mkdir(parents=True, exist_ok=True)
    load = partial(compile_kernels, sorted(shapes, key=repr), device)
    versions = metadata.version("fp8attn"), triton.__version__
    kernels = _first(folder, (sorted(map(repr, shapes)), device, versions), load) or load()
    _warm.update(shapes)
    logger.info("fp8attn: %d kernels ready in %.1f s", len(kernels), time.perf_counter() - begun)


def _shapes(layer: EngineLayer, dtype: torch.dtype, means: bool, longest: int) -> Iterator[Layer]:
    """The layer's shapes, as it has or has not the means that some layers have."""
    options = options_of(
        window=layer.window, softcap=layer.softcap, sinks=layer.sinks, exact=layer.options.exact,
        batch_invariant=layer.batch_invariant,
    )  # fmt: skip
    for has_means in [True] if layer.has_static_scales else [False, True] if means else [False]:
        yield Layer(
            layer.num_q_heads, layer.num_kv_heads, layer.format.spec, dtype=dtype, backend="auto",
            key_dtype=layer.options.key_dtype, k_mean=has_means, v_mean=has_means,
            static_scales=layer.has_static_scales, advance=False, attention=frozenset(options),
            longest=longest,
        )  # fmt: skip


def _first(folder: Path, options: Any, compile: Callable[[], list[Kernel]]) -> list[Kernel] | None:
    """What `compile` returns in the first of a machine's processes that need the same kernels. The others wait for it,
    and get None: they find the kernels in Triton's cache, and load them side by side. Where a mark is out of date,
    several processes compile the same.
    """
    mark = folder / f"fp8attn-{hashlib.sha256(repr(options).encode()).hexdigest()[:16]}.compiled"
    if mark.exists():
        return None
    with FileLock(folder / "fp8attn.lock"):
        if mark.exists():
            return None
        kernels = compile()
        mark.touch()
        return kernels
