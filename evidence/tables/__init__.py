"""The tables and numbers of README.md and docs/ that come from results: one module a subject, one function a table.

The text between `<!-- results: NAME -->` and `<!-- /results -->` is what the function of that name gives (`writing.block`). `<!-- results:
NAME of DEVICE -->` has one device's results alone (`decode of h100`).
"""

from __future__ import annotations

import re

from ..results import ROOT
from ..rows import of_device
from . import accuracy, behind, headline, host, kernels, public_models, texts, vllm  # noqa: F401, which register their functions
from .writing import BLOCKS

FILES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(r"<!-- results: ([\w-]+)(?: of ([\w-]+))? -->(\n?).*?<!-- /results -->", re.DOTALL)


def filled(text: str) -> str:
    """A file's text with what belongs between its markers. Markers on lines of their own hold lines."""

    def fill(match: re.Match) -> str:
        name, device, line = match.groups()
        with of_device(device):
            made = BLOCKS[name]()
        gap = "\n" if line and made.rpartition("\n")[2].startswith("|") else ""  # Markdown's tables begin and end with an empty line
        return f"<!-- results: {name}{f' of {device}' if device else ''} -->{line}{gap}{made}{gap}{line}<!-- /results -->"

    return BLOCK.sub(fill, text)
