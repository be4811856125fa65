"""Measures how exactly attention kernels sum, by the number of keys and of sequences.

Hopper's FP8 tensor cores keep about 14 bits of a running sum and cut off the bits of a product below that. A kernel
that leaves the sum of a whole row to them (single-level) loses more of each product as the sum grows. If V has a mean,
the sum grows with the length. A kernel that adds short sums in FP32 (two-level) does not lose them. Neither the version
nor the name of a build tells which one it is, so this module measures it.

A step has few queries. Kernels divide the keys of one sequence over the GPU, and then add the parts in FP32. With many
sequences each has one part. So the error of a single-level kernel depends on the batch, and so does its answer.

With scores of zero every key has the same weight, which FP8 represents exactly, and the exact output is the mean of V.
Then all of the error is the sum's, except for rounding the output to BF16 (0.1%), and 8-bit latents, whose rounding
errors cancel in the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

import fp8attn
from fp8attn.backends import fa3, unsupported_reason
from fp8attn.dense import scaled_dot_product_attention_quantized
from fp8attn.formats.codec import FP8
from fp8attn.formats.spec import PageSpec
from fp8attn.kernels.machine import no_hopper_reason
from fp8attn.numerics import relative_error
from fp8attn.params import BackendName

from . import flashmla

LENGTHS = tuple(1 << e for e in range(10, 18))  # 1,024 to 131,072 tokens
SINGLE_LEVEL_THRESHOLD = 0.01  # relative error
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Case = tuple[int, int]  # sequences, and tokens of each
ALONE: tuple[Case, ...] = tuple((1, length) for length in LENGTHS)
# 64 sequences with 128 heads are a block of 64 heads for nearly every SM of an H200.
BATCHES: tuple[Case, ...] = (*ALONE, *((batch, length) for batch in (8, 64) for length in (8192, 32768)))


class Inputs(NamedTuple):
    """What a kernel attends with, and to.

    Attributes:
        heads, queries: of a sequence. All heads share one KV head.
        channels: of V.
        rope: channels of the key with RoPE, which K has beside V's own, in latents (MLA). 0: K is apart from V, and has
            as many channels.
        cases: batches and lengths to measure.
    """

    heads: int
    queries: int
    channels: int
    rope: int = 0
    cases: tuple[Case, ...] = BATCHES

    @property
    def spec(self) -> PageSpec:
        return PageSpec.latent(self.channels, self.rope) if self.rope else PageSpec.of(self.channels)


# Enough blocks of queries for every SM, so that no kernel divides the keys and with them the sum.
PROMPT = Inputs(128, 128, 128, cases=ALONE)
STEP = Inputs(8, 1, 128)
LATENTS = Inputs(128, 1, 512, 64)  # those of DeepSeek V3
INPUTS = {"prompts": PROMPT, "steps": STEP, "steps over latents": LATENTS}


@dataclass(frozen=True)
class Accumulation:
    """How exactly one kernel sums.

    Attributes:
        errors: by sequences and tokens of each, the relative error of the output, for a V of mean 1 and standard
            deviation 1/2.
    """

    errors: dict[Case, float]

    @property
    def levels(self) -> int:
        """1: a row's whole sum is in the tensor core's short accumulator. 2: it is in FP32."""
        return 1 if max(self.errors.values()) > SINGLE_LEVEL_THRESHOLD else 2

    @property
    def hurts_from(self) -> int | None:
        """The shortest measured length with an error above 1%, in any batch."""
        wrong = (length for (_, length), error in self.errors.items() if error > SINGLE_LEVEL_THRESHOLD)
        return min(wrong, default=None)

    def __str__(self) -> str:
        longest, worst = (
            max(self.errors, key=order) for order in (lambda case: (-case[0], case[1]), self.errors.__getitem__)
        )
        start = self.hurts_from
        if start is None:
            said = f"two-level: {self.errors[longest]:.2%} off at {_size(longest)} tokens"
            return said if worst[0] == 1 else f"{said}, {self.errors[worst]:.2%} at {_size(worst)}"
        first = min(case for case, error in self.errors.items() if case[1] == start and error > SINGLE_LEVEL_THRESHOLD)
        shown = (first, *(case for case in ((1, 8192), longest) if case[1] >= start and case in self.errors), worst)
        wrong = ", ".join(f"{self.errors[case]:.1%} at {_size(case)}" for case in dict.fromkeys(shown))
        return f"single-level: hurts from {start:,} tokens where V has a mean ({wrong})"


def _size(case: Case) -> str:
    """`64 x 8,192`, or `8,192` for one sequence."""
    batch, length = case
    return f"{length:,}" if batch == 1 else f"{batch} x {length:,}"


def measure(
    attend: Attend, device: torch.device | str, inputs: Inputs = PROMPT, cases: Iterable[Case] | None = None
) -> Accumulation:
    """Run a kernel with equal weights and a V of mean 1, in several batches and at several lengths.

    Args:
        attend: takes `q [B, heads, queries, K's channels]`, `k [1, 1, S, K's channels]` and `v [1, 1, S, channels]` in
            float8_e4m3fn with scales of one; the K and V of all sequences. It returns attention without a mask,
            `[B, heads, queries, channels]`. Of latents, `v` is the first channels of `k`.
        cases: the values of B and S. None: those of `inputs`.
    """
    cases = tuple(inputs.cases if cases is None else cases)
    generator = torch.Generator(device).manual_seed(0)
    shape = 1, 1, max(length for _, length in cases), inputs.channels
    v = 1 + 0.5 * torch.randn(shape, dtype=torch.float32, device=device, generator=generator)
    if inputs.rope:  # the part of the latents gets a query of zero
        k = torch.cat([v, v.new_zeros(*shape[:3], inputs.rope)], -1).to(FP8)
        q = torch.cat([torch.zeros(inputs.channels, device=device), torch.ones(inputs.rope, device=device)])
        v = k[..., : inputs.channels]
    else:
        k, v = torch.zeros_like(v).to(FP8), v.to(FP8)
        q = torch.ones(inputs.channels, device=device)
    q = q.to(FP8)
    errors = {}
    for batch, length in cases:
        queries = q.view(torch.uint8).repeat(batch, inputs.heads, inputs.queries, 1).view(FP8)
        out = attend(queries, k[:, :, :length], v[:, :, :length])
        exact = v[0, 0, :length].to(torch.float32).mean(0, dtype=torch.float64)
        errors[batch, length] = relative_error(out, exact.expand_as(out))
    return Accumulation(errors)


def kernels(inputs: Inputs = PROMPT, device: torch.device | str = "cuda") -> dict[str, Attend]:
    """The kernels that can attend with these inputs on a device, by name."""
    return {name: attend for name, attend in candidates(inputs, device).items() if not isinstance(attend, str)}


def candidates(inputs: Inputs, device: torch.device | str) -> dict[str, Attend | str]:
    """The kernels that are known, by name; or the reason why one cannot run here.

    Prompts are attended to as dense tensors in E4M3. Over pages, what fp8attn stores is measured: E4M3 is its format of
    V, and latents are rounded to INT8.
    """
    known: dict[str, Attend | str] = {}
    of_prompts = inputs.queries > 1
    backends: tuple[BackendName, ...] = ("hopper",) if of_prompts else ("hopper", "triton")
    for backend in backends:
        ours = partial(_prompt if of_prompts else _over_pages, backend)
        known[f"fp8attn {backend}"] = unsupported_reason(backend, device, head_dim=inputs.spec) or ours
    for name, attend in (_vllm_latents() if inputs.rope else dense()).items():
        known[name] = no_hopper_reason(torch.device(device), "the kernel is") or attend
    return known


def dense() -> dict[str, Attend | str]:
    """Each build of FlashAttention-3, or why it cannot be used; and PyTorch's op if its FA3 is active."""
    known: dict[str, Attend | str] = {}
    for build in fa3.BUILDS:
        name = f"FlashAttention-3 ({build})"
        try:
            known[name] = partial(
                _repeated, partial(fa3.attention, causal=False, softmax_scale=1.0, build=fa3.find(build))
            )
        except LookupError as problem:
            known[name] = str(problem)
    if torch.nn.attention.current_flash_attention_impl() == "FA3":
        known["PyTorch's quantized SDPA"] = partial(_repeated, _pytorch)
    return known


