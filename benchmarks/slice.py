"""The portable Triton kernel beside torch's BF16 attention: prompts, and decode steps.

The L2 cache is flushed before every run; decode steps are CUDA graphs. `gbps` counts the live bytes of K and V. `rel_err` is of sampled
queries against float64 on the bytes that each implementation was given, BF16's own rounding of the output (1.7e-3) included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from evidence.fingerprint import of_call
from fp8attn.kernels import portable

from .measure import error, graph_of, interleaved, outputs
from .problem import K, Run, Shape, own, square, steps

OURS = "fp8attn-triton"
PEERS = {"sdpa-flash-bf16": SDPBackend.FLASH_ATTENTION, "sdpa-cudnn-bf16": SDPBackend.CUDNN_ATTENTION}
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
    return {OURS: own(portable.attention, [OURS], CASES[case], *CASES[case].inputs())[OURS].call}


def torch_run(shape: Shape, backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    views = [x.unflatten(0, (len(shape.keys), -1)).transpose(1, 2) for x in (q, k, v)]
    # A decode step masks nothing; torch aligns its mask at the start.
    options = {"is_causal": shape.causal and shape.queries == shape.keys, "enable_gqa": shape.q_heads != shape.kv_heads}

    def call() -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(*views, **options).transpose(1, 2).flatten(0, 1)

    return Run(call, q, lambda seq: tuple(x.split(shape.keys)[seq] for x in (k, v)))


def measure(case: str) -> Iterator[dict]:
    shape, rows, timed = CASES[case], {}, {}
    inputs = shape.inputs()
    runs = own(portable.attention, [OURS], shape, *inputs) | {name: torch_run(shape, x, *inputs) for name, x in PEERS.items()}
    decodes = max(shape.queries) == 1
    for impl, run, out in outputs(case, runs):
        rows[impl] = {"case": case, "impl": impl, "rel_err": error(shape, out, run), "fingerprint": of_call(impl, run.call)}
        if not rows[impl]["rel_err"] < MOST_ERROR:
            raise AssertionError(f"{case}: {impl} is wrong, {rows[impl]['rel_err']:.1e}")
        timed[impl] = graph_of(run.call)[0] if decodes else run.call
    for impl, ms in interleaved(timed, rounds=40, flush=True).items():
        elements = shape.kv_elements * (1 if impl == OURS else 2)
        speed = {"gbps": round(elements / ms * 1e-6)} if decodes else {"tflops": round(shape.flops / ms * 1e-9, 1)}
        yield rows[impl] | {"ms": round(ms, 5)} | speed
    torch.cuda.empty_cache()
