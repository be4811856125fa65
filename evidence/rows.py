"""Reads rows by device, case and implementation. All ratios are of rows that one command timed together."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from .results import RESULTS

Rows = dict[tuple[str, str], dict]


@cache
def rows_of(path: Path) -> Rows:
    """The rows of a results file by case and implementation."""
    return {(row["case"], row["impl"]): row for row in json.loads(path.read_text())["rows"]}


def devices(name: str, *, cpus: bool = False) -> dict[str, Rows]:
    """The rows of the GPUs that have a results file, by the title of the GPU. With `cpus`, those of CPUs too, which are titled `CPU`."""
    paths = (path for path in sorted(RESULTS.glob(f"*/{name}.json")) if cpus or path.parent.name != "cpu")
    return {path.parent.name.upper(): rows_of(path) for path in paths}


def commits(name: str) -> dict[str, str]:
    """The commits that rows of a results file were measured at, by their `provenance`."""
    found = (json.loads(path.read_text())["provenance"] for path in sorted(RESULTS.glob(f"*/{name}.json")))
    return {number: each["commit"] for provenances in found for number, each in provenances.items()}


def measured(name: str) -> str:
    """Where and when the rows of the device that `latest` chooses were measured, and whether that was of another cache."""
    title, found = latest(name)
    provenances = json.loads((RESULTS / title.lower() / f"{name}.json").read_text())["provenance"]
    made = {(provenances[row["provenance"]]["commit"], provenances[row["provenance"]]["date"]) for row in found.values()}
    at = ", ".join(f"commit {commit} of {date}" for commit, date in sorted(made, key=lambda x: x[::-1]))
    old = ", an earlier cache, whose keys were E4M3 and not rotated" if any("fingerprint" not in row for row in found.values()) else ""
    return f"{title}, {at}{old}"


def latest(name: str) -> tuple[str, Rows]:
    """The title of one device, and its rows: of several, the last by name."""
    return list(devices(name).items())[-1]


def every(name: str) -> list[dict]:
    """The rows of all GPUs."""
    return [row for here in devices(name).values() for row in here.values()]


def together(a: dict, b: dict) -> bool:
    """Whether two rows were timed together, interleaved."""
    return all(a.get(part) == b.get(part) for part in ("case", "provenance", "timed"))


def ratio(ours: dict | None, theirs: dict | None) -> float | None:
    """How many times as fast one row is as another; None unless they were timed together."""
    return theirs["ms"] / ours["ms"] if ours and theirs and together(ours, theirs) else None


def over(found: Rows, case: str, impl: str, *others: str) -> float | None:
    """`ratio` of a case's row over the fastest of others'."""
    theirs = [found[case, other] for other in others if (case, other) in found]
    return ratio(found.get((case, impl)), min(theirs, key=lambda row: row["ms"], default=None))


def over_bf16(found: Rows, case: str, impl: str) -> float | None:
    """A row of `sdpa` over the best BF16 kernel that it was timed with; `fp8attn` is the graph where there is one."""
    graph = f"{impl}-graph"
    return over(found, case, graph if (case, graph) in found else impl, "fa3-bf16", "cudnn-bf16")


def lengths(found: Iterable[tuple[str, str]], pattern: str) -> dict[int, str]:
    """Cases by the number that a pattern captures, in its order."""
    return dict(sorted({int(match[1]): case for case, _ in found if (match := re.fullmatch(pattern, case))}.items()))
