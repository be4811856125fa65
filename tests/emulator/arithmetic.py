"""Instructions that compute registers of a lane from others of the same lane."""

from __future__ import annotations

import numpy as np
import torch

from .program import elements
from .warp import DTYPES, Warp

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
E4M3_TO_F16 = E4M3.astype(np.float16).view(np.uint16)
COMPARISONS = {
    "leu": lambda a, b: ~(a > b), "ltu": lambda a, b: ~(a >= b), "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b), "neu": np.not_equal, "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b), "equ": lambda a, b: ~((a < b) | (a > b)),
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def arithmetic(warp: Warp, opcode: list[str], operands: list[str], mask: np.ndarray, active: np.ndarray) -> None:
    """Executes every instruction that has no function of its own."""
    kind = opcode[-1]
    if opcode == ["add", "s16x2"]:
        a, b = (warp.get(operand, "b32") for operand in operands[1:])
        warp.put(operands[0], (a + b & 0xFFFF) | ((a >> 16) + (b >> 16) << 16), mask)
        return
    if kind not in DTYPES:
        raise NotImplementedError(".".join(opcode))
    x = [warp.get(operand, kind) for operand in operands[1:]]
    out = (
        _float(opcode, x)
        if kind in ("f32", "f16", "bf16", "f16x2", "bf16x2")
        else _integer(warp, opcode, operands, x, mask)
    )
    warp.put(operands[0], out, mask)


def _integer(warp: Warp, opcode: list[str], operands: list[str], x: list[np.ndarray], mask: np.ndarray) -> np.ndarray:
    name, kind = opcode[0], opcode[-1]
    match name:
        case "cvta":
            return x[0]
        case "add":
            return x[0] + x[1]
        case "sub":
            return x[0] - x[1]
        case "mul" | "mad" if opcode[1] == "wide":
            wide = f"{kind[0]}{2 * int(kind[1:])}"
            product = x[0].astype(DTYPES[wide]) * x[1].astype(DTYPES[wide])
            return product + warp.get(operands[3], wide) if name == "mad" else product
        case "mul" if opcode[1] == "hi":
            return (x[0].astype(np.int64) * x[1].astype(np.int64) >> 32).astype(x[0].dtype)
        case "mul":
            return x[0] * x[1]
        case "mad" if opcode[1] == "hi":
            return (x[0].astype(np.int64) * x[1].astype(np.int64) >> 32).astype(x[0].dtype) + x[2]
        case "mad":
            return x[0] * x[1] + x[2]
        case "div" | "rem":
            assert (x[1][mask] != 0).all(), "division by zero"
            a, b = x[0].astype(np.int64), np.where(x[1] == 0, 1, x[1]).astype(np.int64)
            quotient = np.abs(a) // np.abs(b) * np.sign(a) * np.sign(b)
            return (quotient if name == "div" else a - quotient * b).astype(x[0].dtype)
        case "and" | "or" | "xor":
            return getattr(np, f"{'logical' if kind == 'pred' else 'bitwise'}_{name}")(x[0], x[1])
        case "not":
            return np.logical_not(x[0]) if kind == "pred" else ~x[0]
        case "neg":
            return -x[0]
        case "abs":
            return np.abs(x[0])
        case "shl" | "shr":
            by = warp.get(operands[2], "u32").astype(np.int64)
            bits = 8 * x[0].itemsize
            shifted = (np.left_shift if name == "shl" else np.right_shift)(
                x[0], np.minimum(by, bits - 1).astype(x[0].dtype)
            )
            return (
                shifted if (by < bits).all() or (name == "shr" and kind[0] == "s") else np.where(by < bits, shifted, 0)
            )
        case "min" if "relu" in opcode:
            return np.maximum(np.minimum(x[0], x[1]), 0)
        case "min" | "max":
            return (np.minimum if name == "min" else np.maximum)(x[0], x[1])
        case "bfe":
            start, width = int(operands[2]), int(operands[3])
            field = (x[0].astype(np.int64) & 0xFFFFFFFF) >> start & ((1 << width) - 1)
            return np.where(field >> (width - 1) & (kind[0] == "s"), field - (1 << width), field).astype(x[0].dtype)
        case "prmt":
            pool = np.stack([np.ascontiguousarray(v).view(np.uint8).reshape(32, 4) for v in x[:2]], 1).reshape(32, 8)
            places = x[2][:, None] >> np.array([0, 4, 8, 12], np.uint32)
            picked = np.take_along_axis(pool, (places & 7).astype(np.int64), 1)
            picked = np.where(places & 8, np.where(picked & 0x80, 0xFF, 0), picked).astype(np.uint8)  # its sign alone
            return picked.view(np.uint32)[:, 0]
        case "dp4a":
            a, b = (np.ascontiguousarray(v).view(np.uint8).reshape(32, 4).astype(np.uint32) for v in x[:2])
            return ((a * b).sum(1, dtype=np.uint32) + x[2]).astype(np.uint32)
        case "popc":
            return np.array([int(v).bit_count() for v in x[0]], np.uint32)
    raise NotImplementedError(".".join(opcode))


