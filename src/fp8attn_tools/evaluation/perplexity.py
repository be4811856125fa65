"""Perplexity of the same tokens through several caches: prefilled in chunks, or decoded token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from fp8attn.errors import UsageError

from .caches import CHUNK, MakeCache, forward_stored, prefill


@dataclass(frozen=True)
class Positions:
    """Results at a range of positions: of tokens predicted from `start` up to `stop - 1` tokens before them, over all
    windows.

    Attributes:
        tokens: the number of predicted tokens.
        nll, standard_error, kl, top1_agreement: as in `Perplexity`.
    """

    start: int
    stop: int
    tokens: int
    nll: float
    standard_error: float
    kl: float
    top1_agreement: float


@dataclass(frozen=True)
class Perplexity:
    """How well a model predicts a text through one cache.

    Attributes:
        context: tokens of a window; at its end the cache has all of them.
        tokens: the number of predicted tokens.
        nll: mean negative log-likelihood, in nats per token.
        bits_per_byte: the same in bits per byte of the text, comparable between tokenizers; NaN if the bytes are not
            known.
        standard_error: of the difference between this `nll` and the first cache's, from its scatter over the tokens; 0
            for the first cache, NaN for one token.
        kl: mean KL divergence of the first cache's predictions from this one's, in nats; 0 for the first.
        top1_agreement: the share of positions where both predict the same token as the likeliest.
        bytes_per_token: all bytes of the cache after a window, per token; NaN if the cache does not report them.
        positions: the same by position, in ranges that double. They show the benefit of a long context, and whether
            errors grow with it.
    """

    cache: str
    mode: str
    context: int
    tokens: int
    nll: float
    bits_per_byte: float
    standard_error: float
    kl: float
    top1_agreement: float
    bytes_per_token: float
    positions: tuple[Positions, ...] = ()

    @property
    def ppl(self) -> float:
        """`exp(nll)`."""
        return math.exp(self.nll)


def perplexity(
    model: Any,
    windows: torch.Tensor,
    caches: Mapping[str, MakeCache],
    *,
    chunk: int = CHUNK,
    decode_tokens: int = 0,
    tokenizer: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Perplexity]:
    """Teacher-forced likelihood of each window, with all K and V read through the cache.

    The caches advance together over the same tokens, so their predictions are compared at every position. At most two
    caches' logits of one chunk are in memory.

    Args:
        windows: `[N, S + 1]` token ids. Each window starts with an empty cache; S tokens are input, and S are
            predicted.
        caches: by name, a function that makes an empty cache; the first is the baseline of `kl` and `top1_agreement`.
        chunk: tokens of a forward.
        decode_tokens: predict only this many last tokens of each window, with one forward each, after a prefill of the
            others. 0: predict all S, in chunks.
        tokenizer: counts the bytes of the predicted tokens.
        progress: called with (tokens predicted, number of tokens).
    Raises:
        UsageError: decode_tokens is negative, or larger than S.
    """
    context = windows.shape[1] - 1
    if not 0 <= decode_tokens <= context:
        raise UsageError(f"decode_tokens must be 0 to {context}, the tokens of a window; got {decode_tokens}")
    start = context - decode_tokens if decode_tokens else 0  # the first position that predicts
    runs = {name: (model, make) for name, make in caches.items()}
    found, held = by_token(
        runs, windows, start=start, step=1 if decode_tokens else chunk, chunk=chunk, progress=progress
    )
    nbytes = math.nan
    if tokenizer is not None:
        texts = tokenizer.batch_decode(windows[:, start + 1 :].tolist(), clean_up_tokenization_spaces=False)
        nbytes = sum(len(text.encode()) for text in texts)
    first = next(iter(found.values()))
    rows = []
    for name, mine in found.items():
        positions = tuple(_summary(mine, first, begin, end, start) for begin, end in _stretches(start, context))
        whole = _summary(mine, first, start, context, start)
        rows.append(
            Perplexity(
                cache=name,
                mode="decode" if decode_tokens else "chunks",
                context=context,
                tokens=whole.tokens,
                nll=whole.nll,
                bits_per_byte=whole.nll * whole.tokens / math.log(2) / nbytes,
                standard_error=whole.standard_error,
                kl=whole.kl,
                top1_agreement=whole.top1_agreement,
                bytes_per_token=held[name],
                positions=positions,
            )
        )
    return rows


def by_token(
    runs: Mapping[str, tuple[Any, MakeCache]],
    windows: torch.Tensor,
    *,
    start: int = 0,
    step: int = CHUNK,
    chunk: int = CHUNK,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The results of each run at every token, compared with the first run.

    Args:
        runs: by name, a model and a function that makes an empty cache for it; the models have one vocabulary and one
            device.
        windows: `[N, S + 1]` token ids.
        start: tokens of a window that are prefilled without predicting, in forwards of `chunk`.
        step: tokens of a forward after that.
        progress: called with (tokens predicted, number of tokens).
    Returns:
        By name, `[3, N, S - start]` in float64: the negative log-likelihood in nats; the KL divergence of the first
        run's prediction from this one's, in nats; and 1 where both predict the same token as the likeliest, else 0. And
        by name, the bytes of the cache per token after a window; NaN if the cache does not report them.
    """
    first, _ = next(iter(runs.values()))
    count, context = windows.shape[0], windows.shape[1] - 1
    found = {name: torch.zeros(3, count, context - start, dtype=torch.float64, device=first.device) for name in runs}
    held = dict.fromkeys(runs, math.nan)
    for number, window in enumerate(windows.to(first.device)):
        window = window[None]
        opened = {name: (model, make()) for name, (model, make) in runs.items()}
        if start:
            for model, cache in opened.values():
                prefill(model, window[:, :start], cache, chunk=chunk)
        for begin in range(start, context, step):
            end, baseline = min(begin + step, context), None
            for name, (model, cache) in opened.items():
                predicted = forward_stored(model, window[:, begin:end], cache)[0].float().log_softmax(-1)
                baseline = predicted if baseline is None else baseline
                losses = -predicted.gather(1, window[0, begin + 1 : end + 1, None])[:, 0]
                kl = (baseline.exp() * (baseline - predicted)).sum(-1)
                same = baseline.argmax(-1) == predicted.argmax(-1)
                found[name][:, number, begin - start : end - start] = torch.stack([losses, kl, same])
            if progress:
                progress(number * (context - start) + end - start, count * (context - start))
        held = {name: getattr(cache, "nbytes", math.nan) / context for name, (_, cache) in opened.items()}
    return found, held


def _stretches(start: int, stop: int) -> list[tuple[int, int]]:
    """The range `start` to `stop`, cut at the powers of two from 256 on."""
    cuts = [start, *(2**k for k in range(8, stop.bit_length()) if start < 2**k < stop), stop]
    return list(pairwise(cuts))


def _summary(mine: torch.Tensor, first: torch.Tensor, begin: int, end: int, start: int) -> Positions:
    """Means over positions `begin` to `end` of a run's `by_token` results, `[3, N, context - start]`."""
    mine, first = (x[:, :, begin - start : end - start].flatten(1) for x in (mine, first))
    nll, kl, same = mine.mean(1).tolist()
    return Positions(begin, end, mine.shape[1], nll, standard_error(mine[0] - first[0]), kl, same)


def standard_error(x: torch.Tensor) -> float:
    """Of the mean of `x [N]`, from its scatter; NaN if N is 1, because one value has no scatter."""
    return float(x.std(correction=0)) / math.sqrt(x.numel()) if x.numel() > 1 else math.nan
