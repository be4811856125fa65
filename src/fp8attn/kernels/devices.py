"""What plans of launches use of a GPU: its speed, in a few measured numbers.

`python -m benchmarks.fit` measures the GPU that it runs on and prints its entry for this file. The numbers decide how a problem is cut: how
long that takes, and in which order sums are added.

The number of multiprocessors is not here: the driver reports it (`launch.num_sms`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch

from .machine import machine

log = logging.getLogger(__name__)


class Cost(NamedTuple):
    """What a CTA of `prefill` takes, in microseconds: `item + tile * tiles` for the queries of one item over so many tiles of keys."""

    tile: float
    item: float


@dataclass(frozen=True, eq=False)
class Chip:
    """The numbers of one GPU.

    Attributes:
        name: `torch.cuda.get_device_name`.
        bandwidth: of a copy in device memory, reads and writes together, in GB/s.
        l2: bytes of K and V that the L2 cache holds beside all else that a launch of `prefill` touches.
        prefill: by padded head_dim and warpgroups, with 16-bit queries.
        combine: microseconds of a launch of `combine`, and microseconds for each byte of the partial outputs that it reads.
        decode_stages: pages in the shared memory of a CTA of `decode`, by padded head_dim.
        decode_ctas: CTAs of `decode` on a multiprocessor, by padded head_dim: as many as there are shared memory and registers for.
        decode_min_pages: pages of a CTA's range, at least, when there is little work.
        decode_whole_pages: a head of up to so many pages is in one range, since combining its parts would cost more.
    """

    name: str
    bandwidth: float
    l2: int
    prefill: Mapping[tuple[int, int], Cost]
    combine: tuple[float, float]
    decode_stages: Mapping[int, int]
    decode_ctas: Mapping[int, int]
    decode_min_pages: int
    decode_whole_pages: int


# The SXM module, with 132 multiprocessors. Tiles and items are fitted to launches of 20 to 2,400 us, which `test_prefill_cut.py` has, and
# `combine` to others. The bandwidth is the best copy's of results/h100/append.json. The others are the fastest of those tried.
H100 = Chip(
    name="NVIDIA H100 80GB HBM3",
    bandwidth=3000,
    l2=32 << 20,
    # A third warpgroup saves a tenth of a tile's time for its rows, but items begin and end more slowly, and there are fewer to go around.
    prefill={(64, 3): Cost(1.3, 5.0), (128, 2): Cost(1.1, 4.0), (128, 3): Cost(1.52, 5.9), (256, 2): Cost(2.2, 6.0)},
    combine=(6.0, 0.9e-6),
    decode_stages={64: 4, 128: 2, 256: 3},
    decode_ctas={64: 2, 128: 2, 256: 1},
    decode_min_pages=2,
    decode_whole_pages=4,
)
# The H100's multiprocessors and L2 cache with faster memory. Its bandwidth is measured, and nothing else has been fitted to it yet.
H200 = replace(H100, name="NVIDIA H200", bandwidth=4300)

DEFAULT = H100
CHIPS = {chip.name: chip for chip in (H100, H200)}


def named(name: str) -> Chip:
    """The numbers of the GPU of that name; of one that has none here (H100 PCIe, H20, GH200, a slice of a GPU), `DEFAULT`'s."""
    chip = CHIPS.get(name)
    if chip is None:
        log.debug(
            "%s has no numbers of its own: its launches are planned for its number of multiprocessors with the numbers of %s. "
            "`python -m benchmarks.fit` measures its own, for fp8attn/kernels/devices.py",
            name, DEFAULT.name,
        )  # fmt: skip
        return DEFAULT
    return chip


@lru_cache
def chip(device: torch.device) -> Chip:
    """The numbers of `device`; on a CPU, where kernels are interpreted or emulated, `DEFAULT`'s."""
    name = "" if device.type == "cpu" else machine(device).name
    return named(name) if name else DEFAULT
