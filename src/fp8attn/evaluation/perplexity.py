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
    count, context = windows.shape[0], windows.shape[1] - 1
    if not 0 <= decode_tokens <= context:
        raise ValueError(f"a context of {context} tokens predicts as many; cannot decode {decode_tokens}")
    start = context - decode_tokens if decode_tokens else 0  # the first position that predicts
    step = 1 if decode_tokens else chunk
    sums = {name: torch.zeros(4, context - start, dtype=torch.float64, device=model.device) for name in caches}
    held = dict.fromkeys(caches, math.nan)
    for number, window in enumerate(windows.to(model.device)):
        window = window[None]
        open_caches = {name: make() for name, make in caches.items()}
        if start:
            for cache in open_caches.values():
                prefill(model, window[:, :start], cache, chunk=chunk)
        for begin in range(start, context, step):
            end = min(begin + step, context)
            baseline = base = None
            for name, cache in open_caches.items():
                predicted = forward(model, window[:, begin:end], cache)[0].float().log_softmax(-1)
                losses = -predicted.gather(1, window[0, begin + 1 : end + 1, None])[:, 0]
                if baseline is None:
                    baseline, base = predicted, losses
                kl = (baseline.exp() * (baseline - predicted)).sum(-1)
                same = baseline.argmax(-1) == predicted.argmax(-1)
                sums[name][:, begin - start : end - start] += torch.stack([losses, (losses - base).square(), kl, same])
        held = {name: getattr(cache, "nbytes", math.nan) / context for name, cache in open_caches.items()}
        if progress:
            progress(number + 1, count)
    nbytes = math.nan
    if tokenizer is not None:
        texts = tokenizer.batch_decode(windows[:, start + 1 :].tolist(), clean_up_tokenization_spaces=False)
        nbytes = sum(len(text.encode()) for text in texts)
    first = next(iter(sums.values()))
    rows = []
    for name, sums_ in sums.items():
        positions = tuple(_summary(sums_, first, begin, end, start, count) for begin, end in _stretches(start, context))
        whole = _summary(sums_, first, start, context, start, count)
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


def _stretches(start: int, stop: int) -> list[tuple[int, int]]:
    """`start` to `stop`, cut at the powers of two from 256 on."""
    cuts = [start, *(2**k for k in range(8, stop.bit_length()) if start < 2**k < stop), stop]
    return list(pairwise(cuts))


def _summary(sums: torch.Tensor, first: torch.Tensor, begin: int, end: int, start: int, windows: int) -> Positions:
    """Means over positions `begin` to `end` of sums `[4, context - start]` over windows, beside the first cache's."""
    tokens = windows * (end - begin)
    nll, squares, kl, same = (sums[:, begin - start : end - start].sum(1) / tokens).tolist()
    difference = nll - float(first[0, begin - start : end - start].sum()) / tokens
    return Positions(begin, end, tokens, nll, math.sqrt(max(0.0, squares - difference**2) / tokens), kl, same)
