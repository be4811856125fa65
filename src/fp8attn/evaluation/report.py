"""What the evaluations found: tables, JSON, a picture."""

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
from ..numerics import E4M3
from ..scales import KVScales
from .needle import Cell, score
from .perplexity import Perplexity

# What an evaluation's numbers depend on, besides the model: a change here makes them stale.
SOURCES = (
    *("numerics.py", "layout.py", "cache.py", "ops.py", "reference.py"),
    *("integrations/transformers/attention.py", "integrations/transformers/cache.py", "integrations/transformers/tensors.py"),
    *("evaluation/caches.py", "evaluation/perplexity.py", "evaluation/needle.py"),
)
TITLES = {"bf16": "BF16", "fp8": "FP8", "fp8-static": "FP8 static", "fp8-no-means": "FP8 no means", "transformers-fp8": "HF FP8"}


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
    """A row a layer: SQNR of K and V in dB, and the largest magnitude (means taken off) that the scale of any of its heads holds."""
    table = _table(f"What FP8 keeps of K and V: {scales.method}, {scales.tokens} tokens")
    for column in ("layer", "K SQNR (dB)", "V SQNR (dB)", "K up to", "V up to"):
        table.add_column(column, justify="right")
    for index, (k, v) in scales.sqnr_db.items():
        tops = (float(scale.max()) * E4M3.max for scale in (scales.layer(index).k_scale, scales.layer(index).v_scale))
        table.add_row(str(index), f"{k:.1f}", f"{v:.1f}", *(f"{top:.3g}" for top in tops))
    return table


def needle_table(cells: Sequence[Cell]) -> Table:
    """A row for each length and cache, a column for each depth: the share answered rightly."""
    table = _table("Needle in a haystack: share of exact answers, by depth")
    depths = sorted({cell.depth for cell in cells})
    table.add_column("length", justify="right")
    table.add_column("cache")
    for depth in depths:
        table.add_column(f"{depth:.0%}", justify="right")
    caches = list(dict.fromkeys(cell.cache for cell in cells))
    for length in sorted({cell.length for cell in cells}):
        for number, cache in enumerate(caches):
            shares = {c.depth: sum(c.correct) / len(c.correct) for c in cells if (c.length, c.cache) == (length, cache)}
            values = [f"{shares[depth]:.0%}" if depth in shares else "" for depth in depths]
            table.add_row("" if number else str(length), title(cache), *values, end_section=number == len(caches) - 1)
    return table


def plot_needle(cells: Sequence[Cell], path: str | Path, *, heading: str = "") -> None:
    """A PNG: one heat map a cache, side by side, length across and depth down, each cell's share written in it.

    Args:
        cells: of `needle_grid`.
        path: where to write.
        heading: above the maps, such as the model's name.
    """
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure  # no pyplot: no display, no global state

    caches = list(dict.fromkeys(cell.cache for cell in cells))
    lengths, depths = sorted({cell.length for cell in cells}), sorted({cell.depth for cell in cells})
    colours = LinearSegmentedColormap.from_list("recall", ["#b2452f", "#f0d9b5", "#2a7f86"])
    figure = Figure(figsize=(1.6 + (0.85 * len(lengths) + 0.7) * len(caches), 2.1 + 0.5 * len(depths)), dpi=160, layout="constrained")
    axes = figure.subplots(1, len(caches), sharey=True, squeeze=False)[0]
    for axis, cache in zip(axes, caches, strict=True):
        shares = torch.full((len(depths), len(lengths)), math.nan)
        for cell in cells:
            if cell.cache == cache:
                shares[depths.index(cell.depth), lengths.index(cell.length)] = sum(cell.correct) / len(cell.correct)
        image = axis.imshow(shares.numpy(), cmap=colours, vmin=0, vmax=1, aspect="auto")
        for row in range(len(depths)):
            for column in range(len(lengths)):
                share = float(shares[row, column])
                if not math.isnan(share):
                    dark = share < 0.25 or share > 0.75
                    axis.text(column, row, f"{share:.0%}", ha="center", va="center", fontsize=9, color="white" if dark else "#222222")
        axis.set_title(f"{title(cache)} cache: {score(cells, cache):.1%}", fontsize=11)
        axis.set_xticks(range(len(lengths)), [_thousands(length) for length in lengths])
        axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        axis.set_xticks([x - 0.5 for x in range(1, len(lengths))], minor=True)
        axis.set_yticks([y - 0.5 for y in range(1, len(depths))], minor=True)
        axis.grid(which="minor", color="white", linewidth=2)
        axis.tick_params(which="both", length=0)
        axis.spines[:].set_visible(False)
        axis.set_xlabel("context (tokens)")
    axes[0].set_ylabel("needle's depth")
    bar = figure.colorbar(image, ax=axes, shrink=0.9, pad=0.02, ticks=[0, 0.5, 1], format=lambda share, _: f"{share:.0%}")
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0)
    bar.set_label("exact answers")
    figure.suptitle(heading or "Needle in a haystack", fontsize=12)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


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


def _thousands(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)
