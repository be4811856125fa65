"""Measures the whole set of results. The same command again goes on where the last one ended.

    python -m benchmarks.set                         # until all is measured, or 570 s are over
    python -m benchmarks.set --plan                  # prints what is left to measure, with the expected seconds
    python -m benchmarks.set --only sdpa engine      # some parts of the set

A part is a benchmark, or the GPU tests. What measures no time runs first, four parts beside each other, while the
kernels are compiled. Then what is timed runs alone, one part after another. A case's rows are in
`results/<device>/NAME.json` as soon as the case is measured, and no call measures it again; a file of another commit,
torch or Triton is begun anew. What fails, and what no time is left for, is named at the end, and the rest goes on. The
exit status is 1 until nothing is missing. In one call a part gets at most twice its expected seconds.

A GPU machine may end a command after ten minutes, and may overwrite the files of the repository before each command.
So FP8ATTN_RESULTS names another folder for the files, which stays there between the calls. With OUT set, they are also
packed into `$OUT/set.tar` after each case; `tar -xf set.tar` in the repository puts them in place. The commit is taken
from git, or from FP8ATTN_COMMIT.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from evidence import results

from . import latent, peers, run, wide
from .ahead import compile_ahead
from .beside import Beside

LIMIT = 570  # seconds of a call: the GPU machine ends a command after 600
COMPILING = 100  # expected seconds of `compile_ahead` for the whole set
BESIDE = 4  # parts that run beside each other: five did not fit into 139 GB
SLOWEST = 2  # the most that a part may take in a call, in its expected seconds
TESTS = "tests"  # the GPU tests, which begin anew if they are ended
TEST_COMMAND = [sys.executable, "-m", "tests.gpu", "--save"]


class Part(NamedTuple):
    """A part of the set.

    Attributes:
        name: of a benchmark, and of its file.
        seconds: that all its cases are expected to take on an H200 machine, beside three others if it is not timed.
        timed: whether it measures times: then nothing else runs.
    """

    name: str
    seconds: int
    timed: bool = True


SET = (
    Part("prefill", 100), Part("decode", 10), Part("sdpa", 65), Part("latent", 10), Part("wide", 10),
    Part("append", 10), Part("video", 20), Part("engine", 10), Part("latent_step", 10), Part("overhead", 25),
    Part("first_token", 100),
    Part("public_models", 800, False), Part("needle", 600, False), Part(TESTS, 490, False),
    Part("latent_needle", 350, False), Part("real_model", 220, False), Part("accuracy", 30, False),
    Part("accumulation", 30, False),
)  # fmt: skip
# By part, implementations of peers.
WANTED = {"prefill": peers.PREFILL, "latent": tuple(latent.BYTES), "wide": wide.PEERS}


def cases_of(part: Part) -> list[str]:
    return ["all"] if part.name == TESTS else list(import_module(f"benchmarks.{part.name}").CASES)


def left(part: Part) -> list[str]:
    """The cases that the part's file does not have."""
    held = results.current(part.name) or {"rows": []}
    measured = {row["case"].partition(": ")[0] for row in held["rows"]}  # several rows of `overhead` are of a case
    return [case for case in cases_of(part) if case not in measured]


def plan(todo: dict[Part, list[str]]) -> float:
    """Print what is left to measure. Returns the expected seconds."""
    seconds = {part: part.seconds * len(cases) / len(cases_of(part)) for part, cases in todo.items()}
    alone = sum(taken for part, taken in seconds.items() if part.timed)
    others = [taken for part, taken in seconds.items() if not part.timed]
    compiling = COMPILING * sum(seconds.values()) / sum(part.seconds for part in SET)
    beside = max([compiling, sum(others) / BESIDE, *others])
    print(f"{alone + beside:.0f} s expected, in calls of {LIMIT} s\n  {compiling:4.0f} s  compiling")
    for part, taken in seconds.items():
        how = "" if part.timed else f", {BESIDE} parts at a time"
        print(f"  {taken:4.0f} s  {part.name}: {len(todo[part])} of {len(cases_of(part))} cases{how}")
    return alone + beside


