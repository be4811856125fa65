"""Runs the command line in this process."""

import json
import sys

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")

from typer.testing import CliRunner

from fp8attn_tools import cli
from fp8attn_tools.cli.app import app


def run(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def run_json(*arguments):
    return json.loads(run(*arguments, "--json"))


def fail(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["fp8attn", *(str(a) for a in arguments)])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    lines = capsys.readouterr().err.splitlines()  # before the last, transformers' progress
    assert lines[-1].startswith("fp8attn: ")
    return lines[-1]


def never(*arguments, **options):
    raise AssertionError("the run began")
