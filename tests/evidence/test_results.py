"""The contents of results files, and how rows are added."""

import argparse
import json
import re
import subprocess
import sys

import pytest

from evidence import results
from evidence.results import ROOT

FOUND = sorted((ROOT / "results").rglob("*.json"))


@pytest.mark.parametrize("file", FOUND, ids=lambda file: str(file.relative_to(ROOT)))
def test_rows_say_where_they_are_from(file):
    held = json.loads(file.read_text())
    assert results.slug(held["device"]) == file.parent.name and {
        "commit",
        "date",
        "torch",
        "command",
    } <= held.keys() <= {
        *results.HEADER,
        "rows",
    }
    assert held["rows"] and len({(row["case"], row["impl"]) for row in held["rows"]}) == len(held["rows"])
    assert all(
        re.fullmatch(r"python( -m)? [\w./]+( [\w.,:+=/-]+)*", command) for command in held["command"].split("; ")
    )
    names = {row["case"] for row in held["rows"]} | {row["impl"] for row in held["rows"]}
    assert all({*mixed} <= names for mixed in held.get("mixed", {}).values())


@pytest.mark.parametrize(
    ("device", "folder"),
    [
        ("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"), ("cpu", "cpu"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4"), ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"),
    ],
)  # fmt: skip
def test_a_device_has_a_folder(device, folder):
    assert results.slug(device) == folder


def test_a_file_is_written_whole_with_one_header(tmp_path, monkeypatch):
    monkeypatch.setenv("FP8ATTN_COMMIT", "abc1234")
    results.commit.cache_clear()
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "benchmarks.set"])
    for ms in (1.0, 2.0):
        path = results.save("decode", [{"case": "a", "impl": "ours", "ms": ms}], {"fa3": "fa3-fwd 0.0.3"}, tmp_path)
    held = json.loads(path.read_text())
    assert held["rows"] == [{"case": "a", "impl": "ours", "ms": 2.0}]
    assert (held["commit"], held["command"], held["peers"]) == (
        "abc1234",
        "python -m benchmarks.set",
        {"fa3": "fa3-fwd 0.0.3"},
    )
    results.commit.cache_clear()


def test_cases_are_added_with_their_commit(tmp_path, monkeypatch):
    row = lambda case: {"case": case, "impl": "ours"}  # noqa: E731

    def add(commit, *cases):
        monkeypatch.setenv("FP8ATTN_COMMIT", commit)
        monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "benchmarks.run", "x", *cases])
        results.commit.cache_clear()
        return json.loads(results.add("x", [row(case) for case in cases], {commit: "1.0"}, tmp_path).read_text())

    held = add("aaa", "a")  # there is no file yet
    assert held["commit"] == "aaa" and "mixed" not in held
    assert "mixed" not in add("aaa", "b")
    add("bbb", "d", "c")
    held = add("bbb", "e")
    assert held["rows"] == [row(case) for case in "abdce"]
    assert (held["commit"], held["mixed"], held["peers"]) == (
        "aaa",
        {"bbb": ["c", "d", "e"]},
        {"aaa": "1.0", "bbb": "1.0"},
    )
    assert held["command"] == "; ".join(f"python -m benchmarks.run x {cases}" for cases in ("a", "b", "d c", "e"))
    with pytest.raises(ValueError, match=r"x\.json has c: measure other cases"):
        add("ccc", "c", "f")
    (path,) = tmp_path.rglob("x.json")
    path.write_text(json.dumps(held | {"torch": "1.0"}))
    with pytest.raises(ValueError, match=r"have torch 1.0, and the new ones .*: measure the file whole"):
        add("ccc", "f")
    results.commit.cache_clear()


def test_rows_are_kept_on_request_and_with_their_commit(monkeypatch):
    parse = lambda *arguments: results.parse(argparse.ArgumentParser(), arguments)  # noqa: E731
    assert not parse().save
    monkeypatch.setenv("FP8ATTN_COMMIT", "abc1234")
    results.commit.cache_clear()
    assert parse("--save").save and results.header({})["commit"] == "abc1234"
    monkeypatch.delenv("FP8ATTN_COMMIT")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: (_ for _ in ()).throw(OSError))  # no git
    results.commit.cache_clear()
    with pytest.raises(SystemExit, match="set FP8ATTN_COMMIT"):
        parse("--save")
    results.commit.cache_clear()
