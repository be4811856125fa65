"""Decode attention beside its peers: one process, interleaved, every output checked against float64 before it is timed.

    PYTHONPATH=src python -m benchmarks.decode [case substring ...] [--impl NAME ...] [--rounds N] [--save]

Each implementation (`benchmarks/peers.py` has the others) runs as a CUDA graph, as decoding does, so that no host's speed is measured; the
L2 cache is flushed before every run. `gbps` counts the live bytes of K and V.
`stream-ceiling` is the same producer with a consumer that only lets go of what it is given: what is possible at all. `rel_err` is
against float64 on the bytes that each implementation was given, on the first and the last sequence; ours have random scales per page,
rotated queries, and FP16 queries and outputs (BF16's rounding alone is 1.6e-3). `fp8attn` has keys of the default format,
`fp8attn-e4m3-keys` (or `-int8-keys`) of the other.

A case that gives no answer in `SECONDS` is ended and measured again without peers; the last name that was printed is what hung.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fp8attn import KVPages
from fp8attn.kernels import decode
from fp8attn.kernels.decode.load import PRODUCER_REGISTERS, Source, make_pipe, produce, request_first
from fp8attn.kernels.decode.work import Batch, assign
from fp8attn.kernels.devices import chip
from fp8attn.kernels.gluon import gl, gluon, mbarrier, sync
from fp8attn.kernels.launch import constants, launch, num_sms
from fp8attn.kernels.pages import tiles
from fp8attn.layout import DEFAULT_KEY_DTYPE, FP8, key_type

from . import peers, results
from .fingerprint import launched, peer
from .measure import Beside, exact, graph_of, interleaved, relative
from .peers import vllm_fa3
from .problem import DEVICE, KEYS, Shape, ours

PAGED_BY = 64  # tokens in a page of vLLM's
OURS = (*KEYS, "stream-ceiling")
SECONDS = 30  # for a case, compilation included


@dataclass(frozen=True)
class Case:
    name: str
    lengths: tuple[int, ...]
    heads: int = 8
    group: int = 4
    dim: int = 128
    queries: int = 1

    @property
    def bytes(self) -> int:
        return 2 * sum(self.lengths) * self.heads * self.dim

    @property
    def shape(self) -> Shape:
        return Shape(self.lengths, (self.queries,) * len(self.lengths), self.heads * self.group, self.heads, self.dim, True)

    @property
    def even(self) -> bool:
        return len(set(self.lengths)) == 1


def ragged(batch: int, longest: int) -> tuple[int, ...]:
    return (longest, *(random.Random(0).randrange(1, longest) for _ in range(batch - 2)), 1)


_CASES = (
    *(Case(f"B{b}-S{s}", (s,) * b) for b, s in ((1, 8192), (1, 131072), (8, 32768), (16, 8192), (64, 8192), (32, 2048), (4, 131072))),
    Case("B16-S16384-ragged", ragged(16, 16384)),
    Case("B64-S8192-ragged", ragged(64, 8192)),
    Case("B1-S1024", (1024,)),
    Case("B8-S512", (512,) * 8),
    Case("B16-S8192-G8", (8192,) * 16, group=8),
    Case("B16-S8192-G1", (8192,) * 16, group=1),
    Case("B16-S8192-G16", (8192,) * 16, heads=4, group=16),
    Case("B16-S8192-D64", (8192,) * 16, heads=16, dim=64),
    Case("B16-S8192-D256", (8192,) * 16, heads=4, dim=256),
    Case("B16-S8192-q4", (8192,) * 16, queries=4),
    Case("B1-S1048576", (1 << 20,), heads=4),
)
CASES = {case.name: case for case in _CASES}


# The ceiling


@gluon.jit
def _drain(pipe, batch, work):
    """What `consume` does of waiting and walking, and no arithmetic."""
    index, head, begin = work.seq, work.head, work.begin
    tile = 0
    while begin < work.high:
        seq = batch.sequence(index)
        i, j = batch.portion(begin, seq.num_pages, work.low, work.high)
        for _ in range(seq.first_page + i, seq.first_page + j):
            stage = tile % pipe.STAGES
            phase = (tile // pipe.STAGES) & 1
            mbarrier.wait(pipe.k_full.index(stage), phase)
            mbarrier.wait(pipe.v_full.index(stage), phase)
            sync()  # or a slow warp could miss two phases, and wait for ever
            mbarrier.arrive(pipe.empty.index(stage), count=1)
            tile += 1
        begin += seq.num_pages
        index, head = batch.following(index, head, seq.num_pages)


@gluon.jit(do_not_specialize=["table_stride", "num_seqs", "heads", "max_q", "workers"])
def _stream(k_desc, v_desc, pool_ptr, table_ptr, table_stride, lengths_ptr, num_seqs, heads, max_q, workers,
            OPTIONS: gl.constexpr):  # fmt: skip
    worker = gl.program_id(0)
    batch = Batch(
        lengths_ptr, lengths_ptr, lengths_ptr, num_seqs, heads, max_q, max_q, worker * 0, OPTIONS.group, False, False, False,
        OPTIONS.min_pages, OPTIONS.whole_pages,
    )  # fmt: skip
    source = Source(k_desc, v_desc, pool_ptr, table_ptr, table_stride, OPTIONS.head_dim)
    count = batch.counts(0, OPTIONS.block)
    pipe = make_pipe(k_desc, OPTIONS.width, OPTIONS.stages)
    pipe.open(0, 1)
    work = assign(batch, count, worker, workers, OPTIONS.block)
    requested = request_first(pipe, batch, work, source)
    pipe.open(1, OPTIONS.stages)
    gl.warp_specialize([
        (_drain, (pipe, batch, work)),
        (produce, (pipe, batch, work, requested, source)),
    ], [1], [PRODUCER_REGISTERS])  # fmt: skip


def stream(case: Case, pages: KVPages) -> Callable[[], None]:
    device, how = pages.device, decode.Launch(case.dim, case.group, case.group, len(case.lengths), chip=chip(pages.device))
    workers = how.workers(num_sms(device), case.heads * len(case.lengths))
    given = constants("stream", device, **how.constants())
    args = (
        *tiles(pages, how.width, how.width), pages.pool, pages.page_table, pages.page_table.stride(0), pages.cache_seqlens,
        len(case.lengths), case.heads, 1, workers,
    )  # fmt: skip
    return lambda: launch(_stream, (workers,), args, given)


# What they are given, and what is right


def make_pages(case: Case, key_dtype: str = DEFAULT_KEY_DTYPE) -> KVPages:
    """Random bytes and scales, in shuffled pages."""
    counts = [-(-n // 128) for n in case.lengths]
    pages = KVPages.empty(sum(counts), case.heads, case.dim, len(counts), max(counts), DEVICE, key_dtype=key_type(key_dtype))
    unit = 1 / 32 if key_dtype == "int8" else 1.0  # a step of normal keys in INT8, so that 127 of them are four deviations
    for part in range(0, pages.num_pages, 1024):
        for codes, size in ((pages.k, unit), (pages.v, 1.0)):
            some = codes[part : part + 1024]
            some.copy_((torch.randn(some.shape, device=DEVICE, dtype=torch.float16) / size).clamp(-127, 127))
    for scale, size in ((pages.k_scale, unit), (pages.v_scale, 1.0)):
        scale.copy_(size * 2.0 ** torch.randint(-1, 2, scale.shape, device=DEVICE))
    order = torch.randperm(pages.num_pages, device=DEVICE).int()
    for seq, ids in enumerate(order.split(counts)):
        pages.page_table[seq, : counts[seq]] = ids
    pages.cache_seqlens.copy_(torch.tensor(case.lengths))
    return pages


def make_queries(case: Case) -> torch.Tensor:
    return torch.randn(len(case.lengths) * case.queries, case.heads * case.group, case.dim, device=DEVICE).half()


def error(shape: Shape, out: torch.Tensor, q: torch.Tensor, keys_of: Callable[[int], tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Relative error of the first and the last sequence; `keys_of(sequence)` gives the K and V that were meant."""
    pairs = []
    for seq in {0, len(shape.keys) - 1}:
        rows = shape.rows(seq)
        last_key = shape.last_key(seq, torch.arange(shape.queries[seq], device=DEVICE))
        pairs.append((out[rows], exact(q[rows], *keys_of(seq), shape.softmax_scale, last_key)))
    return relative(pairs)


