"""The state of a CTA and of a warp, and how an instruction reads and writes its operands."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache

import numpy as np

from .memory import Barrier, Memory, TensorMap
from .order import Order
from .program import Program

LANES = np.arange(32)
CYCLES = 100  # between two readings of a warp's `%clock`, which has no other time
ALL = np.ones(32, bool)  # most instructions are of all lanes: a mask that is this object is not looked at
ALL.setflags(write=False)
DESCRIPTORS = 0xDE5C0000  # tensor maps are kernel parameters; their "addresses" begin here
DTYPES = {
    name: np.dtype(dtype)
    for name, dtype in {
        "pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "b16": np.uint16, "u16": np.uint16, "s16": np.int16,
        "f16": np.uint16,
        "bf16": np.uint16, "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32, "f16x2": np.uint32,
        "bf16x2": np.uint32, "b64": np.uint64, "u64": np.uint64, "s64": np.int64,
    }.items()
}  # fmt: skip
ZEROS = {kind: np.zeros(32, dtype) for kind, dtype in DTYPES.items()}  # what a register is at first
for zeros in ZEROS.values():
    zeros.setflags(write=False)


class Blocked(Exception):
    """The warp cannot go on: it waits for a barrier, or for its copies."""


class Shared:
    """The state that all CTAs of a launch share.

    Attributes:
        params: a number for each parameter's name.
        maps: the tensor maps; number i has the "address" DESCRIPTORS + i.
        size: bytes of a CTA's shared memory.
        chance: whether something happens now that may happen later.
    """

    def __init__(
        self, program: Program, memory: Memory, params: Mapping[str, int], maps: list[TensorMap], size: int, grid: int,
        chance: Callable[[], bool],
    ) -> None:  # fmt: skip
        self.program, self.memory, self.params, self.maps, self.size, self.grid = (
            program,
            memory,
            params,
            maps,
            size,
            grid,
        )
        self.chance = chance


class Cta:
    """Attributes:
    shared: its shared memory, NaN at first.
    barriers: by address.
    waiting: the warps that wait for others, by the named barrier and how many it expects, or by the warpgroup.
    copies: those of TMA that have not landed, and arrivals that wait for copies of cp.async.
    """

    def __init__(self, launch: Shared, index: int) -> None:
        self.launch, self.index = launch, index
        self.shared = np.full(launch.size + 1024, 0xFF, np.uint8)
        self.barriers: dict[int, Barrier] = {}
        self.waiting: dict[tuple, list[Warp]] = {}
        self.copies: list[Callable[[], None]] = []
        warps = launch.program.threads // 32
        self.order = Order(warps, self.shared.size)
        self.warps = [Warp(self, w) for w in range(warps)]


class Warp:
    """32 lanes.

    Attributes:
        pc: an int while the lanes agree and an array when they do not (the lowest goes first).
        done: the lanes that have returned.
        running: the others.
        ended: whether there are none.
        registers: a value a lane. An array is replaced, never written to.
        parked: where the warp waits for others: a key of `Cta.waiting`.
        copies: those of cp.async that have not landed.
        clock: what `%clock` had when it was last read.
        sends: copies to global memory that have not left, in groups, the last of them open.
    """

    def __init__(self, cta: Cta, index: int) -> None:
        launch = cta.launch
        self.cta, self.launch, self.index = cta, launch, index
        self.pc: int | np.ndarray = 0
        self.done, self.running, self.ended = np.zeros(32, bool), ALL, False
        self.flying = cta.order.flying[index]
        self.registers = {name: ZEROS[kind] for name, kind in launch.program.registers.items()}
        self.registers["%tid.x"] = (index * 32 + LANES).astype(np.uint32)
        self.registers["%laneid"] = LANES.astype(np.uint32)
        self.registers["%dynamic_smem_size"] = np.full(32, launch.size, np.uint32)
        self.registers["%ctaid.x"] = np.full(32, cta.index, np.uint32)
        self.registers["%nctaid.x"] = np.full(32, launch.grid, np.uint32)
        self.clock = 0
        self.parked: tuple | None = None
        self.copies: list[Callable[[], None]] = []
        self.sends: list[list[Callable[[], None]]] = [[]]

    def end(self, mask: np.ndarray) -> None:
        """The lanes of `mask` return."""
        self.done = self.done | mask
        self.running = ~self.done
        self.ended = bool(self.done.all())

    def get(self, name: str, kind: str) -> np.ndarray:
        """An operand as PTX's type `kind`."""
        value = self.registers.get(name)
        if value is None:
            if name == "%clock":
                self.clock += CYCLES
                return np.full(32, self.clock, np.uint32)
            value = self.launch.params.get(name)
            return _constant(name, kind) if value is None else np.full(32, value, np.uint64).astype(DTYPES[kind])
        self.flying.discard(name)
        dtype = DTYPES[kind]
        if value.dtype == dtype:
            return value
        if value.itemsize == dtype.itemsize:
            return value.view(dtype)
        return value.astype(f"u{dtype.itemsize}").view(dtype)  # narrowing reads the low bits

    def put(self, name: str, value: np.ndarray, mask: np.ndarray) -> None:
        """Write the lanes of `mask`."""
        if name == "_":
            return
        old = self.registers[name]
        value = np.asarray(value)
        if value.dtype != old.dtype:
            value = value.view(old.dtype) if value.itemsize == old.itemsize else value.astype(old.dtype)
        self.registers[name] = value if mask is ALL or mask.all() else np.where(mask, value, old)

    def address(self, text: str) -> np.ndarray:
        """`[%rd1 + 16]`"""
        base, offset = _address(text)
        start = self.get(base, "u64" if base.startswith("%rd") or base in self.launch.params else "u32").astype(
            np.int64
        )
        return start + offset if offset else start

    def one(self, text: str, mask: np.ndarray) -> int:
        """The address of the first lane of `mask`."""
        return int(self.address(text)[mask][0])


@cache
def _constant(text: str, kind: str) -> np.ndarray:
    dtype = DTYPES[kind]
    if text == "global_smem":
        return np.zeros(32, dtype)
    if text.startswith(("0f", "0F")):
        return np.full(32, int(text[2:], 16), np.uint32).view(np.float32)
    value = int(text.rstrip("U"), 0)
    if kind == "pred":
        return np.full(32, value != 0)
    return np.full(32, value & ((1 << 8 * dtype.itemsize) - 1), f"u{dtype.itemsize}").view(dtype)


@cache
def _address(text: str) -> tuple[str, int]:
    base, offset = re.match(r"\[\s*([%$\w.]+)\s*(?:\+?\s*(-?\s*\d+))?\s*\]", text).groups()
    return base, int(offset.replace(" ", "")) if offset else 0
