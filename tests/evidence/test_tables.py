"""The tables of README.md and docs/ agree with the results."""

import pytest

from evidence import rows as reading
from evidence.rows import commit_of, over
from evidence.tables import BLOCKS, FILES, behind, filled, writing


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


def test_where_a_peer_is_ahead(monkeypatch):
    """In speed by half a percent and more, and in errors by a tenth and more."""
    times = {"a": (2.0, 1.0, 3.0), "b": (2.0, 2.0, 1.5), "c": (1.0, 2.0, 0.999)}
    errors = {"a": (0.02, 0.01), "b": (0.02, 0.019), "c": (0.02, 0.03)}
    found = {
        (case, impl): {"case": case, "impl": impl, "ms": ms, "rel_err": error}
        for case in times
        for impl, ms, error in zip(("fp8attn", "fa3-fp8", "cudnn-fp8"), times[case], (*errors[case], 1.0), strict=True)
    }
    monkeypatch.setattr(behind, "latest", lambda name: ("H200", found if name == "prefill" else {}))
    assert [line.split(" | ")[1:] for line in behind.ahead().splitlines()[2:]] == [
        ["a", "FA3 FP8 0.50 |"],
        ["b", "cuDNN FP8 0.75 |"],
    ]
    assert [line.split(" | ")[1:] for line in behind.behind().splitlines()[2:]] == [
        ["FA3 FP8", "0.50 to 2.00", "1 of 3 |"],
        ["cuDNN FP8", "0.75 to 1.50", "1 of 3 |"],
    ]
    assert [line.split(" | ")[1:] for line in behind.more_exact().splitlines()[2:]] == [
        ["FA3 FP8", "2.00%", "1.00% to 3.00%", "1 of 3 |"]
    ]
