"""The retrieval contexts of training: of the given length, answerable, in RULER's form, and without
RULER's questions.
"""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("tokenizers")

sys.path.append(str(Path(__file__).parents[2] / "training"))  # scripts that import each other by name

import data
import train
from model import Model, save_hf
from retrieval import FORMS, RetrievalTask
from torch.nn.attention import sdpa_kernel
from twin import make_twin, small_model


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


@pytest.mark.parametrize("kind", ["llama", "latent"])
def test_transformers_computes_what_was_trained(kind, tmp_path):
    """The exported model's losses are those of the model in training, with weights that BF16 can hold."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = Model(train.CONFIG[kind] | {"num_hidden_layers": 2, "max_position_embeddings": 128})
    with torch.no_grad():
        for weight in model.parameters():
            # Layers start as the identity, and norms as ones: here every weight matters.
            weight.copy_((weight + 0.05 * torch.randn_like(weight)).bfloat16())
    tokens = torch.randint(4096, (2, 65))
    losses, hits = model.eval()(tokens)
    save_hf(model, tmp_path)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    logits = saved(tokens[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)
    assert (hits == (logits.argmax(-1) == tokens[:, 1:])).all()


def test_the_twin_begins_as_the_small_model(task):
    """Without training it finds every sentence of short contexts, and models text almost as well."""
    model = small_model()
    text = torch.from_numpy(task.text[: 4 * 257].astype(np.int64)).view(4, 257)
    contexts, learned = (torch.from_numpy(x) for x in task.batch(8, 257, ruler_only=True))
    torch.manual_seed(0)
    with sdpa_kernel(train.FAST_ATTENTION, set_priority=True):  # as training has it
        twin = make_twin(model, torch.cat((text, contexts)).int()).eval()
    assert twin.c["kv_lora_rank"] == 512 and twin.c["qk_rope_head_dim"] == 64
    with torch.no_grad():
        (model_loss, _), (twin_loss, _) = model(text), twin(text)
        hits = twin(contexts)[1]
    assert model_loss.mean() < twin_loss.mean() < model_loss.mean() + 0.8
    assert (hits | ~learned[:, 1:]).all()
