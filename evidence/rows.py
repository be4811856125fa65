"""Reads rows by case and implementation. All ratios are of rows that one command timed together."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from .results import RESULTS

Rows = dict[tuple[str, str], dict]


@cache
def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def rows_of(path: Path) -> Rows:
    """The rows of a results file by case and implementation."""
    return {(row["case"], row["impl"]): row for row in _read(path)["rows"]}


def paths(name: str, *, cpus: bool = False) -> list[Path]:
    """The files of that name: one for each GPU; with `cpus`, that of CPUs too."""
    return [path for path in sorted(RESULTS.glob(f"*/{name}.json")) if cpus or path.parent.name != "cpu"]


def devices(name: str, *, cpus: bool = False) -> dict[str, Rows]:
    """The rows of the devices that have a results file, by the device's title (`H200`, `CPU`)."""
    return {path.parent.name.upper(): rows_of(path) for path in paths(name, cpus=cpus)}


def latest(name: str) -> tuple[str, Rows]:
    """The title of one GPU, and its rows: of several, the last by name. No rows if it was not measured."""
    return list(devices(name).items())[-1] if paths(name) else ("", {})


def header(name: str, *, cpus: bool = False) -> dict[str, Any]:
    """The header of the file whose rows `latest` gives; with `cpus`, of a file of CPUs if there is one. Empty if there is no file."""
    found = paths(name, cpus=cpus)
    path = next((path for path in found if path.parent.name == "cpu"), found[-1]) if found and cpus else found[-1] if found else None
    return {} if path is None else {key: value for key, value in _read(path).items() if key != "rows"}


def commit_of(head: dict[str, Any], row: dict) -> str:
    """The commit that a row was measured at."""
    others = {name: commit for commit, names in head.get("mixed", {}).items() for name in names}
    return others.get(row["case"]) or others.get(row["impl"]) or head["commit"]


def together(a: dict, b: dict) -> bool:
    """Whether two rows of a file were timed together, interleaved."""
    return a["case"] == b["case"] and a.get("timed") == b.get("timed")


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
