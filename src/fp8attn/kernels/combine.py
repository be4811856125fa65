"""Attention over all keys from attention over parts of the keys, which several programs have computed (Flash-Decoding).

`num_splits` chooses the number of parts on the host. (`prefill`, whose CTAs compute several items, has its own
estimate.) `combine` adds the parts in a separate launch, and documents their layout.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl

from ..formats.latent import BLOCK as LATENT_BLOCK
from ..pages import KVPages
from .codec import round_to
from .common import HIDDEN, LN2, LOG2E, power_of_two
from .launch import Constants, launch, make_constants
from .machine import machine
from .rotation import hadamard_back

MAX_SPLITS = 128
MANY = 1024  # from this number of rows on, a program computes several
BLOCK = tl.constexpr(LATENT_BLOCK)  # channels of a factor of latents
_TILE_OVERHEAD = 1.5  # the fixed cost of a program, in pages


@lru_cache(maxsize=4096)
def num_splits(programs: int, pages: int, slots: int) -> int:
    """The number of parts that each of `programs` programs over up to `pages` pages is divided into, if `slots`
    programs run at a time.

    It minimizes the number of waves times the longest program. It depends only on what the host knows, so a launch
    reads nothing back.
    """
    best, best_cost = 1, math.inf
    for splits in range(1, min(pages, MAX_SPLITS, max(1, 4 * slots // programs)) + 1):
        waves, longest = -(-programs * splits // slots), -(-pages // splits) + _TILE_OVERHEAD
        cost = waves * longest + (splits > 1) * (1 + splits / 32)
        if cost < best_cost:
            best, best_cost = splits, cost
    return best


@triton.jit
def share_and_lse(lse, mean_score, sinks_ptr, head):
    """The keys' share of the softmax and the natural LSE, from the log2 LSE of the keys' centered scores and the score
    of k_mean.
    """
    lse = tl.where(lse == HIDDEN, lse, lse + mean_score)
    if sinks_ptr is None:
        return 1.0 + tl.zeros_like(lse), lse * LN2
    else:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        top = tl.maximum(lse, sink)
        top = tl.where(top == HIDDEN, 0.0, top)
        keys = tl.exp2(lse - top)
        total = keys + tl.exp2(sink - top)
        return keys / tl.where(total == 0.0, 1.0, total), (top + tl.log2(total)) * LN2


NUMBERS = (
    "num_splits", "num_rows", "num_tokens", "num_q_heads", "group", "out_stride_b", "out_stride_t", "out_stride_h",
)  # fmt: skip


@triton.jit(do_not_specialize=NUMBERS)
def _combine_kernel(
    partial_ptr, partial_lse_ptr, sinks_ptr, mean_ptr, factor_ptr, out_ptr, lse_ptr, num_splits, num_rows, num_tokens,
    num_q_heads, group, out_stride_b, out_stride_t, out_stride_h,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < num_rows
    split = tl.arange(0, SPLITS)
    lse_ptrs = partial_lse_ptr + split[None, :].to(tl.int64) * num_rows + row[:, None]
    split_lse = tl.load(lse_ptrs, mask=real[:, None] & (split < num_splits)[None, :], other=HIDDEN)
    written = split_lse != HIDDEN  # a part that saw no key wrote nothing else
    mean_score = tl.load(lse_ptrs + num_splits.to(tl.int64) * num_rows, mask=written, other=HIDDEN)
    mean_score = tl.max(mean_score, 1)  # the same in every part
    top = tl.max(split_lse, 1)
    top = tl.where(top == HIDDEN, 0.0, top)
    total = tl.sum(tl.exp2(split_lse - top[:, None]), 1)
    lse = tl.where(total == 0.0, HIDDEN, top + tl.log2(total))
    share, lse = share_and_lse(lse, mean_score, sinks_ptr, row % num_q_heads)

    d = tl.arange(0, DP)
    AT_ONCE: tl.constexpr = 4096 // DP if 4096 // DP < SPLITS else SPLITS
    CHUNK: tl.constexpr = 1 if ROWS > 1 else AT_ONCE
    out = tl.zeros((ROWS, DP), tl.float32)
    for first in range(0, num_splits, CHUNK):
        part = first + tl.arange(0, CHUNK)  # the parts of one row, or one part of each row
        offset = part.to(tl.int64) * num_rows + row
        part_lse = tl.load(partial_lse_ptr + offset, mask=real & (part < num_splits), other=HIDDEN)
        mask = (part_lse != HIDDEN)[:, None] & (d < D)[None, :]
        partial = tl.load(partial_ptr + offset[:, None] * D + d[None, :], mask=mask, other=0.0)
        partial *= tl.exp2(part_lse - top)[:, None]
        if ROWS == 1:
            out += tl.sum(partial, 0)[None, :]
        else:
            out += partial
    out = out * (share / tl.where(total == 0.0, 1.0, total))[:, None]
    if group is not None:  # of latents: `formats.latent.restore`
        (out,) = hadamard_back((out,), D)
        kv_head = (row % num_q_heads // group)[:, None]
        if factor_ptr is not None:
            out *= tl.load(factor_ptr + kv_head * (D // BLOCK) + d[None, :] // BLOCK)
        if mean_ptr is not None:
            out = tl.where((total == 0.0)[:, None], out, out + tl.load(mean_ptr + kv_head * D + d[None, :]))
    token = row // num_q_heads
    at = (token // num_tokens).to(tl.int64) * out_stride_b + (token % num_tokens).to(tl.int64) * out_stride_t
    at += (row % num_q_heads).to(tl.int64) * out_stride_h
    mask = real[:, None] & (d < D)[None, :]
    tl.store(out_ptr + at[:, None] + d[None, :], round_to(out, out_ptr.dtype.element_ty, NATIVE), mask=mask)
    tl.store(lse_ptr + row, lse, mask=real)


def combine(
    parts: torch.Tensor, parts_lse: torch.Tensor, sinks: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor,
    latents: KVPages | None = None,
) -> None:  # fmt: skip
    """Compute attention over all keys from attention over parts of them, added in the order of the parts.

    Args:
        parts: `[splits, T * num_q_heads, head_dim]` float32; unspecified in rows that see no key of a part.
        parts_lse: `[2, splits, T * num_q_heads]` float32, to base 2: the LSE without `k_mean` (-inf in such rows), and
            the score of `k_mean`, which is the same in every part.
        sinks: `[num_q_heads]`; the parts do not include them.
        out, lse: the outputs, `[T, num_q_heads, head_dim]` and `[T, num_q_heads]` float32; or a batch of both, with
            `out` of any strides.
        latents: pages whose stored latents the parts are sums of. The result is restored by their format.
    """
    mean, factor, group = None, None, None
    if latents is not None:
        _, mean, factor = latents.format.tensors
        group = out.shape[-2] // latents.num_kv_heads
    device, native = out.device, machine(out.device).native_e4m3
    grid, numbers, constants = _plan(device, native, parts.shape, lse.shape, out.stride(), group)
    launch(_combine_kernel, grid, (parts, parts_lse, sinks, mean, factor, out, lse, *numbers), constants)


@lru_cache(maxsize=4096)
def _plan(
    device: torch.device,
    native: bool,
    parts: tuple[int, int, int],
    rows: tuple[int, ...],
    strides: tuple[int, ...],
    group: int | None,
) -> tuple[tuple[int], tuple[int | None, ...], Constants]:
    """The kernel's grid, numbers and constants, for parts and an LSE of these shapes and an output of these strides."""
    splits, num_rows, head_dim = parts
    padded, capacity = power_of_two(head_dim), power_of_two(splits)
    # A program computes one row, and loads all its parts at the same time. With many rows and few parts, a program
    # computes several rows.
    many = num_rows >= MANY and splits <= 8
    together = 8 if many else 1
    constants = make_constants(
        "combine", device, D=head_dim, DP=padded, ROWS=together, SPLITS=capacity, NATIVE=native, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
    return (
        (-(-num_rows // together),),
        (splits, num_rows, *rows[-2:], group, *((0,) * (4 - len(strides))), *strides[:-1]),
        constants,
    )
