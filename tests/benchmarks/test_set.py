"""The whole set runs on a CPU: every benchmark on tiny cases, with our kernels replaced by the reference, and timers by
a constant.
"""

import json
import sys
import tarfile
from importlib import import_module

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
pytest.importorskip("transformers")

from benchmarks import accuracy, append, decode, first_token, overhead, peers, prefill, problem, run, sdpa
from benchmarks import set as whole
from benchmarks.problem import Shape
from evidence import results
from fp8attn import reference

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
    "overhead": ("calls", "model"),
    "first_token": first_token.CASES,
    "triton": import_module("benchmarks.triton").CASES,
    "real_model": {"stdlib-S4096": import_module("benchmarks.real_model").CASES["stdlib-S4096"]},
    "video": ("clip",),
    "needle": ("prompt",),
}
NAMES = {  # implementations of ours
    "prefill": {*prefill.OURS, "fp8attn-exact"}, "decode": {*problem.KEYS, "stream-ceiling"}, "engine": {"fp8attn"},
    "sdpa": {*problem.KEYS, "fp8attn-rope"}, "accuracy": {*problem.KEYS, "fp8attn-q8"},
    "append": {*problem.KEYS, "ceiling"}, "accumulation": {"fp8attn"},
    "overhead": {"fp8attn", "torch", "bf16-dynamic", "bf16-static", "fp8attn-dynamic", "fp8attn-static"},
    "first_token": {"fp8attn", "fp8attn, again"}, "triton": {"fp8attn-triton-3.6.0"}, "real_model": {"bf16"},
    "tests": {"fp8attn"},
    "video": {"fp8attn"}, "needle": {"fp8attn"},
}  # fmt: skip


@pytest.fixture
def on_a_cpu(monkeypatch, tmp_path):
    """A machine without peers and timers: our kernels are the reference, a graph is its call, and every call takes a
    millisecond.
    """
    for name, stand_in in {"synchronize": lambda: None, "empty_cache": lambda: None}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
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
    monkeypatch.setattr(decode, "ceilings", lambda case: {"stream-ceiling": lambda: None})
    # What runs in processes of its own, or too long for a test.
    monkeypatch.setattr(
        first_token, "measure", lambda case: iter([{"case": case, "impl": impl} for impl in NAMES["first_token"]])
    )
    monkeypatch.setattr(
        import_module("benchmarks.triton"),
        "measure",
        lambda case: iter([{"case": case, "impl": "fp8attn-triton-3.6.0"}]),
    )
    monkeypatch.setattr(import_module("benchmarks.triton"), "start", lambda cases: None)
    for name in ("video", "needle"):
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
    monkeypatch.setattr(whole.peers, "PREFILL", ())
    monkeypatch.setattr(whole, "TEST_COMMAND", [sys.executable, "-c", TESTS, str(tmp_path / "results")])
    monkeypatch.setattr(whole, "Beside", lambda function, seconds: Here(function))
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


@pytest.mark.slow
@pytest.mark.parametrize("part", whole.SET)
def test_a_call_measures_all_its_benchmarks(on_a_cpu, part, capsys):
    """Outputs are checked before they are timed; every benchmark runs whole, and every file is in the archive."""
    with pytest.raises(SystemExit) as ended:
        whole.main([str(part)])
    assert not ended.value.code, capsys.readouterr().out
    names = [entry.name for entry in whole.SET[part]]
    with tarfile.open(on_a_cpu / f"set{part}.tar") as archive:
        assert {*archive.getnames()} == {f"results/cpu/{name}.json" for name in names}
        for name in names:
            held = json.load(archive.extractfile(f"results/cpu/{name}.json"))
            assert held["commit"] == "abc1234" and {row["impl"] for row in held["rows"]} >= NAMES[name], name
            assert all(row.get("ms", 1.0) == 1.0 for row in held["rows"])


def test_a_benchmark_that_fails_writes_nothing_and_is_named(on_a_cpu, monkeypatch, capsys):
    def measure(case):
        yield {"case": case, "impl": "fp8attn"}
        raise RuntimeError("a kernel is wrong")

    monkeypatch.setattr(decode, "measure", measure)
    with pytest.raises(SystemExit) as ended:
        whole.main(["1", "--only", "decode", "append", "sdpa", "--seconds", "25"])
    said = capsys.readouterr().out
    assert ended.value.code and "RuntimeError: a kernel is wrong" in said
    assert "NOT MEASURED: decode: it failed: what it printed is above" in said
    assert "NOT MEASURED: sdpa: " in said and "were left, and it takes some 60 s" in said
    assert [path.name for path in (on_a_cpu / "results/cpu").iterdir()] == ["append.json"]


def test_a_peer_that_is_missing_is_named(on_a_cpu, monkeypatch, capsys):
    monkeypatch.setattr(whole.peers, "PREFILL", ("fa3-fp8", "fa3-bf16"))
    with pytest.raises(SystemExit):
        whole.main(["1", "--only", "prefill"])
    assert "NOT MEASURED: the peer fa3: it did not load" in capsys.readouterr().out


def test_a_first_token_and_a_second():
    shape = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
    found = first_token.first_token(shape, 40, means=True, options={"exact": True})
    assert found["first_token_s"] >= 0 and found["second_token_s"] >= 0


def test_a_benchmark_ends_at_the_deadline(on_a_cpu):
    with pytest.raises(TimeoutError, match="no time is left for accumulation S128"):
        run.measured("accumulation", ["S128"], deadline=0)


def test_every_call_fits(capsys):
    for part, entries in whole.SET.items():
        assert whole.plan(part, list(entries)) <= whole.LIMIT
        whole.main([str(part), "--plan"])
    assert "prefill, 17 cases" in capsys.readouterr().out
