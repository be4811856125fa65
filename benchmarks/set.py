"""Measures the whole set of results, in three calls of at most ten minutes each.

    python -m benchmarks.set 1             # kernels and calls, timed
    python -m benchmarks.set 2             # two versions of Triton, shapes of video models; the accuracy of kernels
    python -m benchmarks.set 3             # the GPU tests, and beside them models, which are not timed
    python -m benchmarks.set 1 --plan      # prints what a call measures, with the expected seconds
    python -m benchmarks.set 1 --only sdpa engine

Every benchmark writes its file `results/<device>/NAME.json` when it has measured all its cases. One that fails, or for
which no time is left, writes none: the file that was there stays, the end of the output says so, and the exit status is
1. With OUT set, the files that were written are also packed into `$OUT/set1.tar` (of call 1) after each benchmark;
`tar -xf set1.tar` in the repository puts them in place. On a machine with two GPUs, call 3 can run on the second one
beside the others (`CUDA_VISIBLE_DEVICES=1`, and cores of its own). A call needs the commit: from
git, or from FP8ATTN_COMMIT.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from evidence import results

from . import peers, run
from .ahead import compile_ahead
from .beside import Beside

LIMIT = 570  # seconds of a call: the GPU machine ends a command after 600
STARTED = 0.5  # a benchmark is begun if this share of its expected seconds is left
TESTS = "tests"  # the GPU tests
TEST_COMMAND = [sys.executable, "-m", "tests.gpu", "--save"]


class Entry(NamedTuple):
    """A benchmark of the set.

    Attributes:
        seconds: that it is expected to take on an H200 machine, without compiling.
        timed: whether it measures times: then nothing else runs.
    """

    name: str
    seconds: int
    timed: bool = True


COMPILING = {1: 90, 2: 30, 3: 0}  # expected seconds of `compile_ahead`
SET = {
    1: (
        Entry("prefill", 90), Entry("decode", 45), Entry("sdpa", 60), Entry("append", 25), Entry("engine", 40),
        Entry("overhead", 30),
        Entry("accumulation", 75), Entry("first_token", 85),
    ),
    2: (Entry("triton", 130), Entry("video", 120), Entry("accuracy", 80, False)),
    3: (Entry(TESTS, 320, False), Entry("real_model", 150, False), Entry("needle", 360, False)),
}  # fmt: skip


def plan(part: int, entries: list[Entry]) -> int:
    """Print what a call measures. Returns the expected seconds: what is not timed runs beside the tests."""
    beside = max(
        sum(entry.seconds for entry in entries if not entry.timed and entry.name != TESTS),
        sum(entry.seconds for entry in entries if entry.name == TESTS),
    )
    total = COMPILING[part] + sum(entry.seconds for entry in entries if entry.timed) + beside
    print(f"call {part}: {total} s of {LIMIT} s expected\n  {COMPILING[part]:4d} s  compiling")
    for entry in entries:
        cases = "" if entry.name == TESTS else f", {len(import_module(f'benchmarks.{entry.name}').CASES)} cases"
        print(
            f"  {entry.seconds:4d} s  "
            f"{entry.name}{cases}{'' if entry.timed else ', beside the others that are not timed'}"
        )
    return total


class Call:
    """A call of the set: what it wrote, and what it could not measure."""

    def __init__(self, part: int, limit: float) -> None:
        self.part, self.deadline = part, time.monotonic() + limit
        self.written: list[Path] = []
        self.missing: dict[str, str] = {}  # by benchmark, the reason
        self.worker = Beside(run.measured, 0)  # the process that measures; after a failure another one is begun

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def measure(self, entry: Entry) -> None:
        """Measure one benchmark, and write its file."""
        benchmark = import_module(f"benchmarks.{entry.name}")
        if self.late(entry):
            return
        begun = time.monotonic()
        print(f"\n## {entry.name}", flush=True)
        try:
            if getattr(benchmark, "PROCESSES", False):
                found = run.measured(entry.name, list(benchmark.CASES), deadline=self.deadline)
            else:
                self.worker.seconds = max(self.left, 0)
                found = self.worker(entry.name, list(benchmark.CASES))
        except (Exception, SystemExit) as problem:  # of any type: the other benchmarks go on
            found = None
            print(f"{type(problem).__name__}: {problem}", flush=True)
        if hasattr(benchmark, "end"):
            benchmark.end()
        if found is None:
            self.missing[entry.name] = "no time was left" if self.left <= 0 else "it failed: what it printed is above"
        else:
            self.keep(results.save(entry.name, *found))
            if entry.name == "prefill":
                wanted = {name for impl in peers.PREFILL if (name := peers.of(impl))}
                self.missing |= {f"the peer {name}": "it did not load" for name in sorted(wanted - found[1].keys())}
            print(f"{entry.name}: {time.monotonic() - begun:.0f} s of {entry.seconds} s expected", flush=True)

    def late(self, entry: Entry) -> bool:
        if self.left < STARTED * entry.seconds:
            self.missing[entry.name] = f"{max(self.left, 0):.0f} s were left, and it takes some {entry.seconds} s"
        return entry.name in self.missing

    def keep(self, path: Path) -> None:
        self.written.append(path)
        if folder := os.environ.get("OUT"):
            with tarfile.open(Path(folder) / f"set{self.part}.tar", "w") as archive:
                for each in self.written:
                    archive.add(each, each.relative_to(results.RESULTS.parent))

    def tests(self, entry: Entry) -> Callable[[], None]:
        """Start the GPU tests; calling what is returned waits for them."""
        if self.late(entry):
            return lambda: None
        path = os.pathsep.join(filter(None, (os.environ.get("FP8ATTN_TRITON"), os.environ.get("PYTHONPATH"))))
        self.worker.end()  # which holds memory of the GPU
        process = subprocess.Popen(
            TEST_COMMAND, cwd=results.ROOT, env=os.environ | {"PYTHONPATH": path}, start_new_session=True
        )

        def wait() -> None:
            try:
                status = process.wait(max(self.left, 1))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                self.missing[TESTS] = "no time was left"
                return
            self.keep(results.RESULTS / results.slug(results.header({})["device"]) / f"{TESTS}.json")
            if status:
                self.missing["tests that pass"] = f"exit status {status}; {TESTS}.json has the counts"

        return wait

    def end(self) -> None:
        self.worker.end()
        print(
            f"\ncall {self.part}: wrote {', '.join(path.stem for path in self.written) or 'nothing'}; {self.left:.0f} "
            f"s are left"
        )
        for name, reason in self.missing.items():
            print(f"NOT MEASURED: {name}: {reason}")
        sys.exit(bool(self.missing))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", type=int, choices=SET)
    parser.add_argument("--plan", action="store_true", help="print what would be measured, and measure nothing")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some of the call's benchmarks")
    parser.add_argument("--seconds", type=float, default=LIMIT, help="the call's limit (default: %(default)s)")
    args = parser.parse_args(arguments)
    entries = [entry for entry in SET[args.part] if not args.only or entry.name in args.only]
    plan(args.part, entries)
    if args.plan:
        return
    results.require_commit()
    call = Call(args.part, args.seconds)
    compile_ahead({e.name: list(import_module(f"benchmarks.{e.name}").CASES) for e in entries if e.name != TESTS})
    print(f"compiled: {call.left:.0f} s are left", flush=True)
    for entry in entries:
        if entry.timed:
            call.measure(entry)
    wait: Callable[[], None] = lambda: None  # noqa: E731
    for entry in entries:
        if entry.name == TESTS:
            wait = call.tests(entry)
    for entry in entries:
        if not entry.timed and entry.name != TESTS:
            call.measure(entry)
    wait()
    call.end()


if __name__ == "__main__":
    main()
