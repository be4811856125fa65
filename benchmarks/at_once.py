"""Engines of a server, each in a process of its own, as many at once as the machine's GPUs and cores allow.

A timed engine has a GPU to itself, and the first GPU is kept for those that wait. Others share GPUs, as many as there are cores for.
Without a GPU, engines run one after another.

`FP8ATTN_ENGINES=FOLDER` keeps what each engine found, and its log, in files of that folder. An engine whose file is there does not run
again, so an interrupted run continues.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import NamedTuple

TIMED_CORES = 4  # that a timed engine has to itself
MOST = 14  # engines of a GPU, each with some 6 GB beside its model
A_CORE = 0.75  # processes for each core: starting an engine is mostly the work of one core, and it often waits
THREADS = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "2"}  # of engines that share cores
LONGEST = 240  # seconds of an engine on GPUs


class Engine(NamedTuple):
    """A process of `benchmarks.vllm_engine`: a task and its arguments.

    Attributes:
        gpus: how many it uses.
        timed: it has its GPU, and more cores, to itself.
    """

    task: str
    arguments: tuple[str, ...]
    gpus: int = 1
    timed: bool = False

    def __str__(self) -> str:
        return " ".join((self.task, *self.arguments))


class Place(NamedTuple):
    gpus: tuple[int, ...]
    cores: tuple[int, ...]


class Machine:
    """Starts engines in the order in which they are submitted, each as soon as there is a place for it.

    Args:
        gpus: their number.
        cores: the cores to use.
    """

    def __init__(self, gpus: int, cores: Sequence[int]) -> None:
        self.gpus, self._cores = gpus, set(cores)
        self._running: list[tuple[Engine, Place]] = []
        self._waiting: list[Engine] = []
        self._futures: dict[Engine, Future] = {}
        self._lock = threading.RLock()

    def submit(self, engine: Engine) -> Future:
        """The rows that the engine finds; submitted again, it is the same one."""
        with self._lock:
            if engine not in self._futures:
                self._futures[engine] = future = Future()
                kept = kept_file(engine)
                if kept is not None and kept.exists():
                    future.set_result(json.loads(kept.read_text()))
                else:
                    self._waiting.append(engine)
                    self._start_some()
            return self._futures[engine]

    def _start_some(self) -> None:
        for engine in list(self._waiting):
            gpus = self._open(engine)
            if self.gpus and len(gpus) < engine.gpus:
                continue
            cores = self._take(engine)
            if not cores:
                break  # the next ones, which may be smaller, let it have them
            place = Place(tuple(gpus[: engine.gpus]), tuple(cores))
            self._waiting.remove(engine)
            self._running.append((engine, place))
            threading.Thread(target=self._run, args=(engine, place), daemon=True).start()

    def _open(self, engine: Engine) -> list[int]:
        """The GPUs that may take an engine now, those with the fewest engines first."""
        count = {gpu: sum(gpu in place.gpus for _, place in self._running) for gpu in range(self.gpus)}
        if engine.timed:
            return [gpu for gpu in count if not count[gpu]]
        kept = {gpu for other, place in self._running if other.timed for gpu in place.gpus}
        kept |= {0} if any(other.timed for other in self._waiting) else set()  # the first GPU is for those that are timed
        return sorted((gpu for gpu in count if gpu not in kept and count[gpu] < MOST), key=count.__getitem__)

    def _take(self, engine: Engine) -> list[int]:
        """The cores for an engine; none if there are too few now."""
        alone = {core for other, place in self._running if other.timed for core in place.cores}
        free = sorted(self._cores - alone)
        if not self.gpus:
            return [] if self._running else free
        if engine.timed:
            return free[:TIMED_CORES]
        shared = free[TIMED_CORES * sum(other.timed for other in self._waiting[: self.gpus]) :]
        processes = sum(other.gpus for other, _ in self._running if not other.timed)
        return shared if processes + engine.gpus <= max(A_CORE * len(shared), engine.gpus) else []

    def _run(self, engine: Engine, place: Place) -> None:
        future = self._futures[engine]
        try:
            future.set_result(run(engine, place))
        except BaseException as problem:
            future.set_exception(problem)
        with self._lock:
            self._running.remove((engine, place))
            self._start_some()


def run(engine: Engine, place: Place) -> list[dict]:
    """The rows that an engine prints.

    Raises:
        RuntimeError: it failed; the message has the end of its log.
    """
    environment = os.environ | {"FP8ATTN_MADE": made()}
    if place.gpus:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        names = [seen[gpu] if gpu < len(seen) and seen[gpu] else str(gpu) for gpu in place.gpus]
        environment |= {"CUDA_VISIBLE_DEVICES": ",".join(names), "FP8ATTN_CORES": ",".join(map(str, place.cores))}
        environment |= {} if engine.timed else THREADS
    rows, lines = [], []
    command = [sys.executable, "-m", "benchmarks.vllm_engine", engine.task, *engine.arguments]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        limit = threading.Timer(LONGEST, process.kill)
        if place.gpus:
            limit.start()
        for line in process.stdout or ():
            lines.append(line)
            if line.startswith("ROW "):
                rows.append(json.loads(line.removeprefix("ROW ")))
            elif line.startswith("NOTE "):
                print(f"{engine}: {line.removeprefix('NOTE ')}", end="", flush=True)
        limit.cancel()
    kept = kept_file(engine)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.with_suffix(".log").write_text("".join(lines))
    if process.returncode:
        raise RuntimeError(f"{engine} failed with exit code {process.returncode}:\n{''.join(lines[-60:])}")
    if kept is not None:
        kept.write_text(json.dumps(rows))
    return rows


def kept_file(engine: Engine) -> Path | None:
    """Where what the engine finds is kept, if it is."""
    folder = os.environ.get("FP8ATTN_ENGINES")
    return None if not folder else Path(folder, "".join(c if c.isalnum() else "-" for c in str(engine)) + ".json")


@cache
def made() -> str:
    """A folder for checkpoints that engines make, and other engines read."""
    folder = tempfile.mkdtemp(prefix="fp8attn-vllm-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def machine() -> Machine:
    import torch

    return Machine(torch.cuda.device_count(), sorted(os.sched_getaffinity(0)))
