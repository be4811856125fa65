"""The plan of a launch, which the host computes once for a problem's shape, and the compile-time options."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import NamedTuple

import torch

from ...formats.page_layout import PAGE_SIZE, PageLayout
from ...formats.spec import spec_of
from ..common import power_of_two
from ..devices import chip
from ..gluon import gl
from ..launch import Constants, ConstexprFields, Counters, make_constants, num_sms
from ..tiles import views
from ..view import View
from .cut import INVARIANT, Problem, best_cut, heads_in_wave, last_wave, min_pages_per_split
from .registers import ENDLESS, ROWS
from .schedule import CLAIMS

NO_WINDOW = 1 << 30


@dataclass(frozen=True)
class PrefillOptions(ConstexprFields):
    """The one constexpr parameter of the kernel, which the host makes (`plan`). Device code reads it.

    An option that follows from the types of arguments is a field of the aggregate that contains them:
    `PrefillQueries.Q16`, `Means.USES_K`.
    """

    head_dim: int
    layout: PageLayout
    width: int  # head_dim, padded; TMA pads with zeros
    partitions: int  # that multiply; each has its own copy of the instructions
    rows: int  # query rows of a partition in an item, 64 for each of its warpgroups
    tile: int  # keys of a tile, a part of a page
    stages: int  # of the ring
    cubics: int  # of every 16 exponentials, how many run on the FMA pipe
    registers: int  # of a multiplying thread
    mask_left: bool  # keys on the left may be masked: there is a window, or padding
    softcap: bool
    exact: bool  # Q and P are multiplied twice for all rows, not only for those that see few keys
    batch_invariant: bool  # which rows are multiplied twice does not depend on the rows beside them (with `exact` all)
    split: bool  # an item has a part of its tiles, and `combine` adds the parts
    rotate: bool  # keys are rotated (`rotation`), so queries must be rotated

    def __post_init__(self) -> None:
        for field in fields(self):  # Triton 3.6 takes no plain numbers in shapes
            object.__setattr__(self, field.name, gl.constexpr(getattr(self, field.name)))


class PrefillProblem(NamedTuple):
    """What the plan of a launch depends on: shapes, strides (in elements) and options.

    It is a tuple, because each call looks up its plan.
    """

    shape: tuple[int, ...]  # of the queries
    strides: tuple[int, ...]  # of the queries
    out_strides: tuple[int, ...]
    pool: tuple[int, ...]  # the shape of the pool of pages
    spec: str  # the name of what a page holds
    num_seqs: int
    columns: int  # of the page table
    table_stride: int
    ragged: bool
    max_seqlen_q: int
    causal: bool
    window: int  # 0: none
    softcap: bool
    leftpad: bool
    rotate: bool
    exact: bool
    batch_invariant: bool
    q8: bool  # queries are in FP8
    lse: bool  # the launch writes an LSE


class PrefillNumbers(NamedTuple):
    """The numbers that the kernel takes from a plan, by the names and in the order of its parameters."""

    out_stride_b: int  # of batch, token and head, in units of 8 elements
    out_stride_t: int
    out_stride_h: int
    num_tokens: int  # of a batch
    max_q: int
    num_seqs: int
    num_q_heads: int
    num_kv_heads: int
    table_width: int  # the stride of the page table
    causal: int
    window: int  # `NO_WINDOW` without one
    parts: int  # of the keys, which `combine` adds
    min_tiles: int
    wave: int
    wave_rows: int
    wave_pages: int
    plane: int


@dataclass(frozen=True)
class PrefillPlan:
    """A launch's views, numbers and constants."""

    queries: View
    fetched: bool  # TMA can fetch queries with these strides; if not, they must be copied
    k: View
    v: View
    outputs: View | None  # the output, where TMA stores it
    grid: tuple[int]
    counter: Counters
    numbers: PrefillNumbers
    last: int  # queries of each sequence that a second launch computes (`cut.last_wave`); 0: this one computes all
    # It begins before new pages are written: worth it for short prompts, measured with two warpgroups at head_dim 128.
    # Parts of the keys have no such kernel, because dense calls of queries and keys of few combinations of lengths
    # would be the only ones to compile it.
    early: bool
    constants: Constants


