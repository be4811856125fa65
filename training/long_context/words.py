"""The words that the retrieval tasks (`retrieval.py`) make keys of.

    python -m training.long_context.words

It reads what `training/data.py` reads, where `fp8attn[ruler]` is installed, and writes `.train/words.json`.
"""

import hashlib
import json
import re

from data import SCRATCH, collect, is_held_out


def key_words(texts):
    """Words of the texts that retrieval keys are made of, in training and in the validation while training: two lists, by a hash.

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
    words = key_words([text for path, text in collect() if not is_held_out(path)])
    SCRATCH.mkdir(exist_ok=True)
    (SCRATCH / "words.json").write_text(json.dumps(words))
    print(f"key words: {len(words[0])} of training, {len(words[1])} of validation")


if __name__ == "__main__":
    main()
