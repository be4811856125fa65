"""The tables of README.md and docs/ agree with the results."""

import pytest

from evidence.fingerprint import ROOT
from evidence.rows import latest, measured, over_bf16, ratio
from evidence.tables import FILES, filled, retrieval, vllm


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_tables_are_those_of_the_results(file):
    assert filled(file.read_text()) == file.read_text(), "run python -m evidence.tables"


def test_measurements_say_of_which_device_and_commit_they_are():
    """Beside the tables of the accumulation, the sanitizer and the portable kernels, whose text named another device or none."""
    for name, page in (("accumulation", "results"), ("sanitize", "kernels"), ("portable", "kernels")):
        title, found = latest(name)
        assert measured(name).startswith(f"{title}, commit ")
        assert ("keys were E4M3 and not rotated" in measured(name)) == any("fingerprint" not in row for row in found.values())
        assert measured(name) in (ROOT / f"docs/{page}.md").read_text()


def test_tasks_that_were_not_asked_leave_no_table(monkeypatch):
    answered = {"accuracy": 0.5, "samples": 100}
    found = {("niah_single_1-S4096", "bf16"): answered, ("ruler_vt-S4096", "bf16"): answered}
    monkeypatch.setattr(retrieval, "latest", lambda name: ("H200", found))
    page = "<!-- results: other-tasks -->\n\n<!-- /results -->"
    assert filled(page) == page
    found["ruler_vt-S4096", "fp8attn"] = answered | {"accuracy": 0.49}
    lines = filled(page).splitlines()
    assert lines[0] == "<!-- results: other-tasks -->" and lines[-2:] == [
        "",
        "<!-- /results -->",
    ]  # Markdown's tables end with an empty line
    assert "| `ruler_vt`, 4,096 | 50 (100) | 49 (100) |" in lines and not any("niah_single_1" in line for line in lines)


def test_ratios_are_of_rows_timed_together():
    ours = {"case": "a", "impl": "fp8attn-graph", "ms": 2.0, "provenance": "1", "timed": "graph"}
    theirs = ours | {"impl": "fa3-bf16", "ms": 3.0}
    called = ours | {"impl": "fp8attn", "ms": 1.0, "timed": "called"}
    found = {("a", row["impl"]): row for row in (ours, theirs, called)}
    assert over_bf16(found, "a", "fp8attn") == 1.5
    del found["a", "fp8attn-graph"]
    assert over_bf16(found, "a", "fp8attn") is None  # called, and timed apart
    assert ratio(ours, theirs | {"provenance": "2"}) is None and ratio(ours, None) is None


def engines(provenance: str) -> dict:
    """Rows of two engines of vLLM, of which `vllm-fp8` is of the run `1`."""
    rows = ({"case": "throughput", "impl": impl, "tokens_per_s": 100 * n} for n, impl in enumerate(("vllm-fp8", "fp8attn"), 1))
    return {("throughput", row["impl"]): row | {"provenance": "1" if row["impl"] == "vllm-fp8" else provenance} for row in rows}


@pytest.mark.parametrize(
    ("provenance", "ratio", "said"),
    [
        ("1", "2.000", "One run measured all rows of a case."),
        ("2", "", "`throughput` (H200) is of several runs, so it has no ratio: vLLM's FP8 at commit aaa, fp8attn at commit bbb."),
    ],
)
def test_rows_of_several_runs_are_named_and_have_no_ratio(monkeypatch, provenance, ratio, said):
    found = engines(provenance)
    monkeypatch.setattr(vllm, "devices", lambda name, cpus=False: {"H200": found})
    monkeypatch.setattr(vllm, "commits", lambda name: {"1": "aaa", "2": "bbb"})
    assert vllm.more(found, "throughput", "tokens_per_s") == ratio
    assert vllm.vllm_runs() == said


def test_a_table_of_engines_has_only_what_was_measured(monkeypatch):
    row = {"case": "equal-tp2", "impl": "fp8attn", "equal": 19, "prompts": 20, "provenance": "1"}
    worst = row | {"case": "equal-chunks", "equal": 12}
    found = {(each["case"], each["impl"]): each for each in (row, worst, worst | {"impl": "vllm-bf16", "equal": 17})}
    monkeypatch.setattr(vllm, "devices", lambda name, cpus=False: {"H200": found})
    lines = vllm.vllm_equal().splitlines()[2:]
    assert lines == [
        "| H200 | prompts in chunks of 256 tokens | 17 of 20 | 12 of 20 |",  # the fewest first
        "| H200 | tensor parallel, 2 processes | | 19 of 20 |",
    ]
    assert len(vllm.vllm_perplexity().splitlines()) == 2  # a head without lines
