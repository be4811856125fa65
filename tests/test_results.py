"""What was measured belongs to the sources as they are."""

import ast
import json
from pathlib import Path

import pytest

from benchmarks.results import ROOT, hashes

KERNELS = "src/fp8attn/kernels"
FILES = sorted((ROOT / "results").rglob("*.json"))
BENCHMARKS = sorted(file for file in (ROOT / "benchmarks").glob("*.py") if "\nSOURCES = " in file.read_text())


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_results_are_of_these_sources(file: Path):
    results = json.loads(file.read_text())
    assert {"device", "torch", "triton", "date", "command", "sources"} <= set(results["meta"])
    assert results["rows"] and all("case" in row for row in results["rows"])
    sources = results["meta"]["sources"]
    now = hashes(path for path in sources if (ROOT / path).exists())
    stale = [path for path, digest in sources.items() if now.get(path) != digest]
    assert not stale, f"{stale} changed after {file.relative_to(ROOT)} was measured: run `{results['meta']['command']}` on the GPU again"


def test_a_kernel_brings_what_it_imports_and_no_other_kernel():
    assert set(hashes([f"{KERNELS}/decode.py"])) == {
        "src/fp8attn/layout.py", *(f"{KERNELS}/{name}.py" for name in ("decode", "gluon", "launch", "pages")),
    }  # fmt: skip
    assert {f"{KERNELS}/combine.py", f"{KERNELS}/fp8.py"} < set(hashes([f"{KERNELS}/prefill.py"]))  # one of them through the other
    assert "src/fp8attn/numerics.py" in hashes([f"{KERNELS}/append.py"])
    assert set(hashes(["src/fp8attn/ops.py"])) == {"src/fp8attn/ops.py"}
    assert {path.name for path in (ROOT / KERNELS).glob("*.py")} <= {Path(name).name for name in hashes([KERNELS])}


def test_a_benchmark_brings_what_it_imports():
    assert {"benchmarks/measure.py", "benchmarks/peers.py", "benchmarks/problem.py"} < set(hashes(["benchmarks/decode.py"]))
    assert "benchmarks/results.py" not in hashes(["benchmarks/decode.py"])


@pytest.mark.parametrize("file", BENCHMARKS, ids=lambda file: file.stem)
def test_results_go_stale_with_their_benchmark_and_the_kernels_it_imports(file: Path):
    """By the source of `SOURCES`: importing a benchmark takes Triton."""
    tree = ast.parse(file.read_text())
    values = {ast.unparse(node.targets): node.value for node in tree.body if isinstance(node, ast.Assign)}
    parts = [values["SOURCES"], *(values[node.id] for node in ast.walk(values["SOURCES"]) if getattr(node, "id", None) in values)]
    named = {node.value for part in parts for node in ast.walk(part) if isinstance(node, ast.Constant)}
    assert file.relative_to(ROOT).as_posix() in named
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fp8attn.kernels")]
    modules = {part for node in imports for part in (node.module.split(".")[2:] or [alias.name for alias in node.names])}
    paths = {path for path in named if (ROOT / path).exists() and path.startswith(("src/", "benchmarks/"))}
    missing = {f"{KERNELS}/{module}.py" for module in modules} - set(hashes(paths))
    assert not missing, f"SOURCES of {file.name} leave out {sorted(missing)}"


def rows_of(name: str) -> list[dict]:
    return json.loads((ROOT / f"results/h100/{name}.json").read_text())["rows"]


def test_the_gpu_tests_passed():
    rows = rows_of("tests")
    assert [row["exit"] for row in rows if row["case"] == "all"] == [0]
    assert sum(row.get("passed", 0) for row in rows) > 0 and not any(row.get("failed") for row in rows)


def test_decode_is_exact():
    errors = {row["case"]: row["rel_err"] for row in rows_of("decode") if row["impl"] == "fp8attn"}
    assert len(errors) >= 7 and max(errors.values()) <= 5e-4, errors


PREFILL = "fp8attn", "fp8attn-q8"  # queries in 16 bits, and in FP8


def test_prefill_does_not_lose_its_sums():
    """0.3% on V of mean 1."""
    errors = {(row["case"], row["impl"]): row["rel_err_mean1"] for row in rows_of("prefill") if row["impl"] in PREFILL}
    assert errors and max(errors.values()) <= 3e-3, errors


@pytest.mark.skipif(not (ROOT / "results/h100/accuracy.json").exists(), reason="not measured yet")
def test_accuracy_does_not_depend_on_length():
    rows = rows_of("accuracy")
    decode = [row["rel_err"] for row in rows if row["impl"].startswith("fp8attn") and row["case"].startswith("decode-mean")]
    prefill = {
        (row["case"], row["impl"]): row["rel_err"]
        for row in rows
        if row["impl"] in PREFILL and row["case"].startswith(("causal-mean1", "full-mean1"))
    }
    assert len(decode) > 60 and max(decode) <= 5e-4
    assert len(prefill) > 60 and max(prefill.values()) <= 3e-3, prefill
    assert all(row["finite"] and row["equal_bits"] for row in rows if row["case"].startswith("grid"))


@pytest.mark.skipif(not (ROOT / "results/h100/sanitize.json").exists(), reason="not measured yet")
def test_the_sanitizer_found_what_was_planted_and_nothing_else():
    from benchmarks.sanitize import faults

    assert not faults(rows_of("sanitize"))


@pytest.mark.skipif(not (ROOT / "results/h100/accumulation.json").exists(), reason="not measured yet")
def test_our_sums_lose_nothing():
    errors = [row["rel_err"] for row in rows_of("accumulation") if row["impl"].startswith("fp8attn")]
    assert len(errors) >= 8 and max(errors) <= 3e-3
