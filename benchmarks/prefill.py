"""Prefill attention beside its peers: one process, interleaved, every output checked against float64 before it is timed.

    PYTHONPATH=src python -m benchmarks.prefill [case substring ...] [--impl NAME ...] [--rounds N] [--save]

`fp8attn` has BF16 queries and keys of the default format, rotated; `fp8attn-e4m3-keys` (or `-int8-keys`) has keys of the other format.
`fp8attn-q8` has FP8 queries over E4M3 keys that are not rotated, as the peers have (`benchmarks/peers.py`). All read pages as `append`
writes them: shuffled, each with its scales. They give no LSE, as `ops.attention` does not unless asked, and cuDNN for inference; FA3
always writes one. Times are medians of samples of several launches; TFLOPS count 4 Hq D per query and visible key. `rel_err` is over
sampled rows, each implementation against float64 on the bytes that it was given; `rel_err_mean1` the same with V of mean 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch

from fp8attn import KVPages
from fp8attn.kernels import prefill

from . import peers, results
from .fingerprint import launched, peer
from .measure import exact, in_processes, interleaved, relative, sampled_queries
from .problem import DEVICE, KEYS, Shape, given, ours

OURS = (*KEYS, "fp8attn-q8")  # queries in BF16, and in FP8
SAMPLE_MS = 20  # launches of a sample together
attention = partial(prefill.attention, return_lse=False)


def square(dim: int, causal: bool, *lengths: int, q_heads: int = 0, kv_heads: int = 0) -> Shape:
    """Prompts: as many queries as keys; 2048 / dim heads unless said."""
    return Shape(lengths, lengths, q_heads or 2048 // dim, kv_heads or q_heads or 2048 // dim, dim, causal)


K = 1024
CASES = {
    "D128-full-S16384": square(128, False, 16 * K),
    "D128-causal-S16384": square(128, True, 16 * K),
    "D128-causal-S4096": square(128, True, *(4 * K,) * 4),
    "D128-causal-S8192": square(128, True, *(8 * K,) * 2),
    "D128-causal-S65536": square(128, True, 64 * K, q_heads=8),
    "D128-causal-S1024": square(128, True, *(K,) * 16),
    "D64-causal-S16384": square(64, True, 16 * K),
    "D64-full-S16384": square(64, False, 16 * K),
    "D256-causal-S16384": square(256, True, 16 * K),
    "D256-full-S16384": square(256, False, 16 * K),
    "gqa-causal-S16384": square(128, True, 16 * K, q_heads=32, kv_heads=8),
    "gqa-causal-S131072": square(128, True, 128 * K, q_heads=32, kv_heads=8),
    "chunked-2k-on-128k": Shape((128 * K,), (2 * K,), 32, 8, 128, True),
    "varlen-mix": square(128, True, 9000, 130, 4096, 700, 2500, 64, 12000, 1500, 333, 6000, q_heads=32, kv_heads=8),
}


def inputs(shape: Shape, mean: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v, `[tokens, heads, head_dim]` BF16, V of that mean."""
    torch.manual_seed(0)
    heads = (shape.queries, shape.q_heads), (shape.keys, shape.kv_heads), (shape.keys, shape.kv_heads)
    q, k, v = (torch.randn(sum(lengths), count, shape.dim, device=DEVICE).bfloat16() for lengths, count in heads)
    return q, k, v + mean


class Own(NamedTuple):
    """One of ours, with what it was given."""

    call: Callable[[], torch.Tensor]
    q: torch.Tensor
    pages: KVPages


def calls(name: str) -> dict[str, Callable[[], torch.Tensor]]:
    """Our implementations of a case."""
    return {impl: run.call for impl, run in own(CASES[name], *inputs(CASES[name]), OURS).items()}


def own(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, wanted: Iterable[str]) -> dict[str, Own]:
    found = {}
    for impl in wanted:
        queries, pages = given(impl, shape, q, k, v)
        found[impl] = Own(ours(attention, shape, queries, pages), queries, pages)
    return found


def compile_kernel(name: str, impl: str) -> None:
    """Leave a case's kernels in Triton's cache."""
    own(CASES[name], *inputs(CASES[name]), [impl])[impl].call()
    torch.cuda.synchronize()


