"""How tables and their numbers are written, and where they are registered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ..rows import Rows, devices

BLOCKS: dict[str, Callable[[], str]] = {}
Cell = Callable[[Rows, str], str]  # of a device's rows and a case


def block(make: Callable[[], str]) -> Callable[[], str]:
    """Registers what gives the text of a block: `long_error` fills the blocks named `long-error`."""
    BLOCKS[make.__name__.replace("_", "-")] = make
    return make


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
    """A table with a line for each of `lines`, and for each device all the columns; the first one's head has the device's title.

    Args:
        lines: by what names the line, its label.
        columns: by head, the cell of a device's rows and what names the line.
    """
    heads, (begin, *rest) = [first], columns
    for title in devices(name):
        heads += [f"{title}: {begin}", *rest]
    cells = [[cell(here, line) for here in devices(name).values() for cell in columns.values()] for line in lines]
    return table(heads, [[label, *found] for label, found in zip(lines.values(), cells, strict=True)])
