"""What results files say, and when their rows are stale."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import fingerprint, results
from benchmarks.fingerprint import ROOT, files, tree
from benchmarks.problem import KEYS
from benchmarks.readme import FILES, PREFILL_IMPLS, filled, over_bf16, ratio
from tests.support import compiling, libcuda

FOUND = sorted((ROOT / "results").rglob("*.json"))
NAMES = [path.stem for path in sorted((ROOT / "benchmarks").glob("*.py"))]


def paths(*sources, **options) -> set[str]:
    return {path.relative_to(ROOT).as_posix() for path in files(*sources, **options)}


# The files


@pytest.mark.parametrize("file", FOUND, ids=lambda file: str(file.relative_to(ROOT)))
def test_rows_say_where_they_are_from(file):
    held = json.loads(file.read_text())
    assert results.slug(held["meta"]["device"]) == file.parent.name
    assert held["rows"] and len({results.key(row) for row in held["rows"]}) == len(held["rows"])
    assert {row["provenance"] for row in held["rows"]} == set(held["provenance"])
    assert all({"torch", "triton", "date", "commit", "command"} <= set(one) for one in held["provenance"].values())
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
    """Save rows on a device, as one of several commands; what the file holds then."""
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


# What a row depends on


def test_a_benchmark_brings_all_that_it_imports():
    """What Python has imported once it is imported is among its files."""
    code = "import sys, benchmarks.accuracy; print(*(getattr(m, '__file__', None) for m in list(sys.modules.values())), sep='\\n')"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, env=environment)
    here = [Path(line).relative_to(ROOT) for line in run.stdout.split() if line.startswith(f"{ROOT}/")]
    loaded = {path.as_posix() for path in here if path.parts[0] in fingerprint.FOLDERS and path.name != "__init__.py"}
    assert len(loaded) > 20 and loaded - set(fingerprint.UNMEASURED) <= paths("benchmarks/accuracy.py")


def test_imports_are_followed_however_they_are_written():
    kernels = "src/fp8attn/kernels"
    assert {"src/fp8attn/ops.py", f"{kernels}/append/page.py", "src/fp8attn/numerics.py"} < paths("benchmarks/prefill.py")  # its pages
    assert {"benchmarks/measure.py", "benchmarks/problem.py"} < paths("benchmarks/decode.py")  # relative imports
    assert {f"{kernels}/decode/kernel.py", f"{kernels}/append/page.py"} < paths("src/fp8attn/backends.py")  # inside functions
    assert "benchmarks/results.py" not in paths("benchmarks/decode.py")
    ours, others = paths(*fingerprint.sources("needle")), paths(*fingerprint.NEEDLE, folders=("benchmarks",))
    assert f"{kernels}/prefill/kernel.py" in ours - others and "benchmarks/peers.py" in ours & others
    assert fingerprint.of_row("needle", "bf16") == fingerprint.of_row("needle", "fa3-fp8:means") != fingerprint.of_row("needle", "fp8attn")


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ('"""Doc."""\nx = 1\n', '"""Another."""\n# words\nx  =  1\n', True),
        ("x = 1\n", "x = 2\n", False),
        ('def f():\n    """Doc."""\n', "def f():\n    pass\n", False),
        ('def f():\n    """Doc."""\n    return 1\n', "def f():\n    return (1)\n", True),
        ('class A:\n    """Doc."""\n    x: int\n', "class A:\n    x: int\n", True),
        ('x = """Doc."""\n', 'x = """Another."""\n', False),
    ],
)
def test_words_are_no_code(before, after, same, tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "ROOT", tmp_path)
    prints = []
    for text in (before, after):
        (tmp_path / "a.py").write_text(text)
        fingerprint._content.cache_clear()
        tree.cache_clear()
        prints.append(tree("a.py"))
    assert (prints[0] == prints[1]) is same


# Staleness, in a copy of the repository: rows of a prefill, a decode, a whole model, a peer, and one from before there were fingerprints

GIVEN = (
    {"device": "NVIDIA H200", "capability": [9, 0], "sms": 132, "shared": 232448},
    {
        "prefill": [("D128-causal-S1024", "fp8attn-q8", None), ("D128-causal-S1024", "fa3-fp8", "peer:fa3")],
        "decode": [("B1-S8192", "fp8attn", None)],
        "llama_decode": [("step-B1-S1024", "fp8attn", "tree")],
        "wan": [("block-720p", "fp8attn", "unmarked")],
    },
)
MAKE = """
import json, sys, triton
from benchmarks import check, fingerprint, results
machine, given = json.loads(sys.argv[1])
for name, rows in given.items():
    now = results.provenance(name) | {"triton": triton.__version__, "commit": "abc"}
    wanted = [(case, impl) for case, impl, kind in rows if kind is None]
    found = dict(zip(wanted, check.launches(name, machine, triton.__version__, wanted) if wanted else [], strict=True))
    made = []
    for case, impl, kind in rows:
        row = {"case": case, "impl": impl, "provenance": "1"}
        if kind != "unmarked":
            row["fingerprint"] = fingerprint.of_row(name, impl) if kind == "tree" else kind or found[case, impl]
        made.append(row)
    results.write(results.RESULTS / "h200" / f"{name}.json", machine, {"1": now}, made)