@lru_cache(maxsize=4096)
def make_prefill_plan(device: torch.device, problem: PrefillProblem) -> PrefillPlan:
    """The plan of the launch on `device`."""
    shape, ragged, max_seqlen_q, window = problem.shape, problem.ragged, problem.max_seqlen_q, problem.window
    exact, q8 = problem.exact, problem.q8
    *_, num_q_heads, head_dim = shape
    spec = spec_of(problem.spec)
    num_seqs, columns = problem.num_seqs, problem.columns
    q_strides, out_strides = _strides(shape, problem.strides), _strides(shape, problem.out_strides)
    if len(shape) == 4:
        batch, tokens = shape[:2]
    else:  # the batch: sequences of one length, or one packed batch that `cu_seqlens_q` divides
        batch, tokens = (1, shape[0]) if ragged else (num_seqs, max_seqlen_q)
        q_strides, out_strides = ((tokens * x[0], *x) for x in (q_strides, out_strides))
    width = power_of_two(head_dim)
    sms = num_sms(device)
    # That a query sees, at most.
    pages = min(columns, (window + 3 * ROWS.value) // PAGE_SIZE + 2) if window else columns
    size = Problem(
        num_seqs, num_q_heads, head_dim, tokens=batch * tokens, max_seqlen_q=max_seqlen_q, pages=pages,
        causal=problem.causal and not window, ragged=ragged, exact=exact, q8=q8,
    )  # fmt: skip
    # Only if all queries see the same keys, and no LSE is written.
    whole = not (problem.causal or window or ragged or problem.lse or problem.batch_invariant)
    last = last_wave(width, sms, size, chip(device)) if whole else 0
    cut, splits = (INVARIANT[width], 1) if problem.batch_invariant else best_cut(width, sms, size, chip(device))
    # For a ragged batch, an upper bound: every sequence, and the rows after the last one, have a block that is not
    # full.
    items = num_q_heads * (tokens // cut.rows + num_seqs + 1 if ragged else num_seqs * -(-tokens // cut.rows))
    if splits > 1:  # `[splits * batch, tokens, num_q_heads, head_dim]`
        out_strides = tokens * num_q_heads * head_dim, num_q_heads * head_dim, head_dim
    # Of queries with which each SM has CLAIMS items, if they differ in length, and of K and V in L2.
    wave_rows = CLAIMS * sms * cut.rows if problem.causal else 0
    wave_pages = chip(device).l2 // (2 * head_dim * PAGE_SIZE)
    stride_b, stride_t, stride_h = (stride // 8 for stride in out_strides)
    numbers = PrefillNumbers(
        out_stride_b=stride_b, out_stride_t=stride_t, out_stride_h=stride_h, num_tokens=tokens, max_q=max_seqlen_q,
        num_seqs=num_seqs, num_q_heads=num_q_heads, num_kv_heads=problem.pool[1], table_width=problem.table_stride,
        causal=int(problem.causal), window=window or NO_WINDOW, parts=splits,
        min_tiles=min_pages_per_split(items, splits, sms, pages) * PAGE_SIZE // cut.tile,
        wave=heads_in_wave(max_seqlen_q, pages, wave_rows, wave_pages), wave_rows=wave_rows, wave_pages=wave_pages,
        plane=splits * batch * tokens * num_q_heads,
    )  # fmt: skip
    rows = cut.rows // cut.partitions
    queries = View((batch, tokens, num_q_heads, head_dim), (*q_strides, 1), (1, rows, 1, width))
    outputs = None
    if splits == 1 and width < 256:  # parts are in FP32, and head_dim 256 leaves no shared memory
        if ragged:
            outputs = ragged_rows(num_q_heads, head_dim, out_strides[1:], rows, width)
        else:
            outputs = View((batch, tokens, num_q_heads, head_dim), (*out_strides, 1), (1, rows, 1, width))
    options = PrefillOptions(
        head_dim=head_dim, layout=spec.layout, width=width, partitions=cut.partitions, rows=rows,
        tile=cut.tile, stages=cut.stages, cubics=cut.q8_cubics if q8 else cut.cubics, registers=cut.registers,
        mask_left=window > 0 or problem.leftpad, softcap=problem.softcap,
        exact=exact, batch_invariant=problem.batch_invariant and not exact, split=splits > 1, rotate=problem.rotate,
    )  # fmt: skip
    # ptxas: d256, d256-split, d256-q8-ragged. Without any copy they spill in their loops.
    tight = head_dim == 256 and not exact and (ragged or splits > 1 if q8 else problem.lse or splits > 1)
    operands = "sums" if tight else "all"
    constants = make_constants(
        "prefill", device, operands=operands, OPTIONS=options, num_warps=rows // 16, launch_pdl=True
    )
    k, v = views(problem.pool, spec, width, width // cut.parts, cut.tile)
    return PrefillPlan(
        queries=queries, fetched=tma_takes(shape, problem.strides, 1 if q8 else 2), k=k, v=v, outputs=outputs,
        grid=(min(items * splits, sms),), counter=Counters(1), numbers=numbers, last=last,
        early=cut.warpgroups == 2 and width == 128 and splits == 1, constants=constants,
    )  # fmt: skip


def ragged_rows(num_heads: int, head_dim: int, strides: tuple[int, int], rows: int, width: int) -> View:
    """The output of a ragged batch, `[T, num_heads, head_dim]` of 16 bits with these strides, for blocks that end with
    any sequence.

    TMA skips what is outside the tensor that it sees. So the third dimension has `ENDLESS` tokens, of which a block
    with `count` tokens of a sequence begins `count` before the end. The other two move the address back: coordinates
    `ENDLESS` and `token + count` add `(2**34 - stride) * ENDLESS + stride * (token + count)`, and `2**34 * ENDLESS`
    elements are a multiple of 2**64 bytes, so nothing to a 64-bit address. This leaves `stride * token`. (Triton's
    `tools/ragged_tma.py` does the same.)
    """
    token, head = strides
    most = 0x7FFF0000
    return View(
        (most, most, ENDLESS.value, num_heads, head_dim),
        ((1 << 34) - token, token, token, head, 1),
        (1, 1, rows, 1, width),
    )


def _strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of all dimensions except the last. A dimension of one element can have any stride, and gets one that
    TMA takes.
    """
    *sizes, last = shape
    return tuple([stride if size > 1 else last for size, stride in zip(sizes, strides, strict=False)])


def tma_takes(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether TMA can fetch queries with these strides, which must be multiples of 16 bytes."""
    return strides[-1] == 1 and all(stride and not stride * itemsize & 15 for stride in _strides(shape, strides))
