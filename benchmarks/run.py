"""Runs a benchmark and prints its rows as they come.

    python -m benchmarks.run                               lists the benchmarks
    python -m benchmarks.run NAME --list                   lists its cases
    python -m benchmarks.run NAME [CASE ...]               measures the cases with one of the words in their names
    python -m benchmarks.run NAME --save                   also writes the rows to results/<device>/NAME.json
    python -m benchmarks.run NAME CASE ... --save          adds the rows of these cases to that file
    python -m benchmarks.run NAME [CASE ...] --base REV    times ours beside another revision's; keeps nothing

With OUT=FOLDER, every row is also appended to FOLDER/rows.jsonl as it comes. README.md says what a benchmark consists
of.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from evidence import results

from .ahead import compile_ahead


def benchmarks() -> dict[str, str]:
    """The first sentence of every benchmark's docstring, by name. Nothing is imported."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text())
        if any(isinstance(node, ast.FunctionDef) and node.name == "measure" for node in tree.body):
            found[path.stem] = re.match(r".*?[.?](?=\s|$)", " ".join(ast.get_docstring(tree).split()))[0]
    return found


class Table:
    """Prints rows: a case, and below it a line for each implementation."""

    def __init__(self) -> None:
        self.case, self.first = None, None  # and the first time of its rows

    def add(self, row: dict) -> None:
        if row["case"] != self.case:
            self.case, self.first = row["case"], None
            print(f"\n{self.case}")
        cells = [f"{row['impl']:24s}"]
        for name, value in row.items():
            if name not in ("case", "impl") and not isinstance(value, list | tuple):
                cells.append(f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}")
        if "ms" in row:
            self.first = self.first or row["ms"]
            cells.append(f"{row['ms'] / self.first:.3f} of the first's time")
        print("  " + "  ".join(cells), flush=True)


def measured(name: str, cases: Sequence[str]) -> tuple[list[dict], dict[str, str]]:
    """Measure cases of a benchmark, and print its rows as they come. Returns them, and the releases of the peers among
    them.
    """
    import torch  # here, because listing does not need it

    from . import peers

    benchmark, table, rows = import_module(f"benchmarks.{name}"), Table(), []
    if hasattr(benchmark, "start"):
        benchmark.start(cases)
    for case in cases:
        for row in benchmark.measure(case):
            table.add(row)
            rows.append(row)
            if folder := os.environ.get("OUT"):
                with (Path(folder) / "rows.jsonl").open("a") as file:
                    file.write(json.dumps({"benchmark": name, **row}) + "\n")
        torch.cuda.empty_cache()
    return rows, peers.releases(row["impl"] for row in rows) | getattr(benchmark, "releases", dict)()


def main() -> None:
    names = benchmarks()
    name = sys.argv[1] if len(sys.argv) > 1 else None
    if name not in names:
        print(__doc__)
        print(*(f"{each:16s} {sentence}" for each, sentence in names.items()), sep="\n")
        sys.exit(None if name in (None, "-h", "--help") else f"\nthere is no benchmark {name}")
    benchmark = import_module(f"benchmarks.{name}")
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.run {name}",
        description=benchmark.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="a part of cases' names; default: all cases")
    parser.add_argument("--list", action="store_true", help="list the cases")
    parser.add_argument(
        "--base", metavar="REV", help="time ours beside another's: a git revision, or a folder that holds its src"
    )
    args = results.parse(parser, sys.argv[2:])
    cases = [case for case in benchmark.CASES if not args.cases or any(word in case for word in args.cases)]
    if not cases:
        sys.exit(f"{name} has no case with {' or '.join(args.cases)} in its name: --list lists them")
    if args.list:
        print(*cases, sep="\n")
        return
    if args.base is not None:
        if args.save:
            sys.exit("--base compares revisions and keeps nothing: leave out --save")
        if not hasattr(benchmark, "calls"):
            sys.exit(f"--base compares calls of kernels, and {name} has none (no calls(case))")
        from .sides import compare

        compare(name, cases, args.base)
        return
    adds = args.save and len(cases) < len(benchmark.CASES)
    if adds:
        results.require_new(name, cases)
    start = time.time()
    compile_ahead({name: cases})
    if adds:
        for case in cases:
            if (found := measured(name, [case]))[0]:
                results.add(name, *found)
    else:
        found = measured(name, cases)
        if args.save:
            results.save(name, *found)
    print(f"\n{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
