"""NVIDIA's compute-sanitizer over the Hopper kernels and append: memory, races in shared memory, reads of uninitialized
memory.

    python -m tests.gpu.sanitizer [TOOL ...]

The grids (`sanitized.py`) are small, since every access is checked: ragged batches with empty sequences and lengths
that are no multiple of anything, every head_dim that has a kernel of its own, and all options at once. Every allocation
is one of CUDA's own, padded, so that an access behind a tensor's end shows. What the grids compile is compiled before,
outside the sanitizer.

Controls: `planted` is a kernel with a fault of the tool's kind in it, which the tool has to find, since a silent tool
proves nothing; `ordered` passes shared memory from warp to warp by mbarriers as our kernels do, without a fault (in its
PTX every read is before a `bar.sync`, that before the arrival, and that before the wait and the next write). Races
whose both sides are in a function that calls `warp_specialize` are counted apart, as `dispatch`: there is no code there
but Triton's, which sends warps to their partitions through shared memory between two barriers of the whole CTA.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from evidence.results import ROOT

TOOLS = {  # with their options
    "memcheck": ["--padding", "512"],  # behind every allocation, or the next one would hide an access that is too far
    # mbarriers order more than the threads that arrive: what those waited for before, too. And space to follow all of a
    # CTA's.
    "racecheck": ["--racecheck-indirect-barrier-dependency", "--num-cuda-barriers", "64"],
    "initcheck": [],
}
GRIDS = ("prefill", "decode", "append")
BY_MBARRIERS = ("prefill", "decode")  # kernels whose warps pass shared memory by them
SECONDS = 150  # for a grid
SANITIZED = ROOT / "tests/gpu/sanitized.py"
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
CHILD = [sys.executable, str(SANITIZED)]


def dispatchers() -> dict[str, tuple[str, range]]:
    """The file's name and the lines of each kernel that calls `warp_specialize`, by the kernel's name."""
    found: dict[str, tuple[str, range]] = {}
    for path in (*(ROOT / "src/fp8attn/kernels").rglob("*.py"), SANITIZED):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any(
                isinstance(call, ast.Attribute) and call.attr == "warp_specialize" for call in ast.walk(node)
            ):
                first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
                found[node.name] = path.name, range(first, node.end_lineno + 1)
    return found


def parse(output: str, dispatch: dict[str, tuple[str, range]]) -> dict[str, int]:
    """The counts of a tool: errors, for racecheck also warnings and how many errors are `dispatch`. Empty if the tool
    printed no summary."""
    if found := re.search(r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)", output):
        races = re.findall(r"Error: Race reported between .*(?:\n=+ +and .*)*", output)
        places = [re.findall(r" at (\w+)\+\w+ in (\S+):(\d+)", race) for race in races]
        theirs = [
            bool(race) and all(_inside(dispatch.get(kernel), file, int(line)) for kernel, file, line in race)
            for race in places
        ]
        return {"errors": int(found[1]), "warnings": int(found[2]), "dispatch": sum(theirs)}
    if found := re.search(r"ERROR SUMMARY: (\d+) errors?", output):
        return {"errors": int(found[1])}
    return {}


def _inside(function: tuple[str, range] | None, file: str, line: int) -> bool:
    return function is not None and file == function[0] and line in function[1]


def sanitizer() -> str:
    found = shutil.which("compute-sanitizer") or next(
        (str(p) for p in Path("/usr/local").glob("cuda*/bin/compute-sanitizer")), None
    )
    if found is None:
        sys.exit("there is no compute-sanitizer here: it comes with the CUDA toolkit")
    return found


def run(tool: str, grid: str) -> dict:
    command = [
        sanitizer(),
        "--tool",
        tool,
        *TOOLS[tool],
        "--report-api-errors",
        "no",
        "--print-limit",
        "0",
        *CHILD,
        tool,
        grid,
    ]
    start = time.time()
    with tempfile.TemporaryFile("w+") as log:
        environment = ENVIRONMENT | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, process_group=0)
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the sanitizer, and the process that it looks at
            process.wait()
        log.seek(0)
        output = log.read()
    row = {
        "case": f"{tool}-{grid}",
        "impl": "fp8attn" if grid in GRIDS else "control",
        "finished": "grid done" in output,
    }
    row |= {**parse(output, dispatchers()), "seconds": round(time.time() - start, 1)}
    if not as_it_should(row):
        print(output[-4000:], flush=True)
    return row


def as_it_should(row: dict) -> bool:
    """Whether the tool found errors in the controls with a fault, and none elsewhere."""
    found = row.get("errors", 0) + row.get("warnings", 0) - row.get("dispatch", 0)
    return "errors" in row and (found > 0 if row["case"].endswith("planted") else found == 0 and row["finished"])


def faults(rows: list[dict]) -> list[dict]:
    """The rows that are not as they should be.

    A tool that takes `ordered` for a race does not follow mbarriers from warp to warp. Then what it says of the kernels
    whose warps pass memory by them proves nothing.
    """
    follows = all(as_it_should(row) for row in rows if row["case"] == "racecheck-ordered")
    unjudged = () if follows else ("racecheck-ordered", *(f"racecheck-{kernel}" for kernel in BY_MBARRIERS))
    return [row for row in rows if not as_it_should(row) and not (row["case"] in unjudged and row["finished"])]


def check(tool: str) -> list[dict]:
    """A row for each grid and control."""
    grids = [*GRIDS, "planted", *(["ordered"] if tool == "racecheck" else [])]
    with ThreadPoolExecutor(16) as pool:
        list(
            pool.map(
                lambda grid: subprocess.run([*CHILD, "", grid], check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT),
                GRIDS,
            )
        )
        return list(pool.map(lambda grid: run(tool, grid), grids))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", nargs="*", metavar="TOOL", help=f"some of {', '.join(TOOLS)}; default: all")
    args = parser.parse_args()
    rows = [row for tool in args.tools or TOOLS for row in check(tool)]
    print(*rows, sep="\n")
    if wrong := faults(rows):
        sys.exit(f"not as they should be: {', '.join(row['case'] for row in wrong)}")


if __name__ == "__main__":
    main()
