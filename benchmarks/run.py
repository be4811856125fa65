"""Runs a benchmark and prints its rows as they come.

    python -m benchmarks.run                               lists the benchmarks
    python -m benchmarks.run NAME --list                   lists its cases
    python -m benchmarks.run NAME [CASE ...]               measures the cases that have one of the words in their names; all without words
    python -m benchmarks.run NAME [CASE ...] --save        also keeps the rows in results/<device>/NAME.json
    python -m benchmarks.run NAME [CASE ...] --base REV    times ours beside another revision's; keeps nothing

README.md says what a benchmark consists of.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import time
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

from evidence import results
from evidence.dry import compile_ahead


def benchmarks() -> dict[str, str]:
    """The first sentence of every benchmark's docstring, by name. Nothing is imported."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text())
        if any(isinstance(node, ast.FunctionDef) and node.name == "measure" for node in tree.body):
            found[path.stem] = re.match(r".*?[.?](?=\s|$)", " ".join(ast.get_docstring(tree).split()))[0]
    return found


def chosen(names: Iterable[str], words: Iterable[str]) -> list[str]:
    """The names that have one of the words in them; all without words."""
    words = list(words)
    return [name for name in names if not words or any(word in name for word in words)]


def rows(benchmark: ModuleType, cases: list[str], **options) -> Iterator[dict]:
    """What a benchmark measures, and what it derives from all of that."""
    found = []
    for case in cases:
        for row in benchmark.measure(case, **options):
            found.append(row)
            yield row
    if hasattr(benchmark, "derive"):
        yield from benchmark.derive(found)


class Table:
    """Prints rows: a case, and below it a line for each implementation."""

    def __init__(self) -> None:
        self.case, self.first = None, {}  # the first time, of rows that were timed together

    def add(self, row: dict) -> None:
        if row["case"] != self.case:
            self.case, self.first = row["case"], {}
            print(f"\n{self.case}")
        cells = [f"{row['impl']:24s}"]
        for name, value in row.items():
            if name not in ("case", "impl", "fingerprint") and not isinstance(value, list | tuple):
                cells.append(f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}")
        if "ms" in row:
            cells.append(f"{row['ms'] / self.first.setdefault(row.get('timed'), row['ms']):.3f} of the first's time")
        print("  " + "  ".join(cells), flush=True)


def parser(name: str, benchmark: ModuleType) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.run {name}", description=benchmark.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("cases", nargs="*", metavar="CASE", help="a part of cases' names; default: all cases")
    made.add_argument("--list", action="store_true", help="list the cases")
    made.add_argument("--base", metavar="REV", help="time ours beside another's: a git revision, or a folder that holds its src")
    results.add_save(made)
    if hasattr(benchmark, "configure"):
        benchmark.configure(made)
    return made


def main() -> None:
    names = benchmarks()
    name = sys.argv[1] if len(sys.argv) > 1 else None
    if name not in names:
        print(__doc__)
        print(*(f"{each:16s} {sentence}" for each, sentence in names.items()), sep="\n")
        sys.exit(None if name in (None, "-h", "--help") else f"\nthere is no benchmark {name}")
    benchmark = import_module(f"benchmarks.{name}")
    options = vars(results.parse(parser(name, benchmark), sys.argv[2:]))
    words, listed, save, base = (options.pop(each) for each in ("cases", "list", "save", "base"))
    if not (cases := chosen(benchmark.CASES, words)):
        sys.exit(f"{name} has no case with {' or '.join(words)} in its name: --list lists them")
    if listed:
        print(*cases, sep="\n")
        return
    if base is not None:
        if save:
            sys.exit("--base compares revisions and keeps nothing: leave out --save")
        if not hasattr(benchmark, "calls"):
            sys.exit(f"--base compares calls of kernels, and {name} has none (no calls(case))")
        from .base import compare

        compare(name, cases, base)
        return
    start, table, kept = time.time(), Table(), []
    compile_ahead(name, cases)
    try:
        for row in rows(benchmark, cases, **options):
            table.add(row)
            kept.append(row)
    finally:  # what is measured is kept, whatever happens to the rest
        if save and kept:
            results.save(name, kept)
    print(f"\n{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