def _vllm_latents() -> dict[str, Attend | str]:
    try:
        flashmla.find()
    except LookupError as problem:
        return {flashmla.NAME: str(problem)}
    return {flashmla.NAME: flashmla.attention}


def _prompt(backend: BackendName, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention_quantized(q, k, v, backend=backend)


def _over_pages(backend: BackendName, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention over pages that the sequences share."""
    rope = k.shape[3] - v.shape[3]
    spec = PageSpec.latent(v.shape[3], rope) if rope else PageSpec.of(v.shape[3])
    cache = fp8attn.PagedKVCache(1, spec, device=q.device, backend=backend)
    tokens = (v, k[..., -rope:]) if rope else (k, v)
    cache.append(0, *(x[0].transpose(0, 1).bfloat16() for x in tokens))
    cache.select([0] * len(q))
    rows = q.transpose(1, 2).flatten(0, 1).bfloat16()
    out = fp8attn.attention(rows, cache.pages(0), softmax_scale=1.0, causal=False, backend=backend)
    return out.unflatten(0, (len(q), -1)).transpose(1, 2)


def _repeated(attend: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A call that takes the K and V of each sequence."""
    return attend(q, *(x.expand(len(q), -1, -1, -1).contiguous() for x in (k, v)))


def _pytorch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    from torch.nn.attention.experimental import _scaled_dot_product_attention_quantized as experimental

    one = torch.ones(k.shape[:2], dtype=torch.float32, device=k.device)
    return experimental._scaled_dot_product_attention_quantized(q, k, v, q_descale=one, k_descale=one, v_descale=one)
