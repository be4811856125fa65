"""Two revisions that run alternately, each in its own process."""

import subprocess

import pytest
import torch

from evidence import revisions
from evidence.beside import Beside


def test_a_call_that_hangs_or_fails_is_left_behind():
    ask = Beside(subprocess.call, 60)
    assert ask(["true"]) == 0
    ask.seconds = 0.2
    assert ask(["sleep", "1"]) is None
    ask.seconds = 60
    assert ask(["false"]) == 1
    assert ask(["/no/such/program"]) is None
    ask.end()


def test_a_ratio_and_its_interval():
    assert revisions.median_and_interval([float(n) for n in range(24)]) == (11.5, 6.0, 17.0)
    assert revisions.median_and_interval([2.0, 1.0]) == (1.5, 1.0, 2.0)


def test_outputs_of_two_revisions_are_compared():
    assert revisions.sampled(None) is None and revisions.sampled(torch.tensor([[1.0, torch.nan]])) == [1.0, 0.0]
    assert len(revisions.sampled(torch.zeros(revisions.SAMPLED * 2 + 3))) == revisions.SAMPLED + 2
    assert revisions.difference([1.0, 2.0], [1.0, 2.0]) == "  equal outputs" and revisions.difference(None, [1.0]) == ""
    assert revisions.difference([3.0, 4.5], [3.0, 4.0]) == "  outputs differ by 1.0e-01"


def test_the_base_is_a_folder_or_a_revision(tmp_path):
    (tmp_path / "old/src/fp8attn").mkdir(parents=True)
    assert revisions.source(str(tmp_path / "old"), "") == tmp_path / "old/src"
    with pytest.raises(SystemExit, match="--base takes a git revision, or a folder that holds src/fp8attn, and not 'nonsense'"):
        revisions.source("nonsense", str(tmp_path))


def test_a_base_that_does_not_fit_is_refused():
    sides = {"now": lambda *case: {"fp8attn": None}, "base": lambda *case: "ImportError: no name attention"}
    with pytest.raises(SystemExit, match="B1: HEAD~900 does not fit the benchmark decode as it is now: ImportError: no name attention"):
        revisions.compare_case("decode", "B1", sides, "HEAD~900")


def test_a_base_has_its_own_src(tmp_path, monkeypatch):
    (tmp_path / "fp8attn").mkdir()
    (tmp_path / "fp8attn/__init__.py").write_text("")
    monkeypatch.setenv("FP8ATTN_SRC", str(tmp_path))
    side = Beside(revisions.serve, 120)
    assert side() == "ready"
    assert side("decode", "B1-S8192") == "ModuleNotFoundError: No module named 'fp8attn.kernels'"
    side.end()


def test_two_revisions_take_turns(capsys):
    ms = {"now": 2.0, "base": 3.0}
    sides = {side: lambda *case, side=side: {"fp8attn": [1.0] if case else ms[side]} for side in ms}
    revisions.compare_case("decode", "B1", sides, "HEAD~1")
    assert "now 2.00000 ms  base 3.00000 ms  base/now 1.5000 [1.5000, 1.5000]  equal outputs" in capsys.readouterr().out
