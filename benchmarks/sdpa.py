"""One attention layer as a model calls it, K and V quantized within the call, beside BF16 attention and torchao's FP8: one process,
interleaved, every output checked against float64 on the unquantized inputs before it is timed.

    PYTHONPATH=src python -m benchmarks.sdpa [case substring ...] [--impl NAME ...] [--save]

Batch 1, 32 heads of 128 (`gqa`: 8 KV heads), `[B, H, S, D]` contiguous, or transposed from `[B, S, H, D]`. `fp8attn` has keys of the
default format, `fp8attn-e4m3-keys` (or `-int8-keys`) of the other; `fp8attn-rope` is `fp8attn` with RoPE on queries and keys. `timed` says
what was timed together: CUDA graphs of the peers and of ours (`fp8attn-graph` is the graph of `fp8attn`), or calls from Python. Below 64k
tokens `fp8attn` alone is called, apart from the graphs: its time includes the host's, and is compared with nothing. From 64k tokens on
everything is called, since the host's time is nothing there. Times are medians of samples of several calls; `sqnr_db` is over sampled rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

import fp8attn
from fp8attn import ops
from fp8attn.numerics import sqnr_db

from . import peers, results
from .fingerprint import launched, peer
from .measure import exact, graph_of, interleaved, sampled_queries
from .problem import DEVICE, KEYS, Shape

HEADS, KV_HEADS, DIM = 32, 8, 128
SAMPLE_MS = 8  # calls of a sample together
SHORT_ROUNDS, ROUNDS, LONG_ROUNDS = 21, 7, 3  # of calls under a millisecond, others, and those of `LONG`
LONG = 65536  # tokens from which on calls are long: nothing is a graph, for the host's time is nothing beside the GPU's
OURS = (*KEYS, "fp8attn-graph", "fp8attn-rope")
PEERS = ("torchao", "fa3-bf16", "cudnn-bf16")
LEAST_DB = 15.0  # below, an output is wrong


@dataclass(frozen=True)
class Case:
    length: int
    causal: bool
    kv_heads: int = HEADS
    transposed: bool = False

    @property
    def shape(self) -> Shape:
        return Shape((self.length,), (self.length,), HEADS, self.kv_heads, DIM, self.causal)

    def inputs(self) -> list[torch.Tensor]:
        """Q, K and V, `[1, H, S, D]` BF16."""
        torch.manual_seed(0)
        xs = [torch.randn(1, self.length, h, DIM, device=DEVICE).bfloat16().transpose(1, 2) for h in (HEADS, self.kv_heads, self.kv_heads)]
        return xs if self.transposed else [x.contiguous() for x in xs]


K = 1024
LENGTHS = tuple(n * K for n in (1, 2, 4, 8, 16, 32, 64, 128))
MASKS = {"full": False, "causal": True}
CASES = {
    f"{group}{mask}-S{n}": Case(n, causal, kv_heads)
    for group, kv_heads in (("", HEADS), ("gqa-", KV_HEADS))
    for mask, causal in MASKS.items()
    for n in LENGTHS
} | {f"{mask}-S{n}-transposed": Case(n, causal, transposed=True) for mask, causal in MASKS.items() for n in (2 * K, 4 * K, 16 * K)}


def tables(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of Llama's angles, `[length, DIM / 2]` BF16."""
    angle = torch.arange(length, device=DEVICE)[:, None] * 500000.0 ** (-torch.arange(0, DIM, 2, device=DEVICE) / DIM)
    return angle.cos().bfloat16(), angle.sin().bfloat16()


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`x [1, H, S, D]` with RoPE, in FP32."""
    return ops.rotate(x.float(), cos, sin, backend="reference")


def decibels(case: Case, out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    """SQNR of sampled rows of the first and the last head; all `[1, H, S, D]`."""
    rows = torch.tensor(sampled_queries(case.length), device=DEVICE)
    heads = torch.tensor([0, HEADS - 1], device=DEVICE)
    picked = heads // (HEADS // case.kv_heads)
    ref = exact(
        q[0, heads][:, rows].transpose(0, 1), k[0, picked].transpose(0, 1), v[0, picked].transpose(0, 1), case.shape.softmax_scale,
        case.shape.last_key(0, rows),
    )  # fmt: skip
    return sqnr_db(out[0, heads][:, rows].transpose(0, 1), ref)


def captured(name: str, call: Callable) -> Callable:
    """The call as a CUDA graph; as it is, if it cannot be captured."""
    try:
        return graph_of(call)[0]
    except RuntimeError as problem:
        torch.cuda.synchronize()
        print(f"   {name} is called from Python: {str(problem).strip().splitlines()[0][:120]}")
        return call


def calls(name: str) -> dict[str, Callable]:
    """Our implementations of a case."""
    case = CASES[name]
    return own(case, *case.inputs(), *tables(case.length))


def own(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> dict[str, Callable]:
    options = {"is_causal": case.causal, "enable_gqa": case.kv_heads != HEADS}
    found = {impl: partial(fp8attn.scaled_dot_product_attention, q, k, v, key_dtype=name, **options) for impl, name in KEYS.items()}
    rope = partial(fp8attn.rope_scaled_dot_product_attention, q, k, v, cos, sin, **options)
    return found | {"fp8attn-graph": found["fp8attn"], "fp8attn-rope": rope}


def measure(name: str, case: Case, wanted: list[str]) -> list[dict]:
    q, k, v = case.inputs()
    cos, sin = tables(case.length)
    calls = own(case, q, k, v, cos, sin)
    tokens = [x[0].transpose(0, 1) for x in (q, k, v)]
    found = peers.runs(case.shape, *tokens, [impl for impl in PEERS if not wanted or impl in wanted])
    for impl, run in found.items():
        calls[impl] = lambda run=run: run.call().transpose(0, 1)[None]
    rows, graphs, called = {}, {}, {}
    for impl, call in calls.items():
        if (wanted and impl not in wanted) or (impl == "fp8attn-graph" and case.length >= LONG):
            continue
        try:
            out = call()
            torch.cuda.synchronize()
        except Exception as problem:  # a peer's, of any type
            peers.left_out(impl, problem)
            continue
        given = (rotated(q, cos, sin), rotated(k, cos, sin)) if impl == "fp8attn-rope" else (q, k)
        timed = "called" if impl == "fp8attn" or case.length >= LONG else "graph"
        rows[impl] = {"case": name, "impl": impl, "timed": timed, "sqnr_db": round(decibels(case, out, *given, v), 2)}
        rows[impl]["fingerprint"] = launched(call) if impl in OURS else peer(impl)
        if not rows[impl]["sqnr_db"] > LEAST_DB:
            raise AssertionError(f"{name}: {impl} is wrong, {rows[impl]['sqnr_db']} dB")
        del out, given
        if timed == "called":
            called[impl] = call
        else:
            graphs[impl] = captured(impl, call)
    # Apart: graphs would fill the queue, and what is called from Python behind them would not wait for the host.
    times = interleaved(called, LONG_ROUNDS) if case.length >= LONG else sampled(graphs) | sampled(called)
    for impl, ms in times.items():
        rows[impl] |= {"ms": round(ms, 5), "tflops": round(case.shape.flops / ms * 1e-9, 1)}
    return list(rows.values())


def sampled(calls: dict[str, Callable]) -> dict[str, float]:
    """Median milliseconds, samples of several calls: so many that what holds up the host for a moment is in few of them."""
    once = interleaved(calls, 5)  # the first calls of a kind are not replayed yet
    repeats = {impl: max(1, min(50, int(SAMPLE_MS / max(ms, 0.01)))) for impl, ms in once.items()}
    return interleaved(calls, SHORT_ROUNDS if max(once.values()) < 1 else ROUNDS, repeats=repeats)


def show(rows: list[dict]) -> None:
    """One line a case: every time, and over the best BF16 kernel's those that were timed with it."""
    cells = [f"{row['impl']} {row['ms'] * 1e3:.1f}" for row in rows]
    bf16 = [row for row in rows if row["impl"].endswith("bf16")]
    best = min(bf16, key=lambda row: row["ms"], default=None)
    ratios = [f"{row['impl']} {best['ms'] / row['ms']:.3f}x" for row in rows if best and row not in bf16 and row["timed"] == best["timed"]]
    print(f"{rows[0]['case']:26s} {'  '.join(ratios)} | us: {'  '.join(cells)} | {rows[0]['sqnr_db']} dB", flush=True)


@torch.inference_mode()
def main() -> None:
    parser = results.arguments(__doc__)
    parser.add_argument("--impl", nargs="*", default=[])
    args = results.parse(parser)
    start = time.time()
    print(f"peers: {', '.join(sorted(peers.available()))}", flush=True)
    rows = []
    for name in results.chosen(CASES, args.cases):
        rows += (found := measure(name, CASES[name], args.impl))
        show(found)
        torch.cuda.empty_cache()
    print(f"{time.time() - start:.0f} s")
    if args.save:
        results.save("sdpa", rows)


if __name__ == "__main__":
    main()
