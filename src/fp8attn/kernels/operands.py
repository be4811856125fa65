"""Lets `wgmma` read its operands where they are: left ones without the copies that Triton makes, right ones by 64-bit
descriptors. And lets it multiply unsigned bytes.

**Copies.** Triton 3.9 copies each register of a left operand by a `mov` before each product (triton-lang/triton#9530),
because ptxas before 13.3 could overwrite a register that a running product still read (#9433 there). Before 13.3 ptxas
merges the copies, and they stay. Since 13.3 it waits for the product, and also keeps each copy until then. Prefill
multiplies the same weights two to five times, so copies took up to 32 registers of a thread, and its loops spilled.
`without_copies` removes them.

**Descriptors.** A descriptor of a right operand has a shared memory address, without its last four bits, in its low
bits, and constants above them. A product of 128 columns takes four, at constant distances. Triton 3.9 makes each from
its own address in 32 bits: it adds the distance, widens the sum, and ORs the constants in. ptxas then moves the
constant half of each to its uniform register, between the products. `wide_descriptors` makes one descriptor of a tile
so, and the others by adding a distance: one 64-bit addition writes both halves, as in Triton 3.6. Every value stays. A
text of other instructions is left as it is.

**Unsigned bytes.** Gluon's integers have no sign, and its products of bytes are signed. `unsigned_products` renames
those whose left operand is in registers, for the kernel of `latent` with one digit, with every Triton. That kernel
keeps its copies, whose absence changes nothing, and its 32-bit descriptors: as 64-bit sums they are in registers of
threads, of which it has too few.

`direct_operands` does this to the PTX while Triton compiles a kernel, through Triton's hook on the stages of a
compilation. The hook is part of the kernel's key in Triton's cache, in memory and on disk, even where it adds nothing:
so it is set for all kernels of fp8attn, and every thread and process finds the same kernel. This file goes when Triton
copies no more (docs/roadmap.md).
"""

from __future__ import annotations

import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, local
from typing import Any, Literal, NamedTuple

from triton import knobs

from .common import RELEASE

# The products that read their operands directly; `sums`: those with eight columns. `unsigned`: none does, and those
# with a left operand in registers multiply unsigned bytes.
Which = Literal["none", "sums", "all", "unsigned"]

# a change of `_rewritten` or what it calls needs another number
KEY = "fp8attn: left operands of wgmma without copies, 4: "
NOTE = "fp8attn_operands"  # of a kernel's metadata: why Triton's copies stayed, or `DIRECT`
DIRECT = "direct"
SAFE_PTXAS = (13, 3)  # the first that overwrites no operand of a running product


class Unsafe(ValueError):
    """The copies cannot be removed from a PTX text; the message says why."""


def copies_operands() -> bool:
    """Whether this Triton may copy the operands."""
    return RELEASE >= (3, 7)


def ptxas_release(said: str) -> tuple[int, ...]:
    """`(13, 4)` of what `ptxas --version` says."""
    release = re.search(r"release (\d+)\.(\d+)", said)
    return tuple(map(int, release.groups())) if release else ()


# The hook


class Hook:
    """Triton's hook while threads compile kernels: one for all of them, so that they compile side by side. In threads
    outside of `direct_operands` it does what `before` does, the hook that another library had set."""

    def __init__(self, before: Any) -> None:
        self.before = before

    def __call__(self, *args: Any) -> tuple[str, str] | None:
        """Without arguments: what to add to a kernel's key. With them: change the stages of a compilation."""
        which = getattr(_thread, "which", "none")
        if not args:
            key, digest = ("", "") if self.before is None else self.before()
            mine = "" if which == "none" else KEY + which
            return key + mine, digest + mine
        if self.before is not None:
            self.before(*args)
        backend, stages, *_ = args
        if which != "none":
            make = stages["ptx"]
            stages["ptx"] = lambda source, metadata: _rewritten(make(source, metadata), which, backend, metadata)
        return None


