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


def path_of(name: str) -> Path | None:
    """The file of that name; of several devices, the last GPU's by name. None if it was not measured."""
    found = RESULTS.glob(f"*/{name}.json")
    return max(found, key=lambda path: (path.parent.name != "cpu", path.parent.name), default=None)


def latest(name: str) -> tuple[str, Rows]:
    """The title (`H200`, `CPU`) of the device of `path_of`, and its rows by case and implementation. No rows if it was
    not measured.
    """
    path = path_of(name)
    return (
        ("", {})
        if path is None
        else (path.parent.name.upper(), {(row["case"], row["impl"]): row for row in _read(path)["rows"]})
    )


def header(name: str) -> dict[str, Any]:
    """The header of the file whose rows `latest` gives. Empty if there is no file."""
    path = path_of(name)
    return {} if path is None else {key: value for key, value in _read(path).items() if key != "rows"}


def commit_of(head: dict[str, Any], row: dict) -> str:
    """The commit that a row was measured at."""
    others = {name: commit for commit, names in head.get("mixed", {}).items() for name in names}
    return others.get(row["case"]) or others.get(row["impl"]) or head["commit"]


def ratio(ours: dict | None, theirs: dict | None) -> float | None:
    """How many times as fast one row is as another of its case; None if one was not measured."""
    return theirs["ms"] / ours["ms"] if ours and theirs else None


def over(found: Rows, case: str, impl: str, *others: str) -> float | None:
    """`ratio` of a case's row over the fastest of others'."""
    theirs = [found[case, other] for other in others if (case, other) in found]
    return ratio(found.get((case, impl)), min(theirs, key=lambda row: row["ms"], default=None))


def lengths(found: Iterable[tuple[str, str]], pattern: str) -> dict[int, str]:
    """Cases by the number that a pattern captures, in its order."""
    return dict(sorted({int(match[1]): case for case, _ in found if (match := re.fullmatch(pattern, case))}.items()))
