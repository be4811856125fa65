"""Contexts that teach retrieval in the form of RULER's tasks, of any length, none of whose keys or values RULER can
draw.

RULER's `niah_*` keys are pairs of an adjective and a noun of the `wonderwords` lists, or UUIDs; its values are numbers
of seven digits, or UUIDs. Here keys are pairs of other words (`data.key_words`), strings of letters, and UUIDs; values
are numbers of six, eight, or seven digits that lead with a zero, which RULER's never do, and UUIDs. (Two random UUIDs
are never the same.) Its chains have variables of five letters; here they have four or six.
"""

import string
import uuid
from itertools import pairwise

import numpy as np

INTRO = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "{kind} afterwards.\n"
)
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"

# A statement, and a question about it with its answer: steps towards RULER's, with less between key and value, and
# RULER's. With three tokens between them, and no steps, a model of this size had not begun to look keys up after 350
# million tokens.
FORMS = (
    ("{key} {value}\n", "{key} {value}\n"),
    ("{key}: {value}\n", "{key}: {value}\n"),
    ("{key} is: {value}.\n", "{key} is: {value}.\n"),
    ("The magic {kind} for {key} is: {value}.\n", "The magic {kind} for {key} mentioned in the text is {value}\n"),
    (
        "One of the special magic {kind}s for {key} is: {value}.\n",
        "What is the special magic {kind} for {key} mentioned in the provided text? "
        "The special magic {kind} for {key} mentioned in the provided text is {value}\n",
    ),
)
RULER = (0.0,) * (len(FORMS) - 1) + (1.0,)

CHAIN = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n",
    "Question: Find all variables that are assigned the value {value} in the text above. Answer: According to the "
    "chain(s) of variable assignment in the text above, {count} variables are assgined the value {value}, they are: ",
    # (sic)
)


