"""Products of matrices: mma and wgmma. Fragments are those of the figures in PTX ISA 8.7."""

from __future__ import annotations

import re

import numpy as np

from .arithmetic import E4M3
from .program import elements
from .synchronization import meet
from .warp import Warp


def mma(warp: Warp, opcode: list[str], operands: list[str], mask: np.ndarray, active: np.ndarray) -> None:
    assert active.all() and opcode[4:6] == ["row", "col"], opcode
    d, a, b, c = map(elements, operands)
    match opcode[3], [x for x in opcode[6:] if x != "satfinite"]:
        case "m16n8k16", ["f32", "f16", "f16", "f32"]:
            item, wide, kind = np.float16, np.float64, "f32"
        case "m16n8k16", ["f32", "bf16", "bf16", "f32"]:
            item, wide, kind = np.float32, np.float64, "f32"
        case "m16n8k32", ["s32", "s8", "s8", "s32"]:
            item, wide, kind = np.int8, np.int64, "s32"
        case "m16n8k32", ["s32", "u8", "u8", "s32"]:
            item, wide, kind = np.uint8, np.int64, "s32"
        case _:
            raise NotImplementedError(".".join(opcode))
    left, right = (np.stack([warp.get(x, "b32") for x in registers]) for registers in (a, b))
    if "bf16" in opcode:
        left, right = (
            np.stack([x << 16, x & 0xFFFF0000], -1).view(np.float32).reshape(len(x), -1) for x in (left, right)
        )
    left, right = (x.view(item).astype(wide) for x in (left, right))
    each = left.shape[1] // 32  # elements of a register
    left = (
        left.reshape(2, 2, 8, 4, each).transpose(1, 2, 0, 3, 4).reshape(16, 8 * each)
    )  # [k half, row half, group, thread, element]
    right = right.reshape(2, 8, 4, each).transpose(0, 2, 3, 1).reshape(8 * each, 8)
    more = (
        np.stack([warp.get(x, kind) for x in c]).reshape(2, 2, 8, 4).transpose(0, 2, 3, 1).reshape(16, 8).astype(wide)
    )
    out = left @ right + more
    assert kind == "f32" or (np.abs(out) < 2**31).all(), "an INT32 sum overflows"
    out = out.astype(np.float32 if kind == "f32" else np.int32).reshape(2, 8, 4, 2).transpose(0, 3, 1, 2).reshape(4, 32)
    for register, value in zip(d, out, strict=True):
        warp.put(register, value.copy(), mask)


def wgmma(warp: Warp, opcode: list[str], operands: list[str], mask: np.ndarray, active: np.ndarray) -> None:
    """Compute the 16 rows of the product that belong to this warp. The other warps of its warpgroup compute theirs when
    they execute the instruction. Groups of products are the warpgroup's (PTX ISA 8.7, `wgmma.commit_group`), so a wait
    for one ends for all four warps together."""
    assert active.all(), "wgmma with lanes missing"
    order = warp.cta.order
    match opcode[1]:
        case "commit_group":
            order.commit(warp.index)
        case "wait_group":
            pending = int(operands[0])
            meet(warp, ("wgmma", warp.index // 4), 4, lambda warps: [order.multiplied(x, pending) for x in warps])
    if opcode[1] != "mma_async":
        return
    integers = {"s8": np.int8, "u8": np.uint8}
    assert (
        (opcode[5] == "s32" and set(opcode[6:]) <= set(integers))
        or (opcode[5:] == ["f32", "e4m3", "e4m3"] and operands[4:] == ["1", "1"])
        or opcode[5:] == ["f32", "f16", "f16"]
    ), opcode
    columns = int(re.fullmatch(r"m64n(\d+)k(?:32|16)", opcode[4])[1])  # 32 bytes of each row
    if operands[1][0] == "{":
        registers = np.stack([warp.get(x, "b32") for x in elements(operands[1])]).view(np.uint8)
        left = (
            registers.reshape(2, 2, 8, 4, 4).transpose(1, 2, 0, 3, 4).reshape(16, 32)
        )  # [k half, row half, group, thread, byte]
    else:
        left = _matrix(warp, operands[1], 64)[16 * (warp.index % 4) :][:16]
    right = _matrix(warp, operands[2], columns)
    if opcode[5] == "s32":
        left, right = (
            x.view(integers[kind]).astype(np.float64) for x, kind in zip((left, right), opcode[6:], strict=True)
        )
        product = (left @ right.T).astype(np.int32)
    elif opcode[6] == "f16":
        left, right = (np.ascontiguousarray(x).view(np.float16).astype(np.float32) for x in (left, right))
        product = left @ right.T
    else:
        product = E4M3[left] @ E4M3[right].T
    product = product.reshape(2, 8, columns // 8, 4, 2).transpose(2, 0, 4, 1, 3).reshape(columns // 2, 32)
    scale = warp.get(operands[3], "pred") if operands[3][0] == "%" else np.full(32, operands[3] != "0")
    for register, more in zip(elements(operands[0]), product, strict=True):
        before = warp.get(register, opcode[5])
        warp.put(register, np.where(scale, before, before.dtype.type(0)) + more, mask)


def _matrix(warp: Warp, descriptor: str, rows: int) -> np.ndarray:
    """A matrix in shared memory as rows of 32 bytes, from its wgmma descriptor. The channels of K are contiguous."""
    (value,) = set(warp.get(descriptor, "u64").tolist())
    start, leading, stride = (((value >> bit) & 0x3FFF) << 4 for bit in (0, 16, 32))
    row, column = np.arange(rows)[:, None], np.arange(32)
    if width := (0, 128, 64, 32)[value >> 62]:  # the bytes of a row that are swizzled
        at = start + row // 8 * stride + row % 8 * width + column
        at ^= ((at >> 7) & (width // 16 - 1)) << 4
    else:
        at = start + row // 8 * stride + row % 8 * 16 + column // 16 * leading + column % 16
    assert at.max() < warp.launch.size, "outside shared memory"
    warp.cta.order.multiply(warp.index, at[:, ::4].ravel() >> 2)
    return warp.cta.shared[at]


INSTRUCTIONS = {"mma": mma, "wgmma": wgmma}