_thread = local()  # `which`, in the threads that are inside of `direct_operands`
_inside = 0  # their number
_lock = Lock()


@contextmanager
def direct_operands(which: Which) -> Iterator[None]:
    """While this lasts, the kernel that this thread compiles or finds has no copies of the left operands of these
    products, and 64-bit descriptors of the right ones."""
    global _inside
    if not copies_operands() and which != "unsigned":
        yield
        return
    outer, runtime = getattr(_thread, "which", "none"), knobs.runtime
    with _lock:
        _inside += 1
        # The first thread, or another library has replaced ours.
        if not isinstance(runtime.add_stages_inspection_hook, Hook):
            runtime.add_stages_inspection_hook = Hook(runtime.add_stages_inspection_hook)
    _thread.which = which
    try:
        yield
    finally:
        _thread.which = outer
        with _lock:
            _inside -= 1
            hook = runtime.add_stages_inspection_hook
            if not _inside and isinstance(hook, Hook):  # a hook that another library has set stays
                runtime.add_stages_inspection_hook = hook.before


def warn_of_copies(program: Any) -> None:
    """Warn that a kernel has kept its copies although it should have none."""
    note = getattr(getattr(program, "metadata", None), NOTE, DIRECT)
    if note != DIRECT:
        warnings.warn(
            f"prefill is slower than it could be: {note}. `fp8attn doctor` says more", RuntimeWarning, stacklevel=2
        )


def _rewritten(ptx: str, which: Which, backend: Any, metadata: dict[str, Any]) -> str:
    """The PTX to assemble. The metadata, which Triton keeps with the kernel, gets `NOTE`."""
    from triton.backends.nvidia.compiler import get_ptxas_version

    if which == "unsigned":
        return unsigned_products(ptx)
    metadata[NOTE] = DIRECT
    ptx = wide_descriptors(ptx)
    if ptxas_release(get_ptxas_version(backend.target.arch)) < SAFE_PTXAS:
        return ptx  # it merges the copies, and without them it overwrites operands of running products
    try:
        return without_copies(ptx, which)
    except Unsafe as reason:
        metadata[NOTE] = str(reason)
        return ptx


# Unsigned bytes

_SIGNED = re.compile(r"(wgmma\.mma_async\S*\.s32)\.s8\.s8( \{[^}]*\}, \{)")


def unsigned_products(ptx: str) -> str:
    """PTX whose products of bytes in registers by bytes in shared memory are of unsigned bytes.

    Raises:
        ValueError: it has no such product. Then they are written in another way, and would stay signed.
    """
    ptx, count = _SIGNED.subn(r"\1.u8.u8\2", ptx)
    if not count:
        raise ValueError("the PTX has no product of INT8 registers to make unsigned; does fp8attn know this Triton?")
    return ptx


# Copies

_REGISTER = re.compile(r"%rd?\d+")
_WRITES = re.compile(r"(?:^|[;{])[\s{]*(?:@!?%p\d+\s+)?[a-z][\w.:]*\s+(\{[^}]*\}|%rd?\d+)")
_PRODUCT = re.compile(r"(wgmma\.mma_async\S* \{[^}]*\}, \{)([^}]*)(\}.*)")
_COPY = re.compile(r"\s*mov\.b32\s+(%r\d+), (%r\d+);\s*")
_BRANCH = re.compile(r"^\$L__BB|\bbra\S*\s+\$")
_WAIT = re.compile(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)")


class _Copy(NamedTuple):
    line: int
    source: str


