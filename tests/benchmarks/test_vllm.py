"""The benchmark of vLLM's engines, with engines that answer at once. The tables are made of what it keeps."""

from typing import ClassVar

import pytest

from benchmarks import run, vllm
from benchmarks.vllm_models import MODELS
from evidence import results
from evidence import rows as reading
from evidence.tables.vllm import label, vllm_times

MS = {"vllm-bf16": 9.0, "vllm-fp8": 8.0, "fp8attn": 6.0}
PER_TOKEN_MS = {"vllm-int8-per-token-head": 18.0, "vllm-fp8-per-token-head": 12.0, "vllm-int4-per-token-head": 3.0}


class Engine:
    """Answers as a process of `vllm_engine.serve`, whose first request names its implementation."""

    asked: ClassVar[list] = []  # of all engines
    nats: ClassVar = {"vllm-bf16": 0.0, "vllm-fp8": 0.2, "fp8attn": 0.1}

    # Of a request that is alone, and of the same one among others: tokens, each with the likeliest of its step.
    alone: ClassVar = {
        "vllm-bf16": ([(1, {1: -1.0}), (2, {2: -1.0, 3: -2.0}), (2, {2: -1.0})],) * 2,
        "vllm-flashmla": ([(1, {1: -1.0}), (2, {2: -1.25, 3: -2.25}), (2, {2: -1.25})],) * 2,
        "fp8attn": (
            [(1, {1: -9.0}), (2, {2: -1.5, 4: -3.0}), (2, {2: -1.25})],
            [(1, {1: -1.0}), (4, {2: -2.0}), (2, {2: -9.0})],
        ),
        "vllm-flashmla-fp8": ([(1, {1: -1.0}), (3, {2: -2.0, 3: -2.0}), (2, {2: -7.0})],) * 2,
    }

    def __init__(self, function, seconds):
        self.impl = None

    def __call__(self, request, *arguments):
        if request == "start":
            self.impl = arguments[1]
        self.asked.append((self.impl, request, *arguments))
        ms = (MS | PER_TOKEN_MS).get(self.impl)
        answers = {
            "check": ([-1.0 - self.nats.get(self.impl, 0.3)] * 4, [1, 2, 3 + (self.impl == "vllm-fp8")]), "prompt": ms,
            "steps": [ms] * 15, "alone and among": self.alone.get(self.impl),
            "again": (*self.alone.get(self.impl, ()), 256),
            "profile": {"attention_ms": 1.0},
        }  # fmt: skip
        return answers.get(request, True)

    def end(self):
        self.asked.append((self.impl, "end"))


@pytest.fixture(autouse=True)
def engines(monkeypatch):
    monkeypatch.setattr(vllm, "Beside", Engine)
    monkeypatch.setattr(vllm, "_is_large", lambda: True)
    monkeypatch.setattr(vllm, "releases", lambda: {"vllm": "vllm 0.33.0"})
    monkeypatch.setattr(Engine, "asked", [])
    yield Engine
    vllm.end()


def test_engines_take_turns_and_stay_until_another_model_comes(engines):
    [*_] = vllm.measure("llama-prefill-S8192")
    [*rows] = vllm.measure("llama-decode-B8-S8192")
    assert [(row["impl"], row["ms"], len(row["all_ms"]), row["attention_ms"]) for row in rows] == [
        (impl, MS[impl], 15 * vllm.TURNS, 1.0) for impl in vllm.IMPLS
    ]
    assert sum(asked[1] == "start" for asked in engines.asked) == 3
    turns = [asked[0] for asked in engines.asked if asked[1] == "steps"]
    assert all({*turns[i : i + 3]} == {*MS} for i in range(0, len(turns), 3)) and len(turns) == 3 * vllm.TURNS
    begun = [asked for asked in engines.asked if asked[1] == "begin"]
    assert {asked[2:] for asked in begun} == {(8, 8192, (vllm.TURNS + 3) * vllm.TURN)}
    [*_] = vllm.measure("gemma3-check")
    assert sum(asked[1] == "end" for asked in engines.asked) == 3 + 2  # and the processes that compiled
    assert {asked[2] for asked in engines.asked if asked[1] == "start"} == {"llama", "gemma3"}


def test_wrong_answers_are_not_timed(engines, monkeypatch):
    for nats, said in ((1.5, "is 1.5 nats from BF16"), (float("nan"), "is nan nats"), (0.0, "is 0.0 nats")):
        monkeypatch.setattr(engines, "nats", engines.nats | {"fp8attn": nats})
        with pytest.raises(RuntimeError, match=f"llama fp8attn {said}"):
            [*_] = vllm.measure("llama-decode-B8-S8192")
    assert not any(asked[1] in ("begin", "prompt") for asked in engines.asked)


def test_an_engine_that_ends_is_named(engines, monkeypatch):
    monkeypatch.setattr(engines, "__call__", lambda self, *_: None)
    with pytest.raises(
        RuntimeError, match=r"gave no answer to start within 300 s, or ended: .*vllm-llama-vllm-bf16.log says why"
    ):
        [*_] = vllm.measure("llama-check")
    assert (
        sum(asked[1] == "end" for asked in engines.asked) == 3 + 1
    )  # none holds memory, nor the process that compiled


