"""The attention of an engine's step: a chunk of a prompt beside decode steps, in one CUDA graph, compared with its
peers.

Llama-3.1-8B's heads (32 query heads, 8 KV heads of 128), in shuffled pages. `C2k-beside-64` is a prompt's first 2,048
tokens beside 64 decode steps over 512 to 16,384 tokens (their logarithms evenly spread); `-at-32k` are the chunk's
2,048 queries the last of 32,768 tokens. `fp8attn` is two calls of `ops.attention`, decode steps and then prompts, as
the plugin for vLLM makes them, with BF16 queries. `vllm-fa3-fp8` and `-bf16` are one call of vLLM's kernel for all,
`-split` two; `flashinfer` and `hpc-ops` are their two kernels. Queries of the FP8 peers are in FP8 already (XQA rounds
its own): the kernel that rounds them is not timed. Errors are against float64 on the bytes
that each was given: `rel_err` of the chunk, `rel_err_decode` of the first decode step. L2 is flushed before every run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from fp8attn import ops

from . import peers
from .measure import checked, error, timed
from .problem import K, Run, Shape, hold, offsets

HEADS, KV_HEADS, DIM = 32, 8, 128
SHORTEST, LONGEST = 512, 16 * K  # tokens of the decode steps
DECODES = (32, 64, 128, 256)
WHOLE = ("vllm-fa3-fp8-paged", "vllm-fa3-bf16-paged")  # peers whose kernel takes a whole step
PAIRS = ("flashinfer", "hpc-ops")  # peers with a kernel for decode steps and one for prompts
MOST_ERROR = 0.05  # P in FP8: 2.5% with values of mean zero


def step(decodes: int, chunk: int, at: int = 0) -> Shape:
    """Decode steps, then a chunk of a prompt that ends at token `at`; 0: the prompt's first chunk."""
    spread = (LONGEST / SHORTEST) ** (1 / max(decodes - 1, 1))
    keys = [round(SHORTEST * spread**i) for i in range(decodes)]
    random.Random(0).shuffle(keys)
    return Shape((*keys, at or chunk), (1,) * decodes + (chunk,), HEADS, KV_HEADS, DIM, True)


CASES = {f"C{chunk}k-beside-{decodes}": step(decodes, chunk * K) for chunk in (2, 8) for decodes in DECODES} | {
    f"C2k-at-32k-beside-{decodes}": step(decodes, 2 * K, 32 * K) for decodes in (32, 128)
}


def split(shape: Shape) -> tuple[Shape, Shape]:
    """The decode steps, and the chunk."""
    few, many = (
        replace(shape, keys=shape.keys[seqs], queries=shape.queries[seqs]) for seqs in (slice(-1), slice(-1, None))
    )
    return few, many


@dataclass(frozen=True)
class Step:
    """An implementation of a step: its calls, each of the whole shape or of a part."""

    parts: tuple[tuple[Shape, Run], ...]

    def call(self) -> list[torch.Tensor]:
        return [run.call() for _, run in self.parts]

    def errors(self, outs: list[torch.Tensor]) -> dict[str, float]:
        """Of the first decode step, and of the chunk."""
        (shape, run), (last_shape, last_run) = self.parts[0], self.parts[-1]
        off = error(shape, outs[0], run, [0]), error(last_shape, outs[-1], last_run, [len(last_shape.keys) - 1])
        return dict(zip(("rel_err_decode", "rel_err"), (round(x, 6) for x in off), strict=True))


def ours(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Step:
    pages = hold(shape, k, v)
    few, many = split(shape)
    decodes, parts = len(few.keys), []
    for part, seqs in ((few, slice(decodes)), (many, slice(decodes, None))):  # a decode step has one query
        here = replace(
            pages, page_table=pages.page_table[seqs].clone(), cache_seqlens=pages.cache_seqlens[seqs].clone()
        )
        bounds = {"cu_seqlens_q": offsets(part.queries), "max_seqlen_q": max(part.queries)}
        call = partial(
            ops.attention, q[seqs], here, softmax_scale=part.softmax_scale, out=torch.empty_like(q[seqs]), **bounds
        )
        held = lambda seq, here=here, part=part: here.read(seq, part.keys[seq], torch.float64)  # noqa: E731
        parts.append((part, Run(call, q[seqs], held)))
    return Step(tuple(parts))


def theirs(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Step]:
    """Peers with one call for all, and with one for each part."""
    few, many = split(shape)
    decodes, first = len(few.keys), sum(few.keys)
    whole = peers.runs(shape, q, k, v, WHOLE)
    names = (*whole, *PAIRS)
    found_few = peers.runs(few, q[:decodes], k[:first], v[:first], names)
    found_many = peers.runs(many, q[decodes:], k[first:], v[first:], names)
    steps = {name.removesuffix("-paged"): Step(((shape, run),)) for name, run in whole.items()}
    for name in names:
        if name in found_few and name in found_many:
            kernels = name.replace("-paged", "-split")
            steps[kernels] = Step(((few, found_few[name]), (many, found_many[name])))
    return steps


def calls(case: str) -> dict[str, Callable]:
    return {"fp8attn": ours(CASES[case], *CASES[case].inputs()).call}


def measure(case: str) -> Iterator[dict]:
    shape = CASES[case]
    inputs = shape.inputs()
    steps = {"fp8attn": ours(shape, *inputs)} | theirs(shape, *inputs)
    rows, replays = checked(case, steps, MOST_ERROR, Step.errors)
    yield from timed(shape, rows, replays, 20, flush=True)
