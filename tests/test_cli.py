"""Every command, on a tiny model: the numbers in its JSON, the words in its tables, one line for what the user can put right."""

import json
import sys

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")

from typer.testing import CliRunner

from fp8attn import KVScales, cli
from fp8attn.cli import demo as demo_command
from fp8attn.cli.app import CACHES, TASKS, app
from fp8attn.evaluation import models, recall, ruler
from fp8attn.evaluation.caches import NAMES


def run(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def run_json(*arguments):
    return json.loads(run(*arguments, "--json"))


@pytest.fixture(scope="module")
def scales_file(tiny_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("scales") / "new" / "scales.safetensors"
    written = run_json("calibrate", "--model", tiny_model, "--out", path, "--context", 100, "--windows", 3)
    assert (written["tokens"], written["method"], len(written["rows"])) == (300, "absmax", 2)
    return path


def test_calibrate(tiny_model, scales_file, tmp_path):
    KVScales.load(scales_file).check(num_layers=2, num_kv_heads=2, head_dim=64, model_id=str(tiny_model))
    path = tmp_path / "p.safetensors"
    options = ("--method", "percentile", "--percentile", 99, "--context", 100, "--windows", 3)
    text = run("calibrate", "--model", tiny_model, "--out", path, *options)
    assert "percentile 99" in " ".join(text.split())
    assert "K SQNR (dB)" in text
    narrow, wide = KVScales.load(path), KVScales.load(scales_file)
    assert (narrow.layer(0).k_scale < wide.layer(0).k_scale).all()


def test_generate(tiny_model, scales_file):
    found = run_json("generate", "value_", "--model", tiny_model, "--cache", "both", "--max-new-tokens", 5, "--scales", scales_file)
    assert [row["cache"] for row in found["rows"]] == ["bf16", "fp8-static"]
    assert all(1 <= len(row["tokens"]) <= 5 for row in found["rows"])
    assert found["tokens_equal"] == (found["rows"][0]["tokens"] == found["rows"][1]["tokens"])
    assert found["rows"][0]["cache_bytes"] % (2 * 2 * 2 * 64 * 2) == 0
    text = run("generate", "value_", "--model", tiny_model, "--max-new-tokens", 3, "--temperature", 1.0)
    assert "FP8 cache" in text
    assert "value_" in text


def test_sampling_has_a_seed(tiny_model):
    options = ("generate", "value_", "--model", tiny_model, "--temperature", 2.0, "--max-new-tokens", 8)
    first, again, other = (run_json(*options, "--seed", seed)["rows"][0]["tokens"] for seed in (3, 3, 4))
    assert first == again != other


def test_evaluate_perplexity(tiny_model):
    options = ("evaluate", "perplexity", "--model", tiny_model, "--context", 200, "--windows", 2)
    found = run_json(*options, "--chunk", 64)
    bf16, fp8 = found["rows"]
    assert (bf16["cache"], fp8["cache"], bf16["tokens"], bf16["mode"]) == ("bf16", "fp8", 400, "chunks")
    assert fp8["ppl"] == pytest.approx(bf16["ppl"], rel=0.05)
    assert found["meta"]["model"] == "tiny-llama"
    text = run(*options, "--decode", 5, "--cache", "fp8")
    assert "token by token" in text
    assert "FP8" in text
    assert "BF16" not in text


def test_evaluate_needle(tiny_model, tmp_path):
    plot, save = tmp_path / "plots" / "needle.svg", tmp_path / "outcomes.jsonl"
    options = ("--lengths", "600,650", "--depths", "0,1", "--samples", 1, "--plot", plot, "--save", save)
    found = run_json("evaluate", "needle", "--model", tiny_model, *options)
    assert {(c["cache"], c["length"], c["depth"]) for c in found["rows"]} == {
        (cache, length, depth) for cache in ("bf16", "fp8") for length in (600, 650) for depth in (0.0, 1.0)
    }
    assert set(found["scores"]) == {"bf16", "fp8"}
    assert set(found["equal_to_first"]) == {"fp8"}
    assert found["paired"][0]["p"] == 1
    assert "<svg" in plot.read_text()
    assert len(save.read_text().splitlines()) == 8
    text = run("evaluate", "needle", "--model", tiny_model, *options[:-4])
    assert "recall: right answers, paired by sample" in text


def test_report(tiny_model, tmp_path):
    options = ("--context", 300, "--windows", 1, "--decode", 3, "--lengths", "600", "--samples", 1)
    text = run("evaluate", "--report", tmp_path / "out", "--model", tiny_model, *options)
    assert "token by token" in text and "index.html" in text
    assert "tiny-llama" in (tmp_path / "out" / "index.html").read_text()
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [(row["cache"], row["mode"]) for row in found["perplexity"]] == [(c, m) for m in ("chunks", "decode") for c in ("bf16", "fp8")]
    assert len((tmp_path / "out" / "outcomes.jsonl").read_text().splitlines()) == len(found["needle"]) == 2 * 5


def test_evaluate_drift(tiny_model):
    options = ("evaluate", "drift", "--model", tiny_model, "--prompt", 50, "--decode", 9, "--segment", 4)
    found = run_json(*options)
    assert [(row["start"], row["stop"]) for row in found["rows"]] == [(50, 54), (54, 58), (58, 59)]
    text = run(*options, "--stress", 3)
    assert "copied" in text and "50 to 54" in text


def test_stress_changes_the_values_and_not_the_answers(tiny_model):
    options = ("evaluate", "perplexity", "--model", tiny_model, "--context", 200, "--windows", 1, "--cache", "bf16,fp8,fp8-no-means")
    plain, stressed = (run_json(*options, "--stress", strength)["rows"] for strength in (0, 3))
    assert stressed[0]["nll"] == pytest.approx(plain[0]["nll"], rel=0.01)  # what bfloat16 loses of large values
    assert stressed[2]["kl"] > 2 * stressed[1]["kl"]


def test_plan():
    options = ("--layers", 32, "--kv-heads", 8, "--head-dim", 128, "--memory", "80GB", "--weights", "16GB")
    found = run_json("plan", *options, "--context", 131072)
    assert [row["cache"] for row in found["rows"]] == ["bf16", "fp8"]
    assert found["rows"][0]["largest_batch"] == 3
    assert found["rows"][1]["largest_batch"] == 7
    assert found["rows"][0]["longest_context"] == 488281
    assert "as given" in run("plan", *options)


def test_plan_of_a_model(tiny_model):
    found = run_json("plan", "--model", tiny_model, "--memory", "1GiB")
    assert found["shape"] == {"full_layers": 2, "num_kv_heads": 2, "head_dim": 64, "windows": [], "other_layers": 0}
    assert found["weights"] == (tiny_model / "model.safetensors").stat().st_size
    assert "size of the files" in " ".join(run("plan", "--model", tiny_model, "--memory", "1GiB").split())


def test_doctor():
    assert {"name": "backend reference on cpu", "status": "ok", "detail": "runs"} in run_json("doctor")
    assert "backend reference on cpu" in run("doctor")


def test_demo(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "default_model", lambda: tiny_model)
    monkeypatch.setattr(models, "read_text", lambda path=None, model=None: models._read(tiny_model / models.HELD_OUT))
    for name, value in {"CONTEXT": 300, "LENGTHS": (600, 700), "WINDOWS": 2, "DECODE": (100, 5), "CALIBRATION": (2, 256)}.items():
        assert hasattr(demo_command, name)
        monkeypatch.setattr(demo_command, name, value)
    text = run("demo", "--out", tmp_path / "out")
    assert "cache bytes per token" in text
    found = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert found["bytes_per_token_bf16"] == 1024
    assert found["bytes_per_token_fp8"] < 800  # a short context: half a page is empty
    assert found["ppl_fp8"] == pytest.approx(found["ppl_bf16"], rel=0.05)
    for name in ("needle_bf16", "needle_fp8", "needle_cells_equal", "greedy_tokens_equal", "greedy_tokens_matched", "greedy_tokens"):
        assert name in found
    assert len(found["needle"]) == 2 * 5 * 2
    assert {row["mode"] for row in found["perplexity"]} == {"chunks", "decode"}
    assert (tmp_path / "out" / "needle.png").stat().st_size > 5000
    assert KVScales.load(tmp_path / "out" / "scales.safetensors").tokens == 512


def test_help_names_the_caches():
    assert tuple(CACHES.split(", ")) == NAMES
    assert tuple(TASKS.split(", ")) == (recall.NAME, *ruler.NAMES)
    assert "calibrate" in run("--help")


# `main`: one line and exit code 2


def fail(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["fp8attn", *(str(a) for a in arguments)])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    lines = capsys.readouterr().err.splitlines()  # before the last, transformers' progress
    assert lines[-1].startswith("fp8attn: ")
    return lines[-1]


def test_one_line_errors(monkeypatch, capsys, tiny_model, tmp_path):
    model = ("--model", tiny_model)
    cases = {
        ("plan", "--layers", 3): "give a --model, or all of --layers, --kv-heads and --head-dim",
        ("plan", "--layers", 3, "--kv-heads", 2, "--head-dim", 64, "--memory", "lots"): "'lots' is not a size",
        ("generate", "x", *model, "--cache", "int4"): "no cache is called 'int4'; choose bf16, fp8, both",
        ("generate", "x", *model, "--scales", tmp_path / "none"): "no such file",
        ("generate", "x", *model, "--chat"): "no chat template; leave out --chat",
        ("generate", "x", "--model", tmp_path): "config.json",
        ("evaluate", "needle", *model, "--lengths", "many"): "--lengths must be numbers joined by commas; got 'many'",
        ("evaluate", "needle", *model, "--task", "hay"): "no task is called 'hay'; choose from recall, niah_single_1",
        ("evaluate",): "say --report FOLDER, or which evaluation",
        ("evaluate", "perplexity", *model, "--context", 10**6): "and the text has 16384",
        ("evaluate", "drift", *model, "--cache", "both"): "drift judges one cache at a time; got 'both'",
        ("calibrate", *model, "--method", "mse"): "method must be one of",
    }
    for arguments, message in cases.items():
        assert message in fail(monkeypatch, capsys, *arguments), arguments


def test_foreign_scales(monkeypatch, capsys, tiny_model, scales_file):
    from dataclasses import replace

    foreign = scales_file.parent / "foreign.safetensors"
    replace(KVScales.load(scales_file), num_layers=9).save(foreign)
    message = fail(monkeypatch, capsys, "generate", "x", "--model", tiny_model, "--scales", foreign)
    assert "these scales belong to another model: num_layers is 9 in the scales and 2 in the model" in message


def test_missing_extra(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "fp8attn.cli.app")
    monkeypatch.setitem(sys.modules, "typer", None)
    assert fail(monkeypatch, capsys, "doctor") == "fp8attn: typer is not installed; pip install 'fp8attn[cli]'"


def test_success_exits_with_0(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fp8attn", "doctor", "--json"])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 0
    assert json.loads(capsys.readouterr().out)


def test_wrong_options_are_typers(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fp8attn", "plan", "--no-such-option"])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    assert "No such option" in capsys.readouterr().err
