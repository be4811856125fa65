"""One attention layer as a model calls it, K and V quantized within the call, beside BF16 attention and torchao's FP8.

Batch 1, 32 heads of 128 (`gqa`: 8 KV heads), `[B, H, S, D]` contiguous. `fp8attn` has keys of the default format, `fp8attn-e4m3-keys` (or
`-int8-keys`) of the other; `fp8attn-rope` is `fp8attn` with RoPE on queries and keys. `timed` says what was timed together: CUDA graphs of
the peers and of ours (`fp8attn-graph` is the graph of `fp8attn`), or calls from Python. Below 64k tokens only `fp8attn` is called, apart
from the graphs: its time includes the host's, and is compared with nothing. From 64k tokens on everything is called, since the host's time
is then negligible. Times are medians of samples of several calls; `sqnr_db` is over sampled rows of the first and the last head, against
float64 on the inputs before quantization.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

import fp8attn
from fp8attn.dense.rope import apply_rope
from fp8attn.numerics import sqnr_db

from . import peers
from .measure import exact, graph_of, left_out, outputs, sampled_queries, timed
from .problem import DEVICE, KEYS, K, Run, Shape, square

HEADS, KV_HEADS, DIM = 32, 8, 128
LONG = 64 * K  # tokens from which on everything is called: the host's time is negligible
PEERS = ("torchao", "fa3-bf16", "cudnn-bf16")
LEAST_DB = 15.0  # below, an output is wrong


@dataclass(frozen=True)
class Case:
    length: int
    causal: bool
    kv_heads: int = HEADS

    @property
    def shape(self) -> Shape:
        return square(DIM, self.causal, self.length, q_heads=HEADS, kv_heads=self.kv_heads)

    def inputs(self) -> list[torch.Tensor]:
        """Q, K and V, `[1, H, S, D]` BF16."""
        return [x[None].transpose(1, 2).contiguous() for x in self.shape.inputs()]


MASKS = {"full": False, "causal": True}
CASES = {
    f"{group}{mask}-S{n * K}": Case(n * K, causal, kv_heads)
    for group, kv_heads in (("", HEADS), ("gqa-", KV_HEADS))
    for mask, causal in MASKS.items()
    for n in (1, 2, 4, 8, 16, 32, 64, 128)
}


def tables(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of Llama's angles, `[length, DIM / 2]` BF16."""
    angle = torch.arange(length, device=DEVICE)[:, None] * 500000.0 ** (-torch.arange(0, DIM, 2, device=DEVICE) / DIM)
    return angle.cos().bfloat16(), angle.sin().bfloat16()


def decibels(case: Case, out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    """SQNR of sampled rows of the first and the last head; all `[1, H, S, D]`."""
    rows = torch.tensor(sampled_queries(case.length), device=DEVICE)
    heads = torch.tensor([0, HEADS - 1], device=DEVICE)
    held = [x[0, heads // (HEADS // case.kv_heads)].transpose(0, 1) for x in (k, v)]
    ref = exact(q[0, heads][:, rows].transpose(0, 1), *held, case.shape.softmax_scale, case.shape.last_key(0, rows))
    return sqnr_db(out[0, heads][:, rows].transpose(0, 1), ref)


def calls(case: str, inputs: tuple[torch.Tensor, ...] = ()) -> dict[str, Callable]:
    here = CASES[case]
    q, k, v, cos, sin = inputs or (*here.inputs(), *tables(here.length))
    options = {"is_causal": here.causal, "enable_gqa": here.kv_heads != HEADS}
    found = {impl: partial(fp8attn.scaled_dot_product_attention, q, k, v, key_dtype=name, **options) for impl, name in KEYS.items()}
    rope = partial(fp8attn.rope_scaled_dot_product_attention, q, k, v, cos, sin, **options)
    return found | {"fp8attn-graph": found["fp8attn"], "fp8attn-rope": rope}


def captured(name: str, call: Callable) -> Callable:
    """The call as a CUDA graph, or the call itself if it cannot be captured."""
    try:
        return graph_of(call)[0]
    except RuntimeError as problem:
        torch.cuda.synchronize()
        left_out(f"the graph of {name}", problem)
        return call


@torch.inference_mode()
def measure(case: str) -> Iterator[dict]:
    here = CASES[case]
    q, k, v = here.inputs()
    cos, sin = tables(here.length)
    rotated = [apply_rope(x.float(), cos, sin, backend="reference") for x in (q, k)]
    runs = {impl: Run(call, q, lambda seq: (k, v)) for impl, call in calls(case, (q, k, v, cos, sin)).items()}
    runs |= {
        impl: Run(lambda call=run.call: call().transpose(0, 1)[None], q, lambda seq: (k, v))
        for impl, run in peers.runs(here.shape, *(x[0].transpose(0, 1) for x in (q, k, v)), PEERS).items()
    }
    if here.length >= LONG:
        del runs["fp8attn-graph"]
    rows, groups = {}, {"graph": {}, "called": {}}
    for impl, run, out in outputs(case, runs):
        given = rotated if impl == "fp8attn-rope" else (q, k)
        how = "called" if impl == "fp8attn" or here.length >= LONG else "graph"
        rows[impl] = {"case": case, "impl": impl, "timed": how, "sqnr_db": round(decibels(here, out, *given, v), 2)}
        if not rows[impl]["sqnr_db"] > LEAST_DB:
            raise AssertionError(f"{case}: {impl} is wrong, {rows[impl]['sqnr_db']} dB")
        groups[how][impl] = run.call if how == "called" else captured(impl, run.call)
    del rotated
    # Apart: graphs would fill the queue, and what is called from Python behind them would not wait for the host.
    rounds = 21 if here.length < 8 * K else 7 if here.length < LONG else 3
    for found in groups.values():
        yield from timed(here.shape, rows, found, rounds, sample_ms=8 if here.length < LONG else 0)
