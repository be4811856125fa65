"""Conditions that the committed results must satisfy."""

import json
import re

import pytest

from benchmarks.problem import KEYS
from evidence.results import ROOT
from evidence.tables.kernels import PREFILL_IMPLS


def measured(name: str) -> list:
    return [
        pytest.param(json.loads(file.read_text())["rows"], id=file.parent.name)
        for file in sorted((ROOT / "results").rglob(f"{name}.json"))
    ]


def test_the_files_of_an_h200_are_of_the_commit_that_the_page_names():
    """All rows of ours, but for latent attention, which came later, and the times of ours beside a system that was
    added: such commits are on the page, too."""
    text = (ROOT / "docs/results.md").read_text()
    [commit] = re.findall(
        r"\*\*Of one commit\.\*\* Every file of `results/h200` was measured on .* at one commit, (\w+),", text
    )
    added = re.findall(r" (?:was|were) added at (\w+)", text)
    files = {file.stem: json.loads(file.read_text()) for file in (ROOT / "results/h200").glob("*.json")}
    of_latents = [files.pop(name) for name in sorted(files) if name.startswith("latent")]
    later = {commit for file in of_latents for commit in (file["commit"], *file.get("mixed", {}))}
    assert later and all(commit in text for commit in later)
    files = [*files.values()]
    assert files and {file["commit"] for file in files} == {commit}
    assert {other for file in files for other in file.get("mixed", {})} == {*added}
    for file in files:
        theirs = {name for names in file.get("mixed", {}).values() for name in names}
        impls = {row["impl"] for row in file["rows"]}
        assert all(
            not name.startswith("fp8attn") if name in impls else name.startswith(("llama_per_token-", "qwen15b-"))
            for name in theirs
        )


def test_the_files_of_an_h100_are_of_one_commit():
    files = [json.loads(file.read_text()) for file in (ROOT / "results/h100").glob("*.json")]
    assert len({file["commit"] for file in files}) == 1 and not any(file.get("mixed") for file in files)


@pytest.mark.parametrize("rows", measured("tests"))
def test_the_gpu_tests_passed(rows):
    assert [row["exit"] for row in rows if row["case"] == "all"] == [0]
    assert sum(row.get("passed", 0) for row in rows) > 0 and not any(row.get("failed") for row in rows)


@pytest.mark.parametrize("rows", measured("decode"))
def test_decode_is_exact(rows):
    """Rotated queries over E4M3 keys are rounded to FP16, 2^-12 of each number: 3.9e-4 to 6.8e-4 on an H200, by the
    draw of a query and the scales of its keys. Over INT8 keys they have 15 bits of a row's largest."""
    errors = {impl: [row["rel_err"] for row in rows if row["impl"] == impl] for impl in KEYS}
    assert errors["fp8attn"] and max(errors.pop("fp8attn")) <= 5e-4, rows
    assert all(error <= 7.5e-4 for found in errors.values() for error in found), errors


@pytest.mark.parametrize("rows", measured("prefill"))
def test_prefill_does_not_lose_its_sums(rows):
    """The error is at most 0.3% for V of mean 1."""
    errors = {(row["case"], row["impl"]): row["rel_err_mean1"] for row in rows if row["impl"] in PREFILL_IMPLS}
    assert errors and max(errors.values()) <= 3e-3, errors


@pytest.mark.parametrize("rows", measured("accuracy"))
def test_accuracy_does_not_depend_on_length(rows):
    decode = [row["rel_err"] for row in rows if row["impl"] in KEYS and row["case"].startswith("decode-mean")]
    prefill = {
        (row["case"], row["impl"]): row["rel_err"]
        for row in rows
        if row["impl"] in PREFILL_IMPLS and row["case"].startswith(("causal-mean1", "full-mean1"))
    }
    assert len(decode) >= 48 and max(decode) <= 5e-4
    assert len(prefill) > 48 and max(prefill.values()) <= 3e-3, prefill


@pytest.mark.parametrize("rows", measured("accumulation"))
def test_our_sums_lose_nothing(rows):
    errors = [row["rel_err"] for row in rows if row["impl"].startswith("fp8attn")]
    assert len(errors) >= 8 and max(errors) <= 3e-3
