"""NVIDIA's compute-sanitizer over the Hopper kernels and append: memory, races in shared memory, reads of uninitialized memory.

A case is a tool; its rows are of reduced grids, since every access is checked: ragged batches with empty sequences and lengths that are no
multiple of anything, every head_dim that has a kernel of its own, and all options at once. Every allocation is one of CUDA's own, padded,
so that an access behind a tensor's end shows. What the grids compile is compiled before, outside the sanitizer.

Controls: `planted` is a kernel with a fault of the tool's kind in it, which the tool has to find, since a silent tool proves nothing;
`ordered` passes shared memory from warp to warp by mbarriers as our kernels do, without a fault (in its PTX every read is before a
`bar.sync`, that before the arrival, and that before the wait and the next write). Races whose both sides are in a function that calls
`warp_specialize` are counted apart, as `dispatch`: there is no code there but Triton's, which sends warps to their partitions through
shared memory between two barriers of the whole CTA.
"""

from __future__ import annotations

import ast
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from fp8attn import KVPages, ops
from fp8attn.kernels import decode, prefill
from fp8attn.kernels.gluon import gl, gluon, mbarrier, sync

from .fingerprint import ROOT
from .problem import DEVICE, KEYS, Shape, given, ours

CASES = {  # the tools, with their options
    "memcheck": ["--padding", "512"],  # behind every allocation, or the next one would hide an access that is too far
    # mbarriers order more than the threads that arrive: whatever those waited for before, too. And room to follow all of a CTA's.
    "racecheck": ["--racecheck-indirect-barrier-dependency", "--num-cuda-barriers", "64"],
    "initcheck": [],
}
DIMS = (64, 128, 256)
BY_MBARRIERS = ("prefill", "decode")  # kernels whose warps pass shared memory by them
SECONDS = 150  # for a grid


def tokens(count: int, heads: int, dim: int) -> torch.Tensor:
    return torch.randn(count, heads, dim, device=DEVICE).bfloat16()


def made(shape: Shape, impl: str = "fp8attn") -> tuple[torch.Tensor, KVPages]:
    """The queries and the cache of one of ours."""
    q = tokens(sum(shape.queries), shape.q_heads, shape.dim)
    return given(impl, shape, q, *(tokens(sum(shape.keys), shape.kv_heads, shape.dim) for _ in "kv"))


def all_options() -> dict:
    return {
        "window": 100, "softcap": 20.0, "sinks": torch.randn(4, device=DEVICE),
        "leftpad_k": torch.tensor([5, 131], dtype=torch.int32, device=DEVICE),
    }  # fmt: skip


def done(what: str) -> None:
    torch.cuda.synchronize()
    print(what, flush=True)


def check_prefill() -> None:
    for dim in DIMS:
        shape = Shape((1, 300, 0, 130), (1, 77, 0, 130), 4, 2, dim, True)
        for impl in (*KEYS, "fp8attn-q8"):
            ours(prefill.attention, shape, *made(shape, impl))()
            done(f"prefill D{dim} {impl}")
    ops.attention(*made(Shape((300, 200), (150, 150), 4, 2, 128, True)), **all_options())
    done("prefill, all options")


def check_decode() -> None:
    for dim in DIMS:
        for queries in (1, 3):
            shape = Shape((1, 1500, 0, 130), (queries,) * 4, 4, 2, dim, True)
            for impl in KEYS:
                ours(decode.attention, shape, *made(shape, impl))()
                done(f"decode D{dim} {queries} {impl}")
    ops.attention(*made(Shape((300, 200), (2, 2), 4, 2, 128, True)), **all_options())
    done("decode, all options")


def check_append() -> None:
    for dim, impl in itertools.product(DIMS, KEYS):
        _, pages = made(Shape((1, 300, 0, 127), (0,) * 4, 4, 2, dim, True), impl)
        done(f"append D{dim} {impl}, prompts")
        # A step of the first two, whose last pages have free rows, with rotary embedding.
        angle = torch.rand(2, dim // 2, device=DEVICE)
        ends = torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32, device=DEVICE)
        ops.append(
            pages, *(tokens(2, 2, dim) for _ in "kv"), cu_seqlens=ends, max_seqlen=1, rope_cos=angle.cos(), rope_sin=angle.sin()
        )  # fmt: skip
        done(f"append D{dim} {impl}, a step")


GRIDS = {"prefill": check_prefill, "decode": check_decode, "append": check_append}


# Controls


@gluon.jit
def _read(x_ptr, out_ptr, offset):
    gl.store(out_ptr, gl.load(x_ptr + offset))


@gluon.jit
def _store(shared):
    shared.store(gl.full([128], 1, gl.int64, gl.BlockedLayout([1], [32], [4], [0])))


@gluon.jit
def _load(shared, out_ptr):
    here: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    gl.store(out_ptr + gl.arange(0, 128, here), shared.load(here))


