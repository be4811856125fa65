"""Whether calibrated scales still fit what a model reads: the codes in its pages that are the largest code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from fp8attn import KVPages
from fp8attn.formats.page_layout import PAGE_SIZE, unpack_k, unpack_v


@dataclass(frozen=True)
class LayerSaturation:
    """How many codes of K or of V of a layer are the largest code.

    Attributes:
        values: number of stored values: tokens, times KV heads, times channels.
        largest: number of those whose code is the largest of the format, or its negative.
    """

    layer: int
    kind: Literal["k", "v"]
    values: int
    largest: int

    @property
    def share(self) -> float:
        """`largest` in relation to `values`; 0 without tokens."""
        return self.largest / max(self.values, 1)


def saturation(pages: Mapping[int, KVPages]) -> list[LayerSaturation]:
    """Count the values that pages with calibrated scales may have cut off.

        saturation({layer: cache.pages(layer) for layer in cache.fp8_layers})  # of an FP8Cache
        saturation({layer: cache.pages(layer) for layer in range(cache.num_layers)})  # of a PagedKVCache without a
        window

    A value that is larger than a calibrated scale can represent is stored as the largest code, and so is a value that
    rounds to it. A share above 0.1% of 1,024 tokens or more is ten times what the percentile 99.99 cuts off: calibrate
    again, on text like what the model reads.

    Args:
        pages: of each layer by its number. A page that several sequences share counts once for each.
    Returns:
        K and V of each layer, in the order of `pages`. It waits for the GPU once for each layer.
    """
    found: list[LayerSaturation] = []
    for layer, its in pages.items():
        token = torch.arange(PAGE_SIZE, device=its.device)
        largest = torch.zeros(2, dtype=torch.int64, device=its.device)
        for column in range(its.page_table.shape[1]):  # a page of each sequence at a time, which limits the memory
            used = (column * PAGE_SIZE + token < its.cache_seqlens[:, None]).flatten()
            taken = its.with_pool(its.pool[its.page_table[:, column].long().clamp(0, its.num_pages - 1)])
            for i, (codes, codec) in enumerate(
                ((unpack_k(taken.k), its.format.k), (unpack_v(taken.v.view(torch.uint8)), its.format.v))
            ):
                cut = codes.view(codec.dtype).float().abs() == codec.max
                largest[i] += (cut & used[:, None, None]).sum()
        values = int(its.cache_seqlens.sum()) * its.num_kv_heads * its.head_dim
        counts = largest.tolist()
        found += [LayerSaturation(layer, "k", values, counts[0]), LayerSaturation(layer, "v", values, counts[1])]
    return found
