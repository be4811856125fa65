"""The text and the recall task that the small model is trained on.

The text is the Python source of the standard library of the interpreter that runs this file. Run it once to
train the tokenizer, write the held-out modules next to the model, and tokenise the rest:

    python training/data.py
"""

import hashlib
import json
import lzma
import re
import sysconfig
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "stdlib-llama"
SCRATCH = ROOT / ".train"
CONFIG = json.loads((ROOT / "training" / "config.json").read_text())
HELD_OUT = MODEL / "heldout.txt.xz"

END = "<|endoftext|>"
HEADER = "# === Lib/{} ===\n"

# A newline and every digit are tokens of their own. So the tokens of a text are those of its lines put end to end
# (a line can be inserted without tokenising the rest again), and a value of six digits is always six tokens.
PIECES = r"\n|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|[^\S\n]+"

RARE = 1536  # words of the recall task have at least this token id

# What follows the word of a needle, in tokens: number (2), value (4), closing quote, newline.
NUMBER_TOKENS = 2
ANSWER_TOKENS = 4 + 1  # the quote is asked for too: it ends the answer
LEARNED_TOKENS = NUMBER_TOKENS + ANSWER_TOKENS


# ---------------------------------------------------------------- text


def is_test(path):
    """Whether a module (its path below the library's folder) belongs to a test suite."""
    return any(part in ("test", "tests", "idle_test") for part in Path(path).parts)


def is_held_out(path):
    """Whether a module is kept out of the training text; a hash of its path decides."""
    split = CONFIG["split"]
    bucket = int(hashlib.sha256(path.encode()).hexdigest(), 16) % split["buckets"]
    return bucket < split["held_out_tests" if is_test(path) else "held_out_modules"]


def collect():
    """The library's modules as (path, document) pairs in order of path.

    Left out: installed packages, the generated tables of `encodings` (numbers, not prose or code), files that are
    not UTF-8 (tests of the decoder) and copies. A document is the source after a header line that names the module.
    """
    library = Path(sysconfig.get_path("stdlib"))
    seen, documents = set(), []
    for file in sorted(library.rglob("*.py")):
        path = file.relative_to(library).as_posix()
        if path.startswith(("site-packages/", "encodings/")):
            continue
        try:
            source = file.read_text(encoding="utf-8").strip()
        except UnicodeDecodeError:
            continue
        if source and source not in seen:
            seen.add(source)
            documents.append((path, HEADER.format(path) + source + "\n"))
    return documents


def read_held_out(file=HELD_OUT):
    """The committed held-out modules as (path, document) pairs."""
    text = lzma.decompress(Path(file).read_bytes()).decode()
    starts = list(re.finditer(r"^" + re.escape(HEADER).replace(r"\{\}", "(.+)"), text, re.MULTILINE))
    ends = [m.start() for m in starts[1:]] + [len(text)]
    return [(m.group(1), text[m.start() : end]) for m, end in zip(starts, ends, strict=True)]


# ---------------------------------------------------------------- tokens


