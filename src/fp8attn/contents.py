"""Checks of what tensors contain: cumulative lengths, page tables, lengths of sequences.

A GPU would have to be waited for, so they are made where the tensors are on the CPU, for every backend, and for the
backend `reference`, which reads them anyway. What they refuse is undefined on a GPU: lost tokens, unspecified rows,
other sequences' bytes.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from .formats.page_layout import PAGE_SIZE
from .pages import KVPages
from .params import Append, AttentionParams, BackendName


def at_hand(x: torch.Tensor, backend: BackendName) -> bool:
    """Whether contents beside `x` can be read without waiting for a GPU, or are read anyway."""
    return x.is_cpu or (backend == "reference" and not x.is_meta)


def check_appended(pages: KVPages, tokens: int, options: Append) -> None:
    """Check what `append` reads on the device.

    Raises:
        ValueError: tokens would be lost, written to other sequences' pages, or outside of the pool. Nothing was
            changed.
    """
    new = _counts(pages, tokens, options.cu_seqlens, options.max_seqlen, "cu_seqlens", "max_seqlen")
    before = _lengths(pages)
    if not options.advance:  # the lengths count the new tokens already; a sequence with fewer is padding
        new = [n if n <= length else 0 for n, length in zip(new, before, strict=True)]
        before = [length - n for n, length in zip(new, before, strict=True)]
    after = [length + n for n, length in zip(new, before, strict=True)]
    most = PAGE_SIZE * pages.page_table.shape[1]
    for seq, (n, length) in enumerate(zip(new, after, strict=True)):
        if n and length > most:
            raise ValueError(
                f"sequence {seq} would have {length} tokens, and page_table has pages for {most}: it must name a page "
                f"for every token, as PagedKVCache.append makes sure"
            )
    table = _pages_of(pages, [min(length, most) for length in after])
    owners: dict[int, int] = {}
    for seq, ids in enumerate(table):
        for page in ids[before[seq] // PAGE_SIZE :] if new[seq] else ():
            if (other := owners.setdefault(page, seq)) != seq:
                raise ValueError(
                    f"sequences {other} and {seq} would both write to page {page}: page_table must name pages of its "
                    f"own for the new tokens of each sequence"
                )


def check_attended(pages: KVPages, tokens: int, params: AttentionParams) -> None:
    """Check what `attention` reads on the device.

    Raises:
        ValueError: rows would be unspecified, or attend to the keys of others.
    """
    queries = _counts(pages, tokens, params.cu_seqlens_q, params.max_seqlen_q, "cu_seqlens_q", "max_seqlen_q")
    lengths = _lengths(pages)
    _pages_of(pages, lengths)
    for seq, (n, length) in enumerate(zip(queries, lengths, strict=True)):
        padding = not length and params.cu_seqlens_q is not None
        if params.causal and n > length and not padding:
            which = (
                "cu_seqlens_q gives it"
                if params.cu_seqlens_q is not None
                else "without cu_seqlens_q every sequence has"
            )
            raise ValueError(
                f"sequence {seq} holds {length} tokens, and {which} {n} queries, which must be its last tokens: append "
                f"them first, and give cu_seqlens_q and max_seqlen_q if the sequences have different numbers "
                f"(PagedKVCache.attention does)"
            )


def _counts(
    pages: KVPages, tokens: int, cu_seqlens: torch.Tensor | None, longest: int, name: str, max_name: str
) -> list[int]:
    """The number of new tokens of each sequence."""
    if cu_seqlens is None:
        return [longest] * pages.num_seqs
    bounds = cu_seqlens.tolist()
    counts = [end - start for start, end in pairwise(bounds)]
    if bounds[0] != 0 or bounds[-1] > tokens or any(n < 0 for n in counts):  # an engine pads behind the last sequence
        raise ValueError(
            f"{name} must start at 0, never decrease, and end within the {tokens} tokens given; got {_shown(bounds)}"
        )
    if counts and max(counts) > longest:
        raise ValueError(
            f"{max_name} is {longest}, and sequence {counts.index(max(counts))} has {max(counts)} tokens: give at "
            f"least that"
        )
    return counts


def _lengths(pages: KVPages) -> list[int]:
    """The lengths of the sequences."""
    lengths = pages.cache_seqlens.tolist()
    if lengths and min(lengths) < 0:
        raise ValueError(f"cache_seqlens must not be negative; got {_shown(lengths)}")
    return lengths


def _pages_of(pages: KVPages, lengths: list[int]) -> list[list[int]]:
    """The pages of the first `lengths` tokens of each sequence."""
    columns = [-(-length // PAGE_SIZE) for length in lengths]
    width = pages.page_table.shape[1]
    if max(columns, default=0) > width:
        raise ValueError(
            f"cache_seqlens has {max(lengths)} tokens of a sequence, and page_table has pages for {width * PAGE_SIZE}"
        )
    table = [row[:n] for row, n in zip(pages.page_table[:, : max(columns, default=0)].tolist(), columns, strict=True)]
    for seq, ids in enumerate(table):
        if ids and not 0 <= min(ids) <= max(ids) < pages.num_pages:
            wrong = next(page for page in ids if not 0 <= page < pages.num_pages)
            raise ValueError(
                f"page_table names page {wrong} for sequence {seq}, and the pool has the pages 0 to "
                f"{pages.num_pages - 1}"
            )
    return table


def _shown(values: list[int]) -> str:
    return f"[{', '.join(map(str, values[:8]))}{', ...' if len(values) > 8 else ''}]"
