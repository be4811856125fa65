"""What the commands share: loading, progress, printing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

out = Console()


def output(path: Path | None) -> Callable[[Callable[[Path], object]], None]:
    """Open a file that a command writes at its end, before its long run begins, so that no result is lost to a wrong path.

    Args:
        path: the file; the folders above it are made. None: the command was given none, and nothing is written.
    Returns:
        A function `write(save)`. `save` gets a path of the same ending beside `path`, and the complete file takes the place of `path`.
        A run that fails creates no file and changes none.
    Raises:
        ValueError: the file cannot be written.
    """
    if path is None:
        return lambda save: None
    target = path.resolve()
    draft = target.with_name(f".{target.stem}-{os.getpid()}{target.suffix}")
    try:
        if target.exists():
            if not (target.is_file() or target.is_dir()):  # /dev/null, a pipe: nothing may take its place
                return lambda save: save(path)
            target.open("ab").close()
        target.parent.mkdir(parents=True, exist_ok=True)
        draft.open("wb").close()
        draft.unlink()
    except OSError as error:
        raise ValueError(
            f"cannot write {path} ({error.strerror}: {error.filename}); name a file in a folder that you can write to"
        ) from error

    def write(save: Callable[[Path], object]) -> None:
        try:
            save(draft)
            if target.exists():
                shutil.copymode(target, draft)
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)

    return write


def load(model: str | None, device: str | None, stress: int = 0) -> tuple[Any, Any]:
    from ..evaluation.models import load
    from ..evaluation.stress import STRENGTHS, plant

    loaded, tokenizer = load(model, device=device)
    if stress:
        plant(loaded, STRENGTHS[stress])
    return loaded, tokenizer


def makers(choice: str, model: Any, scales: Path | None, max_cache_len: int | None = None) -> dict[str, Callable]:
    from ..evaluation.caches import cache_factory, cache_names
    from ..scales import KVScales

    loaded = KVScales.load(scales) if scales else None
    given = {name: loaded if name == "fp8-static" else None for name in cache_names(choice, loaded)}
    options = {"model": model, "max_cache_len": max_cache_len}
    return {name: cache_factory(name, model.config, scales=scales, **options) for name, scales in given.items()}


def encode(tokenizer: Any, prompt: str, chat: bool) -> Any:
    if chat:
        if not tokenizer.chat_template:
            raise ValueError("this model's tokenizer has no chat template; leave out --chat")
        messages = [{"role": "user", "content": prompt}]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    if not inputs["input_ids"].numel():
        raise ValueError(f"the prompt {prompt!r} has no tokens; give some text to continue")
    return inputs


def read_windows(tokenizer: Any, model: str | None, text: Path | None, length: int, count: int, *, from_end: bool = False) -> Any:
    """`[count, length]` ids of the text to evaluate on, from its start or its end."""
    from ..evaluation.models import read_text, tokenize, windows

    return windows(tokenize(tokenizer, read_text(text, model)), length, count, from_end=from_end)


def numbers(text: str, kind: type, option: str) -> list:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{option} must be numbers joined by commas; got {text!r}") from error


def needle_samples(
    tasks: str,
    tokenizer: Any,
    model: str | None,
    text: Path | None,
    *,
    lengths: list[int],
    samples: int,
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0),
    distractors: int = 3,
    seed: int = 0,
) -> list:
    """The samples of tasks joined by commas: `samples` of each length, and of `recall` also of each depth.

    All are made before the model runs, so that a length that does not fit or a missing package cannot end a long run.
    """
    from ..evaluation import recall, ruler
    from ..evaluation.models import read_text

    made = []
    with progress("prompts"):
        for task in tasks.split(","):
            if task == recall.NAME:
                grid = {"lengths": lengths, "depths": depths, "samples": samples, "distractors": distractors, "seed": seed}
                made += recall.recall_samples(tokenizer, read_text(text, model), **grid)
            elif task in ruler.NAMES:
                made += ruler.ruler_samples(tokenizer, task, lengths=lengths, samples=samples, seed=seed)
            else:
                raise ValueError(f"no task is called {task!r}; choose from {', '.join((recall.NAME, *ruler.NAMES))}")
    return made


def ask_all(what: str, model: Any, tokenizer: Any, questions: Sequence, caches: Mapping[str, Callable], **options: Any) -> list:
    """The outcomes of all questions through each cache, with a progress bar."""
    from ..evaluation.needle import ask

    answers = len(questions) * len(caches)
    with progress(what) as tick:
        done = count(1)
        return ask(model, tokenizer, questions, caches, progress=lambda _: tick(next(done), answers), **options)


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, driven by (done, total)."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def print_json(value: Any) -> None:
    from ..evaluation.report import to_json

    typer.echo(json.dumps(to_json(value), indent=2))
