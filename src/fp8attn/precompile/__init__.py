"""Compiles every kernel that a model can use, before it serves: for `warmup` and the command `fp8attn warmup`.

Triton compiles a kernel when it is first launched with arguments of new types or constants. `compile_kernels` runs the package's own
functions on tensors without memory (the device "meta"), for a grid of prompts, chunks, steps and batches. Launches are recorded and not
run. Several processes then compile each different kernel once. Triton's cache on disk (`TRITON_CACHE_DIR`) keeps the results. The first
call in any process then loads its kernel from there and compiles nothing.

| file | what |
|---|---|
| `calls.py` | `Layer`, the calls that it makes, and the kernels that these launch |
| `first.py` | the kernels of a cache's next calls, compiled in threads before the first of them |
| `cores.py` | how many are compiled at a time |
| `target.py` | the GPU that kernels are compiled for |
| `compiler.py` | the process that compiles |
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch

from ..kernels.machine import Machine, machine, plan_for
from .calls import DTYPES, Layer, launches
from .compiler import compiling
from .cores import cores
from .target import aim, indexed


class Kernel(NamedTuple):
    """A kernel that `warmup` compiled, or found in Triton's cache.

    Attributes:
        name: the name of its function.
        seconds: compile time in seconds, on one core.
    """

    name: str
    seconds: float


def compile_kernels(
    layers: Sequence[Layer],
    device: torch.device | str,
    *,
    target: str | None = None,
    load_kernels: bool = False,
    processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Kernel]:
    """Compile the kernels of layers in parallel, into Triton's cache on disk. `fp8attn.warmup` makes the layers of a model, and explains.

    Args:
        layers: layers of one dtype and backend, which may be `"auto"`: then each layer gets the one of its head_dim.
        device, target, load_kernels, processes, progress: as `warmup` takes them.
    Raises:
        UsageError: there are no kernels for the device, target, dtype or shape.
        RuntimeError: a kernel did not compile; the message is the compiler's.
    """
    with compiling() as process:  # it imports modules while this process queries the GPU
        aims = {dim: aim(device, DTYPES[layers[0].dtype], layers[0].backend, target, dim) for dim in {layer.head_dim for layer in layers}}
        layers = [replace(layer, backend=aims[layer.head_dim][0]) for layer in layers]
        _, triton_target, numbers = aims[layers[0].head_dim]
        assert process.stdin is not None and process.stdout is not None
        request = {"layers": [*map(asdict, layers)], "target": triton_target, "machine": numbers, "processes": processes or cores()}
        json.dump(request | {"ptxas": _ptxas_version(triton_target)}, process.stdin, default=sorted)  # JSON has no sets
        process.stdin.close()
        kernels: list[Kernel] = []
        for line in process.stdout:
            total, *kernel = json.loads(line)
            if kernel:
                kernels.append(Kernel(*kernel))
            if progress is not None:
                progress(len(kernels), total)
    if load_kernels:
        _load(layers, machine(indexed(device)))
    return kernels


def _ptxas_version(triton_target: tuple[Any, ...]) -> str:
    """`compile.ptxas_version`; for the arguments of a `GPUTarget`."""
    from triton.backends.compiler import GPUTarget

    from ..kernels.compile import ptxas_version

    return ptxas_version(GPUTarget(*triton_target))


def _load(layers: Sequence[Layer], of: Machine) -> None:
    """Load the kernels of these layers, which are in Triton's cache on disk, on the current device."""
    from ..kernels.compile import loaded

    plan_for(of)
    for layer in layers:
        for made in launches(layer).values():
            loaded(made.kernel, made.args, made.constants)
