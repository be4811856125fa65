"""What a call launches, as a text that is equal where machine code is equal."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any


def normalized(ptx: str) -> str:
    """PTX without its locations, names and versions: if this text of two kernels is equal, their machine code is, too.

    It leaves out source locations (`.loc`, `.file`, debug sections, labels that only these use), comments, white space
    and the version of the PTX language. It renames functions and their parameters (`function0`), and labels (`label0`),
    in the order in which they appear. All
    the rest stays: the target, instructions, registers, sizes of arrays, limits of threads and registers.
    """
    text = re.sub(r"//[^\n]*", "", ptx)
    text = re.sub(r"^\s*\.section\s+\.debug\w*\s*\{[^}]*\}", "", text, flags=re.MULTILINE)
    text = re.sub(r"^\s*\.(?:version|loc|file)\b.*$", "", text, flags=re.MULTILINE)
    for number, name in enumerate(dict.fromkeys(re.findall(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)", text))):
        text = re.sub(rf"(?<![\w$]){re.escape(name)}(?=_param_|_retval|(?![\w$]))", f"function{number}", text)
    used = set(re.findall(r"\$L__\w+(?!\w|:)", text))
    lines = (" ".join(line.split()) for line in text.splitlines())
    lines = (line for line in lines if line and (not re.fullmatch(r"\$L__\w+:", line) or line[:-1] in used))
    numbers = itertools.count()
    labels: dict[str, str] = defaultdict(lambda: f"label{next(numbers)}")
    return re.sub(r"\$L__\w+", lambda label: labels[label[0]], "\n".join(lines)) + "\n"


def digest(value: Any) -> str:
    return hashlib.sha256(value if isinstance(value, bytes) else repr(value).encode()).hexdigest()[:16]


def of_launches(launches: Iterable[tuple[Any, str]]) -> str:
    """The fingerprint of `launch.Launch`es, each with the digest of its PTX. Launches by torch are not among them."""
    found = [
        (ptx, made.grid, bool(made.constants.get("launch_pdl")), list(_numbers(made.args))) for made, ptx in launches
    ]
    if not found:
        raise ValueError("this call launches no kernel through kernels.launch")
    return "launches:" + digest(found)


def _numbers(args: Iterable[Any]) -> Iterator[Any]:
    """What the host chose among the arguments: numbers, and how TMA sees tensors; no addresses."""
    from fp8attn.kernels.launch import Counters, Tiles

    for x in args:
        if isinstance(x, Tiles):
            yield x.view.shape, x.view.strides, x.view.block, x.view.swizzled
        elif isinstance(x, Counters | int | float):
            yield tuple(x) if isinstance(x, Counters) else x
