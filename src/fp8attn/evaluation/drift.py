"""Does an FP8 cache drift? Thousands of tokens decoded after a prompt, and meanwhile all that a serving engine does to a cache.

The tokens are given, so that the baseline sees the same ones and reads them in chunks. Between two segments the sequences of the cache are

- `copied`: each goes on twice, side by side and sharing pages, and soon as its copy alone;
- `reordered`: the batch is turned round;
- `truncated`: the second half of the segment is cropped, in the middle of a page, and decoded again.

Scales grow by themselves, whenever a token is larger than those before it on its page; that is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from ..integrations.transformers import FP8Cache
from ..integrations.transformers.cache import FP8Layer
from ..layout import PAGE_SIZE
from .caches import CHUNK, MakeCache, forward, prefill

OPERATIONS = ("left alone", "copied", "reordered", "truncated")
TOGETHER = 8  # tokens that a sequence and its copy decode side by side


@dataclass(frozen=True)
class Segment:
    """What decoding one stretch of the sequences showed.

    Attributes:
        start, stop: its tokens, counted from the prompt's first.
        operation: one of `OPERATIONS`.
        nll: mean negative log-likelihood through the cache, in nats; `baseline_nll`: through the baseline.
        kl: mean KL divergence of the baseline's predictions from the cache's, in nats.
        top1_agreement: the share of positions where both think the same token likeliest.
        growths: how often the scale of a page in use (of K or V, of one head) grew.
    """

    start: int
    stop: int
    operation: str
    nll: float
    baseline_nll: float
    kl: float
    top1_agreement: float
    growths: int


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
    """Decode `tokens` behind their first `prompt`, one at a time, and compare each prediction with the baseline's.

    Args:
        model: a transformers causal language model.
        tokens: `[B, prompt + N + 1]` ids; N are decoded and as many predicted.
        make_cache: makes the cache to judge, one that grows; `make_baseline`: the one to compare with (`caches.cache_factory`).
        segment: tokens decoded between two operations.
        chunk: tokens of a prefill's forward.
        progress: called with (tokens decoded, tokens in all).
    Raises:
        ValueError: too few tokens.
    """
    total = tokens.shape[1] - 1
    if not 0 < prompt < total or segment < 2:
        raise ValueError(f"a prompt of at least 1 and a segment of at least 2 tokens fit into {total}; got {prompt} and {segment}")
    tokens = tokens.to(model.device)
    cache, baseline = make_cache(), make_baseline()
    for each in (cache, baseline):
        prefill(model, tokens[:, :prompt], each, chunk=chunk)
    rows = []
    for number, start in enumerate(range(prompt, total, segment)):
        stop = min(start + segment, total)
        operation = OPERATIONS[number % len(OPERATIONS)]
        if operation == "reordered":
            order = torch.arange(len(tokens) - 1, -1, -1, device=tokens.device)
            tokens = tokens[order]
            for each in (cache, baseline):
                each.reorder_cache(order)
        growths = torch.zeros((), dtype=torch.int64, device=tokens.device)
        part = tokens[:, start:stop]
        if operation == "copied":
            together, copies = min(TOGETHER, stop - start), torch.arange(1, 2 * len(tokens), 2, device=tokens.device)
            cache.batch_repeat_interleave(2)
            first = _decode(model, part[:, :together].repeat_interleave(2, 0), cache, start, growths)[copies]
            cache.batch_select_indices(copies)
            logits = torch.cat([first, _decode(model, part[:, together:], cache, start + together, growths)], 1)
        else:
            logits = _decode(model, part, cache, start, growths)
        if operation == "truncated":
            kept = (stop - start) // 2
            cache.crop(kept - (stop - start))
            logits = torch.cat([logits[:, :kept], _decode(model, part[:, kept:], cache, start + kept, growths)], 1)
        rows.append(_compare(start, stop, operation, logits, forward(model, part, baseline), tokens[:, start + 1 : stop + 1], growths))
        if progress:
            progress(stop - prompt, total - prompt)
    return rows


def _decode(model: Any, tokens: torch.Tensor, cache: Cache, length: int, growths: torch.Tensor) -> torch.Tensor:
    """Logits `[B, n, vocabulary]` of `tokens [B, n]`, one forward each, onto a cache of `length` tokens; growths are added to the count."""
    out = []
    for at in range(tokens.shape[1]):
        page = (length + at) // PAGE_SIZE
        before = _scales(cache, page) if (length + at) % PAGE_SIZE else []
        out.append(forward(model, tokens[:, at : at + 1], cache)[:, -1])
        for old, new in zip(before, _scales(cache, page) if before else [], strict=True):
            growths += (new > old).sum()
    empty = (len(tokens), 0, model.config.get_text_config(decoder=True).vocab_size)
    return torch.stack(out, 1) if out else torch.empty(empty, device=tokens.device)


def _scales(cache: Cache, page: int) -> list[torch.Tensor]:
    """The scales of every sequence's page number `page`, of each FP8 layer's K and V."""
    if not isinstance(cache, FP8Cache):
        return []
    pages = [layer.cache.pages for layer in cache.layers if isinstance(layer, FP8Layer)]
    return [scale[p.page_table[:, page].long()] for p in pages for scale in (p.k_scale, p.v_scale)]


def _compare(start, stop, operation, logits, baseline, targets, growths) -> Segment:
    mine, theirs = logits.float().log_softmax(-1), baseline.float().log_softmax(-1)
    nll, baseline_nll = (-x.gather(2, targets[..., None]).mean().item() for x in (mine, theirs))
    kl = (theirs.exp() * (theirs - mine)).sum(-1).mean().item()
    same = (mine.argmax(-1) == theirs.argmax(-1)).float().mean().item()
    return Segment(start, stop, operation, nll, baseline_nll, kl, same, int(growths))
