"""The tables of README.md and docs/ agree with the results."""

import pytest

from evidence.rows import over_bf16, ratio
from evidence.tables import FILES, filled


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_tables_are_those_of_the_results(file):
    assert filled(file.read_text()) == file.read_text(), "run python -m evidence.tables"


def test_ratios_are_of_rows_timed_together():
    ours = {"case": "a", "impl": "fp8attn-graph", "ms": 2.0, "provenance": "1", "timed": "graph"}
    theirs = ours | {"impl": "fa3-bf16", "ms": 3.0}
    called = ours | {"impl": "fp8attn", "ms": 1.0, "timed": "called"}
    found = {("a", row["impl"]): row for row in (ours, theirs, called)}
    assert over_bf16(found, "a", "fp8attn") == 1.5
    del found["a", "fp8attn-graph"]
    assert over_bf16(found, "a", "fp8attn") is None  # called, and timed apart
    assert ratio(ours, theirs | {"provenance": "2"}) is None and ratio(ours, None) is None
