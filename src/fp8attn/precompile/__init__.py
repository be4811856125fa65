"""Compiles every kernel that a model can use, before it serves: for `warmup` and the command `fp8attn warmup`.

Triton compiles a kernel when it is first launched with arguments of new types or constants. `compile_kernels` runs the
package's own functions on tensors without memory (the device "meta"), for a grid of prompts, chunks, steps and batches.
Launches are recorded and not run. Threads then compile each different kernel once. Triton's cache on disk
(`TRITON_CACHE_DIR`) keeps the results. The first call in another process then loads its kernel from there and compiles
nothing.

| file | what |
|---|---|
| `calls.py` | `Layer`, the calls that it makes, and the kernels that these launch |
| `first.py` | the threads that compile, and the kernels of a cache's next calls |
| `cores.py` | how many are compiled at a time |
| `target.py` | the GPU that kernels are compiled for |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, as_completed
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..errors import UsageError
from ..kernels.machine import plans_are_for
from . import first
from .calls import DTYPES, Layer, launches
from .target import aim, indexed


class Kernel(NamedTuple):
    """A kernel that `warmup` compiled, or found in Triton's cache.

    Attributes:
        name: the name of its function.
        seconds: wall time of its thread in seconds. Threads wait for each other's Python code.
    """

    name: str
    seconds: float


def compile_kernels(
    layers: Sequence[Layer],
    device: torch.device | str,
    *,
    target: str | None = None,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Kernel]:
    """Compile the kernels of layers in parallel, into Triton's cache on disk. `fp8attn.warmup` makes the layers of a
    model, and explains.

    Args:
        layers: layers of one dtype and backend, which may be `"auto"`: then each layer gets the one of its head_dim.
        device, target, threads, progress: as `warmup` takes them.
    Raises:
        UsageError: there are no kernels for the device, target, dtype or shape; or this process has planned launches
            for another GPU, or runs Triton's interpreter.
        Exception: a kernel did not compile; Triton's error.
    """
    aims = {
        dim: aim(device, DTYPES[layers[0].dtype], layers[0].backend, target, dim)
        for dim in {layer.head_dim for layer in layers}
    }
    from triton import knobs
    from triton.backends.compiler import GPUTarget

    from ..kernels.compile import compiling_for

    _, triton_target, planned = aims[layers[0].head_dim]
    if knobs.runtime.interpret:
        raise UsageError(
            "warmup compiles kernels, and TRITON_INTERPRET=1 interprets them: unset it before Triton is imported"
        )
    if not plans_are_for(planned):
        raise UsageError(
            f"this process has planned launches for another GPU than {target or device}: run warmup in a process of "
            f"its own"
        )
    index = indexed(device).index if target is None else None

    def report(jobs: set[Future[float]]) -> None:
        for done, _ in enumerate(as_completed(jobs), 1):
            if progress is not None:
                progress(done, len(jobs))

    with first.one_at_a_time, nullcontext() if target is None else compiling_for(GPUTarget(*triton_target)):
        found: dict[tuple, Any] = {}
        for layer in layers:
            found |= {
                (index, key): made for key, made in launches(replace(layer, backend=aims[layer.head_dim][0])).items()
            }
        if progress is not None:
            progress(0, len(found))
        jobs = first.compile_side_by_side(found, index, report, threads)
    return [Kernel(found[key].kernel.fn.__name__, job.result()) for key, job in jobs.items()]
