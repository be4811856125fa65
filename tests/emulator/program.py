"""PTX text as a list of instructions."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import NamedTuple


class Instruction(NamedTuple):
    predicate: str | None
    negated: bool
    opcode: list[str]  # its parts between dots
    operands: list[str]


@cache
def split(text: str) -> list[str]:
    """The operands of `text`, split at commas outside of brackets."""
    out, depth = [""], 0
    for c in text:
        depth += (c in "{[") - (c in "}]")
        if c == "," and not depth:
            out.append("")
        else:
            out[-1] += c
    return [x.strip() for x in out if x.strip()]


def elements(text: str) -> list[str]:
    """The operands in braces or brackets, or the only one: `{%r1, %r2}`, `%r1`."""
    return split(text[1:-1]) if text[0] in "{[" else [text]


class Program:
    """One kernel.

    Attributes:
        code: its instructions.
        labels: the index in `code` that a label names. A name that a block in braces declares has the block's number
            appended.
        tables: the labels of each `.branchtargets`.
        registers: the type of each register.
        params: type and name of each parameter.
        threads: of a CTA.
    """

    def __init__(self, text: str) -> None:
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.tables: dict[str, list[str]] = {}
        self.registers: dict[str, str] = {}
        self.threads = int(re.search(r"\.reqntid (\d+)", text).group(1))
        header, body = text.split("\n{\n", 1)
        self.params = re.findall(r"\.param \.(?:align \d+ \.)?(\w+).*?(\w+_param_\d+)", header)
        body = re.sub(r"//.*", "", body.split("// -- End function")[0])
        body = re.sub(r"\.(loc|section|file|pragma)\b.*", "", body)
        for name, targets in re.findall(r"([$\w]+):\s*\.branchtargets([^;]*);", body):
            self.tables[name] = split(targets)
        body = re.sub(r"[$\w]+:\s*\.branchtargets[^;]*;", "", body)
        scopes, scope, local = 0, 0, {}
        for brace, label, statement in re.findall(r"\s*(?:([{}])|([$\w]+):(?!:)|([^;]*);)", body):
            if brace:
                scopes += brace == "{"
                scope, local = scopes if brace == "{" else 0, {}
            elif label:
                self.labels[label if label[0] == "$" else f"{label}.{scope}"] = len(self.code)
            elif statement.strip().startswith(".reg"):
                self._declare(statement.strip(), scope, local)
            else:
                self._add(statement.strip(), scope, local)

    def _declare(self, text: str, scope: int, local: dict[str, str]) -> None:
        kind, names = re.match(r"\.reg \.(\w+)\s+(.*)", text, re.S).groups()
        for name in split(names):
            if "<" in name:
                stem, count = re.match(r"(%\w+)<(\d+)>", name).groups()
                self.registers.update({f"{stem}{i}": kind for i in range(int(count))})
            elif scope:
                local[name] = f"{name}.{scope}"
                self.registers[local[name]] = kind

    def _add(self, text: str, scope: int, local: dict[str, str]) -> None:
        for name, unique in local.items():
            if name in text:
                text = re.sub(rf"(?<![\w%$.]){re.escape(name)}(?![\w.])", unique, text)
        negated, predicate, opcode, rest = re.match(r"(?:@(!?)(\S+)\s+)?(\S+)\s*(.*)", text, re.S).groups()
        operands = split(rest)
        if opcode.startswith("bra") and operands[0][0] != "$":
            operands = [f"{operands[0]}.{scope}"]
        self.code.append(Instruction(predicate, bool(negated), opcode.split("."), operands))


@lru_cache(8)  # a test may launch a kernel several times
def program(ptx: str) -> Program:
    return Program(ptx)
