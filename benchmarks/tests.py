"""The GPU tests: a row a file."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator

import pytest

CASES = ("all",)


class Outcomes:
    """Counts outcomes by file, as pytest reports them."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter] = {}

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.counts.setdefault(report.location[0], Counter())[report.outcome] += 1


def measure(case: str) -> Iterator[dict]:
    outcomes, start = Outcomes(), time.time()
    workers = str(max(1, (os.cpu_count() or 2) // 2))  # they compile most of the time
    code = pytest.main(["tests/gpu", "-m", "gpu", "-q", "-n", workers, "-p", "no:cacheprovider", "--show-capture=no"], plugins=[outcomes])
    yield from ({"case": file, "impl": "fp8attn", **counts} for file, counts in sorted(outcomes.counts.items()))
    yield {"case": case, "impl": "fp8attn", "exit": int(code), "seconds": round(time.time() - start)}
    if code:
        sys.exit(int(code))
