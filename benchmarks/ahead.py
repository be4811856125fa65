"""Compiles the kernels of benchmarks' cases side by side, before they are measured, in a process that needs no GPU.

    python -m benchmarks.ahead < {"machine": [...], "arch": 90, "cases": {"prefill": ["D128-causal-S16384"], ...}}

Tensors are on the device "meta": they have shapes and no memory. What the host asks of a GPU is answered for the
machine that is given (`pretend`). Launches are recorded, not made, and compiled for that GPU by as many processes as
there are cores. The kernels stay in Triton's cache on disk, where the benchmarks find them. A kernel that is missed is
compiled when it is first launched.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from typing import Any

from evidence.results import ROOT

_todo: list[tuple] = []  # inherited by the processes that compile: kernels cannot be pickled


def compile_ahead(cases: Mapping[str, Sequence[str]]) -> None:
    """Compile the kernels of cases, by benchmark. Benchmarks without `calls` are left out. Without a GPU it does
    nothing.
    """
    import torch

    chosen = {
        name: list(found) for name, found in cases.items() if hasattr(import_module(f"benchmarks.{name}"), "calls")
    }
    if not chosen or not torch.cuda.is_available():
        return
    from fp8attn.kernels.machine import machine

    device = torch.device("cuda", torch.cuda.current_device())
    major, minor = torch.cuda.get_device_capability(device)
    request = {"machine": machine(device), "arch": 10 * major + minor, "cases": chosen}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.ahead"]
    ended = subprocess.run(
        command, input=json.dumps(request), capture_output=True, text=True, cwd=ROOT, env=environment
    )
    print(ended.stdout, end="")
    if ended.returncode:
        print(f"kernels are compiled as they are launched: {ended.stderr[-2000:]}", flush=True)


def pretend(machine: Sequence[Any]) -> None:
    """Answer for a GPU, from now on in this process: every question that the host asks a device.

    Args:
        machine: the fields of `kernels.machine.Machine`.
    """
    import torch

    import fp8attn
    from fp8attn import backends
    from fp8attn.cache import paged
    from fp8attn.kernels.machine import Machine, plan_for

    from . import problem

    problem.DEVICE = "meta"  # before a benchmark is imported
    paged._device = torch.device  # a cache refuses "meta"
    planned = Machine(*machine)
    plan_for(planned)
    answers: list[tuple[Callable, Callable]] = [
        (backends.unsupported_reason, lambda backend, device, dtype=torch.bfloat16, head_dim=None: None),
        (
            backends.select_backend,
            lambda backend, *_: "hopper" if backend == "auto" and planned.hopper else backend,
        ),
    ]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == fp8attn.__name__:
            for attribute, value in list(vars(module).items()):
                for original, answer in answers:
                    if (
                        value is original or getattr(value, "__wrapped__", None) is original
                    ):  # as it is, or what keeps its results
                        setattr(module, attribute, answer)


def launches_of(name: str, case: str) -> Iterator[tuple[str, list]]:
    """The launches that make a case's inputs (as `inputs`), and those of each of its implementations."""
    from fp8attn.kernels.launch import recording

    benchmark = import_module(f"benchmarks.{name}")
    with recording(dry=True) as launches:
        calls = benchmark.calls(case) | (benchmark.ceilings(case) if hasattr(benchmark, "ceilings") else {})
        yield "inputs", launches.copy()
        for impl, call in calls.items():
            launches.clear()
            call()
            yield impl, launches.copy()


def _compile(number: int) -> None:
    from fp8attn.kernels.compile import build_launcher, compiled

    made, target = _todo[number]
    build_launcher(compiled(made.kernel, made.args, made.constants, target))


def main() -> None:
    from triton.backends.compiler import GPUTarget

    from fp8attn.kernels.compile import specialization

    request = json.load(sys.stdin)
    pretend(request["machine"])
    import torch

    found = {}
    with torch.inference_mode():
        for name, cases in request["cases"].items():
            for case in cases:
                for _, launches in launches_of(name, case):
                    found |= {specialization(made): made for made in launches}
    target = GPUTarget("cuda", request["arch"], 32)
    _todo[:] = [(made, target) for made in found.values()]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork")) as pool:
        failures = [
            failure for job in [pool.submit(_compile, i) for i in range(len(_todo))] if (failure := job.exception())
        ]
    print(f"{len(_todo) - len(failures)} of {len(_todo)} kernels compiled", *failures, sep="\n", flush=True)


if __name__ == "__main__":
    main()