def without_copies(ptx: str, which: Which = "all") -> str:
    """PTX in which these products read the registers that Triton's copies are made from.

    Raises:
        Unsafe: a copy has another reader, or its source changes before the product that reads it has ended.
    """
    lines = ptx.split("\n")
    products = {
        i: product
        for i, line in enumerate(lines)
        if (product := _PRODUCT.search(line)) and (which == "all" or ".m64n8k" in product[1])
    }
    operands = {i: product[2].split(",") for i, product in products.items()}
    read = Counter(register for registers in operands.values() for register in registers)
    copies: dict[str, _Copy] = {}
    for i, line in enumerate(lines):
        if (copy := _COPY.fullmatch(line)) and copy[1] in read and _is_inline(lines, i):
            if copy[1] in copies:
                raise Unsafe(f"{copy[1]} is copied to twice")
            copies[copy[1]] = _Copy(i, copy[2])
    named = Counter(register for line in lines for register in _REGISTER.findall(line))
    for register in copies:
        if named[register] != 1 + read[register]:
            raise Unsafe(f"a copy, {register}, has another reader")
    _check(lines, {i: [copies[x] for x in registers if x in copies] for i, registers in operands.items()})
    for i, registers in operands.items():
        start, _, end = products[i].groups()
        inside = ",".join(copies[x].source if x in copies else x for x in registers)
        lines[i] = lines[i][: products[i].start()] + start + inside + end
    removed = {copy.line for copy in copies.values()}
    return "\n".join(line for i, line in enumerate(lines) if i not in removed)


def _is_inline(lines: list[str], i: int) -> bool:
    """Whether a line is inline PTX, as Triton's copies are."""
    before = (line.strip() for line in reversed(lines[:i][-3:]))
    return next((line for line in before if not line.startswith(".loc")), "") == "// begin inline asm"


def _check(lines: list[str], reads: dict[int, list[_Copy]]) -> None:
    """Raise `Unsafe` unless each source keeps its value from its copy to the end of the last product that reads the
    copy, with no way in or out of the instructions between them."""
    sources = {copy.line: copy.source for copies in reads.values() for copy in copies}
    unread = Counter(copy.line for copies in reads.values() for copy in copies)  # reads that have not ended
    busy: Counter[str] = Counter()  # how many copies there are of a register whose reads have not ended
    begun: set[int] = set()  # copies before this line
    groups: list[list[int]] = [[]]  # copies that running products read; the last group is not committed
    for i, line in enumerate(lines):
        if i in sources:
            begun.add(i)
            busy[sources[i]] += 1
        elif i in reads:
            for copy in reads[i]:
                if copy.line not in begun:
                    raise Unsafe(f"a product reads a copy of {copy.source} that is not made before it")
                groups[-1].append(copy.line)
        elif "wgmma.commit_group" in line:
            groups.append([])
        elif wait := _WAIT.search(line):
            running = min(int(wait[1]), len(groups) - 1)
            ended, groups = groups[: len(groups) - 1 - running], groups[len(groups) - 1 - running :]
            for copy in (copy for group in ended for copy in group):
                unread[copy] -= 1
                if not unread[copy]:
                    busy[sources[copy]] -= 1
        elif +busy and _BRANCH.search(line):
            raise Unsafe(f"the code branches while a product reads {next(iter(+busy))}")
        else:
            for register in _written(line):
                if busy[register] > 0:
                    raise Unsafe(f"{register} is written while a product reads it")


def _written(line: str) -> Iterator[str]:
    """The registers that the instructions of a line write."""
    for targets in _WRITES.findall(line.partition("//")[0]):
        yield from _REGISTER.findall(targets)


# Descriptors

FIELD = 15  # bits of an address in a descriptor
LARGEST = (1 << FIELD) - 1

_INSTRUCTION = re.compile(r"\s*([a-z][\w.]*)\s+(%rd?\d+), ([^;{}\[]*);\s*")
_NUMBER = re.compile(r"-?\d+")
_LABEL = re.compile(r"\$L__BB\w+:")
_DECLARED = re.compile(r"\.reg \.b64\s+%rd<(\d+)>;")