class Call:
    """A call of the set, which ends after `limit` seconds."""

    def __init__(self, limit: float) -> None:
        self.deadline = time.monotonic() + limit
        self.missing: dict[tuple[str, str], list[str]] = {}  # cases by part and reason
        self.lock = Lock()
        self.worker = Beside(run.measured, 0)  # the process that times; after a failure another one is begun

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def miss(self, name: str, reason: str, *cases: str) -> None:
        self.missing.setdefault((name, reason), []).extend(cases)

    def measure(self, part: Part, cases: Sequence[str]) -> None:
        """Measure cases of a part, and write their rows."""
        begun, expected = time.monotonic(), part.seconds / len(cases_of(part))
        end = min(self.deadline, begun + SLOWEST * part.seconds)
        benchmark = import_module(f"benchmarks.{part.name}")
        worker = self.worker if part.timed else Beside(run.measured, 0)
        measure = run.measured if getattr(benchmark, "PROCESSES", False) else worker  # those begin processes themselves
        for number, case in enumerate(cases):
            worker.seconds = end - time.monotonic()
            if worker.seconds < expected / 2:
                self.miss(part.name, "no time was left", *cases[number:])
                break
            try:
                found = measure(part.name, [case])
            except (Exception, SystemExit) as problem:  # of any type: the other cases go on
                found = None
                print(f"{part.name} {case}: {type(problem).__name__}: {problem}", flush=True)
            if found is None:
                self.miss(part.name, "it was ended" if time.monotonic() >= end else "it failed", case)
            elif not found[0]:
                self.miss(part.name, "it was left out", case)
            else:
                self.write(part.name, *found)
        if hasattr(benchmark, "end"):
            benchmark.end()
        if not part.timed:
            worker.end()
        print(f"{part.name}: {time.monotonic() - begun:.0f} s of {part.seconds} s expected for all cases", flush=True)

    def write(self, name: str, rows: list[dict], releases: dict[str, str]) -> None:
        with self.lock:
            (results.add if results.current(name) else results.save)(name, rows, releases)
            self.pack()

    def pack(self) -> None:
        if folder := os.environ.get("OUT"):
            with tarfile.open(Path(folder) / "set.tar", "w") as archive:
                for part in SET:
                    if results.current(part.name):
                        path = Path(results.slug(results.header({})["device"])) / f"{part.name}.json"
                        archive.add(results.RESULTS / path, Path("results") / path)

    def test(self, part: Part) -> None:
        """Run the GPU tests."""
        if self.left < part.seconds:
            self.miss(TESTS, f"{max(self.left, 0):.0f} s were left, and they take some {part.seconds} s")
            return
        path = os.pathsep.join(filter(None, (os.environ.get("FP8ATTN_TRITON"), os.environ.get("PYTHONPATH"))))
        process = subprocess.Popen(
            TEST_COMMAND, cwd=results.ROOT, env=os.environ | {"PYTHONPATH": path}, start_new_session=True
        )
        try:
            process.wait(max(self.left, 1))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self.miss(TESTS, "they were ended")
            return
        with self.lock:
            self.pack()
        if process.returncode:
            self.miss("tests that pass", f"exit status {process.returncode}; {TESTS}.json has the counts")

    def end(self) -> None:
        """Name what is missing, and exit."""
        for name, impls in WANTED.items():
            if held := results.current(name):
                for peer in sorted({peers.of(impl) for impl in impls} - {None, *held.get("peers", ())}):
                    self.miss(f"the peer {peer}", "it did not load")
        print(f"\n{self.left:.0f} s are left")
        for (name, reason), cases in self.missing.items():
            named = f": {', '.join(cases[:3])}{f' and {len(cases) - 3} more' if len(cases) > 3 else ''}" * bool(cases)
            print(f"NOT MEASURED: {name}{named}: {reason}")
        sys.exit(bool(self.missing))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true", help="print what is left to measure, and measure nothing")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[part.name for part in SET], help="some parts")
    parser.add_argument("--seconds", type=float, default=LIMIT, help="the call's limit (default: %(default)s)")
    args = parser.parse_args(arguments)
    chosen = [part for part in SET if not args.only or part.name in args.only]
    todo = {part: cases for part in chosen if (cases := left(part))}
    plan(todo)
    if args.plan:
        return
    results.require_commit()
    call = Call(args.seconds)

    def beside(part: Part) -> None:
        call.test(part) if part.name == TESTS else call.measure(part, todo[part])

    with ThreadPoolExecutor(BESIDE) as pool:
        others = pool.map(beside, [part for part in todo if not part.timed])
        compile_ahead({part.name: cases for part, cases in todo.items() if part.name != TESTS})
        print(f"compiled: {call.left:.0f} s are left", flush=True)
        list(others)
    for part, cases in todo.items():
        if part.timed:
            call.measure(part, cases)
    call.end()


if __name__ == "__main__":
    main()
