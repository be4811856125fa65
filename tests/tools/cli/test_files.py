"""What a command writes: complete files, or none."""

import os
import stat

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")


from typer.testing import CliRunner

from fp8attn import UsageError
from fp8attn_tools.cli import plots
from fp8attn_tools.cli.app import app
from fp8attn_tools.cli.shared import output
from fp8attn_tools.evaluation import models, needle
from tests.tools.cli.running import fail, never

COMMANDS = {
    "calibrate --out": ("calibrate", "--out"),
    "needle --plot": ("evaluate", "needle", "--plot"),
    "needle --out": ("evaluate", "needle", "--out"),
    "demo --out": ("demo", "--out"),
    "sensitivity --out": ("sensitivity", "--out"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_that_cannot_be_written_is_found_before_the_run(monkeypatch, capsys, tmp_path, command):
    monkeypatch.setattr(models, "load", never)
    (tmp_path / "file").write_text("before")
    (tmp_path / "folder.png").mkdir()
    wrong = [tmp_path / "file" / "x.png"]
    if command == "demo --out":
        (tmp_path / "folder.png" / "needle.png").mkdir()
    for path in (*wrong, tmp_path / "folder.png"):
        message = fail(monkeypatch, capsys, *COMMANDS[command], path)
        assert message.startswith(f"fp8attn: cannot write {path}")
        assert message.endswith("name a file in a folder that you can write to")
    assert (tmp_path / "file").read_text() == "before"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_that_fails_leaves_files_as_they_were(monkeypatch, capsys, tiny_model, tmp_path, command):
    def fails(*arguments, **options):
        raise UsageError("the run failed")

    monkeypatch.setattr(models, "load", fails)
    for name in ("demo.json", "needle.png", "x.png"):
        (tmp_path / name).write_text("before")
    for path in (tmp_path,) if command == "demo --out" else (tmp_path / "x.png", tmp_path / "y.png"):
        assert fail(monkeypatch, capsys, *COMMANDS[command], path) == "fp8attn: the run failed"
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == dict.fromkeys(
        ("demo.json", "needle.png", "x.png"), "before"
    )


def test_a_run_that_is_interrupted_leaves_no_folder(monkeypatch, tiny_model, tmp_path):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "load", interrupt)
    command = ["evaluate", "needle", "--out", str(tmp_path / "a" / "b"), "--model", str(tiny_model)]
    assert CliRunner().invoke(app, command).exit_code == 130
    assert list(tmp_path.iterdir()) == []


def test_a_length_that_does_not_fit_is_found_before_the_run(monkeypatch, capsys, tiny_model):
    monkeypatch.setattr(needle, "ask", never)
    message = fail(monkeypatch, capsys, "evaluate", "needle", "--model", tiny_model, "--lengths", "600,1000000")
    assert "got 1000000" in message


def test_outcomes_are_saved_though_the_plot_fails(monkeypatch, capsys, tiny_model, tmp_path):
    def fails(*arguments, **options):
        raise UsageError("no plot")

    monkeypatch.setattr(plots, "needle_maps", fails)
    files = ("--out", tmp_path / "outcomes.jsonl", "--plot", tmp_path / "needle.png")
    options = ("--model", tiny_model, "--lengths", "600", "--samples", 1)
    assert fail(monkeypatch, capsys, "evaluate", "needle", *files, *options) == "fp8attn: no plot"
    assert [file.name for file in tmp_path.iterdir()] == ["outcomes.jsonl"]
    assert len((tmp_path / "outcomes.jsonl").read_text().splitlines()) == 2 * 5


def test_output(tmp_path):
    path = tmp_path / "a" / "b.txt"
    write = output(path)
    assert not (tmp_path / "a").exists()  # until there is something to write
    seen = []
    write(lambda draft: (seen.append(draft.suffix), draft.write_text("first")))
    assert (seen, path.read_text(), list(path.parent.iterdir())) == ([".txt"], "first", [path])

    def fails(draft):
        draft.write_text("half")
        raise ValueError("disk full")

    with pytest.raises(ValueError, match="disk full"):
        output(path)(fails)
    assert (path.read_text(), list(path.parent.iterdir())) == ("first", [path])

    path.chmod(0o640)
    link = tmp_path / "link.txt"
    link.symlink_to(path)
    output(link)(lambda draft: draft.write_text("second"))
    assert link.is_symlink() and path.read_text() == "second" and stat.S_IMODE(path.stat().st_mode) == 0o640

    output(None)(never)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_a_pipe_is_written_in_place(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    seen = []
    output(pipe)(seen.append)
    assert seen == [pipe] and stat.S_ISFIFO(pipe.stat().st_mode)
