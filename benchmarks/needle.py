"""RULER's retrieval through BF16, through our caches, and through the FP8 kernels of others, on the same samples of one model.

    python -m benchmarks.needle samples --task niah_multikey_2 --lengths 4096,131072  # needs fp8attn[ruler], and no GPU
    python -m benchmarks.needle run --task niah_multikey_2 --lengths 4096,131072 [--stress 0,3] [--impl bf16,fp8attn] [--seconds 500]
    python -m benchmarks.needle merge results/h200 /tmp/a/results/h200 /tmp/b/results/h200  # of runs in two checkouts, and needs no GPU

`samples` writes `.needle/`, which git ignores. `run` asks every implementation for an answer to each of them, a process a GPU, each with
every n-th sample, and writes `results/h200/needle.json` and all answers beside it. Meanwhile they go to `.needle/outcomes/`, line by line:
what a run that was killed leaves there counts in the next. Earlier answers are kept and not asked for again where they are of this device,
torch and Triton, and the sources of their implementation are unchanged: our kernels make nobody else's answers stale. `merge` puts together
what runs answered side by side, each in a checkout of its own.

What is measured is RULER's, but that an answer ends with its first line, for everybody: the model writes a value and a line end.

Others' kernels take K and V in rows with one scale for a whole tensor, as engines do: one (the default where a checkpoint has none), or
`:calibrated`, of Q, K and V, on the text that `fp8attn-static` sees. `:means` removes the means of K and V as our caches do, but those of a
prompt's every token, where ours are estimated from 128. cuDNN's FP8 takes no prompts of unlike lengths side by side and plans anew for each
length; it is not among them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer

from fp8attn import KVScales, calibrate
from fp8attn.evaluation import models, needle, ruler
from fp8attn.evaluation.caches import BF16Cache, MakeCache, cache_factory, prefill
from fp8attn.evaluation.needle import Outcome, Sample
from fp8attn.evaluation.paired import compare, wilson
from fp8attn.evaluation.stress import STRENGTHS, plant
from fp8attn.numerics import E4M3, quantize

from . import peers
from .problem import Shape
from .results import ROOT, about, hashes, save

SAMPLES = ROOT / ".needle"
OUTCOMES = SAMPLES / "outcomes"  # of runs that have not ended, in a folder each
RESULTS, KEPT = (ROOT / f"results/h200/needle.{ending}" for ending in ("json", "jsonl.xz"))
OURS = {"fp8attn": "fp8", "fp8attn-static": "fp8-static", "fp8attn-no-means": "fp8-no-means"}
KERNELS = {"bf16": peers.fa3, "fa3-fp8": peers.fa3, "vllm-fa3-fp8": peers.vllm_fa3}
NEEDS = {"bf16": "fa3", "fa3-fp8": "fa3", "vllm-fa3-fp8": "vllm-fa3"}
OPTIONS = ("", ":calibrated", ":means", ":calibrated+means")
IMPLS = ("bf16", *OURS, *(f"{kernel}{options}" for kernel in KERNELS if kernel != "bf16" for options in OPTIONS))
BATCH_TOKENS = 1 << 21  # 16 prompts of 131,072: 13 GB of K and V in BF16, and twice that for one layer's activations
CALIBRATION = (8192, 4)  # tokens of a window, windows
SHARED_SOURCES = (  # what everybody's answers depend on; of the layout and the numerics, what FP8 is and how it is rounded to
    *("benchmarks/needle.py", "src/fp8attn/layout.py", "src/fp8attn/numerics.py"),
    *(f"src/fp8attn/evaluation/{name}.py" for name in ("caches", "models", "needle", "ruler", "stress")),
    "models/stdlib-llama/model.safetensors",
)
OUR_SOURCES = (  # and ours besides
    *("src/fp8attn/kernels", "src/fp8attn/integrations/transformers"),
    *(f"src/fp8attn/{name}.py" for name in ("backends", "cache", "calibrate", "ops", "scales")),
)
SOURCES = (*SHARED_SOURCES, *OUR_SOURCES, "src/fp8attn/evaluation/paired.py")  # the last counts answers, which it does not change
MACHINE = ("device", "torch", "triton")  # of a `meta`; answers on different ones are not mixed
ATTENTION = "kernel_over_rows"  # what transformers calls the kernels that are not ours
Scales = tuple[float, float, float]  # of Q, K and V


@dataclass(frozen=True)
class ScaledShape(Shape):
    """A shape whose softmax scale holds the scales of Q and K."""

    scales: float = 1.0

    @property
    def softmax_scale(self) -> float:
        return super().softmax_scale * self.scales


class Padding:
    """Which tokens are real, by a mask `[B, T]` of all in the cache, the last `length` of them new.

    Attributes:
        keys, queries: how many of each row are, in the cache and among the new ones.
        there, here: their places in the cache and among the new ones, rows one after another.
    """

    def __init__(self, mask: torch.Tensor | None, length: int) -> None:
        self.mask = mask
        if mask is not None:
            self.keys = tuple(mask.sum(1).tolist())
            self.queries = tuple(min(length, n) for n in self.keys)
            self.there, self.here = (x.flatten().nonzero()[:, 0] for x in (mask, mask[:, -length:]))


class Rows:
    """A kernel over rows of tokens, as an attention function of transformers. Padding is left out, so that lengths may be unlike.

    Args:
        kernel: of `peers`: `kernel(shape, q, k, v)` gives a call.
    """

    def __init__(self, kernel: Callable) -> None:
        self.kernel = kernel
        self.mask: torch.Tensor | None = None  # of the forward that runs
        self.padding = Padding(None, 0)

    def note(self, *_, attention_mask: torch.Tensor | None = None, **__) -> torch.Tensor | None:
        """The mask function of transformers, called once a forward, before its layers: the mask `[B, T]` as it is."""
        self.mask = attention_mask
        return attention_mask

    def __call__(self, module, query, key, value, attention_mask, scaling, **_) -> tuple[torch.Tensor, None]:
        """`query [B, num_q_heads, S, D]`; `key`, `value [B, num_kv_heads, T, D]`; `attention_mask [B, T]`, False for padding, or None."""
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        batch, length, heads, dim = query.shape
        total, kv_heads = key.shape[1:3]
        if attention_mask is None:
            shape = self.shape((total,) * batch, (length,) * batch, heads, kv_heads, dim, scaling)
            found = self.attend(module.layer_idx, shape, *(x.flatten(0, 1) for x in (query, key, value)))
            return found.unflatten(0, (batch, length)), None
        if self.padding.mask is not attention_mask:  # layers share it
            self.padding = Padding(attention_mask, length)
        real = self.padding
        shape = self.shape(real.keys, real.queries, heads, kv_heads, dim, scaling)
        given = ((query, real.here), (key, real.there), (value, real.there))
        found = self.attend(module.layer_idx, shape, *(_take(x, at) for x, at in given))
        out = found.new_zeros(batch * length, heads, dim)
        out[real.here] = found
        return out.unflatten(0, (batch, length)), None

    def shape(self, keys: tuple[int, ...], queries: tuple[int, ...], heads: int, kv_heads: int, dim: int, scaling: float) -> ScaledShape:
        return ScaledShape(keys, queries, heads, kv_heads, dim, True, scaling * dim**0.5)

    def attend(self, layer: int, shape: ScaledShape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention over rows `[tokens, heads, D]`."""
        return self.kernel(shape, q, k, v)()

    def cache(self, config: Any) -> Cache:
        """An empty cache that it reads."""
        return BF16Cache(config)


