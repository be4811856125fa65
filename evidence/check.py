"""Finds stale rows of results: rows whose code has changed since they were measured.

    python -m evidence.check [--count] [substring of a file, a case or an implementation ...]

A row is fresh while the syntax tree of all that it could depend on is what it was. Where that has changed, `tree` rows are compared with
the tree of what they do depend on, and `launches` rows with a dry run (`dry`): the case is planned again, and its kernels are compiled for
the row's GPU with the row's Triton, without a GPU (11 to 16 s each, kept in `.cache/`). `peer` rows do not depend on our code. Rows from
before there were fingerprints are not checked. It exits with 1 if a row is stale. `--count` compiles nothing and prints one line.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .dry import answer
from .fingerprint import ROOT, digest, of_row, tree
from .results import RESULTS, code, key

CACHE = ROOT / ".cache/fingerprints.json"
COMMANDS = {  # of rows that are not of a benchmark
    "model": "python training/report.py --save",
    "tests": "python -m tests.gpu --save",
    "sanitize": "python -m tests.gpu.sanitizer --save",
}
MACHINERY = ("evidence/dry.py", "evidence/ptx.py", "evidence/fingerprint.py")


@dataclass(frozen=True)
class Row:
    file: Path
    machine: dict
    provenance: dict
    row: dict

    @property
    def name(self) -> str:
        return self.file.stem

    @property
    def fingerprint(self) -> str | None:
        return self.row.get("fingerprint")

    def __str__(self) -> str:
        return f"{self.file.relative_to(RESULTS.parent)}: {self.row['case']} {self.row['impl']}"


def rows(words: Iterable[str] = ()) -> Iterator[Row]:
    words = list(words)
    for file in sorted(RESULTS.glob("*/*.json")):
        held = json.loads(file.read_text())
        for row in held["rows"]:
            made = Row(file, held["meta"], held["provenance"][row["provenance"]], row)
            if not words or any(word in str(made) for word in words):
                yield made


def quick(row: Row) -> str:
    """`fresh`, `stale`, `unmarked` (it has no fingerprint), or `unknown`: a dry run can tell."""
    if row.fingerprint is None:
        return "unmarked"
    kind = row.fingerprint.partition(":")[0]
    if kind == "peer" or row.provenance["code"] == code(row.name) or row.fingerprint == of_row(row.name, row.row["impl"]):
        return "fresh"
    return "unknown" if kind == "launches" else "stale"


def stale(found: list[Row]) -> list[tuple[Row, str]]:
    """The rows that are stale, and why. Dry runs are of all rows of a benchmark on one machine and Triton together."""
    why: list[tuple[Row, str]] = []
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in found:
        state = quick(row)
        if state == "stale":
            why.append((row, "its code has changed"))
        elif state == "unknown":
            groups.setdefault((row.name, json.dumps(row.machine), row.provenance["triton"]), []).append(row)
    for (name, machine, triton), group in groups.items():
        for row, now in zip(group, launches(name, json.loads(machine), triton, [key(row.row) for row in group]), strict=True):
            if now is None:
                why.append((row, "the benchmark has it no more"))
            elif now != row.fingerprint:
                why.append((row, "it launches something else"))
    return why


def launches(name: str, machine: dict, triton: str, wanted: list[tuple[str, str]]) -> list[str | None]:
    """The fingerprints of what rows would launch on a machine, from a dry run or from one that is kept."""
    kept = json.loads(CACHE.read_text()) if CACHE.exists() else {}
    given = digest((name, machine, triton, code(name), tree(*MACHINERY, folders=())))
    keys = ["/".join((given, *row)) for row in wanted]
    if missing := [row for row, cached in zip(wanted, keys, strict=True) if cached not in kept]:
        request = {"machine": machine, "rows": missing}
        try:
            found = answer(name, request, PYTHONPATH=os.pathsep.join(map(str, triton_paths(triton))))
        except RuntimeError as problem:
            sys.exit(str(problem))
        kept |= {"/".join((given, *row)): fingerprint for row, fingerprint in zip(missing, found, strict=True)}
        CACHE.parent.mkdir(exist_ok=True)
        CACHE.write_text(json.dumps(kept, indent=0))
    return [kept[cached] for cached in keys]


def triton_paths(version: str) -> list[Path]:
    """The folder of a Triton beside the one that is installed, where that is of another version.

    Raises:
        SystemExit: there is no such version here.
    """
    installed = importlib.metadata.version("triton")
    if installed == version:
        return []
    beside = [path.parent for path in ROOT.glob(f".venv/*/triton-{version}.dist-info")]
    if not beside:
        hint = f"pip install --no-deps --target .venv/triton-{version} triton=={version}"
        sys.exit(f"rows were compiled by Triton {version}, and Triton {installed} is installed: {hint}")
    return beside[:1]


def command(name: str, old: list[Row]) -> str:
    """The command that measures stale rows of a benchmark again."""
    if name in COMMANDS:
        return COMMANDS[name]
    if name == "needle":
        return f"python -m benchmarks.needle run --impl {','.join(dict.fromkeys(row.row['impl'] for row in old))} --save"
    # The others measure all their cases together, or have none.
    cases = dict.fromkeys(row.row["case"] for row in old if row.fingerprint.startswith("launches:"))
    return " ".join(["python -m benchmarks.run", name, *cases, "--save"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--count", action="store_true")
    args = parser.parse_args()
    found = list(rows(args.words))
    if args.count:
        states = Counter(quick(row) for row in found)
        fresh, old, unknown, unmarked = (states[state] for state in ("fresh", "stale", "unknown", "unmarked"))
        more = f" or {old + unknown}" if unknown else ""  # which of the unknown ones are, `make check-results` finds out
        print(f"results: {fresh} rows fresh, {old}{more} stale, {unmarked} without fingerprint; make check-results lists them")
        return
    unmarked = Counter((row.file, row.provenance["commit"]) for row in found if row.fingerprint is None)
    for (file, commit), count in unmarked.items():
        print(f"{file.relative_to(RESULTS.parent)}: {count} rows measured at {commit}, no fingerprint, not checked")
    why = stale(found)
    for file in dict.fromkeys(row.file for row, _ in why):
        here = [(row, reason) for row, reason in why if row.file == file]
        for row, reason in here:
            print(f"{row}: stale, {reason}")
        print(f"  to measure them again on {here[0][0].machine['device']}: {command(file.stem, [row for row, _ in here])}")
    print(f"{len(found) - len(why) - unmarked.total()} rows fresh, {len(why)} stale, {unmarked.total()} without fingerprint")
    sys.exit(bool(why))


if __name__ == "__main__":
    main()