"""
PREFILL_ROW, MODEL_ROW = "prefill.json: D128-causal-S1024 fp8attn-q8", "llama_decode.json: step-B1-S1024 fp8attn"


class Copy:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("src", "benchmarks"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        self.python("-c", MAKE, json.dumps(GIVEN))

    def python(self, *arguments: str, code: int = 0) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= {"PYTHONPATH": f"{self.folder / 'src'}:{self.folder}", "FP8ATTN_COMMIT": "abc"}
        environment.setdefault("TRITON_CACHE_DIR", str(ROOT / ".pytest_cache/triton"))
        run = subprocess.run([sys.executable, *arguments], cwd=self.folder, env=environment, capture_output=True, text=True)
        assert run.returncode == code, run.stdout + run.stderr
        return run.stdout

    def count(self) -> str:
        return self.python("-m", "benchmarks.check", "--count")

    def stale(self) -> set[str]:
        said = self.python("-m", "benchmarks.check", code=1)
        assert "results/h200/wan.json: 1 rows measured at abc, no fingerprint, not checked" in said
        found = {line.partition(": stale, ")[0].removeprefix("results/h200/") for line in said.splitlines() if ": stale, " in line}
        assert f"{4 - len(found)} rows fresh, {len(found)} stale, 1 without fingerprint" in said
        return found


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    return Copy(tmp_path_factory.mktemp("copy"))


@pytest.fixture
def copy(copied):
    """What a test changes in it lasts as long as the test."""
    before = {file: file.read_bytes() for file in (copied.folder / "src").rglob("*.py")}
    yield copied
    for file, text in before.items():
        file.write_bytes(text)


def change(copy: Copy, name: str, *pairs: tuple[str, str]) -> None:
    file = copy.folder / name
    text = file.read_text()
    for old, new in pairs:
        assert old in text, f"{name} has no {old!r} any more: change something else here"
        text = text.replace(old, new, 1)
    file.write_text(text)


def test_words_make_nothing_stale(copy):
    change(copy, "src/fp8attn/layout.py", ('"""', '"""X'))
    assert "4 rows fresh, 0 stale, 1 without fingerprint" in copy.python("-m", "benchmarks.check")
    assert "results: 4 rows fresh, 0 stale, 1 without fingerprint" in copy.count()


def test_a_constant_of_a_kernel_makes_its_rows_stale(copy):
    """And those of whole models that run it. (What only a dry run can tell is counted as possibly stale.)"""
    change(copy, "src/fp8attn/kernels/ptx.py", ("0f3D645DC0", "0f3D645DC1"))
    assert "results: 1 rows fresh, 1 or 3 stale, 1 without fingerprint" in copy.count()
    assert copy.stale() == {PREFILL_ROW, MODEL_ROW}


def test_a_plan_of_the_host_makes_its_rows_stale(copy):
    change(copy, "src/fp8attn/kernels/prefill/cut.py", ("MAX_HEADS, MIN_HEADS, CLAIMS = 32", "MAX_HEADS, MIN_HEADS, CLAIMS = 16"))
    assert copy.stale() == {PREFILL_ROW, MODEL_ROW}


def test_a_refactoring_leaves_what_is_launched(copy):
    renamed = ("class Plan(NamedTuple)", "class Planned(NamedTuple)"), ("-> Plan:", "-> Planned:"), ("return Plan(", "return Planned(")
    change(copy, "src/fp8attn/kernels/decode/plan.py", *renamed)
    assert copy.stale() == {MODEL_ROW}


LAUNCH = """
import ctypes, importlib, json, os, sys
os.environ["TRITON_LIBCUDA_PATH"] = sys.argv[1]
ctypes.CDLL(f"{sys.argv[1]}/libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver
from benchmarks import dry, fingerprint
from fp8attn.kernels import launch

class Driver(CudaDriver):
    def __init__(self):
        super().__init__()
        self.get_device_capability, self.get_current_device, self.get_current_stream = (lambda *_: (9, 0)), (lambda: 0), (lambda _: 7)

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

dry.pretend({"capability": [9, 0], "sms": 132, "shared": 232448})
row = "append", "quantize-S4096", "fp8attn"
[expected] = dry.fingerprints(row[0], [row[1:]], GPUTarget("cuda", 90, 32))
driver.set_active(Driver())
with launch.recording(dry=True):  # of what makes its inputs
    call = importlib.import_module("benchmarks." + row[0]).calls(row[1])[row[2]]
print(json.dumps([expected, fingerprint.launched(call)]))
"""


def test_a_dry_run_gives_what_launches_give(tmp_path):
    """Launches by Triton itself, on a libcuda that does nothing."""
    dry, real = json.loads(compiling.run("-c", LAUNCH, tmp_path, **libcuda.build(tmp_path)))
    assert dry == real and dry.startswith("launches:")


# What README says


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_tables_are_those_of_the_results(file):
    assert filled(file.read_text()) == file.read_text(), "run python -m benchmarks.readme"


def test_ratios_are_of_rows_timed_together():
    ours = {"case": "a", "impl": "fp8attn-graph", "ms": 2.0, "provenance": "1", "timed": "graph"}
    theirs = ours | {"impl": "fa3-bf16", "ms": 3.0}
    called = ours | {"impl": "fp8attn", "ms": 1.0, "timed": "called"}
    found = {("a", row["impl"]): row for row in (ours, theirs, called)}
    assert over_bf16(found, "a", "fp8attn") == 1.5
    del found["a", "fp8attn-graph"]
    assert over_bf16(found, "a", "fp8attn") is None  # called, and timed apart
    assert ratio(ours, theirs | {"provenance": "2"}) is None and ratio(ours, None) is None


# What was measured


def measured(name: str) -> list:
    return [pytest.param(json.loads(file.read_text())["rows"], id=file.parent.name) for file in FOUND if file.stem == name]


@pytest.mark.parametrize("rows", measured("tests"))
def test_the_gpu_tests_passed(rows):
    assert [row["exit"] for row in rows if row["case"] == "all"] == [0]
    assert sum(row.get("passed", 0) for row in rows) > 0 and not any(row.get("failed") for row in rows)


@pytest.mark.parametrize("rows", measured("decode"))
def test_decode_is_exact(rows):
    """Rotated queries over E4M3 keys are rounded to FP16, 2^-12 of each number: 5.4e-4 at most on an H200. Over INT8 keys they have 15 bits
    of a row's largest."""
    errors = {impl: [row["rel_err"] for row in rows if row["impl"] == impl] for impl in KEYS}
    assert errors["fp8attn"] and max(errors.pop("fp8attn")) <= 5e-4, rows
    assert all(error <= 6e-4 for found in errors.values() for error in found), errors


@pytest.mark.parametrize("rows", measured("prefill"))
def test_prefill_does_not_lose_its_sums(rows):
    """0.3% on V of mean 1."""
    errors = {(row["case"], row["impl"]): row["rel_err_mean1"] for row in rows if row["impl"] in PREFILL_IMPLS}
    assert errors and max(errors.values()) <= 3e-3, errors


@pytest.mark.parametrize("rows", measured("accuracy"))
def test_accuracy_does_not_depend_on_length(rows):
    decode = [row["rel_err"] for row in rows if row["impl"] in KEYS and row["case"].startswith("decode-mean")]
    prefill = {
        (row["case"], row["impl"]): row["rel_err"]
        for row in rows
        if row["impl"] in PREFILL_IMPLS and row["case"].startswith(("causal-mean1", "full-mean1"))
    }
    assert len(decode) >= 48 and max(decode) <= 5e-4
    assert len(prefill) > 60 and max(prefill.values()) <= 3e-3, prefill
    assert all(row["finite"] and row["equal_bits"] for row in rows if row["case"].startswith("grid"))


@pytest.mark.parametrize("rows", measured("sanitize"))
def test_the_sanitizer_found_what_was_planted_and_nothing_else(rows):
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    from benchmarks.sanitize import faults

    assert not faults(rows)


@pytest.mark.parametrize("rows", measured("accumulation"))
def test_our_sums_lose_nothing(rows):
    errors = [row["rel_err"] for row in rows if row["impl"].startswith("fp8attn")]
    assert len(errors) >= 8 and max(errors) <= 3e-3
