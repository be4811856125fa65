"""The portable Triton kernel compared with torch's BF16 attention, for prompts and decode steps.

The L2 cache is flushed before every run; decode steps are CUDA graphs. `gbps` counts the live bytes of K and V. `rel_err` compares sampled
queries with float64 on the bytes that each implementation was given. It includes BF16's own rounding of the output (1.7e-3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fp8attn.kernels import portable

from . import peers
from .measure import checked, timed
from .problem import K, own, square, steps

OURS = "fp8attn-triton"
PEERS = ("flash-bf16", "cudnn-bf16")
MOST_ERROR = 1e-2  # torch rounds its weights to BF16, which is 2e-3 with the output's rounding
CASES = {
    **{f"kernel-decode-B{b}-S{s}": steps(*(s,) * b) for b, s in ((1, 8192), (8, 32768), (16, 8192), (64, 8192))},
    "kernel-prefill-D128-causal-S4096-B4": square(128, True, *(4 * K,) * 4),
    "kernel-prefill-D128-causal-S16384-B1": square(128, True, 16 * K),
    "kernel-prefill-D128-full-S16384-B1": square(128, False, 16 * K),
    "kernel-prefill-D64-causal-S16384-B1": square(64, True, 16 * K),
    "kernel-prefill-D256-causal-S16384-B1": square(256, True, 16 * K),
}


def calls(case: str) -> dict[str, Callable]:
    return {OURS: own(portable.portable_attention, [OURS], CASES[case], *CASES[case].inputs())[OURS].call}


def measure(case: str) -> Iterator[dict]:
    shape, inputs = CASES[case], CASES[case].inputs()
    runs = own(portable.portable_attention, [OURS], shape, *inputs) | peers.runs(shape, *inputs, PEERS)
    rows, found = checked(case, shape, runs, MOST_ERROR, graphs="decode" in case)
    yield from timed(shape, rows, found, 40, flush=True)
