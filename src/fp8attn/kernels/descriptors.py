"""Computes the descriptors of `wgmma` in 64 bits, as Triton 3.6 does.

A descriptor has a shared memory address, without its last four bits, in its low bits, and constants above them. A product of 128 columns
takes four, at constant distances. Triton 3.9 makes each from its own address in 32 bits: it adds the distance, widens the sum, and ORs the
constants in. ptxas then moves the constant half of each to its uniform register, between the products. Here one descriptor of a tile is
made so, and the others are that one plus a distance: one 64-bit addition writes both halves.

Every value stays. A text of other instructions is left as it is.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

FIELD = 15  # bits of an address in a descriptor
LARGEST = (1 << FIELD) - 1

_MADE = re.compile(r"\s*([a-z][\w.]*)\s+(%rd?\d+), ([^;{}\[]*);\s*")
_WRITES = re.compile(r"(?:^|[;{])[\s{]*(?:@!?%p\d+\s+)?[a-z][\w.:]*\s+(\{[^}]*\}|%rd?\d+)")
_REGISTER = re.compile(r"%rd?\d+")
_NUMBER = re.compile(r"-?\d+")
_LABEL = re.compile(r"\$L__BB\w+:")
_DECLARED = re.compile(r"\.reg \.b64\s+%rd<(\d+)>;")


class _Made(NamedTuple):
    """The only instruction that writes a register."""

    line: int
    opcode: str
    operands: list[str]


class _Use(NamedTuple):
    """A descriptor: `base + distance + constants`."""

    line: int
    register: str
    base: str  # the 32-bit register of a field
    distance: int
    constants: int


def wide_descriptors(ptx: str) -> str:
    """PTX in which the descriptors of a tile are 64-bit sums of its first one."""
    declared = _DECLARED.search(ptx)
    if not declared:
        return ptx
    lines = ptx.split("\n")
    made = _instructions(lines)
    families: dict[tuple[str, int], list[_Use]] = defaultdict(list)
    for use in _uses(made):
        families[use.base, use.constants].append(use)
    behind: dict[int, list[str]] = defaultdict(list)
    free = int(declared[1])
    for (base, constants), uses in _joined(families, made, lines):
        behind[made[base].line] += [f"cvt.u64.u32 %rd{free}, {base};", f"or.b64 %rd{free + 1}, %rd{free}, {constants};"]
        for use in uses:
            sum_of = f"add.s64 {use.register}, %rd{free + 1}, {use.distance};"
            lines[use.line] = sum_of if use.distance else f"mov.b64 {use.register}, %rd{free + 1};"
        free += 2
    text = "\n".join("\n".join([line, *behind[i]]) if i in behind else line for i, line in enumerate(lines))
    return text.replace(declared[0], f".reg .b64 %rd<{free}>;", 1)


def _instructions(lines: list[str]) -> dict[str, _Made]:
    """What makes each register that one instruction writes, always."""
    written = Counter(x for line in lines for group in _WRITES.findall(line.partition("//")[0]) for x in _REGISTER.findall(group))
    found = ((i, _MADE.fullmatch(line)) for i, line in enumerate(lines))
    return {x[2]: _Made(i, x[1], x[3].split(", ")) for i, x in found if x and written[x[2]] == 1}


def _uses(made: dict[str, _Made]) -> Iterator[_Use]:
    for register, (line, opcode, operands) in made.items():
        widened = made.get(operands[0])
        if opcode != "or.b64" or not _NUMBER.fullmatch(operands[1]) or not widened or widened.opcode != "cvt.u64.u32":
            continue
        base, distance = widened.operands[0], 0
        summed = made.get(base)
        if summed and summed.opcode in ("add.s32", "or.b32") and summed.operands[1].isdigit():
            base, distance = summed.operands[0], int(summed.operands[1])
            if summed.opcode == "or.b32" and distance & LARGEST:
                continue  # no sum
        field = made.get(base)
        if field and field.opcode == "bfe.u32" and field.operands[1:] == ["4", str(FIELD)] and _is_above(int(operands[1]), distance):
            yield _Use(line, register, base, distance, int(operands[1]))


def _is_above(constants: int, distance: int) -> bool:
    """Whether a field plus this distance has no bit of the constants. Then OR is a sum."""
    return distance < 1 << 31 and not constants & (1 << (LARGEST + distance).bit_length()) - 1


def _joined(
    families: dict[tuple[str, int], list[_Use]], made: dict[str, _Made], lines: list[str]
) -> Iterator[tuple[tuple[str, int], list[_Use]]]:
    """The families; one for all slices of a tile, whose addresses differ by a constant.

    An address of shared memory has 18 bits. So the distance of two is that of their fields: no sum reaches a field's end.
    """
    blocks = [0]
    for line in lines:
        blocks.append(blocks[-1] + bool(_LABEL.match(line)))
    first: dict[tuple[str, int, int], tuple[str, int]] = {}  # of an address, in a block: the base, and what is added to the address
    found: dict[tuple[str, int], list[_Use]] = {}
    for (base, constants), uses in sorted(families.items(), key=lambda item: made[item[0][0]].line):
        line, _, (address, *_) = made[base]
        offset, summed = 0, made.get(address)
        if summed and summed.opcode == "add.s32" and summed.operands[1].isdigit():
            address, offset = summed.operands[0], int(summed.operands[1])
        begin, least = first.setdefault((address, constants, blocks[line]), (base, offset))
        steps, rest = divmod(offset - least, 16)
        moved = [use._replace(base=begin, distance=use.distance + steps) for use in uses]
        if steps < 0 or rest or not all(_is_above(constants, use.distance) for use in moved):
            begin, moved = base, uses
        found.setdefault((begin, constants), []).extend(moved)
    yield from found.items()
