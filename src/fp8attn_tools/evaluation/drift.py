"""Measures the drift of an FP8 cache: decodes thousands of tokens after a prompt, and moves sequences as a serving
engine does.

The tokens are given, so that the baseline gets the same tokens and can read them in chunks. Before or after a segment,
the sequences of both caches are

- `copied`: the second of two sequences becomes a copy of the first. They share pages, and each continues with its own
  text;
- `reordered`: the sequences are exchanged, and each continues with the other's text;
- `truncated`: the second half of the segment is removed, in the middle of a page, and decoded again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from fp8attn.errors import UsageError

from .caches import CHUNK, MakeCache, forward, prefill

OPERATIONS = ("left alone", "copied", "reordered", "truncated")


@dataclass(frozen=True)
class Segment:
    """The results of one segment.

    Attributes:
        start, stop: its tokens, counted from the first of the prompt.
        nll: mean negative log-likelihood with the cache, in nats; `baseline_nll`: with the baseline.
        kl: mean KL divergence of the baseline's predictions from the cache's, in nats.
        top1_agreement: the share of positions where both predict the same token as the likeliest.
    """

    start: int
    stop: int
    operation: str
    nll: float
    baseline_nll: float
    kl: float
    top1_agreement: float


def drift(
    model: Any,
    tokens: torch.Tensor,
    make_cache: MakeCache,
    make_baseline: MakeCache,
    *,
    prompt: int,
    segment: int = CHUNK,
    chunk: int = CHUNK,
    progress: Callable[[int, int], None] | None = None,
) -> list[Segment]:
    """Decode `tokens` after their first `prompt`, one at a time, and compare each prediction with the baseline's.

    Args:
        model: a transformers causal language model.
        tokens: `[B, prompt + N + 1]` ids; N tokens are decoded, and N predicted.
        make_cache: makes the cache to measure; `make_baseline`: a growing one to compare with (`caches.cache_factory`).
        segment: tokens decoded between two operations.
        chunk: tokens of a prefill's forward.
        progress: called with (tokens decoded, tokens to decode).
    Raises:
        UsageError: too few tokens.
    """
    total = tokens.shape[1] - 1
    if not 0 < prompt < total or segment < 2:
        raise UsageError(
            f"prompt must be at least 1 and less than the {total} tokens of a window, and segment at least 2; got "
            f"{prompt} and {segment}"
        )
    tokens = tokens.to(model.device)
    cache, baseline = make_cache(), make_baseline()
    for each in (cache, baseline):
        prefill(model, tokens[:, :prompt], each, chunk=chunk)
    numbers = torch.arange(len(tokens), device=tokens.device)
    orders = {"copied": numbers // 2 * 2, "reordered": numbers.flip(0)}
    rows = []
    for number, start in enumerate(range(prompt, total, segment)):
        stop = min(start + segment, total)
        operation = OPERATIONS[number % len(OPERATIONS)]
        if operation in orders:
            for each in (cache, baseline):
                each.reorder_cache(orders[operation])
        part = tokens[:, start:stop]
        logits = _decode(model, part, cache)
        if operation == "truncated":
            kept = (stop - start) // 2
            cache.crop(kept - (stop - start))
            logits = torch.cat([logits[:, :kept], _decode(model, part[:, kept:], cache)], 1)
        against = forward(model, part, baseline)
        rows.append(_compare(start, stop, operation, logits, against, tokens[:, start + 1 : stop + 1]))
        if progress:
            progress(stop - prompt, total - prompt)
    return rows


def _decode(model: Any, tokens: torch.Tensor, cache: Cache) -> torch.Tensor:
    """Logits `[B, n, vocabulary]` of `tokens [B, n]`, from one forward per token."""
    return torch.cat([forward(model, token, cache) for token in tokens.split(1, 1)], 1)


def _compare(
    start: int, stop: int, operation: str, logits: torch.Tensor, baseline: torch.Tensor, targets: torch.Tensor
) -> Segment:
    mine, theirs = logits.float().log_softmax(-1), baseline.float().log_softmax(-1)
    nll, baseline_nll = (-x.gather(2, targets[..., None]).mean().item() for x in (mine, theirs))
    kl = (theirs.exp() * (theirs - mine)).sum(-1).mean().item()
    same = (mine.argmax(-1) == theirs.argmax(-1)).float().mean().item()
    return Segment(start, stop, operation, nll, baseline_nll, kl, same)
