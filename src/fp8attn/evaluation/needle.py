"""Retrieval at length: the same prompts through several caches, and what came out of each, sample by sample.

A task makes `Sample`s (`ruler` the field's own, `recall` the committed model's); `ask` puts them to a model through each cache; an
`Outcome` is what one cache made of one sample. Everything else (`score`, `cells`, `paired.compare`) is counted from outcomes.
"""

from __future__ import annotations

import json
import lzma
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zipfile import ZIP_BZIP2, ZipFile

import torch
from transformers.cache_utils import Cache

from ..integrations.transformers import FP8Cache
from ..layout import PAGE_SIZE
from .caches import CHUNK, BF16Cache, MakeCache, decode_greedily, prefill

BATCH_TOKENS = 65536  # prompts that run side by side: sixteen of 4k, one of 64k or more


@dataclass(frozen=True)
class Sample:
    """One question.

    Attributes:
        task: its name.
        length: the context asked for, in tokens; the prompt and the room for its answer are no longer.
        index: its number among those of this task and length.
        tokens: the prompt.
        answers: what the continuation must contain.
        depth: where the (first) answer stands in the prompt, 0 the start and 1 the end.
        max_new_tokens: how much the model may say.
    """

    task: str
    length: int
    index: int
    tokens: array
    answers: tuple[str, ...]
    depth: float
    max_new_tokens: int


@dataclass(frozen=True)
class Outcome:
    """What one cache made of one sample: the sample's task, length, index, depth and answers, and

    Attributes:
        cache: its name.
        text: the continuation.
        score: the share of the answers that stand in it, in any case of letters (RULER's measure).
    """

    cache: str
    task: str
    length: int
    index: int
    depth: float
    answers: tuple[str, ...]
    text: str
    score: float

    @property
    def right(self) -> bool:
        """Whether every answer was given."""
        return self.score == 1.0

    @property
    def sample(self) -> tuple[str, int, int]:
        """What tells samples apart: outcomes of different caches with the same one are a pair."""
        return self.task, self.length, self.index


@dataclass(frozen=True)
class Cell:
    """The mean score of one cache on the samples of one length whose needle stood at about one depth."""

    cache: str
    length: int
    depth: float
    score: float
    samples: int


