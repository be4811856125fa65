"""The speed of GPUs, in a few measured numbers that plans of launches use.

`python -m benchmarks.fit` measures the GPU that it runs on and prints its entry for this file. The numbers determine
how a problem is divided, and so the order in which sums are added.

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
    """The time of a CTA of `prefill` for one item, in microseconds: `item + tile * tiles` for this number of tiles of
    128 keys.
    """

    tile: float
    item: float


@dataclass(frozen=True, eq=False)
class Chip:
    """The measured numbers of one GPU.

    Attributes:
        name: `torch.cuda.get_device_name`.
        l2: bytes of K and V that fit into the L2 cache besides the other data of a launch of `prefill`.
        prefill: times with 16-bit queries, by padded head_dim and number of warpgroups.
        combine: microseconds of a launch of `combine`, and microseconds for each byte of the partial outputs that it
            reads.
    """

    name: str
    l2: int
    prefill: Mapping[tuple[int, int], Cost]
    combine: tuple[float, float]


# The SXM module, with 132 multiprocessors. Tiles and items are fitted to launches of 20 to 2,400 us, which
# `test_cut.py` has, and `combine` to launches of its own. The other numbers are the fastest of those tried.
H100 = Chip(
    name="NVIDIA H100 80GB HBM3",
    l2=32 << 20,
    # A third warpgroup saves 10% of the time of a tile per row. But items begin and end more slowly, and there are
    # fewer items.
    prefill={(64, 3): Cost(1.3, 5.0), (128, 2): Cost(1.1, 4.0), (128, 3): Cost(1.52, 5.9), (256, 2): Cost(2.2, 6.0)},
    combine=(6.0, 0.9e-6),
)
# The H100's multiprocessors and L2 cache with faster memory. Prefill at head_dim 128 is fitted to launches with 16-bit
# queries, which `test_cut.py` has. The others are the H100's.
H200 = replace(
    H100,
    name="NVIDIA H200",
    prefill={**H100.prefill, (128, 2): Cost(1.19, 3.0), (128, 3): Cost(1.64, 6.0)},
)

DEFAULT = H100
CHIPS = {chip.name: chip for chip in (H100, H200)}


def named(name: str) -> Chip:
    """The numbers of the GPU of that name, or `DEFAULT`'s if it has none here (H100 PCIe, H20, GH200, a slice of a
    GPU).
    """
    chip = CHIPS.get(name)
    if chip is None:
        log.debug(
            "%s has no numbers of its own: its launches are planned for its number of multiprocessors with the numbers "
            "of %s. `python -m benchmarks.fit` measures its own, for fp8attn/kernels/devices.py",
            name, DEFAULT.name,
        )  # fmt: skip
        return DEFAULT
    return chip


@lru_cache
def chip(device: torch.device) -> Chip:
    """The numbers of `device`, or `DEFAULT`'s on a CPU, where kernels are interpreted or emulated."""
    name = "" if device.type == "cpu" else machine(device).name
    return named(name) if name else DEFAULT
