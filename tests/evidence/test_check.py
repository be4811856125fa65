"""Which rows are stale, in a copy of the repository: rows of a prefill, a decode, a whole model, a peer, and one without a fingerprint."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from evidence.fingerprint import ROOT

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
from evidence import check, fingerprint, results
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
        for name in ("src", "benchmarks", "evidence"):
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
        return self.python("-m", "evidence.check", "--count")

    def stale(self) -> set[str]:
        said = self.python("-m", "evidence.check", code=1)
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
    """A copy of the repository. A test's changes to it are undone after the test."""
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
    assert "4 rows fresh, 0 stale, 1 without fingerprint" in copy.python("-m", "evidence.check")
    assert "results: 4 rows fresh, 0 stale, 1 without fingerprint" in copy.count()


def test_a_constant_of_a_kernel_makes_its_rows_stale(copy):
    """Rows of whole models that run the kernel become stale, too. (Rows that only a dry run can decide are counted as possibly stale.)"""
    change(copy, "src/fp8attn/kernels/ptx.py", ("0f3D645DC0", "0f3D645DC1"))
    assert "results: 1 rows fresh, 1 or 3 stale, 1 without fingerprint" in copy.count()
    assert copy.stale() == {PREFILL_ROW, MODEL_ROW}


def test_a_plan_of_the_host_makes_its_rows_stale(copy):
    change(copy, "src/fp8attn/kernels/prefill/cut.py", ("PART, LONG_PART = 8", "PART, LONG_PART = 16"))
    assert copy.stale() == {PREFILL_ROW, MODEL_ROW}


def test_a_refactoring_leaves_what_is_launched(copy):
    renamed = ("class Plan(NamedTuple)", "class Planned(NamedTuple)"), ("-> Plan:", "-> Planned:"), ("return Plan(", "return Planned(")
    change(copy, "src/fp8attn/kernels/decode/plan.py", *renamed)
    assert copy.stale() == {MODEL_ROW}
