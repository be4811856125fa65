"""`main`: errors of users in one line with exit code 2, bugs with their traceback, and Ctrl-C."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM

from fp8attn import KVScales, UsageError
from fp8attn_tools import cli
from fp8attn_tools.cli import shared
from fp8attn_tools.cli.shared import output
from fp8attn_tools.evaluation import models, needle
from fp8attn_tools.evaluation import perplexity as evaluation_perplexity
from tests.tools.cli.running import fail, never, run, run_json


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
        ("evaluate", "perplexity", *model, "--text", tmp_path / "none"): "no such text file",
        ("evaluate", "perplexity", *model, "--context", 10**6): "and the text has 16384",
        ("evaluate", "drift", *model, "--cache", "both"): "drift takes one cache at a time; got 'both'",
        ("generate", "", *model): "the prompt '' has no tokens; give some text to continue",
        ("generate", "x", *model, "--device", "foo"): "the device 'foo' cannot be used here (",
        ("generate", "x", *model, "--device", "meta"): "the device 'meta' cannot be used here (",
        ("generate", "x", *model, "--device", "cuda:99"): "the device 'cuda:99' cannot be used here (",
        (
            "generate",
            "x",
            "--model",
            tmp_path / "no",
        ): f"there is no folder {tmp_path / 'no'}; pass a model's folder, or a Hugging Face id",
        ("plan", "--model", "./no"): "there is no folder ./no; pass a model's folder, or a Hugging Face id",
        ("evaluate", "needle", *model, "--plot", tmp_path / "p.txt"): "a plot must be a .png, .svg or .pdf file; got",
        (
            "generate",
            "x",
            *model,
            "--scales",
            tmp_path,
        ): f"--scales {tmp_path} is a folder; fp8attn calibrate writes a file of scales",
        ("generate", "x", "--model", ""): "the name of the model is empty; pass a model's folder",
        ("generate", "x\udcff", *model): "the prompt is not UTF-8 from character 1 on: pass text in UTF-8",
        ("generate", "x", *model, "--max-new-tokens", 10**12): "Invalid value for '--max-new-tokens'",
        ("evaluate", "needle", *model, "--samples", 10**12): "Invalid value for '--samples'",
        ("evaluate", "needle", *model, "--distractors", 10**12): "Invalid value for '--distractors'",
        (
            "evaluate",
            "needle",
            *model,
            "--lengths",
            10**12,
        ): "--lengths must be numbers from 1 to 16,777,216; got 1,000,000,000,000",
        ("evaluate", "drift", *model, "--batch", 10**12): "Invalid value for '--batch'",
        ("plan", "--layers", 10**12, "--kv-heads", 2, "--head-dim", 64): "Invalid value for '--layers'",
        ("warmup", "--shape", "8,2,64", "--threads", 10**6): "Invalid value for '--threads'",
        (
            "sensitivity",
            *model,
            "--max-bytes",
            0,
        ): "no choice of layers takes at most 0 bytes per token: with all in 8 bits it is 516",
    }
    for arguments, message in cases.items():
        assert message in fail(monkeypatch, capsys, *arguments), arguments


def test_calibrate_refuses_a_text_before_it_loads_weights(monkeypatch, capsys, tiny_model, tmp_path):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", never)
    short, empty = tmp_path / "short.txt", tmp_path / "empty.txt"
    short.write_text("a few words")
    empty.write_text("")
    given = "calibrate", "--model", tiny_model, "--out", tmp_path / "scales.safetensors"
    message = fail(monkeypatch, capsys, *given, "--text", short, "--windows", 2, "--context", 64)
    assert "2 windows of 64 tokens need 128, and the text has " in message
    for which in ("--text", "--held-out"):
        assert "the text has no tokens; pass a text with words" in fail(monkeypatch, capsys, *given, which, empty)


BUGS = {
    "ValueError": ValueError("a bug"),
    "OSError": OSError(5, "a bug"),
    "ModuleNotFoundError": ModuleNotFoundError(name="no_such"),
}


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
    # 12 / 2 * 7, 23 / 4 * 5
    expected = "windows: 2 of 9, about 42 s left, 12 s so far\nwindows: 4 of 9, about 29 s left, 23 s so far\n"
    assert capsys.readouterr().err == expected


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


@pytest.mark.parametrize(
    ("name", "size"), [("model.safetensors", 5000), ("model.safetensors", 3), ("tokenizer.json", 100)]
)
def test_damaged_models(monkeypatch, capsys, tiny_model, tmp_path, name, size):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / name).write_bytes((folder / name).read_bytes()[:size])
    message = fail(monkeypatch, capsys, "generate", "x", "--model", folder)
    assert f"a file of {folder} is damaged or cut short (" in message
    assert message.endswith("download or copy the model again")


def test_a_model_without_a_tokenizer(monkeypatch, capsys, tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*", "special*"))
    for command in (
        ("generate", "x"),
        ("evaluate", "perplexity"),
        ("sensitivity",),
        ("calibrate", "--out", tmp_path / "s.safetensors"),
    ):
        message = fail(monkeypatch, capsys, *command, "--model", folder)
        assert message.startswith(f"fp8attn: {folder} has no tokenizer that transformers can read (")
        assert message.endswith("add tokenizer.json to the folder")


@pytest.mark.parametrize(
    ("change", "name"),
    [({"num_hidden_layers": 3}, "model.layers.2."), ({"intermediate_size": 64}, "model.layers.0.mlp.")],
)
def test_weights_that_do_not_fit_their_config(monkeypatch, capsys, tiny_model, tmp_path, change, name):
    """transformers gives missing ones random values, and only warns."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    message = fail(monkeypatch, capsys, "generate", "x", "--model", folder)
    assert (
        f"the weights of {folder} do not fit its config: {name}" in message and "missing or of other sizes" in message
    )


