"""A stack of Wan2.1-14B-shaped transformer blocks (random weights, BF16) on 81 frames, with FP8 attention beside BF16 attention.

A block is self-attention with RoPE, cross-attention to 512 tokens of text, a feed-forward network, and modulation by the timestep: 40 heads
of 128, hidden 5120, FFN 13824. 81 frames are 21 latent frames, of H/16 x W/16 tokens each: 75,600 at 1280x720, 171,360 at 1920x1088
(1080 is no multiple of 16). The blocks of a stack share their weights, which costs them no less time. Norms are torch's fused ones and
RoPE is one kernel (`dense.rope.apply_rope`), with every attention alike.

Rows `block-*` are one block; `stack-*` a stack that runs as a user runs it, `fp8_attention` with the first and last layers in the faster
BF16 attention of the two, beside a stack that is BF16 throughout. The model has 40 layers, of which a user would leave 2 + 2 in BF16; the
stack has as many of them as the seconds allow, with the same share in BF16: 20 with 1 + 1 at 720p, 10 with 1 at 1080p (`layers` and
`bf16_layers` in the rows). Nothing is extrapolated. Before it is timed, the FP8 block's self-attention must be near the BF16 one's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from math import prod

import torch
import torch.nn.functional as F
from torch import nn

from fp8attn import AttentionPolicy, fp8_attention
from fp8attn.dense.rope import apply_rope

from . import models
from .problem import DEVICE


@dataclass(frozen=True)
class Case:
    grid: tuple[int, int, int]  # latent frames, rows and columns of tokens
    layers: int  # of the stack
    skip_first: int
    skip_last: int
    rounds: int  # of the block; the stack runs once


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
EPS = 1e-6
SCORES = 1.5  # how far a row's scores spread: attention that is neither flat nor one-hot. Q and K in FP8 move them by 0.056


class Attention(nn.Module):
    """Self-attention, or attention to `text`; queries and keys are normalized over all heads."""

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
            q, k = (apply_rope(part, *rope, rope_interleaved=True) for part in (q, k))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


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


class Stack(nn.Module):
    """`layers` blocks. Each is a separate module, and all share the parameters of one."""

    def __init__(self, block: Block, layers: int) -> None:
        super().__init__()
        shared = {id(p): p for p in block.parameters()}
        self.blocks = nn.ModuleList(copy.deepcopy(block, dict(shared)) for _ in range(layers))

    def forward(self, x: torch.Tensor, *given) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, *given)
        return x


def rope_tables(grid: tuple[int, int, int], dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`[S, D / 2]` each, of pairs of neighbors: channels are shared out over frame, row and column, most to the frame."""
    plane = dim // 6 * 2
    positions = torch.cartesian_prod(*(torch.arange(n, device=DEVICE) for n in grid))  # [S, 3]
    angles = [
        positions[:, axis, None] * 10000.0 ** -(torch.arange(0, width, 2, device=DEVICE) / width)
        for axis, width in enumerate((dim - 2 * plane, plane, plane))
    ]
    angle = torch.cat(angles, -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


@cache
def built(sizes: Sizes = Sizes(), dtype: torch.dtype = torch.bfloat16) -> Block:
    return models.build(lambda: Block(sizes), dtype)


@torch.inference_mode()
def measure(case: str, sizes: Sizes = Sizes(), dtype: torch.dtype = torch.bfloat16) -> Iterator[dict]:
    shape, block, systems = CASES[case], built(sizes, dtype), models.bf16_systems()
    lengths = (prod(shape.grid), sizes.text, 6)
    x, text, time = (torch.randn(1, n, sizes.hidden, dtype=dtype, device=DEVICE) for n in lengths)
    given = (x, text, time / sizes.hidden**0.5, rope_tables(shape.grid, sizes.head_dim, dtype))
    fp8 = {"fp8attn": partial(models.ours, AttentionPolicy(min_length=sizes.text + 1))}  # text goes to the context around

    # One attention first: it warms up what has to be compiled or planned, and must be right.
    attend = partial(block.attn1, x, None, given[3])
    errors = models.errors({name: models.within(context, attend)() for name, context in (systems | fp8).items()}, 0.02, 0.15)
    calls = {name: models.within(context, partial(block, *given)) for name, context in (systems | fp8).items()}
    rows = models.timed(f"block-{case}", calls, shape.rounds, errors, tokens=len(x[0]))
    yield from rows

    best = rows[-1]["beside"]
    stack, in_bf16 = Stack(block, shape.layers), shape.skip_first + shape.skip_last
    policy = AttentionPolicy(min_length=sizes.text + 1, skip_first=shape.skip_first, skip_last=shape.skip_last)

    def mixed() -> torch.Tensor:
        with systems[best](), fp8_attention(policy, stack) as report:  # what the policy leaves out goes to the context around
            out = stack(*given)
        assert report.fp8_calls == shape.layers - in_bf16, str(report)
        return out

    calls = {best: models.within(systems[best], partial(stack, *given)), "fp8attn": mixed}
    for row in models.timed(f"stack-{case}", calls, 1, tokens=len(x[0]), layers=shape.layers):
        yield row | {"bf16_layers": in_bf16 if row["impl"] == "fp8attn" else shape.layers}
