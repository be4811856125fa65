"""Instructions that move data between memory and registers, and the copies of cp.async and TMA."""

from __future__ import annotations

import numpy as np

from .order import words
from .program import elements
from .warp import DESCRIPTORS, DTYPES, LANES, Blocked, Warp


def ld(warp: Warp, opcode: list[str], operands: list[str], mask: np.ndarray, active: np.ndarray) -> None:
    if opcode[1] == "param":
        return warp.put(operands[0], np.full(32, warp.launch.params[operands[1][1:-1]], np.uint64), mask)
    dtype = DTYPES[opcode[-1]]
    targets = elements(operands[0])
    address = warp.address(operands[1])
    space = _space(warp, opcode, address[mask])
    assert (address[mask] % (dtype.itemsize * len(targets)) == 0).all(), "misaligned"
    if "global" not in opcode:
        warp.cta.order.load(warp.index, words(address[mask], dtype.itemsize * len(targets)), targets)
    view = space[: space.size // dtype.itemsize * dtype.itemsize].view(dtype)
    at = np.where(mask, address // dtype.itemsize, 0)
    for i, target in enumerate(targets):
        warp.put(target, view[at + i], mask)


def st(warp: Warp, opcode: list[str], operands: list[str], mask: np.ndarray, active: np.ndarray) -> None:
    dtype = DTYPES[opcode[-1]]
    sources = elements(operands[1])
    address = warp.address(operands[0])[mask]
    space = _space(warp, opcode, address)
    size = dtype.itemsize * len(sources)
    assert (address % size == 0).all(), "misaligned"
    if "global" not in opcode:
        for barrier in warp.cta.barriers:  # in use or not: whether the store comes before its initialization is a race
            assert ((address >= barrier + 8) | (address + size <= barrier)).all(), (
                f"a store over the barrier at {barrier}"
            )
        at, numbers = words(address, size), warp.cta.shared.view(np.uint32)
        before = numbers[at]
    view = space.view(dtype)
    for i, source in enumerate(sources):
        view[address // dtype.itemsize + i] = warp.get(source, opcode[-1]).view(dtype)[mask]
    if "global" not in opcode:
        warp.cta.order.store(warp.index, at, numbers[at] != before)


def _space(warp: Warp, opcode: list[str], address: np.ndarray) -> np.ndarray:
    """The bytes of the memory that the instruction names; the addresses must be in it."""
    if "global" in opcode:
        warp.launch.memory.check(address)
        return warp.launch.memory.bytes
    assert ((address >= 0) & (address < warp.launch.size)).all(), f"outside shared memory: {address}"
    return warp.cta.shared


def atom(warp: Warp, opcode: list[str], operands: list[str], mask: np.ndarray, active: np.ndarray) -> None:
    assert opcode[-2] == "add"
    address = warp.address(operands[1])
    memory = warp.launch.memory
    memory.check(address[mask])
    view, old, more = memory.bytes.view(np.uint32), np.zeros(32, np.uint32), warp.get(operands[2], "u32")
    for lane in LANES[mask]:
        old[lane] = view[address[lane] // 4]
        view[address[lane] // 4] += more[lane]
    warp.put(operands[0], old, mask)


def prefetch(warp: Warp, opcode: list[str], operands: list[str], mask: np.ndarray, active: np.ndarray) -> None:
    warp.launch.memory.check(warp.address(operands[0])[mask])


def cp(warp: Warp, opcode: list[str], operands: list[str], mask: np.ndarray, active: np.ndarray) -> None:
    match opcode[2:4]:
        case ["mbarrier", _]:
            _arrive_with_copies(warp, operands, mask)
        case ["ca" | "cg", _]:
            _copy(warp, operands, mask)
        case ["bulk", "tensor"]:
            (lane,) = LANES[mask]
            _copy_tile(warp, operands, lane)
        case ["bulk", "commit_group"]:
            warp.sends.append([])
        case ["bulk", "wait_group"]:
            ended = len(warp.sends) - 1 - int(operands[0])
            if due := [copy for group in warp.sends[: max(ended, 0)] for copy in group]:
                warp.cta.copies += [copy for copy in due if copy not in warp.cta.copies]
                raise Blocked
            warp.cta.order.sent(warp.index, ended)
        case _:
            raise NotImplementedError(".".join(opcode))


def _copy_tile(warp: Warp, operands: list[str], lane: int) -> None:
    """TMA: to shared memory if the instruction names a barrier, which counts its bytes; from shared memory
    otherwise.
    """
    load = len(operands) == 3
    memory, tile = operands[:2] if load else operands[1::-1]
    source, coordinates = elements(tile)
    tensor = warp.launch.maps[int(warp.get(source, "u64")[lane]) - DESCRIPTORS]
    corner = [int(warp.get(x, "s32")[lane]) for x in reversed(elements(coordinates))]
    at, cta = int(warp.address(memory)[lane]), warp.cta
    if load:
        barrier = int(warp.address(operands[2])[lane])
        cta.order.fetch(warp.index, slice(at >> 2, at + tensor.nbytes >> 2), barrier)

        def land() -> None:
            tensor.load(cta.shared, at, corner)
            cta.barriers[barrier].update(expected=-tensor.nbytes)

        cta.copies.append(land)
    else:
        group = warp.sends[-1]
        cta.order.send(warp.index, slice(at >> 2, at + tensor.nbytes >> 2), len(warp.sends))

        def leave() -> None:
            tensor.store(cta.shared, at, corner)
            group.remove(leave)

        group.append(leave)
        if warp.launch.chance():  # if not, then when a wait_group needs it
            cta.copies.append(leave)


def _copy(warp: Warp, operands: list[str], mask: np.ndarray) -> None:
    """`cp.async`: lands with the next arrival on a barrier at the latest.
    Bytes that the source does not have are zero.
    """
    target, source = (warp.address(x)[mask] for x in operands[:2])
    count, memory, shared = int(operands[2], 0), warp.launch.memory, warp.cta.shared
    given = warp.get(operands[3], "u32")[mask] if len(operands) > 3 else np.full(len(target), count)
    memory.check(source[given > 0])
    warp.cta.order.copy(warp.index, words(target, count))

    def land() -> None:
        for to, start, size in zip(target.tolist(), source.tolist(), given.tolist(), strict=True):
            shared[to : to + count] = 0
            shared[to : to + size] = memory.bytes[start : start + size]

    warp.copies.append(land)


def _arrive_with_copies(warp: Warp, operands: list[str], mask: np.ndarray) -> None:
    """`cp.async.mbarrier.arrive`: one more arrival is pending until all copies before it have landed."""
    barrier, copies = warp.cta.barriers[warp.one(operands[0], mask)], list(warp.copies)
    arrivals = int(mask.sum())
    barrier.pending += arrivals
    warp.cta.order.arrive_with_copies(warp.index, warp.one(operands[0], mask))

    def land() -> None:
        for copy in copies:
            if copy in warp.copies:  # another barrier's arrival may have been first
                warp.copies.remove(copy)
                copy()
        barrier.update(arrivals=arrivals)

    warp.cta.copies.append(land)


INSTRUCTIONS = {"ld": ld, "st": st, "atom": atom, "prefetch": prefetch, "cp": cp}
