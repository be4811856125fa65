"""The text that the small model is trained on, its tokenizer, and the words that the retrieval tasks (`retrieval.py`)
make keys of.

The text is the Python source of the standard library of the interpreter that runs this file. Run it once, where
`fp8attn[ruler]` is installed, to train the tokenizer, write the held-out modules next to the model, tokenize the rest
and write `.train/words.json`:

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
# (a line can be inserted without tokenizing the rest again), and a value of seven digits is always seven tokens.
PIECES = r"\n|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|[^\S\n]+"


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
        vocab_size=CONFIG["llama"]["vocab_size"],
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer():
    """The committed tokenizer, as an object of the `tokenizers` library."""
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def tokenize(tokenizer, texts):
    """All texts as one array of token ids, each after an end-of-text token."""
    ids = (i for e in tokenizer.encode_batch(list(texts), add_special_tokens=False) for i in [0, *e.ids])
    return np.fromiter(ids, dtype=np.uint16)


# ---------------------------------------------------------------- words


def key_words(texts):
    """Words of the texts that retrieval keys are made of, in training and in the validation while training: two lists,
    by a hash.

    None of them is, or is part of, an entry of the `wonderwords` lists that RULER's keys come from.
    """
    import wonderwords

    lists = wonderwords.RandomWord()._categories.values()
    evaluated = {part for words in lists for word in words for part in re.findall("[a-z]+", word.lower())}
    found = {word for text in texts for word in re.findall("[a-z]{3,12}", text)}
    split = [[], []]
    for word in sorted(found - evaluated):
        split[hashlib.sha256(word.encode()).digest()[0] % 16 == 0].append(word)
    return split


def read_words():
    """What `main` wrote: the words of training, and those of validation."""
    return json.loads((SCRATCH / "words.json").read_text())


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
        "model_max_length": CONFIG["llama"]["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    (MODEL / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")

    tokens = tokenize(tokenizer, kept)
    tokens.tofile(SCRATCH / "train.bin")
    size = sum(len(text.encode()) for text in kept)
    print(f"training: {len(kept)} modules, {size} bytes, {len(tokens)} tokens ({size / len(tokens):.2f} bytes each)")
    words = key_words(kept)
    (SCRATCH / "words.json").write_text(json.dumps(words))
    print(f"key words: {len(words[0])} of training, {len(words[1])} of validation")
    for name, wanted in (("modules", False), ("tests", True)):
        texts = [text for path, text in read_held_out() if is_test(path) == wanted]
        print(f"held-out {name}: {len(texts)}, {sum(len(text.encode()) for text in texts)} bytes")


if __name__ == "__main__":
    main()
