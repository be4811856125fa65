"""The results of evaluations as one HTML page that needs no other file: tables, pictures, environment."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..evaluation.names import title
from ..evaluation.outcomes import Outcome
from ..evaluation.paired import discordant
from ..evaluation.perplexity import Perplexity, Positions
from .plots import needle_maps, position_curves, svg
from .tables import ACCURACY_COLUMNS, accuracy_rows, margin

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 70rem; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.6rem; margin-bottom: 0; } h2 { font-size: 1.2rem; margin-top: 2.2rem; } p { max-width: 48rem; }
.scroll { overflow-x: auto; } svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; margin: 0.6rem 0; }
th { text-align: left; border-bottom: 2px solid #2a7f86; } td, th { padding: 0.25rem 0.8rem 0.25rem 0; vertical-align: top; }
td { border-bottom: 1px solid #e4e4e4; } .number, .short { white-space: nowrap; } .number { text-align: right; }
code { font-size: 0.85rem; overflow-wrap: anywhere; } .quiet { color: #666; }
"""


def page(meta: dict[str, Any], perplexities: Sequence[Sequence[Perplexity]], outcomes: Sequence[Outcome]) -> str:
    """The page.

    Args:
        meta: as `evaluation.record.meta` returns it.
        perplexities: the results of `perplexity`, for each way of running it.
        outcomes: the results of `needle.ask`, for any tasks.
    """
    parts = [
        f"<h1>{escape(str(meta['model']))} through its caches</h1>",
        f"<p class=quiet>fp8attn {escape(meta['fp8attn'])}, {escape(meta['date'])}, {escape(meta['device'])}</p>",
        "<p>The same tokens through each cache, with all keys and values read from it. Differences are from the first cache.</p>",
    ]
    for rows in perplexities:
        parts += _perplexity(rows)
    for task in dict.fromkeys(outcome.task for outcome in outcomes):
        parts += _task(task, [outcome for outcome in outcomes if outcome.task == task])
    parts += ["<h2>Environment</h2>", _environment(meta)]
    head = f"<meta charset=utf-8><meta name=viewport content='width=device-width'><title>{escape(str(meta['model']))}</title>"
    return f"<!doctype html><html lang=en><head>{head}<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"


def write_page(path: str | Path, html: str) -> None:
    """Write a page, and make the folders above."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(html, encoding="utf-8")


def _perplexity(rows: Sequence[Perplexity]) -> list[str]:
    how = {"chunks": "prefilled in chunks", "decode": "decoded token by token"}[rows[0].mode]
    columns = ("cache", "perplexity", "change", "bits per byte", "KL (nats)", "same top token", "cache bytes per token")
    table = []
    for number, row in enumerate(rows):
        change = (f"{row.ppl / rows[0].ppl - 1:+.3%}{margin(row.standard_error, '.3%')}", f"{row.kl:.2e}", f"{row.top1_agreement:.2%}")
        change = change if number else ("", "", "")
        sizes = ["" if math.isnan(x) else format(x, form) for x, form in ((row.bits_per_byte, ".4f"), (row.bytes_per_token, ",.0f"))]
        table.append((title(row.cache), f"{row.ppl:.4f}", change[0], sizes[0], *change[1:], sizes[1]))
    text = f"Context of {rows[0].context:,} tokens, {rows[0].tokens:,} predicted. ± is the standard error of the difference in loss."
    parts = [f"<h2>Perplexity, {how}</h2><p>{text}</p>", _table(columns, table)]
    if len(rows[0].positions) > 1:
        heads = ["position", "tokens", f"{title(rows[0].cache)} loss"]
        for row in rows[1:]:
            heads += [f"{title(row.cache)} difference", "KL", "same top token"]
        by_position = [
            (f"{first.start:,} to {first.stop:,}", f"{first.tokens:,}", f"{first.nll:.4f}", *_beside(others, first))
            for first, *others in zip(*(row.positions for row in rows), strict=True)
        ]
        parts += [_figure(svg(position_curves(rows))), _table(heads, by_position)]
    return parts


def _beside(others: Iterable[Positions], first: Positions) -> list[str]:
    columns = []
    for other in others:
        columns += [f"{other.nll - first.nll:+.5f}{margin(other.standard_error, '.5f')}", f"{other.kl:.2e}", f"{other.top1_agreement:.2%}"]
    return columns


def _task(task: str, outcomes: Sequence[Outcome]) -> list[str]:
    differing = discordant(outcomes)
    text = (
        "A sample is right if the continuation contains every answer. Intervals are 95%: Wilson's for shares, Newcombe's for paired "
        "differences. Lost and won count the samples that only the first cache, or only this one, had right. p: McNemar's exact test."
    )
    parts = [
        f"<h2>Retrieval: {escape(task)}</h2><p>{text}</p>",
        _table(ACCURACY_COLUMNS, accuracy_rows(outcomes)),
        _figure(svg(needle_maps(outcomes, heading=f"{task}: right answers by length and depth"))),
        f"<h3>Discordant samples: {len(differing) or 'none'}</h3>",
    ]
    if differing:
        columns = ("length", "sample", "depth", "answer", "first cache said", "cache", "said")
        rows = [
            (str(a.length), str(a.index), f"{a.depth:.0%}", ", ".join(a.answers), a.text.strip(), title(b.cache), b.text.strip())
            for a, b in differing
        ]
        parts.append(_table(columns, rows))
    return parts


def _environment(meta: dict[str, Any]) -> str:
    return _table(("", ""), [(name, str(value)) for name, value in meta.items()])


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table. Columns of short cells have no line breaks, and align right if all cells are numbers. Without names there is no head."""
    classes = []
    for cells in zip(*rows, strict=True):
        numbers = all(not cell or cell.lstrip("+-")[:1].isdigit() for cell in cells)
        classes.append("" if max(map(len, cells)) > 25 else " class=number" if numbers else " class=short")
    head = "".join(f"<th{each}>{escape(column)}" for each, column in zip(classes, columns, strict=True))
    head = f"<thead><tr>{head}</thead>" if any(columns) else ""
    body = ("".join(f"<td{each}>{escape(cell)}" for each, cell in zip(classes, row, strict=True)) for row in rows)
    return f"<div class=scroll><table>{head}<tbody>{''.join(f'<tr>{row}' for row in body)}</tbody></table></div>"


def _figure(drawing: str) -> str:
    return f"<div class=scroll>{drawing}</div>"