def train_tokenizer(texts):
    """A byte-level BPE tokenizer of the configured size, trained on `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["model"]["vocab_size"], special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer():
    """The committed tokenizer, as an object of the `tokenizers` library."""
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def tokenise(tokenizer, texts):
    """All texts as one array of token ids, each after an end-of-text token."""
    ids = (i for e in tokenizer.encode_batch(list(texts), add_special_tokens=False) for i in [0, *e.ids])
    return np.fromiter(ids, dtype=np.uint16)


# ---------------------------------------------------------------- recall


def needle(word, number, value):
    """The line that states a pair of key (word and number) and value; up to the number it is also the query.

    The value follows its key at once. With `KEY_name = "value"`, where three tokens lie between, a model of this
    size had not begun to look the name up after 350 million tokens, and gave one of the values at random.
    """
    return f'KEY = "{word}{number:02d}{value:04d}"\n'


def needle_words(vocabulary):
    """The words of keys: words of four letters or more that are one token with and without a space before them.

    Args:
        vocabulary: the tokenizer's `get_vocab()`. Its ids fall with frequency: only the rarer words are taken, which
            are in few of the contexts themselves. "Ġ" stands for a space.
    """
    return sorted(word for word, i in vocabulary.items() if i >= RARE and re.fullmatch("[a-z]{4,}", word) and "Ġ" + word in vocabulary)


class RecallTask:
    """Contexts of library text with pairs hidden in it and queries at the end.

    Args:
        tokenizer: the model's tokenizer (of the `tokenizers` library).
        tokens: an array of token ids to cut the surrounding text from.
        seed: keys, values, texts and places are all drawn anew for each context, from this seed.
        distinct: whether no two pairs of a context share their number. Training leaves numbers to chance, so that
            the word counts too; evaluation asks for keys that differ.
    """

    def __init__(self, tokenizer, tokens, seed, distinct):
        self.tokenizer = tokenizer
        self.tokens = tokens
        self.words = needle_words(tokenizer.get_vocab())
        self.newline = tokenizer.token_to_id("Ċ")
        self.line_ends = np.flatnonzero(tokens == self.newline) + 1
        self.rng = np.random.default_rng(seed)
        self.distinct = distinct

    def pairs(self, count):
        """`count` needle lines as lists of tokens, no word twice."""
        words = self.rng.choice(self.words, count, replace=False)
        numbers = self.rng.choice(100, count, replace=not self.distinct)
        values = self.rng.integers(10_000, size=count)
        lines = [needle(*pair) for pair in zip(words, numbers, values, strict=True)]
        return [e.ids for e in self.tokenizer.encode_batch(lines, add_special_tokens=False)]

    def row(self, length, pairs, queries, depth=None):
        """One context of exactly `length` tokens.

        Args:
            length: number of tokens, needles and queries included.
            pairs: how many pairs are stated, each between two lines of the text.
            queries: how many of them are asked for again at the end.
            depth: where the first pair asked for stands, 0 at the start and 1 at the end; random if None.

        Returns:
            (tokens, learned): token ids, and a mask of what training teaches: numbers, values and quotes of the
            queries. Evaluation gives the number and asks for the last ANSWER_TOKENS of them.
        """
        lines = self.pairs(pairs)
        asked = lines[:queries]
        space = length - sum(map(len, lines)) - sum(map(len, asked))
        end = self.rng.choice(self.line_ends[np.searchsorted(self.line_ends, space) :])
        text = self.tokens[end - space : end]
        breaks = np.append(0, np.flatnonzero(text == self.newline) + 1)
        places = self.rng.choice(breaks, pairs)
        if depth is not None:
            places[0] = breaks[np.abs(breaks - depth * space).argmin()]

        parts, at = [], 0
        for i in np.argsort(places, kind="stable"):
            parts += [text[at : places[i]], lines[i]]
            at = places[i]
        parts += [text[at:], *asked]
        learned = np.zeros(length, dtype=bool)
        stop = length
        for line in reversed(asked):
            learned[stop - 1 - LEARNED_TOKENS : stop - 1] = True
            stop -= len(line)
        return np.concatenate(parts).astype(np.int32), learned

    def batch(self, rows, length):
        """`rows` contexts for training: as many pairs as the length has room for, or fewer, and half of them asked."""
        recall = CONFIG["recall"]
        most = max(1, min(recall["max_pairs"], length // recall["tokens_per_pair"]))
        made = []
        for _ in range(rows):
            pairs = int(self.rng.integers(1, most + 1))
            made.append(self.row(length, pairs, (pairs + 1) // 2))
        return tuple(np.stack(part) for part in zip(*made, strict=True))


def main():
    documents = collect()
    kept = [text for path, text in documents if not is_held_out(path)]
    held = [text for path, text in documents if is_held_out(path)]
    MODEL.mkdir(parents=True, exist_ok=True)
    SCRATCH.mkdir(exist_ok=True)
    HELD_OUT.write_bytes(lzma.compress("".join(held).encode(), preset=9 | lzma.PRESET_EXTREME))

    tokenizer = train_tokenizer(kept)
    tokenizer.save(str(MODEL / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "pad_token": END,
        "model_max_length": CONFIG["model"]["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    (MODEL / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")

    tokens = tokenise(tokenizer, kept)
    tokens.tofile(SCRATCH / "train.bin")
    size = sum(len(text.encode()) for text in kept)
    print(f"training: {len(kept)} modules, {size} bytes, {len(tokens)} tokens ({size / len(tokens):.2f} bytes each)")
    for name, wanted in (("modules", False), ("tests", True)):
        texts = [text for path, text in read_held_out() if is_test(path) == wanted]
        print(f"held-out {name}: {len(texts)}, {sum(len(text.encode()) for text in texts)} bytes")


if __name__ == "__main__":
    main()
