"""Instructions with which warps wait for each other and for copies. Fences do nothing: memory has one order here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from .memory import Barrier
from .warp import Blocked, Warp


def mbarrier(warp: Warp, opcode: list[str], operands: list[str], mask: np.ndarray, active: np.ndarray) -> None:
    barriers = warp.cta.barriers
    match opcode[1]:
        case "init":
            at = warp.one(operands[0], mask)
            barriers[at] = Barrier(int(warp.get(operands[1], "u32")[mask][0]), partial(warp.cta.order.end, at))
            warp.cta.order.init(warp.index, at)
        case "arrive":
            arrivals = int(mask.sum())
            expected = int(operands[2]) * arrivals if "expect_tx" in opcode else 0
            at = warp.one(operands[1], mask)
            warp.cta.order.arrive(warp.index, at)
            barriers[at].update(arrivals, expected)
        case "try_wait":
            at = warp.one(operands[1], mask)
            if barriers[at].phase == int(warp.get(operands[2], "u32")[mask][0]):
                raise Blocked
            warp.cta.order.wait(warp.index, at)
            warp.put(operands[0], np.ones(32, bool), mask)
        case _:
            raise NotImplementedError(".".join(opcode))


def bar(warp: Warp, opcode: list[str], operands: list[str], mask: np.ndarray, active: np.ndarray) -> None:
    """`bar.warp.sync`, or a barrier of the CTA's warps, by its number."""
    assert active.all(), "barrier with lanes missing"
    if opcode[1] == "warp":
        return
    count = int(operands[1]) // 32 if len(operands) > 1 else len(warp.cta.warps)
    order = warp.cta.order
    meet(warp, (int(warp.get(operands[0], "u32")[0]), count), count, order.meet)


def meet(warp: Warp, key: tuple, count: int, then: Callable[[list[int]], None]) -> None:
    """Hold the warp until `count` warps of its CTA have come to `key`; then call `then` with their numbers."""
    waiting = warp.cta.waiting.setdefault(key, [])
    waiting.append(warp)
    warp.parked = key
    if len(waiting) == count:
        for other in waiting:
            other.parked = None
        del warp.cta.waiting[key]
        then([other.index for other in waiting])


def nothing(warp: Warp, opcode: list[str], operands: list[str], mask: np.ndarray, active: np.ndarray) -> None:
    pass


def fence(warp: Warp, opcode: list[str], operands: list[str], mask: np.ndarray, active: np.ndarray) -> None:
    if opcode[1:3] == ["proxy", "async"]:
        warp.cta.order.fence(warp.index)


def griddepcontrol(warp: Warp, opcode: list[str], operands: list[str], mask: np.ndarray, active: np.ndarray) -> None:
    if opcode[1] == "wait":
        warp.launch.memory.complete()


INSTRUCTIONS = {
    "griddepcontrol": griddepcontrol,
    "mbarrier": mbarrier,
    "bar": bar,
    "barrier": bar,
    "fence": fence,
    **dict.fromkeys(("membar", "setmaxnreg", "pragma"), nothing),
}
