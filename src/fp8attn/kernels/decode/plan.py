"""The plan of a launch, from what the host knows about a problem, and the compile-time options."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ...formats.page_layout import PAGE_SIZE, PageLayout
from ...formats.spec import PageSpec
from ..common import power_of_two
from ..devices import DEFAULT, Chip, chip
from ..launch import Constants, ConstexprFields, Counters, make_constants, num_sms
from ..tiles import views
from ..view import View

WARPS = 4  # that consume. The producer's warp counts as four more, since warps are given registers by fours.


@dataclass(frozen=True)
class DecodeOptions(ConstexprFields):
    """The one constexpr parameter of the kernel. The host makes it, and device code reads it."""

    head_dim: int
    layout: PageLayout
    width: int  # head_dim, padded to a power of two; TMA pads with zeros
    group: int  # query heads of a KV head
    rows: int  # query rows of a tile
    used_rows: int  # rows that exist, padded to a power of two
    one_row_tile: bool  # of a KV head; else as many as the rows of `max_q` take, in one kernel for any number
    stages: int  # of shared memory: pages
    block: int  # sequences whose lengths a CTA loads at once
    causal: bool
    ragged: bool  # the queries' bounds are given
    window: bool
    softcap: bool
    sinks: bool
    leftpad: bool
    rotate: bool  # keys are rotated (`rotation`), so queries must be rotated
    whole_pages: int  # `devices.Chip.decode_whole_pages`
    head_pages: int  # `devices.Chip.decode_head_pages`
    early_v: bool  # V is loaded to registers before the scores are computed, if there are enough registers


class DecodeShape(NamedTuple):
    """The shape of a launch: everything that the compiled kernel depends on, and the number of CTAs.

    It is a tuple, because a plan is looked up at each call.
    """

    head_dim: int
    group: int
    max_rows: int  # query tokens x group of the longest sequence
    num_seqs: int
    causal: bool = False  # among the query tokens
    ragged: bool = False
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    leftpad: bool = False
    rotate: bool = False  # the queries, as the keys are
    chip: Chip = DEFAULT

    @property
    def width(self) -> int:
        return power_of_two(self.head_dim)

    @property
    def rows(self) -> int:
        return 8 if self.max_rows <= 8 else 16

    @property
    def tiles(self) -> int:
        return -(-self.max_rows // self.rows)

    @property
    def stages(self) -> int:
        stages = self.chip.decode_stages[self.width]
        return (
            min(stages, 2) if self.width == 256 and self.rows > 8 else stages
        )  # shared memory is too small for a third

    def workers(self, num_sms: int, heads: int) -> int:
        """Number of ranges that the work of one row tile is cut into.

        It is one for each SM. If there are so many heads that ranges share none, it is as many as run on all SMs. (If
        ranges share heads, more ranges make more parts to combine.) It is a few less if sequences of one length are
        then divided equally.
        """
        for ctas in range(self.chip.decode_ctas[self.width], 0, -1):
            most = max(1, ctas * num_sms // self.tiles)
            even = [n for n in range(most - most // 16, most + 1) if n % heads == 0 or heads % n == 0]
            workers = max(even, key=lambda n: n & -n) if even else max(most // 32 * 32, min(most, 32))
            if workers <= heads:
                break
        return workers

    def constants(self) -> dict[str, Any]:
        """Warp specialization allocates all registers, so `maxnreg` is a multiprocessor's 65,536 divided by all of its
        threads.
        """
        options = DecodeOptions(
            head_dim=self.head_dim, layout=PageSpec.of(self.head_dim).layout, width=self.width, group=self.group,
            rows=self.rows,
            used_rows=min(self.rows, power_of_two(self.max_rows)), one_row_tile=self.tiles == 1, stages=self.stages,
            block=32 if self.num_seqs <= 32 else 128, causal=self.causal, ragged=self.ragged, window=self.window,
            softcap=self.softcap,
            sinks=self.sinks, leftpad=self.leftpad, rotate=self.rotate, whole_pages=self.chip.decode_whole_pages,
            head_pages=self.chip.decode_head_pages, early_v=self.width * self.rows <= 2048,
        )  # fmt: skip
        threads = self.chip.decode_ctas[self.width] * 2 * WARPS * 32
        return {"OPTIONS": options, "num_warps": WARPS, "maxnreg": min(65536 // threads, 248), "launch_pdl": True}


@dataclass(frozen=True)
class DecodePlan:
    """The numbers that the host computes from a problem's shape, once."""

    workers: int  # ranges of a row tile
    grid: tuple[int]
    counters: Counters  # one for each range of each row tile
    # rows of partial results: a range has at most two parts, of a head that began before it and of one that ends after
    # it
    plane: int
    width: int  # head_dim, padded
    k: View
    v: View
    constants: Constants


@lru_cache(maxsize=4096)
def make_decode_plan(
    device: torch.device, pool: tuple[int, ...], key_dtype: torch.dtype, shape: DecodeShape
) -> DecodePlan:
    """The plan for a pool of shape `pool` with keys of `key_dtype`, on `device`, whose `chip` the shape gets."""
    shape = shape._replace(chip=chip(device))
    workers = shape.workers(num_sms(device), pool[1] * shape.num_seqs)
    ctas = workers * shape.tiles
    k, v = views(pool, shape.head_dim, key_dtype, shape.width, shape.width, PAGE_SIZE)
    return DecodePlan(
        workers=workers, grid=(ctas,), counters=Counters(ctas), plane=2 * ctas * shape.rows, width=shape.width, k=k,
        v=v,
        constants=make_constants("decode", device, **shape.constants()),
    )  # fmt: skip
