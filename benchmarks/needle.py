"""RULER's retrieval through BF16, through our caches, and through the FP8 kernels of others, on the same samples of one model.

    python -m benchmarks.needle samples --task niah_multikey_2 --lengths 4096,131072  # needs fp8attn[ruler], and no GPU
    python -m benchmarks.needle run --task niah_multikey_2 --lengths 4096,131072 [--stress 0,3] [--impl bf16,fp8attn] [--seconds 500]
    python -m benchmarks.needle merge results/h200 /tmp/a/results/h200 /tmp/b/results/h200  # of runs in two checkouts, and needs no GPU

`samples` writes `.needle/`, which git ignores. `run` asks every implementation for an answer to each of them, a process a GPU, each with
every n-th sample, and writes `results/h200/needle.json` and all answers beside it. Meanwhile they go to `.needle/outcomes/`, line by line:
what a run that was killed leaves there counts in the next. Earlier answers are kept and not asked for again where they are of this device,
torch and Triton, and the sources of their implementation are unchanged: our kernels make nobody else's answers stale. `merge` puts together
what runs answered side by side, each in a checkout of its own.

This file is the command line and the books, which decide no answer; what does is in `needle_systems`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from fp8attn.evaluation import models, needle, ruler
from fp8attn.evaluation.needle import Outcome
from fp8attn.evaluation.paired import compare, wilson

from . import peers
from .needle_systems import BATCH_TOKENS, CHUNK, IMPLS, NEEDS, OURS, Work
from .results import ROOT, about, hashes, save

SAMPLES = ROOT / ".needle"
OUTCOMES = SAMPLES / "outcomes"  # of runs that have not ended, in a folder each
RESULTS, KEPT = (ROOT / f"results/h200/needle.{ending}" for ending in ("json", "jsonl.xz"))
SHARED_SOURCES = (  # what everybody's answers depend on; of the layout and the numerics, what FP8 is and how it is rounded to
    *("benchmarks/needle_systems.py", "src/fp8attn/layout.py", "src/fp8attn/numerics.py"),
    *(f"src/fp8attn/evaluation/{name}.py" for name in ("caches", "models", "needle", "ruler", "stress")),
    "models/stdlib-llama/model.safetensors",
)
OUR_SOURCES = (  # and ours besides
    *("src/fp8attn/kernels", "src/fp8attn/integrations/transformers"),
    *(f"src/fp8attn/{name}.py" for name in ("backends", "cache", "calibrate", "ops", "scales")),
)
COUNTS = ("benchmarks/needle.py", "src/fp8attn/evaluation/paired.py")  # answers, which they do not change
SOURCES = (*SHARED_SOURCES, *OUR_SOURCES, *COUNTS)
MACHINE = ("device", "torch", "triton")  # of a `meta`; answers on different ones are not mixed


def check(names: Sequence[str]) -> None:
    """Raises ValueError for a name that no implementation has."""
    for name in names:
        if name not in IMPLS:
            raise ValueError(f"no implementation is called {name!r}; choose from {', '.join(IMPLS)}")


def run_everywhere(work: Work) -> int:
    """Run in a process a GPU, which sees no other; how many of them failed. Where there is one GPU at most, here."""
    count = torch.cuda.device_count()
    if count < 2:
        work.run()
        return 0
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    processes = []
    for number, device in enumerate(seen.split(",")):
        os.environ["CUDA_VISIBLE_DEVICES"] = device  # inherited, and read when the process imports torch
        processes.append(get_context("spawn").Process(target=work.run, args=(number, count)))
        processes[-1].start()
    os.environ["CUDA_VISIBLE_DEVICES"] = seen
    try:
        for process in processes:
            process.join()
    finally:  # interrupted: none goes on answering
        for process in processes:
            process.terminate()
            process.join()
    return sum(process.exitcode != 0 for process in processes)


def key(outcome: Outcome) -> tuple:
    return (outcome.cache, *outcome.sample)


@dataclass(frozen=True)
class Answers:
    """What one or more runs answered, and the `meta` of their results, whose `command` is all of theirs, with `; ` between them."""

    meta: dict
    outcomes: list[Outcome]


def begin(meta: dict) -> Path:
    """A folder for the answers of a run until it ends."""
    folder = OUTCOMES / str(time.time_ns())
    save(folder / RESULTS.name, meta, [])
    return folder


def read(folder: Path) -> Answers:
    """The answers in a folder, of results or from `begin`."""
    meta = json.loads((folder / RESULTS.name).read_text())["meta"]
    files = sorted(folder.glob(f"{RESULTS.stem}*.jsonl*"))
    return Answers(meta, [outcome for file in files for outcome in needle.load_outcomes(file)])


def load(meta: dict) -> list[Answers]:
    """What a run of this `meta` need not ask again: answers of earlier runs, and of those that were killed, on the same machine, by
    implementations whose sources are the same. Which are not kept, and why, is said."""
    kept = []
    for file in (RESULTS, *sorted(OUTCOMES.glob(f"*/{RESULTS.name}"))):
        if file.exists():
            there = read(file.parent)
            names = sorted({outcome.cache for outcome in there.outcomes}, key=IMPLS.index)
            machine = [name for name in MACHINE if there.meta[name] != meta[name]]
            other = {name: machine or changed(there, name) for name in names}
            for name in names:
                if other[name]:
                    print(f"{file.parent}: answers of {name} are not kept, for they are of another {', '.join(other[name])}", flush=True)
            kept.append(only(there, {name for name in names if not other[name]}))
    return kept


def changed(answers: Answers, name: str) -> list[str]:
    """The sources that an implementation's answers depend on and that are not what they were."""
    then, now = answers.meta["sources"], hashes(SHARED_SOURCES + (OUR_SOURCES if name in OURS else ()))
    return [path for path, digest in now.items() if then.get(path) != digest]


