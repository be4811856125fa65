"""Decode attention beside its peers: one process, interleaved, every output checked against float64 before it is timed.

    PYTHONPATH=src python -m benchmarks.decode [case substring ...] [--impl NAME ...] [--rounds N] [--eager] [--out FILE]

Peers come from `.peers/` (`../shared/peers/get_peers`); one that is not there is left out. Each implementation runs as a CUDA graph, as
decoding does, so that no host's speed is measured; the L2 cache is flushed before every run. `gbps` counts the live bytes of K and V.
`stream-ceiling` is the same producer with a consumer that only lets go of what it is given: what is possible at all. `fp8attn-claims` has
small ranges claimed by SMs as they become free. `rel_err` is against float64 on the bytes that each implementation was given, on the first
and the last sequence; ours have random scales per page and means per sequence, and FP16 queries and outputs (BF16's rounding alone is
1.6e-3).
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fp8attn import KVPages, reference
from fp8attn.kernels import decode
from fp8attn.kernels.gluon import TensorDescriptor, gl, gluon, mbarrier

from .results import ROOT, write

DEVICE = "cuda"
SOURCES = ("src/fp8attn/kernels/decode.py", "src/fp8attn/kernels/gluon.py", "src/fp8attn/layout.py", "benchmarks/decode.py")
PAGED_BY = 64  # tokens in a page of vLLM's


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
    def even(self) -> bool:
        return len(set(self.lengths)) == 1


def ragged(batch: int, longest: int) -> tuple[int, ...]:
    return (longest, *(random.Random(0).randrange(1, longest) for _ in range(batch - 2)), 1)


CASES = (
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


# The ceiling


@gluon.jit
def _drain(pipe, batch, worker, workers, BLOCK: gl.constexpr, PIECES: gl.constexpr):
    """What `decode._consume` does of waiting and walking, and no arithmetic."""
    cuts = decode.cut(batch.total(BLOCK), workers, PIECES)
    tile, turn = 0, 0
    index = gl.where(worker < cuts.workers, worker * cuts.pieces, -1)
    while index >= 0:
        low, high = cuts.bounds(index)
        seq, head, begin = batch.locate(low, BLOCK)
        while begin < high:
            _, _, _, _, first, count = batch.sequence(seq)
            i, j = decode.portion(begin, count, low, high)
            for _ in range(first + i, first + j):
                stage = tile % pipe.STAGES
                phase = (tile // pipe.STAGES) & 1
                mbarrier.wait(pipe.k_full.index(stage), phase)
                mbarrier.wait(pipe.v_full.index(stage), phase)
                mbarrier.arrive(pipe.empty.index(stage), count=1)
                tile += 1
            begin += count
            seq, head = batch.following(seq, head, count)
        index = decode.next_range(pipe, cuts, turn, PIECES)
        turn += 1


@gluon.jit(do_not_specialize=["table_stride", "num_seqs", "heads", "max_q", "workers"])
def _stream(k_desc, v_desc, table_ptr, table_stride, lengths_ptr, state_ptr, num_seqs, heads, max_q, workers, D: gl.constexpr,
            WIDTH: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, BLOCK: gl.constexpr, PIECES: gl.constexpr):  # fmt: skip
    worker = gl.program_id(0)
    batch = decode.Batch(
        lengths_ptr, lengths_ptr, lengths_ptr, num_seqs, heads, max_q, max_q, worker * 0, GROUP, False, False, False
    )  # fmt: skip
    pipe = decode.make_pipe(k_desc, v_desc, WIDTH, STAGES)
    gl.warp_specialize([
        (_drain, (pipe, batch, worker, workers, BLOCK, PIECES)),
        (decode.produce, (pipe, batch, worker, workers, k_desc, v_desc, table_ptr, table_stride, state_ptr, D, BLOCK, PIECES)),
    ], [1], [decode.PRODUCER_REGISTERS])  # fmt: skip


def stream(case: Case, pages: KVPages):
    launch = decode.Launch(case.dim, case.group, case.group, len(case.lengths))
    workers = launch.workers(decode._num_sms(torch.device(DEVICE)), case.heads * len(case.lengths))
    k_desc, v_desc = (
        TensorDescriptor.from_tensor(x.view(-1, x.shape[-1]), block, gl.NVMMASharedLayout.get_default_for(block, gl.float8e4nv))
        for x, block in zip((pages.k, pages.v), launch.blocks(), strict=True)
    )
    state = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    constants = {name: launch.constants()[name] for name in ("D", "WIDTH", "GROUP", "STAGES", "BLOCK", "PIECES")}
    return lambda: _stream[(workers,)](
        k_desc, v_desc, pages.page_table, pages.page_table.stride(0), pages.cache_seqlens, state, len(case.lengths), case.heads, 1, workers,
        **constants, **launch.options(),
    )  # fmt: skip


# Peers


def load_peers() -> set[str]:
    have = set()
    for name in ("fa3_fwd", "vllm_fa3"):
        source, library = ROOT / f".peers/{name}.so.xz", Path(f"/tmp/{name}.so")
        try:
            if not library.exists():
                subprocess.run(f"xz -dc {source} > {library}", shell=True, check=True)
            torch.ops.load_library(library)
            have.add(name)
        except (OSError, subprocess.CalledProcessError) as error:
            library.unlink(missing_ok=True)
            print(f"without {name}: {error}", flush=True)
    return have


def vllm_fa3(case: Case, q, k, v, table=None):
    """vLLM's FlashAttention-3: k and v `[batch, length, heads, dim]`, or `[pages, 64, heads, dim]` with their table."""
    batch, used = len(case.lengths), torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE)
    bounds = torch.arange(0, batch * case.queries + 1, case.queries, dtype=torch.int32, device=DEVICE)
    scales = [torch.ones(batch, case.heads, device=DEVICE) for _ in range(3)] if k.dtype == torch.float8_e4m3fn else [None] * 3
    longest = None if table is None else table.shape[1] * PAGED_BY
    return lambda: torch.ops._vllm_fa3_C.fwd(
        q, k, v, None, None, None, None, bounds, None, None, None, used, case.queries, longest, table, None, None, None, None, None,
        *scales, case.dim**-0.5, True, -1, -1, 0.0, True, None, 0, None, 0, None, 1, 0, None,
    )[0]  # fmt: skip


