"""Prefill attention beside its peers: one process, interleaved, every output checked against float64 before it is timed.

    PYTHONPATH=src[:/tmp/site] python -m benchmarks.prefill [case substring ...] [--quick] [--impl NAME ...] [--out FILE]

Peers come from `.peers/` (`../shared/peers/get_peers`; cuDNN's frontend wheel installed on PYTHONPATH); one that is not there is left out.
`fp8attn` takes BF16 queries and does everything, per-page scales and means included; `fp8attn-q8` takes FP8 queries, as the peers do.
Times are medians; TFLOPS count 4 Hq D per query and visible key. `rel_err` is over sampled rows, each implementation against float64 on
the bytes that it was given; `rel_err_mean1` the same with V of mean 1.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fp8attn import KVPages, ops
from fp8attn.kernels import prefill

from .results import ROOT, write

FP8 = torch.float8_e4m3fn
DEVICE = "cuda"
SOURCES = ("src/fp8attn/kernels/prefill.py", "src/fp8attn/kernels/gluon.py", "src/fp8attn/layout.py", "benchmarks/prefill.py")


@dataclass(frozen=True)
class Case:
    name: str
    dim: int
    causal: bool
    keys: tuple[int, ...]
    queries: tuple[int, ...] | None = None  # None: as many as keys
    q_heads: int = 0
    kv_heads: int = 0

    @property
    def q_lens(self) -> tuple[int, ...]:
        return self.queries or self.keys

    @property
    def heads(self) -> tuple[int, int]:
        return self.q_heads or 2048 // self.dim, self.kv_heads or 2048 // self.dim

    @property
    def uniform(self) -> bool:
        return len(set(self.keys)) == 1 and len(set(self.q_lens)) == 1

    @property
    def flops(self) -> float:
        pairs = sum(n * k - (n * n / 2 if self.causal else 0) for n, k in zip(self.q_lens, self.keys, strict=True))
        return 4.0 * self.heads[0] * self.dim * pairs


K = 1024
CASES = (
    Case("D128-full-S16384", 128, False, (16 * K,)),
    Case("D128-causal-S16384", 128, True, (16 * K,)),
    Case("D128-causal-S4096", 128, True, (4 * K,) * 4),
    Case("D128-causal-S8192", 128, True, (8 * K,) * 2),
    Case("D128-causal-S65536", 128, True, (64 * K,), None, 8, 8),
    Case("D128-causal-S1024", 128, True, (K,) * 16),
    Case("D64-causal-S16384", 64, True, (16 * K,)),
    Case("D64-full-S16384", 64, False, (16 * K,)),
    Case("D256-causal-S16384", 256, True, (16 * K,)),
    Case("D256-full-S16384", 256, False, (16 * K,)),
    Case("gqa-causal-S16384", 128, True, (16 * K,), None, 32, 8),
    Case("gqa-causal-S131072", 128, True, (128 * K,), None, 32, 8),
    Case("chunked-2k-on-128k", 128, True, (128 * K,), (2 * K,), 32, 8),
    Case("varlen-mix", 128, True, (9000, 130, 4096, 700, 2500, 64, 12000, 1500, 333, 6000), None, 32, 8),
)
QUICK = ("D128-full-S16384", "D128-causal-S16384", "D128-causal-S4096", "D64-causal-S16384", "D256-causal-S16384")


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
    try:
        import cudnn  # noqa: F401

        have.add("cudnn")
    except ImportError as error:
        print(f"without cudnn: {error}", flush=True)
    return have


def offsets(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()


def fa3(case: Case, q, k, v):
    """FlashAttention-3's forward (single-level FP8). Arguments in its schema's order."""
    scales = [torch.ones(len(case.keys), case.heads[1], device=DEVICE) for _ in range(3)] if q.dtype == FP8 else [None] * 3
    if case.uniform:
        q, k, v = (x.unflatten(0, (len(case.keys), -1)) for x in (q, k, v))
        lengths = [None] * 7
    else:
        lengths = [offsets(case.q_lens), offsets(case.keys), None, None, None, max(case.q_lens), max(case.keys)]
    return lambda: torch.ops.fa3_fwd.fwd(
        q, k, v, None, None, None, None, *lengths, None, None, None, None, None, None, *scales, case.dim**-0.5, case.causal, -1, -1, 0, 0.0,
        True, None, 1, None, 0,
    )[0].reshape(-1, case.heads[0], case.dim)  # fmt: skip


def vllm_fa3(case: Case, q, k, v):
    """vLLM's FlashAttention-3 (two-level FP8)."""
    scales = [torch.ones(len(case.keys), case.heads[1], device=DEVICE) for _ in range(3)]
    cu_q, cu_k = offsets(case.q_lens), offsets(case.keys)
    return lambda: torch.ops._vllm_fa3_C.fwd(
        q, k, v, None, None, None, None, cu_q, cu_k, None, None, None, max(case.q_lens), max(case.keys), None, None, None, None, None, None,
        *scales, case.dim**-0.5, case.causal, -1, -1, 0.0, True, None, 1, None, 0, None, 1, 0, None,
    )[0].reshape(-1, case.heads[0], case.dim)  # fmt: skip