def test_models_that_cannot_be_served_are_refused_before_the_run(monkeypatch, capsys, tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"head_dim": 48}))
    (folder / "model.safetensors").unlink()
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    commands = (
        ("generate", "x"), ("evaluate", "perplexity", "--context", 9), ("sensitivity", "--context", 9),
        ("calibrate", "--out", tmp_path / "s.safetensors"),
    )  # fmt: skip
    for command in commands:
        assert "head_dim must be one of (64, 80, 96, 128, 192, 256, 512); got 48" in fail(
            monkeypatch, capsys, *command, "--model", folder
        )
    assert (
        "perplexity"
        in run("evaluate", "perplexity", "--cache", "bf16", "--context", 9, "--windows", 1, "--model", folder).lower()
    )
    (check,) = [
        row for row in run_json("doctor", "--no-measure", "--model", folder) if row["name"] == f"model {folder}"
    ]
    assert check["status"] == "no" and check["detail"].startswith("'llama': head_dim must be one of ")


@pytest.mark.parametrize("command", [("plan",), ("generate", "x")])
def test_models_that_are_no_causal_language_models(monkeypatch, capsys, tmp_path, command):
    cases = {
        '{"model_type": "t5"}': "is a model of type 't5', which is no causal language model in transformers ",
        '{"model_type": "foo"}': "The checkpoint you are trying to load has model type `foo` but Transformers does not "
        "recognize",
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

    MistralConfig(num_hidden_layers=2, num_attention_heads=2, hidden_size=128, sliding_window=64).save_pretrained(
        tmp_path
    )
    message = fail(monkeypatch, capsys, "plan", "--model", tmp_path)
    assert (
        "no layer would be in FP8: every layer of 'mistral' is of a type whose cache does not grow (sliding_attention)"
        in message
    )


@pytest.mark.parametrize("option", ["--layers", "--kv-heads", "--head-dim"])
def test_plan_refuses_zero(monkeypatch, capsys, option):
    given = {"--layers": "3", "--kv-heads": "2", "--head-dim": "64"} | {option: "0"}
    message = fail(monkeypatch, capsys, "plan", *(word for pair in given.items() for word in pair))
    assert message.startswith(f"fp8attn: Invalid value for '{option}': ")


@pytest.mark.parametrize(
    "arguments",
    [
        ("evaluate", "needle", "--chunk", "0"),
        ("generate", "x", "--max-new-tokens", "many"),
        ("calibrate", "--key-dtype", "int4"),
    ],
)
def test_values_that_an_option_does_not_take_are_one_line(monkeypatch, capsys, arguments):
    """The reason is in the words of typer, which differ between versions."""
    monkeypatch.setattr(sys, "argv", ["fp8attn", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    [line] = capsys.readouterr().err.splitlines()
    assert exit_.value.code == 2 and line.startswith(f"fp8attn: Invalid value for '{arguments[-2]}': ")


def test_foreign_scales(monkeypatch, capsys, tiny_model, scales_file):

    foreign = scales_file.parent / "foreign.safetensors"
    replace(KVScales.load(scales_file), num_layers=9).save(foreign)
    message = fail(monkeypatch, capsys, "generate", "x", "--model", tiny_model, "--scales", foreign)
    assert "these scales belong to another model: num_layers is 9 in the scales and 2 in the model" in message


def test_missing_extra(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "fp8attn_tools.cli.app")
    monkeypatch.setitem(sys.modules, "typer", None)
    assert fail(monkeypatch, capsys, "doctor") == 'fp8attn: typer is not installed; run pip install "fp8attn[cli]"'


def test_missing_lm_eval_is_found_before_the_run(monkeypatch, capsys, tiny_model, tmp_path):
    monkeypatch.setitem(sys.modules, "lm_eval.tasks.ruler", None)
    monkeypatch.setattr(needle, "ask", never)
    monkeypatch.setattr(evaluation_perplexity, "perplexity", never)
    tasks = ("--model", tiny_model, "--task", "recall,niah_multikey_2", "--lengths", 600)
    assert fail(monkeypatch, capsys, "evaluate", "needle", *tasks).endswith('run pip install "fp8attn[ruler]"')


def test_missing_matplotlib_is_found_before_the_run(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "fp8attn_tools.cli.plots")
    monkeypatch.delattr("fp8attn_tools.cli.plots")
    for name in ("matplotlib", "matplotlib.colors"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(models, "load", never)
    hint = 'run pip install "fp8attn[cli]"'
    message = fail(monkeypatch, capsys, "evaluate", "needle", "--plot", "needle.png")
    assert message == f"fp8attn: matplotlib is not installed; {hint}"


def interrupted(tiny_model, code):
    """Returns exit code, stdout and stderr of `fp8attn generate` after `code`, which causes a SIGINT."""
    command = f"sys.argv = ['fp8attn', 'generate', 'x', '--model', {str(tiny_model)!r}]; _fp8attn_command.main()"
    interruptible = "signal.signal(signal.SIGINT, signal.default_int_handler)"  # background jobs of a shell ignore it
    code = f"import contextlib, signal, sys\n{interruptible}\nimport _fp8attn_command\n{code}\n{command}"
    path = os.pathsep.join([str(Path(cli.__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_generated(tiny_model):
    """The second word comes after the first was printed."""
    code = """
from transformers import LlamaForCausalLM

forward, calls = LlamaForCausalLM.forward, []

def interrupt(*arguments, **options):
    calls.append(1)
    if len(calls) == 9:
        signal.raise_signal(signal.SIGINT)
    return forward(*arguments, **options)

LlamaForCausalLM.forward = interrupt"""
    status, text, _ = interrupted(tiny_model, code)
    heading, continued = text.split("\n", 1)
    assert status == 130 and heading.startswith("FP8 cache")
    assert continued.startswith("x") and len(continued) > 8


@pytest.mark.slow
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


@pytest.mark.slow
def test_ctrl_c_during_a_run_is_silent_and_cleans_up(tiny_model):
    code = """
from fp8attn_tools.evaluation import models

def load(*arguments, **options):
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        print("cleaned up")

models.load = load"""
    assert interrupted(tiny_model, code) == (130, "cleaned up\n", "")


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
