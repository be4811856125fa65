"""How the benchmarks measure: interleaved medians of CUDA events, CUDA graphs, outputs poisoned beforehand, float64 on sampled rows."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from unittest import mock

import torch

from .problem import DEVICE

L2_FLUSH = 256 << 20  # bytes written or read between runs: five times an H100's L2


# Time


def interleaved(calls: dict[str, Callable], rounds: int, *, repeats: dict[str, int] | None = None, flush: bool = False) -> dict[str, float]:
    """Median milliseconds of each call, all of them once a round and in a new order every round.

    Args:
        repeats: how often a call runs between its two events (the mean of those is one sample); 1 by default.
        flush: write over the L2 cache before every sample.
    """
    waste = torch.empty(L2_FLUSH if flush else 0, dtype=torch.uint8, device=DEVICE)
    events: dict[str, list] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            waste.zero_()
            start.record()
            for _ in range(repeats[name] if repeats else 1):
                calls[name]()
            end.record()
            events[name].append((start, end))
        torch.cuda.synchronize()
    return {
        name: statistics.median(start.elapsed_time(end) for start, end in pairs) / (repeats[name] if repeats else 1)
        for name, pairs in events.items()
    }


def between_reads(call: Callable, rounds: int, *, steps: int = 16, before: Callable = lambda: None) -> float:
    """Milliseconds that `call` adds to a CUDA graph whose other kernels read more than the L2 cache holds.

    A model's decode step is such a graph: attention has left the cache full of clean lines of K and V. (`interleaved` flushes by writing:
    the lines are dirty, and whoever comes next waits for them to be written back.) The lines that `call` dirties are written back
    while the next kernel reads, so that is counted too.

    Args:
        steps: pairs of a read and `call` in a graph; the same graph without `call` is subtracted.
        before: runs before each sample, outside of it.
    """
    data, largest = torch.ones(L2_FLUSH // 4, dtype=torch.int32, device=DEVICE), torch.empty((), dtype=torch.int32, device=DEVICE)

    def graph(body: Callable) -> Callable:
        def pairs() -> None:
            for _ in range(steps):
                torch.amax(data, 0, out=largest)
                body()

        return graph_of(pairs)[0]

    replays = {True: graph(call), False: graph(lambda: None)}
    times: dict[bool, list] = {True: [], False: []}
    for _ in range(rounds):
        for with_call in random.sample([True, False], 2):
            before()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            replays[with_call]()
            end.record()
            times[with_call].append((start, end))
        torch.cuda.synchronize()
    medians = {key: statistics.median(start.elapsed_time(end) for start, end in pairs) for key, pairs in times.items()}
    return (medians[True] - medians[False]) / steps


def graph_of(call: Callable) -> tuple[Callable, object]:
    """The call as a CUDA graph, whose replay is the GPU's time and no host's: (replay, the result, which every replay writes anew).

    The graph does not keep alive what the call reads.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        result = call()
    return captured.replay, result


def in_processes(function: Callable, arguments: Iterable[tuple], jobs: int = 12) -> None:
    """`function(*arguments)` for each, in processes side by side: what they compile, this process finds in Triton's cache."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for future in [pool.submit(function, *each) for each in arguments]:
            future.result()


class Beside:
    """`function` in a process beside this one. A kernel that hangs ends with its process only, and should not take the rest along."""

    def __init__(self, function: Callable, seconds: float) -> None:
        self.function, self.seconds, self.process = function, seconds, None

    def __call__(self, *arguments):
        """What the function returns; None if it raised, crashed or gave no answer in `seconds`: the next call begins a new process then."""
        if self.process is None:
            context = get_context("spawn")
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(target=_serve, args=(self.function, theirs), daemon=True)
            self.process.start()
            theirs.close()
        self.pipe.send(arguments)
        try:
            if self.pipe.poll(self.seconds):
                return self.pipe.recv()
        except EOFError:
            pass
        self.end()
        return None

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None


def _serve(function: Callable, pipe) -> None:
    while True:
        pipe.send(function(*pipe.recv()))


# What is right


@contextmanager
def poisoned():
    """Every floating-point `torch.empty` in here holds NaN: an output or a partial sum that nobody writes shows."""
    empty = torch.empty

    def nan(*args, **kwargs):
        x = empty(*args, **kwargs)
        return x.fill_(torch.nan) if x.is_floating_point() and x.element_size() > 1 else x

    with mock.patch.object(torch, "empty", nan):
        yield


def sampled_queries(queries: int) -> list[int]:
    """Blocks of 32 from a sequence's start, middle and end: the first rows of a prompt see few keys, the last most."""
    starts = {0, max(queries // 2 - 16, 0), max(queries - 32, 0)}
    return sorted({i for start in starts for i in range(start, min(start + 32, queries))})


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, last_key: torch.Tensor | None = None) -> torch.Tensor:
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
