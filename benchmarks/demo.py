"""The results of `fp8attn demo`: bytes, perplexity, answers and needles of this repository's model, in
BF16 and in FP8.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fp8attn_tools.cli.demo import run
from fp8attn_tools.evaluation.models import default_model

from .problem import DEVICE

CASES = ("demo",)
OF_CACHES = re.compile(r"(bytes_per_token|ppl|kl|needle(?!_cells|_model))_(.+)")


def measure(case: str) -> Iterator[dict]:
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder), DEVICE, default_model())  # this repository's, whatever is installed
    for name, value in found.items():
        what, cache = match.groups() if (match := OF_CACHES.fullmatch(name)) else (name, "fp8")
        yield {"case": f"{case}-{what}", "impl": cache.replace("_", "-"), "value": value}