def own(case: Case, q: torch.Tensor):
    """Yields (name, callable, its cache), the ceiling's among them."""
    for impl, key_dtype in KEYS.items():
        pages = make_pages(case, key_dtype)
        yield impl, ours(decode.attention, case.shape, q, pages), pages
    yield "stream-ceiling", stream(case, pages), None


def calls(name: str) -> dict[str, Callable]:
    """Our implementations of a case."""
    return {impl: call for impl, call, _ in own(CASES[name], make_queries(CASES[name]))}


def implementations(case: Case):
    """Yields (name, callable, its queries, its K and V by sequence); the last two None where nothing is computed."""
    torch.manual_seed(0)
    q = make_queries(case)
    for impl, call, pages in own(case, q):
        if pages is None:
            yield impl, call, None, None
        else:
            yield impl, call, q, lambda seq, pages=pages: pages.read(seq, case.lengths[seq], torch.float64)
    if "vllm-fa3" not in peers.available() or not case.even or max(case.lengths) > 131072:
        return
    room = (len(case.lengths), case.lengths[0], case.heads, case.dim)
    k8, v8 = (torch.randn(room, device=DEVICE, dtype=torch.float16).to(FP8) for _ in range(2))
    q8, q16 = q.to(FP8), q.bfloat16()
    yield "vllm-fa3-fp8", vllm_fa3(case.shape, q8, k8, v8), q8, lambda seq: (k8[seq], v8[seq])
    count = len(case.lengths) * case.lengths[0] // PAGED_BY
    order = torch.randperm(count, device=DEVICE)
    table = torch.empty_like(order).int()
    table[order] = torch.arange(count, device=DEVICE, dtype=torch.int32)  # page i of the batch lies at table[i]
    shuffled = [x.view(torch.uint8).view(count, PAGED_BY, *room[2:])[order].view(FP8) for x in (k8, v8)]
    paged = vllm_fa3(case.shape, q8, *shuffled, table=table.view(room[0], -1))
    yield "vllm-fa3-fp8-paged", paged, q8, lambda seq: (k8[seq], v8[seq])
    del shuffled
    k, v = k8.bfloat16(), v8.bfloat16()
    yield "vllm-fa3-bf16", vllm_fa3(case.shape, q16, k, v), q16, lambda seq: (k[seq], v[seq])


