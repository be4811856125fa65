"""RULER's retrieval through BF16, through our caches, and through the FP8 kernels of others, on the same samples of one model.

    python -m benchmarks.needle samples --task niah_multikey_2 --lengths 4096,131072  # needs fp8attn[ruler], and no GPU
    python -m benchmarks.needle run --task niah_multikey_2 --lengths 4096,131072 [--stress 0,3] [--impl bf16,fp8attn] [--seconds 500]
    python -m benchmarks.needle merge results/h200 /tmp/a/results/h200 /tmp/b/results/h200  # of runs in two checkouts, and needs no GPU

`samples` writes `.needle/`, which git ignores. `run` asks every implementation for an answer to each of them, a process a GPU, each with
every n-th sample, and with `--save` writes `results/<device>/needle.json` and all answers beside it. Meanwhile they go to
`.needle/outcomes/`, line by line: what a run that was killed leaves there counts in the next. `merge` puts together what runs answered
side by side, each in a checkout of its own.

This file is the command line. `needle_systems` decides answers, and `evidence.answers` keeps and counts them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterable
from multiprocessing import get_context
from pathlib import Path

import torch
from transformers import AutoTokenizer

from evidence import answers, results
from evidence.fingerprint import ROOT, of_row
from fp8attn_tools.evaluation import models, ruler
from fp8attn_tools.evaluation.names import RULER_TASKS
from fp8attn_tools.evaluation.outcomes import save_samples

from . import peers
from .needle_systems import IMPLS, NEEDS, OURS, Work

SAMPLES = ROOT / ".needle"


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


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = made.add_subparsers(dest="what", required=True)
    samples, run, merging = (verbs.add_parser(name) for name in ("samples", "run", "merge"))
    for verb in (samples, run):
        verb.add_argument("--model", help="a folder or Hugging Face id; default: the committed model")
        verb.add_argument("--task", default="niah_multikey_2", help="some of " + ", ".join(RULER_TASKS))
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
        save_samples(file, ruler.ruler_samples(tokenizer, task, lengths=(length,), samples=args.samples or 500))
        print(f"{file}: {file.stat().st_size / 1e6:.1f} MB", flush=True)


def ask(args: argparse.Namespace, files: Iterable[Path]) -> None:
    """Ask what earlier runs have not, and keep or print all answers."""
    names = args.impl.split(",")
    if unknown := [name for name in names if name not in IMPLS]:
        raise ValueError(f"no implementation is called {unknown[0]!r}; choose from {', '.join(IMPLS)}")
    here = tuple(name for name in names if name in OURS or NEEDS[name.partition(":")[0]] in peers.available())
    machine = results.meta()
    now = {name: results.provenance("needle") | {"fingerprint": of_row("needle", name)} for name in IMPLS}
    earlier, folder = answers.earlier(machine, now), answers.begin(machine, now)
    done = frozenset(answers.key(outcome) for run in earlier for outcome in run.outcomes)
    work = Work(folder, args.model, tuple(files), here, args.stress, args.samples, deadline=time.time() + args.seconds, done=done)
    ending = ""
    try:
        if failed := run_everywhere(work):
            ending = f"{failed} processes failed; what the others answered is kept"
    except KeyboardInterrupt:
        ending = "interrupted; what was answered is kept"
    runs = [run for run in (*earlier, answers.read(folder)) if run.outcomes]
    if args.save and runs:
        answers.keep(results.RESULTS / results.slug(machine["device"]), runs)
        shutil.rmtree(answers.OUTCOMES)
    else:
        print(*answers.rows([outcome for run in runs for outcome in run.outcomes]), sep="\n")
    if ending:
        sys.exit(ending)


def main() -> None:
    args = results.parse(parser())
    if args.what == "merge":
        answers.merge(args.folder, args.runs)
        return
    cases = {SAMPLES / f"{task}-{length}.zip": (task, length) for task in args.task.split(",") for length in args.lengths}
    make_samples(args, cases) if args.what == "samples" else ask(args, cases)


if __name__ == "__main__":
    main()
