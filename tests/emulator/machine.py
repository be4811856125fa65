"""Runs the warps of a launch in a random order."""

from __future__ import annotations

import random

import numpy as np

from . import arithmetic, lanes, matrices, movement, synchronization
from .memory import Memory, TensorMap
from .program import program
from .warp import ALL, DESCRIPTORS, Blocked, Cta, Shared, Warp

INSTRUCTIONS = {
    **arithmetic.INSTRUCTIONS, **movement.INSTRUCTIONS, **synchronization.INSTRUCTIONS, **lanes.INSTRUCTIONS,
    **matrices.INSTRUCTIONS,
}  # fmt: skip


class Machine:
    """One launch of a kernel.

    Args:
        shared: bytes of shared memory.
        arguments: ints and floats as the PTX declares them, `TensorMap` for a tensor map.
        grid: CTAs.
        seed: of the order of warps and of when copies land.
    """

    def __init__(self, ptx: str, shared: int, memory: Memory, arguments: list, grid: int, seed: int = 0) -> None:
        self.program, self.memory, self.grid = program(ptx), memory, grid
        self.functions = [INSTRUCTIONS.get(x.opcode[0], arithmetic.arithmetic) for x in self.program.code]
        self.random = random.Random(seed)
        params, maps = {}, []
        assert len(arguments) == len(self.program.params), (len(arguments), self.program.params)
        for (kind, name), value in zip(self.program.params, arguments, strict=True):
            if isinstance(value, TensorMap):
                maps.append(value)
                value = DESCRIPTORS + len(maps) - 1
            elif kind == "f32":
                value = int(np.float32(value).view(np.uint32))
            params[name] = value
        self.shared = Shared(self.program, memory, params, maps, shared, grid, lambda: self.random.random() < 0.5)

    @np.errstate(all="ignore")  # once, and not at each instruction
    def run(self, resident: int = 4, quantum: int = 400, late: tuple[int, ...] = ()) -> None:
        """Run all CTAs, `resident` of them at a time. Warps alternate, each for up to `quantum` instructions.

        Args:
            late: warps of each CTA that go on, by one instruction, only when no other can.
        Raises:
            RuntimeError: no warp can go on.
        """
        waiting = list(range(self.grid))
        ctas: list[Cta] = []
        while waiting or ctas:
            while waiting and len(ctas) < resident:
                ctas.append(Cta(self.shared, waiting.pop(0)))
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
                raise RuntimeError(
                    "deadlock: " + "; ".join(self._where(w) for cta in ctas for w in cta.warps if not w.ended)
                )
            ctas = [cta for cta in ctas if not all(w.ended for w in cta.warps)]
        self.memory.sync()

    def _where(self, warp: Warp) -> str:
        pc = warp.pc if isinstance(warp.pc, int) else int(warp.pc.min())
        instruction = self.program.code[min(pc, len(self.program.code) - 1)]
        return (
            f"CTA {warp.cta.index} warp {warp.index} at {pc}: {'.'.join(instruction.opcode)} "
            f"{', '.join(instruction.operands)}"
        )

    def _advance(self, warp: Warp, steps: int) -> bool:
        """Execute up to `steps` instructions of a warp. Returns whether there was one."""
        moved = False
        for _ in range(steps):
            if warp.parked or warp.ended:
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
        pc = int(warp.pc[warp.running].min()) if split else warp.pc
        active = (warp.pc == pc) & warp.running if split else warp.running
        predicate, negated, opcode, operands = self.program.code[pc]
        mask = active
        if predicate is not None:
            p = warp.registers[predicate]
            mask = active & (~p if negated else p)
        target = None
        if opcode[0] == "bra":
            target = np.full(32, self.program.labels[operands[0]])
        elif opcode[0] == "brx":
            table = np.array([self.program.labels[x] for x in self.program.tables[operands[1]]])
            target = table[np.where(mask, warp.registers[operands[0]], 0)]
        elif opcode[0] == "ret":
            warp.end(mask)
        elif mask is ALL or mask.any() or "sync" in opcode:
            self.functions[pc](warp, opcode, operands, mask, active)
        if split or target is not None:
            following = np.where(active, pc + 1, warp.pc if split else pc + 1)
            if target is not None:
                following = np.where(mask, target, following)
            alive = following[warp.running]
            warp.pc = int(alive[0]) if alive.size and (alive == alive[0]).all() else following
        else:
            warp.pc = pc + 1
