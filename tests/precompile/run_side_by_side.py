"""Compiles kernels of a decode step in threads, one of which fails, as for a GPU, and prints as JSON what there is
then.

A process of its own (`test_first.py` runs it), because a process with TRITON_INTERPRET=1 cannot compile.
"""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget

from fp8attn.kernels import compile, machine
from fp8attn.precompile import calls, first
from tests.support.machines import TARGETS

LAYER = calls.Layer(8, 2, 128, backend="triton")
CALLS: list[Callable[[], None]] = [
    partial(calls.append, LAYER, 1, False),
    partial(calls._combine, LAYER, 2, 1),
    partial(calls.attend, LAYER, 1, 1, 0),
]
FAILS = "_combine_kernel"
GPU: Any = SimpleNamespace(type="cuda", index=None)  # the driver is replaced, and threads need no current device


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def unprepared() -> list[str]:
    """The kernels of the calls that `prepare` has not compiled."""
    return [made.kernel.fn.__name__ for key, made in first.record(CALLS).items() if (None, key) not in first._ready]


def main() -> None:
    machine.machine = lambda device: TARGETS["sm_80"]
    torch.cuda.is_current_stream_capturing = lambda: False
    machine.plan_for(TARGETS["sm_80"])
    logged = io.StringIO()
    logging.basicConfig(stream=logged, format="%(levelname)s %(message)s", level=logging.INFO)
    compiled: list[str] = []
    threads: set[str] = set()
    knobs.compilation.listener = lambda *, src, **_: (
        compiled.append(src.name),
        threads.add(threading.current_thread().name),
    )
    compiling = compile.compiled

    def load(kernel: Any, *args: Any, **target: Any) -> Any:
        if kernel.fn.__name__ == FAILS:
            raise OSError("no space left")
        return compiling(kernel, *args, **target)

    launches = first.record(CALLS)
    with compile.compiling_for(GPUTarget("cuda", 80, 32)), patch.object(sys, "stderr", Terminal()) as terminal:
        with patch.object(compile, "compiled", load), patch.object(first, "QUIET", 0.0):
            first.prepare(GPU, CALLS)
        shown = terminal.getvalue()
        left = unprepared()
        first.prepare(GPU, CALLS)
    print(json.dumps({
        "names": [made.kernel.fn.__name__ for made in launches.values()], "compiled": compiled,
        "threads": sorted(threads), "left": left,
        "shown": shown, "logged": logged.getvalue(), "at last": unprepared(),
        "alive": threading.active_count(),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
