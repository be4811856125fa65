"""Heat maps of needles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure  # no pyplot: no display, no global state

from fp8attn.errors import UsageError

from ..evaluation.names import title
from ..evaluation.outcomes import Outcome, cells, score

FORMATS = (".png", ".svg", ".pdf")


def needle_maps(outcomes: Sequence[Outcome], *, heading: str = "Needle in a haystack") -> Figure:
    """One heat map for each cache: length across, depth down, each cell with its mean score. Maps fill the width of a
    page.
    """
    found = cells(outcomes)
    caches = list(dict.fromkeys(cell.cache for cell in found))
    lengths, depths = sorted({cell.length for cell in found}), sorted({cell.depth for cell in found})
    colors = LinearSegmentedColormap.from_list("recall", ["#b2452f", "#f0d9b5", "#2a7f86"])
    columns = min(len(caches), max(1, 20 // len(lengths)))
    lines = -(-len(caches) // columns)
    size = (1.6 + (0.85 * len(lengths) + 0.7) * columns, 1.1 + (1 + 0.5 * len(depths)) * lines)
    figure = Figure(figsize=size, dpi=160, layout="constrained")
    axes = figure.subplots(lines, columns, sharey=True, squeeze=False)
    for axis in axes.flat[len(caches) :]:
        axis.set_visible(False)
    for axis, cache in zip(axes.flat, caches, strict=False):
        shares = torch.full((len(depths), len(lengths)), math.nan)
        for cell in found:
            if cell.cache == cache:
                shares[depths.index(cell.depth), lengths.index(cell.length)] = cell.score
        axis.set_facecolor("#eeeeee")  # cells without samples
        image = axis.imshow(shares.numpy(), cmap=colors, vmin=0, vmax=1, aspect="auto")
        for row in range(len(depths)):
            for column in range(len(lengths)):
                share = float(shares[row, column])
                dark = share < 0.25 or share > 0.75
                text = f"{share:.0%}" if not math.isnan(share) else "\N{EN DASH}"
                axis.text(column, row, text, ha="center", va="center", fontsize=9, color="white" if dark else "#222222")
        axis.set_title(f"{title(cache)}: {score(outcomes, cache):.1%}", fontsize=11)
        axis.set_xticks(range(len(lengths)), [thousands(length) for length in lengths])
        axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        axis.set_xticks([x - 0.5 for x in range(1, len(lengths))], minor=True)
        axis.set_yticks([y - 0.5 for y in range(1, len(depths))], minor=True)
        axis.grid(which="minor", color="white", linewidth=2)
        axis.tick_params(which="both", length=0)
        axis.spines[:].set_visible(False)
        axis.set_xlabel("context (tokens)")
    for axis in axes[:, 0]:
        axis.set_ylabel("needle's depth")
    bar = figure.colorbar(
        image, ax=axes, shrink=0.9 / lines, pad=0.02, ticks=[0, 0.5, 1], format=lambda share, _: f"{share:.0%}"
    )
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0)
    bar.set_label("right answers")
    figure.suptitle(heading, fontsize=12)
    return figure


def check_format(path: str | Path) -> None:
    """Check that `save` can write the format that the path's suffix names.

    Raises:
        UsageError: the suffix is none of `FORMATS`.
    """
    if Path(path).suffix.lower() not in FORMATS:
        raise UsageError(f"a plot must be a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file; got {path}")


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure in the format that the path's suffix names, and make the folders above.

    Raises:
        UsageError: the suffix is none of `FORMATS`.
    """
    check_format(path)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def thousands(length: int) -> str:
    """`4k` for 4096."""
    return f"{length // 1024}k" if length % 1024 == 0 and length else str(length)
