"""How exactly every 8-bit kernel on this machine sums, by length, by the mean of values, and by batch.

`S<tokens>`: `rel_err` is what `fp8attn doctor` measures, of prompts with equal weights and values of mean 1 and
deviation 1/2.

The other cases have random queries and keys, and values of deviation 1; `rel_err_<mean>` is against float64 on the
bytes that each implementation was given, of the first sequence. `prompt-S<tokens>`: 1,024 queries of 16 heads, which
see all tokens. `step-B<batch>-S<tokens>`: a decode step of 8 query heads and 2 KV heads. `latent-B<batch>-S<tokens>`:
one over latents (`latent.py`), 128 heads, which are two blocks of rows. So of both kinds of steps an H200, which has
132 SMs, has 66 blocks a sequence in a batch of one, and one block for all tokens of a sequence in a batch of 66.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from fp8attn import scaled_dot_product_attention_quantized
from fp8attn.formats.codec import FP8
from fp8attn.kernels import decode, prefill
from fp8attn_tools.diagnostics.accumulation import LENGTHS, PROMPT, kernels
from fp8attn_tools.diagnostics.accumulation import measure as accumulation

from . import latent, peers
from .measure import error, outputs
from .problem import DEVICE, K, Run, Shape, own, steps

MEANS = (0.0, 0.3, 1.0)  # in deviations
BATCHES = (1, 8, 66)
TOKENS = tuple(n * K for n in (2, 8, 32, 128))
PROMPTS = {f"prompt-S{n}": Shape((n,), (1024,), 16, 16, 128, False) for n in TOKENS}
MOST = 1 << 22  # tokens of a batch over K and V: more are more bytes than some kernels can count
STEPS = {f"step-B{b}-S{n}": steps(*(n,) * b, kv_heads=2) for b in BATCHES for n in TOKENS if b * n <= MOST}
LATENTS = {f"latent-B{b}-S{n}": latent.case(128, *(n,) * b) for b in BATCHES for n in TOKENS}
SHAPES = PROMPTS | STEPS | LATENTS
CASES = {f"S{length}": length for length in LENGTHS} | SHAPES


def ours(case: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Run]:
    """Our implementation of a case over K and V."""
    attention, queries = (prefill.prefill_attention, q) if case in PROMPTS else (decode.decode_attention, q.half())
    return own(attention, ("fp8attn",), SHAPES[case], queries, k, v)


def runs(case: str, mean: float) -> dict[str, Run]:
    """The 8-bit implementations of a case; of latents, the one in BF16, too."""
    shape = SHAPES[case]
    if case in LATENTS:
        return latent.runs(shape, mean)
    inputs = shape.inputs(mean)
    named = peers.PREFILL if case in PROMPTS else peers.DECODE
    theirs = peers.runs(shape, *inputs, [name for name in named if peers.CALLS[name].levels])
    return ours(case, *inputs) | theirs


def calls(case: str) -> dict[str, Callable]:
    if case in LATENTS:
        shape = LATENTS[case]
        return {"fp8attn": latent.ours(shape, *latent.inputs(shape, 0.0)).call}
    if case in SHAPES:
        return {impl: run.call for impl, run in ours(case, *SHAPES[case].inputs()).items()}
    heads = (PROMPT.heads, PROMPT.queries), (1, CASES[case]), (1, CASES[case])
    q, k, v = (torch.zeros(1, count, tokens, PROMPT.channels, device=DEVICE).to(FP8) for count, tokens in heads)
    return {"fp8attn hopper": partial(scaled_dot_product_attention_quantized, q, k, v)}


def errors(case: str) -> Iterator[dict]:
    """The rows of a case of `SHAPES`."""
    rows: dict[str, dict] = {}
    for mean in MEANS:
        for impl, run, out in outputs(case, runs(case, mean)):
            off = latent.error(SHAPES[case], out, run) if case in LATENTS else error(SHAPES[case], out, run, (0,))
            rows.setdefault(impl, {"case": case, "impl": impl})[f"rel_err_{mean:g}"] = off
        torch.cuda.empty_cache()
    yield from rows.values()


def measure(case: str) -> Iterator[dict]:
    if case in SHAPES:
        yield from errors(case)
        return
    peers.available()  # loads those in `.peers`, which `kernels` finds
    for impl, attend in kernels().items():
        (off,) = accumulation(attend, DEVICE, cases=[(1, CASES[case])]).errors.values()
        yield {"case": case, "impl": impl, "rel_err": off}
