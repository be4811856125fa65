"""The whole set runs on a CPU: every benchmark on tiny cases, with our kernels replaced by the reference, and timers by
a constant.
"""

import json
import re
import sys
import tarfile
from importlib import import_module

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
pytest.importorskip("transformers")

from benchmarks import (
    accuracy,
    append,
    decode,
    first_token,
    latent,
    latent_step,
    overhead,
    peers,
    prefill,
    problem,
    sdpa,
)
from benchmarks import set as whole
from benchmarks.problem import Shape
from evidence import results
from fp8attn import reference
from fp8attn.latent import attention as over_latents

PROMPT = Shape((130,), (130,), 2, 2, 64, True)
STEP = problem.steps(130, 7, kv_heads=1, dim=64)
TINY = {
    "prefill": {"prompt": PROMPT},
    "decode": {"step": STEP},
    "sdpa": {"causal-S40": problem.square(128, True, 40, q_heads=sdpa.HEADS, kv_heads=sdpa.KV_HEADS)},
    "append": {
        "step-B2": append.Append(2, 1, 130),
        "prompt": append.Append(1, 130),
        "quantize": append.Quantize(130, 2),
    },
    "engine": {"C1k-beside-2": Shape((130, 7, 140), (1, 1, 20), 2, 1, 64, True)},
    "accuracy": dict([accuracy.one("decode", 1, 40), accuracy.one("full", 1, 40)]),
    "accumulation": {"S128": 128},
    "latent": {"step": latent.case(3, 130, 7)},
    "latent_step": {"S130": 130},
    "overhead": ("calls", "model"),
    "first_token": first_token.CASES,
    "real_model": {"stdlib-S4096": import_module("benchmarks.real_model").CASES["stdlib-S4096"]},
    "video": ("clip",),
    "wide": ("step",),
    "needle": ("prompt",),
    "latent_needle": ("prompt",),
    "public_models": ("text",),
}
NAMES = {  # implementations of ours
    "prefill": {*prefill.OURS, "fp8attn-exact"}, "decode": {*problem.KEYS, "stream-ceiling"}, "engine": {"fp8attn"},
    "sdpa": {*problem.KEYS, "fp8attn-rope"}, "accuracy": {*problem.KEYS, "fp8attn-q8"},
    "append": {*problem.KEYS, "ceiling"}, "accumulation": {"fp8attn"},
    "overhead": {"fp8attn", "torch", "bf16-dynamic", "bf16-static", "fp8attn-dynamic", "fp8attn-static"},
    "first_token": {"fp8attn", "fp8attn, again"}, "real_model": {"bf16"},
    "tests": {"fp8attn"}, "video": {"fp8attn"}, "needle": {"fp8attn"}, "latent_needle": {"fp8attn"},
    "public_models": {"fp8attn"}, "wide": {"fp8attn"}, "latent": {"fp8attn"},
    "latent_step": {"dynamic-cache", "fp8attn"},
}  # fmt: skip


@pytest.fixture
def on_a_cpu(monkeypatch, tmp_path):
    """A machine without peers and timers: our kernels are the reference, a graph is its call, and every call takes a
    millisecond.
    """
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(peers, "available", frozenset)
    monkeypatch.setattr(append, "HEADS", 2)  # the interpreter takes a program for each head
    for name in TINY:
        module = import_module(f"benchmarks.{name}")
        monkeypatch.setattr(module, "CASES", TINY[name])
        for attribute, stand_in in {
            "graph_of": lambda call: (call, call()),
            "interleaved": lambda calls, rounds, **options: dict.fromkeys(calls, 1.0),
            "between_reads": lambda call, rounds, **options: 1.0,
        }.items():
            for each in (module, import_module("benchmarks.measure")):
                if hasattr(each, attribute):
                    monkeypatch.setattr(each, attribute, stand_in)
    for kernels, name in ((accuracy.prefill, "prefill"), (accuracy.decode, "decode")):
        monkeypatch.setattr(kernels, f"{name}_attention", reference.attention)
    monkeypatch.setattr(prefill, "attention", reference.attention)
    monkeypatch.setattr(latent.hopper, "latent_decode", over_latents)
    monkeypatch.setattr(decode, "ceilings", lambda case: {"stream-ceiling": lambda: None})
    # What runs in processes of its own, or too long for a test.
    monkeypatch.setattr(
        first_token, "measure", lambda case: iter([{"case": case, "impl": impl} for impl in NAMES["first_token"]])
    )
    for name in ("video", "wide", "needle", "latent_needle", "public_models"):
        monkeypatch.setattr(
            import_module(f"benchmarks.{name}"), "measure", lambda case: iter([{"case": case, "impl": "fp8attn"}])
        )
    monkeypatch.setattr(
        import_module("benchmarks.real_model"), "rows", lambda case, *_, **__: iter([{"case": case, "impl": "bf16"}])
    )
    mean = lambda q, k, v: v.float().mean(2, True).expand_as(q)  # noqa: E731
    monkeypatch.setattr(import_module("benchmarks.accumulation"), "kernels", lambda: {"fp8attn": mean})
    monkeypatch.setattr(overhead, "ops", lambda: {("relu", "torch"): lambda: None, ("launch", "fp8attn"): lambda: None})
    small = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    monkeypatch.setattr(overhead, "SHAPE", overhead.SHAPE | small)
    monkeypatch.setattr(overhead, "PROMPT", 130)
    few = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    monkeypatch.setattr(latent_step, "SHAPE", latent_step.SHAPE | few | {"first_k_dense_replace": 2, "q_lora_rank": 32})
    monkeypatch.setattr(whole, "WANTED", {})
    monkeypatch.setattr(whole, "TEST_COMMAND", [sys.executable, "-c", TESTS, str(tmp_path / "results")])
    monkeypatch.setattr(whole, "Beside", lambda function, seconds: Here(function))
    monkeypatch.setattr(whole, "BESIDE", 1)  # stand-ins are of the whole process
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setenv("FP8ATTN_COMMIT", "abc1234")
    results.commit.cache_clear()
    yield tmp_path
    results.commit.cache_clear()


