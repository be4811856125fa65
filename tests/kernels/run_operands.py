"""What `kernels.operands` does to the compilations of a process (`test_operands.py`). No machine code is made: ptxas
would take longest.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event
from typing import Any
from unittest.mock import patch

from triton import knobs

from fp8attn.kernels import operands
from fp8attn.kernels.compile import HOPPER, compiled
from fp8attn.kernels.launch import Constants
from tests.kernels import compile_kernels
from tests.kernels.prefill import compile_prefill

NO_CODE = "no machine code"


def no_code(*args: Any) -> tuple[str, str] | None:
    if not args:
        return NO_CODE, NO_CODE
    args[1]["cubin"] = lambda ptx, metadata: b""
    return None


def facts(made: Any, given: Any) -> dict[str, Any]:
    """How a launch is compiled by a process that has not seen it."""
    made.kernel.device_caches.clear()
    program = compiled(made.kernel, made.args, given)
    copies = sum(line.strip().startswith("mov.b32 %r") for line in program.asm["ptx"].split("\n"))
    return {"hash": program.hash, "note": getattr(program.metadata, operands.NOTE, ""), "copies": copies}


def compilations_beside(made: Any) -> list[str]:
    """How often Triton compiles a kernel, or loads it from disk, that is prepared beside a thread with a hook, and
    launched without one.
    """
    counted: list[str] = []
    made.kernel.device_caches.clear()
    with knobs.runtime.scope(), knobs.compilation.scope(), tempfile.TemporaryDirectory() as folder, knobs.cache.scope():
        knobs.cache.dir = folder
        knobs.runtime.add_stages_inspection_hook = None
        knobs.compilation.listener = lambda *, src, cache_hit, **_: counted.append(
            "loaded" if cache_hit else "compiled"
        )
        with operands.direct_operands("all"), ThreadPoolExecutor(1) as pool:
            pool.submit(compiled, made.kernel, made.args, made.constants).result()
        compiled(made.kernel, made.args, made.constants)
        made.kernel.device_caches.clear()  # as another process
        compiled(made.kernel, made.args, made.constants)
    return counted


def main() -> None:
    made = compile_prefill.launch(head_dim=64)
    other = compile_kernels.launches("sm_90", "D64 step")[0]
    plain = Constants(made.constants.device, **made.constants)
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope(), knobs.runtime.scope():
        knobs.cache.dir = folder
        knobs.runtime.add_stages_inspection_hook = no_code
        found: dict[str, Any] = {
            "plain": facts(made, plain),
            "direct": facts(made, made.constants),
            "again": facts(made, made.constants),
        }
        base = found["plain"]["copies"] - found["direct"]["copies"]
        found["plain"]["copies"], kept = base, found["direct"]["copies"]  # those that are left are no operands'
        found["direct"]["copies"] = found["again"]["copies"] = 0

        def unsafe(ptx: str, which: str) -> str:
            raise operands.Unsafe("planted")

        with patch.object(operands, "without_copies", unsafe), patch.object(operands, "KEY", "unsafe"):
            found["unsafe"] = facts(made, made.constants)
            found["unsafe"]["copies"] -= kept
            with warnings.catch_warnings(record=True) as said:
                operands.warn_of_copies(compiled(made.kernel, made.args, made.constants))
            found["warning"] = str(said[0].message)
        with patch.object(operands, "SAFE_PTXAS", (99, 0)), patch.object(operands, "KEY", "old"):
            old = facts(made, made.constants)
            found["old ptxas"] = {"note": old["note"], "copies": old["copies"] - kept}
        found["without the hook"] = facts(other, other.constants)["hash"]
        inside, done = Event(), Event()

        def holding() -> None:
            with operands.direct_operands("all"):
                inside.set()
                done.wait()

        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(holding)
            inside.wait()
            found["other thread"] = facts(other, other.constants)["hash"]
            done.set()
            held.result()
        both = Barrier(2, timeout=60)
        found["compilations"] = compilations_beside(other)

        def beside() -> str:
            with operands.direct_operands("sums"):
                both.wait()  # breaks if one thread waits for the other to compile
                return repr(knobs.runtime.add_stages_inspection_hook()[0])

        with ThreadPoolExecutor(2) as pool:
            found["side by side"] = [job.result() for job in [pool.submit(beside) for _ in range(2)]]
        hook = knobs.runtime.add_stages_inspection_hook
        found["hook"] = None if hook is no_code else repr(hook)
    assert HOPPER.arch == 90
    print(json.dumps(found))


if __name__ == "__main__":
    main()
