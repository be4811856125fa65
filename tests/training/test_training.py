"""The retrieval contexts of training: of the given length, answerable, in RULER's form, and without
RULER's questions.
"""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tokenizers")

sys.path.append(str(Path(__file__).parents[2] / "training"))  # scripts that import each other by name

import data
import train
from retrieval import FORMS, RetrievalTask


@pytest.fixture(scope="module")
def task():
    tokenizer = data.load_tokenizer()
    text = data.tokenize(tokenizer, [document for _, document in data.read_held_out()[:3]])
    words = [f"{a}{b}" for a in ("sta", "cod", "qui", "ver", "lam") for b in ("ck", "ec", "bda", "nto", "mix", "rus")]
    return RetrievalTask(tokenizer, words, text, 0)


@pytest.mark.parametrize("length", [257, 513, 2049])
@pytest.mark.parametrize("form", range(len(FORMS)))
def test_rows(task, length, form):
    for _ in range(12):
        tokens, learned = task.row(length, [float(i == form) for i in range(len(FORMS))])
        assert tokens.shape == learned.shape == (length,) and learned.any()
        said = task.tokenizer.decode(tokens.tolist())
        for answer in re.findall(r"[\w-]+", task.tokenizer.decode(tokens[learned].tolist())):
            assert len(re.findall(rf"\b{answer}\b", said)) >= 2  # stated and asked


def test_the_form_is_rulers(task):
    tokens, learned = task.row(1025, ruler_only=True)
    said = task.tokenizer.decode(tokens.tolist())
    asked = r"What is the special magic number for (\S+) mentioned in the provided text\? "
    asked += r"The special magic number for \1 mentioned in the provided text is (\d+)\n$"
    question = re.search(asked, said)
    key, value = question.groups()
    assert f"\nOne of the special magic numbers for {key} is: {value}.\n" in said
    assert task.tokenizer.decode(tokens[learned].tolist()) == f" {value}\n"
    keys = re.findall(r"numbers for (\S+) is:", said)
    assert len(keys) == len(set(keys)) > 20


def test_no_value_or_variable_is_one_that_ruler_draws(task):
    for _ in range(20):
        said = task.tokenizer.decode(task.row(2049)[0].tolist())
        for value in re.findall(r"is: (\d+)\.\n", said):
            assert len(value) in (6, 8) or (len(value) == 7 and value[0] == "0")
        for name in re.findall(r"VAR ([A-Z]+) =", said):
            assert len(name) in (4, 6)


def test_key_words_are_not_rulers():
    pytest.importorskip("wonderwords")
    training, validation = data.key_words(
        ["def harbour(special): return quux, zyzzyva, plugh  # a cat"] + [f"abcx{c}" for c in "defghijklmnop"]
    )
    assert not {"harbour", "cat"} & {*training, *validation}
    assert {"quux", "plugh"} <= {*training, *validation} and not set(training) & set(validation)


def test_seeds(task):
    rows = [RetrievalTask(task.tokenizer, task.words, task.text, seed).row(513)[0] for seed in (3, 3, 4)]
    assert np.array_equal(rows[0], rows[1]) and not np.array_equal(rows[0], rows[2])


def test_a_step_has_room_for_every_context():
    train.check_lengths(data.CONFIG["train"])
    short = data.CONFIG["train"] | {"tokens_per_step": 65536}
    with pytest.raises(
        ValueError, match=r"contexts of 131,072 tokens, and a step has 65,536 .*set tokens_per_step to 131072 or more"
    ):
        train.check_lengths(short)
