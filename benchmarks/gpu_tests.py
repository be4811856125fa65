"""Runs the GPU tests; what they said is `tests.json`, a row a file.

PYTHONPATH=src python -m benchmarks.gpu_tests [--save]
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter

import pytest

from . import results


class Outcomes:
    """Counts outcomes by file, as pytest reports them."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter] = {}

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.counts.setdefault(report.location[0], Counter())[report.outcome] += 1


def main() -> int:
    args = results.parse(results.arguments(__doc__, cases=False))
    outcomes, start = Outcomes(), time.time()
    workers = str(max(1, (os.cpu_count() or 2) // 2))  # they compile most of the time
    code = pytest.main(["tests/gpu", "-m", "gpu", "-q", "-n", workers, "-p", "no:cacheprovider", "--show-capture=no"], plugins=[outcomes])
    rows = [{"case": file, "impl": "fp8attn", **counts} for file, counts in sorted(outcomes.counts.items())]
    rows.append({"case": "all", "impl": "fp8attn", "exit": int(code), "seconds": round(time.time() - start)})
    if args.save:
        results.save("tests", rows)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
