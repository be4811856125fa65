"""Retrieval from long prompts: runs the same prompts with several caches.

A task makes `Sample`s (`ruler` makes those of the literature, `recall` needs no further package). `ask` runs a model on
them through each cache; an `Outcome` is the answer to one sample through one cache. Scores are computed from outcomes
(`outcomes`, `paired`).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from fp8attn.formats.page_layout import PAGE_SIZE
from fp8attn.integrations.transformers import FP8Cache

from .caches import CHUNK, BF16Cache, MakeCache, decode_greedily, prefill
from .outcomes import Outcome, Sample, found

BATCH_TOKENS = 65536  # tokens of prompts in a batch: sixteen of 4k, one of 64k or more


def ask(
    model: Any,
    tokenizer: Any,
    samples: Iterable[Sample],
    caches: Mapping[str, MakeCache],
    *,
    chunk: int = CHUNK,
    batch_tokens: int = BATCH_TOKENS,
    stop: str | None = None,
    progress: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Decode an answer to every sample with every cache, greedily, in the same batches for all caches.

    A row ends at its end of text or at `stop`. A batch ends as soon as each row has ended or contains all its answers,
    because later tokens cannot change that. Prompts of different lengths in a batch are padded on the left. A prompt
    that runs alone reuses the chunks that it shares with the prompt before, so several questions about one text cost
    one prefill. The cache is cropped at a position where both a chunk and a page end, so it is bit for bit the cache of
    a fresh prefill.

    Args:
        model: a transformers causal language model, trained on at least these lengths.
        samples: of any tasks; an iterator is read one batch at a time.
        caches: by name, a function that makes an empty cache.
        chunk: tokens of a prefill's forward.
        batch_tokens: consecutive samples of one task and length run in one batch, of at most this many tokens of
            prompts.
        stop: ends an answer that is not empty. With a line end, a model that continues with another question ends here.
    """
    outcomes = []
    readers = {name: _Reader(model, make, chunk, stop) for name, make in caches.items()}
    for batch in _batches(samples, batch_tokens):
        for name, reader in readers.items():
            for sample, text in zip(batch, reader.answer(tokenizer, batch), strict=True):
                outcome = Outcome(
                    name,
                    sample.task,
                    sample.length,
                    sample.index,
                    sample.depth,
                    sample.answers,
                    text,
                    found(sample.answers, text),
                )
                outcomes.append(outcome)
                if progress:
                    progress(outcome)
    return outcomes


def _batches(samples: Iterable[Sample], batch_tokens: int) -> Iterator[list[Sample]]:
    batch: list[Sample] = []
    for sample in samples:
        longest = max(len(s.tokens) for s in (*batch, sample))
        alike = not batch or (batch[0].task, batch[0].length) == (sample.task, sample.length)
        if batch and (not alike or longest * (len(batch) + 1) > batch_tokens):
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch


class _Reader:
    """A model with one type of cache. It keeps the cache of the last prompt, if that ran alone."""

    def __init__(self, model: Any, make: MakeCache, chunk: int, stop: str | None) -> None:
        self.model, self.make, self.chunk, self.stop = model, make, chunk, stop
        self.cache: Cache | None = None
        self.held = array("i")  # the tokens in `cache`: the last prompt, and what was decoded

    def answer(self, tokenizer: Any, batch: Sequence[Sample]) -> list[str]:
        """The continuations of a batch."""
        device, eos = self.model.device, tokenizer.eos_token_id
        count = max(sample.max_new_tokens for sample in batch)

        def answers(ids: torch.Tensor) -> list[tuple[str, bool]]:
            """The text of each row, and whether it has ended."""
            said = []
            for row in ids.tolist():
                ended = eos in row
                text = tokenizer.decode(row[: row.index(eos)] if ended else row, clean_up_tokenization_spaces=False)
                at = -1 if self.stop is None else text.find(self.stop, len(text) - len(text.lstrip()))
                said.append((text, ended) if at < 0 else (text[:at], True))
            return said

        def done(ids: torch.Tensor) -> bool:
            return all(
                ended or found(sample.answers, text) == 1
                for sample, (text, ended) in zip(batch, answers(ids), strict=True)
            )

        longest = max(len(sample.tokens) for sample in batch)
        padding = [longest - len(sample.tokens) for sample in batch]
        tokens = torch.zeros(len(batch), longest, dtype=torch.int64)
        for row, pad, sample in zip(tokens, padding, batch, strict=True):
            row[pad:] = torch.frombuffer(sample.tokens, dtype=torch.int32)
        tokens = tokens.to(device)
        mask = (torch.arange(longest) >= torch.tensor(padding)[:, None]).long().to(device) if any(padding) else None
        if len(batch) > 1:
            self.cache, self.held = None, array("i")
            cache = self.make()
            ids, _ = decode_greedily(
                self.model, prefill(self.model, tokens, cache, chunk=self.chunk, mask=mask), cache, count, mask, done
            )
        else:
            keep = self._rewind(batch[0].tokens)
            last = prefill(self.model, tokens[:, keep:], self.cache, chunk=self.chunk)
            ids, fed = decode_greedily(self.model, last, self.cache, count, None, done)
            self.held = batch[0].tokens + array("i", ids[0, :fed].tolist())
        return [text for text, _ in answers(ids)]

    def _rewind(self, tokens: array) -> int:
        """Keep in the cache the whole chunks that the last prompt and this one share at their start; returns how many
        tokens these are.
        """
        same = next(
            (at for at, (a, b) in enumerate(zip(self.held, tokens, strict=False)) if a != b),
            min(len(self.held), len(tokens)),
        )
        step = math.lcm(self.chunk, PAGE_SIZE)  # later tokens may have changed the scale of their page
        keep = min(same, len(tokens) - 1) // step * step
        cache = self.cache
        ours = isinstance(cache, (FP8Cache, BF16Cache)) and all(getattr(x, "is_croppable", False) for x in cache.layers)
        if cache is None or not keep or not ours:
            self.cache = self.make()
            return 0
        cache.crop(keep - len(self.held))
        return keep
