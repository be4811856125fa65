"""What was measured belongs to the sources as they are."""

import json
from pathlib import Path

import pytest

from benchmarks.results import ROOT, hashes

FILES = sorted((ROOT / "results").rglob("*.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_results_are_of_these_sources(file: Path):
    results = json.loads(file.read_text())
    assert {"device", "torch", "triton", "date", "command", "sources"} <= set(results["meta"])
    assert results["rows"] and all("case" in row for row in results["rows"])
    sources = results["meta"]["sources"]
    now = hashes(path for path in sources if (ROOT / path).exists())
    stale = [path for path, digest in sources.items() if now.get(path) != digest]
    assert not stale, f"{stale} changed after {file.relative_to(ROOT)} was measured: run `{results['meta']['command']}` on the GPU again"


def test_the_gpu_tests_passed():
    rows = json.loads((ROOT / "results/h100/tests.json").read_text())["rows"]
    assert [row["exit"] for row in rows if row["case"] == "all"] == [0]
    assert sum(row.get("passed", 0) for row in rows) > 0 and not any(row.get("failed") for row in rows)
