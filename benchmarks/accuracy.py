"""The accuracy suite: ours and the peers, at lengths from 1 to a million and on data made to go wrong.

    PYTHONPATH=src python -m benchmarks.accuracy [case substring ...] [--save]

A case is `{phase}-{data}-D{head_dim}-S{length}`. Phases: `causal`, a prompt; `full`, 128 queries that see every key; `decode`, one query.
`rel_err` is against float64 on the bytes that each system was given, over the first and the last 64 queries (`first` and `last`: of them
alone); `vs_bf16` against FlashAttention-3 in BF16 on the input before it was rounded to FP8. `fp8attn` takes 16-bit queries, `fp8attn-q8`
FP8 ones over E4M3 keys that are not rotated, as the peers do. Keys of `fp8attn` are of the default format, those of `fp8attn-e4m3-keys` (or
`-int8-keys`) of the other. Cases named `grid` are ours alone: FlashAttention-3's list of
odd lengths, whole outputs compared, the worst shape reported, and bits compared from run to run. Everywhere outputs are NaN before the
call, pages that nobody holds and K behind a sequence's end are 0x7F, and scales of such pages NaN.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fp8attn import KVPages
from fp8attn.kernels import decode, prefill

from . import peers, results
from .fingerprint import launched, peer
from .measure import exact, in_processes, poisoned, relative
from .problem import DEVICE, KEYS, Shape, given, ours

HEADS = 2
SAMPLED = 64  # queries from each end that are compared
LENGTHS = (1, 2, 17, 127, 129, 256, 320, 512, 1000, 4096, 8191, 16384, 32768, 65536, 131072)
MILLION = 1 << 20
GRID = (  # (queries, keys): FlashAttention-3's tests
    (1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217), (113, 211), (108, 256), (256, 512),
    (384, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023), (4096, 4096), (4224, 4224),
)  # fmt: skip
GRID_DIMS = (64, 128, 256)
RAGGED = (0, 1, 2, 15, 16, 17, 127, 128, 129, 203, 211, 217, 1023, 4224, 113 * 203)  # of one decoding batch


@dataclass(frozen=True)
class Case:
    phase: str
    data: str
    length: int
    dim: int = 128

    @property
    def name(self) -> str:
        return f"{self.phase}-{self.data}-D{self.dim}-S{self.length}"

    @property
    def shape(self) -> Shape:
        queries = {"causal": self.length, "full": 128, "decode": 1}[self.phase]
        return Shape((self.length,), (queries,), HEADS, HEADS, self.dim, self.phase != "full")


_CASES = (
    *(Case(phase, mean, n) for mean in ("mean0", "mean1", "mean5") for phase in ("causal", "full", "decode") for n in LENGTHS),
    *(Case(phase, mean, MILLION) for mean in ("mean0", "mean1", "mean5") for phase in ("full", "decode")),
    *(Case(phase, "mean1", n, dim) for dim in (64, 256) for phase in ("causal", "full") for n in (17, 320, 8191, 131072)),
    *(
        Case(phase, data, n)
        for data in ("k-offset", "outliers", "page-gains", "needle", "flat", "flat-mean1", "constant")
        for phase, n in (("causal", 16384), ("full", 131072), ("decode", 131072))
    ),
    *(Case(phase, "constant", MILLION) for phase in ("full", "decode")),
)
CASES = {case.name: case for case in _CASES}


# Data


def inputs(data: str, shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q `[queries, num_q_heads, head_dim]`, k and v `[keys, num_kv_heads, head_dim]`, all BF16.

    Normal, and then: `mean*`, V is shifted by that; `k-offset`, K by four times a normal vector; `outliers`, four channels of K and V are
    20 times larger; `page-gains`, K's and V's sizes differ from page to page; `needle`, one key holds nearly all of the weight; `flat`,
    scores are a hundredth (`flat-mean1`: and V is shifted by one); `constant`, scores are zero and V is one: sums of equal terms, where a
    truncating accumulator is worst off.
    """
    torch.manual_seed(0)
    keys = sum(shape.keys)
    q = torch.randn(sum(shape.queries), shape.q_heads, shape.dim, device=DEVICE)
    k, v = (torch.randn(keys, shape.kv_heads, shape.dim, device=DEVICE) for _ in range(2))
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


# What comes out


