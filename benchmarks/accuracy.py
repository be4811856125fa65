"""The accuracy suite: our kernels and the peers, at lengths from 1 to a million tokens, also on data with large errors.

A case is `{phase}-{data}-D{head_dim}-S{length}`. Phases: `causal`, a prompt; `full`, 128 queries that see every key; `decode`, one query.
`rel_err` is against float64 on the bytes that each system was given, over the first and the last 64 queries; `last` is over the last alone.
`fp8attn` takes 16-bit queries, `fp8attn-q8` FP8 ones over E4M3 keys that are not rotated, as the peers do. Keys of `fp8attn` are of the
default format, those of `fp8attn-e4m3-keys` (or `-int8-keys`) of the other. Outputs are NaN before the call, pages that no sequence holds
and K behind a sequence's end are 0x7F, and scales of such pages NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from evidence.fingerprint import of_call
from fp8attn.kernels import decode, prefill

from . import peers
from .measure import exact, outputs, poisoned, relative
from .problem import DEVICE, KEYS, K, Run, Shape, own

HEADS = 2
SAMPLED = 64  # queries from each end that are compared
LENGTHS = (1, 2, 17, 127, 129, 256, 320, 512, 1000, 4096, 8191, 16384, 32768, 65536, 131072)
MILLION = K * K


class Case(NamedTuple):
    kernel: Callable
    data: str
    shape: Shape

    def runs(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Run]:
        """The implementations of fp8attn."""
        if self.kernel is decode.attention:
            return own(self.kernel, KEYS, self.shape, q.half(), k, v)
        return own(self.kernel, (*KEYS, "fp8attn-q8"), self.shape, q, k, v)


def one(phase: str, data: str, length: int, dim: int = 128) -> tuple[str, Case]:
    queries = {"causal": length, "full": 128, "decode": 1}[phase]
    shape = Shape((length,), (queries,), HEADS, HEADS, dim, phase != "full")
    return f"{phase}-{data}-D{dim}-S{length}", Case(decode.attention if phase == "decode" else prefill.attention, data, shape)


MEANS, PHASES = ("mean0", "mean1", "mean5"), ("causal", "full", "decode")
ADVERSARIAL = ("k-offset", "outliers", "page-gains", "needle", "flat", "flat-mean1", "constant")
CASES = dict([
    *(one(phase, mean, n) for mean in MEANS for phase in PHASES for n in LENGTHS),
    *(one(phase, mean, MILLION) for mean in MEANS for phase in ("full", "decode")),
    *(one(phase, "mean1", n, dim) for dim in (64, 256) for phase in ("causal", "full") for n in (17, 320, 8191, 131072)),
    *(one(phase, data, 16384 if phase == "causal" else 131072) for data in ADVERSARIAL for phase in PHASES),
    *(one(phase, "constant", MILLION) for phase in ("full", "decode")),
])  # fmt: skip


def make(data: str, shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q `[queries, num_q_heads, head_dim]`, k and v `[keys, num_kv_heads, head_dim]`, all BF16.

    Normal, and then: `mean*`, V is shifted by that; `k-offset`, K by four times a normal vector; `outliers`, four channels of K and V are
    20 times larger; `page-gains`, K's and V's sizes differ from page to page; `needle`, one key holds nearly all of the weight; `flat`,
    scores are a hundredth (`flat-mean1`: and V is shifted by one); `constant`, scores are zero and V is one: sums of equal terms, where a
    truncating accumulator is worst off.
    """
    q, k, v = shape.inputs(dtype=torch.float32)
    keys = len(k)
    if data.startswith("mean"):
        v += float(data[4:])
    elif data == "k-offset":
        k += 4 * torch.randn(shape.kv_heads, shape.dim, device=DEVICE)
    elif data == "outliers":
        k[..., 3::32] *= 20
        v[..., 3::32] *= 20
    elif data == "page-gains":
        for x in (k, v):
            x *= (2.0 ** torch.randint(-4, 3, (-(-keys // 128), 1, 1), device=DEVICE)).repeat_interleave(128, 0)[:keys]
        v += 1
    elif data == "needle":
        direction = torch.nn.functional.normalize(torch.randn(shape.dim, device=DEVICE), dim=0)
        q += direction * shape.dim**0.5
        k[keys // 3] = direction * (math.log(keys) + 4)  # a score of ln(keys) + 4 beside scores of spread one: 98% of the weight
    elif data.startswith("flat"):
        q *= 0.01
        v += data == "flat-mean1"
    elif data == "constant":
        q.zero_()
        v.fill_(1)
    else:
        raise ValueError(f"no such data: {data}")
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def calls(case: str) -> dict[str, Callable]:
    here = CASES[case]
    return {impl: run.call for impl, run in here.runs(*make(here.data, here.shape)).items()}


def sampled(queries: int) -> list[int]:
    """The first and the last 64 queries."""
    last = range(max(queries - SAMPLED, 0), queries)
    return [*range(min(SAMPLED, last.start)), *last]


def measure(case: str) -> Iterator[dict]:
    here = CASES[case]
    shape, inputs = here.shape, make(here.data, here.shape)
    rows = torch.tensor(sampled(shape.queries[0]), device=DEVICE)
    names = ("fa3-fp8", "vllm-fa3-fp8", "fa3-bf16", *(["cudnn-fp8"] if here.kernel is prefill.attention else []))
    runs = here.runs(*inputs) | peers.runs(shape, *inputs, names)
    with poisoned():
        outs = {impl: run.unit * out[rows].double() for impl, run, out in outputs(case, runs)}
    for impl, out in outs.items():
        ref = exact(runs[impl].q[rows], *runs[impl].held(0), shape.softmax_scale, shape.last_key(0, rows))
        row = {"rel_err": relative([(out, ref)])}
        if shape.queries[0] > 2 * SAMPLED:
            row["last"] = relative([(out[-SAMPLED:], ref[-SAMPLED:])])
        rounded = {name: float(f"{x:.3g}") for name, x in row.items()}
        yield {"case": case, "impl": impl, "fingerprint": of_call(impl, runs[impl].call)} | rounded
