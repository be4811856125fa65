"""The tables and numbers of README.md and docs/ that come from results: one module a subject, one function a table.

The text between `<!-- results: NAME -->` and `<!-- /results -->` is what the function of that name returns
(`writing.block`).
"""

from __future__ import annotations

import re

from ..results import ROOT
from . import accuracy, behind, files, headline, host, kernels, latents, public_models, texts, vllm  # noqa: F401, which register
from .writing import BLOCKS

FILES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(r"<!-- results: ([\w-]+) -->(\n?).*?<!-- /results -->", re.DOTALL)


def filled(text: str) -> str:
    """A file's text with what belongs between its markers. Markers on lines of their own hold lines."""

    def fill(match: re.Match) -> str:
        name, line = match.groups()
        made = BLOCKS[name]()
        gap = (
            "\n" if line and made.rpartition("\n")[2].startswith("|") else ""
        )  # Markdown's tables begin and end with an empty line
        return f"<!-- results: {name} -->{line}{gap}{made}{gap}{line}<!-- /results -->"

    return BLOCK.sub(fill, text)