TESTS = """
import sys
from pathlib import Path
from evidence import results
results.save("tests", [{"case": "all", "impl": "fp8attn", "exit": 0}], folder=Path(sys.argv[1]))
"""


class Here:
    """Calls the function in this process, as `Beside` does in another."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *arguments):
        return self.function(*arguments)

    def end(self):
        pass


def ended(*arguments: str) -> int:
    """The exit status of a call."""
    with pytest.raises(SystemExit) as end:
        whole.main(list(arguments))
    return int(end.value.code)


def rows_of(folder, name: str) -> list[dict]:
    return json.loads((folder / f"results/cpu/{name}.json").read_text())["rows"]


@pytest.mark.slow
def test_a_call_measures_all_parts(on_a_cpu, capsys):
    """Outputs are checked before they are timed; every part runs whole, and every file is in the archive."""
    assert not ended(), capsys.readouterr().out
    with tarfile.open(on_a_cpu / "set.tar") as archive:
        assert {*archive.getnames()} == {f"results/cpu/{part.name}.json" for part in whole.SET}
        for part in whole.SET:
            held = json.load(archive.extractfile(f"results/cpu/{part.name}.json"))
            assert held["commit"] == "abc1234" and {row["impl"] for row in held["rows"]} >= NAMES[part.name], part
            assert part.name == "latent_step" or all(row.get("ms", 1.0) == 1.0 for row in held["rows"])
    whole.main(["--plan"])
    assert capsys.readouterr().out.splitlines()[-2:] == ["0 s expected, in calls of 570 s", "     0 s  compiling"]


def test_a_call_goes_on_where_the_last_one_ended(on_a_cpu, monkeypatch, capsys):
    """A case that fails is named; the next call measures it, and none of the others again. A file of another commit is
    begun anew."""
    measured, broken = [], {"b"}

    def measure(case):
        measured.append(case)
        yield {"case": case, "impl": "fp8attn"}
        if case in broken:
            raise RuntimeError("a kernel is wrong")

    monkeypatch.setattr(decode, "measure", measure)
    monkeypatch.setattr(decode, "CASES", dict.fromkeys("abc", STEP))
    monkeypatch.setattr(whole, "compile_ahead", lambda cases: None)
    assert ended("--only", "decode") and [row["case"] for row in rows_of(on_a_cpu, "decode")] == ["a", "c"]
    said = capsys.readouterr().out
    assert "decode b: RuntimeError: a kernel is wrong" in said and "NOT MEASURED: decode: b: it failed" in said
    broken.clear()
    assert not ended("--only", "decode") and measured == ["a", "b", "c", "b"]
    assert [row["case"] for row in rows_of(on_a_cpu, "decode")] == ["a", "c", "b"]
    monkeypatch.setenv("FP8ATTN_COMMIT", "def5678")
    results.commit.cache_clear()
    assert not ended("--only", "decode") and measured[4:] == ["a", "b", "c"]
    assert [row["case"] for row in rows_of(on_a_cpu, "decode")] == ["a", "b", "c"]


def test_what_no_time_is_left_for_is_named(on_a_cpu, capsys):
    assert ended("--only", "append", "sdpa", "tests", "--seconds", "5")
    said = capsys.readouterr().out
    assert "NOT MEASURED: sdpa: causal-S40: no time was left" in said
    assert re.search(r"NOT MEASURED: tests: \d s were left, and they take some 490 s", said)


def test_a_case_that_is_left_out_is_named(on_a_cpu, monkeypatch, capsys):
    monkeypatch.setattr(import_module("benchmarks.needle"), "measure", lambda case: iter(()))
    assert ended("--only", "needle")
    assert "NOT MEASURED: needle: prompt: it was left out" in capsys.readouterr().out


def test_a_peer_that_is_missing_is_named(on_a_cpu, monkeypatch, capsys):
    monkeypatch.setattr(whole, "WANTED", {"prefill": ("fa3-fp8", "fa3-bf16")})
    assert ended("--only", "prefill")
    assert "NOT MEASURED: the peer fa3: it did not load" in capsys.readouterr().out


def test_a_first_token_and_a_second():
    shape = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
    found = first_token.first_token(shape, 40)
    assert found["first_token_s"] >= 0 and found["second_token_s"] >= 0


def test_the_set_takes_twenty_minutes(capsys):
    assert whole.plan({part: whole.cases_of(part) for part in whole.SET}) <= 1200
    assert "prefill: 20 of 20 cases" in capsys.readouterr().out
