"""The results of evaluations as one HTML page that needs no other file: the tables of the terminal, pictures,
environment.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from html import escape
from typing import Any

from rich.console import Console, RenderableType

from ..evaluation.outcomes import Outcome
from ..evaluation.perplexity import Perplexity
from .plots import needle_maps, position_curves, svg
from .tables import accuracy_tables, discordant_table, environment_table, perplexity_table, positions_table

STYLE = (
    "body { font-family: sans-serif; max-width: 80rem; margin: 2rem auto; } pre { overflow-x: auto; } svg { max-width: "
    "100%; }"
)
WIDTH = 140  # characters of a table, at most


def page(meta: dict[str, Any], perplexities: Sequence[Sequence[Perplexity]], outcomes: Sequence[Outcome]) -> str:
    """The page.

    Args:
        meta: as `evaluation.record.meta` returns it.
        perplexities: the results of `perplexity`, for each way of running it.
        outcomes: the results of `needle.ask`, for any tasks.
    """
    title = f"{escape(str(meta['model']))} through its caches"
    parts = [
        f"<h1>{title}</h1>",
        "<p>The same tokens through each cache, with all keys and values read from it. Differences are from the first "
        "cache; ± is the standard error of a difference in loss.</p>",
    ]
    for rows in perplexities:
        parts.append(_html(perplexity_table(rows)))
        if len(rows[0].positions) > 1:
            parts += [svg(position_curves(rows)), _html(positions_table(rows))]
    parts.append(
        "<p>A sample is right if the continuation contains every answer. Intervals are 95%: Wilson's for shares, "
        "Newcombe's for paired differences. Lost and won count the samples that only the first cache, or only this "
        "one, had right. p: McNemar's exact test.</p>"
    )
    for table, task in zip(accuracy_tables(outcomes), dict.fromkeys(outcome.task for outcome in outcomes), strict=True):
        of_task = [outcome for outcome in outcomes if outcome.task == task]
        picture = needle_maps(of_task, heading=f"{task}: right answers by length and depth")
        parts += [_html(table), svg(picture), _html(discordant_table(of_task))]
    parts.append(_html(environment_table(meta)))
    head = (
        f"<meta charset=utf-8><meta name=viewport "
        f"content='width=device-width'><title>{title}</title><style>{STYLE}</style>"
    )
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def _html(table: RenderableType) -> str:
    """A table as rich draws it, with its text escaped."""
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(table)
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