def error(shape: Shape, out: torch.Tensor, q: torch.Tensor, keys_of: Callable[[int], tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Relative error of sampled rows of the first and the last sequence and head.

    `keys_of(sequence)` gives the K and V that were meant, `[keys, num_kv_heads, head_dim]`.
    """
    pairs = []
    for seq in {0, len(shape.keys) - 1}:
        index = torch.tensor(sampled_queries(shape.queries[seq]), device=DEVICE)
        rows = index + shape.rows(seq).start
        k, v = keys_of(seq)
        for head in {0, shape.q_heads - 1}:
            kv_head = [head // (shape.q_heads // shape.kv_heads)]
            ref = exact(q[rows][:, [head]], k[:, kv_head], v[:, kv_head], shape.softmax_scale, shape.last_key(seq, index))
            pairs.append((out[rows][:, [head]], ref))
    return relative(pairs)


def implementations(shape: Shape, mean: float, wanted: list[str]) -> dict:
    """name -> (callable, its queries, its K and V by sequence)."""
    q, k, v = inputs(shape, mean)
    found = {
        impl: (run.call, run.q, lambda seq, pages=run.pages: pages.read(seq, shape.keys[seq], torch.float64))
        for impl, run in own(shape, q, k, v, [impl for impl in OURS if not wanted or impl in wanted]).items()
    }
    for name, run in peers.runs(shape, q, k, v, [name for name in peers.KERNELS if not wanted or name in wanted]).items():
        found[name] = run.call, run.q, lambda seq, run=run: [x.split(list(shape.keys))[seq] for x in (run.k, run.v)]
    return found


def measure(name: str, shape: Shape, wanted: list[str], rounds: int) -> list[dict]:
    rows: dict[str, dict] = {}
    for mean, key in ((1.0, "rel_err_mean1"), (0.0, "rel_err")):
        found = implementations(shape, mean, wanted)
        for impl, (call, q, keys_of) in list(found.items()):
            try:
                out = call()
                torch.cuda.synchronize()
            except RuntimeError as problem:
                peers.left_out(impl, problem)
                del found[impl]
                rows.pop(impl, None)
                continue
            rows.setdefault(impl, {"case": name, "impl": impl})[key] = round(error(shape, out, q, keys_of), 6)
            rows[impl]["fingerprint"] = launched(call) if impl in OURS else peer(impl)
        if mean:
            wanted = list(rows)  # whoever cannot is not asked again
            del found
            torch.cuda.empty_cache()
    calls = {impl: call for impl, (call, *_) in found.items()}
    once = interleaved(calls, 2)
    repeats = {impl: max(1, min(20, int(SAMPLE_MS / max(ms, 0.05)))) for impl, ms in once.items()}
    for impl, ms in interleaved(calls, rounds, repeats=repeats).items():
        rows[impl] |= {"ms": round(ms, 5), "tflops": round(shape.flops / ms * 1e-9, 1)}
    return [row for row in rows.values() if "ms" in row]


def show(rows: list[dict]) -> None:
    best = max((row["tflops"] for row in rows if row["impl"].endswith("fp8")), default=None)
    print(f"\n{rows[0]['case']}")
    for row in sorted(rows, key=lambda row: -row["tflops"]):
        ratio = f"  {row['tflops'] / best:5.3f}x the best FP8 peer" if best and row["impl"].startswith("fp8attn") else ""
        errors = f"err {row['rel_err']:.5f}  V mean 1 {row['rel_err_mean1']:.5f}"
        print(f"  {row['impl']:17s} {row['tflops']:7.1f} TFLOPS {row['ms']:9.4f} ms  {errors}{ratio}", flush=True)


def summary(rows: list[dict]) -> str:
    """One line a case: ours, the best FP8 peer, the ratio of the two, and ours' errors."""
    lines = [f"{'case':22s} {'fp8attn':>8s} {'-q8':>7s}  {'best FP8 peer':22s} {'q8/best':>7s} {'/q8':>6s}  {'err mean1':>9s}"]
    for case in dict.fromkeys(row["case"] for row in rows):
        by = {row["impl"]: row for row in rows if row["case"] == case}
        if not {"fp8attn", "fp8attn-q8"} <= by.keys():
            continue
        a, q8 = by["fp8attn"], by["fp8attn-q8"]
        peer = max((row for impl, row in by.items() if impl.endswith("fp8")), key=lambda row: row["tflops"], default=None)
        best = f"{peer['tflops']:7.1f} {peer['impl']:14s} {q8['tflops'] / peer['tflops']:7.3f}" if peer else f"{'none':22s} {'':7s}"
        lines.append(
            f"{case:22s} {a['tflops']:8.1f} {q8['tflops']:7.1f}  {best} {a['tflops'] / q8['tflops']:6.3f}  {q8['rel_err_mean1']:9.5f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = results.arguments(__doc__)
    parser.add_argument("--impl", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=9)
    args = results.parse(parser)
    names = results.chosen(CASES, args.cases)
    start = time.time()
    in_processes(compile_kernel, [(name, impl) for name in names for impl in OURS])
    print(f"peers: {', '.join(sorted(peers.available()))}; ready after {time.time() - start:.0f} s", flush=True)
    rows = []
    for name in names:
        begin = time.time()
        rows += (found := measure(name, CASES[name], args.impl, args.rounds))
        show(found)
        print(f"  {time.time() - begin:.0f} s", flush=True)
        torch.cuda.empty_cache()
    print(f"\n{summary(rows)}\n\n{time.time() - start:.0f} s")
    if args.save:
        results.save("prefill", rows)


if __name__ == "__main__":
    main()
