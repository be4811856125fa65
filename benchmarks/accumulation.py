"""How exactly every 8-bit kernel on this machine sums, by length, by the mean of values, and by batch.

`S<tokens>`: prompts. `rel_err` is what `fp8attn doctor` measures: equal weights, values of mean 1 and deviation 1/2.
`rel_err_<mean>` has values of deviation 1 instead. All kernels have enough rows to keep a row's sum in one block.

`latent-B<batch>-S<tokens>`: a decode step over latents (`latent.py` has the inputs and the error) of 128 heads, which
are two blocks of rows a sequence. So a GPU of 132 SMs has one block for all keys of a sequence in a batch of 66, and
66 blocks in a batch of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from fp8attn.formats.codec import FP8
from fp8attn.numerics import relative_error
from fp8attn_tools.diagnostics.accumulation import LENGTHS, PROMPT, kernels
from fp8attn_tools.diagnostics.accumulation import measure as accumulation

from . import latent, peers
from .problem import DEVICE, K, Shape

MEANS = (0.0, 0.3, 1.0)  # in deviations
BATCHES = (1, 8, 66)
STEPS = {f"latent-B{b}-S{n * K}": latent.case(128, *(n * K,) * b) for b in BATCHES for n in (2, 8, 32, 128)}
CASES = {f"S{length}": length for length in LENGTHS} | STEPS


def prompts(case: str, length: int) -> Iterator[dict]:
    peers.available()  # loads those in `.peers`, which `kernels` finds
    for impl, attend in kernels().items():
        (error,) = accumulation(attend, DEVICE, cases=[(1, length)]).errors.values()
        yield {"case": case, "impl": impl, "rel_err": error} | {
            f"rel_err_{mean:g}": prompt_error(attend, length, mean) for mean in MEANS
        }


def prompt_error(attend: Callable, length: int, mean: float) -> float:
    """The relative error of equal weights over values of this mean and deviation 1."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    v = mean + torch.randn(1, 1, length, PROMPT.channels, device=DEVICE, generator=generator)
    v, k = v.to(FP8), torch.zeros_like(v).to(FP8)
    q = torch.ones(1, PROMPT.heads, PROMPT.queries, PROMPT.channels, device=DEVICE).to(FP8)
    out = attend(q, k, v)
    return relative_error(out, v.double().mean(2, keepdim=True).expand_as(out))


def steps(case: str, shape: Shape) -> Iterator[dict]:
    rows: dict[str, dict] = {}
    for mean in MEANS:
        for impl, run in latent.runs(shape, mean).items():
            row = rows.setdefault(impl, {"case": case, "impl": impl})
            row[f"rel_err_{mean:g}"] = latent.error(shape, run.call(), run)
        torch.cuda.empty_cache()
    yield from rows.values()


def measure(case: str) -> Iterator[dict]:
    yield from steps(case, STEPS[case]) if case in STEPS else prompts(case, CASES[case])
