"""The runner, and the collector of peers."""

import json
import lzma
import subprocess
import sys
import types
import zipfile

import pytest

from benchmarks import get_peers, run
from benchmarks.peers import cudnn, peer
from evidence import results


@pytest.fixture
def runner(monkeypatch, tmp_path):
    """A function that runs the benchmark `made` with command line arguments, and returns the rows that it kept."""
    kept = []
    made = types.ModuleType("benchmarks.made", "Something measured.\n\nMore.")
    made.CASES = {"a-1": 1.0, "a-2": 2.0, "b": 3.0}
    made.measure = lambda case: iter([{"case": case, "impl": "fp8attn", "ms": made.CASES[case]}])
    monkeypatch.setitem(sys.modules, "benchmarks.made", made)
    monkeypatch.setattr(run, "benchmarks", lambda: {"made": "Something measured."})
    monkeypatch.setattr(results, "save", lambda name, rows, peers: kept.append((name, rows)))
    monkeypatch.setattr(results, "add", lambda name, rows, peers: kept.append((f"more of {name}", rows)))
    monkeypatch.setattr(
        results, "require_new", lambda name, cases: kept.append(("wanted", [{"case": case} for case in cases]))
    )
    monkeypatch.setenv("FP8ATTN_COMMIT", "abc")
    results.commit.cache_clear()

    def runner(*arguments):
        monkeypatch.setattr(sys, "argv", ["run", *arguments])
        kept.clear()
        run.main()
        return kept

    runner.made, runner.kept = made, kept
    yield runner
    results.commit.cache_clear()


def test_cases_are_chosen_by_parts_of_their_names_and_kept_on_request(runner, capsys):
    assert runner("made", "a-") == []
    assert capsys.readouterr().out.startswith(
        "\na-1\n  fp8attn                   ms 1  1.000 of the first's time\n\na-2\n"
    )
    [(name, rows)] = runner("made", "--save")
    assert name == "made" and [(row["case"], row["ms"]) for row in rows] == [("a-1", 1.0), ("a-2", 2.0), ("b", 3.0)]
    added = [
        (name, [row["case"] for row in rows]) for name, rows in runner("made", "a-", "--save")
    ]  # each case when it is measured
    assert added == [("wanted", ["a-1", "a-2"]), ("more of made", ["a-1"]), ("more of made", ["a-2"])]
    capsys.readouterr()
    assert runner("made", "--list") == [] and capsys.readouterr().out.endswith("a-1\na-2\nb\n")
    with pytest.raises(SystemExit, match="made has no case with nothing in its name: --list lists them"):
        runner("made", "nothing")
    with pytest.raises(SystemExit, match="--base compares revisions and keeps nothing: leave out --save"):
        runner("made", "--base", "HEAD", "--save")
    with pytest.raises(SystemExit, match="--base compares calls of kernels, and made has none"):
        runner("made", "--base", "HEAD")


def test_rows_are_in_a_folder_before_the_next_case_fails(runner, monkeypatch, tmp_path):
    monkeypatch.setenv("OUT", str(tmp_path))
    runner.made.CASES["b"] = None
    runner.made.measure = lambda case: iter([{"case": case, "impl": "fp8attn", "ms": 1 / runner.made.CASES[case]}])
    with pytest.raises(TypeError):
        runner("made")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["benchmark"], row["case"], row["ms"]) for row in rows] == [("made", "a-1", 1.0), ("made", "a-2", 0.5)]


def test_every_benchmark_is_listed(capsys, monkeypatch):
    found = run.benchmarks()
    assert {"prefill", "decode", "append", "sdpa", "accuracy", "accumulation", "overhead", "triton"} <= found.keys()
    assert {"run", "measure", "problem", "sides"}.isdisjoint(found) and found[
        "prefill"
    ] == "Prefill attention, compared with its peers."
    monkeypatch.setattr(sys, "argv", ["run", "nothing"])
    with pytest.raises(SystemExit, match="there is no benchmark nothing"):
        run.main()
    assert "Prefill attention, compared with its peers." in capsys.readouterr().out


def test_peers_are_taken_from_their_wheels(monkeypatch, tmp_path, capsys):
    """The index serves an extension module, two libraries of one wheel, and two wheels. Three wheels lack a library,
    and it has no torchao.
    """

    paths = {name: f"nvidia/cudnn/lib/lib{name}.so.9" for name in cudnn.LIBRARIES}

    def download(command, **options):
        folder, release = command[-2], command[-1]
        name = release.split("==")[0].replace("-", "_")
        if name == "torchao":
            return subprocess.CompletedProcess(
                command, 1, "", "noise\nERROR: No matching distribution found for torchao==0.18.0\n"
            )
        with zipfile.ZipFile(f"{folder}/{name}-{release.split('==')[1]}-py3-none-any.whl", "w") as wheel:
            for path in ("fa3_fwd/_C.abi3.so", *paths.values()):
                wheel.writestr(path, b"library of " + path.encode())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(get_peers, "ROOT", tmp_path)
    monkeypatch.setattr(get_peers, "FOLDER", tmp_path / ".peers")
    monkeypatch.setattr(get_peers, "compile", lambda library, work: [])
    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(SystemExit, match="4 files of peers are missing"):
        get_peers.main()
    for name, path in {"fa3_fwd": "fa3_fwd/_C.abi3.so", **paths}.items():
        assert lzma.decompress((tmp_path / f".peers/{name}.so.xz").read_bytes()) == b"library of " + path.encode()
    said = capsys.readouterr().out.splitlines()
    wanted = {
        "fa3-fwd==0.0.3: .peers/fa3_fwd.so.xz",
        "vllm==0.22.0: vllm-0.22.0-py3-none-any.whl holds no vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
        "comfy-kitchen==0.2.40: comfy_kitchen-0.2.40-py3-none-any.whl holds no comfy_kitchen/backends/cuda/_C.abi3.so",
        "vllm==0.26.0: vllm-0.26.0-py3-none-any.whl holds no vllm/_flashmla_C.abi3.so",
        "nvidia-cudnn-cu13==9.28.1.4: .peers/cudnn_graph.so.xz .peers/cudnn_engines_runtime_compiled.so.xz",
        "nvidia-cudnn-frontend==1.18.0: .peers/nvidia_cudnn_frontend-1.18.0-py3-none-any.whl",
        "torchao==0.18.0: ERROR: No matching distribution found for torchao==0.18.0",
        f"{peer.TVM_FFI}: .peers/apache_tvm_ffi-{peer.TVM_FFI.split('==')[1]}-py3-none-any.whl",
    }
    assert wanted <= set(said) and len(said) == len(wanted) + 5  # compiled ones