class _Instruction(NamedTuple):
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
    writers = _instructions(lines)
    families: dict[tuple[str, int], list[_Use]] = defaultdict(list)
    for use in _uses(writers):
        families[use.base, use.constants].append(use)
    behind: dict[int, list[str]] = defaultdict(list)
    free = int(declared[1])
    for (base, constants), uses in _joined(families, writers, lines):
        behind[writers[base].line] += [
            f"cvt.u64.u32 %rd{free}, {base};",
            f"or.b64 %rd{free + 1}, %rd{free}, {constants};",
        ]
        for use in uses:
            sum_of = f"add.s64 {use.register}, %rd{free + 1}, {use.distance};"
            lines[use.line] = sum_of if use.distance else f"mov.b64 {use.register}, %rd{free + 1};"
        free += 2
    text = "\n".join("\n".join([line, *behind[i]]) if i in behind else line for i, line in enumerate(lines))
    return text.replace(declared[0], f".reg .b64 %rd<{free}>;", 1)


def _instructions(lines: list[str]) -> dict[str, _Instruction]:
    """What makes each register that one instruction writes, always."""
    written = Counter(register for line in lines for register in _written(line))
    matches = ((i, _INSTRUCTION.fullmatch(line)) for i, line in enumerate(lines))
    return {x[2]: _Instruction(i, x[1], x[3].split(", ")) for i, x in matches if x and written[x[2]] == 1}


def _uses(writers: dict[str, _Instruction]) -> Iterator[_Use]:
    for register, (line, opcode, operands) in writers.items():
        widened = writers.get(operands[0])
        if opcode != "or.b64" or not _NUMBER.fullmatch(operands[1]) or not widened or widened.opcode != "cvt.u64.u32":
            continue
        base, distance = widened.operands[0], 0
        summed = writers.get(base)
        if summed and summed.opcode in ("add.s32", "or.b32") and summed.operands[1].isdigit():
            base, distance = summed.operands[0], int(summed.operands[1])
            if summed.opcode == "or.b32" and distance & LARGEST:
                continue  # no sum
        field = writers.get(base)
        if (
            field
            and field.opcode == "bfe.u32"
            and field.operands[1:] == ["4", str(FIELD)]
            and _is_above(int(operands[1]), distance)
        ):
            yield _Use(line, register, base, distance, int(operands[1]))


def _is_above(constants: int, distance: int) -> bool:
    """Whether a field plus this distance has no bit of the constants. Then OR is a sum."""
    return distance < 1 << 31 and not constants & (1 << (LARGEST + distance).bit_length()) - 1


def _joined(
    families: dict[tuple[str, int], list[_Use]], writers: dict[str, _Instruction], lines: list[str]
) -> Iterator[tuple[tuple[str, int], list[_Use]]]:
    """The families; one for all slices of a tile, whose addresses differ by a constant.

    An address of shared memory has 18 bits. So the distance of two is that of their fields: no sum reaches a field's
    end.
    """
    blocks = [0]
    for line in lines:
        blocks.append(blocks[-1] + bool(_LABEL.match(line)))
    # Of an address, in a block: the base, and the number that is added to the address.
    first: dict[tuple[str, int, int], tuple[str, int]] = {}
    joined: dict[tuple[str, int], list[_Use]] = {}
    for (base, constants), uses in sorted(families.items(), key=lambda item: writers[item[0][0]].line):
        line, _, (address, *_) = writers[base]
        offset, summed = 0, writers.get(address)
        if summed and summed.opcode == "add.s32" and summed.operands[1].isdigit():
            address, offset = summed.operands[0], int(summed.operands[1])
        begin, least = first.setdefault((address, constants, blocks[line]), (base, offset))
        steps, rest = divmod(offset - least, 16)
        moved = [use._replace(base=begin, distance=use.distance + steps) for use in uses]
        if steps < 0 or rest or not all(_is_above(constants, use.distance) for use in moved):
            begin, moved = base, uses
        joined.setdefault((begin, constants), []).extend(moved)
    yield from joined.items()