def test_long_cases_need_a_large_gpu(engines, monkeypatch, capsys):
    monkeypatch.setattr(vllm, "_is_large", lambda: False)
    assert [*vllm.measure("llama-prefill-S131072")] == [*vllm.measure("llama-decode-B4-S32768")] == []
    assert (
        "llama-decode-B4-S32768 is left out: it needs a GPU with 120 GiB" in capsys.readouterr().out
        and not engines.asked
    )
    assert len([*vllm.measure("gemma3-decode-B4-S32768")]) == 3


def test_caches_of_a_scale_a_token_are_measured_beside_ours_on_a_large_gpu(engines, monkeypatch, capsys):
    [*rows] = vllm.measure("llama_per_token-prefill-S2048")
    assert {row["impl"]: row["ms"] for row in rows} == {
        impl: ms for impl, ms in (MS | PER_TOKEN_MS).items() if impl != "vllm-fp8"
    }
    assert {asked[2:4] for asked in engines.asked if asked[1] == "start"} == {("llama", row["impl"]) for row in rows}
    # The room of cases without a long one, and no drafts.
    assert {asked[-2:] for asked in engines.asked if asked[1] == "start"} == {(0, 0)}
    vllm.end()
    engines.asked.clear()
    monkeypatch.setattr(vllm, "_is_large", lambda: False)
    assert not [*vllm.measure("llama_per_token-check")] and not engines.asked
    assert "llama_per_token-check is left out: it needs a GPU with 120 GiB" in capsys.readouterr().out


def test_sequences_with_drafts_live_longer(engines):
    """A step may make a token of each draft, and one more."""
    [*_] = vllm.measure("llama_drafts-decode-B8-S8192")
    assert {asked[-1] for asked in engines.asked if asked[1] == "start"} == {3}
    assert {asked[-1] for asked in engines.asked if asked[1] == "begin"} == {4 * (vllm.TURNS + 3) * vllm.TURN}
    assert not any(case.startswith("llama_drafts-prefill") for case in vllm.CASES)


def test_a_request_is_compared_with_itself_alone(engines):
    """From the second token on, as long as the tokens before are the same, by the likeliest tokens that both have."""
    rows = {row["impl"]: row for row in vllm.measure("mla16-alone-B66-S32768")}
    assert ("vllm-flashmla", "alone and among", 66, 32768) in engines.asked
    found = {impl: (row["nats_from_bf16"], row["nats_from_alone"]) for impl, row in rows.items()}
    assert found == {
        "vllm-bf16": (0.0, 0.0), "vllm-flashmla": (0.25, 0.0), "vllm-flashmla-fp8": (0.5, 0.0), "fp8attn": (0.375, 0.5)
    }  # fmt: skip
    [*hits] = vllm.measure("mla16-hit-S32768")
    assert hits[2] == {
        "case": "mla16-hit-S32768", "impl": "fp8attn", "cached_tokens": 256, "nats_from_bf16": 1.0,
        "nats_from_first": 0.5,
    }  # fmt: skip
    assert {asked[-3:-1] for asked in engines.asked if asked[1] == "start"} == {(66, 131072)}  # sequences, tokens


def test_rows_become_tables(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(reading, "RESULTS", tmp_path)
    assert run.benchmarks()["vllm"].startswith("Prompts and decode steps in vLLM")
    cases = [
        "llama-check",
        "llama-prefill-S2048",
        "llama-decode-B16-S2048",
        "gemma3-decode-B8-S8192",
        "llama_per_token-decode-B8-S8192",
    ]
    found = run.measured("vllm", cases)
    assert found[1] == {"vllm": "vllm 0.33.0"}
    head = results.header(found[1]) | {"device": "NVIDIA H200"}
    results.write(tmp_path / "h200/vllm.json", head, found[0])
    llama, gemma, per_token = vllm_times().split("\n\n")
    assert (
        "| first token, prompt of 2k | 9.00 | 8.00 | 6.00 | 1.50 | 1.33 |" in llama
        and "16 x 2k" in llama
        and "check" not in llama
    )
    assert gemma.startswith("| Gemma 3 12B, half of its layers |") and gemma.count("\n") == 2
    assert per_token.splitlines()[2:] == [
        "| decode step, 8 x 8k | 9.00 | 18.00 | 12.00 | 3.00 | 6.00 | 1.50 | 3.00 | 2.00 | 0.50 |"
    ]


def test_cases_are_named_in_words():
    assert {case.partition("-")[0] for case in vllm.CASES} == {*MODELS, "llama_drafts", "llama_per_token"}
    assert {group.shape for group in vllm.GROUPS.values()} == {*MODELS}
    assert "mla128-alone-B66-S8192" in vllm.CASES and "mla16-decode-B1-S131072" in vllm.CASES
    assert "mla128-alone-B66-S32768" not in vllm.CASES  # its prompts alone would take minutes
    assert "llama_per_token-decode-B8-S8192" in vllm.CASES and "llama_per_token-decode-B4-S32768" not in vllm.CASES
    assert (
        label("prefill-S131072") == "first token, prompt of 128k"
        and label("decode-B1-S131072") == "decode step, 1 x 128k"
    )
