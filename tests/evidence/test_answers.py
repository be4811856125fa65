"""Which answers to needles are kept, and how the answers of several runs are merged."""

import json

import pytest

pytest.importorskip("transformers")

from evidence import answers
from fp8attn_tools.evaluation.outcomes import Outcome, load_outcomes, save_outcomes

MACHINE = {"device": "H"}


@pytest.fixture
def codes(monkeypatch):
    """The fingerprints of the implementations' code, by name. A test changes one to simulate other code."""
    codes = {}
    monkeypatch.setattr(answers, "of_row", lambda name, impl: codes.get(impl, "tree:1"))
    return codes


def about(names, command="run", **changed):
    """The provenances of some implementations."""
    one = {"torch": "2", "triton": "3", "date": "2026-01-01", "commit": "c", "command": command, "code": "tree:0"}
    return {name: one | {"fingerprint": answers.of_row("needle", name)} | changed for name in names}


class TestWhichAnswersAreKept:
    """There are two answers from an earlier run, and two from a run that was killed."""

    @pytest.fixture
    def kept(self, tmp_path, codes, monkeypatch):
        """The implementations whose answers are kept, for a machine and the present fingerprints."""
        names = ("bf16", "fp8attn")
        monkeypatch.setattr(answers, "OUTCOMES", tmp_path / "outcomes")
        monkeypatch.setattr(answers.results, "RESULTS", tmp_path)

        def outcomes(index):
            return [Outcome(name, "recall", 600, index, 0.5, ("7",), "7", 1.0) for name in names]

        now = about(names)
        answers.keep(tmp_path / "h", [answers.Answers(tmp_path, MACHINE, now, outcomes(0))])
        save_outcomes(answers.begin(MACHINE, now) / "needle-0.jsonl", outcomes(1))

        def kept(names=names, machine=MACHINE, **changed):
            return [run.names() for run in answers.earlier(machine, about(names, **changed))]

        return kept

    def test_all_of_them(self, kept, capsys):
        assert kept(date="2026-02-02", commit="d", code="tree:2") == [["bf16", "fp8attn"]] * 2 and not capsys.readouterr().out

    def test_of_the_same_code(self, kept, codes, capsys):
        codes["fp8attn"] = "tree:2"
        assert kept() == [["bf16"]] * 2
        assert capsys.readouterr().out.count("has answers of fp8attn of another fingerprint: they are not kept\n") == 2

    @pytest.mark.parametrize("name", ["torch", "triton"])
    def test_of_the_same_releases(self, kept, name, capsys):
        assert kept(**{name: "another"}) == [[], []]
        assert capsys.readouterr().out.count(f"has answers of bf16 of another {name}: they are not kept\n") == 2

    def test_of_implementations_that_there_are(self, kept, monkeypatch, capsys):
        monkeypatch.setattr(answers, "IMPLS", ("bf16",))
        assert kept(("bf16",)) == [["bf16"]] * 2
        what = "has answers of fp8attn of another benchmark (this one has no such implementation): they are not kept\n"
        assert capsys.readouterr().out.count(what) == 2

    def test_of_the_same_machine(self, kept, capsys):
        assert kept(machine={"device": "H", "sms": 1}) == [[], []]
        assert capsys.readouterr().out.count("has answers of bf16 of another machine: they are not kept\n") == 2


