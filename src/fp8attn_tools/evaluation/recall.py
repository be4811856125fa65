"""The task `recall`: RULER's sentence hidden in any text at a given depth, among other sentences of the same form.

It is `niah_multikey_1` of RULER (Hsieh et al. 2024, arXiv:2404.06654), with prompts of exactly the given length,
needles at the given depth, and any text as hay. It needs no further package and no download.
"""

from __future__ import annotations

import random
import re
import string
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fp8attn.errors import UsageError

from .names import RECALL
from .outcomes import Sample

INTRO = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "number afterwards.\n"
)
STATED = "One of the special magic numbers for {key} is: {value}.\n"
QUERY = (
    "\nWhat is the special magic number for {key} mentioned in the provided text? "
    "The special magic number for {key} mentioned in the provided text is"
)
RARE = 1536  # frequent tokens have small ids; keys are words with larger ids, which few texts contain by chance


class Haystack:
    """Text that prompts are cut from, line by line.

    Each line is tokenized by itself. So a needle can be between any two lines, and a prompt has exactly the given
    length.

    Args:
        text: the hay, at least as long as the longest prompt.
        seed: of keys, values, texts and positions. Keys are pairs of the tokenizer's words, or of six random letters if
            it has few words.
    """

    def __init__(self, tokenizer: Any, text: str, seed: int = 0) -> None:
        self._tokenizer, self._random = tokenizer, random.Random(seed)
        self._words = _words(tokenizer.get_vocab())
        self._start = tokenizer("")["input_ids"]  # tokens that this tokenizer adds at the start, if any
        lines = tokenizer(text.splitlines(keepends=True), add_special_tokens=False)["input_ids"]
        self._tokens = [token for line in lines for token in line]
        self._ends = [0]  # the ends of lines, in tokens
        for line in lines:
            self._ends.append(self._ends[-1] + len(line))

    def sample(self, length: int, depth: float, distractors: int = 3, index: int = 0) -> Sample:
        """A question whose prompt has exactly `length` tokens, the needle at `depth`, and `distractors` other pairs at
        random positions.

        Raises:
            UsageError: the length is too short for the needles or longer than the text; depth is outside [0, 1];
                distractors is negative.
        """
        if not 0 <= depth <= 1:
            raise UsageError(f"depth must be in [0, 1] (0 is the start of the context); got {depth}")
        if distractors < 0:
            raise UsageError(f"distractors must be 0 or more; got {distractors}")
        words = self._draw(2 * (1 + distractors))
        values = self._random.sample(range(10**6, 10**7), 1 + distractors)
        pairs = [{"key": f"{words.pop()}-{words.pop()}", "value": value} for value in values]
        needles = [self._encode(STATED.format(**pair)) for pair in pairs]
        start, query = [*self._start, *self._encode(INTRO)], self._encode(QUERY.format(**pairs[0]))
        space = length - len(start) - sum(map(len, needles)) - len(query)
        ends = [end for end in self._ends if end >= space]
        if space < 0 or not ends:
            shortest = length - space
            longest = shortest + len(self._tokens)
            raise UsageError(
                f"the length of a prompt with {1 + distractors} pairs must be {shortest} to {longest} tokens; got "
                f"{length}"
            )
        end = self._random.choice(ends)
        breaks = [0, *(e - end + space for e in self._ends if 0 < e - end + space <= space)]
        places = [min(breaks, key=lambda at: abs(at - depth * space)), *self._random.choices(breaks, k=distractors)]
        tokens, at = start, 0
        hay = self._tokens[end - space : end]
        for place, needle in sorted(zip(places, needles, strict=True), key=lambda pair: pair[0]):
            tokens += hay[at:place] + needle
            at = place
        answer = str(pairs[0]["value"])
        max_new_tokens = len(self._encode(" " + answer)) + 1  # in context the digits may be split in another way
        return Sample(RECALL, length, index, array("i", [*tokens, *hay[at:], *query]), (answer,), depth, max_new_tokens)

    def _draw(self, count: int) -> list[str]:
        if len(self._words) >= max(count, 64):
            return self._random.sample(self._words, count)
        words: dict[str, None] = {}  # unlike a set, it keeps the seed's order
        while len(words) < count:
            words["".join(self._random.choices(string.ascii_lowercase, k=6))] = None
        return list(words)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


def _words(vocabulary: Mapping[str, int]) -> list[str]:
    """Words that are one rare token, with and without a space before them (`Ġ` or `▁`, depending on the tokenizer)."""
    words = (word for word, token in vocabulary.items() if token >= RARE and re.fullmatch("[a-z]{4,}", word))
    return sorted(word for word in words if "Ġ" + word in vocabulary or "▁" + word in vocabulary)


def recall_samples(
    tokenizer: Any,
    text: str,
    *,
    lengths: Sequence[int],
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    samples: int = 2,
    distractors: int = 3,
    seed: int = 0,
) -> Iterator[Sample]:
    """`samples` questions at every length and depth, in that order.

    Args:
        lengths: tokens of a prompt.
        depths: of the needle, in [0, 1].
        distractors: other pairs in each prompt.
        seed: as `Haystack` takes it.
    Raises:
        UsageError: as `Haystack.sample`.
    """
    haystack = Haystack(tokenizer, text, seed)
    for length in lengths:
        for index in range(len(depths) * samples):
            yield haystack.sample(length, depths[index // samples], distractors, index)
