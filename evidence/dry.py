"""Runs cases of a benchmark without a GPU: returns the fingerprints of their launches on a GPU, or compiles their kernels ahead of time.

    python -m evidence.dry NAME < {"machine": {...}, "rows": [[case, impl], ...]}

Tensors are on the device "meta": they have shapes and no memory. What the host asks of a GPU is answered from the `meta` of a results
file (`pretend`). Launches are noted, not made, and compiled for that GPU, in a process a core. The Triton that is imported is
the one that compiles. It prints a fingerprint for each row, null where the benchmark has no such case and implementation. Rows
`[case, null]` are of all implementations: all that their cases launch is compiled, and stays in Triton's cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from typing import Any

from .fingerprint import ROOT, digest, of_launches
from .results import meta

_todo: list[tuple] = []  # inherited by the processes that compile: kernels cannot be pickled


def pretend(machine: dict) -> None:
    """Answer for a GPU, from now on in this process: every question that the host asks a device."""
    import torch

    import fp8attn
    from benchmarks import problem
    from fp8attn import backends
    from fp8attn.kernels.devices import DEFAULT
    from fp8attn.kernels.machine import Machine, plan_for

    problem.DEVICE = "meta"  # before a benchmark is imported
    capability = tuple(machine["capability"])
    name = machine.get("device", DEFAULT.name)
    plan_for(Machine(machine["sms"], machine["shared"], capability >= (8, 9), name, capability == (9, 0)))
    answers: list[tuple[Callable, Callable]] = [
        (backends.unsupported_reason, lambda backend, device, dtype=torch.bfloat16: None),
        (backends.select_backend, lambda backend, device, dtype: "hopper" if backend == "auto" and capability == (9, 0) else backend),
    ]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == fp8attn.__name__:
            for attribute, value in list(vars(module).items()):
                for original, answer in answers:
                    if value is original or getattr(value, "__wrapped__", None) is original:  # as it is, or what keeps its results
                        setattr(module, attribute, answer)


def launches_of(name: str, rows: list[tuple[str, str | None]]) -> dict[tuple[str, str], list]:
    """The launches of a benchmark's cases, by case and implementation. Those that the benchmark does not have are left out."""
    from fp8attn.kernels.launch import recording

    benchmark = import_module(f"benchmarks.{name}")
    found = {}
    with recording(dry=True) as launches:
        for case in dict.fromkeys(case for case, _ in rows if case in benchmark.CASES):
            wanted = {impl for each, impl in rows if each == case}
            launches.clear()
            makers = [benchmark.calls] + ([benchmark.ceilings] if hasattr(benchmark, "ceilings") else [])
            calls = {impl: call for maker in makers for impl, call in maker(case).items()}
            if None in wanted:
                found[case, None] = launches.copy()  # what makes the inputs
            for impl, call in calls.items():
                if not wanted.isdisjoint((impl, None)):
                    launches.clear()
                    call()
                    found[case, impl] = launches.copy()
    return found


def fingerprints(name: str, rows: list[tuple[str, str | None]], target: Any) -> list[str | None]:
    from fp8attn.kernels.compile import specialization

    found = launches_of(name, rows)
    kernels = {specialization(made): made for launches in found.values() for made in launches}
    _todo[:] = [(made, target) for made in kernels.values()]
    with ProcessPoolExecutor(min(os.cpu_count() or 1, len(_todo) or 1), mp_context=get_context("fork")) as pool:
        ptx = dict(zip(kernels, pool.map(_compile, range(len(_todo))), strict=True))
    return [of_launches([(x, ptx[specialization(x)]) for x in found[row]]) if row in found and row[1] else None for row in rows]


def _compile(number: int) -> str:
    from fp8attn.kernels.compile import compiled

    from .ptx import normalized

    made, target = _todo[number]
    return digest(normalized(compiled(made.kernel, made.args, made.given, target).asm["ptx"]))


def answer(name: str, request: dict, **environment: str) -> list[str | None]:
    """The output of this module for a request, in a separate process.

    Raises:
        RuntimeError: the dry run failed.
    """
    command = [sys.executable, "-m", "evidence.dry", name]
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, cwd=ROOT, env=inherited | environment)
    if run.returncode:
        raise RuntimeError(f"the dry run of {name} failed:\n{run.stderr}")
    return json.loads(run.stdout.splitlines()[-1])


def compile_ahead(name: str, cases: list[str]) -> None:
    """Leave the kernels of cases in Triton's cache, compiled side by side; nothing where a benchmark has no `calls`, or no GPU is here.
    A kernel that is missed is compiled when it is first launched."""
    if hasattr(import_module(f"benchmarks.{name}"), "calls") and "capability" in (machine := meta()):
        try:
            answer(name, {"machine": machine, "rows": [(case, None) for case in cases]})
        except RuntimeError as problem:
            print(f"kernels are compiled as they are launched: {str(problem).splitlines()[-1]}", flush=True)


def main() -> None:
    from triton.backends.compiler import GPUTarget

    request = json.load(sys.stdin)
    capability = request["machine"]["capability"]
    pretend(request["machine"])
    rows = [(case, impl) for case, impl in request["rows"]]
    print(json.dumps(fingerprints(sys.argv[1], rows, GPUTarget("cuda", 10 * capability[0] + capability[1], 32))))


if __name__ == "__main__":
    main()
