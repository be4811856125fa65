"""The plan of a launch, which the host computes once for a problem's shape, and the compile-time options."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import NamedTuple

import torch

from ...formats.page_layout import PageLayout
from ..common import power_of_two
from ..devices import chip
from ..gluon import gl
from ..launch import Constants, ConstexprFields, Counters, make_constants, num_sms
from ..view import View
from .cut import INVARIANT, Problem, best_cut, heads_in_wave, last_wave, min_tiles_per_split
from .registers import ENDLESS, ROWS, TILE
from .schedule import CLAIMS

NO_WINDOW = 1 << 30


@dataclass(frozen=True)
class PrefillOptions(ConstexprFields):
    """The one constexpr parameter of the kernel, which the host makes (`plan`). Device code reads it.

    An option that follows from the types of arguments is a field of the aggregate that contains them: `PrefillQueries.Q16`, `Means.USES_K`.
    """

    head_dim: int
    layout: PageLayout
    width: int  # head_dim, padded; TMA pads with zeros
    partitions: int  # that multiply; each has its own copy of the instructions
    rows: int  # query rows of a partition in an item, 64 for each of its warpgroups
    stages: int  # of the ring
    cubics: int  # of every 16 exponentials, how many run on the FMA pipe
    registers: int  # of a multiplying thread
    producer_registers: int
    mask_left: bool  # keys on the left may be masked: there is a window, or padding
    softcap: bool
    exact: bool  # Q and P are multiplied twice for all rows, not only for those that see few keys
    batch_invariant: bool  # which rows are multiplied twice does not depend on the rows beside them; with `exact` all are
    split: bool  # an item has a part of its tiles, and `combine` adds the parts
    rope_pairs: int  # number of channels that RoPE rotates; 0 without RoPE
    rope_interleaved: bool  # pairs are neighbors
    rope_step: int  # stride of the tables' last dimension
    rotate: bool  # keys are rotated (`rotation`), so queries must be rotated

    def __post_init__(self) -> None:
        for field in fields(self):  # Triton 3.6 takes no plain numbers in shapes
            object.__setattr__(self, field.name, gl.constexpr(getattr(self, field.name)))


class PrefillPlan(NamedTuple):
    """A launch's views, numbers and constants."""

    queries: View
    outputs: View | None  # the output, where TMA stores it
    width: int  # head_dim, padded
    part: int  # V's channels in one product
    splits: int  # parts of the keys, which `combine` adds
    grid: tuple[int]
    counter: Counters
    numbers: tuple[int, ...]  # the kernel's, from `out_stride_b` to `plane`
    angle_strides: tuple[int, int]
    # It begins before new pages are written: worth it for short prompts, measured with two warpgroups at head_dim 128. Parts of the keys
    # have no such kernel, because dense calls of queries and keys of few combinations of lengths would be the only ones to compile it.
    early: bool
    constants: Constants


