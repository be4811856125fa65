"""What the evaluations found: tables for the terminal, and JSON."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from .. import __version__
from ..layout import FP8, key_type
from ..numerics import E4M3, INT8_MAX
from ..scales import KVScales
from .drift import Segment
from .needle import Outcome, cells
from .paired import compare, wilson
from .perplexity import Perplexity

# What an evaluation's numbers depend on, besides the model: a change here makes them stale.
SOURCES = (
    *("numerics.py", "rotation.py", "layout.py", "ops.py", "reference.py"),
    *("cache/layer.py", "cache/page_table.py", "cache/paged.py", "cache/sequences.py", "cache/step.py"),
    *("integrations/transformers/attention.py", "integrations/transformers/cache.py", "integrations/transformers/layers.py"),
    "integrations/transformers/tensors.py",
    *("evaluation/caches.py", "evaluation/perplexity.py", "evaluation/needle.py", "evaluation/recall.py"),
)
TITLES = {
    "bf16": "BF16", "fp8": "FP8", "fp8-int8-keys": "INT8 keys", "fp8-e4m3-keys": "E4M3 keys", "fp8-e4m3-plain": "E4M3 plain",
    "fp8-static": "FP8 static", "scale-1": "plain cast", "transformers-fp8": "HF FP8",
}  # fmt: skip


def title(cache: str) -> str:
    """A cache's name for people."""
    return TITLES.get(cache, cache)


def perplexity_table(rows: Sequence[Perplexity]) -> Table:
    """One row a cache; differences are against the first, give or take their standard error."""
    how = {"chunks": "prefill in chunks", "decode": "token by token"}[rows[0].mode]
    table = _table(f"Perplexity through the cache: {how}, context {rows[0].context}, {rows[0].tokens} tokens")
    for column in ("cache", "ppl", "change", "bits/\nbyte", "KL,\nnats", "same\ntop-1", "bytes/\ntoken"):
        table.add_column(column, justify="left" if column == "cache" else "right")
    for number, row in enumerate(rows):
        table.add_row(
            title(row.cache),
            f"{row.ppl:.4f}",
            f"{row.ppl / rows[0].ppl - 1:+.2%} ± {row.standard_error:.2%}" if number else "",
            _number(row.bits_per_byte, ".4f"),
            f"{row.kl:.1e}" if number else "",
            f"{row.top1_agreement:.1%}" if number else "",
            _number(row.bytes_per_token, ".0f"),
        )
    return table


def sensitivity_table(scales: KVScales) -> Table:
    """A row a layer: SQNR of K and V in dB, and the largest magnitude (as it is stored) that the scale of any of its heads holds."""
    keys = f"keys in {scales.key_dtype.upper()}{', rotated' if scales.rotate_keys else ''}"
    table = _table(f"What 8 bits keep of K and V: {keys}, {scales.method}, {scales.tokens} tokens")
    for column in ("layer", "K SQNR (dB)", "V SQNR (dB)", "K up to", "V up to"):
        table.add_column(column, justify="right")
    for index, (k, v) in scales.sqnr_db.items():
        layer, k_max = scales.layer(index), E4M3.max if key_type(scales.key_dtype) == FP8 else INT8_MAX
        tops = float(layer.k_scale.max()) * k_max, float(layer.v_scale.max()) * E4M3.max
        table.add_row(str(index), f"{k:.1f}", f"{v:.1f}", *(f"{top:.3g}" for top in tops))
    return table


def needle_table(outcomes: Sequence[Outcome]) -> Table:
    """A row for each length and cache, a column for each depth: the mean score."""
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


ACCURACY_COLUMNS = ("length", "cache", "right", "95% interval", "difference, points", "lost", "won", "p")


