"""Compiles kernels side by side, in threads: those of a cache's next calls before the first of these, and those of
`warmup`.

Triton compiles a kernel when it is first launched, so a new process would compile the kernels of its first prompt one
after another. `prepare` records the launches of calls that will be made, and compiles each new kernel in a thread of
its own. MLIR, LLVM and ptxas, which take most of the time, do not hold Python's lock. A kernel that is in Triton's
cache on disk takes milliseconds; one that this process has prepared costs nothing.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ..kernels.launch import Launch

logger = logging.getLogger(__name__)
QUIET = 1.0  # seconds before anything is said: kernels on disk load in less

_ready: set[tuple] = set()  # the GPU's index and the specialization of each kernel that was compiled
one_at_a_time = Lock()  # two threads that make the same first calls compile once


def prepare(device: torch.device, calls: Iterable[Callable[[], None]]) -> None:
    """Compile the kernels of calls on `device`, if it is a GPU, that this process does not have.

    It does nothing in compiled code, while a CUDA graph is captured, and on a GPU that differs from the process's
    first. A kernel that does not compile is left to its launch, which compiles it again, and a warning is logged.

    Args:
        device: the GPU, with its index.
        calls: functions on tensors of the device "meta" (`calls.py`).
    """
    if device.type != "cuda" or torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return
    from ..kernels.machine import machine, plans_are_for

    with one_at_a_time:
        if not plans_are_for(machine(device)):
            return
        launches = {key: launch for key, launch in record(calls).items() if (device.index, key) not in _ready}
        if not launches:
            return
        with compiling(launches, device.index) as jobs:
            _show([*jobs.values()])
        for key, job in jobs.items():
            if (error := job.exception()) is not None:
                logger.warning(
                    "%s did not compile before it was needed (%s: %s). Its launch compiles it again.",
                    launches[key].kernel.fn.__name__, type(error).__name__,
                    (str(error).strip() or "no message").splitlines()[0],
                )  # fmt: skip


def record(calls: Iterable[Callable[[], None]]) -> dict[tuple, Launch]:
    """One launch of each kernel that the calls use, by its specialization, on the machine of `plan_for`."""
    from ..kernels.compile import specialization
    from ..kernels.launch import recording

    launches: dict[tuple, Launch] = {}
    with recording(dry=True) as recorded:
        for call in calls:
            call()
            for launch in recorded:
                launches.setdefault(specialization(launch), launch)
            recorded.clear()
    return launches


@contextmanager
def compiling(
    launches: Mapping[tuple, Launch], index: int | None, threads: int | None = None
) -> Iterator[dict[tuple, Future[float]]]:
    """Compile these kernels in threads while this lasts; it ends when all are compiled.

    Args:
        launches: at least one, by the specialization.
        index: of the GPU. None: compile for Triton's current driver, without a GPU.
        threads: how many compile at a time. Default: one for each core that this process may use.
    Yields:
        By the specialization, the job that compiles the kernel: its wall time in seconds, or what Triton raised.
    """
    from ..kernels.compile import build_launcher, compiled
    from ..kernels.keys import compute_key

    for launch in launches.values():
        compute_key(launch.kernel)  # in one thread: its keys depend on what it has computed

    def compile(launch: Launch) -> float:
        begun = time.perf_counter()
        with torch.accelerator.device_index(index):  # each thread has a current device of its own
            build_launcher(compiled(launch.kernel, launch.args, launch.constants, target=None))
        return time.perf_counter() - begun

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pool = ThreadPoolExecutor(min(len(launches), threads or cores), "fp8attn-compile")
    slowest_first = sorted(launches, key=lambda key: not launches[key].kernel.fn.__name__.startswith("prefill"))
    try:
        jobs = {key: pool.submit(compile, launches[key]) for key in slowest_first}
        yield jobs
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)  # an interrupted call does not wait for kernels that compile
        raise
    pool.shutdown()  # no thread is left when the caller may fork
    _ready.update((index, key) for key, job in jobs.items() if job.exception() is None)


def _show(jobs: list[Future[Any]]) -> None:
    """Wait for all jobs. If they take longer than `QUIET`, the log and a terminal say what this process waits for."""
    begun = time.perf_counter()
    _, running = wait(jobs, QUIET)
    if not running:
        return
    what = f"compiling {len(running)} kernels for this model and GPU, once; Triton's cache keeps them"
    logger.info(what)
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"fp8attn: {what}", file=sys.stderr, flush=True)
    wait(running)
    logger.info("compiled %d kernels in %.1f s", len(running), time.perf_counter() - begun)