class TestMerge:
    """Invented runs: which implementation answered each sample, and whether the answer was right."""

    @pytest.fixture
    def save(self, tmp_path, codes):
        def save(name, given, command="run", machine=MACHINE, **changed):
            """The results of a run. `given` has the answers of implementations to samples 0, 1, ...: True, False, or None for no answer."""
            folder = tmp_path / name
            outcomes = [
                Outcome(impl, "recall", 600, index, 0.5, ("7",), "7" if right else "8", float(right))
                for impl, one in given.items() for index, right in enumerate(one) if right is not None
            ]  # fmt: skip
            provenances = about(given, command, **{"date": f"2026-01-0{len(outcomes)}"} | changed)
            answers.keep(folder, [answers.Answers(folder, machine, provenances, outcomes)])
            return folder

        return save

    def test_numbers_are_those_of_all_answers(self, save, tmp_path):
        a = save("a", {"bf16": [True, True, None, None], "fp8attn": [True]}, "python a")
        b = save("b", {"fp8attn": [True, False, True]}, "python b")
        c = save("c", {"bf16": [None, True, False]}, "python c; python a")
        out = tmp_path / "out"
        answers.merge(out, [a, b, c])
        machine, provenances, (bf16, ours) = json.loads((out / "needle.json").read_text()).values()
        assert machine == MACHINE
        assert {name: (one["command"], one["date"]) for name, one in provenances.items()} == {
            "bf16": ("python a; python c", "2026-01-03"), "fp8attn": ("python a; python b", "2026-01-03")
        }  # fmt: skip
        assert (bf16["case"], bf16["impl"], bf16["samples"], bf16["accuracy"]) == ("recall-S600", "bf16", 3, 2 / 3)
        assert (ours["impl"], ours["samples"], ours["accuracy"]) == ("fp8attn", 3, 2 / 3)
        assert (ours["provenance"], ours["fingerprint"]) == ("fp8attn", "tree:1")
        assert (ours["paired"], ours["lost"], ours["won"], ours["discordant"]) == (3, 1, 1, [1, 2])
        kept = load_outcomes(out / "needle.jsonl.xz")
        asked = [("bf16", 0), ("bf16", 1), ("fp8attn", 0), ("fp8attn", 1), ("fp8attn", 2), ("bf16", 2)]
        assert [(o.cache, o.index) for o in kept] == asked

    def test_who_shares_no_sample_with_bf16_is_not_compared(self, save):
        rows = json.loads((save("a", {"bf16": [True], "fp8attn": [None, False]}) / "needle.json").read_text())["rows"]
        assert [(row["samples"], row["accuracy"], "paired" in row) for row in rows] == [(1, 1.0, False), (1, 0.0, False)]

    def test_runs_that_are_not_of_one_kind(self, save, tmp_path, codes):
        a, out = save("a", {"bf16": [True, True]}), tmp_path / "out"
        with pytest.raises(ValueError, match=r"bf16 on sample 1 of recall at 600 answers '8' in .*b and '7' in .*a: leave one of the runs"):
            answers.merge(out, [a, save("b", {"bf16": [None, False]})])
        for other, changed in {
            "fingerprint": {"fingerprint": "tree:0"}, "triton": {"triton": "4"}, "machine": {"machine": {"device": "L"}}
        }.items():  # fmt: skip
            with pytest.raises(ValueError, match=f"b has answers of bf16 of another {other} than this checkout and .*a: leave it out"):
                answers.merge(out, [a, save("b", {"bf16": [True]}, **changed)])
        with pytest.raises(ValueError, match=r"nothing has no needle.json: name the folder of a run's results"):
            answers.merge(out, [tmp_path / "nothing"])
        (a / "needle.jsonl.xz").unlink()
        with pytest.raises(ValueError, match=r"a has no needle.jsonl.xz: name the folder of a run's results"):
            answers.merge(out, [a])
        assert not out.exists()

    def test_older_kernels_of_ours_do_not_matter_to_a_run_of_others(self, save, tmp_path, codes):
        peers = save("peers", {"bf16": [True, True]})
        codes["fp8attn"] = "tree:2"
        answers.merge(tmp_path / "out", [peers, save("ours", {"fp8attn": [True, False]})])
        machine, provenances, rows = json.loads((tmp_path / "out/needle.json").read_text()).values()
        assert [(row["impl"], row["samples"], row["fingerprint"]) for row in rows] == [("bf16", 2, "tree:1"), ("fp8attn", 2, "tree:2")]
        assert rows[1]["paired"] == 2
        answers.merge(tmp_path / "out", [tmp_path / "out"])  # counts again
        assert list(json.loads((tmp_path / "out/needle.json").read_text()).values()) == [machine, provenances, rows]