def only(answers: Answers, names: set[str]) -> Answers:
    """The answers of some implementations, and the commands that asked any of them."""
    commands = [command for command in answers.meta["command"].split("; ") if names & asks(command)]
    return Answers(answers.meta | {"command": "; ".join(commands)}, [outcome for outcome in answers.outcomes if outcome.cache in names])


def asks(command: str) -> set[str]:
    """The implementations that a `run` asks."""
    named = re.search(r"--impl[ =](\S+)", command)
    return set(named[1].split(",") if named else IMPLS)


def keep(folder: Path, meta: dict, runs: Sequence[Answers]) -> None:
    """Write what runs on one machine answered, and what is counted from it, as the results of all of them.

    Args:
        folder: `results/h200`, or another.
        meta: of the results, but for `date`, the latest of the runs', and `command`.
        runs: where several have an answer of one implementation to one sample, the first of them counts.
    """
    outcomes: dict[tuple, Outcome] = {}
    for outcome in (outcome for run in runs for outcome in run.outcomes):
        outcomes.setdefault(key(outcome), outcome)
    commands = dict.fromkeys(command for run in runs for command in run.meta["command"].split("; "))
    needle.save_outcomes(folder / KEPT.name, outcomes.values())
    date = max(run.meta["date"] for run in runs)
    save(folder / RESULTS.name, meta | {"date": date, "command": "; ".join(commands)}, rows(list(outcomes.values())))


def merge(folder: Path, runs: Sequence[Path]) -> None:
    """Write what several runs answered as the results of all of them.

    Args:
        folder: `results/h200`, or another.
        runs: each the folder of a run's results.
    Raises:
        ValueError: a run has answers of an implementation whose sources are not this checkout's, or is on another device or release than
            the first; or two runs have unlike answers of one implementation to one sample.
    """
    given: dict[Path, Answers] = {}
    for run in runs:
        for name in (RESULTS.name, KEPT.name):
            if not (run / name).exists():
                raise ValueError(f"{run} has no {name}: name the folder of a run's results, which it writes when it ends")
        given[run] = there = read(run)
        if other := sorted({path for name in {outcome.cache for outcome in there.outcomes} for path in changed(there, name)}):
            raise ValueError(f"{run} has answers of other sources than this checkout's: {', '.join(other)}; leave it out, or run it again")
        meta = given[runs[0]].meta
        for name in MACHINE:
            if there.meta[name] != meta[name]:
                raise ValueError(f"{name} is {there.meta[name]} in {run} and {meta[name]} in {runs[0]}: merge runs on one")
    found: dict[tuple, tuple[Outcome, Path]] = {}
    for run, there in given.items():
        for outcome in there.outcomes:
            first, where = found.setdefault(key(outcome), (outcome, run))
            if first != outcome:
                name = f"{outcome.cache} on sample {outcome.index} of {outcome.task} at {outcome.length}"
                raise ValueError(f"{name} answers {outcome.text!r} in {run} and {first.text!r} in {where}: leave one of the runs out")
    keep(folder, meta | {"sources": hashes(SOURCES)}, list(given.values()))


