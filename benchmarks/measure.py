"""How the benchmarks measure: interleaved medians of CUDA events, CUDA graphs, outputs poisoned beforehand, float64 on
sampled rows.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from .problem import DEVICE, Run, Shape

L2_FLUSH = 256 << 20  # bytes written or read between runs: five times an H100's L2
MOST_REPEATS = 50
MOST_DECODED = 16  # queries of a sequence in a decode step


# Time


def interleaved(
    calls: Mapping[str, Callable],
    rounds: int,
    *,
    sample_ms: float = 0,
    flush: bool = False,
    before: Callable = lambda: None,
) -> dict[str, float]:
    """Median time of each call in milliseconds. Each round runs every call once, in a new random order.

    Args:
        sample_ms: a call runs so long between its two events, and the mean of these runs is one sample; 0: once.
        flush: write over the L2 cache before every sample.
        before: runs before each sample, outside of it.
    """
    repeats = dict.fromkeys(calls, 1)
    if sample_ms:
        once = interleaved(calls, 5, flush=flush)
        repeats = {name: max(1, min(MOST_REPEATS, int(sample_ms / max(ms, 0.01)))) for name, ms in once.items()}
    waste = torch.empty(L2_FLUSH if flush else 0, dtype=torch.uint8, device=DEVICE)
    events: dict[str, list] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before()
            waste.zero_()
            start.record()
            for _ in range(repeats[name]):
                calls[name]()
            end.record()
            events[name].append((start, end))
        torch.cuda.synchronize()
    return {
        name: statistics.median(start.elapsed_time(end) for start, end in pairs) / repeats[name]
        for name, pairs in events.items()
    }


def between_reads(call: Callable, rounds: int, *, steps: int = 16, before: Callable = lambda: None) -> float:
    """The time in milliseconds that `call` adds to a CUDA graph whose other kernels read more than the L2 cache holds.

    A model's decode step is such a graph: attention has left the cache full of clean lines of K and V. (`interleaved`
    flushes by writing: the lines are dirty, and the next kernel waits for them to be written back.) The lines that
    `call` dirties are written back while the next kernel reads, so that is counted too.

    Args:
        steps: pairs of a read and `call` in a graph; the same graph without `call` is subtracted.
        before: runs before each sample, outside of it.
    """
    data, largest = (
        torch.ones(L2_FLUSH // 4, dtype=torch.int32, device=DEVICE),
        torch.empty((), dtype=torch.int32, device=DEVICE),
    )

    def pairs(body: Callable) -> None:
        for _ in range(steps):
            torch.amax(data, 0, out=largest)
            body()

    bodies = {"with": call, "without": lambda: None}
    times = interleaved(
        {name: graph_of(lambda body=body: pairs(body))[0] for name, body in bodies.items()}, rounds, before=before
    )
    return (times["with"] - times["without"]) / steps


def graph_of(call: Callable) -> tuple[Callable, object]:
    """The call as a CUDA graph, so that the host's speed does not matter: (replay, the result, which every replay
    overwrites). The graph does not keep the tensors alive that the call reads."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        result = call()
    return captured.replay, result


def timed(
    shape: Shape, rows: Mapping[str, dict], calls: Mapping[str, Callable], rounds: int, **options
) -> Iterator[dict]:
    """The row of each implementation: `ms`, and for a decode step `gbps` of the live K and V, for a prompt `tflops`."""
    for impl, ms in interleaved(calls, rounds, **options).items():
        if max(shape.queries) <= MOST_DECODED:
            speed = {"gbps": round(shape.kv_elements * (2 if impl.endswith("bf16") else 1) / ms * 1e-6, 1)}
        else:
            speed = {"tflops": round(shape.flops / ms * 1e-9, 1)}
        yield rows[impl] | {"ms": round(ms, 5)} | speed


# What is right


@contextmanager
def poisoned():
    """A context in which every floating-point `torch.empty` is filled with NaN, so that an output or partial sum that a
    kernel does not write becomes visible."""
    empty = torch.empty

    def nan(*args, **kwargs):
        x = empty(*args, **kwargs)
        return x.fill_(torch.nan) if x.is_floating_point() and x.element_size() > 1 else x

    with mock.patch.object(torch, "empty", nan):
        yield