class RowsFP8(Rows):
    """Such a kernel in FP8, and the FP8 cache that it reads.

    Args:
        kernel: as of `Rows`.
        scales: of each layer's Q, K and V. None: one.
        means: remove each sequence's means of K and V, found over its first tokens to come (its prompt, or that one's first chunk), and
            restore V's.
    """

    def __init__(self, kernel: Callable, scales: list[Scales] | None, means: bool) -> None:
        super().__init__(kernel)
        self.scales, self.means = scales, means
        self.layers: list[FP8Rows] = []

    def attend(self, layer: int, shape: ScaledShape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        held = self.layers[layer]
        q_scale, k_scale, v_scale = held.scales
        shape = replace(shape, scales=shape.scales * q_scale * k_scale)
        out = self.kernel(shape, quantize(q, q_scale).contiguous(), k, v)().float() * v_scale
        if self.means:
            mean = held.v_mean[:, 0].repeat_interleave(shape.q_heads // shape.kv_heads, 1)
            out += mean.repeat_interleave(torch.tensor(shape.queries, device=out.device), 0)
        return out.to(q.dtype)

    def cache(self, config: Any) -> Cache:
        self.layers = [FP8Rows(scales, self) for scales in self.scales or [(1.0, 1.0, 1.0)] * config.num_hidden_layers]
        return Cache(layers=self.layers)


class FP8Rows(DynamicLayer):
    """A layer's K and V in FP8, token after token, with one scale each: `keys` and `values [B, num_kv_heads, T, D]`.

    Args:
        scales: of Q, K and V.
        rows: whose cache this is a layer of; it knows whether means are removed, and which tokens are padding.
    """

    def __init__(self, scales: Scales, rows: RowsFP8) -> None:
        super().__init__()
        self.scales, self.rows = scales, rows

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        new = [x.transpose(1, 2) for x in (key_states, value_states)]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.k_mean, self.v_mean = (torch.zeros_like(x[:, :1], dtype=torch.float32) for x in new)
        if self.rows.means:
            self.k_mean, self.v_mean = self.means(*new)
        low = [quantize(x - mean, s) for x, mean, s in zip(new, (self.k_mean, self.v_mean), self.scales[1:], strict=True)]
        if self.keys.numel():
            low = [_join(old.transpose(1, 2), x) for old, x in zip((self.keys, self.values), low, strict=True)]
        self.keys, self.values = (x.contiguous().transpose(1, 2) for x in low)
        return self.keys, self.values

    def means(self, *new: torch.Tensor) -> list[torch.Tensor]:
        """The means `[B, 1, num_kv_heads, D]` of K and of V, now that `new [B, S, num_kv_heads, D]` of each come: sequences of which no
        token was there get theirs, over those that are not padding."""
        batch, length = new[0].shape[:2]
        mask = self.rows.mask
        if mask is None:
            mask = torch.ones(batch, self.get_seq_length() + length, device=new[0].device)
        real = mask[:, -length:].float()
        begins = (mask.sum(1) == real.sum(1))[:, None, None, None]
        count = real.sum(1).clamp_min(1)[:, None, None, None]
        found = [torch.einsum("bshd,bs->bhd", x.float(), real)[:, None] / count for x in new]
        return [torch.where(begins, x, old) for x, old in zip(found, (self.k_mean, self.v_mean), strict=True)]


def _take(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Some rows of `x [B, T, heads, D]`, `[rows, heads, D]`; FP8 goes by its bytes, which a CPU has a gather for."""
    bits = x.view(torch.uint8) if x.itemsize == 1 else x
    return bits.flatten(0, 1)[rows].view(x.dtype)


def _join(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return torch.cat([old.view(torch.uint8), new.view(torch.uint8)], 1).view(old.dtype)


class _Largest(Rows):
    """Attention in 16 bits that notes the largest magnitudes of each layer's Q, K and V."""

    def __init__(self, kernel: Callable) -> None:
        super().__init__(kernel)
        self.found: dict[int, torch.Tensor] = {}

    def attend(self, layer: int, shape: ScaledShape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        now = torch.stack([x.float().abs().max() for x in (q, k, v)])
        self.found[layer] = torch.maximum(self.found.get(layer, now), now)
        return super().attend(layer, shape, q, k, v)


def tensor_scales(model: Any, windows: torch.Tensor) -> list[Scales]:
    """One scale for each layer's Q, K and V: the largest magnitude over windows `[N, S]` becomes FP8's largest."""
    seen = _Largest(KERNELS["bf16"])
    use(model, seen)
    for window in windows:
        prefill(model, window[None].to(model.device), seen.cache(model.config), chunk=len(window))
    return [tuple((seen.found[layer] / E4M3.max).tolist()) for layer in sorted(seen.found)]


def use(model: Any, rows: Rows) -> None:
    """Make a model attend by `rows`, whose caches it then needs."""
    AttentionInterface.register(ATTENTION, rows)
    AttentionMaskInterface.register(ATTENTION, rows.note)
    model.set_attn_implementation(ATTENTION)


def check(names: Sequence[str]) -> None:
    """Raises ValueError for a name that no implementation has."""
    for name in names:
        if name not in IMPLS:
            raise ValueError(f"no implementation is called {name!r}; choose from {', '.join(IMPLS)}")


class Systems:
    """The implementations, around one model. Scales come from `text [N, S]`."""

    def __init__(self, model: Any, text: torch.Tensor) -> None:
        self.model, self.text = model, text

    @cached_property
    def static(self) -> KVScales:
        return calibrate(self.model, self.text.split(1))

    @cached_property
    def scales(self) -> list[Scales]:
        return tensor_scales(self.model, self.text)

    def enter(self, name: str) -> MakeCache:
        """Make the model attend as `name` does; what makes its cache."""
        config = self.model.config
        if name in OURS:
            self.model.set_attn_implementation("fp8_kv")  # by which scales are found too, whoever was asked before
            scales = self.static if name == "fp8attn-static" else None
            return cache_factory(OURS[name], config, scales=scales)
        kernel, _, options = name.partition(":")
        rows = Rows(KERNELS[kernel])
        if kernel != "bf16":
            rows = RowsFP8(KERNELS[kernel], self.scales if "calibrated" in options else None, "means" in options)
        use(self.model, rows)
        return lambda: rows.cache(config)


@dataclass(frozen=True)
class Work:
    """What to ask of whom: `samples` (all if None) of each file in `.needle/`, of the model at each of the strengths of stress. Answers go
    to `folder`, from `begin`."""

    folder: Path
    model: str | None
    files: tuple[Path, ...]
    names: tuple[str, ...]
    strengths: tuple[int, ...]
    samples: int | None
    chunk: int
    batch_tokens: int
    deadline: float = float("inf")  # of `time.time`; then what is begun is ended, and no more
    done: frozenset[tuple] = frozenset()  # `key`s of what is not asked again

    def run(self, number: int = 0, processes: int = 1) -> None:
        """One process's part, on the GPU that it sees: sample `number` and every `processes`-th after it."""
        peers.available()  # which loads them
        with open(self.folder / f"{RESULTS.stem}-{number}.jsonl", "w", encoding="utf-8") as file:
            for strength in self.strengths:
                model, tokenizer = models.load(self.model)
                plant(model, STRENGTHS[strength])
                text = models.tokenize(tokenizer, models.read_text(None, self.model))
                systems = Systems(model, models.windows(text, *CALIBRATION, from_end=True))
                for path in self.files:
                    samples = [
                        replace(sample, task=sample.task + stressed(strength))
                        for sample in needle.load_samples(path, slice(number, self.samples, processes))
                    ]
                    for name in self.names:
                        todo = [sample for sample in samples if (name, sample.task, sample.length, sample.index) not in self.done]
                        if todo and time.time() < self.deadline:
                            self.ask(systems, tokenizer, name, todo, file)

    def ask(self, systems: Systems, tokenizer: Any, name: str, samples: list[Sample], file: Any) -> list[Outcome]:
        """The outcomes of one implementation on samples of one kind, also written into `file` as they come."""
        make, began = systems.enter(name), time.time()

        def in_time() -> Iterable[Sample]:
            for sample in samples:
                if time.time() > self.deadline:
                    return
                yield sample

        def note(outcome: Outcome) -> None:
            file.write(json.dumps(asdict(outcome)) + "\n")
            file.flush()

        limits = {"chunk": self.chunk, "batch_tokens": self.batch_tokens}
        heard = needle.ask(systems.model, tokenizer, in_time(), {name: make}, stop="\n", progress=note, **limits)
        share = sum(o.right for o in heard) / max(1, len(heard))
        print(f"{samples[0].task} {samples[0].length} {name}: {share:.1%} of {len(heard)}, {time.time() - began:.1f} s", flush=True)
        return heard


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


def stressed(strength: int) -> str:
    """What a task's name ends with."""
    return f"-stress{strength}" if strength else ""


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
    run.add_argument("--chunk", type=int, default=1 << 20, help="tokens of a prefill's forward; default: the whole prompt")
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
