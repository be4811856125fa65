"""What is right: float64 on what is stored, and the bits of `layout`."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.measure import exact, relative
from fp8attn import KVPages
from fp8attn.formats.page_layout import PAGE_SIZE, scales_of, unpack_k, unpack_v

from .layout import TokenPages, by_token, copied


def uneven(count: int, heads: int, head_dim: int, spread: float) -> torch.Tensor:
    """Tokens whose magnitudes differ by powers of e."""
    return torch.randn(count, heads, head_dim) * torch.exp(spread * torch.randn(count, heads, 1))


def errors(pages: TokenPages, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, queries: int, window: int = 0) -> float:
    """Of all rows, against float64 on what is stored. LSE is compared, too."""
    pairs = []
    for seq, length in enumerate(pages.lengths.tolist()):
        rows = slice(seq * queries, (seq + 1) * queries)
        k, v = pages.read(seq)
        for row in range(rows.start, rows.stop):
            last = length - queries + row - rows.start
            first = max(last - window + 1, 0) if window else 0
            seen = slice(first, max(last + 1, first))
            one = q[row : row + 1]
            pairs.append((out[row : row + 1], exact(one, k[seen], v[seen], pages.head_dim**-0.5)))
            if seen.stop > seen.start:
                group = q.shape[1] // k.shape[1]
                scores = torch.einsum("hd,khd->hk", one[0].double(), k[seen].repeat_interleave(group, 1)) * pages.head_dim**-0.5
                off = float((lse[row].double() - torch.logsumexp(scores, 1)).abs().max())
                assert off < 1e-3, f"LSE is {off} off"
    return relative([(a.double(), b) for a, b in pairs])


def wrong_copies(pages: TokenPages, target: KVPages, columns: int = 1 << 30) -> list[str]:
    """The parts of the first `columns` pages of each sequence that differ from `layout.copied`."""
    wrong = []
    for seq, length in enumerate(pages.lengths.tolist()):
        for column in range(min(-(-length // PAGE_SIZE), columns)):
            page = target.page_table[seq, column]
            found = target.k[page], target.v[page].view(torch.uint8), scales_of(target.pool)[page]
            k, v, scales = copied(pages, seq, column)
            parts = zip(("k", "v", "scales"), found, (k, v.view(torch.uint8), scales), strict=True)
            wrong += [f"{name} of page {column} of sequence {seq}" for name, a, b in parts if not torch.equal(a, b)]
    return wrong


def appended_to(expected: TokenPages, held: int) -> TokenPages:
    """A cache that has only the first `held` tokens of each sequence of `expected`; the other bytes are poison, and V's scales zero."""
    pages = replace(expected, pool=expected.pool.clone(), lengths=torch.full_like(expected.lengths, held))
    for table in pages.page_table.long():
        rows = table[:-1]
        behind = torch.arange(len(rows) * PAGE_SIZE, device=table.device).view(-1, 1, PAGE_SIZE) >= held
        k, scales, v = pages.k[rows], pages.scales[rows], pages.v[rows]
        pages.k[rows] = torch.where(behind[..., None], 0x7F, k)
        position = by_token(torch.arange(PAGE_SIZE, device=table.device))  # of each token
        at = torch.empty_like(position).scatter_(0, position, torch.arange(PAGE_SIZE, device=table.device))  # the token of each position
        pages.scales[rows] = torch.where(behind[:, :, at][:, :, None], 0.0, scales)
        if held == 0:
            pages.v[rows] = torch.full_like(v, 0x7F)
    return pages


def wrong_rows(pages: TokenPages, expected: TokenPages) -> list[str]:
    """What differs of the tokens that `expected` holds."""
    wrong = []
    for seq, length in enumerate(expected.lengths.tolist()):
        rows = expected.page_table[seq, : -(-length // PAGE_SIZE)].long()
        for name in ("k", "v", "scales"):
            a, b = (getattr(x, name)[rows] for x in (pages, expected))
            if name == "scales":
                a, b = (by_token(x).view(torch.int16).permute(0, 3, 1, 2).flatten(0, 1)[:length] for x in (a, b))
            else:
                a, b = ((unpack_k if name == "k" else unpack_v)(x)[:length] for x in (a, b))
            if not torch.equal(a, b):
                wrong.append(f"{name} of sequence {seq}: {int((a != b).sum())} of {a.numel()}")
    return wrong
