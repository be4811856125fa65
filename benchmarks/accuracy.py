"""Errors of our kernels and the peers', at lengths from 1 to a million tokens.

A case is `{phase}-mean{mean of V}-D128-S{tokens}`. Phases: `causal`, a prompt; `full`, 128 queries that see every key;
`decode`, one query. `rel_err` is against float64 on the bytes that each system was given, over the first and the last
64 queries; `last` is over the last alone. `fp8attn` has 16-bit queries and keys of the default format,
`fp8attn-e4m3-keys` (or `-int8-keys`) keys of the other; `fp8attn-q8` has FP8 queries over E4M3 keys that are not
rotated, as the peers do. Outputs are NaN before the call, pages that no sequence holds and K behind a sequence's end
are 0x7F, and scales of such pages NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from fp8attn.kernels import decode, prefill

from . import peers
from .measure import exact, outputs, poisoned, relative
from .problem import DEVICE, KEYS, K, Run, Shape, own

HEADS = 2
SAMPLED = 64  # queries from each end that are compared
LENGTHS = (1, 17, 129, 512, 4096, 16384, 65536, 131072)
MILLION = K * K


class Case(NamedTuple):
    phase: str
    mean: float  # of V
    shape: Shape

    def runs(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Run]:
        """The implementations of fp8attn."""
        if self.phase == "decode":
            return own(decode.decode_attention, KEYS, self.shape, q.half(), k, v)
        return own(prefill.prefill_attention, (*KEYS, "fp8attn-q8"), self.shape, q, k, v)


def one(phase: str, mean: int, length: int) -> tuple[str, Case]:
    queries = {"causal": length, "full": 128, "decode": 1}[phase]
    shape = Shape((length,), (queries,), HEADS, HEADS, 128, phase != "full")
    return f"{phase}-mean{mean}-D128-S{length}", Case(phase, mean, shape)


MEANS, PHASES = (0, 1, 5), ("causal", "full", "decode")
CASES = dict([
    *(one(phase, mean, n) for mean in MEANS for phase in PHASES for n in LENGTHS),
    *(one(phase, mean, MILLION) for mean in MEANS for phase in ("full", "decode")),
])  # fmt: skip


def calls(case: str) -> dict[str, Callable]:
    here = CASES[case]
    return {impl: run.call for impl, run in here.runs(*here.shape.inputs(here.mean)).items()}


def sampled(queries: int) -> list[int]:
    """The first and the last 64 queries."""
    last = range(max(queries - SAMPLED, 0), queries)
    return [*range(min(SAMPLED, last.start)), *last]


def measure(case: str) -> Iterator[dict]:
    here = CASES[case]
    shape, inputs = here.shape, here.shape.inputs(here.mean)
    rows = torch.tensor(sampled(shape.queries[0]), device=DEVICE)
    names = ("fa3-fp8", "vllm-fa3-fp8", "fa3-bf16", *(["cudnn-fp8"] if here.phase != "decode" else []))
    runs = here.runs(*inputs) | peers.runs(shape, *inputs, names)
    with poisoned():
        outs = {impl: run.unit * out[rows].double() for impl, run, out in outputs(case, runs)}
    for impl, out in outs.items():
        ref = exact(runs[impl].q[rows], *runs[impl].held(0), shape.softmax_scale, shape.last_key(0, rows))
        row = {"rel_err": relative([(out, ref)])}
        if shape.queries[0] > 2 * SAMPLED:
            row["last"] = relative([(out[-SAMPLED:], ref[-SAMPLED:])])
        rounded = {name: float(f"{x:.3g}") for name, x in row.items()}
        yield {"case": case, "impl": impl} | rounded