class RetrievalTask:
    """Contexts with statements in them and questions at the end.

    Args:
        tokenizer: the model's (of the `tokenizers` library).
        words: what keys are made of.
        text: an array of token ids that some contexts hide their statements in, and that fills every context up to its
            length.
        seed: of everything.
    """

    def __init__(self, tokenizer, words, text, seed):
        self.tokenizer, self.words, self.text = tokenizer, np.array(words, object), text
        self.rng = np.random.default_rng(seed)
        self.noise, self.newline = self._encode([NOISE])[0], tokenizer.token_to_id("Ċ")

    def row(self, length, forms=RULER, questions=64, ruler_only=False):
        """One context of exactly `length` tokens.

        Args:
            length: number of tokens, statements and questions included.
            forms: how likely it is in each of `FORMS`.
            questions: at most so many are asked.
            ruler_only: whether it is of the kind that is evaluated, `niah_multikey_2` with one question, and no other.

        Returns:
            (tokens, learned): token ids, and a mask of what training teaches: the answers, with what ends them.
        """
        if not ruler_only and length >= 512 and self.rng.random() < 0.1 * forms[-1]:
            return self._chains(length)
        kind = "number" if ruler_only or length < 512 or self.rng.random() < 0.75 else "uuid"
        stated, asked = FORMS[self.rng.choice(len(FORMS), p=forms)]
        haystack = "statements" if ruler_only else self.rng.choice(["statements", "text", "noise"], p=[0.7, 0.2, 0.1])
        intro = self._encode([INTRO.format(kind=kind)])[0] if stated == FORMS[-1][0] else []
        # As many as would fill the context; in text and noise few. Short contexts of few pairs are where looking up
        # begins.
        most = max(2, length // 24)
        pairs = most if haystack == "statements" else int(self.rng.integers(1, min(most, 9)))
        if haystack == "statements" and not ruler_only and self.rng.random() < 0.25:
            pairs = int(self.rng.integers(2, most + 1))
        keys, values = self._keys(pairs, kind), self._values(pairs, kind)
        lines = self._encode([stated.format(kind=kind, key=k, value=v) for k, v in zip(keys, values, strict=True)])
        order = self.rng.permutation(pairs)[: 1 if ruler_only else questions]
        before, after = asked.split("{value}")
        prompts = self._encode([before.format(kind=kind, key=keys[i]).removesuffix(" ") for i in order])
        answers = self._encode([" " + values[i] for i in order])
        ends = self._encode([after])[0]
        asks, room = [], length - len(intro) - 1
        wanted = sum(map(len, lines)) if haystack != "statements" else 0
        for i, prompt, answer in zip(order.tolist(), prompts, answers, strict=True):
            cost = len(prompt) + len(answer) + len(ends)
            own = len(lines[i]) if haystack == "statements" else 0
            # Questions take up to half of a context: the rest is what they are about.
            if asks and (room - cost < wanted + own or room - cost < length // 2):
                break
            asks.append((prompt, answer, ends))
            room, wanted = room - cost, wanted + own
        hay = self._hay(lines, set(order[: len(asks)].tolist()), haystack, room)
        return self._assemble(length, [*intro, *hay], asks)

    def _keys(self, count, kind):
        """`count` different keys; the fewer words they are drawn from, the more of them share one."""
        if kind == "uuid" and self.rng.random() < 0.8:
            return [self._uuid() for _ in range(count)]
        if self.rng.random() < 0.1:
            letters = np.array(list(string.ascii_lowercase))
            return ["".join(self.rng.choice(letters, self.rng.integers(6, 12))) for _ in range(count)]
        fewest = min(len(self.words), 16 + int(count**0.5))
        first, second = (
            self.rng.choice(
                self.words, int(np.exp(self.rng.uniform(np.log(fewest), np.log(len(self.words))))), replace=False
            )
            for _ in "ab"
        )
        pairs = self.rng.choice(len(first) * len(second), count, replace=False)
        return [f"{first[n // len(second)]}-{second[n % len(second)]}" for n in pairs.tolist()]

    def _values(self, count, kind):
        if kind == "uuid":
            return [self._uuid() for _ in range(count)]
        digits = self.rng.choice([6, 7, 8], count)
        numbers = self.rng.integers(10**7, 10**8, count)
        return [f"{n % 10**6:07d}" if d == 7 else str(n)[:d] for n, d in zip(numbers, digits, strict=True)]

    def _uuid(self):
        return str(uuid.UUID(bytes=self.rng.bytes(16), version=4))

    def _hay(self, lines, asked, haystack, room):
        """At most `room` tokens that hold the lines asked for and, among statements, as many of the others as fit."""
        wanted = sum(len(lines[i]) for i in asked)
        if haystack == "statements":
            kept, size = [], wanted
            for i, line in enumerate(lines):
                if i in asked or size + len(line) <= room:
                    kept.append(line)
                    size += 0 if i in asked else len(line)
            return [t for line in kept for t in line]
        space = room - sum(map(len, lines))
        if haystack == "noise":
            breaks = [self.noise] * max(0, space // len(self.noise))
        else:
            start = int(self.rng.integers(len(self.text) - max(space, 1)))
            part = self.text[start : start + max(space, 0)]
            breaks = [x.tolist() for x in np.split(part, np.flatnonzero(part == self.newline) + 1)]
        for line, at in sorted(
            zip(lines, self.rng.integers(len(breaks) + 1, size=len(lines)), strict=True), key=lambda p: -p[1]
        ):
            breaks.insert(at, line)
        return [t for part in breaks for t in part]

    def _chains(self, length):
        """A chain of assignments in noise, with an example before it, as RULER's `vt` has them."""
        hops = 4

        def chain(noises):
            size = int(self.rng.choice([4, 6]))
            names = ["".join(self.rng.choice(list(string.ascii_uppercase), size)) for _ in range(hops + 1)]
            value = str(self.rng.integers(10_000, 100_000))
            said = [f"VAR {names[0]} = {value}", *(f"VAR {b} = VAR {a} " for a, b in pairwise(names))]
            parts = [NOISE] * noises
            for n, at in enumerate(sorted(self.rng.integers(noises + 1, size=hops + 1))):
                parts.insert(at + n, said[n])
            question = CHAIN[1].format(value=value, count=hops + 1)
            return CHAIN[0] + " ".join(parts) + question.removesuffix(" "), " " + " ".join(names)

        texts = [*chain(2), "\n\n", *chain(0)]
        used = sum(map(len, self._encode(texts)))
        noises = max(0, (length - used - 8) // (len(self.noise) + 1))
        shown, answer, gap, prompt, last = self._encode([*texts[:3], *chain(noises)])
        return self._assemble(length, [*shown, *answer, *gap], [(prompt, last, [self.newline])])

    def _assemble(self, length, hay, asks):
        """The context after the tail of another text and an end of text, which fill it up; cut at the start if it is
        too long.
        """
        tokens, learned = list(hay), [False] * len(hay)
        for prompt, answer, end in asks:
            tokens += [*prompt, *answer, *end]
            learned += [False] * len(prompt) + [True] * (len(answer) + len(end))
        fill = max(0, length - len(tokens))
        start = int(self.rng.integers(len(self.text) - fill))
        filler = [*self.text[start : start + fill - 1].tolist(), 0] if fill else []
        tokens, learned = filler + tokens, [False] * fill + learned
        return np.array(tokens[-length:], np.int32), np.array(learned[-length:])

    def _encode(self, texts):
        return [e.ids for e in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def batch(self, rows, length, **options):
        """`rows` contexts for training."""
        return tuple(np.stack(part) for part in zip(*(self.row(length, **options) for _ in range(rows)), strict=True))
