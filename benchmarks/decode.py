"""A decode step's attention, compared with its peers and with a kernel that only reads.

Each implementation (`peers` has the others) runs as a CUDA graph, as decoding does, so that no host's speed is
measured; the L2 cache is flushed before every run. `gbps` counts the live bytes of K and V. `stream-ceiling` is the
same producer with a consumer that only releases
what it gets: what is possible at all. HPC-Ops' plan of a step, which it makes once for all layers, is not timed.
`rel_err` is against float64 on the bytes that each implementation was given, on the first and the last sequence; ours
have page scales that differ, rotated queries, and FP16 queries and outputs (BF16's rounding alone is 1.6e-3). `fp8attn`
has keys of the default format, `fp8attn-e4m3-keys` (or `-int8-keys`) of the other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch

from fp8attn.formats.page_layout import PAGE_SIZE
from fp8attn.kernels import decode

from . import peers
from .measure import checked, error, graph_of, timed
from .problem import DEVICE, KEYS, K, Run, hold, own, steps

MOST_KEYS = 128 * K  # of a sequence, for the peers
MOST_ERROR = 1e-3  # rotated queries over E4M3 keys are rounded to FP16: up to 6.8e-4 on an H200


def ragged(batch: int, longest: int) -> tuple[int, ...]:
    return (longest, *(random.Random(0).randrange(1, longest) for _ in range(batch - 2)), 1)


EVEN = ((1, 8192), (1, 131072), (8, 32768), (16, 8192), (64, 8192), (32, 2048), (4, 131072))
CASES = {
    **{f"B{b}-S{s}": steps(*(s,) * b) for b, s in EVEN},
    **{f"B{b}-S{s}-ragged": steps(*ragged(b, s)) for b, s in ((16, 16384), (64, 8192))},
    "B1-S1024": steps(1024),
    "B8-S512": steps(*(512,) * 8),
    "B16-S8192-G8": steps(*(8192,) * 16, group=8),
    "B16-S8192-G1": steps(*(8192,) * 16, group=1),
    "B16-S8192-G16": steps(*(8192,) * 16, kv_heads=4, group=16),
    "B16-S8192-D64": steps(*(8192,) * 16, kv_heads=16, dim=64),
    "B16-S8192-D256": steps(*(8192,) * 16, kv_heads=4, dim=256),
    "B16-S8192-q4": steps(*(8192,) * 16, queries=4),
    "B1-S1048576": steps(K * K, kv_heads=4),
}


def runs_of_ours(case: str) -> dict[str, Run]:
    """Our kernel over shuffled pages whose scales differ."""
    shape = CASES[case]
    q, k, v = shape.inputs(dtype=torch.float16)
    for x in (k, v):
        pages = -(-len(x) // PAGE_SIZE)
        x *= (2.0 ** torch.randint(-1, 2, (pages, 1, 1), device=DEVICE)).repeat_interleave(PAGE_SIZE, 0)[: len(x)]
    return own(decode.decode_attention, KEYS, shape, q, k, v, spare=0)


def calls(case: str) -> dict[str, Callable]:
    return {impl: run.call for impl, run in runs_of_ours(case).items()}


def ceilings(case: str) -> dict[str, Callable]:
    from .stream import stream  # it is made of parts of the kernel, which other revisions may not have

    pages = hold(CASES[case], *CASES[case].inputs()[1:], key_dtype=list(KEYS.values())[-1], spare=0)
    return {"stream-ceiling": stream(CASES[case], pages)}


def measure(case: str) -> Iterator[dict]:
    shape = CASES[case]
    theirs = peers.runs(shape, *shape.inputs(), peers.DECODE) if max(shape.keys) <= MOST_KEYS else {}
    runs = runs_of_ours(case) | theirs  # a graph does not hold what it reads: the runs do
    rows, replays = checked(case, runs, MOST_ERROR, lambda run, out: {"rel_err": round(error(shape, out, run), 7)})
    streams = ceilings(case)
    for impl, call in streams.items():
        rows[impl] = {"case": case, "impl": impl}
        replays[impl], _ = graph_of(call)
    yield from timed(shape, rows, replays, 40, flush=True)
