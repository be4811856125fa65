"""Measures the drift of an FP8 cache: decodes thousands of tokens after a prompt, and moves sequences as a serving engine does.

The tokens are given, so that the baseline gets the same tokens and can read them in chunks. Before or after a segment, the sequences of
both caches are

- `copied`: the second of two sequences becomes a copy of the first. They share pages, and each continues with its own text;
- `reordered`: the sequences are exchanged, and each continues with the other's text;
- `truncated`: the second half of the segment is removed, in the middle of a page, and decoded again.

A scale grows whenever a token is larger than the tokens before it on its page; the growths are counted. On a GPU, a step with a static
cache is one CUDA graph, so 100,000 steps take a minute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from fp8attn.errors import UsageError
from fp8attn.formats.page_layout import PAGE_SIZE
from fp8attn.integrations.transformers.config import decoder_config
from fp8attn.pages import KVPages

from .caches import CHUNK, MakeCache, forward, prefill

OPERATIONS = ("left alone", "copied", "reordered", "truncated")


@dataclass(frozen=True)
class Segment:
    """The results of one segment.

    Attributes:
        start, stop: its tokens, counted from the first of the prompt.
        operation: one of `OPERATIONS`.
        nll: mean negative log-likelihood with the cache, in nats; `baseline_nll`: with the baseline.
        kl: mean KL divergence of the baseline's predictions from the cache's, in nats.
        top1_agreement: the share of positions where both predict the same token as the likeliest.
        growths: how often the scale of a page in use grew, counted over K, V, layers and heads.
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
            f"prompt must be at least 1 and less than the {total} tokens of a window, and segment at least 2; got {prompt} and {segment}"
        )
    tokens = tokens.to(model.device)
    cache, baseline = make_cache(), make_baseline()
    for each in (cache, baseline):
        prefill(model, tokens[:, :prompt], each, chunk=chunk)
    numbers = torch.arange(len(tokens), device=tokens.device)
    orders = {"copied": numbers // 2 * 2, "reordered": numbers.flip(0)}
    decoder, rows = _Decoder(model, cache, len(tokens), segment), []
    for number, start in enumerate(range(prompt, total, segment)):
        stop = min(start + segment, total)
        operation = OPERATIONS[number % len(OPERATIONS)]
        if operation in orders:
            for each in (cache, baseline):
                each.reorder_cache(orders[operation])
        part, grown = tokens[:, start:stop], int(decoder.growths)
        logits = decoder.decode(part)
        if operation == "truncated":
            kept = (stop - start) // 2
            cache.crop(kept - (stop - start))
            logits = torch.cat([logits[:, :kept], decoder.decode(part[:, kept:])], 1)
        against = forward(model, part, baseline)
        rows.append(_compare(start, stop, operation, logits, against, tokens[:, start + 1 : stop + 1], int(decoder.growths) - grown))
        if progress:
            progress(stop - prompt, total - prompt)
    return rows


class _Decoder:
    """Decodes given tokens one at a time with a cache. The state of a step is on the device, so a CUDA graph can capture it.

    Attributes:
        growths: how often a scale has grown, `[]` int64.
    """

    def __init__(self, model: Any, cache: Cache, batch: int, longest: int) -> None:
        self.model, self.cache = model, cache
        self.tokens = torch.zeros(batch, longest, dtype=torch.int64, device=model.device)
        vocabulary = decoder_config(model.config).vocab_size
        self.logits = torch.zeros(batch, longest, vocabulary, dtype=model.dtype, device=model.device)
        self.at = torch.zeros(1, dtype=torch.int64, device=model.device)  # the token to read
        self.growths = torch.zeros((), dtype=torch.int64, device=model.device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits `[B, n, vocabulary]` of `tokens [B, n]`, from one forward per token."""
        count = tokens.shape[1]
        self.tokens[:, :count] = tokens
        self.at.zero_()
        for _ in range(count):
            if self.graph is not None:
                self.graph.replay()
            elif self.model.device.type == "cuda" and self.cache.is_compileable:
                self._capture()
            else:
                self._step()
        return self.logits[:, :count].clone()

    def _capture(self) -> None:
        """Run one step on a side stream, which CUDA graphs require, and capture the graph of all further steps."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step()

    def _step(self) -> None:
        layers = _fp8_pages(self.cache)
        if layers:
            length = layers[0].cache_seqlens.long()  # of all layers
            column = (length // PAGE_SIZE)[:, None]
            before = _scales(layers, column)
        logits = forward(self.model, self.tokens.index_select(1, self.at), self.cache)
        self.logits.index_copy_(1, self.at, logits)
        self.at += 1
        if layers:
            layers = _fp8_pages(self.cache)
            self.growths += ((_scales(layers, column) > before) & (length % PAGE_SIZE > 0)[:, None]).sum()


def _fp8_pages(cache: Cache) -> list[KVPages]:
    """The pages of each FP8 layer; of other caches, and before the first tokens, none."""
    if getattr(cache, "paged", None) is None:
        return []
    return [cache.pages(layer) for layer in cache.fp8_layers]


def _scales(layers: list[KVPages], column: torch.Tensor) -> torch.Tensor:
    """The scales of K and V of all layers, `[B, n]`, on the page in `column [B, 1]` of each sequence's table.

    For a sequence without a page there, the scales of another page.
    """
    columns = (column.clamp_max(pages.page_table.shape[1] - 1) for pages in layers)
    ids = [pages.page_table.gather(1, at)[:, 0].long() for pages, at in zip(layers, columns, strict=True)]
    return torch.cat([scale[page] for pages, page in zip(layers, ids, strict=True) for scale in (pages.k_scale, pages.v_scale)], 1)


def _compare(
    start: int, stop: int, operation: str, logits: torch.Tensor, baseline: torch.Tensor, targets: torch.Tensor, growths: int
) -> Segment:
    mine, theirs = logits.float().log_softmax(-1), baseline.float().log_softmax(-1)
    nll, baseline_nll = (-x.gather(2, targets[..., None]).mean().item() for x in (mine, theirs))
    kl = (theirs.exp() * (theirs - mine)).sum(-1).mean().item()
    same = (mine.argmax(-1) == theirs.argmax(-1)).float().mean().item()
    return Segment(start, stop, operation, nll, baseline_nll, kl, same, growths)