def cudnn_fp8(case: Case, q, k, v):
    """cuDNN's FP8 SDPA graph (FP8 out)."""
    import cudnn

    q, k, v = (x.unflatten(0, (len(case.keys), -1)).transpose(1, 2) for x in (q, k, v))
    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    fp8, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    g = cudnn.pygraph(io_data_type=fp8, intermediate_data_type=fp32, compute_data_type=fp32, handle=handle)
    inputs = [g.tensor(name=n, dim=list(x.shape), stride=list(x.stride()), data_type=fp8) for n, x in zip("qkv", (q, k, v), strict=True)]
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    scales = {n: g.tensor(name=n, dim=[1, 1, 1, 1], stride=[1, 1, 1, 1], data_type=fp32) for n in names}
    o, _, amax_s, amax_o = g.sdpa_fp8(
        q=inputs[0], k=inputs[1], v=inputs[2], **scales, is_inference=True, attn_scale=case.dim**-0.5, use_causal_mask=case.causal
    )
    out = torch.empty_like(q)
    o.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride()))
    for a in (amax_s, amax_o):
        a.set_output(True).set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1]).set_data_type(fp32)
    g.validate()
    g.build_operation_graph()
    g.create_execution_plans([cudnn.heur_mode.A])
    g.check_support()
    g.build_plans()
    workspace = torch.empty(max(1, g.get_workspace_size()), device=DEVICE, dtype=torch.uint8)
    one, amax = torch.ones(1, device=DEVICE), [torch.zeros(1, device=DEVICE) for _ in range(2)]
    pointers = dict(zip(inputs, (q.data_ptr(), k.data_ptr(), v.data_ptr()), strict=True))
    pointers |= {o: out.data_ptr(), amax_s: amax[0], amax_o: amax[1]} | dict.fromkeys(scales.values(), one)

    def call():
        g.execute(pointers, workspace, handle=handle)
        return out.transpose(1, 2).reshape(-1, case.heads[0], case.dim)

    call.keep = (q, k, v)
    return call


def cudnn_bf16(case: Case, q, k, v):
    q, k, v = (x.unflatten(0, (len(case.keys), -1)).transpose(1, 2) for x in (q, k, v))

    def call():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2).reshape(-1, case.heads[0], case.dim)

    return call


def ours(case: Case, q, pages: KVPages):
    options = {
        "cu_seqlens_q": None if case.uniform else offsets(case.q_lens), "max_seqlen_q": max(case.q_lens), "causal": case.causal,
        "softmax_scale": case.dim**-0.5, "window": 0, "softcap": 0.0, "sinks": None, "leftpad_k": None,
    }  # fmt: skip
    return lambda: prefill.attention(q, pages, **options)[0]


# What they are given, and what is right


