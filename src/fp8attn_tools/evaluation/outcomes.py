"""Samples and outcomes of retrieval: what they are, how they are counted, and their files."""

from __future__ import annotations

import json
import lzma
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TextIO


@dataclass(frozen=True)
class Sample:
    """One question.

    Attributes:
        length: tokens of context; the prompt and its answer are at most this long.
        index: the sample's number among those of this task and length.
        tokens: the prompt.
        answers: the strings that the continuation must contain.
        depth: the position of the first answer in the prompt: 0 is the start, 1 the end.
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
    """The answer to one sample through one cache.

    Attributes:
        text: the continuation.
        score: the share of the answers that it contains, ignoring case (RULER's score).
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
        """Whether every answer was found."""
        return self.score == 1.0

    @property
    def sample(self) -> tuple[str, int, int]:
        """Identifies the sample. Outcomes of two caches with the same sample are a pair."""
        return self.task, self.length, self.index


@dataclass(frozen=True)
class Cell:
    """The mean score of one cache on the samples of one length and about one depth."""

    cache: str
    length: int
    depth: float
    score: float
    samples: int


def found(answers: Sequence[str], text: str) -> float:
    """The share of `answers` that `text` contains, ignoring case."""
    return sum(answer.lower() in text.lower() for answer in answers) / len(answers)


def score(outcomes: Iterable[Outcome], cache: str) -> float:
    """The mean score of a cache."""
    scores = [outcome.score for outcome in outcomes if outcome.cache == cache]
    return sum(scores) / len(scores)


def same_outcomes(outcomes: Sequence[Outcome], first: str, second: str) -> bool:
    """Whether two caches scored the same on each sample."""
    mine, theirs = ({o.sample: o.score for o in outcomes if o.cache == name} for name in (first, second))
    return mine == theirs


def cells(outcomes: Sequence[Outcome], most_depths: int = 11) -> list[Cell]:
    """Mean scores by cache, length and depth. More than `most_depths` depths are grouped by tenths, each named by its
    middle.
    """
    many = len({outcome.depth for outcome in outcomes}) > most_depths
    groups: dict[tuple[str, int, float], list[float]] = {}
    for o in outcomes:
        depth = (min(int(10 * o.depth), 9) + 0.5) / 10 if many else o.depth
        groups.setdefault((o.cache, o.length, depth), []).append(o.score)
    return [
        Cell(cache, length, depth, sum(scores) / len(scores), len(scores))
        for (cache, length, depth), scores in groups.items()
    ]


def save_outcomes(path: str | Path, outcomes: Iterable[Outcome]) -> None:
    """Write outcomes as JSON lines (compressed if the path ends in `.xz`), and make the folders above."""
    _write_lines(path, (asdict(outcome) for outcome in outcomes))


def load_outcomes(path: str | Path) -> list[Outcome]:
    """Read what `save_outcomes` wrote."""
    return [Outcome(**{**row, "answers": tuple(row["answers"])}) for row in _read_lines(path)]


def _open(path: str | Path, mode: Literal["rt", "wt"]) -> TextIO:
    return lzma.open(path, mode, encoding="utf-8") if Path(path).suffix == ".xz" else open(path, mode, encoding="utf-8")


def _write_lines(path: str | Path, rows: Iterable[dict]) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with _open(path, "wt") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _read_lines(path: str | Path) -> Iterator[dict]:
    with _open(path, "rt") as file:
        yield from map(json.loads, file)
