"""Run the GPU tests and write what they said to results/h100/tests.json, a row a file."""

from __future__ import annotations

import sys
import time
from collections import Counter

import pytest

from .results import write

SOURCES = (
    *("benchmarks/gpu_tests.py", "tests/gpu", "src/fp8attn/kernels", "src/fp8attn/integrations/transformers"),
    *(f"src/fp8attn/{name}.py" for name in ("accumulation", "backends", "cache", "mode", "ops", "sdpa", "sdpa_quantized")),
)


class Outcomes:
    """Counts outcomes by file, as pytest reports them."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter] = {}

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.counts.setdefault(report.location[0], Counter())[report.outcome] += 1


def main() -> int:
    outcomes, start = Outcomes(), time.time()
    code = pytest.main(["tests/gpu", "-m", "gpu", "-q", "-n", "8", "-p", "no:cacheprovider", "--show-capture=no"], plugins=[outcomes])
    rows = [{"case": file, "impl": "fp8attn", **counts} for file, counts in sorted(outcomes.counts.items())]
    rows.append({"case": "all", "impl": "fp8attn", "exit": int(code), "seconds": round(time.time() - start)})
    write("results/h100/tests.json", rows, SOURCES)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
