"""Quantizes new tokens of K and V into the pages of a cache (`append`), or into new pages (`from_dense`).

| file | what |
|---|---|
| `__init__.py` | the launches |
| `step.py` | up to 16 new tokens of each sequence, token by token: a decode step, one launch |
| `page.py` | more tokens, and dense K and V, page by page |
| `settle.py` | how `page.py` finds a page's scale |
| `rows.py` | rows of channels: loaded, with or without RoPE, and stored |
| `slot.py` | positions of scales and codes in a page, rounding codes again |

The scales of all pages are those of `numerics.settle`.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ...formats.codec import FP8, Codec
from ...formats.kv_format import KVFormat
from ...formats.page_layout import PAGE_SIZE, PageLayout
from ...formats.rope import DenseRope
from ...formats.spec import PageSpec, spec_of
from ...pages import KVPages
from ...params import Append
from ..common import power_of_two
from ..latent import append_latents
from ..launch import MAX_GRID, Constants, ConstexprFields, launch, make_constants
from ..machine import machine
from .page import page_kernel
from .rows import RowRope, rope_of
from .step import MAX_PROGRAMS, step_kernel

MAX_TOKENS = 16  # appends of up to this many tokens are written token by token, longer ones page by page
MAX_STRIDE = 2**24 - 2**12  # of tokens: 128 of them, and a row, are less than 2^31 elements
STEP_ELEMENTS = 512  # of K or V: what a program of a step holds, unless one head is more
WARP_ELEMENTS = 512  # the most of these in a warp. With more, a kernel takes minutes to compile: its code is unrolled.
NO_ROPE = (None,) * 17  # `page_kernel`'s arguments about RoPE
PAGE_CHANNELS = 256  # of K or V that the registers of a program hold for all tokens of a page


def append(pages: KVPages, k: torch.Tensor, v: torch.Tensor, options: Append) -> None:
    """`reference.append` with the same bits, except for the sign of NaN."""
    cu_seqlens, max_seqlen, static_scales, advance = options
    if not k.shape[0] or not max_seqlen:
        return
    device, num_tokens, num_seqs = k.device, k.shape[0], pages.page_table.shape[0]
    heads, format = pages.num_kv_heads, pages.format
    if format.spec.v_in_k:
        append_latents(pages, k, v, options)
        return
    stored = format.name, format.rotate, machine(device).native_e4m3, static_scales, advance
    tensors = pages.pool, format.stored_k_mean, format.v_mean, pages.page_table, pages.cache_seqlens, cu_seqlens
    k_strides, v_strides = k.stride()[:2], v.stride()[:2]
    if max_seqlen <= MAX_TOKENS:
        args = k, v, *tensors, *k_strides, *v_strides, pages.page_table.stride(0), max_seqlen, heads
        grid, constants = _step_plan(device, heads, num_seqs, max_seqlen, *stored)
        launch(step_kernel, grid, args, constants)
        return
    _check_strides(k=k_strides[0], v=v_strides[0])
    columns = (max_seqlen + PAGE_SIZE - 2) // PAGE_SIZE + 1  # the most pages that so many tokens can touch
    # Sequences follow one another: no strides between them.
    strides = 0, *k_strides, 0, *v_strides
    ahead, constants = _page_plan(device, torch.version.hip is not None, heads, *stored, dense=False)
    args = k, v, *tensors, *NO_ROPE, *strides, pages.page_table.stride(0), num_seqs, max_seqlen, heads, ahead
    if cu_seqlens is None:
        _launch_sequences((2 * heads, columns), num_seqs, args, constants)
    else:
        places = num_tokens // PAGE_SIZE + 2 * num_seqs
        launch(page_kernel, (2 * heads, min(places, MAX_GRID), -(-places // MAX_GRID)), (*args, 0), constants)
    if advance:
        lengths = pages.cache_seqlens
        # Outside of inference mode, torch does not write to its tensors. Caches have none, and entering the mode takes
        # microseconds.
        with torch.inference_mode() if lengths.is_inference() else nullcontext():
            lengths.add_(max_seqlen if cu_seqlens is None else cu_seqlens.diff())


def from_dense(k: torch.Tensor, v: torch.Tensor, format: KVFormat, rope: DenseRope | None = None) -> KVPages:
    """`reference.from_dense` with the same bits, except for the sign of NaN."""
    device = k.device
    batch, heads, length, head_dim = k.shape
    columns = -(-length // PAGE_SIZE)
    pool = torch.empty(batch * columns, heads, format.layout.nbytes, dtype=torch.uint8, device=device)
    table = torch.empty(batch, columns, dtype=torch.int32, device=device)
    lengths = torch.empty(batch, dtype=torch.int32, device=device)
    (k_b, k_h, k_t, _), (v_b, v_h, v_t, _) = k.stride(), v.stride()
    if batch == 1:  # the stride of a dimension with one element can be any number
        k_b = v_b = 0
    if length > 1:  # the stride of one token can be any number
        _check_strides(k=k_t, v=v_t, **({} if rope is None else {"q": rope.queries.stride(2)}))
    strides = k_b, k_t, k_h, v_b, v_t, v_h
    rope_args, ropes, q_heads = NO_ROPE, (None, None), 0
    if rope is not None:
        k_rope, tables, table_strides = rope_of(head_dim, rope.k)
        q_rope, q_tables, q_table_strides = rope_of(head_dim, rope.q)
        q, q_out, ropes, q_heads = rope.queries, rope.out, (k_rope, q_rope), rope.queries.shape[1]
        rope_args = (
            *tables, *table_strides, q, q_out, *q_tables, *q.stride()[:3], *q_out.stride()[:3], *q_table_strides,
            q.shape[2]
        )  # fmt: skip
    native, is_e4m3 = machine(device).native_e4m3, k.dtype == FP8
    if is_e4m3 and not native:  # no type for it there: kernels take its bytes
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    stored = format.name, format.rotate, native, is_e4m3, True
    ahead, constants = _page_plan(device, torch.version.hip is not None, heads, *stored, dense=True, ropes=ropes)
    args = (
        k, v, pool, format.stored_k_mean, format.v_mean, table, lengths, None, *rope_args, *strides, columns, batch,
        length, heads, ahead,
    )  # fmt: skip
    _launch_sequences((2 * heads + q_heads, columns), batch, args, constants)
    return KVPages.trusted(pool, table, lengths, format)


def _check_strides(**tokens: int) -> None:
    """Raise ValueError if tokens are too far apart for the kernels that write page by page: their offsets in a page are
    of 32 bits.
    """
    for name, stride in tokens.items():
        if stride > MAX_STRIDE:
            raise ValueError(
                f"{name} has {stride} elements from one token to the next, and kernels take up to {MAX_STRIDE}: pass "
                f"{name}.contiguous()"
            )


def _launch_sequences(grid: tuple[int, ...], num_seqs: int, args: tuple, constants: Constants) -> None:
    """Launch `page_kernel` for all sequences, which are the grid's last dimension, in several launches if CUDA's limit
    of that dimension is too small.
    """
    for first in range(0, num_seqs, MAX_GRID):
        launch(page_kernel, (*grid, min(MAX_GRID, num_seqs - first)), (*args, first), constants)


# Compile-time options. The host makes them, and device code reads them.


@dataclass(frozen=True)
class Codes(ConstexprFields):
    """How K or V is stored in pages, and how wide their rows are (`rows.py`)."""

    spec: PageSpec
    layout: PageLayout  # a field, so that the kernel's key in Triton's cache covers it
    is_v: bool
    native: bool  # the target converts E4M3 by itself (`codec`)
    static: bool  # scales stay: calibrated ones, or one for dense values that are E4M3 already
    dense: bool  # pages of their own, filled from their first token on
    advance: bool = True  # the lengths do not count the new tokens yet, and the launch adds them
    parts: int = 1  # in which rows are loaded; with several, head_dim is a power of two
    rope: RowRope | None = None  # of a dense K or Q

    @property
    def head_dim(self) -> int:
        return self.spec.v_dim if self.is_v else self.spec.k_dim

    @property
    def width(self) -> int:
        """head_dim, padded to a power of two."""
        return power_of_two(self.head_dim)

    @property
    def part_width(self) -> int:
        """The channels of a part, padded."""
        return self.width // self.parts

    @property
    def codec(self) -> Codec:
        return self.spec.v if self.is_v else self.spec.k


@dataclass(frozen=True)
class AppendOptions(ConstexprFields):
    """The one constexpr parameter of the kernels that write pages."""

    k: Codes
    v: Codes
    rotate: bool  # keys are rotated (`rotation`)
    tokens: int = 1  # of a step's sequence, padded to a power of two
    heads: int = 1  # of K or V: what a program of a step writes
    q: Codes | None = None  # how Q has RoPE in a dense call; K has it, too
    hopper: bool = False  # attention is launched while pages are written, and waits for the end


@lru_cache(maxsize=4096)
def _step_plan(
    device: torch.device, heads: int, num_seqs: int, max_seqlen: int, *stored
) -> tuple[tuple[int], Constants]:
    """Grid and constants of `step_kernel`; `stored` is `_options`'."""
    options = _options(*stored, dense=False)
    tokens = power_of_two(max_seqlen)
    block = min(power_of_two(heads), max(1, STEP_ELEMENTS // (options.k.width * tokens)))
    block = max(block, power_of_two(-(-2 * heads // MAX_PROGRAMS)))
    options = replace(options, tokens=tokens, heads=block, hopper=machine(device).hopper)
    warps = max(4, block * tokens * options.k.width // WARP_ELEMENTS)
    constants = make_constants("step", device, OPTIONS=options, num_warps=warps, enable_fp_fusion=False)
    return (num_seqs * 2 * -(-heads // block),), constants


@lru_cache(maxsize=4096)
def _page_plan(
    device: torch.device, hip: bool, heads: int, *stored, dense: bool,
    ropes: tuple[RowRope | None, RowRope | None] = (None, None),
) -> tuple[int, Constants]:  # fmt: skip
    """Number of columns of pages that the programs of `page_kernel` read at a time, the distance of a prefetch (0:
    none); and the kernel's constants. `stored` is `_options`', and `ropes` are of K and Q.
    """
    options, gpu = _options(*stored, dense=dense), machine(device)
    width = options.k.width
    parts = max(1, width // PAGE_CHANNELS)
    keys, values = replace(options.k, parts=parts, rope=ropes[0]), replace(options.v, parts=parts)
    queries = None if ropes[1] is None else replace(keys, rope=ropes[1])
    options = replace(options, k=keys, v=values, q=queries, hopper=dense and gpu.hopper)
    limit = {} if hip else {"maxnreg": 128}  # Triton's AMD backend has no such option
    constants = make_constants(
        "page", device, OPTIONS=options, num_warps=keys.part_width // 16, enable_fp_fusion=False, **limit
    )
    programs = gpu.num_sms * max(1, PAGE_CHANNELS // width)  # of width / 16 warps with 128 registers a thread
    return -(-programs // (2 * heads)) if gpu.native_e4m3 else 0, constants


def _options(name: str, rotate: bool, native: bool, static: bool, advance: bool, dense: bool) -> AppendOptions:
    """The options of pages of the spec of this name."""
    spec = spec_of(name)
    keys = Codes(spec, spec.layout, False, native, static, dense, advance)
    return AppendOptions(keys, replace(keys, is_v=True), rotate)