def accuracy_rows(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """`ACCURACY_COLUMNS` for each length and cache of one task: samples all right (Wilson's interval), and beside the first cache the
    difference (Newcombe's interval), the samples that it alone had wrong and right, and p of McNemar's exact test."""
    caches = list(dict.fromkeys(outcome.cache for outcome in outcomes))
    rows = []
    for length in dict.fromkeys(outcome.length for outcome in outcomes):
        here = [outcome for outcome in outcomes if outcome.length == length]
        for number, cache in enumerate(caches):
            right = [outcome.right for outcome in here if outcome.cache == cache]
            low, high = wilson(sum(right), len(right))
            beside = ("", "", "", "")
            if number:
                pair = compare(here, caches[0], cache)
                below, above = pair.interval
                points = f"{100 * pair.difference:+.1f} ({100 * below:+.1f}, {100 * above:+.1f})"
                beside = (points, str(pair.only_first), str(pair.only_second), f"{pair.p:.2g}")
            rows.append((str(length), title(cache), f"{sum(right)}/{len(right)}", f"{100 * low:.1f}-{100 * high:.1f}%", *beside))
    return rows


def accuracy_tables(outcomes: Sequence[Outcome]) -> list[Table]:
    """`accuracy_rows` for the terminal, a table a task."""
    tables = []
    for task in dict.fromkeys(outcome.task for outcome in outcomes):
        table = _table(f"{task}: right answers, paired by sample")
        for column in ACCURACY_COLUMNS:
            table.add_column(column, justify="left" if column == "cache" else "right")
        for row in accuracy_rows([outcome for outcome in outcomes if outcome.task == task]):
            table.add_row(*row)
        tables.append(table)
    return tables


def discordant(outcomes: Sequence[Outcome]) -> list[tuple[Outcome, Outcome]]:
    """The samples that the first cache and another did not both have right or wrong: (the first's outcome, the other's)."""
    first, *others = dict.fromkeys(outcome.cache for outcome in outcomes)
    return [pair for other in others for pair in compare(outcomes, first, other).discordant]


def drift_table(rows: Sequence[Segment], most: int = 24) -> Table:
    """A row a segment; where there are more than `most`, evenly chosen ones, the first and the last among them."""
    table = _table(f"Decoding after a prompt of {rows[0].start} tokens")
    for column in ("tokens", "before, the cache was", "loss", "change", "KL,\nnats", "same\ntop-1", "scales\ngrown"):
        table.add_column(column, justify="left" if column.startswith("before") else "right")
    count = min(most, len(rows))
    for row in (rows[round(n * (len(rows) - 1) / max(count - 1, 1))] for n in range(count)):
        change = f"{row.nll - row.baseline_nll:+.4f}"
        span = f"{row.start} to {row.stop}"
        table.add_row(span, row.operation, f"{row.nll:.4f}", change, f"{row.kl:.1e}", f"{row.top1_agreement:.1%}", str(row.growths))
    return table


def meta(model: Any = None) -> dict[str, Any]:
    """Where and how a result was measured: device, versions, date, command, model, and the SHA-256 of the sources it depends on."""
    package = Path(__file__).resolve().parents[1]
    device = "cpu" if model is None else str(model.device)
    return {
        "device": torch.cuda.get_device_name(model.device) if device.startswith("cuda") else f"{device} ({platform.machine()})",
        "fp8attn": __version__,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["fp8attn", *sys.argv[1:]]),
        "model": None if model is None else Path(model.config._name_or_path).name,
        "sources": {f"src/fp8attn/{path}": hashlib.sha256((package / path).read_bytes()).hexdigest() for path in SOURCES},
    }


def to_json(value: Any) -> Any:
    """Dataclasses as dicts (a `Perplexity` with its `ppl`), NaN as null, ready for `json.dumps`."""
    if is_dataclass(value):
        value = asdict(value) | ({"ppl": value.ppl} if isinstance(value, Perplexity) else {})
    if isinstance(value, dict):
        return {str(name): to_json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: str | Path, value: Any) -> None:
    """Write `to_json(value)`, and the folders above it."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(to_json(value), indent=2) + "\n")


def _table(heading: str) -> Table:
    """An empty table that fits into 80 columns."""
    return Table(title=heading, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False, min_width=min(80, len(heading)))


def _number(value: float, form: str) -> str:
    return "" if math.isnan(value) else format(value, form)
