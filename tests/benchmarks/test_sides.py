"""Two sides that alternate, each in its own process."""

import subprocess
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from benchmarks import sides, triton
from benchmarks.beside import Beside


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
    assert sides.median_and_interval([float(n) for n in range(24)]) == (11.5, 6.0, 17.0)
    assert sides.median_and_interval([2.0, 1.0]) == (1.5, 1.0, 2.0)


def test_outputs_of_two_sides_are_compared():
    assert sides.sampled(None) is None and sides.sampled(torch.tensor([[1.0, 2.0]])) == [1.0, 2.0]
    with pytest.raises(AssertionError, match="an output has NaN"):
        sides.sampled(torch.tensor([torch.nan]))
    assert len(sides.sampled(torch.zeros(sides.SAMPLED * 2 + 3))) == sides.SAMPLED + 2
    assert sides.difference([1.0, 2.0], [1.0, 2.0]) == 0 and sides.difference(None, [1.0]) is None
    assert sides.difference([3.0, 4.5], [3.0, 4.0]) == pytest.approx(0.1)


def test_the_base_is_a_folder_or_a_revision(tmp_path):
    (tmp_path / "old/src/fp8attn").mkdir(parents=True)
    assert sides.source(str(tmp_path / "old"), "") == tmp_path / "old/src"
    with pytest.raises(
        SystemExit, match="--base takes a git revision, or a folder that holds src/fp8attn, and not 'nonsense'"
    ):
        sides.source("nonsense", str(tmp_path))


class Side:
    """Answers as a side does."""

    def __init__(self, ms, outs=None):
        self.ms, self.outs = ms, outs or {"fp8attn": [1.0]}

    def __call__(self, request, *arguments):
        return {
            "prepare": self.outs,
            "turn": dict.fromkeys(self.outs, self.ms),
            "versions": ("", "13.4"),
            "ahead": "done",
        }[request]


def test_a_side_that_cannot_prepare_a_case_is_named():
    with pytest.raises(RuntimeError, match="HEAD~900: ImportError: no name attention"):
        sides.prepare({"now": Side(1.0), "HEAD~900": Side(1.0, "ImportError: no name attention")}, "decode", "B1")


def test_a_base_has_its_own_src(tmp_path):
    (tmp_path / "fp8attn").mkdir()
    (tmp_path / "fp8attn/__init__.py").write_text("")
    side = sides.begin(FP8ATTN_SRC=str(tmp_path))
    assert side("ready") == "ready"
    assert side("prepare", "decode", "B1-S8192").startswith("ModuleNotFoundError: No module named 'fp8attn.")
    side.end()


def importable(name):
    return find_spec(name) is not None


def test_a_side_has_its_own_triton(tmp_path, monkeypatch):
    """One with a folder imports from there; the installed one does not, although this process does."""
    (tmp_path / "marked_triton.py").write_text("")
    monkeypatch.setenv("FP8ATTN_TRITON", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sides, "serve", importable)
    for where, found in (("", False), (str(tmp_path), True)):
        side = sides.begin(FP8ATTN_TRITON=where)
        assert side("marked_triton") == found
        side.end()


def test_two_revisions_alternate(capsys):
    sides.print_case("decode", "B1", {"now": Side(2.0), "HEAD~1": Side(3.0)}, "HEAD~1")
    assert "now 2.00000 ms  base 3.00000 ms  base/now 1.5000 [1.5000, 1.5000]  equal outputs" in capsys.readouterr().out


def test_two_tritons_alternate(monkeypatch):
    found = {
        "3.6.0": Side(3.0, {impl: [1.0] for impl in triton.PREFILL}),
        "3.9.0": Side(2.0, {impl: [1.001] for impl in triton.PREFILL}),
    }
    monkeypatch.setattr(triton, "versions", lambda: found)
    triton.start(list(triton.CASES))
    rows = list(triton.measure("prefill D128-causal-S16384"))
    assert [row["impl"] for row in rows[:2]] == ["fp8attn-triton-3.6.0", "fp8attn-triton-3.9.0"] and rows[0][
        "ptxas"
    ] == "13.4"
    assert [row["ms"] for row in rows[:2]] == [3.0, 2.0] and rows[1]["difference"] == pytest.approx(1e-3)
    found["3.9.0"].outs = {impl: [2.0] for impl in triton.PREFILL}
    with pytest.raises(AssertionError, match="outputs of fp8attn differ by"):
        list(triton.measure("prefill D128-causal-S16384"))


def test_every_case_of_two_tritons_exists():
    for case, impls in triton.CASES.items():
        name, inner = case.split()
        assert inner in import_module(f"benchmarks.{name}").CASES and impls
