"""Prompts and decode steps in vLLM, with its caches in BF16 and FP8 and with the plugin: engines of models' shapes.

It needs an environment with vLLM 0.33, which was measured, and this package. `mla16`, `mla64` and `mla128` are latent
attention with so many heads. Weights are random, and equal for all caches. The engines of a group, each in a process of
its own, start side by side and stay until a case of another group comes; their logs are in $OUT, or in the folder for
temporary files. They measure in turns, prompt by prompt, and some steps each.
Groups are the shapes, and two more of Llama's shape: `llama_drafts`, whose steps verify three drafts by n-grams of each
sequence; and `llama_per_token`, with vLLM's caches of a scale for each token and head.

- `GROUP-check` is measured at the start of the engines: how far log-probabilities of prompts and of greedy tokens are
  from those of BF16.
- `GROUP-prefill-S2048`: `ms` of a prompt alone to its first token, by `LLM.generate`.
- `mla16-alone-B66-S32768`: how far log-probabilities of a request's decode steps are from those of BF16 if it is alone
  (`nats_from_bf16`), and among 65 others from its own alone (`nats_from_alone`).
- `mla16-hit-S32768`: the same of a request whose prompt is in the prefix cache (`cached_tokens` of it): from those of
  BF16, and from its own of before (`nats_from_first`).
- `GROUP-decode-B16-S2048`: `ms` of an engine's step in which 16 sequences of 2,048 tokens make a token each, or with
  drafts at least one.

Both have all that vLLM does around attention. Of a last turn, torch's profiler gives the time of all kernels
(`kernels_ms`), of those of attention (`attention_ms`), and from the beginning of the first to the end of the last
(`span_ms`).

TINY=1 measures tiny layers, also on a CPU: whether all of it runs. `llama_per_token` needs a GPU with 120 GiB.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from . import vllm_engine
from .beside import Beside
from .measure import left_out
from .vllm_models import TINY

PROCESSES = True
IMPLS = ("vllm-bf16", "fp8attn", "vllm-fp8")
PER_TOKEN = ("vllm-bf16", "fp8attn", "vllm-int8-per-token-head", "vllm-fp8-per-token-head", "vllm-int4-per-token-head")
LATENT_IMPLS = IMPLS[:2] if TINY else ("vllm-bf16", "vllm-flashmla", "fp8attn", "vllm-flashmla-fp8")
ALONE = ((8, 8192), (66, 8192), (66, 32768), (8, 131072))
PROMPTS = {300: 2} if TINY else {2048: 8, 8192: 6, 32768: 3}  # tokens: repetitions
STEPS = ((2, 300),) if TINY else ((16, 2048), (8, 8192), (4, 32768))  # sequences, tokens
SMALL_STEPS = ((1, 1024), (4, 1024), (8, 1024), (1, 8192), (2, 8192))
DRAFT_STEPS = ((1, 1024), (8, 1024), (1, 8192), (8, 8192), (16, 2048))


class Group(NamedTuple):
    """Engines that measure in turns.

    Attributes:
        shape: of `vllm_models.MODELS`.
        impls: the engines.
        long: tokens of a further prompt, and of a step with one sequence; 0: none.
        steps: as `STEPS`.
        alone: sequences and tokens, as `STEPS`, of requests that are alone and among others.
        hit: tokens of a prompt that is in the prefix cache; 0: none.
        prompts: tokens of prompts that are timed.
        drafts: of each sequence in a step, by n-grams.
    """

    shape: str
    impls: tuple[str, ...] = IMPLS
    long: int = 0
    steps: tuple[tuple[int, int], ...] = STEPS
    alone: tuple[tuple[int, int], ...] = ()
    hit: int = 0
    prompts: tuple[int, ...] = tuple(PROMPTS)
    drafts: int = 0


GROUPS = {
    "llama": Group("llama", long=0 if TINY else 131072, steps=STEPS if TINY else (*STEPS, *SMALL_STEPS, (64, 2048))),
    "gemma3": Group("gemma3"), "gemma4": Group("gemma4"),
    "llama_drafts": Group("llama", steps=STEPS if TINY else DRAFT_STEPS, prompts=(), drafts=3),
    "llama_per_token": Group("llama", PER_TOKEN, steps=STEPS[:2]),  # five engines have no room for the third
    **{
        f"mla{heads}": Group(
            f"mla{heads}", LATENT_IMPLS, 0 if TINY or heads > 16 else 131072,
            ((2, 300),) if TINY else ((1, 8192), (16, 8192), (64, 8192)),
            ((3, 300),) if TINY else ALONE if heads == 16 else ALONE[:2],
            300 if TINY else 32768,
        )
        for heads in (16, 64, 128)
    },
}  # fmt: skip
LARGE_GIB = 120  # of a GPU's memory, where the engines of any group have room
MOST_TOKENS = 65536  # of a case on other GPUs, if the group has a long one
TURNS, TURN = (2, 3) if TINY else (6, 16)  # of steps, and steps of a turn; the first one of each turn is not timed
SECONDS = 300  # for an answer of an engine
TOO_FAR = 1.0  # nats from BF16; two unrelated models are about 4 apart


def _cases() -> Iterator[str]:
    for name, group in GROUPS.items():
        yield f"{name}-check"
        yield from (f"{name}-prefill-S{length}" for length in (*group.prompts, *([group.long] if group.long else [])))
        yield from (
            f"{name}-decode-B{batch}-S{length}"
            for batch, length in (*group.steps, *([(1, group.long)] if group.long else []))
        )
        yield from (f"{name}-hit-S{length}" for length in [group.hit] if length)
        yield from (f"{name}-alone-B{batch}-S{length}" for batch, length in group.alone)


CASES = tuple(_cases())


def measure(case: str) -> Iterator[dict]:
    name, kind, *sizes = case.split("-")
    numbers = [int(size[1:]) for size in sizes]
    if (
        GROUPS[name].impls is PER_TOKEN or (GROUPS[name].long and math.prod(numbers) > MOST_TOKENS)
    ) and not _is_large():
        left_out(case, f"it needs a GPU with {LARGE_GIB} GiB")
        return
    engines = Engines.of(name)
    if kind in ("check", "alone", "hit"):
        found = engines.checks if kind == "check" else getattr(engines, kind)(*numbers)
        yield from ({"case": case, **row} for row in found)
        return
    times = engines.prompts(*numbers) if kind == "prefill" else engines.steps(*numbers)
    for impl, milliseconds in times.items():
        ms = round(statistics.median(milliseconds), 4)
        yield {
            "case": case,
            "impl": impl,
            "ms": ms,
            "all_ms": [round(one, 3) for one in milliseconds],
            **engines.profiles[impl],
        }


def releases() -> dict[str, str]:
    """What runs the engines."""
    return {"vllm": f"vllm {version('vllm')}"}


def end() -> None:
    Engines.end()


def _nats(found: list[tuple[int, dict[int, float]]], expected: list[tuple[int, dict[int, float]]]) -> float:
    """The mean difference of log-probabilities that both have, of steps after which both have the same tokens. The
    first token is the prompt's, which does not read the cache.
    """
    steps = []
    for (token, likely), (other, others) in zip(found, expected, strict=True):
        steps.append(statistics.fmean(abs(likely[key] - others[key]) for key in likely.keys() & others.keys()))
        if token != other:
            break
    return statistics.fmean(steps[1:] or [math.nan])


def _is_large() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory > LARGE_GIB << 30


class Engines:
    """The engines of a group, by implementation.

    Attributes:
        checks: how far each is from BF16.
        profiles: of the kernels of what was measured last.
    """

    running: Engines | None = None

    def __init__(self, name: str) -> None:
        self.name, self.group, self.profiles = name, GROUPS[name], {}
        self.folder = (
            tempfile.TemporaryDirectory()
        )  # where vLLM finds the plugin of this checkout, and keeps what it compiles
        info = Path(self.folder.name) / "fp8attn-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fp8attn\nVersion: 0\n")
        (info / "entry_points.txt").write_text("[vllm.general_plugins]\nfp8attn = fp8attn.integrations.vllm:register\n")
        self.processes = {impl: Beside(vllm_engine.serve, SECONDS) for impl in self.group.impls}
        try:
            self._start()
            self.checks = list(self._checked())
        except BaseException:
            self._stop()
            raise

    def _start(self) -> None:
        """Start the engines side by side, and beside them compile our kernels."""
        kernels = Beside(vllm_engine.compile_kernels, SECONDS)
        shape, long = self.group.shape, self.group.long if _is_large() else 0
        most = max(sequences for sequences, _ in (*self.group.steps, *self.group.alone))
        start = lambda impl: self.ask(  # noqa: E731
            impl, "start", shape, impl, self.folder.name, str(self.log(impl)), most, long, self.group.drafts
        )
        try:
            with ThreadPoolExecutor() as pool:
                ahead = None if TINY else pool.submit(kernels, shape)
                list(pool.map(start, self.processes))
                if ahead is not None:
                    ahead.result()
        finally:
            kernels.end()

    def _stop(self) -> None:
        for process in self.processes.values():
            process.end()
        self.folder.cleanup()

    @classmethod
    def of(cls, name: str) -> Engines:
        """The running engines, if they are of this group; otherwise new ones, in the memory of those that ran."""
        if cls.running is None or cls.running.name != name:
            cls.end()
            cls.running = cls(name)
        return cls.running

    @classmethod
    def end(cls) -> None:
        if cls.running is not None:
            cls.running._stop()
            cls.running = None

    def log(self, impl: str) -> Path:
        return Path(os.environ.get("OUT", tempfile.gettempdir())) / f"vllm-{self.name}-{impl}.log"

    def ask(self, impl: str, request: str, *arguments: Any) -> Any:
        """An engine's answer.

        Raises:
            RuntimeError: it ended, or took too long.
        """
        answer = self.processes[impl](request, *arguments)
        if answer is None:
            raise RuntimeError(
                f"{self.name} {impl} gave no answer to {request} within {SECONDS} s, or ended: {self.log(impl)} says "
                f"why"
            )
        return answer

    def ask_all(self, request: str, *arguments: Any) -> dict[str, Any]:
        """The answers of all engines to what is not timed: they work side by side."""
        with ThreadPoolExecutor() as pool:
            answers = pool.map(lambda impl: self.ask(impl, request, *arguments), self.processes)
            return dict(zip(self.processes, answers, strict=True))

    def _checked(self) -> Iterator[dict]:
        """The distances from BF16.

        Raises:
            RuntimeError: one is too far, or none: then K and V do not matter.
        """
        found = self.ask_all("check")
        exact, tokens = found["vllm-bf16"]
        for impl, (logprobs, greedy) in found.items():
            nats = statistics.fmean(abs(x - y) for x, y in zip(logprobs, exact, strict=True))
            if not nats < TOO_FAR or ((nats == 0) != (impl == "vllm-bf16") and impl != "vllm-flashmla"):
                raise RuntimeError(f"{self.name} {impl} is {nats} nats from BF16: wrong answers are not timed")
            equal = sum(x == y for x, y in zip(greedy, tokens, strict=True))
            yield {"impl": impl, "nats_from_bf16": round(nats, 4), "tokens_equal": f"{equal} of {len(tokens)}"}

    def alone(self, batch: int, length: int) -> Iterator[dict]:
        """How far a request is from BF16's alone, and among others from its own alone."""
        found = self.ask_all("alone and among", batch, length)
        for impl, (alone, among) in found.items():
            yield {
                "impl": impl,
                "nats_from_bf16": round(_nats(alone, found["vllm-bf16"][0]), 5),
                "nats_from_alone": round(_nats(among, alone), 5),
            }

    def hit(self, length: int) -> Iterator[dict]:
        """How far a request that the prefix cache has is from BF16's, and from its own of before."""
        found = self.ask_all("again", length)
        for impl, (first, again, cached) in found.items():
            yield {
                "impl": impl,
                "cached_tokens": cached,
                "nats_from_bf16": round(_nats(again, found["vllm-bf16"][0]), 5),
                "nats_from_first": round(_nats(again, first), 5),
            }

    def turns(self, count: int, request: str, *arguments: Any) -> dict[str, list]:
        """The answers of all engines in `count` turns, each in another order."""
        found: dict[str, list] = {impl: [] for impl in self.processes}
        for turn in range(count):
            for impl in random.sample(list(self.processes), len(self.processes)):
                found[impl].append(self.ask(impl, request, *arguments, turn))
        return found

    def prompts(self, length: int) -> dict[str, list[float]]:
        """Milliseconds of prompts to their first tokens."""
        if length in PROMPTS:
            self.turns(1, "prompt", length)  # it may compile
        times = self.turns(PROMPTS.get(length, 2), "prompt", length)
        self.profiles = {impl: self.ask(impl, "profile", "prompt", length, 0) for impl in self.processes}
        return times

    def steps(self, batch: int, length: int) -> dict[str, list[float]]:
        """Milliseconds of steps. All engines keep their sequences while the others make steps."""
        self.ask_all("begin", batch, length, (TURNS + 3) * TURN * (1 + self.group.drafts))
        times = self.turns(TURNS, "steps", batch, TURN)
        self.profiles = {impl: self.ask(impl, "profile", "steps", batch, TURN, 0) for impl in self.processes}
        self.ask_all("finish")
        return {impl: [ms for turn in found for ms in turn] for impl, found in times.items()}
