"""Prefill attention, compared with its peers.

`fp8attn` has BF16 queries and keys of the default format, rotated; `fp8attn-e4m3-keys` (or `-int8-keys`) has keys of
the other format. `fp8attn-exact` is `fp8attn` with `exact=True`.
`fp8attn-q8` has FP8 queries over E4M3 keys that are not rotated, as the peers have (`peers`). All read pages as
`append` writes them: shuffled, each with its scales. They give no LSE, as `ops.attention` by default, and cuDNN for
inference; FA3 always writes one. Times are medians of samples of several launches; TFLOPS count 4 Hq D per query and
visible key. `rel_err` is over sampled rows, each implementation against float64 on the bytes that it was given;
`rel_err_mean1` the same with V of mean 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from fp8attn import AttentionParams, KVPages
from fp8attn.kernels import prefill

from . import peers
from .measure import error, outputs, timed
from .problem import KEYS, K, Run, Shape, own, square

OURS = (*KEYS, "fp8attn-q8")  # queries in BF16, and in FP8


def attention(q: torch.Tensor, pages: KVPages, params: AttentionParams) -> tuple[torch.Tensor, torch.Tensor | None]:
    return prefill.prefill_attention(q, pages, params._replace(return_lse=False))


def exact(q: torch.Tensor, pages: KVPages, params: AttentionParams) -> tuple[torch.Tensor, torch.Tensor | None]:
    return attention(q, pages, params._replace(exact=True))


def runs_of_ours(shape: Shape, *inputs: torch.Tensor) -> dict[str, Run]:
    return own(attention, OURS, shape, *inputs) | {"fp8attn-exact": own(exact, ("fp8attn",), shape, *inputs)["fp8attn"]}


CASES = {
    "D128-full-S16384": square(128, False, 16 * K),
    "D128-causal-S16384": square(128, True, 16 * K),
    "D128-full-S4096": square(128, False, *(4 * K,) * 4),
    "D128-full-S65536": square(128, False, 64 * K, q_heads=8),
    "D128-causal-S4096": square(128, True, *(4 * K,) * 4),
    "D128-causal-S8192": square(128, True, *(8 * K,) * 2),
    "D128-causal-S65536": square(128, True, 64 * K, q_heads=8),
    "D128-causal-S1024": square(128, True, *(K,) * 16),
    "D64-causal-S16384": square(64, True, 16 * K),
    "D64-full-S16384": square(64, False, 16 * K),
    **{f"mha-causal-S{n * K}": square(128, True, n * K, q_heads=32) for n in (2, 4, 8)},
    "gqa-causal-S16384": square(128, True, 16 * K, q_heads=32, kv_heads=8),
    "gqa-causal-S131072": square(128, True, 128 * K, q_heads=32, kv_heads=8),
    "chunked-2k-on-128k": Shape((128 * K,), (2 * K,), 32, 8, 128, True),
    "varlen-mix": square(128, True, 9000, 130, 4096, 700, 2500, 64, 12000, 1500, 333, 6000, q_heads=32, kv_heads=8),
    "D192-causal-S16384": square(192, True, 16 * K, q_heads=10),
    "D256-causal-S16384": square(256, True, 16 * K),
    "D256-full-S16384": square(256, False, 16 * K),
}


def calls(case: str) -> dict[str, Callable]:
    return {impl: run.call for impl, run in runs_of_ours(CASES[case], *CASES[case].inputs()).items()}


def measure(case: str) -> Iterator[dict]:
    shape, rows = CASES[case], {}
    for mean, name in ((1.0, "rel_err_mean1"), (0.0, "rel_err")):
        inputs, found = shape.inputs(mean), {}
        runs = runs_of_ours(shape, *inputs) | peers.runs(shape, *inputs)
        for impl, run, out in outputs(case, runs):
            row = rows.setdefault(impl, {"case": case, "impl": impl})
            row[name], found[impl] = round(error(shape, out, run), 6), run.call
        del inputs, runs
    yield from timed(shape, rows, found, 9, sample_ms=20)