@gluon.jit
def _race(out_ptr):
    """Four warps write what four others read, without a wait."""
    shared = gl.allocate_shared_memory(gl.int64, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.warp_specialize([(_store, (shared,)), (_load, (shared, out_ptr))], [4], [32])


@gluon.jit
def _write(shared, full, empty):
    """One warp."""
    for i in range(4):
        mbarrier.wait(empty, (i & 1) ^ 1)
        shared.store(gl.full([128], 1, gl.int64, gl.BlockedLayout([1], [32], [1], [0])) + i)
        sync()
        mbarrier.arrive(full, count=1)


@gluon.jit
def _follow(shared, full, empty, out_ptr):
    here: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    for i in range(4):
        mbarrier.wait(full, i & 1)
        gl.store(out_ptr + gl.arange(0, 128, here), shared.load(here))
        mbarrier.arrive(empty, count=1)


@gluon.jit
def _ordered(out_ptr):
    """One warp writes what four others read, four times, each waiting for the other."""
    shared = gl.allocate_shared_memory(gl.int64, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, 1)
    mbarrier.init(empty, 1)
    gl.warp_specialize([(_follow, (shared, full, empty, out_ptr)), (_write, (shared, full, empty))], [1], [32])


def control(tool: str, name: str) -> None:
    x, out = (torch.empty(128, dtype=torch.int64, device=DEVICE) for _ in range(2))
    if tool == "racecheck":
        (_race if name == "planted" else _ordered)[(1,)](out)
    else:
        _read[(1,)](x, out, 128 if tool == "memcheck" else 0)  # behind the end, or uninitialized


def dispatchers() -> dict[str, list[range]]:
    """By file name, the lines of functions that call `warp_specialize`."""
    found: dict[str, list[range]] = {}
    for path in (*(ROOT / "src/fp8attn/kernels").rglob("*.py"), Path(__file__)):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any(
                isinstance(call, ast.Attribute) and call.attr == "warp_specialize" for call in ast.walk(node)
            ):
                first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
                found.setdefault(path.name, []).append(range(first, node.end_lineno + 1))
    return found


def parse(output: str, dispatch: dict[str, list[range]]) -> dict[str, int]:
    """What a tool counted: errors, for racecheck also warnings and how many errors are `dispatch`; nothing if it got to no summary."""
    if found := re.search(r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)", output):
        races = re.findall(r"Error: Race reported between .*(?:\n=+ +and .*)*", output)
        places = [re.findall(r" in (\S+):(\d+)", race) for race in races]
        theirs = [all(any(int(line) in lines for lines in dispatch.get(file, [])) for file, line in race) for race in places]
        return {"errors": int(found[1]), "warnings": int(found[2]), "dispatch": sum(theirs)}
    if found := re.search(r"ERROR SUMMARY: (\d+) errors?", output):
        return {"errors": int(found[1])}
    return {}


def sanitizer() -> str:
    found = shutil.which("compute-sanitizer") or next((str(p) for p in Path("/usr/local").glob("cuda*/bin/compute-sanitizer")), None)
    if found is None:
        sys.exit("there is no compute-sanitizer here: it comes with the CUDA toolkit")
    return found


CHILD = [sys.executable, "-m", "benchmarks.sanitize"]


def run(tool: str, grid: str) -> dict:
    command = [sanitizer(), "--tool", tool, *CASES[tool], "--report-api-errors", "no", "--print-limit", "0", *CHILD, tool, grid]
    start = time.time()
    with tempfile.TemporaryFile("w+") as log:
        environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, process_group=0)
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the sanitizer, and the process that it looks at
            process.wait()
        log.seek(0)
        output = log.read()
    row = {"case": f"{tool}-{grid}", "impl": "fp8attn" if grid in GRIDS else "control", "finished": "grid done" in output}
    row |= {**parse(output, dispatchers()), "seconds": round(time.time() - start, 1)}
    if not as_it_should(row):
        print(output[-4000:], flush=True)
    return row


def as_it_should(row: dict) -> bool:
    """Something found in what has a fault, and nothing elsewhere."""
    found = row.get("errors", 0) + row.get("warnings", 0) - row.get("dispatch", 0)
    return "errors" in row and (found > 0 if row["case"].endswith("planted") else found == 0 and row["finished"])


def faults(rows: list[dict]) -> list[dict]:
    """The rows that are not as they should be.

    A tool that takes `ordered` for a race does not follow mbarriers from warp to warp. Then what it says of the kernels whose warps
    pass memory by them is kept in the results, and proves nothing.
    """
    follows = all(as_it_should(row) for row in rows if row["case"] == "racecheck-ordered")
    unjudged = () if follows else ("racecheck-ordered", *(f"racecheck-{kernel}" for kernel in BY_MBARRIERS))
    return [row for row in rows if not as_it_should(row) and not (row["case"] in unjudged and row["finished"])]


def measure(case: str) -> Iterator[dict]:
    grids = [*GRIDS, "planted", *(["ordered"] if case == "racecheck" else [])]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda grid: subprocess.run([*CHILD, "", grid], check=True, stdout=subprocess.DEVNULL), GRIDS))
        rows = list(pool.map(lambda grid: run(case, grid), grids))
    yield from rows
    if wrong := faults(rows):
        sys.exit(f"not as they should be: {', '.join(row['case'] for row in wrong)}")


if __name__ == "__main__":  # what a tool looks at
    tool, grid = sys.argv[1:]
    GRIDS[grid]() if grid in GRIDS else control(tool, grid)
    torch.cuda.synchronize()
    print("grid done", flush=True)
