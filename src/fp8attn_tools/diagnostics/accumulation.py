"""Measures how exactly an FP8 attention kernel sums.

Hopper's FP8 tensor cores keep about 14 bits of a running sum and cut off the bits of a product below that. A kernel
that leaves the sum of a whole row to them (single-level) loses more of each product as the sum grows. If V has a mean,
the sum grows with the length. A kernel that adds short sums in FP32 (two-level) does not lose them. Neither the version
nor the name of a build tells which one it is, so this module measures it.

With K = 0 every key has the same weight, which FP8 represents exactly, and the exact output is the mean of V. Then all
of the error is the sum's, except for rounding the output to BF16 (0.1%).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from fp8attn.backends import fa3
from fp8attn.dense import scaled_dot_product_attention_quantized
from fp8attn.formats.codec import FP8
from fp8attn.numerics import relative_error

LENGTHS = tuple(1 << e for e in range(10, 18))  # 1,024 to 131,072 tokens
SINGLE_LEVEL_THRESHOLD = 0.01  # relative error
QUERIES, HEADS, HEAD_DIM = (
    128,
    128,
    128,
)  # enough blocks of queries for every SM, so that no kernel splits the keys and with them the sum
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Accumulation:
    """How exactly one kernel sums.

    Attributes:
        errors: by length in tokens, the relative error of the output, for a V of mean 1 and standard deviation 1/2.
    """

    errors: dict[int, float]

    @property
    def levels(self) -> int:
        """1: a row's whole sum is in the tensor core's short accumulator. 2: it is in FP32."""
        return 1 if max(self.errors.values()) > SINGLE_LEVEL_THRESHOLD else 2

    @property
    def hurts_from(self) -> int | None:
        """The shortest measured length with an error above 1%."""
        return min((length for length, error in self.errors.items() if error > SINGLE_LEVEL_THRESHOLD), default=None)

    def __str__(self) -> str:
        longest, start = max(self.errors), self.hurts_from
        if start is None:
            return f"two-level: {self.errors[longest]:.2%} off at {longest:,} tokens"
        shown = [length for length in (start, 8192, longest) if length >= start and length in self.errors]
        wrong = ", ".join(f"{self.errors[length]:.1%} at {length:,}" for length in dict.fromkeys(shown))
        return f"single-level: hurts from {start:,} tokens where V has a mean ({wrong})"


def measure(
    attend: Attend,
    device: torch.device | str,
    lengths: tuple[int, ...] = LENGTHS,
) -> Accumulation:
    """Run a kernel with equal weights and a V of mean 1, at several lengths. This takes milliseconds on a GPU, plus
    compiling.

    Args:
        attend: takes `q [1, 128, 128, 128]`, `k [1, 1, S, 128]` and `v [1, 1, S, 128]`, `[B, H, S, D]` in float8_e4m3fn
            with scales of one, and returns attention without a mask in q's shape.
        lengths: the values of S.
    """
    generator = torch.Generator(device).manual_seed(0)
    v = (
        1 + 0.5 * torch.randn(1, 1, max(lengths), HEAD_DIM, dtype=torch.float32, device=device, generator=generator)
    ).to(FP8)
    k = torch.zeros(v.shape, device=device).to(FP8)
    q = torch.ones(1, HEADS, QUERIES, HEAD_DIM, device=device).to(FP8)
    errors = {}
    for length in lengths:
        out = attend(q, k[:, :, :length], v[:, :, :length])
        errors[length] = relative_error(out, v[:, :, :length].double().mean(2, keepdim=True).expand_as(out))
    return Accumulation(errors)


def kernels() -> dict[str, Attend]:
    """The kernels to measure on a Hopper GPU: fp8attn's, each installed FlashAttention-3, and PyTorch's op if its FA3
    is active.
    """
    found = {"fp8attn hopper": lambda q, k, v: scaled_dot_product_attention_quantized(q, k, v, backend="hopper")}
    for name in fa3.BUILDS:
        try:
            found[f"FlashAttention-3 ({name})"] = partial(
                fa3.attention, causal=False, softmax_scale=1.0, build=fa3.find(name)
            )
        except LookupError:
            continue
    if torch.nn.attention.current_flash_attention_impl() == "FA3":
        found["PyTorch's quantized SDPA"] = _pytorch
    return found


def _pytorch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    from torch.nn.attention.experimental import _scaled_dot_product_attention_quantized as experimental

    one = torch.ones(k.shape[:2], dtype=torch.float32, device=k.device)
    return experimental._scaled_dot_product_attention_quantized(q, k, v, q_descale=one, k_descale=one, v_descale=one)
