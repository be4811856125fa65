"""The contents of results files, and how rows are added."""

import argparse
import json
import re
import subprocess
import sys

import pytest

from evidence import results
from evidence.fingerprint import ROOT
from evidence.rows import ratio

FOUND = sorted((ROOT / "results").rglob("*.json"))


@pytest.mark.parametrize("file", FOUND, ids=lambda file: str(file.relative_to(ROOT)))
def test_rows_say_where_they_are_from(file):
    held = json.loads(file.read_text())
    assert results.slug(held["meta"]["device"]) == file.parent.name
    assert held["rows"] and len({results.key(row) for row in held["rows"]}) == len(held["rows"])
    assert {row["provenance"] for row in held["rows"]} == set(held["provenance"])
    assert all({"torch", "triton", "date", "commit", "command"} <= set(one) for one in held["provenance"].values())
    commands = [command for one in held["provenance"].values() for command in one["command"].split("; ")]
    assert all(re.fullmatch(r"python( -m)? [\w./]+( [\w.,:+=/-]+)*", command) for command in commands), (
        "commands that can be run, no remarks"
    )
    marked = [row for row in held["rows"] if "fingerprint" in row]
    assert all(re.match(r"(launches|tree|peer):", row["fingerprint"]) for row in marked)
    assert all("code" in held["provenance"][row["provenance"]] for row in marked)


@pytest.mark.parametrize(
    ("device", "folder"),
    [
        ("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"), ("cpu", "cpu"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4"), ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"),
    ],
)  # fmt: skip
def test_a_device_has_a_folder(device, folder):
    assert results.slug(device) == folder


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """Save rows on a device, as one of several commands. Returns the contents of the file."""
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")

    def saved(rows, device="NVIDIA H200", command="python a"):
        monkeypatch.setattr(results, "meta", lambda: {"device": device})
        monkeypatch.setattr(sys, "orig_argv", command.split())
        return json.loads(results.save("decode", [{"fingerprint": "peer:x"} | row for row in rows]).read_text())

    return saved


def test_rows_of_other_cases_stay(saved):
    saved([{"case": case, "impl": impl, "ms": 1} for case in "ab" for impl in ("ours", "theirs")])
    held = saved([{"case": "b", "impl": "ours", "ms": 2}, {"case": "c", "impl": "ours", "ms": 3}], command="python b")
    assert [(row["case"], row["impl"], row["ms"]) for row in held["rows"]] == [
        ("a", "ours", 1), ("a", "theirs", 1), ("b", "ours", 2), ("b", "theirs", 1), ("c", "ours", 3),
    ]  # fmt: skip
    commands = [held["provenance"][row["provenance"]]["command"] for row in held["rows"]]
    assert commands == ["python a", "python a", "python b", "python a", "python b"]
    ours, theirs = held["rows"][2:4]
    assert ratio(ours, theirs) is None  # they were not timed together
    again = saved([{"case": case, "impl": impl, "ms": 4} for case in "abc" for impl in ("ours", "theirs")], command="python c")
    assert [one["command"] for one in again["provenance"].values()] == ["python c"]


def test_a_file_of_another_device_is_refused(saved, tmp_path):
    saved([{"case": "a", "impl": "ours"}], device="NVIDIA H100 80GB HBM3")
    assert (tmp_path / "results/h100/decode.json").exists()
    saved([{"case": "a", "impl": "ours"}], device="NVIDIA H200")  # has a folder of its own
    file = tmp_path / "results/h200/decode.json"
    file.write_text(file.read_text().replace("NVIDIA H200", "NVIDIA H200 NVL"))
    before = file.read_text()
    with pytest.raises(SystemExit, match=r"holds rows of .*NVIDIA H200 NVL.*, this is .*NVIDIA H200'.*: move that file away"):
        saved([{"case": "b", "impl": "ours"}])
    assert file.read_text() == before


def test_rows_are_kept_on_request_and_with_their_commit(monkeypatch):
    parser = argparse.ArgumentParser()
    results.add_save(parser)
    assert not results.parse(parser, []).save
    monkeypatch.setenv("FP8ATTN_COMMIT", "abc1234")
    results.commit.cache_clear()
    assert results.parse(parser, ["--save"]).save and results.provenance("decode")["commit"] == "abc1234"
    monkeypatch.delenv("FP8ATTN_COMMIT")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: (_ for _ in ()).throw(OSError))  # no git
    results.commit.cache_clear()
    with pytest.raises(SystemExit, match="set FP8ATTN_COMMIT, or leave out --save"):
        results.parse(parser, ["--save"])
    results.commit.cache_clear()