def found(answers: Sequence[str], text: str) -> float:
    """The share of `answers` that `text` contains, whatever the case of its letters."""
    return sum(answer.lower() in text.lower() for answer in answers) / len(answers)


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
    """Ask every sample through every cache, all caches in the same batches, decoding greedily.

    A row ends at its end of text or at `stop`, and a batch as soon as each of its rows has ended or holds all its answers: what follows
    could not take them away. Prompts of unlike lengths are padded on the left where they run side by side. A prompt that runs alone and
    begins with the same chunks as the one before finds them in the cache (questions about one text cost its prefill once): later tokens
    are cropped where both a chunk and a page end, so the cache is bit for bit what a prefill from nothing would have made.

    Args:
        model: a transformers causal language model; the lengths should not exceed what it was trained on.
        tokenizer: its tokenizer.
        samples: of any tasks; taken as they come, so that a generator need not hold all of them.
        caches: by name, what makes an empty one.
        chunk: tokens of a prefill's forward.
        batch_tokens: neighbours of one task and length run side by side while their prompts hold at most so many tokens.
        stop: what ends an answer, where something stands before it: a line end, for a model that then asks itself the next question.
        progress: called with each outcome.
    """
    outcomes = []
    readers = {name: _Reader(model, make, chunk, stop) for name, make in caches.items()}
    for batch in _batches(samples, batch_tokens):
        for name, reader in readers.items():
            for sample, text in zip(batch, reader.answer(tokenizer, batch), strict=True):
                outcome = Outcome(
                    name, sample.task, sample.length, sample.index, sample.depth, sample.answers, text, found(sample.answers, text)
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
    """A model with one kind of cache, which remembers the prompt that it read last if that ran alone."""

    def __init__(self, model: Any, make: MakeCache, chunk: int, stop: str | None) -> None:
        self.model, self.make, self.chunk, self.stop = model, make, chunk, stop
        self.cache: Cache | None = None
        self.held = array("i")  # the prompt whose chunks `cache` holds, and behind it what was decoded

    def answer(self, tokenizer: Any, batch: Sequence[Sample]) -> list[str]:
        """The continuations of a batch."""
        device, eos = self.model.device, tokenizer.eos_token_id
        count = max(sample.max_new_tokens for sample in batch)

        def answers(ids: torch.Tensor) -> list[tuple[str, bool]]:
            """What each row says, and whether it has ended."""
            said = []
            for row in ids.tolist():
                ended = eos in row
                text = tokenizer.decode(row[: row.index(eos)] if ended else row, clean_up_tokenization_spaces=False)
                at = -1 if self.stop is None else text.find(self.stop, len(text) - len(text.lstrip()))
                said.append((text, ended) if at < 0 else (text[:at], True))
            return said

        def done(ids: torch.Tensor) -> bool:
            return all(ended or found(sample.answers, text) == 1 for sample, (text, ended) in zip(batch, answers(ids), strict=True))

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
            ids, _ = decode_greedily(self.model, prefill(self.model, tokens, cache, chunk=self.chunk, mask=mask), cache, count, mask, done)
        else:
            keep = self._rewind(batch[0].tokens)
            last = prefill(self.model, tokens[:, keep:], self.cache, chunk=self.chunk)
            ids, fed = decode_greedily(self.model, last, self.cache, count, None, done)
            self.held = batch[0].tokens + array("i", ids[0, :fed].tolist())
        return [text for text, _ in answers(ids)]

    def _rewind(self, tokens: array) -> int:
        """Leave in the cache the whole chunks that the last prompt and this one begin with; how many tokens that is."""
        same = next((at for at, (a, b) in enumerate(zip(self.held, tokens, strict=False)) if a != b), min(len(self.held), len(tokens)))
        step = math.lcm(self.chunk, PAGE_SIZE)  # a page that later tokens stood in may have another scale than without them
        keep = min(same, len(tokens) - 1) // step * step
        ours = isinstance(self.cache, (FP8Cache, BF16Cache)) and all(getattr(x, "is_croppable", False) for x in self.cache.layers)
        if not keep or not ours:
            self.cache = self.make()
            return 0
        self.cache.crop(keep - len(self.held))
        return keep


def score(outcomes: Iterable[Outcome], cache: str) -> float:
    """The mean score of a cache."""
    scores = [outcome.score for outcome in outcomes if outcome.cache == cache]
    return sum(scores) / len(scores)


def same_outcomes(outcomes: Sequence[Outcome], first: str, second: str) -> bool:
    """Whether two caches scored the same on each sample."""
    mine, theirs = ({o.sample: o.score for o in outcomes if o.cache == name} for name in (first, second))
    return mine == theirs


def cells(outcomes: Sequence[Outcome], most_depths: int = 11) -> list[Cell]:
    """Outcomes by cache, length and depth; more than `most_depths` different depths are taken by tenths, each named by its middle."""
    many = len({outcome.depth for outcome in outcomes}) > most_depths
    groups: dict[tuple, list[float]] = {}
    for o in outcomes:
        depth = (min(int(10 * o.depth), 9) + 0.5) / 10 if many else o.depth
        groups.setdefault((o.cache, o.length, depth), []).append(o.score)
    return [Cell(*group, sum(scores) / len(scores), len(scores)) for group, scores in groups.items()]


def save_outcomes(path: str | Path, outcomes: Iterable[Outcome]) -> None:
    """Write outcomes as JSON lines (packed, if the path ends in `.xz`), and the folders above."""
    _write_lines(path, (asdict(outcome) for outcome in outcomes))


def load_outcomes(path: str | Path) -> list[Outcome]:
    """What `save_outcomes` wrote."""
    return [Outcome(**{**row, "answers": tuple(row["answers"])}) for row in _read_lines(path)]


def save_samples(path: str | Path, samples: Iterable[Sample]) -> None:
    """Write samples, made where lm-eval is, to be asked where the GPU is, and the folders above: a zip with a member for each.

    A member is the sample as a line of JSON, and behind it the prompt's ids as 32-bit integers of this machine. bzip2 leaves 2.7 bits of
    a token of RULER's haystacks, 45 KB of a prompt of 131,072.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with ZipFile(path, "w", ZIP_BZIP2) as file:
        for number, sample in enumerate(samples):
            about = json.dumps({**vars(sample), "tokens": None}, ensure_ascii=False)
            file.writestr(f"{number:05d}", about.encode() + b"\n" + sample.tokens.tobytes())


def load_samples(path: str | Path, part: slice = slice(None)) -> Iterator[Sample]:
    """What `save_samples` wrote, or a part of it, one after another."""
    with ZipFile(path) as file:
        for name in file.namelist()[part]:
            about, _, tokens = file.read(name).partition(b"\n")
            row = json.loads(about)
            yield Sample(**{**row, "tokens": array("i", tokens), "answers": tuple(row["answers"])})


def _open(path: str | Path, mode: str):
    return (lzma.open if Path(path).suffix == ".xz" else open)(path, mode, encoding="utf-8")


def _write_lines(path: str | Path, rows: Iterable[dict]) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with _open(path, "wt") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _read_lines(path: str | Path) -> Iterator[dict]:
    with _open(path, "rt") as file:
        yield from map(json.loads, file)
