"""Compiles every kernel that a model can use, before it serves: for `warmup` and the command `fp8attn warmup`.

Triton compiles a kernel when it is first launched with arguments of new types or constants. `compile_kernels` runs the
package's own functions on tensors without memory (the device "meta"), for a grid of prompts, chunks, steps and batches.
Launches are recorded and not run. Threads then compile each different kernel once. Triton's cache on disk
(`TRITON_CACHE_DIR`) keeps the results. The first call in another process then loads its kernel from there and compiles
nothing.

| file | what |
|---|---|
| `calls.py` | `Layer`, and the calls that it makes |
| `first.py` | the kernels that calls launch, and the threads that compile them |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from dataclasses import replace
from typing import NamedTuple

import torch

from ..backends import select_backend
from ..errors import UsageError
from ..kernels.machine import machine, plans_are_for
from . import first
from .calls import Layer, calls_of


class Kernel(NamedTuple):
    """A kernel that `warmup` compiled, or found in Triton's cache.

    Attributes:
        seconds: wall time of its thread in seconds. Threads wait for each other's Python code.
    """

    name: str
    seconds: float


def compile_kernels(
    layers: Sequence[Layer],
    device: torch.device | str,
    *,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Kernel]:
    """Compile the kernels of layers in parallel, into Triton's cache on disk. `fp8attn.warmup` makes the layers of a
    model, and explains.

    Args:
        layers: layers of one dtype and backend, which may be `"auto"`: then each layer gets the one of its head_dim.
        device, threads, progress: as `warmup` takes them.
    Raises:
        UsageError: there are no kernels for the device, dtype or shape; or this process has planned launches
            for another GPU, or runs Triton's interpreter.
        Exception: a kernel did not compile; Triton's error.
    """
    from triton import knobs

    device = _gpu(device)
    backends = [select_backend(layer.backend, device, layer.dtype, layer.head_dim) for layer in layers]
    if "reference" in backends:
        raise UsageError("the backend 'reference' has no kernels to compile; use 'auto'")
    if knobs.runtime.interpret:
        raise UsageError(
            "warmup compiles kernels, and TRITON_INTERPRET=1 interprets them: unset it before Triton is imported"
        )
    if not plans_are_for(machine(device)):
        raise UsageError(
            f"this process has planned launches for another GPU than {device}: run warmup in a process of its own"
        )
    layers = [replace(layer, backend=backend) for layer, backend in zip(layers, backends, strict=True)]
    with first.one_at_a_time:
        launches = first.record(call for layer in layers for call in calls_of(layer))
        if progress is not None:
            progress(0, len(launches))
        with first.compiling(launches, device.index, threads) as jobs:
            for done, _ in enumerate(as_completed(jobs.values()), 1):
                if progress is not None:
                    progress(done, len(jobs))
    return [Kernel(launches[key].kernel.fn.__name__, job.result()) for key, job in jobs.items()]


def _gpu(device: torch.device | str) -> torch.device:
    """The device with its index.

    Raises:
        UsageError: it is not a GPU, or there is none.
    """
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        reason = f"{device} is not a GPU" if device.type != "cuda" else "PyTorch finds no GPU"
        raise UsageError(f"warmup compiles for a GPU, and {reason}. Run it on the machine that will serve")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
