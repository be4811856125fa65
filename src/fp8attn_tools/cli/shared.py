"""What the commands share: loading, progress, printing."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fp8attn.errors import UsageError
from fp8attn.files import draft_of, is_special, write_whole

from .options import MOST_TOKENS

if TYPE_CHECKING:
    from fp8attn.scales import KVScales

    from ..evaluation.outcomes import Outcome, Sample

out = Console()
SECONDS = 10.0  # between two lines of progress, if stderr is no terminal
Tick = Callable[[int, int | None], None]
CPU_CONTEXT = 4096
TOKENS = 32768  # of a text that calibration uses, if no number is given


def output(path: Path | None) -> Callable[[Callable[[Path], object]], object]:
    """Open a file that a command writes at its end. Called before a long run begins, so that a wrong path loses no
    results.

    Args:
        path: the file; the folders above it are made when it is written. None: the command has no such file, and
            nothing is written.
    Returns:
        A function `write(save)`. It calls `save` with a temporary path of the same suffix, and then moves the complete
        file to `path`. A run that fails creates no file and changes none.
    Raises:
        UsageError: the file cannot be written.
    """
    if path is None:
        return lambda save: None
    target = path.resolve()
    with _writing(path):
        if not is_special(target):
            if target.exists():
                target.open("ab").close()
            new = [folder for folder in target.parents if not folder.exists()]
            target.parent.mkdir(parents=True, exist_ok=True)
            draft = draft_of(target)
            draft.open("wb").close()
            draft.unlink()
            for folder in new:  # until there is something to write
                folder.rmdir()

    def write(save: Callable[[Path], object]) -> None:
        with _writing(path):
            write_whole(target, save)

    return write


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"cannot write {path} ({error.strerror}: {error.filename}); name a file in a folder that you can write to"
        ) from error


def load(model: str | None, device: str | None, dtype: Any = None) -> tuple[Any, Any]:
    """A model and its tokenizer."""
    from ..evaluation import models

    return models.load(model, device=device, dtype=dtype)


def served_config(model: str | None) -> Any:
    """The config of a model. No weights are read.

    Raises:
        UsageError: fp8attn cannot serve the model; the message has the reason.
    """
    from fp8attn.integrations.transformers.config import unsupported_reason

    from ..evaluation.models import load_config

    config = load_config(model)
    if reason := unsupported_reason(config):
        raise UsageError(reason)
    return config


def choose(choice: str, scales: Path | None) -> dict[str, KVScales | None]:
    """The names of the caches in `choice`, each with its scales or None. Needs no model, so a wrong name or file fails
    at once.
    """
    from fp8attn.scales import KVScales

    from ..evaluation.caches import cache_names

    if scales and not scales.is_file():
        raise UsageError(
            f"--scales {scales} is {'a folder' if scales.is_dir() else 'no such file'}; fp8attn calibrate writes a "
            f"file of scales"
        )
    loaded = KVScales.load(scales) if scales else None
    names = cache_names(choice, loaded)
    if "fp8-static" in names and loaded is None:
        raise UsageError("the cache 'fp8-static' needs --scales FILE (fp8attn calibrate writes it)")
    return {name: loaded if name == "fp8-static" else None for name in names}


def makers(chosen: Mapping[str, KVScales | None], model: Any, max_cache_len: int | None = None) -> dict[str, Callable]:
    """By name, a function that makes an empty cache for the model.

    Raises:
        UsageError: a cache of fp8attn is among them, and it cannot serve the model.
    """
    from fp8attn.integrations.transformers.config import unsupported_reason

    from ..evaluation.caches import FORMATS, cache_factory

    if not chosen.keys().isdisjoint({*FORMATS, "fp8-static"}) and (reason := unsupported_reason(model.config)):
        raise UsageError(reason)
    return {
        name: cache_factory(name, model, scales=scales, max_cache_len=max_cache_len) for name, scales in chosen.items()
    }


def encode(tokenizer: Any, prompt: str, chat: bool) -> Any:
    """The prompt's `input_ids [1, S]`, in the chat template if `chat`."""
    if chat:
        if not tokenizer.chat_template:
            raise UsageError("this model's tokenizer has no chat template; leave out --chat")
        messages = [{"role": "user", "content": prompt}]
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    if not inputs["input_ids"].numel():
        raise UsageError(f"the prompt {prompt!r} has no tokens; give some text to continue")
    return inputs


def read_text(path: Path | None, model: str | None) -> str:
    """The text to evaluate on. Needs no model, so a wrong path fails at once."""
    from ..evaluation import models

    return models.read_text(path, model)


