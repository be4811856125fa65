"""Perplexity of the same tokens through several caches: prefill in chunks, and token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from .caches import CHUNK, MakeCache, forward, prefill


@dataclass(frozen=True)
class Positions:
    """A stretch of a context: the tokens predicted from `start` to `stop` others before them (`stop` excluded), over all windows.

    Attributes:
        tokens: how many; `nll`, `standard_error`, `kl`, `top1_agreement`: of these, as in `Perplexity`.
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
    """What a model makes of a text through one cache.

    Attributes:
        cache: its name.
        mode: `"chunks"` or `"decode"`.
        context: tokens of a window, all of them held by the cache at its end.
        tokens: tokens predicted.
        nll: mean negative log-likelihood, in nats per token.
        bits_per_byte: the same per byte of the text, which models of different tokenizers share; NaN if the bytes are not known.
        standard_error: of the difference between this `nll` and the first cache's, from its scatter over the tokens; 0 for the first.
        kl: mean KL divergence of the first cache's predictions from this one's, in nats; 0 for the first itself.
        top1_agreement: the share of positions where both think the same token likeliest.
        bytes_per_token: bytes of the cache after a window, all of them, by token held; NaN if it does not say.
        positions: the same by position, in stretches that double: what a long context is worth, and whether errors grow with it.
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
    """Teacher-forced likelihood of each window, every one of its K and V read through the cache.

    The caches advance side by side over identical tokens, so their predictions are compared position by position; no more logits are
    held than two caches' of one chunk.

    Args:
        model: a transformers causal language model.
        windows: `[N, S + 1]` token ids; each window starts from an empty cache, S tokens go in and S are predicted.
        caches: by name, what makes an empty one; the first is the baseline of `kl` and `top1_agreement`.
        chunk: tokens of a forward.
        decode_tokens: predict only the last so many tokens of each window, one forward each, after the others were prefilled. 0: all
            S of them, in chunks.
        tokenizer: to count the bytes of what is predicted.
        progress: called with (windows done, windows in all).
    Raises:
        ValueError: more tokens to decode than a window has to predict.
    """
    context = windows.shape[1] - 1
    if not 0 <= decode_tokens <= context:
        raise ValueError(f"a context of {context} tokens predicts as many; cannot decode {decode_tokens}")
    start = context - decode_tokens if decode_tokens else 0  # the first position that predicts
    runs = {name: (model, make) for name, make in caches.items()}
    found, held = by_token(runs, windows, start=start, step=1 if decode_tokens else chunk, chunk=chunk, progress=progress)
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
                name,
                "decode" if decode_tokens else "chunks",
                context,
                whole.tokens,
                whole.nll,
                whole.nll * whole.tokens / math.log(2) / nbytes,
                whole.standard_error,
                whole.kl,
                whole.top1_agreement,
                held[name],
                positions,
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
    """What each run makes of every token, beside the first run.

    Args:
        runs: by name, a model and a function that makes an empty cache for it; the models share one vocabulary and one device.
        windows: `[N, S + 1]` token ids.
        start: tokens of a window that are prefilled before the first that predicts, in forwards of `chunk`.
        step: tokens of a forward from there on.
        progress: called with (windows done, windows in all).
    Returns:
        By name, `[3, N, S - start]` in float64: the negative log-likelihood in nats, the KL divergence of the first run's prediction from
        this one's in nats, and 1 where both think the same token likeliest, else 0. And by name, the bytes of the cache after a window by
        token held; NaN if it does not say.
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
                predicted = forward(model, window[:, begin:end], cache)[0].float().log_softmax(-1)
                baseline = predicted if baseline is None else baseline
                losses = -predicted.gather(1, window[0, begin + 1 : end + 1, None])[:, 0]
                kl = (baseline.exp() * (baseline - predicted)).sum(-1)
                same = baseline.argmax(-1) == predicted.argmax(-1)
                found[name][:, number, begin - start : end - start] = torch.stack([losses, kl, same])
        held = {name: getattr(cache, "nbytes", math.nan) / context for name, (_, cache) in opened.items()}
        if progress:
            progress(number + 1, count)
    return found, held


def _stretches(start: int, stop: int) -> list[tuple[int, int]]:
    """`start` to `stop`, cut at the powers of two from 256 on."""
    cuts = [start, *(2**k for k in range(8, stop.bit_length()) if start < 2**k < stop), stop]
    return list(pairwise(cuts))


def _summary(mine: torch.Tensor, first: torch.Tensor, begin: int, end: int, start: int) -> Positions:
    """Means over positions `begin` to `end` of a run's `by_token`, `[3, N, context - start]`, beside the first run's."""
    mine, first = (x[:, :, begin - start : end - start].flatten(1) for x in (mine, first))
    nll, kl, same = mine.mean(1).tolist()
    scatter = (mine[0] - first[0]).std(correction=0)
    return Positions(begin, end, mine.shape[1], nll, float(scatter) / math.sqrt(mine.shape[1]), kl, same)
