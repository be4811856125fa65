"""A stack of Wan2.1-14B-shaped transformer blocks (random weights, BF16) on 81 frames: FP8 attention beside BF16 attention.

    PYTHONPATH=src python -m benchmarks.wan [case substring ...] [--save]

A block is self-attention with RoPE, cross-attention to 512 tokens of text, a feed-forward network, and modulation by the timestep: 40 heads
of 128, hidden 5120, FFN 13824. 81 frames are 21 latent frames, of H/16 x W/16 tokens each: 75,600 at 1280x720, 171,360 at 1920x1088
(1080 is no multiple of 16). The blocks of a stack share their weights, which costs them no less time. Norms are torch's fused ones and
RoPE is one kernel (`ops.rotate`), with every attention alike.

Rows `block-*` are one block; `stack-*` a stack that runs as a user runs it, `fp8_attention` with the first and last layers in the faster
BF16 attention of the two, beside a stack that is BF16 throughout. The model has 40 layers, of which a user would leave 2 + 2 in BF16; the
stack has as many of them as the seconds allow, with the same share in BF16: 20 with 1 + 1 at 720p, 10 with 1 at 1080p (`layers` and
`bf16_layers` in the rows). Nothing is extrapolated. Before it is timed, the FP8 block's self-attention must be near the BF16 one's.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import fp8attn
from fp8attn import ops
from fp8attn.numerics import relative_error

from . import results
from .measure import interleaved
from .problem import DEVICE
from .swap import beside_best, bf16_systems, inside, within


@dataclass(frozen=True)
class Case:
    grid: tuple[int, int, int]  # latent frames, rows and columns of tokens
    layers: int  # of the stack
    skip_first: int
    skip_last: int
    rounds: int  # of the block; the stack runs once

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]


@dataclass(frozen=True)
class Sizes:
    heads: int = 40
    head_dim: int = 128
    ffn: int = 13824
    text: int = 512

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim


CASES = {"720p": Case((21, 45, 80), 20, 1, 1, 3), "1080p": Case((21, 68, 120), 10, 1, 0, 2)}
WAN = Sizes()
EPS = 1e-6
SCORES = 1.5  # how far a row's scores spread: attention that is neither flat nor one-hot. Q and K in FP8 move them by 0.056


class Attention(nn.Module):
    """Self-attention, or attention to `text`; queries and keys are normalised over all heads."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(sizes.hidden, sizes.hidden) for _ in range(4))
        self.norm_q, self.norm_k = (nn.RMSNorm(sizes.hidden, EPS) for _ in range(2))
        nn.init.constant_(self.norm_q.weight, SCORES)
        self.heads = sizes.heads

    def forward(self, x: torch.Tensor, text: torch.Tensor | None = None, rope: tuple[torch.Tensor, torch.Tensor] | None = None):
        given = x if text is None else text
        q, k, v = self.norm_q(self.q(x)), self.norm_k(self.k(given)), self.v(given)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))  # [B, H, S, D]
        if rope is not None:
            q, k = (ops.rotate(part, *rope, rope_interleaved=True) for part in (q, k))
        out = F.scaled_dot_product_attention(q, k, v)
        return self.out(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attn1, self.attn2 = Attention(sizes), Attention(sizes)
        self.norm2 = nn.LayerNorm(sizes.hidden, EPS)
        self.ffn = nn.Sequential(nn.Linear(sizes.hidden, sizes.ffn), nn.GELU("tanh"), nn.Linear(sizes.ffn, sizes.hidden))
        self.modulation = nn.Parameter(torch.randn(6, sizes.hidden) / sizes.hidden**0.5)

    def forward(self, x: torch.Tensor, text: torch.Tensor, time: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = (self.modulation + time).unbind(-2)
        x = torch.addcmul(x, self.attn1(modulated(x, shift, scale), rope=rope), gate)
        x = x + self.attn2(self.norm2(x), text)
        return torch.addcmul(x, self.ffn(modulated(x, ffn_shift, ffn_scale)), ffn_gate)


def modulated(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=EPS), 1 + scale)


def rope_tables(grid: tuple[int, int, int], dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`[S, D / 2]` each, of pairs of neighbours: channels are shared out over frame, row and column, most to the frame."""
    plane = dim // 6 * 2
    angles = []
    for axis, size in enumerate(grid):
        width = (dim - 2 * plane, plane, plane)[axis]
        frequency = 10000.0 ** -(torch.arange(0, width, 2, device=DEVICE) / width)
        angle = torch.arange(size, device=DEVICE)[:, None] * frequency
        angles.append(angle.view(*(size if i == axis else 1 for i in range(3)), -1).expand(*grid, -1))
    angle = torch.cat(angles, -1).flatten(0, 2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


class Stack(nn.Module):
    """`layers` blocks, each a module of its own, with the parameters of one."""

    def __init__(self, block: Block, layers: int) -> None:
        super().__init__()
        shared = {id(p): p for p in block.parameters()}
        self.blocks = nn.ModuleList(copy.deepcopy(block, dict(shared)) for _ in range(layers))

    def forward(self, x: torch.Tensor, *given) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, *given)
        return x


def inputs(case: Case, sizes: Sizes, dtype: torch.dtype) -> tuple:
    """x, text, time, rope."""
    x, text, time = (torch.randn(1, n, sizes.hidden, dtype=dtype, device=DEVICE) for n in (case.tokens, sizes.text, 6))
    return x, text, time / sizes.hidden**0.5, rope_tables(case.grid, sizes.head_dim, dtype)


def measure(name: str, case: Case, sizes: Sizes, block: Block) -> list[dict]:
    given = inputs(case, sizes, next(block.parameters()).dtype)
    systems = bf16_systems()
    ours = inside(systems, fp8attn.AttentionPolicy(min_length=sizes.text + 1))  # text goes to the context around
    # One attention first: it warms up what has to be compiled or planned, and must be right.
    attend = partial(block.attn1, given[0], None, given[3])
    attention = {impl: within(context, attend)() for impl, context in {**systems, "fp8attn": ours}.items()}
    expected = attention[next(iter(attention))]
    errors = {impl: relative_error(out, expected) for impl, out in attention.items()}
    for impl, error in errors.items():
        assert error < (0.15 if impl == "fp8attn" else 0.02), f"{impl}, {name}: self-attention differs by {error:.3f}"
    del attention, expected
    calls = {impl: within(context, partial(block, *given)) for impl, context in {**systems, "fp8attn": ours}.items()}
    rows = beside_best([
        {"case": f"block-{name}", "impl": impl, "tokens": case.tokens, "ms": round(ms, 3), "rel_err": round(errors[impl], 5)}
        for impl, ms in interleaved(calls, case.rounds).items()
    ])  # fmt: skip
    best = next(row["beside"] for row in rows if row["impl"] == "fp8attn")
    return rows + stack_rows(name, case, sizes, block, given, best, systems[best])


def stack_rows(name: str, case: Case, sizes: Sizes, block: Block, given: tuple, best: str, bf16: Callable) -> list[dict]:
    stack = Stack(block, case.layers)
    policy = fp8attn.AttentionPolicy(min_length=sizes.text + 1, skip_first=case.skip_first, skip_last=case.skip_last)
    reports = []

    def mixed() -> torch.Tensor:
        with bf16(), fp8attn.fp8_attention(policy, stack) as report:  # what the policy leaves out goes to the context around
            reports.append(report)
            return stack(*given)

    times = interleaved({best: within(bf16, partial(stack, *given)), "fp8attn": mixed}, 1)
    layers_in_bf16 = case.skip_first + case.skip_last
    assert all(report.fp8_calls == case.layers - layers_in_bf16 for report in reports), str(reports[0])
    return beside_best([
        {
            "case": f"stack-{name}", "impl": impl, "tokens": case.tokens, "layers": case.layers,
            "bf16_layers": layers_in_bf16 if impl == "fp8attn" else case.layers, "ms": round(ms, 2),
        }
        for impl, ms in times.items()
    ])  # fmt: skip


def build(sizes: Sizes, dtype: torch.dtype = torch.bfloat16) -> Block:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return Block(sizes).to(dtype).eval()


@torch.inference_mode()
def main() -> None:
    args = results.parse(results.arguments(__doc__))
    start = time.time()
    block, rows = build(WAN), []
    for name in results.chosen(CASES, args.cases):
        rows += (found := measure(name, CASES[name], WAN, block))
        print(*found, f"{time.time() - start:.0f} s", sep="\n", flush=True)
        torch.cuda.empty_cache()
    if args.save:
        results.save("wan", rows)


if __name__ == "__main__":
    main()
