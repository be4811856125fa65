"""Attention with head_dim 512, that of Gemma 4's full layers, beside vLLM's FlashAttention-4.

32 query heads and 4 KV heads (Gemma 4's 31B), causal: decode steps, and prompts in BF16. `fp8attn` and
`fp8attn-e4m3-keys` (or `-int8-keys`) are the portable kernels, which the backend `triton` has; `vllm-fa4-fp8` is what
vLLM runs with `--kv-cache-dtype fp8`. Each is a CUDA graph; the L2 cache is flushed before every run. `rel_err` is
against float64 on the bytes that each implementation was given. `gbps` counts the live bytes of K and V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fp8attn.kernels.portable import portable_attention

from . import peers
from .measure import checked, error, timed
from .problem import KEYS, K, Run, own, square, steps

HEADS = {"kv_heads": 4, "dim": 512}
CASES = {
    **{f"B{b}-S{s * K}": steps(*(s * K,) * b, group=8, **HEADS) for b, s in ((64, 8), (16, 8), (1, 128))},
    **{f"causal-S{s * K}": square(512, True, s * K, q_heads=32, kv_heads=4) for s in (4, 16)},
}
PEERS = ("vllm-fa4-fp8", "vllm-fa4-bf16")
MOST_ERROR = 3e-3  # BF16's rounding of the output is 1.6e-3


def runs(case: str) -> dict[str, Run]:
    return own(portable_attention, KEYS, CASES[case], *CASES[case].inputs())


def calls(case: str) -> dict[str, Callable]:
    return {impl: run.call for impl, run in runs(case).items()}


def measure(case: str) -> Iterator[dict]:
    shape = CASES[case]
    found = runs(case) | peers.runs(shape, *shape.inputs(), PEERS)
    rows, replays = checked(case, found, MOST_ERROR, lambda run, out: {"rel_err": round(error(shape, out, run), 6)})
    yield from timed(shape, rows, replays, 20, flush=True)
