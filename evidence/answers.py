"""The answers of runs of `needle` to RULER's samples: which of them are kept, and how the answers of several runs are merged and counted.

A results folder has the rows in `needle.json` and all answers beside it. Provenance and fingerprint are of an implementation: a change of
our kernels leaves other systems' answers as they are. Answers count if they are of this machine, torch and Triton, and if the code of
their implementation is what it was (`fingerprint.of_row`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from benchmarks.needle_systems import IMPLS
from fp8attn_tools.evaluation.outcomes import Outcome, load_outcomes, save_outcomes
from fp8attn_tools.evaluation.paired import compare, wilson

from . import results
from .fingerprint import ROOT, of_row

OUTCOMES = ROOT / ".needle/outcomes"  # of runs that have not ended, in a folder each
NAME, KEPT = "needle.json", "needle.jsonl.xz"
SAME = ("torch", "triton", "fingerprint")  # of a provenance: answers that differ in one are not mixed


def key(outcome: Outcome) -> tuple:
    return (outcome.cache, *outcome.sample)


@dataclass(frozen=True)
class Answers:
    """The answers of one or more runs on one machine.

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
    """The answers in a folder of results, or in a folder that `begin` made."""
    there = json.loads((folder / NAME).read_text())
    files = sorted(folder.glob("needle*.jsonl*"))
    return Answers(folder, there["meta"], there["provenance"], [outcome for file in files for outcome in load_outcomes(file)])


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


def earlier(machine: dict, now: dict[str, dict]) -> list[Answers]:
    """The answers that a run does not repeat: those of earlier runs, and of runs that were killed. Prints which ones are not kept, and
    why."""
    files = (results.RESULTS / results.slug(machine["device"]) / NAME, *sorted(OUTCOMES.glob(f"*/{NAME}")))
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
    save_outcomes(folder / KEPT, outcomes.values())
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
