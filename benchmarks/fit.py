"""Measures the GPU that it runs on, and prints its entry for `fp8attn/kernels/devices.py`.

    python -m benchmarks.fit

A launch of `prefill` whose every CTA does `items` items of `tiles` tiles takes `launch + items * (item + tile * tiles)`
microseconds, and a launch of `combine` that reads `bytes` of partial outputs takes `once + byte * bytes`. Both are
fitted by least squares of relative errors. `launch` is left out of the entry: every way to cut a problem has it. What
is not fitted (the bytes of L2, decode's numbers) stays as it is in `devices.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from unittest import mock

import torch

from fp8attn.kernels import combine, devices, prefill
from fp8attn.kernels.devices import Chip, Cost
from fp8attn.kernels.launch import num_sms

from . import problem
from .measure import graph_of, interleaved

HEADS, TILES = (
    (1, 2, 4),
    (6, 16, 64),
)  # items of a CTA, and their tiles of 128 keys; those of few keys have a path of their own
SPLITS, TOKENS, Q_HEADS, HEAD_DIM = (2, 3, 5), (256, 1024, 4096), 32, 128  # what `combine` puts together
IN_A_GRAPH, ROUNDS = 4, 15  # launches in a CUDA graph, and its replays


def least_squares(terms: Sequence[Sequence[float]], times: Sequence[float]) -> list[float]:
    """The factors of the terms. They minimize the squared relative errors of the sums against the times."""
    x, y = torch.tensor(terms, dtype=torch.float64), torch.tensor(times, dtype=torch.float64)
    return torch.linalg.lstsq(x / y[:, None], torch.ones_like(y)[:, None], driver="gelsd").solution[:, 0].tolist()


def fit_prefill(times: dict[tuple[int, int], float]) -> Cost:
    """Fits the times (microseconds) of launches in which every CTA computes `(items, tiles of each item)`."""
    _, item, tile = least_squares([(1, items, items * tiles) for items, tiles in times], list(times.values()))
    return Cost(_digits(tile, 3), _digits(item, 2))


def fit_combine(times: dict[int, float]) -> tuple[float, float]:
    """Fits the times (microseconds) of launches by the bytes of partial outputs that they read."""
    once, byte = least_squares([(1, size) for size in times], list(times.values()))
    return _digits(once, 2), _digits(byte, 2)


def _digits(x: float, digits: int) -> float:
    return float(f"{x:.{digits}g}")


def entry(chip: Chip) -> str:
    """The Python expression that makes `chip`."""
    return "\n".join(["Chip(", *(f"    {field.name}={getattr(chip, field.name)!r}," for field in fields(chip)), ")"])


def microseconds(calls: dict) -> dict:
    """The time of one launch of each call, in microseconds."""

    def repeated(call):
        return lambda: [call() for _ in range(IN_A_GRAPH)]

    replays = {name: graph_of(repeated(call))[0] for name, call in calls.items()}
    return {name: 1e3 * ms / IN_A_GRAPH for name, ms in interleaved(replays, ROUNDS).items()}


def time_prefill(width: int, shape: prefill.cut.Shape) -> dict[tuple[int, int], float]:
    """The times (microseconds) of one shape of the kernel, by a CTA's items and their tiles. A head has as many items
    as there are multiprocessors."""
    calls = dict(prefill_calls(width, shape.rows * num_sms(torch.device("cuda", torch.cuda.current_device()))))
    with only(shape):
        return microseconds(calls)


@contextmanager
def only(shape: prefill.cut.Shape) -> Iterator[None]:
    """Patches the plan: launches of `prefill` have this shape, and do not split the keys."""
    prefill.plan.make_prefill_plan.cache_clear()
    with mock.patch.object(prefill.plan, "best_cut", return_value=(shape, 1)):
        yield
    prefill.plan.make_prefill_plan.cache_clear()


def prefill_calls(width: int, queries: int) -> Iterator[tuple[tuple[int, int], Callable]]:
    for tiles in TILES:
        k, v = problem.randn(2, tiles * 128, 1, width)
        for heads in HEADS:
            shape = problem.Shape((tiles * 128,), (queries,), heads, 1, width, causal=False)
            q = problem.randn(queries, heads, width)
            yield (heads, tiles), problem.ours(prefill.prefill_attention, shape, q, problem.hold(shape, k, v))


def time_combine() -> dict[int, float]:
    """Microseconds by bytes of partial outputs."""
    calls = {}
    for splits in SPLITS:
        for tokens in TOKENS:
            parts = torch.randn(splits, tokens * Q_HEADS, HEAD_DIM, device=problem.DEVICE)
            lse = torch.randn(2, splits, tokens * Q_HEADS, device=problem.DEVICE)
            out = torch.empty(tokens, Q_HEADS, HEAD_DIM, device=problem.DEVICE, dtype=torch.bfloat16)
            args = parts, lse, None, out, torch.empty(tokens, Q_HEADS, device=problem.DEVICE)
            calls[4 * parts.numel()] = lambda args=args: combine.combine(*args)
    return microseconds(calls)


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.fit measures a GPU, and PyTorch finds none")
    device = torch.device("cuda", torch.cuda.current_device())
    costs = {}
    for width, shapes in prefill.cut.SHAPES.items():
        for shape in shapes:
            times = time_prefill(width, shape)
            costs[width, shape.warpgroups] = cost = fit_prefill(times)
            print(
                f"# head_dim {width}, {shape.warpgroups} warpgroups: {cost}; microseconds by items and tiles: {times}",
                flush=True,
            )
    print(f"# combine, microseconds by bytes: {(times := time_combine())}", flush=True)
    name = torch.cuda.get_device_name(device)
    measured = replace(devices.chip(device), name=name, prefill=costs, combine=fit_combine(times))
    print(entry(measured))


if __name__ == "__main__":
    main()
