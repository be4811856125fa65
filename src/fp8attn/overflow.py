"""Counts of overflows: values that are larger than their page's scale can represent. `append` adds to them on the device.

A calibrated scale stays, so a value that is too large saturates. Many such values mean that the model now reads text that the calibration
did not show. A page's own scale grows instead, and the page's older tokens are rounded again, which adds a little to their error.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .formats.page_layout import PAGE_SIZE
from .scales import RECALIBRATE, ranges

logger = logging.getLogger(__name__)

# The share of K's or V's values of a layer from which on static scales do not fit: ten times what a percentile of 99.99 saturates. On a
# public model, scales that fit saturate at most 0.05%, also on another kind of text (docs/lab/2026-11-real-models.md). A percentile of 99.9
# saturates this much by choice. With fewer tokens, a few values are a large share.
MOST_SATURATED = 0.001
FEWEST_TOKENS = 1024


@dataclass(frozen=True)
class LayerOverflows:
    """The counts of K or of V of one layer.

    Attributes:
        layer: the layer's number.
        kind: `"k"` or `"v"`.
        tokens: number of tokens that were appended.
        values: number of values of these tokens, over all KV heads and channels.
        saturated: number of these that a static scale could not represent.
        rescaled: how often a page's own scale grew after the page's first token.
        pages: number of pages of 128 tokens, over all KV heads, that these tokens fill.
    """

    layer: int
    kind: str
    tokens: int
    values: int
    saturated: int
    rescaled: int
    pages: float

    @property
    def saturated_share(self) -> float:
        """The share of values that saturated."""
        return self.saturated / max(self.values, 1)

    @property
    def rescaled_share(self) -> float:
        """How often the scale of a page grew, on average; 0 without tokens."""
        return self.rescaled / self.pages if self.pages else 0.0

    @property
    def fits(self) -> bool:
        """Whether at most 0.1% of the values saturate. True for fewer than 1,024 tokens."""
        return self.tokens < FEWEST_TOKENS or self.saturated_share <= MOST_SATURATED


@dataclass(frozen=True)
class OverflowReport:
    """The counts of a model's layers at one time. `str` makes a table.

    Attributes:
        rows: K's and V's counts of each layer, in order.
    """

    rows: tuple[LayerOverflows, ...]

    @property
    def problem(self) -> str | None:
        """Why static scales no longer fit, with what to do; None if they do."""
        over = [row for row in self.rows if not row.fits]
        if not over:
            return None
        worst = max(over, key=lambda row: row.saturated_share)
        return (
            f"static scales do not fit what the model reads: layers {ranges({row.layer for row in over})} saturate more than "
            f"{MOST_SATURATED:.1%} of the values of K or V (the most: {worst.saturated_share:.2%} of {worst.kind.upper()} in layer "
            f"{worst.layer}); {RECALIBRATE} on such text, or leave out the scales, so that each page has its own"
        )

    def __str__(self) -> str:
        lines = [f"{'layer':>5}   {'tokens':>12} {'saturated':>10} {'rescaled a page':>16}"]
        for row in self.rows:
            share, times = f"{row.saturated_share:.4%}", f"{row.rescaled_share:.3f}"
            lines.append(f"{row.layer:>5} {row.kind.upper()} {row.tokens:>12,} {share:>10} {times:>16}")
        return "\n".join(lines)


class OverflowCounts:
    """The counts of a model's layers, on the device, where appends add to them, also in CUDA graphs.

        counts = OverflowCounts(num_layers, num_kv_heads, head_dim, device="cuda")
        fp8attn.append(pages, k, v, overflows=counts.tensors[layer])
        print(counts.read())

    `PagedKVCache(count_overflows=True)` has one.

    Args:
        layers: number of layers, or the number of each, for the report.
        num_kv_heads, head_dim: the shape of every layer.
        device: the device of the pages.
    Attributes:
        layers: the number of each layer, for the report.
        tensors: for each layer `[2, 3]` int64, as `fp8attn.append` takes it.
    """

    def __init__(self, layers: int | Sequence[int], num_kv_heads: int, head_dim: int, device: torch.device | str | None = None) -> None:
        self.layers = list(range(layers)) if isinstance(layers, int) else list(layers)
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.tensors = [torch.zeros(2, 3, dtype=torch.int64, device=device) for _ in self.layers]
        self._warned = False

    def read(self) -> OverflowReport:
        """Read the counts back, which waits for the GPU once.

        If static scales do not fit (`OverflowReport.problem`), the first report that shows it also logs a warning.
        """
        rows = []
        for layer, counts in zip(self.layers, torch.stack(self.tensors).tolist(), strict=True):
            for kind, (tokens, saturated, rescaled) in zip("kv", counts, strict=True):
                heads = tokens * self.num_kv_heads
                rows.append(LayerOverflows(layer, kind, tokens, heads * self.head_dim, saturated, rescaled, heads / PAGE_SIZE))
        report = OverflowReport(tuple(rows))
        if report.problem is not None and not self._warned:
            self._warned = True
            logger.warning(report.problem)
        return report

    @torch.inference_mode()  # outside of this mode, torch does not write to its tensors
    def reset(self) -> None:
        """Set all counts to zero, to count from now on. The tensors stay, because CUDA graphs may write into them."""
        for counts in self.tensors:
            counts.zero_()
