"""Runs cases of a benchmark without a GPU, and gives the fingerprints of what they would launch on one.

    python -m benchmarks.dry NAME < {"machine": {...}, "rows": [[case, impl], ...]}

Tensors are on the device "meta": they have shapes and no memory. What the host asks of a GPU is answered from the `meta` of a results
file (`pretend`). Launches are noted, not made, and compiled by `offline` for that GPU. The Triton that is imported is the one that
compiles. It prints a fingerprint for each row, null where the benchmark has no such case and implementation.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from triton.backends.compiler import GPUTarget

import fp8attn
from fp8attn import backends
from fp8attn.kernels import devices, fp8, launch, portable
from fp8attn.kernels.launch import Launch, Tiles, recording

from . import problem
from .fingerprint import digest, of_launches
from .offline import compiled, normalized

PROCESSES = os.cpu_count() or 1


def pretend(machine: dict) -> None:
    """Answer for a GPU, from now on in this process: every question that the host asks a device."""
    problem.DEVICE = "meta"  # before a benchmark is imported
    capability = tuple(machine["capability"])
    answers: list[tuple[Callable, Callable]] = [
        (launch.num_sms, lambda device: machine["sms"]),
        (devices.chip, lambda device: devices.named(machine.get("device", devices.DEFAULT.name))),
        (fp8.is_native, lambda device: capability >= (8, 9)),
        (portable._device, lambda device: (machine["sms"], machine["shared"])),
        (backends.unsupported_reason, lambda backend, device, dtype=torch.bfloat16: None),
        (backends.select_backend, lambda backend, device, dtype: "hopper" if backend == "auto" and capability == (9, 0) else backend),
    ]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == fp8attn.__name__:
            for attribute, value in list(vars(module).items()):
                for original, answer in answers:
                    if value is original or getattr(value, "__wrapped__", None) is original:  # as it is, or what keeps its results
                        setattr(module, attribute, answer)


def launches_of(name: str, rows: list[tuple[str, str]]) -> dict[tuple[str, str], list[Launch]]:
    """What the cases of a benchmark launch, by case and implementation; those that it does not have are left out."""
    benchmark = importlib.import_module(f"benchmarks.{name}")
    found = {}
    with recording(dry=True) as launches:
        for case in dict.fromkeys(case for case, _ in rows):
            try:
                calls = benchmark.calls(case)
            except KeyError:
                continue
            for impl, call in calls.items():
                if (case, impl) in rows:
                    launches.clear()
                    call()
                    found[case, impl] = launches.copy()
    return found


def specialization(made: Launch) -> tuple:
    """Launches with equal ones have one compiled kernel: at least what Triton looks at."""
    kinds = tuple(_kind(x, param.do_not_specialize) for x, param in zip(made.args, made.kernel.params, strict=False))
    return made.kernel.fn.__qualname__, tuple(sorted(made.given.items(), key=str)), kinds


def _kind(x: Any, plain: bool) -> Any:
    if isinstance(x, Tiles):
        return x.dtype, x.view.block, x.view.swizzled
    if isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr() % 16
    if isinstance(x, int):
        return not plain and (x == 1, x % 16 == 0), x.bit_length() > 31
    return type(x)


def fingerprints(name: str, rows: list[tuple[str, str]], target: GPUTarget) -> list[str | None]:
    found = launches_of(name, rows)
    kernels = {specialization(made): made for launches in found.values() for made in launches}
    global _todo  # inherited by the processes: kernels cannot be pickled
    _todo = [(made, target) for made in kernels.values()]
    with ProcessPoolExecutor(min(PROCESSES, len(_todo) or 1), mp_context=get_context("fork")) as pool:
        ptx = dict(zip(kernels, pool.map(_compile, range(len(_todo))), strict=True))
    return [of_launches([(x, ptx[specialization(x)]) for x in found[row]]) if row in found else None for row in rows]


def _compile(number: int) -> str:
    made, target = _todo[number]
    return digest(normalized(compiled(made.kernel, made.args, made.given, target).asm["ptx"]))


def main() -> None:
    given = json.load(sys.stdin)
    capability = given["machine"]["capability"]
    pretend(given["machine"])
    rows = [(case, impl) for case, impl in given["rows"]]
    print(json.dumps(fingerprints(sys.argv[1], rows, GPUTarget("cuda", 10 * capability[0] + capability[1], 32))))


if __name__ == "__main__":
    main()
