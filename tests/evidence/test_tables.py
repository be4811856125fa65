"""The tables of README.md and docs/ agree with the results."""

import pytest

from evidence import rows as reading
from evidence.rows import commit_of, over
from evidence.tables import BLOCKS, FILES, filled, writing


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_tables_are_those_of_the_results(file):
    assert filled(file.read_text()) == file.read_text(), "run python -m evidence.tables"


def test_a_block_names_the_triton_of_its_file(monkeypatch):
    head = {"device": "NVIDIA H200", "torch": "2.11.0+cu130", "triton": "3.9.0", "commit": "abc", "date": "2026-11-24"}
    monkeypatch.setattr(writing, "header", lambda name, **options: head)
    assert writing.measured("prefill") == "H200, torch 2.11.0, Triton 3.9.0, commit abc of 2026-11-24"
    assert writing.at("prefill", [{"case": "a", "impl": "b"}]) == "abc (3.9.0)"


def test_rows_of_a_mixed_file_have_their_commits():
    head = {"commit": "new", "mixed": {"old": ["a"], "older": ["bf16"]}}
    rows = [{"case": case, "impl": impl} for case, impl in (("a", "fp8attn"), ("b", "bf16"), ("b", "fp8attn"))]
    assert [commit_of(head, row) for row in rows] == ["old", "older", "new"]


def test_what_is_not_measured_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(reading, "RESULTS", tmp_path)
    assert {make() for name, make in BLOCKS.items() if name == "accumulation"} == {"(not measured yet: `accumulation`)"}


def test_ratios_are_of_rows_of_one_case():
    found = {
        ("a", impl): {"case": "a", "impl": impl, "ms": ms}
        for impl, ms in (("fp8attn", 2.0), ("fa3-bf16", 3.0), ("cudnn-bf16", 5.0))
    }
    assert over(found, "a", "fp8attn", "fa3-bf16", "cudnn-bf16", "torchao") == 1.5
    assert over(found, "a", "fp8attn", "torchao") is None and over(found, "a", "torchao", "fa3-bf16") is None