def make_pages(case: Case, k, v) -> KVPages:
    """A cache that holds k and v, with scales and means as `append` makes them, its pages shuffled."""
    counts = [-(-n // 128) for n in case.keys]
    pages = KVPages.empty(sum(counts), case.heads[1], case.dim, len(counts), max(counts), DEVICE)
    order = torch.randperm(sum(counts), device=DEVICE).int()
    for seq, ids in enumerate(order.split(counts)):
        pages.page_table[seq, : counts[seq]] = ids
    ops.append(pages, k, v, cu_seqlens=offsets(case.keys), max_seqlen=max(case.keys), fix_means=True, backend="reference")
    return pages


def sampled_rows(case: Case) -> list[tuple[int, int, int]]:
    """(sequence, its query, head): blocks of rows from starts, middles and ends."""
    rows = []
    for seq in {0, len(case.keys) - 1}:
        n = case.q_lens[seq]
        for first in {0, max(n // 2 - 16, 0), max(n - 32, 0)}:
            rows += [(seq, i, head) for i in range(first, min(first + 32, n)) for head in (0, case.heads[0] - 1)]
    return rows


def error(case: Case, out, q, keys_of) -> float:
    """Relative error of the sampled rows; `keys_of(seq)` gives the float64 K and V `[keys, heads, dim]` that were meant."""
    group = case.heads[0] // case.heads[1]
    starts = [sum(case.q_lens[:i]) for i in range(len(case.q_lens))]
    wrong = right = 0.0
    by_block: dict[tuple[int, int], list[int]] = {}
    for seq, i, head in sampled_rows(case):
        by_block.setdefault((seq, head), []).append(i)
    for (seq, head), rows in by_block.items():
        k, v = (x[:, head // group] for x in keys_of(seq))
        index = torch.tensor(rows, device=DEVICE)
        at = index + starts[seq]
        s = q[at, head].double() @ k.T * case.dim**-0.5
        if case.causal:
            position = case.keys[seq] - case.q_lens[seq] + index
            s.masked_fill_(torch.arange(len(k), device=DEVICE) > position[:, None], -torch.inf)
        ref = torch.softmax(s, -1) @ v
        wrong += float((out[at, head].double() - ref).square().sum())
        right += float(ref.square().sum())
    return (wrong / right) ** 0.5


def implementations(case: Case, have: set[str], mean: float) -> dict:
    """name -> (callable, its queries, its K and V in float64)."""
    torch.manual_seed(0)
    hq, hkv = case.heads
    q = torch.randn(sum(case.q_lens), hq, case.dim, device=DEVICE).bfloat16()
    k, v = (torch.randn(sum(case.keys), hkv, case.dim, device=DEVICE).bfloat16() for _ in range(2))
    v = v + mean
    q8, k8, v8 = (x.to(FP8) for x in (q, k, v))
    pages = make_pages(case, k, v)
    starts = [sum(case.keys[:i]) for i in range(len(case.keys))]

    def dense(k, v):
        return lambda seq: [x[starts[seq] : starts[seq] + case.keys[seq]].double() for x in (k, v)]

    def paged(seq):
        return pages.read(seq, case.keys[seq], torch.float64)

    found = {"fp8attn": (ours(case, q, pages), q, paged), "fp8attn-q8": (ours(case, q8, pages), q8.float(), paged)}
    if "fa3_fwd" in have:
        found["fa3-fp8"] = (fa3(case, q8, k8, v8), q8.float(), dense(k8, v8))
        found["fa3-bf16"] = (fa3(case, q, k, v), q, dense(k, v))
    if "vllm_fa3" in have:
        found["vllm-fa3-fp8"] = (vllm_fa3(case, q8, k8, v8), q8.float(), dense(k8, v8))
    if case.uniform and case.queries is None:  # neither takes ragged batches, or aligns a causal mask to the end
        if "cudnn" in have:
            try:
                found["cudnn-fp8"] = (cudnn_fp8(case, q8, k8, v8), q8.float(), dense(k8, v8))
            except Exception as problem:  # the graph API raises what it likes
                print(f"   cudnn-fp8 cannot: {str(problem)[:120]}")
        found["cudnn-bf16"] = (cudnn_bf16(case, q, k, v), q, dense(k, v))
    return found


def timed(call, repeats: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def measure(case: Case, have: set[str], wanted, rounds: int) -> list[dict]:
    rows = {}
    for mean in (1.0, 0.0):
        found = {name: x for name, x in implementations(case, have, mean).items() if not wanted or name in wanted}
        for name, (call, q, keys_of) in list(found.items()):
            try:
                out = call()
                torch.cuda.synchronize()
                row = rows.setdefault(name, {"case": case.name, "impl": name})
                row["rel_err_mean1" if mean else "rel_err"] = round(error(case, out, q, keys_of), 6)
            except Exception as problem:  # a peer that cannot do a case is left out of it, and said to be
                print(f"   {name} failed: {type(problem).__name__} {str(problem)[:160]}", flush=True)
                del found[name]
                rows.pop(name, None)
        if mean:
            del found
            torch.cuda.empty_cache()
    times: dict[str, list[float]] = {name: [] for name in found}
    repeats = {name: max(1, min(20, int(20 / max(timed(call, 1), 0.05)))) for name, (call, *_) in found.items()}
    for _ in range(rounds):
        names = list(found)
        random.shuffle(names)
        for name in names:
            times[name].append(timed(found[name][0], repeats[name]))
    for name, row in rows.items():
        if name in times:
            row["ms"] = round(statistics.median(times[name]), 5)
            row["tflops"] = round(case.flops / row["ms"] * 1e-9, 1)
    return [row for row in rows.values() if "ms" in row]


def show(case: Case, rows: list[dict]) -> None:
    peers = [row["tflops"] for row in rows if row["impl"].endswith("fp8")]
    print(f"\n{case.name}" + (f"   best FP8 peer {max(peers):.0f}" if peers else ""), flush=True)
    for row in sorted(rows, key=lambda row: -row["tflops"]):
        ratio = f"  {row['tflops'] / max(peers):5.3f}x of it" if peers and row["impl"].startswith("fp8attn") else ""
        errors = f"err {row['rel_err']:.5f}  V mean 1 {row['rel_err_mean1']:.5f}"
        print(f"  {row['impl']:14s} {row['tflops']:7.1f} TFLOPS {row['ms']:9.4f} ms  {errors}{ratio}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="*", help="substrings of names; none: all")
    parser.add_argument("--quick", action="store_true", help="five cases, few rounds: under a minute")
    parser.add_argument("--impl", nargs="*", default=[])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--out", type=Path, default=ROOT / "results/h100/prefill.json")
    args = parser.parse_args()
    chosen = [c for c in CASES if (c.name in QUICK if args.quick else not args.cases or any(x in c.name for x in args.cases))]
    have = load_peers()
    rows, start = [], time.time()
    for case in chosen:
        rows += (found := measure(case, have, args.impl, args.rounds or (4 if args.quick else 9)))
        show(case, found)
        torch.cuda.empty_cache()
    print(f"\n{time.time() - start:.0f} s")
    if rows:
        write(args.out, rows, SOURCES)


if __name__ == "__main__":
    main()