def _float(opcode: list[str], x: list[np.ndarray]) -> np.ndarray:
    name, kind = opcode[0], opcode[-1]
    match name:
        case "abs" if kind in ("f16", "bf16"):
            return x[0] & 0x7FFF
        case "max" if kind in ("f16", "bf16"):
            return rounded(np.fmax(*(widened(v, kind) for v in x)), kind)
        case "mul" if kind in ("f16", "f16x2"):
            a, b = (widened(np.ascontiguousarray(v).view(np.uint16), "f16") for v in x)
            return rounded(a * b, "f16").view(x[0].dtype)
        case "max" if kind in ("f16x2", "bf16x2") and opcode[1:3] == ["xorsign", "abs"]:
            a, b = (np.ascontiguousarray(v).view(np.uint16) for v in x)
            out = rounded(np.fmax(*(widened(v & 0x7FFF, kind[:-2]) for v in (a, b))), kind[:-2])
            return (out | (a ^ b) & 0x8000).view(np.uint32)
        case "add" | "sub" if kind == "f16x2":
            a, b = (np.ascontiguousarray(v).view(np.float16) for v in x)
            return (a + b if name == "add" else a - b).view(np.uint32)
        case "fma" if kind == "f16x2":
            a, b, c = (np.ascontiguousarray(v).view(np.float16).astype(np.float64) for v in x)
            return (a * b + c).astype(np.float16).view(np.uint32)
    if kind != "f32":
        raise NotImplementedError(".".join(opcode))
    match name:
        case "add":
            return x[0] + x[1]
        case "sub":
            return x[0] - x[1]
        case "mul":
            return x[0] * x[1]
        case "fma":
            return (x[0].astype(np.float64) * x[1] + x[2]).astype(np.float32)
        case "div":
            return x[0] / x[1]
        case "rcp":
            return np.float32(1) / x[0]
        case "neg":
            return -x[0]
        case "abs":
            return np.abs(x[0])
        case "min" | "max" if "NaN" in opcode:
            return (np.minimum if name == "min" else np.maximum)(x[0], x[1])
        case "min" | "max":
            return (np.fmin if name == "min" else np.fmax)(x[0], x[1])
        case "copysign":
            return np.copysign(x[1], x[0])
        case "ex2":
            return np.exp2(x[0].astype(np.float64)).astype(np.float32)
        case "lg2":
            return np.log2(x[0])
    raise NotImplementedError(".".join(opcode))


def setp(warp: Warp, opcode: list[str], operands: list[str], mask: np.ndarray, active: np.ndarray) -> None:
    out = COMPARISONS[opcode[1]](*(warp.get(operand, opcode[-1]) for operand in operands[1:3]))
    if len(opcode) == 4:  # setp.lt.and.s32
        out = getattr(np, "logical_" + opcode[2])(out, warp.get(operands[3], "pred"))
    warp.put(operands[0], out, mask)


def selp(warp: Warp, opcode: list[str], operands: list[str], mask: np.ndarray, active: np.ndarray) -> None:
    a, b = (warp.get(operand, opcode[-1]) for operand in operands[1:3])
    warp.put(operands[0], np.where(warp.registers[operands[3]], a, b), mask)


def mov(warp: Warp, opcode: list[str], operands: list[str], mask: np.ndarray, active: np.ndarray) -> None:
    """`mov`, also from a register to two halves in braces, and from two halves to a register."""
    target, source = operands
    kind = opcode[1]
    if target[0] != "{" and source[0] != "{":
        return warp.put(target, warp.get(source, kind), mask)
    half = {"b32": 16, "b64": 32}[kind]
    if target[0] == "{":
        low, high = elements(target)
        value = warp.get(source, kind)
        warp.put(low, (value & ((1 << half) - 1)).astype(f"u{half // 8}"), mask)
        warp.put(high, (value >> half).astype(f"u{half // 8}"), mask)
    else:
        low, high = (warp.get(x, f"b{half}").astype(f"u{half // 4}") for x in elements(source))
        warp.put(target, low | high << half, mask)


def cvt(warp: Warp, opcode: list[str], operands: list[str], mask: np.ndarray, active: np.ndarray) -> None:
    to, source = opcode[-2:]
    if to == "f16x2" and source == "e4m3x2":
        codes = warp.get(operands[1], "b16")
        out = E4M3_TO_F16[codes & 0xFF].astype(np.uint32) | E4M3_TO_F16[codes >> 8].astype(np.uint32) << 16
    elif to == "e4m3x2":
        if source == "f16x2":
            pair = warp.get(operands[1], "b32")
            values = [widened((half & 0xFFFF).astype(np.uint16), "f16") for half in (pair >> 16, pair)]
        else:
            values = [warp.get(o, "f32") for o in operands[1:]]
        high, low = (rounded(x, to).astype(np.uint16) for x in values)
        out = low | high << 8
    elif to in ("f16x2", "bf16x2"):
        high, low = (rounded(warp.get(o, "f32"), to[:-2]).astype(np.uint32) for o in operands[1:])
        out = low | high << 16
    elif to in ("f16", "bf16"):
        out = rounded(warp.get(operands[1], "f32"), to)
    elif source in ("f16", "bf16"):
        out = widened(warp.get(operands[1], "b16"), source)
    elif "s8" in (to, source):  # in a register of 16 bits
        out = (
            warp.get(operands[1], "b16" if source == "s8" else source)
            .astype(np.int8)
            .astype(DTYPES["s16" if to == "s8" else to])
        )
    elif "rpi" in opcode:
        out = np.ceil(warp.get(operands[1], source)).astype(DTYPES[to])
    else:
        out = warp.get(operands[1], source).astype(DTYPES[to])
    warp.put(operands[0], out, mask)


def rounded(x: np.ndarray, to: str) -> np.ndarray:
    """Round FP32 to the bits of FP16, BF16 or E4M3 (without infinities), to nearest even."""
    if to == "f16":
        return x.astype(np.float16).view(np.uint16)
    x = torch.from_numpy(np.ascontiguousarray(x))
    if to == "e4m3x2":
        return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return x.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def widened(x: np.ndarray, kind: str) -> np.ndarray:
    """Convert the bits of FP16 or BF16 to FP32."""
    return x.view(np.float16).astype(np.float32) if kind == "f16" else (x.astype(np.uint32) << 16).view(np.float32)


INSTRUCTIONS = {"setp": setp, "selp": selp, "mov": mov, "cvt": cvt}