def own(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, peers.Run]:
    """Our implementations of a case, with what each was given."""
    shape, found, decodes = case.shape, {}, case.phase == "decode"
    for impl in KEYS if decodes else (*KEYS, "fp8attn-q8"):
        queries, pages = given(impl, shape, q.half() if decodes else q, k, v)
        call = ours(decode.attention if decodes else prefill.attention, shape, queries, pages)
        found[impl] = peers.Run(call, queries, *pages.read(0, case.length, torch.float64))
    return found


def systems(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, peers.Run]:
    """Everything that computes the case."""
    names = ["fa3-fp8", "vllm-fa3-fp8", "fa3-bf16", *(["cudnn-fp8"] if case.phase != "decode" else [])]
    return own(case, q, k, v) | peers.runs(case.shape, q, k, v, names)


def calls(name: str) -> dict[str, Callable]:
    """Our implementations of a case; of a grid, all its shapes one after another."""
    if name in CASES:
        return {impl: run.call for impl, run in own(CASES[name], *inputs(CASES[name].data, CASES[name].shape)).items()}
    kernel, dtype, shapes = GRIDS[name]
    found = {impl: [on_page_gains(kernel, dtype, shape, impl)[0] for shape in shapes.values()] for impl in KEYS}
    return {impl: lambda these=these: [call() for call in these] for impl, these in found.items()}


def on_page_gains(kernel: Callable, dtype: torch.dtype, shape: Shape, impl: str) -> tuple[Callable, torch.Tensor, KVPages]:
    """A call, its queries and its cache."""
    q, k, v = inputs("page-gains", shape)
    q, pages = given(impl, shape, q.to(dtype), k, v)
    return ours(kernel, shape, q, pages), q, pages


def sampled(queries: int) -> torch.Tensor:
    """The first and the last 64 queries."""
    last = range(max(queries - SAMPLED, 0), queries)
    return torch.tensor([*range(min(SAMPLED, last.start)), *last], device=DEVICE)


def measure(case: Case) -> list[dict]:
    shape = case.shape
    rows, queries = sampled(shape.queries[0]), shape.queries[0]
    ends = {} if queries <= 2 * SAMPLED else {"first": slice(None, SAMPLED), "last": slice(-SAMPLED, None)}
    runs = systems(case, *inputs(case.data, shape))
    outs, found = {}, []
    for name, run in runs.items():
        try:
            with poisoned():
                outs[name] = run.call()[rows].double()
            torch.cuda.synchronize()
        except RuntimeError as problem:
            peers.left_out(f"{case.name} {name}", problem)
    for name, out in outs.items():
        run = runs[name]
        ref = exact(run.q[rows], run.k, run.v, shape.softmax_scale, shape.last_key(0, rows))
        fingerprint = launched(run.call) if name.startswith("fp8attn") else peer(name)
        row = {"case": case.name, "impl": name, "fingerprint": fingerprint, "rel_err": relative([(out, ref)])}
        row |= {end: relative([(out[part], ref[part])]) for end, part in ends.items()}
        if "fa3-bf16" in outs and name != "fa3-bf16":
            row["vs_bf16"] = relative([(out, outs["fa3-bf16"])])
        found.append({key: float(f"{x:.3g}") if isinstance(x, float) else x for key, x in row.items()})
    return found


def compare_all(kernel: Callable, dtype: torch.dtype, shape: Shape, impl: str) -> tuple[float, bool, bool]:
    """(relative error of the whole output, whether it is finite, whether three runs have equal bits)."""
    call, q, pages = on_page_gains(kernel, dtype, shape, impl)
    with poisoned():
        out, *again = (call() for _ in range(3))
    pairs = []
    for seq, keys in enumerate(shape.keys):
        rows, last_key = shape.rows(seq), shape.last_key(seq, torch.arange(shape.queries[seq], device=DEVICE))
        pairs.append((out[rows], exact(q[rows], *pages.read(seq, keys, torch.float64), shape.softmax_scale, last_key)))
    return relative(pairs), bool(out.isfinite().all()), all(torch.equal(out, x) for x in again)