def measure(case: Case, wanted, rounds: int) -> list[dict]:
    torch.cuda.empty_cache()
    rows, calls, alive = {}, {}, []
    print(f"\n{case.name} ({case.bytes / 1e6:.0f} MB):", end="", flush=True)
    for name, call, q, keys_of in implementations(case):
        if wanted and name not in wanted:
            continue
        print(f" {name}", end="", flush=True)
        row = {"case": case.name, "impl": name}
        try:
            out = call()
            torch.cuda.synchronize()
            row["fingerprint"] = launched(call) if name in OURS else peer(name)
            replay, result = graph_of(call)
            replay()
            torch.cuda.synchronize()
        except RuntimeError as problem:  # a peer that cannot do a case is left out of it, and said to be
            peers.left_out(f"{case.name} {name}", problem)
            continue
        if q is not None:
            row["rel_err"] = round(error(case.shape, result, q, keys_of), 7)
            assert "fa3" in name or torch.equal(result, out), f"{case.name} {name}: the graph's bits are not the call's"
        rows[name], calls[name] = row, replay
        alive.append(call)  # a graph does not hold what it reads: the call does
    print(" together", flush=True)
    for name, ms in interleaved(calls, rounds, flush=True).items():
        rows[name] |= {"ms": round(ms, 5), "gbps": round(case.bytes * (2 if name.endswith("bf16") else 1) / ms * 1e-6, 1)}
    return list(rows.values())


def show(case: Case, rows: list[dict]) -> None:
    by = {row["impl"]: row for row in rows}
    for row in sorted(rows, key=lambda row: -row["gbps"]):
        notes = f"  err {row['rel_err']:.1e}" if "rel_err" in row else ""
        if row["impl"].startswith("fp8attn"):
            for other in ("vllm-fa3-fp8-paged", "stream-ceiling"):
                if other in by:
                    notes += f"  {row['gbps'] / by[other]['gbps']:.3f}x {other}"
            if "rel_err" in row and row["rel_err"] > 5e-4:
                notes += "  WRONG"
        print(f"  {row['impl']:20s} {row['gbps']:7.0f} GB/s {row['ms'] * 1e3:9.2f} us{notes}", flush=True)


def main() -> None:
    parser = results.arguments(__doc__)
    parser.add_argument("--impl", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=40)
    args = results.parse(parser)
    rows, missing, start, ask = [], [], time.time(), Beside(measure, SECONDS)
    for name in results.chosen(CASES, args.cases):
        case = CASES[name]
        found = ask(case, args.impl, args.rounds)
        if found is None:
            print(f"\n{name}: no answer; again without peers", flush=True)
            missing.append(name)
            found = ask(case, OURS, args.rounds) or []
        show(case, found)
        rows += found
    ask.end()
    print(f"\n{time.time() - start:.0f} s" + (f"; no answer: {', '.join(missing)}" if missing else ""))
    if args.save and rows:
        results.save("decode", rows)


if __name__ == "__main__":
    main()