@lru_cache(maxsize=4096)
def make_prefill_plan(
    device: torch.device,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    out_strides: tuple[int, ...],
    num_kv_heads: int,
    table: tuple[int, int],
    table_stride: int,
    ragged: bool,
    max_seqlen_q: int,
    causal: bool,
    window: int,
    softcap: bool,
    leftpad: bool,
    angles: tuple[int, tuple[int, ...], bool] | None,
    rotate: bool,
    exact: bool,
    batch_invariant: bool,
    q8: bool,
    lse: bool,
) -> PrefillPlan:
    """The plan for queries and an output of this shape and these strides over a page table of that shape and stride; `angles` is R / 2, the
    tables' strides and `Rope.interleaved`; `q8`: queries are in FP8; `lse`: it gives an LSE."""
    *_, num_q_heads, head_dim = shape
    num_seqs, table_width = table
    q_strides, out_strides = _strides(shape, strides), _strides(shape, out_strides)
    rope_pairs, (*angle_strides, rope_step), interleaved = angles or (0, (0,) * (len(shape) - 2) + (1,), False)
    if len(shape) == 4:
        batch, tokens = shape[:2]
    else:  # the batch: sequences of one length, or one packed batch that `cu_seqlens_q` divides
        batch, tokens = (1, shape[0]) if ragged else (num_seqs, max_seqlen_q)
        q_strides, out_strides, angle_strides = ((tokens * x[0], *x) for x in (q_strides, out_strides, angle_strides))
    width = power_of_two(head_dim)
    sms = num_sms(device)
    tiles = min(table_width, (window + 3 * ROWS.value) // TILE.value + 2) if window else table_width  # at most
    problem = Problem(num_seqs, num_q_heads, head_dim, batch * tokens, max_seqlen_q, tiles, causal and not window, ragged, exact, q8)
    cut, splits = (INVARIANT[width], 1) if batch_invariant else best_cut(width, sms, problem, chip(device))
    # For a ragged batch, an upper bound: every sequence, and the rows after the last one, have a block that is not full.
    items = num_q_heads * (tokens // cut.rows + num_seqs + 1 if ragged else num_seqs * -(-tokens // cut.rows))
    if splits > 1:  # `[splits * batch, tokens, num_q_heads, head_dim]`
        out_strides = tokens * num_q_heads * head_dim, num_q_heads * head_dim, head_dim
    # Of queries with which each SM has CLAIMS items, if they differ in length, and of K and V in L2.
    wave_rows, wave_tiles = CLAIMS * sms * cut.rows if causal else 0, chip(device).l2 // (2 * head_dim * TILE.value)
    numbers = (
        *[stride // 8 for stride in out_strides], tokens, max_seqlen_q, num_seqs, num_q_heads, num_kv_heads, table_stride, int(causal),
        window or NO_WINDOW, splits, min_tiles_per_split(items, splits, sms, tiles),
        heads_in_wave(max_seqlen_q, tiles, wave_rows, wave_tiles), wave_rows, wave_tiles, splits * batch * tokens * num_q_heads,
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
        head_dim=head_dim, layout=PageLayout.of(head_dim), width=width, partitions=cut.partitions, rows=rows, stages=cut.stages,
        cubics=cut.q8_cubics if q8 else cut.cubics, registers=cut.registers, producer_registers=cut.producer_registers,
        mask_left=window > 0 or leftpad, softcap=softcap, exact=exact,
        batch_invariant=batch_invariant and not exact, split=splits > 1, rope_pairs=rope_pairs,
        rope_interleaved=interleaved and rope_pairs > 0, rope_step=rope_step, rotate=rotate,
    )  # fmt: skip
    # ptxas: d256, d256-split, d256-q8-ragged. Without any copy they spill in their loops.
    tight = head_dim == 256 and not exact and (ragged or splits > 1 if q8 else lse or splits > 1)
    operands = "sums" if tight else "all"
    constants = make_constants("prefill", device, operands=operands, OPTIONS=options, num_warps=rows // 16, launch_pdl=True)
    grid = (min(items * splits, sms),)
    angles = tuple([stride // 8 for stride in angle_strides])
    early = cut.warpgroups == 2 and width == 128 and splits == 1
    return PrefillPlan(queries, outputs, width, width // cut.parts, splits, grid, Counters(1), numbers, angles, early, constants)


def ragged_rows(num_heads: int, head_dim: int, strides: tuple[int, int], rows: int, width: int) -> View:
    """The output of a ragged batch, `[T, num_heads, head_dim]` of 16 bits with these strides, for blocks that end with any sequence.

    TMA skips what is outside the tensor that it sees. So the third dimension has `ENDLESS` tokens, of which a block with `count` tokens of
    a sequence begins `count` before the end. The other two move the address back: coordinates `ENDLESS` and `token + count` add
    `(2**34 - stride) * ENDLESS + stride * (token + count)`, and `2**34 * ENDLESS` elements are a multiple of 2**64 bytes, so nothing to a
    64-bit address. This leaves `stride * token`. (Triton's `tools/ragged_tma.py` does the same.)
    """
    token, head = strides
    most = 0x7FFF0000
    return View((most, most, ENDLESS.value, num_heads, head_dim), ((1 << 34) - token, token, token, head, 1), (1, 1, rows, 1, width))


def _strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of all dimensions except the last. A dimension of one element can have any stride, and gets one that TMA takes."""
    *sizes, last = shape
    return tuple([stride if size > 1 else last for size, stride in zip(sizes, strides, strict=False)])


@lru_cache(maxsize=4096)
def second_launch(
    device: torch.device, num_seqs: int, tokens: int, num_q_heads: int, head_dim: int, tiles: int, exact: bool, q8: bool
) -> int:
    """How many of the `tokens` queries of each sequence, which all see `tiles` tiles of keys, a second launch computes
    (`cut.last_wave`)."""
    problem = Problem(num_seqs, num_q_heads, head_dim, num_seqs * tokens, tokens, tiles, False, False, exact, q8)
    return last_wave(power_of_two(head_dim), num_sms(device), problem, chip(device))


@lru_cache(maxsize=4096)
def tma_takes(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether TMA can fetch queries with these strides, which must be multiples of 16 bytes."""
    return strides[-1] == 1 and all(stride and not stride * itemsize & 15 for stride in _strides(shape, strides))