def rows(outcomes: Sequence[Outcome]) -> list[dict]:
    """A row for each task, length and implementation: the accuracy, and what a pairing with BF16 says."""
    groups: dict[tuple[str, int], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.task, outcome.length), []).append(outcome)
    made = []
    for (task, length), here in sorted(groups.items()):
        for name in sorted({o.cache for o in here}, key=IMPLS.index):
            right = [o.right for o in here if o.cache == name]
            row = {"case": f"{task}-S{length}", "impl": name, "accuracy": sum(right) / len(right)}
            row |= {"interval": wilson(sum(right), len(right)), "samples": len(right)}
            both = {o.index for o in here if o.cache == name} & {o.index for o in here if o.cache == "bf16"}
            if name != "bf16" and both:
                pair = compare(here, "bf16", name)
                discordant = [a.index for a, _ in pair.discordant]
                row |= {"paired": pair.samples, "difference": pair.difference, "difference_interval": pair.interval, "p": pair.p}
                row |= {"lost": pair.only_first, "won": pair.only_second, "discordant": discordant}
            made.append(row)
    return made


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="what", required=True)
    asked = argparse.ArgumentParser(add_help=False)
    asked.add_argument("--model", help="a folder or Hugging Face id; default: the committed model")
    asked.add_argument("--task", default="niah_multikey_2", help="some of " + ", ".join(ruler.NAMES))
    asked.add_argument("--lengths", type=numbers, default="4096,8192,16384,32768,65536,131072")
    asked.add_argument("--samples", type=int, help="of each task and length; default: 500, or all that were made")
    verbs.add_parser("samples", parents=[asked])
    run = verbs.add_parser("run", parents=[asked])
    run.add_argument("--impl", default=",".join(IMPLS))
    run.add_argument("--stress", type=numbers, default="0", help="strengths, joined by commas")
    run.add_argument("--seconds", type=float, default=float("inf"), help="after so many, begin no other batch")
    run.add_argument("--chunk", type=int, default=CHUNK, help="tokens of a prefill's forward; default: the whole prompt")
    run.add_argument("--batch-tokens", type=int, default=BATCH_TOKENS, help="of the prompts that run side by side")
    merging = verbs.add_parser("merge")
    merging.add_argument("folder", type=Path, help="to write to")
    merging.add_argument("runs", type=Path, nargs="+", help="the folders of runs' results")
    args = parser.parse_args()
    if args.what == "merge":
        merge(args.folder, args.runs)
        return
    cases = [(task, length) for task in args.task.split(",") for length in args.lengths]
    files = tuple(SAMPLES / f"{task}-{length}.zip" for task, length in cases)
    if args.what == "samples":
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.model or models.default_model())
        for (task, length), file in zip(cases, files, strict=True):
            needle.save_samples(file, ruler.ruler_samples(tokenizer, task, lengths=(length,), samples=args.samples or 500))
            print(f"{file}: {file.stat().st_size / 1e6:.1f} MB", flush=True)
        return
    names = tuple(args.impl.split(","))
    check(names)
    names = tuple(name for name in names if name in OURS or NEEDS[name.partition(":")[0]] in peers.available())
    meta = about(SOURCES)
    earlier, folder = load(meta), begin(meta)
    done = frozenset(key(outcome) for run in earlier for outcome in run.outcomes)
    deadline = time.time() + args.seconds
    work = Work(folder, args.model, files, names, args.stress, args.samples, args.chunk, args.batch_tokens, deadline, done)
    ending = ""
    try:
        if failed := run_everywhere(work):
            ending = f"{failed} processes failed; what the others answered is kept"
    except KeyboardInterrupt:
        ending = "interrupted; what was answered is kept"
    if runs := [run for run in (*earlier, read(folder)) if run.outcomes]:
        keep(RESULTS.parent, meta, runs)
    shutil.rmtree(OUTCOMES)
    if ending:
        sys.exit(ending)


if __name__ == "__main__":
    main()
