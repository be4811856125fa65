"""Runs a Hopper kernel's PTX on a CPU: enough of the ISA to execute `kernels/decode.py` and `kernels/prefill.py` whole, warps, barriers,
TMA, wgmma and all.

No interpreter knows Gluon, and CI has no GPU; this is what stands between an edit and a GPU that hangs. Lanes are numpy vectors; warps are
scheduled at random, TMA copies land at random times, shared memory starts as NaN, and an access outside a tensor is an error. It models
neither timing nor the memory model: a missing fence goes unseen, and so does a missing wait for wgmma, which is done when it is begun.

Semantics follow the PTX ISA 8.7; fragment layouts are those of its figures for mma.m16n8k16, ldmatrix, stmatrix, movmatrix and
wgmma.m64nNk32, and of matrices in shared memory those of its wgmma descriptors.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import numpy as np
import torch

LANES = np.arange(32)
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
E4M3_TO_F16 = E4M3.astype(np.float16).view(np.uint16)
DESCRIPTORS = 0xDE5C0000  # tensor maps live in kernel parameters; their "addresses" start here
NUMPY = {"u16": np.uint16, "u32": np.uint32, "u64": np.uint64, "s16": np.int16, "s32": np.int32, "s64": np.int64, "b16": np.uint16,
         "b32": np.uint32, "b64": np.uint64, "f32": np.float32, "pred": np.bool_, "b8": np.uint8, "u8": np.uint8,
         **dict.fromkeys(("f16", "bf16"), np.uint16), **dict.fromkeys(("f16x2", "bf16x2"), np.uint32)}  # fmt: skip


class Memory:
    """Global memory: tensors at made-up addresses, with guards between them."""

    def __init__(self, size: int = 1 << 26) -> None:
        self.bytes = np.zeros(size, np.uint8)
        self.owner = np.zeros(size >> 2, np.uint8)
        self.top = 1 << 12
        self.tensors: list[tuple[torch.Tensor, int]] = []

    def add(self, tensor: torch.Tensor) -> int:
        raw = tensor.contiguous().view(torch.uint8).numpy().reshape(-1)
        address = self.top
        assert address + raw.size + 4096 < self.bytes.size, "emulated memory is full"
        self.bytes[address : address + raw.size] = raw
        self.owner[address >> 2 : (address + raw.size + 3) >> 2] = 1
        self.top = (address + raw.size + 4095) // 1024 * 1024
        self.tensors.append((tensor, address))
        return address

    def sync(self) -> None:
        """Write what the kernel left back into the tensors."""
        for tensor, address in self.tensors:
            raw = torch.from_numpy(self.bytes[address : address + tensor.nbytes].copy())
            tensor.view(torch.uint8).copy_(raw.view(tensor.view(torch.uint8).shape))

    def check(self, address: np.ndarray) -> None:
        assert self.owner[address >> 2].all(), f"access outside every tensor: {address}"


class TensorMap:
    """A tensor map: a tensor of elements of `size` bytes at an address of `memory`, strides counted in them; a box, a swizzle."""

    def __init__(self, memory: Memory, address: int, size: int, shape: list[int], strides: list[int], box: list[int], swizzle: int) -> None:
        self.memory, self.address = memory, address
        self.shape, self.strides, self.box = (*shape, size), (*(n * size for n in strides), 1), (*box, size)
        self.swizzle = swizzle
        self.nbytes = int(np.prod(self.box))

    def load(self, shared: np.ndarray, target: int, corner: list[int]) -> None:
        at, source, inside = self._places(target, corner)
        shared[at] = np.where(inside, self.memory.bytes[source], 0)

    def store(self, shared: np.ndarray, source: int, corner: list[int]) -> None:
        at, target, inside = self._places(source, corner)
        self.memory.bytes[target[inside]] = shared[at[inside]]

    def _places(self, start: int, corner: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each byte of the box at `corner`: where it lies in shared memory and in global memory, and whether the tensor has it."""
        inside, place = np.bool_(True), np.int64(self.address)
        for size, stride, length, first in zip(self.shape, self.strides, self.box, (*corner, 0), strict=True):
            i = np.arange(length) + first
            inside = inside[..., None] & (i >= 0) & (i < size)
            place = place[..., None] + i.clip(0, size - 1) * stride
        self.memory.check(place)
        at = start + np.arange(self.nbytes).reshape(self.box)
        return at ^ ((at >> 7) & (self.swizzle // 16 - 1)) << 4, place, inside


class Barrier:
    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.phase = self.bytes = 0

    def update(self, arrivals: int = 0, expected: int = 0) -> None:
        self.pending -= arrivals
        self.bytes += expected
        assert self.pending >= 0, "more arrivals than the barrier counts"
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count


class Blocked(Exception):
    """The warp cannot go on: it waits for a barrier."""


def _operands(text: str) -> list[str]:
    out, depth = [""], 0
    for c in text:
        depth += (c in "{[") - (c in "}]")
        if c == "," and not depth:
            out.append("")
        else:
            out[-1] += c
    return [x.strip() for x in out if x.strip()]


class Program:
    """Parsed PTX: a list of (predicate, negated, opcode parts, operands), labels resolved."""

    def __init__(self, text: str) -> None:
        self.code: list[tuple] = []
        self.labels: dict[str, int] = {}
        self.tables: dict[str, list[str]] = {}
        self.registers: dict[str, str] = {}
        self.threads = int(re.search(r"\.reqntid (\d+)", text).group(1))
        header, body = text.split("\n{\n", 1)
        self.params = re.findall(r"\.param \.(?:align \d+ \.)?(\w+).*?(\w+_param_\d+)", header)
        body = re.sub(r"//.*", "", body.split("// -- End function")[0])
        body = re.sub(r"\.(loc|section|file|pragma)\b.*", "", body)
        for name, targets in re.findall(r"([$\w]+):\s*\.branchtargets([^;]*);", body):
            self.tables[name] = [x.strip() for x in targets.split(",")]
        body = re.sub(r"[$\w]+:\s*\.branchtargets[^;]*;", "", body)
        scopes, scope, local = 0, 0, {}  # names declared between braces are renamed
        for brace, label, statement in re.findall(r"\s*(?:([{}])|([$\w]+):(?!:)|([^;]*);)", body):
            if brace:
                scopes += brace == "{"
                scope, local = scopes if brace == "{" else 0, {}
            elif label:
                self.labels[label if label[0] == "$" else f"{label}.{scope}"] = len(self.code)
            else:
                self._instruction(statement.strip(), scope, local)

    def _instruction(self, text: str, scope: int, local: dict[str, str]) -> None:
        if text.startswith(".reg"):
            kind, names = re.match(r"\.reg \.(\w+)\s+(.*)", text, re.S).groups()
            for name in names.split(","):
                name = name.strip()
                if "<" in name:
                    stem, count = re.match(r"(%\w+)<(\d+)>", name).groups()
                    self.registers.update({f"{stem}{i}": kind for i in range(int(count))})
                elif scope:
                    local[name] = f"{name}.{scope}"
                    self.registers[local[name]] = kind
            return
        for name, unique in local.items():
            text = re.sub(rf"(?<![\w%$.]){re.escape(name)}(?![\w.])", unique, text)
        match = re.match(r"(?:@(!?)(\S+)\s+)?(\S+)\s*(.*)", text, re.S)
        negated, predicate, opcode, rest = match.groups()
        operands = _operands(rest)
        if opcode.startswith("bra") and operands[0][0] != "$":
            operands[0] = f"{operands[0]}.{scope}"
        self.code.append((predicate, bool(negated), opcode.split("."), operands))


class Cta:
    def __init__(self, program: Program, index: int, grid: int, shared: int) -> None:
        self.shared = np.full(shared + 1024, 0xFF, np.uint8)
        self.barriers: dict[int, Barrier] = {}
        self.waiting: dict[tuple, list[Warp]] = {}
        self.copies: list[Callable[[], None]] = []  # of TMA, and arrivals with those of cp.async
        self.index, self.grid = index, grid
        self.warps = [Warp(program, self, w) for w in range(program.threads // 32)]


class Warp:
    """32 lanes; `pc` is an int while they agree and an array when they do not (the lowest goes first)."""

    def __init__(self, program: Program, cta: Cta, index: int) -> None:
        self.program, self.cta, self.index = program, cta, index
        self.pc: int | np.ndarray = 0
        self.done = np.zeros(32, bool)
        self.r = {name: np.zeros(32, NUMPY[kind]) for name, kind in program.registers.items()}
        self.r["%tid.x"] = (index * 32 + LANES).astype(np.uint32)
        self.r["%ctaid.x"] = np.full(32, cta.index, np.uint32)
        self.r["%nctaid.x"] = np.full(32, cta.grid, np.uint32)
        self.parked: tuple | None = None
        self.copies: list[Callable[[], None]] = []  # of cp.async, that have not landed
        self.sends: list[list[Callable[[], None]]] = [[]]  # copies to global memory that have not left: groups, the last of them open


class Machine:
    def __init__(self, ptx: str, shared: int, memory: Memory, arguments: list, grid: int, seed: int = 0) -> None:
        """`arguments`: ints and floats as the PTX declares them, `TensorMap` for a tensor map."""
        self.program, self.memory, self.shared, self.grid = Program(ptx), memory, shared, grid
        self.random = random.Random(seed)
        self.params, self.maps = {}, []
        assert len(arguments) == len(self.program.params), (len(arguments), self.program.params)
        for (kind, name), value in zip(self.program.params, arguments, strict=True):
            if isinstance(value, TensorMap):
                self.maps.append(value)
                value = DESCRIPTORS + len(self.maps) - 1
            elif kind == "f32":
                value = int(np.float32(value).view(np.uint32))
            self.params[name] = value
        self.executed = 0

    def run(self, resident: int = 4, quantum: int = 400, late: tuple[int, ...] = ()) -> None:
        """All CTAs, `resident` of them at a time. Of each, the warps `late` go on, by one instruction, only when no other can."""
        waiting = list(range(self.grid))
        ctas: list[Cta] = []
        while waiting or ctas:
            while waiting and len(ctas) < resident:
                ctas.append(Cta(self.program, waiting.pop(0), self.grid, self.shared))
            moved = False
            for cta in self.random.sample(ctas, len(ctas)):
                self.random.shuffle(cta.copies)
                others = bool(cta.copies)
                while cta.copies and self.random.random() < 0.5:
                    cta.copies.pop()()
                    moved = True
                for warp in self.random.sample(cta.warps, len(cta.warps)):
                    if warp.index not in late:
                        others |= self._advance(warp, self.random.randrange(1, quantum))
                for index in () if others else late:
                    moved |= self._advance(cta.warps[index], 1)
                moved |= others
            if not moved and not any(cta.copies for cta in ctas):
                raise RuntimeError("deadlock: " + "; ".join(self._where(w) for cta in ctas for w in cta.warps if not w.done.all()))
            ctas = [cta for cta in ctas if not all(w.done.all() for w in cta.warps)]
        self.memory.sync()

    def _where(self, warp: Warp) -> str:
        pc = warp.pc if isinstance(warp.pc, int) else int(warp.pc.min())
        return f"CTA {warp.cta.index} warp {warp.index} at {pc}: {self.program.code[min(pc, len(self.program.code) - 1)][2:]}"

    def _advance(self, warp: Warp, steps: int) -> bool:
        moved = False
        for _ in range(steps):
            if warp.parked or warp.done.all():
                break
            try:
                self._step(warp)
            except Blocked:
                break
            except Exception as error:
                error.add_note(self._where(warp))
                raise
            moved = True
        return moved

    def _step(self, warp: Warp) -> None:
        split = not isinstance(warp.pc, int)
        pc = int(warp.pc[~warp.done].min()) if split else warp.pc
        active = (warp.pc == pc) & ~warp.done if split else ~warp.done
        predicate, negated, opcode, operands = self.program.code[pc]
        mask = active
        if predicate is not None:
            p = warp.r[predicate]
            mask = active & (~p if negated else p)
        self.executed += 1
        target = None
        if opcode[0] == "bra":
            target = np.full(32, self.program.labels[operands[0]])
        elif opcode[0] == "brx":
            table = np.array([self.program.labels[x] for x in self.program.tables[operands[1]]])
            target = table[np.where(mask, warp.r[operands[0]], 0)]
        elif opcode[0] == "ret":
            warp.done |= mask
        elif mask.any() or "sync" in opcode:
            getattr(self, "op_" + opcode[0], self.arithmetic)(warp, opcode, operands, mask, active)
        if split or target is not None:
            following = np.where(active, pc + 1, warp.pc if split else pc + 1)
            if target is not None:
                following = np.where(mask, target, following)
            alive = following[~warp.done]
            warp.pc = int(alive[0]) if alive.size and (alive == alive[0]).all() else following
        else:
            warp.pc = pc + 1

    # Operands

    def get(self, warp: Warp, name: str, kind: str) -> np.ndarray:
        dtype = NUMPY[kind]
        if name in warp.r:
            value = warp.r[name]
            if value.dtype == dtype:
                return value
            size = np.dtype(dtype).itemsize
            if value.itemsize == size:
                return value.view(dtype)
            return value.astype(f"u{size}").view(dtype)  # narrowing reads the low bits
        if name in self.params:
            return np.full(32, self.params[name], np.uint64).astype(dtype)
        if name == "global_smem":
            return np.zeros(32, dtype)
        if name.startswith(("0f", "0F")):
            return np.full(32, int(name[2:], 16), np.uint32).view(np.float32)
        value = int(name.rstrip("U"), 0)
        if kind == "pred":
            return np.full(32, value != 0)
        size = np.dtype(dtype).itemsize
        return np.full(32, value & ((1 << 8 * size) - 1), f"u{size}").view(dtype)

    def put(self, warp: Warp, name: str, value: np.ndarray, mask: np.ndarray) -> None:
        if name == "_":
            return
        old = warp.r[name]
        value = np.asarray(value)
        if value.dtype != old.dtype:
            value = value.view(old.dtype) if value.itemsize == old.itemsize else value.astype(old.dtype)
        warp.r[name] = value if mask.all() else np.where(mask, value, old)

    def address(self, warp: Warp, text: str) -> np.ndarray:
        base, sign, offset = re.match(r"\[\s*([%$\w.]+)\s*(?:([+-])\s*(\d+))?\s*\]", text).groups()
        start = self.get(warp, base, "u64" if base.startswith("%rd") or base in self.params else "u32").astype(np.int64)
        return start + (int(sign + offset) if sign else 0)

    # Plain arithmetic

    def arithmetic(self, warp, opcode, operands, mask, active) -> None:
        kind = opcode[-1]
        name = opcode[0]
        if kind not in NUMPY and name != "cvt":
            raise NotImplementedError(".".join(opcode))
        x = [self.get(warp, o, kind) for o in operands[1:]] if name not in ("mov", "cvt", "selp", "setp") else []
        with np.errstate(all="ignore"):
            match name:
                case "mov":
                    return self._mov(warp, opcode, operands, mask)
                case "cvt":
                    return self._cvt(warp, opcode, operands, mask)
                case "setp":
                    a, b = (self.get(warp, o, kind) for o in operands[1:3])
                    table = {
                        "eq": np.equal,
                        "ne": np.not_equal,
                        "lt": np.less,
                        "le": np.less_equal,
                        "gt": np.greater,
                        "ge": np.greater_equal,
                    }
                    out = table[opcode[1]](a, b)
                    if len(opcode) == 4:  # setp.lt.and.s32
                        out = getattr(np, "logical_" + opcode[2])(out, self.get(warp, operands[3], "pred"))
                case "selp":
                    a, b = (self.get(warp, o, kind) for o in operands[1:3])
                    out = np.where(warp.r[operands[3]], a, b)
                case "cvta":
                    out = x[0]
                case "add":
                    out = x[0] + x[1]
                case "sub":
                    out = x[0] - x[1]
                case "mul" if opcode[1] == "wide":
                    wide = np.int64 if kind[0] == "s" else np.uint64
                    wide = {"16": np.uint32}.get(kind[1:], wide)
                    out = x[0].astype(wide) * x[1].astype(wide)
                case "mul" if opcode[1] == "hi":
                    out = (x[0].astype(np.int64) * x[1].astype(np.int64) >> 32).astype(x[0].dtype)
                case "mul":
                    out = x[0] * x[1]
                case "mad" if opcode[1] == "wide":
                    wide = np.int64 if kind[0] == "s" else np.uint64
                    out = x[0].astype(wide) * x[1].astype(wide) + self.get(warp, operands[3], kind[0] + "64")
                case "mad":
                    out = x[0] * x[1] + x[2]
                case "fma":
                    out = (x[0].astype(np.float64) * x[1] + x[2]).astype(np.float32)
                case "div" if kind == "f32":
                    out = x[0] / x[1]
                case "div" | "rem":
                    assert (x[1][mask] != 0).all(), "division by zero"
                    b = np.where(x[1] == 0, 1, x[1]).astype(np.int64)
                    a = x[0].astype(np.int64)
                    q = np.abs(a) // np.abs(b) * np.sign(a) * np.sign(b)
                    out = (q if name == "div" else a - q * b).astype(x[0].dtype)
                case "and" | "or" | "xor":
                    out = getattr(np, f"{'logical' if kind == 'pred' else 'bitwise'}_{name}")(x[0], x[1])
                case "not":
                    out = np.logical_not(x[0]) if kind == "pred" else ~x[0]
                case "neg":
                    out = -x[0]
                case "abs" if kind in ("f16", "bf16"):
                    out = x[0] & 0x7FFF
                case "abs":
                    out = np.abs(x[0])
                case "shl" | "shr":
                    by = self.get(warp, operands[2], "u32").astype(np.int64)
                    bits = 8 * x[0].itemsize
                    shifted = np.left_shift(x[0], np.minimum(by, bits - 1).astype(x[0].dtype)) if name == "shl" else None
                    if name == "shr":
                        shifted = np.right_shift(x[0], np.minimum(by, bits - 1).astype(x[0].dtype))
                    out = shifted if (by < bits).all() or (name == "shr" and kind[0] == "s") else np.where(by < bits, shifted, 0)
                case "max" if kind in ("f16", "bf16"):
                    out = _round(np.fmax(*(_widen(v, kind) for v in x)), kind)
                case "max" if kind in ("f16x2", "bf16x2"):
                    assert opcode[1:3] == ["xorsign", "abs"], opcode
                    a, b = (np.ascontiguousarray(v).view(np.uint16) for v in x)
                    out = _round(np.fmax(*(_widen(v & 0x7FFF, kind[:-2]) for v in (a, b))), kind[:-2])
                    out = (out | (a ^ b) & 0x8000).view(np.uint32)
                case "max" if "NaN" in opcode:
                    out = np.maximum(x[0], x[1])
                case "min" if "relu" in opcode:
                    out = np.maximum(np.minimum(x[0], x[1]), 0)
                case "min" | "max" if kind == "f32":
                    out = (np.fmin if name == "min" else np.fmax)(x[0], x[1])
                case "min" | "max":
                    out = (np.minimum if name == "min" else np.maximum)(x[0], x[1])
                case "bfe":
                    value, start, width = x[0], int(operands[2]), int(operands[3])
                    field = (value.astype(np.int64) & 0xFFFFFFFF) >> start & ((1 << width) - 1)
                    out = np.where(field >> (width - 1) & (kind[0] == "s"), field - (1 << width), field).astype(x[0].dtype)
                case "prmt":
                    pool = np.stack([np.ascontiguousarray(v).view(np.uint8).reshape(32, 4) for v in x[:2]], 1).reshape(32, 8)
                    places = x[2][:, None] >> np.array([0, 4, 8, 12], np.uint32)
                    picked = np.take_along_axis(pool, (places & 7).astype(np.int64), 1)
                    picked = np.where(places & 8, np.where(picked & 0x80, 0xFF, 0), picked).astype(np.uint8)  # its sign alone
                    out = picked.view(np.uint32)[:, 0]
                case "copysign":
                    out = np.copysign(x[1], x[0])
                case "popc":
                    out = np.array([int(v).bit_count() for v in x[0]], np.uint32)
                case "ex2":
                    out = np.exp2(x[0].astype(np.float64)).astype(np.float32)
                case "lg2":
                    out = np.log2(x[0])
                case "rcp":
                    out = np.float32(1) / x[0]
                case _:
                    raise NotImplementedError(".".join(opcode))
        self.put(warp, operands[0], out, mask)

    def _mov(self, warp, opcode, operands, mask) -> None:
        target, source = operands
        if target[0] == "{":
            low, high = _operands(target[1:-1])
            half = {"b32": 16, "b64": 32}[opcode[1]]
            value = self.get(warp, source, opcode[1])
            self.put(warp, low, (value & ((1 << half) - 1)).astype(f"u{half // 8}"), mask)
            self.put(warp, high, (value >> half).astype(f"u{half // 8}"), mask)
        elif source[0] == "{":
            half = {"b32": 16, "b64": 32}[opcode[1]]
            low, high = (self.get(warp, x, f"b{half}").astype(f"u{half // 4}") for x in _operands(source[1:-1]))
            self.put(warp, target, low | high << half, mask)
        else:
            self.put(warp, target, self.get(warp, source, opcode[1]), mask)

    def _cvt(self, warp, opcode, operands, mask) -> None:
        to, frm = opcode[-2:]
        if to == "f16x2" and frm == "e4m3x2":
            codes = self.get(warp, operands[1], "b16")
            out = E4M3_TO_F16[codes & 0xFF].astype(np.uint32) | E4M3_TO_F16[codes >> 8].astype(np.uint32) << 16
        elif to == "e4m3x2":
            high, low = (_round(self.get(warp, o, "f32"), to).astype(np.uint16) for o in operands[1:])
            out = low | high << 8
        elif to in ("f16x2", "bf16x2"):
            high, low = (_round(self.get(warp, o, "f32"), to[:-2]).astype(np.uint32) for o in operands[1:])
            out = low | high << 16
        elif to in ("f16", "bf16"):
            out = _round(self.get(warp, operands[1], "f32"), to)
        elif frm in ("f16", "bf16"):
            out = _widen(self.get(warp, operands[1], "b16"), frm)
        else:
            out = self.get(warp, operands[1], frm).astype(NUMPY[to])
        self.put(warp, operands[0], out, mask)

    # Memory

    def op_ld(self, warp, opcode, operands, mask, active) -> None:
        if opcode[1] == "param":
            name = operands[1][1:-1]
            return self.put(warp, operands[0], np.full(32, self.params[name], np.uint64), mask)
        dtype = np.dtype(NUMPY[opcode[-1]])
        targets = _operands(operands[0][1:-1]) if operands[0][0] == "{" else [operands[0]]
        address = self.address(warp, operands[1])
        space = self._space(warp, opcode, address, mask)
        assert (address[mask] % (dtype.itemsize * len(targets)) == 0).all(), "misaligned"
        view = space[: space.size // dtype.itemsize * dtype.itemsize].view(dtype)
        for i, target in enumerate(targets):
            at = np.where(mask, address // dtype.itemsize + i, 0)
            self.put(warp, target, view[at], mask)

    def op_st(self, warp, opcode, operands, mask, active) -> None:
        dtype = np.dtype(NUMPY[opcode[-1]])
        sources = _operands(operands[1][1:-1]) if operands[1][0] == "{" else [operands[1]]
        address = self.address(warp, operands[0])
        space = self._space(warp, opcode, address, mask)
        assert (address[mask] % (dtype.itemsize * len(sources)) == 0).all(), "misaligned"
        if "global" not in opcode:
            self._spare_barriers(warp, address[mask], dtype.itemsize * len(sources))
        view = space.view(dtype)
        for i, source in enumerate(sources):
            view[address[mask] // dtype.itemsize + i] = self.get(warp, source, opcode[-1]).view(dtype)[mask]

    def _spare_barriers(self, warp, address, size) -> None:
        """Nothing may be stored over a barrier, in use or not: whether that comes before its initialisation is a race."""
        for barrier in warp.cta.barriers:
            assert ((address >= barrier + 8) | (address + size <= barrier)).all(), f"a store over the barrier at {barrier}"

    def _space(self, warp, opcode, address, mask) -> np.ndarray:
        if "global" in opcode:
            self.memory.check(address[mask])
            return self.memory.bytes
        assert ((address[mask] >= 0) & (address[mask] < self.shared)).all(), f"outside shared memory: {address[mask]}"
        return warp.cta.shared

    def op_atom(self, warp, opcode, operands, mask, active) -> None:
        assert opcode[-2] == "add"
        address = self.address(warp, operands[1])
        self.memory.check(address[mask])
        view, old = self.memory.bytes.view(np.uint32), np.zeros(32, np.uint32)
        for lane in LANES[mask]:
            old[lane] = view[address[lane] // 4]
            view[address[lane] // 4] += self.get(warp, operands[2], "u32")[lane]
        self.put(warp, operands[0], old, mask)

    def op_cp(self, warp, opcode, operands, mask, active) -> None:
        match opcode[2:4]:
            case ["mbarrier", _]:
                self._arrive_with_copies(warp, operands, mask)
            case ["ca" | "cg", _]:
                self._copy(warp, operands, mask)
            case ["bulk", "tensor"]:
                (lane,) = LANES[mask]
                self._copy_tile(warp, operands, lane)
            case ["bulk", "commit_group"]:
                warp.sends.append([])
            case ["bulk", "wait_group"]:
                if due := [copy for group in warp.sends[: -1 - int(operands[0])] for copy in group]:
                    warp.cta.copies += [copy for copy in due if copy not in warp.cta.copies]
                    raise Blocked
            case _:
                raise NotImplementedError(opcode)

    def _copy_tile(self, warp, operands, lane) -> None:
        """TMA, to shared memory if a barrier is named that counts its bytes, or else from there."""
        load = len(operands) == 3
        memory, tile = operands[:2] if load else operands[1::-1]
        source, coordinates = _operands(tile[1:-1])
        tensor = self.maps[int(self.get(warp, source, "u64")[lane]) - DESCRIPTORS]
        corner = [int(self.get(warp, x, "s32")[lane]) for x in reversed(_operands(coordinates[1:-1]))]
        at, cta = int(self.address(warp, memory)[lane]), warp.cta
        if load:
            barrier = int(self.address(warp, operands[2])[lane])
        else:
            group = warp.sends[-1]

        def land() -> None:
            tensor.load(cta.shared, at, corner)
            cta.barriers[barrier].update(expected=-tensor.nbytes)

        def leave() -> None:
            tensor.store(cta.shared, at, corner)
            group.remove(leave)

        if not load:
            group.append(leave)
        if load or self.random.random() < 0.5:  # or else not before it is waited for
            cta.copies.append(land if load else leave)

    def _copy(self, warp, operands, mask) -> None:
        """`cp.async`: lands when an arrival that follows it does, at the latest. What it is not given of its bytes is zero."""
        target, source = (self.address(warp, x)[mask] for x in operands[:2])
        count, shared = int(operands[2], 0), warp.cta.shared
        given = self.get(warp, operands[3], "u32")[mask] if len(operands) > 3 else np.full(len(target), count)
        self.memory.check(source[given > 0])

        def land() -> None:
            for to, start, size in zip(target.tolist(), source.tolist(), given.tolist(), strict=True):
                shared[to : to + count] = 0
                shared[to : to + size] = self.memory.bytes[start : start + size]

        warp.copies.append(land)

    def _arrive_with_copies(self, warp, operands, mask) -> None:
        """`cp.async.mbarrier.arrive`: one more arrival is pending until all copies before it have landed."""
        barrier, copies = warp.cta.barriers[int(self.address(warp, operands[0])[mask][0])], list(warp.copies)
        barrier.pending += int(mask.sum())

        def land() -> None:
            for copy in copies:
                if copy in warp.copies:  # another barrier's arrival may have been first
                    warp.copies.remove(copy)
                    copy()
            barrier.update(arrivals=int(mask.sum()))

        warp.cta.copies.append(land)

    def op_prefetch(self, warp, opcode, operands, mask, active) -> None:
        self.memory.check(self.address(warp, operands[0])[mask])

    # Synchronisation

    def op_mbarrier(self, warp, opcode, operands, mask, active) -> None:
        barriers = warp.cta.barriers
        match opcode[1]:
            case "init":
                barriers[int(self.address(warp, operands[0])[mask][0])] = Barrier(int(operands[1]))
            case "arrive":
                barrier = barriers[int(self.address(warp, operands[1])[mask][0])]
                bytes_ = int(operands[2]) * int(mask.sum()) if "expect_tx" in opcode else 0
                barrier.bytes += bytes_
                barrier.update(arrivals=int(mask.sum()))
            case "try_wait":
                done = barriers[int(self.address(warp, operands[1])[mask][0])].phase != int(self.get(warp, operands[2], "u32")[mask][0])
                if not done:
                    raise Blocked
                self.put(warp, operands[0], np.ones(32, bool), mask)
            case _:
                raise NotImplementedError(opcode)

    def op_bar(self, warp, opcode, operands, mask, active) -> None:
        if opcode[1] == "warp":
            assert active.all(), "bar.warp.sync with lanes missing"
            return
        assert active.all(), "barrier with lanes missing"
        count = int(operands[1]) // 32 if len(operands) > 1 else len(warp.cta.warps)
        key = (int(self.get(warp, operands[0], "u32")[0]), count)
        waiting = warp.cta.waiting.setdefault(key, [])
        waiting.append(warp)
        warp.parked = key
        if len(waiting) == count:
            for other in waiting:
                other.parked = None
            del warp.cta.waiting[key]

    op_barrier = op_bar

    def op_elect(self, warp, opcode, operands, mask, active) -> None:
        assert active.all()
        self.put(warp, operands[0].split("|")[1], LANES == 0, active)

    def op_setmaxnreg(self, *_) -> None:
        pass

    def op_fence(self, *_) -> None:
        pass

    def op_membar(self, *_) -> None:
        pass

    def op_pragma(self, *_) -> None:
        pass

    def op_griddepcontrol(self, *_) -> None:
        pass

    # Exchange between lanes

    def op_shfl(self, warp, opcode, operands, mask, active) -> None:
        assert active.all(), "shfl with lanes missing"
        value = self.get(warp, operands[1], "b32")
        by = self.get(warp, operands[2], "u32").astype(np.int64)
        match opcode[2]:
            case "bfly":
                source = LANES ^ by
            case "up":
                source = np.where(LANES - by >= 0, LANES - by, LANES)
            case "down":
                source = np.where(LANES + by < 32, LANES + by, LANES)
            case "idx":
                source = by & 31
        self.put(warp, operands[0], value[source], mask)

    def op_redux(self, warp, opcode, operands, mask, active) -> None:
        assert active.all(), "redux with lanes missing"
        value = self.get(warp, operands[1], opcode[-1])
        out = value.sum(dtype=value.dtype) if opcode[2] == "add" else getattr(value, opcode[2])()
        self.put(warp, operands[0], np.full(32, out, value.dtype), mask)

    def op_movmatrix(self, warp, opcode, operands, mask, active) -> None:
        assert active.all()
        matrix = np.ascontiguousarray(self.get(warp, operands[1], "b32")).view(np.uint16).reshape(8, 8)
        self.put(warp, operands[0], np.ascontiguousarray(matrix.T).reshape(-1).view(np.uint32), mask)

    def op_ldmatrix(self, warp, opcode, operands, mask, active) -> None:
        assert active.all() and "trans" not in opcode
        address = self.address(warp, operands[1])
        self._space(warp, opcode, address, mask)
        targets = _operands(operands[0][1:-1])
        for i, target in enumerate(targets):
            rows = address[8 * i : 8 * i + 8]
            assert (rows % 16 == 0).all()
            self.put(warp, target, warp.cta.shared[rows[:, None] + np.arange(16)].reshape(-1).view(np.uint32), mask)

    def op_stmatrix(self, warp, opcode, operands, mask, active) -> None:
        assert active.all() and "trans" not in opcode
        address = self.address(warp, operands[0])
        for i, source in enumerate(_operands(operands[1][1:-1])):
            rows = address[8 * i : 8 * i + 8]
            assert (rows % 16 == 0).all() and (rows >= 0).all() and (rows < self.shared).all()
            matrix = np.ascontiguousarray(self.get(warp, source, "b32")).view(np.uint8).reshape(8, 16)
            warp.cta.shared[rows[:, None] + np.arange(16)] = matrix

    def op_wgmma(self, warp, opcode, operands, mask, active) -> None:
        """A warp's 16 rows of the product: each multiplies when it comes here, the others of its warpgroup when they do."""
        assert active.all()
        if opcode[1] != "mma_async":
            return
        assert opcode[5:] == ["s32", "s8", "s8"] or (opcode[5:] == ["f32", "e4m3", "e4m3"] and operands[4:] == ["1", "1"]), opcode
        columns = int(re.fullmatch(r"m64n(\d+)k32", opcode[4])[1])
        if operands[1][0] == "{":
            registers = np.stack([self.get(warp, x, "b32") for x in _operands(operands[1][1:-1])]).view(np.uint8)
            left = registers.reshape(2, 2, 8, 4, 4).transpose(1, 2, 0, 3, 4).reshape(16, 32)  # [k half, row half, group, thread, byte]
        else:
            left = self._matrix(warp, operands[1], 64)[16 * (warp.index % 4) :][:16]
        right = self._matrix(warp, operands[2], columns)
        with np.errstate(all="ignore"):
            if opcode[5] == "s32":
                product = (left.view(np.int8).astype(np.int64) @ right.view(np.int8).astype(np.int64).T).astype(np.int32)
            else:
                product = E4M3[left] @ E4M3[right].T
            product = product.reshape(2, 8, columns // 8, 4, 2).transpose(2, 0, 4, 1, 3).reshape(columns // 2, 32)
            scale = self.get(warp, operands[3], "pred") if operands[3][0] == "%" else np.full(32, operands[3] != "0")
            for register, more in zip(_operands(operands[0][1:-1]), product, strict=True):
                before = self.get(warp, register, opcode[5])
                self.put(warp, register, np.where(scale, before, before.dtype.type(0)) + more, mask)

    def _matrix(self, warp, descriptor, rows) -> np.ndarray:
        """Rows of 32 bytes, of a matrix in shared memory whose channels of K are contiguous."""
        (value,) = set(self.get(warp, descriptor, "u64").tolist())
        start, leading, stride = (((value >> bit) & 0x3FFF) << 4 for bit in (0, 16, 32))
        row, column = np.arange(rows)[:, None], np.arange(32)
        if width := (0, 128, 64, 32)[value >> 62]:  # that it is swizzled by
            at = start + row // 8 * stride + row % 8 * width + column
            at ^= ((at >> 7) & (width // 16 - 1)) << 4
        else:
            at = start + row // 8 * stride + row % 8 * 16 + column // 16 * leading + column % 16
        assert at.max() < self.shared, "outside shared memory"
        return warp.cta.shared[at]

    def op_mma(self, warp, opcode, operands, mask, active) -> None:
        assert active.all() and opcode[4:6] == ["row", "col"], opcode
        d, a, b, c = (_operands(o[1:-1]) for o in operands)
        match opcode[3], [x for x in opcode[6:] if x != "satfinite"]:
            case "m16n8k16", ["f32", "f16", "f16", "f32"]:
                item, wide, kind, out_kind = np.float16, np.float64, "f32", np.float32
            case "m16n8k16", ["f32", "bf16", "bf16", "f32"]:
                item, wide, kind, out_kind = np.float32, np.float64, "f32", np.float32
            case "m16n8k32", ["s32", "s8", "s8", "s32"]:
                item, wide, kind, out_kind = np.int8, np.int64, "s32", np.int32
            case _:
                raise NotImplementedError(opcode)
        left, right = (np.stack([self.get(warp, x, "b32") for x in regs]) for regs in (a, b))
        if "bf16" in opcode:
            left, right = (np.stack([x << 16, x & 0xFFFF0000], -1).view(np.float32).reshape(len(x), -1) for x in (left, right))
        left, right = (x.view(item).astype(wide) for x in (left, right))
        each = left.shape[1] // 32  # elements of a register
        left = left.reshape(2, 2, 8, 4, each).transpose(1, 2, 0, 3, 4).reshape(16, 8 * each)  # [k half, row half, group, thread, element]
        right = right.reshape(2, 8, 4, each).transpose(0, 2, 3, 1).reshape(8 * each, 8)
        more = np.stack([self.get(warp, x, kind) for x in c]).reshape(2, 2, 8, 4).transpose(0, 2, 3, 1).reshape(16, 8).astype(wide)
        with np.errstate(all="ignore"):
            out = left @ right + more
            assert out_kind is np.float32 or (np.abs(out) < 2**31).all(), "an INT32 sum overflows"
            out = out.astype(out_kind).reshape(2, 8, 4, 2).transpose(0, 3, 1, 2).reshape(4, 32)
        for i, x in enumerate(d):
            self.put(warp, x, out[i].copy(), mask)


def _round(x: np.ndarray, to: str) -> np.ndarray:
    """FP32 to the bits of FP16, BF16 or (without infinities) E4M3, to nearest even."""
    with np.errstate(all="ignore"):
        if to == "f16":
            return x.astype(np.float16).view(np.uint16)
    x = torch.from_numpy(np.ascontiguousarray(x))
    if to == "e4m3x2":
        return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return x.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def _widen(x: np.ndarray, kind: str) -> np.ndarray:
    """The bits of FP16 or BF16 to FP32."""
    return x.view(np.float16).astype(np.float32) if kind == "f16" else (x.astype(np.uint32) << 16).view(np.float32)
