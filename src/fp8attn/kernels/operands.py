"""Lets `wgmma` read its left operands where they are, instead of in copies that Triton makes.

Triton 3.9 copies each register of a left operand by a `mov` before each product (triton-lang/triton#9530), because ptxas before 13.3 could
overwrite a register that a running product still read (#9433 there). Since 13.3 ptxas waits for the product, and also keeps each copy until
then. Prefill multiplies the same weights two to five times, so copies took up to 32 registers of a thread, and its loops spilled.

`direct_operands` removes copies from the PTX while Triton compiles a kernel, and rewrites the descriptors of right operands
(`descriptors.py`): through Triton's hook on the stages of a compilation. The hook is part of the kernel's key in Triton's cache, in memory
and on disk, even where it adds nothing: so it is set for all kernels of fp8attn, and every thread and process finds the same kernel.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, local
from typing import Any, Literal, NamedTuple

import triton
from triton import knobs

from .descriptors import wide_descriptors

Which = Literal["none", "sums", "all"]  # the products that read their operands directly; `sums`: those with eight columns

KEY = "fp8attn: left operands of wgmma without copies, 3: "  # a change of `_rewritten` or what it calls needs another number
NOTE = "fp8attn_operands"  # of a kernel's metadata: why Triton's copies stayed, or `DIRECT`
DIRECT = "direct"
SAFE_PTXAS = (13, 3)  # the first that overwrites no operand of a running product


class Unsafe(ValueError):
    """The copies cannot be removed from a PTX text; the message says why."""


def copies_operands() -> bool:
    """Whether this Triton may copy the operands."""
    return tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)


def ptxas_release(said: str) -> tuple[int, ...]:
    """`(13, 4)` of what `ptxas --version` says."""
    found = re.search(r"release (\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else ()


# The hook


class Hook:
    """Triton's hook while threads compile kernels: one for all of them, so that they compile side by side. In threads outside of
    `direct_operands` it does what the hook that was there before does."""

    def __init__(self) -> None:
        self.before: Any = None
        self._here = local()  # `which`, in the threads that are inside of `direct_operands`
        self._inside, self._lock = 0, Lock()

    @contextmanager
    def set_for(self, which: Which) -> Iterator[None]:
        """Set the hook while threads are inside, with these products in this thread."""
        outer = getattr(self._here, "which", "none")
        with self._lock:
            if not self._inside:
                self.before, knobs.runtime.add_stages_inspection_hook = knobs.runtime.add_stages_inspection_hook, self
            self._inside += 1
        self._here.which = which
        try:
            yield
        finally:
            self._here.which = outer
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    knobs.runtime.add_stages_inspection_hook, self.before = self.before, None

    def __call__(self, *args: Any) -> tuple[str, str] | None:
        """Without arguments: what to add to a kernel's key. With them: change the stages of a compilation."""
        which, before = getattr(self._here, "which", "none"), self.before
        if not args:
            key, digest = ("", "") if before is None else before()
            mine = "" if which == "none" else KEY + which
            return key + mine, digest + mine
        if before is not None:
            before(*args)
        backend, stages, *_ = args
        if which != "none":
            make = stages["ptx"]
            stages["ptx"] = lambda source, metadata: _rewritten(make(source, metadata), which, backend, metadata)
        return None


_hook = Hook()


@contextmanager
def direct_operands(which: Which) -> Iterator[None]:
    """While this lasts, the kernel that this thread compiles or finds has no copies of the left operands of these products, and
    64-bit descriptors of the right ones."""
    if not copies_operands():
        yield
        return
    with _hook.set_for(which):
        yield


def warn_of_copies(program: Any) -> None:
    """Warn that a kernel has kept its copies although it should have none."""
    note = getattr(getattr(program, "metadata", None), NOTE, DIRECT)
    if note != DIRECT:
        warnings.warn(f"prefill is slower than it could be: {note}. `fp8attn doctor` says more", RuntimeWarning, stacklevel=2)


def _rewritten(ptx: str, which: Which, backend: Any, metadata: dict[str, Any]) -> str:
    """The PTX to assemble. The metadata, which Triton keeps with the kernel, gets `NOTE`."""
    from triton.backends.nvidia.compiler import get_ptxas_version

    release = ptxas_release(get_ptxas_version(backend.target.arch))
    metadata[NOTE] = DIRECT
    ptx = wide_descriptors(ptx)
    try:
        if release < SAFE_PTXAS:
            raise Unsafe(f"ptxas {'.'.join(map(str, release))} may overwrite operands of running products, so they are copied")
        return without_copies(ptx, which)
    except Unsafe as reason:
        metadata[NOTE] = str(reason)
        return ptx


# The text

_REGISTER = re.compile(r"%r\d+")
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
    products = {i: found for i, line in enumerate(lines) if (found := _PRODUCT.search(line)) and (which == "all" or ".m64n8k" in found[1])}
    operands = {i: found[2].split(",") for i, found in products.items()}
    read = Counter(register for registers in operands.values() for register in registers)
    copies: dict[str, _Copy] = {}
    for i, line in enumerate(lines):
        if (found := _COPY.fullmatch(line)) and found[1] in read and _is_inline(lines, i):
            if found[1] in copies:
                raise Unsafe(f"{found[1]} is copied to twice")
            copies[found[1]] = _Copy(i, found[2])
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
    """Raise `Unsafe` unless each source keeps its value from its copy to the end of the last product that reads the copy, with no way in or
    out of the instructions between them."""
    sources = {copy.line: copy.source for copies in reads.values() for copy in copies}
    unread = Counter(copy.line for copies in reads.values() for copy in copies)  # reads of each copy that have not ended
    held: Counter[str] = Counter()  # how many copies there are of a register whose reads have not ended
    made: set[int] = set()
    groups: list[list[int]] = [[]]  # copies that running products read; the last group is not committed
    for i, line in enumerate(lines):
        if i in sources:
            made.add(i)
            held[sources[i]] += 1
        elif i in reads:
            for copy in reads[i]:
                if copy.line not in made:
                    raise Unsafe(f"a product reads a copy of {copy.source} that is not made before it")
                groups[-1].append(copy.line)
        elif "wgmma.commit_group" in line:
            groups.append([])
        elif found := _WAIT.search(line):
            running = min(int(found[1]), len(groups) - 1)
            ended, groups = groups[: len(groups) - 1 - running], groups[len(groups) - 1 - running :]
            for copy in (copy for group in ended for copy in group):
                unread[copy] -= 1
                if not unread[copy]:
                    held[sources[copy]] -= 1
        elif +held and _BRANCH.search(line):
            raise Unsafe(f"the code branches while a product reads {next(iter(+held))}")
        else:
            for register in _written(line):
                if held[register] > 0:
                    raise Unsafe(f"{register} is written while a product reads it")


def _written(line: str) -> Iterator[str]:
    """The registers that the instructions of a line write, and perhaps others."""
    for instruction in line.partition("//")[0].split(";"):
        found = re.match(r"[\s{]*(?:@!?%p\d+\s+)?[a-z][\w.:]*\s+(\{[^}]*\}|[^,\[]*)", instruction)
        if found:
            yield from _REGISTER.findall(found[1])
