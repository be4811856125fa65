"""RULER's retrieval through BF16, through our caches, and through the FP8 kernels of others, on the same samples of one model.

    python -m benchmarks.needle samples --task niah_multikey_2 --lengths 4096,131072  # needs fp8attn[ruler], and no GPU
    python -m benchmarks.needle run --task niah_multikey_2 --lengths 4096,131072 [--stress 0,3] [--impl bf16,fp8attn] [--seconds 500]
    python -m benchmarks.needle merge results/h200 /tmp/a/results/h200 /tmp/b/results/h200  # of runs in two checkouts, and needs no GPU

`samples` writes `.needle/`, which git ignores. `run` asks every implementation for an answer to each of them, a process a GPU, each with
every n-th sample, and with `--save` writes `results/<device>/needle.json` and all answers beside it. Meanwhile they go to
`.needle/outcomes/`, line by line: what a run that was killed leaves there counts in the next. Earlier answers are kept and not asked for
again where they are of this machine, torch and Triton, and the code of their implementation is what it was (`fingerprint.of_row`): a change
of our kernels leaves other systems' answers as they are. `merge` puts together what runs answered side by side, each in a checkout of its
own.

This file is the command line and keeps the answers, and decides none of them; `needle_systems` does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch
from transformers import AutoTokenizer

from evidence import results
from evidence.fingerprint import ROOT, of_row
from fp8attn.evaluation import models, needle, ruler
from fp8attn.evaluation.needle import Outcome
from fp8attn.evaluation.paired import compare, wilson

from . import peers
from .needle_systems import IMPLS, NEEDS, OURS, Work

SAMPLES = ROOT / ".needle"
OUTCOMES = SAMPLES / "outcomes"  # of runs that have not ended, in a folder each
RESULTS = results.RESULTS
NAME, KEPT = "needle.json", "needle.jsonl.xz"
SAME = ("torch", "triton", "fingerprint")  # of a provenance: answers that differ in one are not mixed


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
    """What one or more runs answered on one machine.

    Attributes:
        folder: of the files; `machine`: `results.meta` of it.
        provenances: of each implementation's answers; `command` is all commands that asked it, with `; ` between them.
    """

    folder: Path
    machine: dict
    provenances: dict[str, dict]
    outcomes: list[Outcome]

    def names(self) -> list[str]:
        return in_order(outcome.cache for outcome in self.outcomes)


def in_order(names: Iterable[str]) -> list[str]:
    """Each name once, in the order of `IMPLS`; implementations that the benchmark no longer has come last."""
    return sorted(set(names), key=lambda name: (IMPLS.index(name) if name in IMPLS else len(IMPLS), name))


def begin(machine: dict, provenances: dict[str, dict]) -> Path:
    """A folder for the answers of a run until it ends."""
    folder = OUTCOMES / str(time.time_ns())
    folder.mkdir(parents=True)
    (folder / NAME).write_text(json.dumps({"meta": machine, "provenance": provenances}))
    return folder


def read(folder: Path) -> Answers:
    """The answers in a folder, of results or from `begin`."""
    there = json.loads((folder / NAME).read_text())
    files = sorted(folder.glob("needle*.jsonl*"))
    return Answers(folder, there["meta"], there["provenance"], [outcome for file in files for outcome in needle.load_outcomes(file)])


def usable(found: Iterable[Answers], machine: dict, now: dict[str, dict]) -> tuple[list[Answers], list[str]]:
    """The answers of a machine, of the releases and the code that implementations have in `now`; and which others there are, in words."""
    kept, others = [], []
    for there in found:
        for name in there.names():
            differ = ["machine"] if there.machine != machine else []
            if name not in now:
                differ.append("benchmark (this one has no such implementation)")
            else:
                differ += [part for part in SAME if there.provenances[name][part] != now[name][part]]
            if differ:
                others.append(f"{there.folder} has answers of {name} of another {', '.join(differ)}")
                there = replace(there, outcomes=[outcome for outcome in there.outcomes if outcome.cache != name])
        kept.append(there)
    return kept, others


def load(machine: dict, now: dict[str, dict]) -> list[Answers]:
    """What a run does not ask again: answers of earlier runs, and of those that were killed. Which are not kept, and why, is printed."""
    files = (RESULTS / results.slug(machine["device"]) / NAME, *sorted(OUTCOMES.glob(f"*/{NAME}")))
    kept, others = usable((read(file.parent) for file in files if file.exists()), machine, now)
    for other in others:
        print(f"{other}: they are not kept", flush=True)
    return kept


def keep(folder: Path, runs: Sequence[Answers]) -> None:
    """Write what runs on one machine answered, and what is counted from it, as the results of all of them.

    Args:
        runs: where several have an answer of one implementation to one sample, the first of them counts.
    """
    outcomes: dict[tuple, Outcome] = {}
    for outcome in (outcome for run in runs for outcome in run.outcomes):
        outcomes.setdefault(key(outcome), outcome)
    provenances: dict[str, dict] = {}
    for name in in_order(outcome.cache for outcome in outcomes.values()):
        given = [run.provenances[name] for run in runs if name in run.names()]
        commands = dict.fromkeys(command for one in given for command in one["command"].split("; "))
        provenances[name] = max(given, key=lambda one: one["date"]) | {"command": "; ".join(commands)}
    made = [
        row | {"provenance": row["impl"], "fingerprint": provenances[row["impl"]]["fingerprint"]} for row in rows(list(outcomes.values()))
    ]
    needle.save_outcomes(folder / KEPT, outcomes.values())
    results.write(folder / NAME, runs[0].machine, provenances, made)


def merge(folder: Path, runs: Sequence[Path]) -> None:
    """Write what several runs answered as the results of all of them.

    Args:
        folder: `results/h200`, or another.
        runs: each the folder of a run's results.
    Raises:
        ValueError: a run has answers of an implementation whose code is not this checkout's, or is of another machine or release than the
            first; or two runs have unlike answers of one implementation to one sample.
    """
    for run, name in product(runs, (NAME, KEPT)):
        if not (run / name).exists():
            raise ValueError(f"{run} has no {name}: name the folder of a run's results, which it writes when it ends")
    given = [read(run) for run in runs]
    release = next(iter(given[0].provenances.values()))
    now = {name: release | {"fingerprint": of_row("needle", name)} for run in given for name in run.names()}
    kept, others = usable(given, given[0].machine, now)
    if others:
        raise ValueError(f"{others[0]} than this checkout and {runs[0]}: leave it out, or run it again")
    found: dict[tuple, tuple[Outcome, Path]] = {}
    for run in kept:
        for outcome in run.outcomes:
            earlier, where = found.setdefault(key(outcome), (outcome, run.folder))
            if earlier != outcome:
                name = f"{outcome.cache} on sample {outcome.index} of {outcome.task} at {outcome.length}"
                raise ValueError(
                    f"{name} answers {outcome.text!r} in {run.folder} and {earlier.text!r} in {where}: leave one of the runs out"
                )
    keep(folder, kept)


def rows(outcomes: Sequence[Outcome]) -> list[dict]:
    """A row for each task, length and implementation: the accuracy, and what a pairing with BF16 says."""
    groups: dict[tuple[str, int], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.task, outcome.length), []).append(outcome)
    made = []
    for (task, length), here in sorted(groups.items()):
        for name in in_order(o.cache for o in here):
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


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = made.add_subparsers(dest="what", required=True)
    samples, run, merging = (verbs.add_parser(name) for name in ("samples", "run", "merge"))
    for verb in (samples, run):
        verb.add_argument("--model", help="a folder or Hugging Face id; default: the committed model")
        verb.add_argument("--task", default="niah_multikey_2", help="some of " + ", ".join(ruler.NAMES))
        verb.add_argument("--lengths", type=numbers, default="4096,8192,16384,32768,65536,131072")
        verb.add_argument("--samples", type=int, help="of each task and length; default: 500, or all that were made")
    results.add_save(run)
    run.add_argument("--impl", default=",".join(IMPLS))
    run.add_argument("--stress", type=numbers, default="0", help="strengths, joined by commas")
    run.add_argument("--seconds", type=float, default=float("inf"), help="after so many, begin no other batch")
    merging.add_argument("folder", type=Path, help="to write to")
    merging.add_argument("runs", type=Path, nargs="+", help="the folders of runs' results")
    return made


def make_samples(args: argparse.Namespace, cases: dict[Path, tuple[str, int]]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(args.model or models.default_model())
    for file, (task, length) in cases.items():
        needle.save_samples(file, ruler.ruler_samples(tokenizer, task, lengths=(length,), samples=args.samples or 500))
        print(f"{file}: {file.stat().st_size / 1e6:.1f} MB", flush=True)


def answer(args: argparse.Namespace, files: Iterable[Path]) -> None:
    """Ask what earlier runs have not, and keep or print all answers."""
    names = args.impl.split(",")
    if unknown := [name for name in names if name not in IMPLS]:
        raise ValueError(f"no implementation is called {unknown[0]!r}; choose from {', '.join(IMPLS)}")
    here = tuple(name for name in names if name in OURS or NEEDS[name.partition(":")[0]] in peers.available())
    machine = results.meta()
    now = {name: results.provenance("needle") | {"fingerprint": of_row("needle", name)} for name in IMPLS}
    earlier, folder = load(machine, now), begin(machine, now)
    done = frozenset(key(outcome) for run in earlier for outcome in run.outcomes)
    work = Work(folder, args.model, tuple(files), here, args.stress, args.samples, deadline=time.time() + args.seconds, done=done)
    ending = ""
    try:
        if failed := run_everywhere(work):
            ending = f"{failed} processes failed; what the others answered is kept"
    except KeyboardInterrupt:
        ending = "interrupted; what was answered is kept"
    runs = [run for run in (*earlier, read(folder)) if run.outcomes]
    if args.save and runs:
        keep(RESULTS / results.slug(machine["device"]), runs)
        shutil.rmtree(OUTCOMES)
    else:
        print(*rows([outcome for run in runs for outcome in run.outcomes]), sep="\n")
    if ending:
        sys.exit(ending)


def main() -> None:
    args = results.parse(parser())
    if args.what == "merge":
        merge(args.folder, args.runs)
        return
    cases = {SAMPLES / f"{task}-{length}.zip": (task, length) for task in args.task.split(",") for length in args.lengths}
    make_samples(args, cases) if args.what == "samples" else answer(args, cases)


if __name__ == "__main__":
    main()
