"""The process that compiles kernels, and forks to compile several at a time.

It does not initialize CUDA, so it can fork. Plans for the device "meta", which are kept for one machine, stay out of the caller's process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from ..kernels.machine import Machine, plan_for
from .calls import Layer, launches

if TYPE_CHECKING:
    from ..kernels.launch import Launch

SERVE = f"from {__name__} import serve; serve()"  # the program of the process
SLOWEST_FIRST = "prefill", "append", "decode", "portable"  # parts of `kernels`, then the others


@contextmanager
def compiling() -> Iterator[subprocess.Popen[str]]:
    """A process that runs `serve`, and ends with the block."""
    path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": path}
    with subprocess.Popen(
        [sys.executable, "-c", SERVE], env=environment, start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        except BrokenPipeError:  # the process has ended
            process.stdin = None
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # including the processes that it has forked
            raise
    if process.returncode:
        raise RuntimeError(f"the process that compiles ended with exit code {process.returncode}; its message is above")


# In the other process

_todo: tuple[list[Launch], Any]  # kernels and the target; processes inherit it, because kernels cannot be pickled


def serve() -> None:
    """Read a request of `warmup`, compile, and write a line for each kernel: how many there are, its name and its seconds."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other prints must not mix with the answers
    from triton.backends.compiler import GPUTarget

    from .. import kernels
    from ..kernels import append, compile, portable  # noqa: F401 - while the other process queries the GPU

    request = json.load(sys.stdin)
    target = GPUTarget(*request["target"])
    compile.use_ptxas(target, request["ptxas"])
    plan_for(Machine(*request["machine"]))
    found: dict[tuple, Launch] = {}
    for layer in request["layers"]:
        found |= launches(Layer(**layer | {"attention": frozenset(layer["attention"])}))
    names = [made.kernel.fn.__name__ for made in found.values()]
    parts = [made.kernel.fn.__module__.removeprefix(f"{kernels.__name__}.").split(".")[0] for made in found.values()]
    order = sorted(range(len(names)), key=lambda i: SLOWEST_FIRST.index(parts[i]) if parts[i] in SLOWEST_FIRST else len(SLOWEST_FIRST))
    print(json.dumps([len(names)]), file=lines, flush=True)
    global _todo
    _todo = list(found.values()), target
    with ProcessPoolExecutor(request["processes"], mp_context=get_context("fork")) as pool:
        jobs = {pool.submit(_compile, i): names[i] for i in order}
        prepared = pool.submit(_prepare)
        try:
            for job in as_completed(jobs):
                print(json.dumps([len(names), jobs[job], job.result()]), file=lines, flush=True)
            prepared.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _compile(number: int) -> float:
    """Compile a kernel, and return the compile time in seconds."""
    from ..kernels.compile import build_launcher, compiled

    begun = time.perf_counter()
    kernels, target = _todo
    made = kernels[number]
    build_launcher(compiled(made.kernel, made.args, made.constants, target))
    return time.perf_counter() - begun


def _prepare() -> None:
    from ..kernels.compile import build_driver

    build_driver(_todo[1])
