"""Runs Python in a separate process in which Triton compiles. The test's process may have the interpreter
(`conftest.py`).
"""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from traceback import format_exc
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.beside import Beside

ROOT = Path(__file__).parents[2]
HANG = 3600  # seconds. However busy a machine is, only what never ends takes so long.


def environment() -> dict[str, str]:
    """The environment of this process, in which Triton compiles. Compiled kernels are kept until `make clean`."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {"TRITON_CACHE_DIR": str(ROOT / ".pytest_cache/triton"), **kept, "PYTHONPATH": path}


def run(*arguments: str | Path, **variables: str) -> str:
    """The output of `python *arguments`, run in the repository with these environment variables.
    It must exit with 0.
    """
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment() | variables,
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def call(module: str, function: str, *arguments: Any) -> Any:
    """Call `module.function(*arguments)` in a process that runs as long as this one, so that only the first call
    imports Triton.
    """
    with patch.dict(os.environ, environment(), clear=True):  # a process that begins inherits it
        answer = _beside()(module, function, *arguments)
    assert answer is not None, f"{module}.{function}{arguments} crashed, or did not end within {HANG} s"
    result, failure = answer
    assert failure is None, failure
    return result


@cache
def _beside() -> Beside:
    return Beside(_answer, HANG)


def _answer(module: str, function: str, *arguments: Any) -> tuple[Any, str | None]:
    """The result, or the error."""
    torch.set_num_threads(1)
    try:
        found = getattr(importlib.import_module(module), function)
        if not gc.get_freeze_count():
            gc.freeze()  # collections of garbage need not look at what is imported
        return found(*arguments), None
    except Exception:
        return None, format_exc()
