"""Quantizes new tokens of K and V into the pages of a cache (`append`), or into new pages (`from_dense`).

| file | what |
|---|---|
| `__init__.py` | the launches |
| `step.py` | up to 16 new tokens of each sequence, token by token: a decode step, one launch |
| `page.py` | more tokens, and dense K and V, page by page |
| `settle.py` | how `page.py` finds a page's scale |
| `e4m3.py` | pages of E4M3 inputs |
| `slot.py` | what these share: positions of tokens and scales in a page, rounding codes again |

The scales of all pages are those of `numerics.settle`.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ...formats.codec import E4M3, FP8, Codec
from ...formats.kv_format import KVFormat
from ...formats.page_layout import PAGE_SIZE, PageLayout
from ...formats.rope import DenseRope
from ...formats.spec import PageSpec
from ...pages import KVPages
from ...params import Append
from ..codec import is_native
from ..common import power_of_two
from ..launch import MAX_GRID, Constants, ConstexprFields, launch, make_constants, num_sms
from ..machine import machine
from ..rows import Row, RowRope, rope_of, row_of
from .e4m3 import e4m3_kernel
from .page import page_kernel
from .step import MAX_PROGRAMS, step_kernel

MAX_TOKENS = 16  # appends of up to this many tokens are written token by token, longer ones page by page
MAX_STRIDE = 2**24 - 2**12  # of tokens: 128 of them, and a row, are less than 2^31 elements
STEP_ELEMENTS = 512  # of K or V: what a program of a step holds, unless one head is more
NO_ROPE = (None,) * 17  # `page_kernel`'s arguments about RoPE
PAGE_CHANNELS = 256  # of K or V that the registers of a program hold for all tokens of a page


def append(pages: KVPages, k: torch.Tensor, v: torch.Tensor, how: Append) -> None:
    """`reference.append` with the same bits, except for the sign of NaN."""
    cu_seqlens, max_seqlen, advance = how.cu_seqlens, how.max_seqlen, how.advance
    if not k.shape[0] or not max_seqlen:
        return
    device, num_tokens, num_seqs = k.device, k.shape[0], pages.page_table.shape[0]
    heads, form = pages.num_kv_heads, pages.format
    row = row_of(form.spec.k_dim)
    stored = row, is_native(device), form.k, form.rotate, how.static_scales, advance
    tensors = pages.pool, form.stored_k_mean, form.v_mean, pages.page_table, pages.cache_seqlens, cu_seqlens
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
    ahead = _columns_ahead(device, heads, row.width)
    args = k, v, *tensors, *NO_ROPE, *strides, pages.page_table.stride(0), num_seqs, max_seqlen, heads, ahead
    constants = _page_constants(device, torch.version.hip is not None, *stored, dense=False)
    if cu_seqlens is None:
        _launch_sequences(page_kernel, (2 * heads, columns), num_seqs, args, constants)
    else:
        places = num_tokens // PAGE_SIZE + 2 * num_seqs
        launch(page_kernel, (2 * heads, min(places, MAX_GRID), -(-places // MAX_GRID)), (*args, 0), constants)
    if advance:
        lengths = pages.cache_seqlens
        # Outside of inference mode, torch does not write to its tensors. Caches have none, and entering the mode takes
        # microseconds.
        with torch.inference_mode() if lengths.is_inference() else nullcontext():
            lengths.add_(max_seqlen if cu_seqlens is None else cu_seqlens.diff())


def from_dense(k: torch.Tensor, v: torch.Tensor, form: KVFormat, rope: DenseRope | None = None) -> KVPages:
    """`reference.from_dense` with the same bits, except for the sign of NaN."""
    device = k.device
    batch, heads, length, head_dim = k.shape
    columns = -(-length // PAGE_SIZE)
    row = row_of(head_dim)
    pool = torch.empty(batch * columns, heads, form.layout.nbytes, dtype=torch.uint8, device=device)
    table = torch.empty(batch, columns, dtype=torch.int32, device=device)
    lengths = torch.empty(batch, dtype=torch.int32, device=device)
    (k_b, k_h, k_t, _), (v_b, v_h, v_t, _) = k.stride(), v.stride()
    if batch == 1:  # the stride of a dimension with one element can be any number
        k_b = v_b = 0
    if length > 1:  # the stride of one token can be any number
        _check_strides(k=k_t, v=v_t, **({} if rope is None else {"q": rope.queries.stride(2)}))
    strides = k_b, k_t, k_h, v_b, v_t, v_h
    if k.dtype == FP8:
        # Targets without native E4M3 have no type for it, so its bytes are copied.
        codes = Codes(row, form.layout, False, E4M3, is_native(device), False, True)
        constants = make_constants("e4m3", device, CODES=codes, num_warps=row.width // 16)
        args = k.view(torch.uint8), v.view(torch.uint8), pool, table, lengths, *strides, heads, length
        _launch_sequences(e4m3_kernel, (2 * heads, columns), batch, args, constants)
    else:
        given, ropes, q_heads = NO_ROPE, (None, None), 0
        if rope is not None:
            k_rope, tables, table_strides = rope_of(head_dim, rope.k)
            q_rope, q_tables, q_table_strides = rope_of(head_dim, rope.q)
            q, q_out, ropes, q_heads = rope.queries, rope.out, (k_rope, q_rope), rope.queries.shape[1]
            given = (
                *tables, *table_strides, q, q_out, *q_tables, *q.stride()[:3], *q_out.stride()[:3], *q_table_strides,
                q.shape[2]
            )  # fmt: skip
        args = (
            k, v, pool, form.stored_k_mean, form.v_mean, table, lengths, None, *given, *strides, columns, batch, length,
            heads,
            _columns_ahead(device, heads, row.width),
        )  # fmt: skip
        stored = row, is_native(device), form.k, form.rotate, False, True
        constants = _page_constants(device, torch.version.hip is not None, *stored, dense=True, ropes=ropes)
        _launch_sequences(page_kernel, (2 * heads + q_heads, columns), batch, args, constants)
    return KVPages.trusted(pool, table, lengths, form)


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


def _launch_sequences(kernel, grid: tuple[int, ...], num_seqs: int, args: tuple, constants: Constants) -> None:
    """Launch for all sequences, which are the grid's last dimension, in several launches if CUDA's limit of that
    dimension is too small.
    """
    for first in range(0, num_seqs, MAX_GRID):
        launch(kernel, (*grid, min(MAX_GRID, num_seqs - first)), (*args, first), constants)


# Compile-time options. The host makes them, and device code reads them.


@dataclass(frozen=True)
class Codes(ConstexprFields):
    """How K or V is stored in pages."""

    row: Row
    layout: PageLayout
    is_v: bool
    codec: Codec
    native: bool  # the target converts E4M3 by itself (`codec.is_native`)
    static: bool  # scales are given and stay
    dense: bool  # pages of their own, filled from their first token on
    rope: RowRope | None = None  # of a dense K


@dataclass(frozen=True)
class AppendOptions(ConstexprFields):
    """The one constexpr parameter of the kernels that write pages."""

    k: Codes
    v: Codes
    rotate: bool  # keys are rotated (`rotation`)
    advance: bool = True  # the lengths do not count the new tokens yet, and the launch adds them
    tokens: int = 1  # of a step's sequence, padded to a power of two
    heads: int = 1  # of K or V: what a program of a step writes
    q_rope: RowRope | None = None  # of Q, in a dense call; K has one, too
    hopper: bool = False  # attention is launched while pages are written, and waits for the end


@lru_cache(maxsize=4096)
def _step_plan(
    device: torch.device, heads: int, num_seqs: int, max_seqlen: int, *stored
) -> tuple[tuple[int], Constants]:
    """Grid and constants of `step_kernel`; `stored` is `_options`'."""
    row, *_ = stored
    tokens = power_of_two(max_seqlen)
    block = min(power_of_two(heads), max(1, STEP_ELEMENTS // (row.width * tokens)))
    block = max(block, power_of_two(-(-2 * heads // MAX_PROGRAMS)))
    options = replace(_options(*stored, dense=False), tokens=tokens, heads=block, hopper=machine(device).hopper)
    constants = make_constants("step", device, OPTIONS=options, num_warps=4, enable_fp_fusion=False)
    return (num_seqs * 2 * -(-heads // block),), constants


@lru_cache(maxsize=4096)
def _page_constants(
    device: torch.device,
    hip: bool,
    row: Row,
    *stored,
    dense: bool,
    ropes: tuple[RowRope | None, RowRope | None] = (None, None),
) -> Constants:
    """Constants of `page_kernel`; `row` and `stored` are `_options`', and `ropes` of K and Q."""
    row = replace(row, parts=max(1, row.width // PAGE_CHANNELS))
    options = _options(row, *stored, dense)
    options = replace(
        options, k=replace(options.k, rope=ropes[0]), q_rope=ropes[1], hopper=dense and machine(device).hopper
    )
    limit = {} if hip else {"maxnreg": 128}  # Triton's AMD backend has no such option
    return make_constants("page", device, OPTIONS=options, num_warps=row.held // 16, enable_fp_fusion=False, **limit)


def _options(
    row: Row, native: bool, codec: Codec, rotate_keys: bool, static: bool, advance: bool, dense: bool
) -> AppendOptions:
    keys = Codes(row, PageSpec.of(row.head_dim).layout, False, codec, native, static, dense)
    return AppendOptions(keys, replace(keys, is_v=True, codec=E4M3), rotate_keys, advance)


def _columns_ahead(device: torch.device, heads: int, width: int) -> int:
    """Number of columns of pages that the programs of `page_kernel` read at a time, which is the distance of a
    prefetch.
    """
    if not is_native(device):
        return 0
    programs = num_sms(device) * max(1, PAGE_CHANNELS // width)  # of width / 16 warps with 128 registers a thread
    return -(-programs // (2 * heads))