# What they are given, and what is right


def make_pages(case: Case) -> KVPages:
    """Random bytes, scales and means, in shuffled pages."""
    counts = [-(-n // 128) for n in case.lengths]
    pages = KVPages.empty(sum(counts), case.heads, case.dim, len(counts), max(counts), DEVICE)
    for part in range(0, pages.num_pages, 1024):
        for pool in (pages.k, pages.v):
            some = pool[part : part + 1024]
            some.copy_(torch.randn(some.shape, device=DEVICE, dtype=torch.float16))
    for scale in (pages.k_scale, pages.v_scale):
        scale.copy_(2.0 ** torch.randint(-1, 2, scale.shape, device=DEVICE))
    pages.k_mean.normal_()
    pages.v_mean.normal_()
    order = torch.randperm(pages.num_pages, device=DEVICE).int()
    for seq, ids in enumerate(order.split(counts)):
        pages.page_table[seq, : counts[seq]] = ids
    pages.cache_seqlens.copy_(torch.tensor(case.lengths))
    return pages


def relative(out: torch.Tensor, pairs) -> float:
    """Relative error over `(rows, reference)` pairs."""
    wrong = sum(float((out[rows].double() - ref).square().sum()) for rows, ref in pairs)
    return (wrong / sum(float(ref.square().sum()) for _, ref in pairs)) ** 0.5


def checked(case: Case) -> list[int]:
    return sorted({0, len(case.lengths) - 1})


def rows_of(case: Case, seq: int) -> slice:
    return slice(seq * case.queries, (seq + 1) * case.queries)


def options(case: Case) -> dict:
    return {
        "cu_seqlens_q": None, "max_seqlen_q": case.queries, "causal": True, "softmax_scale": case.dim**-0.5, "window": 0, "softcap": 0.0,
        "sinks": None, "leftpad_k": None,
    }  # fmt: skip


def paged_references(case: Case, q, pages: KVPages) -> list:
    found = []
    for seq in checked(case):
        one = {n: getattr(pages, n)[seq : seq + 1] for n in ("k_mean", "v_mean", "page_table", "cache_seqlens")}
        rows = rows_of(case, seq)
        ref, _ = reference.attention(
            q[rows], replace(pages, **one), compute_dtype=torch.float64, out_dtype=torch.float64, **options(case)
        )  # fmt: skip
        found.append((rows, ref))
    return found


def dense_references(case: Case, q, k, v) -> list:
    """The same for `[batch, length, heads, dim]`."""
    found = []
    for seq in checked(case):
        rows = rows_of(case, seq)
        qs = q[rows].double().unflatten(1, (case.heads, -1)).permute(1, 2, 0, 3)  # [heads, group, queries, dim]
        keys, values = (x[seq].double().transpose(0, 1) for x in (k, v))
        s = qs.flatten(1, 2) @ keys.transpose(1, 2) * case.dim**-0.5
        position = keys.shape[1] - case.queries + torch.arange(case.queries, device=DEVICE)
        hidden = torch.arange(keys.shape[1], device=DEVICE) > position[:, None]
        s = s.unflatten(1, (case.group, -1)).masked_fill(hidden, -torch.inf).flatten(1, 2)
        ref = (torch.softmax(s, -1) @ values).unflatten(1, (case.group, -1)).permute(2, 0, 1, 3).flatten(1, 2)
        found.append((rows, ref))
    return found


def implementations(case: Case, have: set[str]):
    """Yields (name, callable, references or None)."""
    torch.manual_seed(0)
    q = torch.randn(len(case.lengths) * case.queries, case.heads * case.group, case.dim, device=DEVICE).half()
    pages = make_pages(case)
    references = paged_references(case, q, pages)
    yield "fp8attn", lambda: decode.attention(q, pages, **options(case))[0], references
    yield "fp8attn-claims", lambda: decode.attention(q, pages, **options(case), claims=not decode.CLAIMS)[0], references
    yield "stream-ceiling", stream(case, pages), None
    if "vllm_fa3" not in have or not case.even or max(case.lengths) > 131072:
        return
    shape = (len(case.lengths), case.lengths[0], case.heads, case.dim)
    k8, v8 = (torch.randn(shape, device=DEVICE, dtype=torch.float16).to(torch.float8_e4m3fn) for _ in range(2))
    q8, q16 = q.to(torch.float8_e4m3fn), q.bfloat16()
    references = dense_references(case, q8.float(), k8, v8)
    yield "vllm-fa3-fp8", vllm_fa3(case, q8, k8, v8), references
    count = len(case.lengths) * case.lengths[0] // PAGED_BY
    order = torch.randperm(count, device=DEVICE)
    table = torch.empty_like(order).int()
    table[order] = torch.arange(count, device=DEVICE, dtype=torch.int32)  # page i of the batch lies at table[i]
    shuffled = [x.view(torch.uint8).view(count, PAGED_BY, *shape[2:])[order].view(torch.float8_e4m3fn) for x in (k8, v8)]
    yield "vllm-fa3-fp8-paged", vllm_fa3(case, q8, *shuffled, table.view(shape[0], -1)), references
    del shuffled
    k, v = k8.bfloat16(), v8.bfloat16()
    yield "vllm-fa3-bf16", vllm_fa3(case, q16, k, v), dense_references(case, q16, k, v)


def graph_of(call):
    """The call as a CUDA graph; its result is of the graph's own pool."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        result = call()
    return captured.replay, result


def measure(case: Case, have: set[str], wanted, rounds: int, eager: bool) -> list[dict]:
    rows, calls, alive = {}, {}, []
    for name, call, references in implementations(case, have):
        if wanted and name not in wanted:
            continue
        row = {"case": case.name, "impl": name}
        try:
            out = call()
            torch.cuda.synchronize()
            if references is not None:
                row["rel_err"] = round(relative(out, references), 7)
            run, result = (call, None) if eager else graph_of(call)
            if isinstance(result, torch.Tensor):
                run()
                torch.cuda.synchronize()
                assert torch.equal(result.view(torch.uint8), out.view(torch.uint8)) or "fa3" in name, "the graph's bits are not the call's"
        except Exception as problem:  # a peer that cannot do a case is left out of it, and said to be
            print(f"   {case.name} {name} failed: {type(problem).__name__} {str(problem)[:300]}", flush=True)
            continue
        rows[name], calls[name] = row, run
        alive.append(call)  # a graph does not hold what it reads: the call does
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
    times: dict[str, list] = {name: [] for name in calls}
    for _ in range(rounds):
        names = list(calls)
        random.shuffle(names)
        for name in names:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            start.record()
            calls[name]()
            end.record()
            times[name].append((start, end))
        torch.cuda.synchronize()
    for name, events in times.items():
        ms = statistics.median(start.elapsed_time(end) for start, end in events)
        rows[name] |= {"ms": round(ms, 5), "gbps": round(case.bytes * (2 if name.endswith("bf16") else 1) / ms * 1e-6, 1)}
    return list(rows.values())


def show(case: Case, rows: list[dict]) -> None:
    by = {row["impl"]: row for row in rows}
    print(f"\n{case.name} ({case.bytes / 1e6:.0f} MB)", flush=True)
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
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="*", help="substrings of names; none: all")
    parser.add_argument("--impl", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs: the host's time too")
    parser.add_argument("--out", type=Path, default=ROOT / "results/h100/decode.json")
    args = parser.parse_args()
    have = load_peers()
    rows, start = [], time.time()
    for case in CASES:
        if not args.cases or any(word in case.name for word in args.cases):
            rows += (found := measure(case, have, args.impl, args.rounds, args.eager))
            show(case, found)
            torch.cuda.empty_cache()
    print(f"\n{time.time() - start:.0f} s")
    if rows:
        write(args.out, rows, SOURCES)


if __name__ == "__main__":
    main()
