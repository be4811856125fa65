"""The report of ptxas and the machine code of a recorded launch, compiled without a GPU to the same code as on one.

Only in a process where Triton compiles (`compiling.call`).
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree
from typing import NamedTuple

import pytest
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel

from fp8attn.kernels.compile import HOPPER, compiled
from fp8attn.kernels.launch import Launch, recording

UNUSED_DAYS = 14


class Built(NamedTuple):
    kernel: CompiledKernel
    log: str  # ptxas's

    @property
    def registers(self) -> int:
        return int(re.search(r"Used (\d+) registers", self.log)[1])

    @property
    def spill_stores(self) -> int:
        """Bytes."""
        return int(re.search(r"(\d+) bytes spill stores", self.log)[1])

    @property
    def spill_loads(self) -> int:
        """Bytes."""
        return int(re.search(r"(\d+) bytes spill loads", self.log)[1])

    @property
    def warnings(self) -> str:
        """The warnings of ptxas: C75xx (serialized MMAs) and others."""
        return " ".join(sorted(set(re.findall(r"\bC75\d\d\b|warning.*", self.log))))

    def sass(self) -> Sass:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.kernel.asm["cubin"])
            file.flush()
            return Sass(
                subprocess.run(
                    [knobs.nvidia.nvdisasm.path, "-c", file.name], capture_output=True, text=True, check=True
                ).stdout
            )


@contextlib.contextmanager
def dry() -> Iterator[tuple[list[Launch], pytest.MonkeyPatch]]:
    """A context in which launchers run without a GPU. Yields the list of their launches, and a monkeypatch for
    questions to the device.
    """
    with pytest.MonkeyPatch.context() as patch, recording(dry=True) as launches:
        yield launches, patch


def build(launch: Launch, target: GPUTarget = HOPPER) -> Built:
    """Compiles a launch; from Triton's cache, if it has been compiled before."""
    kernel, said = _compiled(launch, target)
    folder = Path(knobs.cache.dir)
    log = folder / f"{kernel.hash}.log"
    if not said and not log.exists():  # compiled by others
        launch.kernel.device_caches.clear()
        with knobs.compilation.scope():
            knobs.compilation.always_compile = True
            kernel, said = _compiled(launch, target)
    if said:
        unfinished = log.with_suffix(f".{os.getpid()}")  # others may read the log
        unfinished.write_text(said)
        unfinished.replace(log)
        for path in folder.iterdir():
            if path.stat().st_mtime < time.time() - UNUSED_DAYS * 86400:
                rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    for path in (log, *(Path(file).parent for file in kernel.metadata_group.values())):
        path.touch()
    return Built(kernel, log.read_text())


def _compiled(launch: Launch, target: GPUTarget) -> tuple[CompiledKernel, str]:
    """The kernel, and the output of ptxas if it ran."""
    with knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as said:
        knobs.nvidia.dump_ptxas_log = True
        return compiled(launch.kernel, launch.args, launch.constants, target), said.getvalue()


