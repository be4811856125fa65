"""Runs the GPU tests: `python -m tests.gpu [--save]`. With `--save`, the counts of each file become rows of
results/<device>/tests.json.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter

import pytest
import torch

import benchmarks  # noqa: F401, which puts src on the path
from evidence import results


class Outcomes:
    """Counts outcomes by file, as pytest reports them, and prints a failure at once: a run may be cut off."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.counts.setdefault(report.location[0], Counter())[report.outcome] += 1
        if report.failed:
            print(f"\n{report.nodeid}: {report.longreprtext[-1000:]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    args = results.parse(parser)
    outcomes, start = Outcomes(), time.time()
    # They compile most of the time. The longest tests need 10 GiB each.
    room = sum(torch.cuda.get_device_properties(i).total_memory >> 30 for i in range(torch.cuda.device_count())) // 10
    workers = str(max(1, min(os.cpu_count() or 1, 12 * torch.cuda.device_count(), room)))
    # A test that takes three minutes says where it is: one that waits, or compiles for minutes, shows in no other way.
    waiting = ["-o", "faulthandler_timeout=180", "--durations=8"]
    code = pytest.main(
        ["tests/gpu", "-m", "gpu", "-q", "-n", workers, "-p", "no:cacheprovider", "--show-capture=no", *waiting],
        plugins=[outcomes],
    )
    rows = [{"case": file, "impl": "fp8attn", **counts} for file, counts in sorted(outcomes.counts.items())]
    rows.append({"case": "all", "impl": "fp8attn", "exit": int(code), "seconds": round(time.time() - start)})
    if args.save:
        results.save("tests", rows)
    sys.exit(int(code))


if __name__ == "__main__":
    main()