def left_out(name: str, why: str | Exception) -> None:
    """Print that a case has no result of an implementation, with the first line of the reason."""
    print(f"   {name} is left out: {str(why).strip().splitlines()[0][:160]}", flush=True)


def outputs(case: str, runs: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The outputs of the implementations. A peer that cannot run the case is left out; an error of ours is raised."""
    for impl, run in runs.items():
        try:
            out = run.call()
            torch.cuda.synchronize()
        except Exception as problem:  # cuDNN and torchao raise types of their own
            if impl.startswith("fp8attn"):
                raise
            left_out(f"{case} {impl}", problem)
            continue
        yield impl, run, out


def sampled_queries(queries: int) -> list[int]:
    """Indices of queries: blocks of 32 from a sequence's start, middle and end. The first rows of a prompt see few
    keys, the last ones most."""
    starts = {0, max(queries // 2 - 16, 0), max(queries - 32, 0)}
    return sorted({i for start in starts for i in range(start, min(start + 32, queries))})


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, last_key: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of some queries of one sequence in float64.

    Args:
        q: `[n, num_q_heads, head_dim]`, any dtype, as the others.
        k, v: `[length, num_kv_heads, head_dim]`.
        last_key: `[n]`, the last key that each query sees, -1 for none; None: all.
    Returns:
        `[n, num_q_heads, head_dim]` float64; zeros where a query sees no key.
    """
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    hidden = None if last_key is None else torch.arange(len(k), device=q.device) > last_key[:, None]
    for head in range(k.shape[1]):  # by KV head: a million keys in float64 are not held for all of them
        heads = slice(head * group, (head + 1) * group)
        s = q[:, heads].double() @ k[:, head].double().T * softmax_scale  # [n, group, length]
        if hidden is not None:
            s.masked_fill_(hidden[:, None], -torch.inf)
        if len(k):
            weights = torch.softmax(s, -1).masked_fill_(s.amax(-1, keepdim=True) == -torch.inf, 0.0)
            out[:, heads] = weights @ v[:, head].double()
    return out


def relative(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """`||out - ref|| / ||ref||` over all `(out, ref)` pairs together; NaN if any out has one."""
    wrong = sum(float((out.double() - ref).square().sum()) for out, ref in pairs)
    return (wrong / sum(float(ref.square().sum()) for _, ref in pairs)) ** 0.5


def error(shape: Shape, out: torch.Tensor, run: Run, seqs: Sequence[int] | None = None) -> float:
    """Relative error of sampled queries of some sequences, by default the first and the last, against float64 on what
    the run was given.
    """
    pairs = []
    for seq in sorted({0, len(shape.keys) - 1}) if seqs is None else seqs:
        index = torch.tensor(sampled_queries(shape.queries[seq]), device=out.device, dtype=torch.long)
        rows = index + shape.rows(seq).start
        pairs.append(
            (
                run.unit * out[rows].double(),
                exact(run.q[rows], *run.held(seq), shape.softmax_scale, shape.last_key(seq, index)),
            )
        )
    return relative(pairs)


def checked(
    case: str, runs: Mapping[str, Any], most: float, errors: Callable
) -> tuple[dict[str, dict], dict[str, Callable]]:
    """The rows of implementations with their errors, and their CUDA graphs.

    Args:
        errors: `errors(run, out)`, by name.
    Raises:
        AssertionError: one of ours is farther from float64 than `most`, or its graph gives other bits than its call.
    """
    rows, replays = {}, {}
    for impl, run, out in outputs(case, runs):
        replays[impl], held = graph_of(run.call)
        replays[impl]()
        torch.cuda.synchronize()
        off = errors(run, held)
        rows[impl] = {"case": case, "impl": impl} | off
        if impl.startswith("fp8attn") and not (
            all(x <= most for x in off.values()) and all(map(torch.equal, held, out))
        ):
            raise AssertionError(f"{case}: {impl} is wrong, {off}")
    return rows, replays