# FlashAttention-3's odd lengths for `prefill`, a ragged batch with 1, 3 and 8 queries for `decode`: kernel, queries' dtype, shapes.
GRIDS = {
    **{
        f"grid-{mask}-D{dim}": (
            prefill.attention, torch.bfloat16, {f"{n}x{keys}": Shape((keys,), (n,), 4, 2, dim, mask == "causal") for n, keys in GRID}
        )
        for dim in GRID_DIMS for mask in ("causal", "full")
    },
    **{
        f"grid-decode-D{dim}": (
            decode.attention, torch.float16, {f"{n} queries": Shape(RAGGED, (n,) * len(RAGGED), 4, 2, dim, True) for n in (1, 3, 8)}
        )
        for dim in GRID_DIMS
    },
}  # fmt: skip


def grid(name: str, impl: str, call: Callable) -> dict:
    kernel, dtype, shapes = GRIDS[name]
    found = {shape_name: compare_all(kernel, dtype, shape, impl) for shape_name, shape in shapes.items()}
    worst = max(found, key=lambda shape_name: found[shape_name][0])
    return {
        "case": name, "impl": impl, "shapes": len(found), "rel_err": float(f"{found[worst][0]:.3g}"), "worst": worst,
        "finite": all(finite for _, finite, _ in found.values()), "equal_bits": all(equal for _, _, equal in found.values()),
        "fingerprint": launched(call),
    }  # fmt: skip


# Running it


def compile_kernel(kernel: Callable, shape: Shape, dtype: torch.dtype, impl: str) -> None:
    """Leave one specialization, and append's, in Triton's cache."""
    q, k, v = inputs("mean0", shape)
    ours(kernel, shape, *given(impl, shape, q.to(dtype), k, v))()
    torch.cuda.synchronize()


def specializations() -> list[tuple]:
    short = {dim: Shape((64,), (64,), HEADS, HEADS, dim, True) for dim in GRID_DIMS}
    long = {dim: Shape((4096,), (64,), HEADS, HEADS, dim, True) for dim in GRID_DIMS}  # in parts
    ragged = (1,) * len(RAGGED)
    prompts = [(prefill.attention, shapes[dim], torch.bfloat16) for shapes in (short, long) for dim in GRID_DIMS]
    steps = [
        (decode.attention, Shape((64,), (1,), HEADS, HEADS, 128, True), torch.float16),
        *((decode.attention, Shape(ragged, (n,) * len(ragged), 4, 2, dim, True), torch.float16) for dim in GRID_DIMS for n in (1, 3, 8)),
    ]
    return [(*made, impl) for made in prompts + steps for impl in KEYS] + [(*made, "fp8attn-q8") for made in prompts]


def show(rows: list[dict]) -> None:
    """Error by length, a table for each series; then everything else of ours."""
    lengths = [*LENGTHS, MILLION]
    by = {(row["case"], row["impl"]): row["rel_err"] for row in rows}
    for phase in ("causal", "full", "decode"):
        for data in ("mean0", "mean1", "mean5"):
            cases = {n: Case(phase, data, n).name for n in lengths}
            impls = dict.fromkeys(impl for case, impl in by if case in cases.values())
            if not impls:
                continue
            print(f"\n{phase}, V {data}\n{'':22s}" + "".join(f"{n:>9d}" for n in lengths))
            for impl in impls:
                print(f"  {impl:20s}" + "".join(f"{by[case, impl]:9.5f}" if (case, impl) in by else f"{'':9s}" for case in cases.values()))
    print()
    series = {Case(phase, data, n).name for phase in ("causal", "full", "decode") for data in ("mean0", "mean1", "mean5") for n in lengths}
    for row in rows:
        if row["case"] not in series:
            print("  " + "  ".join(f"{key} {x}" if key not in ("case", "impl") else f"{x:30s}" for key, x in row.items()))


def main() -> None:
    args = results.parse(results.arguments(__doc__))
    start = time.time()
    in_processes(compile_kernel, specializations())
    print(f"peers: {', '.join(sorted(peers.available()))}; ready after {time.time() - start:.0f} s", flush=True)
    rows = []
    for name in results.chosen([*CASES, *GRIDS], args.cases):
        rows += measure(CASES[name]) if name in CASES else [grid(name, *own) for own in calls(name).items()]
        torch.cuda.empty_cache()
    show(rows)
    print(f"\n{time.time() - start:.0f} s")
    if args.save:
        results.save("accuracy", rows)


if __name__ == "__main__":
    main()
