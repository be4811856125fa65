"""Full attention at the shapes of video models: the noise that 8 bits leave in the output, and the time.

A case is a layer's self-attention, head_dim 128, BF16, without text tokens, and with some of the heads, so that no call
takes long. Tokens are latent frames x height x width, in patches: Wan 2.1 and 2.2 14B 21 x 45 x 80 (81 frames of 720p),
20 of 40 heads; MiniMax H3 91 x 34 x 60 (362 frames of 1920 x 1088), 4 of 56 heads.
H3 has V in a view of all heads' Q, K and V: its rows are 21,504 elements apart, and from token 99,865 on they are past
2^31.

`noise` is what a model gets: the relative error of sampled queries' output against float64 on the BF16 inputs.
`rel_err` is against float64 on the bytes that the kernel was given, as in `prefill`. `_mean1`: V has a mean of 1.
Scores are normal with a deviation of 1, so that the weights are as flat as if a third of all keys had equal ones.

`fp8attn-call`, `comfy-call`, `torchao` and those in BF16 are whole calls, BF16 in and out. The others are kernels
alone: K and V, and Q where it is 8-bit, are quantized before. `fp8attn`, `fp8attn-e4m3-keys` (or `-int8-keys`),
`fp8attn-exact` and `fp8attn-q8` are those of `prefill`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

import fp8attn

from . import peers
from .measure import error, exact, outputs, poisoned, relative, sampled_queries, timed
from .peers import dense
from .prefill import runs_of_ours
from .problem import DEVICE, KEYS, Run, Shape, square

PEERS = ("comfy", "comfy-call", "sage", "vllm-fa3-fp8", "fa3-fp8", "cudnn-fp8", "torchao", "fa3-bf16", "cudnn-bf16")
MOST = 0.15  # an output of ours with more noise is wrong: E4M3 leaves 2.6% in each of Q, K, V and the weights
ROUNDS = 3  # calls take up to a third of a second


class Case(NamedTuple):
    """A layer's attention.

    Attributes:
        fused: V is a view of `[tokens, 3, fused, head_dim]`: its last heads; 0: it is contiguous.
    """

    shape: Shape
    fused: int = 0

    def inputs(self, mean: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `Shape.inputs`."""
        q, k, v = self.shape.inputs(mean)
        if self.fused:
            tokens, heads, dim = v.shape
            v = torch.empty(tokens, 3, self.fused, dim, device=DEVICE, dtype=v.dtype)[:, 2, -heads:].copy_(v)
        return q, k, v


CASES = {
    "wan-720p-S75600": Case(square(128, False, 21 * 45 * 80, q_heads=20)),
    "h3-1088p-S185640": Case(square(128, False, 91 * 34 * 60, q_heads=4), 56),
}


def runs_of_calls(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Run]:
    """Ours as a model calls them."""
    given = dense.batched(shape, q, k, v)
    attend = partial(fp8attn.scaled_dot_product_attention, *given)
    return {
        impl.replace("fp8attn", "fp8attn-call"): Run(
            lambda keys=keys: dense.rows(attend(key_dtype=keys)), q, shape.split(k, v)
        )
        for impl, keys in KEYS.items()
    }


def runs(shape: Shape, *inputs: torch.Tensor) -> dict[str, Run]:
    """Ours."""
    return runs_of_ours(shape, *inputs) | runs_of_calls(shape, *inputs)


def calls(case: str) -> dict[str, Callable]:
    return {impl: run.call for impl, run in runs(CASES[case].shape, *CASES[case].inputs()).items()}


@torch.inference_mode()
def measure(case: str) -> Iterator[dict]:
    shape, rows = CASES[case].shape, {}
    index = torch.tensor(sampled_queries(shape.queries[0]), device=DEVICE)
    for mean, end in ((1.0, "_mean1"), (0.0, "")):
        q, k, v = inputs = CASES[case].inputs(mean)
        ref, found = exact(q[index], k, v, shape.softmax_scale), {}
        made = runs(shape, *inputs) | peers.runs(shape, *inputs, PEERS)
        with poisoned():
            for impl, run, out in outputs(case, made):
                noise = relative([(run.unit * out[index].double(), ref)])
                if impl.startswith("fp8attn") and not noise <= MOST:
                    raise AssertionError(f"{case}: {impl} is wrong, {noise:.1%} off")
                row = rows.setdefault(impl, {"case": case, "impl": impl})
                row |= {f"noise{end}": round(noise, 6), f"rel_err{end}": round(error(shape, out, run), 6)}
                found[impl] = run.call
        del inputs, made, q, k, v
    yield from timed(shape, rows, found, ROUNDS)
