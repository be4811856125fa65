"""Instructions that exchange registers between the lanes of a warp, and matrices between lanes and shared memory."""

from __future__ import annotations

import numpy as np

from .program import elements
from .warp import LANES, Warp


def shfl(warp: Warp, opcode: list[str], operands: list[str], mask: np.ndarray, active: np.ndarray) -> None:
    assert active.all(), "shfl with lanes missing"
    value = warp.get(operands[1], "b32")
    by = warp.get(operands[2], "u32").astype(np.int64)
    match opcode[2]:
        case "bfly":
            source = LANES ^ by
        case "up":
            source = np.where(LANES - by >= 0, LANES - by, LANES)
        case "down":
            source = np.where(LANES + by < 32, LANES + by, LANES)
        case "idx":
            source = by & 31
    warp.put(operands[0], value[source], mask)


def redux(warp: Warp, opcode: list[str], operands: list[str], mask: np.ndarray, active: np.ndarray) -> None:
    assert active.all(), "redux with lanes missing"
    value = warp.get(operands[1], opcode[-1])
    out = value.sum(dtype=value.dtype) if opcode[2] == "add" else getattr(value, opcode[2])()
    warp.put(operands[0], np.full(32, out, value.dtype), mask)


def elect(warp: Warp, opcode: list[str], operands: list[str], mask: np.ndarray, active: np.ndarray) -> None:
    assert active.all(), "elect with lanes missing"
    warp.put(operands[0].split("|")[1], LANES == 0, active)


def movmatrix(warp: Warp, opcode: list[str], operands: list[str], mask: np.ndarray, active: np.ndarray) -> None:
    assert active.all(), "movmatrix with lanes missing"
    matrix = np.ascontiguousarray(warp.get(operands[1], "b32")).view(np.uint16).reshape(8, 8)
    warp.put(operands[0], np.ascontiguousarray(matrix.T).reshape(-1).view(np.uint32), mask)


def ldmatrix(warp: Warp, opcode: list[str], operands: list[str], mask: np.ndarray, active: np.ndarray) -> None:
    assert active.all() and "trans" not in opcode, opcode
    targets = elements(operands[0])
    matrices = _rows(warp, operands[1], len(targets))
    warp.cta.order.load(warp.index, matrices[..., ::4].ravel() >> 2, targets)
    for target, rows in zip(targets, matrices, strict=True):
        warp.put(target, warp.cta.shared[rows].reshape(-1).view(np.uint32), mask)


def stmatrix(warp: Warp, opcode: list[str], operands: list[str], mask: np.ndarray, active: np.ndarray) -> None:
    assert active.all() and "trans" not in opcode, opcode
    sources = elements(operands[1])
    matrices = _rows(warp, operands[0], len(sources))
    at, numbers = matrices[..., ::4].ravel() >> 2, warp.cta.shared.view(np.uint32)
    before = numbers[at]
    for source, rows in zip(sources, matrices, strict=True):
        warp.cta.shared[rows] = np.ascontiguousarray(warp.get(source, "b32")).view(np.uint8).reshape(8, 16)
    warp.cta.order.store(warp.index, at, numbers[at] != before)


def _rows(warp: Warp, operand: str, matrices: int) -> np.ndarray:
    """The addresses of the bytes of some matrices of 8 rows of 16 bytes. Lane i has the address of row i."""
    address = warp.address(operand)[: 8 * matrices]
    assert (address % 16 == 0).all() and (address >= 0).all() and (address < warp.launch.size).all(), (
        f"not rows of matrices: {address}"
    )
    return (address[:, None] + np.arange(16)).reshape(matrices, 8, 16)


def vote(warp: Warp, opcode: list[str], operands: list[str], mask: np.ndarray, active: np.ndarray) -> None:
    assert opcode[2] == "any" and active.all(), opcode
    warp.put(operands[0], np.full(32, warp.get(operands[1], "pred").any()), mask)


INSTRUCTIONS = {
    "vote": vote,
    "shfl": shfl, "redux": redux, "elect": elect, "movmatrix": movmatrix, "ldmatrix": ldmatrix, "stmatrix": stmatrix,
}  # fmt: skip