def windows(tokenizer: Any, text: str, length: int, count: int) -> Any:
    """`[count, length]` ids from the start of the text."""
    from ..evaluation import models

    return models.windows(models.tokenize(tokenizer, text), length, count)


def sequence_length(config: Any, device: str | None, length: int | None) -> int:
    """`length`; for None, the model's context (`context_of`), on a CPU at most 4,096 tokens, because attention takes
    minutes there.
    """
    from ..calibration.pack import context_of
    from ..evaluation.models import usable_device

    longest = {"longest": CPU_CONTEXT} if usable_device(device).type == "cpu" else {}
    return length or context_of(config, **longest)


def sequences(tokenizer: Any, text: str, length: int, count: int | None = None, *, from_end: bool = False) -> list:
    """Batches `[1, length]` of ids from the start or the end of the text.

    Args:
        count: None: up to 32,768 tokens; the last sequence has those that are left.
    Raises:
        UsageError: the text has fewer tokens, or none.
    """
    from ..calibration.pack import pack_tokens
    from ..evaluation import models

    ids = models.tokenize(tokenizer, text)
    if not len(ids):
        raise UsageError("the text has no tokens; pass a text with words")
    if count is not None:
        return list(models.windows(ids, length, count, from_end=from_end).split(1))
    return list(pack_tokens([ids[-TOKENS:] if from_end else ids[:TOKENS]], length))


def numbers(text: str, kind: type, option: str) -> list:
    """The numbers in `text`, joined by commas; whole ones are counts of tokens or heads."""
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{option} must be numbers joined by commas; got {text!r}") from error
    if wrong := [x for x in found if kind is int and not 1 <= x <= MOST_TOKENS]:
        raise UsageError(f"{option} must be numbers from 1 to {MOST_TOKENS:,}; got {wrong[0]:,}")
    return found


def task_names(choice: str) -> list[str]:
    """The tasks in `choice`, joined by commas."""
    from ..evaluation.names import TASKS

    for task in (names := [name.strip() for name in choice.split(",")]):
        if task not in TASKS:
            raise UsageError(f"no task is called {task!r}; choose from {', '.join(TASKS)}")
    return names


def needle_samples(
    tasks: Sequence[str],
    tokenizer: Any,
    text: str,
    *,
    lengths: list[int],
    samples: int,
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    distractors: int = 3,
    seed: int = 0,
) -> list[Sample]:
    """The samples of all tasks: `samples` of each length; of `recall`, of each length and depth.

    All are made before the model runs, so that a length that does not fit or a missing package cannot end a long run.
    """
    from ..evaluation import recall, ruler
    from ..evaluation.names import RECALL

    made: list[Sample] = []
    with progress("prompts"):
        for task in tasks:
            if task == RECALL:
                made += recall.recall_samples(
                    tokenizer, text, lengths=lengths, depths=depths, samples=samples, distractors=distractors, seed=seed
                )
            else:
                made += ruler.ruler_samples(tokenizer, task, lengths=lengths, samples=samples, seed=seed)
    return made


def ask_all(
    what: str, model: Any, tokenizer: Any, questions: Sequence[Sample], caches: Mapping[str, Callable], **options: Any
) -> list[Outcome]:
    """The outcomes of all questions through each cache, with progress."""
    from ..evaluation.needle import ask

    answers = len(questions) * len(caches)
    with progress(what) as tick:
        done = count(1)
        return ask(model, tokenizer, questions, caches, progress=lambda _: tick(next(done), answers), **options)


@contextmanager
def progress(what: str) -> Iterator[Tick]:
    """Progress on stderr, driven by calls with (done, total):
    a bar in a terminal, elsewhere a line from time to time.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(what)
        return
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def _lines(what: str) -> Tick:
    begun = last = time.monotonic()

    def tick(done: int, total: int | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= SECONDS:
            last = now
            elapsed, share = now - begun, ""
            if total is not None:
                left = f", about {elapsed / done * (total - done):.0f} s left" if done else ""
                share = f" of {total}{left}"
            print(f"{what}: {done}{share}, {elapsed:.0f} s so far", file=sys.stderr, flush=True)

    return tick


def about(model: Any) -> dict[str, Any]:
    """The versions, device and date of a run (`evaluation.record.meta`), and the command."""
    from ..evaluation.record import meta

    return {**meta(model), "command": " ".join(["fp8attn", *sys.argv[1:]])}


def print_json(value: Any) -> None:
    """Print `evaluation.record.to_json(value)`."""
    from ..evaluation.record import to_json

    typer.echo(json.dumps(to_json(value), indent=2))
