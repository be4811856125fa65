"""How tables and their numbers are written, and where they are registered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps

from ..rows import Rows, commit_of, header, latest, path_of

BLOCKS: dict[str, Callable[[], str]] = {}
Cell = Callable[[Rows, str], str]  # of a device's rows and a case


def block(*names: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Registers a function that writes a block: `latent_errors` fills the blocks named `latent-errors`.

    Args:
        names: the results files that it reads. While one does not exist, the block says so.
    """

    def register(make: Callable[[], str]) -> Callable[[], str]:
        @wraps(make)
        def made() -> str:
            missing = [name for name in names if path_of(name) is None]
            return f"(not measured yet: `{missing[0]}`)" if missing else make()

        BLOCKS[make.__name__.replace("_", "-")] = made
        return make

    return register


def measured(name: str) -> str:
    """Where, when and with what the rows that `latest` gives were measured."""
    head = header(name)
    device, torch = head["device"].removeprefix("NVIDIA "), head["torch"].partition("+")[0]
    return f"{device}, torch {torch}, Triton {head['triton']}, commit {head['commit']} of {head['date']}"


def at(name: str, found: Iterable[dict]) -> str:
    """The commits that rows were measured at, and with which Triton."""
    head = header(name)
    commits = ", ".join(dict.fromkeys(commit_of(head, row) for row in found))
    return f"{commits} ({head['triton']})" if head["device"] != "cpu" else commits


def number(x: float | None, form: str = ".2f") -> str:
    return "" if x is None else format(x, form)


def value(found: Rows, case: str, impl: str, key: str, form: str = ".2f", factor: float = 1) -> str:
    x = found.get((case, impl), {}).get(key)
    return "" if x is None else format(factor * x, form)


def span(xs: Iterable[float | None], form: str = ".2f") -> str:
    """The smallest and the largest number."""
    found = [x for x in xs if x is not None]
    low, high = format(min(found), form), format(max(found), form)
    return low if low == high else f"{low} to {high}"


def tokens(n: int) -> str:
    return f"{n // 1024}k" if n % 1024 == 0 else f"{n:,}"


def table(head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    """A table. Empty columns are left out."""
    lines = [list(head), *map(list, body)]
    filled = [any(line[column] for line in lines[1:]) for column in range(len(lines[0]))]
    lines = [[cell for cell, there in zip(line, filled, strict=True) if there] for line in lines]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("|  |", "| |").replace("|  |", "| |")


def beside(name: str, first: str, lines: Mapping, columns: Mapping[str, Callable]) -> str:
    """A table with a line for each of `lines`; the first column's head has the device's title.

    Args:
        lines: by what names the line, its label.
        columns: by head, the cell of the device's rows and what names the line.
    """
    title, here = latest(name)
    begin, *rest = columns
    body = [[label, *(cell(here, line) for cell in columns.values())] for line, label in lines.items()]
    return table([first, f"{title}: {begin}", *rest], body)