class Sass:
    """Disassembled machine code."""

    def __init__(self, text: str) -> None:
        self.code: list[str] = []
        self.labels: dict[str, int] = {}
        for line in text.splitlines():
            if label := re.match(r"\s*(\.L_x_\d+):", line):
                self.labels[label[1]] = len(self.code)
            elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
                self.code.append(instruction[1].replace(".reuse", ""))

    def loops(self) -> list[tuple[int, int]]:
        """First and last instruction of every backward branch's span."""
        spans = set()
        for i, instruction in enumerate(self.code):
            branch = re.search(r"BRA\b.*`\((\.L_x_\d+)\)", instruction)
            if branch and self.labels.get(branch[1], i) < i:
                spans.add((self.labels[branch[1]], i))
        return sorted(spans)

    def spills(self, start: int, end: int) -> int:
        """Spill loads and stores in a loop."""
        return sum("STL" in x or "LDL" in x for x in self.code[start : end + 1])

    def follow(self) -> list[list[int]]:
        """What may run after each instruction."""
        found = []
        for i, text in enumerate(self.code):
            name, _ = parts(text)
            ends = name.split(".")[0] in ("BRA", "BRX", "EXIT", "RET") and not text.startswith("@")
            jumps = [] if name == "BSSY" else re.findall(r"\.L_x_\d+", text)  # that one says where branches meet again
            found.append([self.labels[x] for x in jumps if x in self.labels] + ([] if ends else [i + 1]))
        return found

    def overwritten_operand(self) -> str:
        """The first instruction that, on some path, writes a register which a running MMA reads: its left operand, up
        to the wait that ends its group. ptxas before 13.3 makes such code (triton-lang/triton#9433)."""
        reads = [_left_operand(text) for text in self.code]
        writes = [_written(text) for text in self.code]
        follow = self.follow()
        todo: list[tuple[int, tuple[frozenset[int], ...]]] = [
            (0, (frozenset(),))
        ]  # registers of running groups; the last has not ended
        seen = set(todo)
        while todo:
            i, groups = todo.pop()
            text = self.code[i]
            if any(writes[i] & group for group in groups):
                return text
            if "GMMA" in text:
                groups = (*groups[:-1], groups[-1] | reads[i])
                if "gsb0" in text:
                    groups = (*groups, frozenset())
            elif wait := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\w+)", text):
                groups = groups[max(len(groups) - 1 - int(wait[1], 16), 0) :]
            for j in follow[i]:
                if j < len(self.code) and (j, groups) not in seen:
                    seen.add((j, groups))
                    todo.append((j, groups))
        return ""

    def unset_register(self) -> str:
        """The first MMA or uniform instruction that reads a uniform register which not every path to it has written.

        ptxas 12.8 shares what it computes of a wgmma descriptor between two branches, and may compute it in one of them
        only. A move of
        such a register is no fault, but its result is unset, too: ptxas 13.4 moves all parts of a register pair and
        then writes one again.
        """
        reads, writes, follow = [], [], self.follow()
        moves = [parts(text)[0] == "UMOV" for text in self.code]
        for text in self.code:
            name, operands = parts(text)
            operands = [x for x in operands if not re.fullmatch(r"!?U?P[T\d]", x)]
            numbers = [[int(n) for n in re.findall(r"\bUR(\d+)", x)] for x in operands]
            written = re.match(r"U(?!TMA|BLK|SYNC|CGA)|R2UR|S2UR|VOTEU|REDUX", name) is not None
            wide = 2 if ".64" in name or ".WIDE" in name else 1
            writes.append({n + k for n in (numbers[:1] or [[]])[0] for k in range(wide)} if written else set())
            if re.match(
                r"[QI]GMMA", name
            ):  # of 8-bit products; of its four registers those of a left operand in registers count for nothing
                first = 2 if re.match(r"R\d", operands[1]) else 0
                reads.append({numbers[1 + first // 2][0] + k for k in range(first, 4)})
            else:
                wide = 2 if ".64" in name else 1
                reads.append({n + k for x in numbers[1:] for n in x for k in range(wide)} if written else set())
        known = {0: set()}
        todo = [0]
        while todo:
            i = todo.pop()
            after = known[i] - writes[i] if moves[i] and not reads[i] <= known[i] else known[i] | writes[i]
            for j in follow[i]:
                if j < len(self.code) and (j not in known or not known[j] <= after):
                    known[j] = known[j] & after if j in known else after
                    todo.append(j)
        return next((self.code[i] for i in sorted(known) if not moves[i] and not reads[i] <= known[i]), "")


def parts(text: str) -> tuple[str, list[str]]:
    """The name and the operands of an instruction, without its predicate."""
    name, operands = re.match(r"(?:@\S+\s+)?([\w.]+)\s*(.*?)\s*$", text).groups()
    return name, re.split(r",\s*(?![^\[]*\])", operands)


def _left_operand(text: str) -> frozenset[int]:
    """The registers of an MMA's left operand; none where it is in shared memory, and of other instructions."""
    name, operands = parts(text)
    if "GMMA" not in name or not (found := re.fullmatch(r"R(\d+)", operands[1])):
        return frozenset()
    return frozenset(range(int(found[1]), int(found[1]) + 4))


# Instructions whose first operand, a register, is read.
_READERS = ("BAR", "BRX", "FCHK", "NANOSLEEP", "RET", "WARPSYNC")


def _written(text: str) -> frozenset[int]:
    """The registers that an instruction writes."""
    name, operands = parts(text)
    if name.split(".")[0] in _READERS:
        return frozenset()
    if re.fullmatch(r"P[T\d]", operands[0]):  # as `SHFL.BFLY PT, R4, ...`
        operands = operands[1:]
    found = re.fullmatch(r"R(\d+)", operands[0]) if operands else None
    if not found:
        return frozenset()
    if product := re.search(r"GMMA\.64x(\d+)x", name):
        count = int(product[1]) // 2
    elif ".128" in name or "MMA" in name or re.search(r"LDSM\S*\.4", name):
        count = 4
    elif re.search(r"\.64|\.WIDE|^D(ADD|MUL|FMA)|LDSM\S*\.2|^CS2R(?!\.32)", name):
        count = 2
    else:
        count = 1
    return frozenset(range(int(found[1]), int(found[1]) + count))
