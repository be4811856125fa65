"""Counts of overflows as counters of Prometheus, in the process that has the pages.

An engine's server shows metrics of other processes if the environment variable PROMETHEUS_MULTIPROC_DIR names an empty folder. Prometheus
adds up the processes of tensor parallelism.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache

import torch
from prometheus_client import Counter

from ...formats.page_layout import PAGE_SIZE
from ...overflow import OverflowCounts

INTERVAL = 10.0  # seconds, as vLLM's log


class OverflowMetrics:
    """Publishes the counts of some layers.

    Args:
        counts: of the layers.
    """

    def __init__(self, counts: Sequence[OverflowCounts]) -> None:
        self._counts = counts
        self._copy: torch.Tensor | None = None  # on its way from the GPU
        self._copied: torch.cuda.Event | None = None
        self._published = torch.zeros(len(counts), 2, 3, dtype=torch.int64)
        self._next = time.monotonic() + INTERVAL

    def update(self) -> None:
        """Publish new counts every 10 seconds. It is called at every step, and never waits for the GPU."""
        now = time.monotonic()
        if self._copy is not None:
            if self._copied is None or self._copied.query():
                self._publish(self._copy)
                self._copy = None
        elif now >= self._next and not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            self._next = now + INTERVAL
            found = torch.stack([counts.tensors[0] for counts in self._counts])
            self._copy = torch.empty(found.shape, dtype=found.dtype, pin_memory=found.is_cuda)
            self._copy.copy_(found, non_blocking=True)
            if found.is_cuda:
                self._copied = torch.cuda.Event()
                self._copied.record()

    def _publish(self, found: torch.Tensor) -> None:
        pages, rescaled, saturated = _counters()
        for counts, new in zip(self._counts, (found - self._published).tolist(), strict=True):
            for kind, added in zip("kv", new, strict=True):
                tokens, cut, grown = (max(one, 0) for one in added)  # counts begin anew if a sleep mode discards them
                labels = {"layer": str(counts.layers[0]), "kind": kind}
                pages.labels(**labels).inc(tokens * counts.num_kv_heads / PAGE_SIZE)
                rescaled.labels(**labels).inc(grown)
                saturated.labels(**labels).inc(cut)
        self._published = found


@cache
def _counters() -> tuple[Counter, Counter, Counter]:
    """Pages written, how often a page's scale grew after its first token, and what static scales cut off; Prometheus wants each once."""
    labels = ("layer", "kind")
    return (
        Counter("fp8attn:pages", "Pages of 128 tokens of a KV head that were written.", labels),
        Counter("fp8attn:rescaled_pages", "How often the scale of a page grew.", labels),
        Counter("fp8attn:saturated_values", "Values that a static scale cannot represent.", labels),
    )
