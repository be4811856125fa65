"""One attention layer as a model calls it, K and V quantized within the call, beside BF16 attention and torchao's FP8.

Batch 1, 32 heads of 128 (`gqa`: 8 KV heads), `[B, H, S, D]` contiguous. `fp8attn` has keys of the default format,
`fp8attn-e4m3-keys` (or `-int8-keys`) of the other; `fp8attn-rope` is `fp8attn` with RoPE on queries and keys. CUDA
graphs are timed; from 64k tokens on calls from Python, since the host's time is then negligible (`overhead` has it).
Times are medians of samples of several calls; `sqnr_db` is over sampled rows of the first and the last head, against
float64 on the inputs before quantization.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

import fp8attn
from fp8attn.numerics import sqnr_db

from . import peers
from .measure import exact, graph_of, left_out, outputs, sampled_queries, timed
from .problem import DEVICE, KEYS, K, Run, Shape, square

HEADS, KV_HEADS, DIM = 32, 8, 128
LONG = 64 * K  # tokens from which on calls are timed: the host's time is negligible
PEERS = ("torchao", "fa3-bf16", "cudnn-bf16")
LEAST_DB = 15.0  # below, an output is wrong


MASKS = {"full": False, "causal": True}
CASES = {
    f"{group}{mask}-S{n * K}": square(DIM, causal, n * K, q_heads=HEADS, kv_heads=kv_heads)
    for group, kv_heads in (("", HEADS), ("gqa-", KV_HEADS))
    for mask, causal in MASKS.items()
    for n in (1, 2, 4, 8, 16, 32, 64, 128)
}


def make_inputs(shape: Shape) -> list[torch.Tensor]:
    """Q, K and V, `[1, H, S, D]` BF16."""
    return [x[None].transpose(1, 2).contiguous() for x in shape.inputs()]


def tables(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of Llama's angles, `[length, DIM / 2]` BF16."""
    angle = torch.arange(length, device=DEVICE)[:, None] * 500000.0 ** (-torch.arange(0, DIM, 2, device=DEVICE) / DIM)
    return angle.cos().bfloat16(), angle.sin().bfloat16()


def decibels(shape: Shape, out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    """SQNR of sampled rows of the first and the last head; all `[1, H, S, D]`."""
    rows = torch.tensor(sampled_queries(out.shape[2]), device=DEVICE)
    heads = torch.tensor([0, HEADS - 1], device=DEVICE)
    held = [x[0, heads // (HEADS // shape.kv_heads)].transpose(0, 1) for x in (k, v)]
    ref = exact(q[0, heads][:, rows].transpose(0, 1), *held, shape.softmax_scale, shape.last_key(0, rows))
    return sqnr_db(out[0, heads][:, rows].transpose(0, 1), ref)


def calls(case: str, inputs: tuple[torch.Tensor, ...] = ()) -> dict[str, Callable]:
    shape = CASES[case]
    q, k, v, cos, sin = inputs or (*make_inputs(shape), *tables(shape.keys[0]))
    options = {"is_causal": shape.causal, "enable_gqa": shape.kv_heads != HEADS}
    found = {
        impl: partial(fp8attn.scaled_dot_product_attention, q, k, v, key_dtype=name, **options)
        for impl, name in KEYS.items()
    }
    rope = partial(fp8attn.rope_scaled_dot_product_attention, q, k, v, cos, sin, **options)
    return found | {"fp8attn-rope": rope}


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
    shape = CASES[case]
    length = shape.keys[0]
    q, k, v = make_inputs(shape)
    cos, sin = tables(length)
    rotated = [fp8attn.apply_rope(x.float(), cos, sin) for x in (q, k)]
    runs = {impl: Run(call, q, lambda seq: (k, v)) for impl, call in calls(case, (q, k, v, cos, sin)).items()}
    runs |= {
        impl: Run(lambda call=run.call: call().transpose(0, 1)[None], q, lambda seq: (k, v))
        for impl, run in peers.runs(shape, *(x[0].transpose(0, 1) for x in (q, k, v)), PEERS).items()
    }
    rows, found = {}, {}
    for impl, run, out in outputs(case, runs):
        given = rotated if impl == "fp8attn-rope" else (q, k)
        rows[impl] = {"case": case, "impl": impl, "sqnr_db": round(decibels(shape, out, *given, v), 2)}
        if not rows[impl]["sqnr_db"] > LEAST_DB:
            raise AssertionError(f"{case}: {impl} is wrong, {rows[impl]['sqnr_db']} dB")
        found[impl] = run.call if length >= LONG else captured(impl, run.call)
    del rotated
    rounds = 21 if length < 8 * K else 7 if length < LONG else 3
    yield from timed(shape, rows, found, rounds, sample_ms=8 if length < LONG else 0)
