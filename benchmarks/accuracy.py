"""The accuracy suite: ours and the peers, at lengths from 1 to a million and on data made to go wrong.

A case is `{phase}-{data}-D{head_dim}-S{length}`. Phases: `causal`, a prompt; `full`, 128 queries that see every key; `decode`, one query.
`rel_err` is against float64 on the bytes that each system was given, over the first and the last 64 queries (`first` and `last`: of them
alone); `vs_bf16` against FlashAttention-3 in BF16 on the input before it was rounded to FP8. `fp8attn` takes 16-bit queries, `fp8attn-q8`
FP8 ones over E4M3 keys that are not rotated, as the peers do. Keys of `fp8attn` are of the default format, those of `fp8attn-e4m3-keys` (or
`-int8-keys`) of the other. Cases named `grid` are ours alone: FlashAttention-3's list of odd lengths, and ragged batches that decode; whole
outputs are compared, the worst shape is reported, and the bits of three runs are compared. In all cases outputs are NaN before the call,
pages that no sequence holds and K behind a sequence's end are 0x7F, and scales of such pages NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from evidence.fingerprint import of_call
from fp8attn.kernels import decode, prefill

from . import peers
from .measure import error, exact, outputs, poisoned, relative
from .problem import DEVICE, KEYS, K, Run, Shape, own

HEADS = 2
SAMPLED = 64  # queries from each end that are compared
LENGTHS = (1, 2, 17, 127, 129, 256, 320, 512, 1000, 4096, 8191, 16384, 32768, 65536, 131072)
MILLION = K * K
GRID = (  # (queries, keys): FlashAttention-3's tests
    (1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217), (113, 211), (108, 256), (256, 512),
    (384, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023), (4096, 4096), (4224, 4224),
)  # fmt: skip
GRID_DIMS = (64, 128, 256)
RAGGED = (0, 1, 2, 15, 16, 17, 127, 128, 129, 203, 211, 217, 1023, 4224, 113 * 203)  # of one decoding batch


class Case(NamedTuple):
    kernel: Callable
    data: str
    shapes: dict[str, Shape]  # one, or those of a grid

    @property
    def shape(self) -> Shape:
        return self.shapes[""]

    def runs(self, shape: Shape, *inputs: torch.Tensor) -> dict[str, Run]:
        """Our implementations over `shape`."""
        q, k, v = inputs or make(self.data, shape)
        if self.kernel is decode.attention:
            return own(self.kernel, KEYS, shape, q.half(), k, v)
        return own(self.kernel, KEYS if len(self.shapes) > 1 else (*KEYS, "fp8attn-q8"), shape, q, k, v)


def one(phase: str, data: str, length: int, dim: int = 128) -> tuple[str, Case]:
    queries = {"causal": length, "full": 128, "decode": 1}[phase]
    shape = Shape((length,), (queries,), HEADS, HEADS, dim, phase != "full")
    return f"{phase}-{data}-D{dim}-S{length}", Case(decode.attention if phase == "decode" else prefill.attention, data, {"": shape})


MEANS, PHASES = ("mean0", "mean1", "mean5"), ("causal", "full", "decode")
ADVERSARIAL = ("k-offset", "outliers", "page-gains", "needle", "flat", "flat-mean1", "constant")
CASES = dict([
    *(one(phase, mean, n) for mean in MEANS for phase in PHASES for n in LENGTHS),
    *(one(phase, mean, MILLION) for mean in MEANS for phase in ("full", "decode")),
    *(one(phase, "mean1", n, dim) for dim in (64, 256) for phase in ("causal", "full") for n in (17, 320, 8191, 131072)),
    *(one(phase, data, 16384 if phase == "causal" else 131072) for data in ADVERSARIAL for phase in PHASES),
    *(one(phase, "constant", MILLION) for phase in ("full", "decode")),
]) | {
    f"grid-{mask}-D{dim}": Case(
        prefill.attention, "page-gains", {f"{n}x{keys}": Shape((keys,), (n,), 4, 2, dim, mask == "causal") for n, keys in GRID}
    )
    for dim in GRID_DIMS for mask in ("causal", "full")
} | {
    f"grid-decode-D{dim}": Case(
        decode.attention, "page-gains", {f"{n} queries": Shape(RAGGED, (n,) * len(RAGGED), 4, 2, dim, True) for n in (1, 3, 8)}
    )
    for dim in GRID_DIMS
}  # fmt: skip


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
    """Of a grid, all its shapes one after another."""
    runs = [CASES[case].runs(shape) for shape in CASES[case].shapes.values()]
    return {impl: lambda impl=impl: [each[impl].call() for each in runs] for impl in runs[0]}


def sampled(queries: int) -> list[int]:
    """The first and the last 64 queries."""
    last = range(max(queries - SAMPLED, 0), queries)
    return [*range(min(SAMPLED, last.start)), *last]


def measure(case: str) -> Iterator[dict]:
    here = CASES[case]
    torch.cuda.empty_cache()
    if len(here.shapes) > 1:
        yield from grid(case)
        return
    shape, inputs = here.shape, make(here.data, here.shape)
    rows = torch.tensor(sampled(shape.queries[0]), device=DEVICE)
    ends = {} if shape.queries[0] <= 2 * SAMPLED else {"first": slice(None, SAMPLED), "last": slice(-SAMPLED, None)}
    names = ("fa3-fp8", "vllm-fa3-fp8", "fa3-bf16", *(["cudnn-fp8"] if here.kernel is prefill.attention else []))
    runs = here.runs(shape, *inputs) | peers.runs(shape, *inputs, names)
    with poisoned():
        outs = {impl: out[rows].double() for impl, _, out in outputs(case, runs)}
    for impl, out in outs.items():
        ref = exact(runs[impl].q[rows], *runs[impl].held(0), shape.softmax_scale, shape.last_key(0, rows))
        row = {"rel_err": relative([(out, ref)])} | {end: relative([(out[part], ref[part])]) for end, part in ends.items()}
        if "fa3-bf16" in outs and impl != "fa3-bf16":
            row["vs_bf16"] = relative([(out, outs["fa3-bf16"])])
        rounded = {name: float(f"{x:.3g}") for name, x in row.items()}
        yield {"case": case, "impl": impl, "fingerprint": of_call(impl, runs[impl].call)} | rounded


def grid(case: str) -> Iterator[dict]:
    """Whole outputs of all shapes, and the bits of three runs."""
    errors, finite, equal = ({impl: {} for impl in KEYS} for _ in range(3))
    for name, shape in CASES[case].shapes.items():
        for impl, run in CASES[case].runs(shape).items():
            with poisoned():
                out, *again = (run.call() for _ in range(3))
            errors[impl][name] = error(shape, out, run, range(len(shape.keys)), range)
            finite[impl][name] = bool(out.isfinite().all())
            equal[impl][name] = all(torch.equal(out, x) for x in again)
    for impl, call in calls(case).items():
        worst = max(errors[impl], key=errors[impl].get)
        found = {"shapes": len(errors[impl]), "rel_err": float(f"{errors[impl][worst]:.3g}"), "worst": worst}
        found |= {"finite": all(finite[impl].values()), "equal_bits": all(equal[impl].values())}
        yield {"case": case, "impl": impl, "fingerprint": of_call(impl, call)} | found
