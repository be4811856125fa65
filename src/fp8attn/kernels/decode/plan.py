"""The plan of a launch, which the host computes once for a problem's shape, and the compile-time options."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from ...formats.page_layout import PAGE_SIZE, PageLayout
from ...formats.spec import spec_of
from ..common import power_of_two
from ..launch import Constants, ConstexprFields, Counters, make_constants, num_sms
from ..tiles import views
from ..view import View

WARPS = 4  # that consume. The producer's warp counts as four more, since warps are given registers by fours.
TILE = PAGE_SIZE  # tokens of a tile, a part of a page; a warp has a quarter of them
# By padded head_dim: pages in the shared memory of a CTA, and CTAs of a multiprocessor, which shared memory and
# registers limit. These and the next numbers were the fastest of those tried.
STAGES, CTAS = {64: 4, 128: 2, 256: 3}, {64: 2, 128: 2, 256: 1}
WHOLE_PAGES = 4  # the most pages of a head that stay in one range: combining its parts would cost more
HEAD_PAGES = 2  # pages that a CTA reads in the time that it takes for a head besides its pages


@dataclass(frozen=True)
class DecodeOptions(ConstexprFields):
    """The one constexpr parameter of the kernel. The host makes it, and device code reads it."""

    head_dim: int
    layout: PageLayout
    width: int  # head_dim, padded to a power of two; TMA pads with zeros
    group: int  # query heads of a KV head
    rows: int  # query rows of a row tile
    used_rows: int  # rows that exist, padded to a power of two
    one_row_tile: bool  # of a KV head; else as many as the rows of `max_q` take, in one kernel for any number
    tile: int  # tokens of a tile, a part of a page
    stages: int  # of shared memory: tiles
    block: int  # sequences whose lengths a CTA loads at once
    causal: bool
    ragged: bool  # the queries' bounds are arguments; else every sequence has `max_q` queries
    window: bool
    softcap: bool
    sinks: bool
    leftpad: bool
    rotate: bool  # keys are rotated (`rotation`), so queries must be rotated
    whole_tiles: int  # `WHOLE_PAGES`, in tiles
    head_tiles: int  # `HEAD_PAGES`, in tiles
    early_v: bool  # V is loaded to registers before the scores are computed, if there are enough registers


class DecodeProblem(NamedTuple):
    """What the plan of a launch depends on: shapes and options.

    It is a tuple, because each call looks up its plan.
    """

    pool: tuple[int, ...]  # the shape of the pool of pages
    spec: str  # the name of what a page holds
    group: int
    num_seqs: int
    max_q: int  # query tokens of the longest sequence
    causal: bool  # among the query tokens
    ragged: bool
    window: bool
    softcap: bool
    sinks: bool
    leftpad: bool
    rotate: bool


class DecodeNumbers(NamedTuple):
    """The numbers that the kernel takes one after the other, by the names and in the order of its parameters."""

    num_seqs: int
    heads: int  # KV heads
    max_q: int
    num_tokens: int  # query tokens of all sequences
    window: int
    workers: int


@dataclass(frozen=True)
class DecodePlan:
    """A launch's views, numbers and constants."""

    k: View
    v: View
    grid: tuple[int]
    counters: Counters  # one for each range of each row tile
    workers: int  # ranges of a row tile
    # rows of partial results: a range has at most two parts, of a head that began before it and of one that ends after
    # it
    plane: int
    scratch: int  # float32 numbers of the partial results: of each row its output, two sums and a mean score
    constants: Constants


@lru_cache(maxsize=4096)
def make_decode_plan(device: torch.device, problem: DecodeProblem) -> DecodePlan:
    """The plan of the launch on `device`."""
    spec = spec_of(problem.spec)
    head_dim, width = spec.k_dim, power_of_two(spec.k_dim)
    most_rows = problem.max_q * problem.group
    rows = 8 if most_rows <= 8 else 16
    row_tiles = -(-most_rows // rows)
    ctas = CTAS[width]
    workers = count_workers(num_sms(device), ctas, row_tiles, problem.pool[1] * problem.num_seqs)
    stages = STAGES[width]
    if width == 256 and rows > 8:
        stages = min(stages, 2)  # shared memory is too small for a third page
    of_page = PAGE_SIZE // TILE
    options = DecodeOptions(
        head_dim=head_dim, layout=spec.layout, width=width, group=problem.group, rows=rows,
        used_rows=min(rows, power_of_two(most_rows)), one_row_tile=row_tiles == 1, tile=TILE, stages=stages * of_page,
        block=32 if problem.num_seqs <= 32 else 128, causal=problem.causal, ragged=problem.ragged,
        window=problem.window, softcap=problem.softcap, sinks=problem.sinks, leftpad=problem.leftpad,
        rotate=problem.rotate, whole_tiles=WHOLE_PAGES * of_page, head_tiles=HEAD_PAGES * of_page,
        early_v=width * rows <= 2048,
    )  # fmt: skip
    # Warp specialization allocates all registers, so `maxnreg` is a multiprocessor's 65,536 divided by all of its
    # threads.
    registers = min(65536 // (ctas * 2 * WARPS * 32), 248)
    k, v = views(problem.pool, spec, width, width, TILE)
    plane = 2 * workers * row_tiles * rows
    return DecodePlan(
        k=k, v=v, grid=(workers * row_tiles,), counters=Counters(workers * row_tiles), workers=workers, plane=plane,
        scratch=plane * (width + 3),
        constants=make_constants(
            "decode", device, OPTIONS=options, num_warps=WARPS, maxnreg=registers, launch_pdl=True
        ),
    )  # fmt: skip


def count_workers(sms: int, ctas: int, row_tiles: int, heads: int) -> int:
    """Number of ranges that the work of one row tile is cut into, if each of `sms` SMs runs up to `ctas` CTAs.

    It is one for each SM. If there are so many heads that ranges share none, it is as many as run on all SMs. (If
    ranges share heads, more ranges make more parts to combine.)
    """
    for on_sm in range(ctas, 0, -1):
        workers = even_workers(on_sm * sms // row_tiles, heads)
        if workers <= heads:
            break
    return workers


def even_workers(most: int, heads: int) -> int:
    """The number of ranges of a list of `heads`: `most`, or a few less if heads of one length are then divided
    equally."""
    most = max(1, most)
    even = [n for n in range(most - most // 16, most + 1) if n % heads == 0 or heads % n == 0]
    return max(even, key=lambda n: n & -n) if even else max(most // 32 * 32, min(most, 32))
