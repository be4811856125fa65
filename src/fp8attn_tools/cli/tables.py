"""The results of evaluations as tables in the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fp8attn.formats.codec import E4M3, codec_of
from fp8attn.scales import KVScales

from ..calibration import ScalesReport
from ..diagnostics.accumulation import Accumulation
from ..evaluation.drift import Segment
from ..evaluation.names import title
from ..evaluation.outcomes import Outcome, cells
from ..evaluation.paired import compare, discordant, wilson
from ..evaluation.perplexity import Perplexity
from ..evaluation.sensitivity import Sensitivity


def perplexity_table(rows: Sequence[Perplexity]) -> Table:
    """One row for each cache. Differences are from the first, with their standard error."""
    how = {"chunks": "prefill in chunks", "decode": "token by token"}[rows[0].mode]
    table = _table(f"Perplexity through the cache: {how}, context {rows[0].context}, {rows[0].tokens} tokens")
    for column in ("cache", "ppl", "change", "bits/\nbyte", "KL,\nnats", "same\ntop-1", "bytes/\ntoken"):
        table.add_column(column, justify="left" if column == "cache" else "right")
    for number, row in enumerate(rows):
        table.add_row(
            title(row.cache),
            f"{row.ppl:.4f}",
            f"{row.ppl / rows[0].ppl - 1:+.2%}{margin(row.standard_error, '.2%')}" if number else "",
            _number(row.bits_per_byte, ".4f"),
            f"{row.kl:.1e}" if number else "",
            f"{row.top1_agreement:.1%}" if number else "",
            _number(row.bytes_per_token, ".0f"),
        )
    return table


def positions_table(rows: Sequence[Perplexity]) -> Table:
    """One row for each range of positions: the first cache's loss, and what the others' predictions differ by."""
    table = _table(f"By position: loss of {title(rows[0].cache)}, and differences from it")
    table.add_column("position")
    for column in (
        "tokens",
        "loss",
        *(f"{title(row.cache)}\n{what}" for row in rows[1:] for what in ("loss", "KL", "same top-1")),
    ):
        table.add_column(column, justify="right")
    for first, *others in zip(*(row.positions for row in rows), strict=True):
        cells = [f"{first.start:,} to {first.stop:,}", f"{first.tokens:,}", f"{first.nll:.4f}"]
        for other in others:
            loss = f"{other.nll - first.nll:+.5f}{margin(other.standard_error, '.5f')}"
            cells += [loss, f"{other.kl:.1e}", f"{other.top1_agreement:.1%}"]
        table.add_row(*cells)
    return table


def sensitivity_table(scales: KVScales) -> Table:
    """One row for each layer: SQNR of K and V in dB, and the largest stored magnitude that the scale of any head can
    represent.
    """
    keys = f"keys in {scales.key_dtype.upper()}{', rotated' if scales.rotate_keys else ''}"
    table = _table(f"What 8 bits keep of K and V: {keys}, {scales.method}, {scales.tokens} tokens")
    for column in ("layer", "K SQNR (dB)", "V SQNR (dB)", "K up to", "V up to"):
        table.add_column(column, justify="right")
    for index, (k, v) in scales.sqnr_db.items():
        layer = scales.layer(index)
        tops = float(layer.k_scale.max()) * codec_of(scales.key_dtype).max, float(layer.v_scale.max()) * E4M3.max
        table.add_row(str(index), f"{k:.1f}", f"{v:.1f}", *(f"{top:.3g}" for top in tops))
    return table


def layers_table(report: Sensitivity) -> Table:
    """One row for each layer, the most sensitive first: what it costs alone, and the model with all layers down to this
    row in 16 bits.
    """
    table = _table(f"What 8 bits cost in each layer: {report.cache}, {report.tokens} tokens, {report.dtype}")
    for column in ("layer", "KL alone,\nnats", "KL left with 16 bits\nfrom the top to here", "bytes/\ntoken"):
        table.add_column(column, justify="right")
    rows, ranking = {row.layer: row for row in report.layers}, report.ranking
    table.add_row("none", "", f"{report.cumulated_kl[0]:.2e}", f"{report.bytes_per_token():,.0f}")
    for number, layer in enumerate(ranking, 1):
        row, left = rows[layer], (*report.cumulated_kl, 0.0)[number]
        alone = f"{row.kl:.2e}{margin(row.standard_error, '.0e')}"
        table.add_row(str(layer), alone, f"{left:.2e}", f"{report.bytes_per_token(ranking[:number]):,.0f}")
    return table


def coverage_table(report: ScalesReport, count: int = 8) -> Table:
    """Shares of saturated values and of underflow: of each tensor, and of the `count` heads that are worst in each."""
    table = _table(f"Held-out text: what static scales do not cover, {report.tokens} tokens")
    for column in ("tensor", "layer", "head", "saturated", "rounded to zero"):
        table.add_column(column, justify="left" if column == "tensor" else "right")
    for tensor in report.tensors:
        shares = (_share(float(report.map(tensor, what).mean())) for what in ("saturated", "underflow"))
        table.add_row(tensor.upper(), "all", "all", *shares, end_section=tensor == report.tensors[-1])
    heads = dict.fromkeys(
        head for what in ("saturated", "underflow") for head in report.worst(count, what) if getattr(head, what)
    )
    for head in heads:
        table.add_row(
            head.tensor.upper(), str(head.layer), str(head.head), _share(head.saturated), _share(head.underflow)
        )
    return table


def needle_table(outcomes: Sequence[Outcome]) -> Table:
    """Mean scores: one row for each length and cache, one column for each depth."""
    found = cells(outcomes)
    table = _table("Needle in a haystack: share of right answers, by depth")
    depths = sorted({cell.depth for cell in found})
    table.add_column("length", justify="right")
    table.add_column("cache")
    for depth in depths:
        table.add_column(f"{depth:.0%}", justify="right")
    caches = list(dict.fromkeys(cell.cache for cell in found))
    for length in sorted({cell.length for cell in found}):
        for number, cache in enumerate(caches):
            shares = {c.depth: c.score for c in found if (c.length, c.cache) == (length, cache)}
            values = [f"{shares[depth]:.0%}" if depth in shares else "" for depth in depths]
            table.add_row("" if number else str(length), title(cache), *values, end_section=number == len(caches) - 1)
    return table


def accuracy_tables(outcomes: Sequence[Outcome]) -> list[Table]:
    """For each task, one row for each length and cache.

    Right samples have Wilson's interval, the difference from the first cache Newcombe's. Lost and won are the samples
    that only the first cache, and only this one, had right; p is McNemar's exact test.
    """
    caches = list(dict.fromkeys(outcome.cache for outcome in outcomes))
    tables = []
    for task in dict.fromkeys(outcome.task for outcome in outcomes):
        table = _table(f"{task}: right answers, paired by sample")
        for column in ("length", "cache", "right", "95% interval", "difference, points", "lost", "won", "p"):
            table.add_column(column, justify="left" if column == "cache" else "right")
        of_task = [outcome for outcome in outcomes if outcome.task == task]
        for length in dict.fromkeys(outcome.length for outcome in of_task):
            here = [outcome for outcome in of_task if outcome.length == length]
            for number, cache in enumerate(caches):
                right = [outcome.right for outcome in here if outcome.cache == cache]
                low, high = wilson(sum(right), len(right))
                cells = [str(length), title(cache), f"{sum(right)}/{len(right)}", f"{100 * low:.1f}-{100 * high:.1f}%"]
                if number:
                    pair = compare(here, caches[0], cache)
                    below, above = pair.interval
                    points = f"{100 * pair.difference:+.1f} ({100 * below:+.1f}, {100 * above:+.1f})"
                    cells += [points, str(pair.only_first), str(pair.only_second), f"{pair.p:.2g}"]
                table.add_row(*cells)
        tables.append(table)
    return tables


def discordant_table(outcomes: Sequence[Outcome]) -> Table:
    """The samples that only one of the first cache and another had right, and what both said."""
    differing = discordant(outcomes)
    table = _table(f"Discordant samples: {len(differing) or 'none'}")
    for column in (
        ("task", "length", "sample", "depth", "answer", "cache", "said", "cache", "said") if differing else ()
    ):
        table.add_column(column)
    for a, b in differing:
        said = (title(a.cache), a.text.strip(), title(b.cache), b.text.strip())
        table.add_row(*map(Text, (a.task, str(a.length), str(a.index), f"{a.depth:.0%}", ", ".join(a.answers), *said)))
    return table


def accumulation_table(task: str, kernels: Mapping[str, Accumulation]) -> Table:
    """One row for each batch and length, with the error of each kernel."""
    table = _table(f"Errors of attention in {task}: equal weights, V of mean 1 and deviation 1/2")
    for column in ("sequences", "tokens of each", *kernels):
        table.add_column(column, justify="right")
    cases = dict.fromkeys(case for result in kernels.values() for case in result.errors)
    for batch, length in cases:
        table.add_row(
            f"{batch}", f"{length:,}", *(f"{result.errors[batch, length]:.2%}" for result in kernels.values())
        )
    return table


def drift_table(rows: Sequence[Segment], most: int = 24) -> Table:
    """One row for each segment. Of more than `most` segments, an even selection with the first and the last."""
    table = _table(f"Decoding after a prompt of {rows[0].start} tokens")
    for column in ("tokens", "before, the cache was", "loss", "change", "KL,\nnats", "same\ntop-1"):
        table.add_column(column, justify="left" if column.startswith("before") else "right")
    count = min(most, len(rows))
    for row in (rows[round(n * (len(rows) - 1) / max(count - 1, 1))] for n in range(count)):
        change = f"{row.nll - row.baseline_nll:+.4f}"
        span = f"{row.start} to {row.stop}"
        table.add_row(span, row.operation, f"{row.nll:.4f}", change, f"{row.kl:.1e}", f"{row.top1_agreement:.1%}")
    return table


def margin(standard_error: float, form: str) -> str:
    """A standard error after a plus-minus sign; nothing where there is none, because there was one token."""
    return "" if math.isnan(standard_error) else f" ± {standard_error:{form}}"


def _table(heading: str) -> Table:
    """An empty table that fits into 80 columns."""
    return Table(
        title=heading,
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        min_width=min(80, len(heading)),
    )


def _share(value: float) -> str:
    return f"{value:.4%}" if value else "0"


def _number(value: float, form: str) -> str:
    return "" if math.isnan(value) else format(value, form)
