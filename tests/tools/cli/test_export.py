"""`fp8attn export` on a tiny model: from calibration to a folder, and what is refused."""

import json

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")

from fp8attn import KVScales
from fp8attn_tools import cli
from tests.tools.cli.running import run, run_json


@pytest.fixture(scope="module")
def scales_file(tiny_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("scales") / "scales.safetensors"
    options = ("--context", 100, "--windows", 3, "--key-dtype", "e4m3", "--no-rotate-keys")
    run_json("calibrate", "--model", tiny_model, "--out", path, *options)
    return path


def test_export(tiny_model, scales_file, tmp_path):
    folder = tmp_path / "out"
    options = (tiny_model, "--scales", scales_file, "--strategy", "attn_head")
    found = run_json("export", *options, "--out", folder)
    scales = KVScales.load(scales_file)
    assert [row["layer"] for row in found["rows"]] == [0, 1] and found["strategy"] == "attn_head"
    assert found["rows"][1]["v_scale"] == scales.layer(1).v_scale.tolist()
    assert found["moved"] == [index for index in (0, 1) if scales.layer(index).v_mean.any()]
    assert found == run_json("export", folder, "--check", "--scales", scales_file)
    text = " ".join(run("export", folder, "--check").split())
    assert "every layer has its scales" in text and f"vllm serve {folder} --kv-cache-dtype fp8" in text
    text = run("export", *options, "--out", tmp_path / "skipped", "--skip-layers", "1", "--no-fold-v-mean")
    assert "in 16 bits" in text and "--kv-cache-dtype-skip-layers 1" in text


def refused(capfd, monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["fp8attn", "export", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    message = capfd.readouterr().err
    assert message.count("\n") == 1
    return message


def test_what_is_refused_takes_one_line(tiny_model, scales_file, tmp_path, capfd, monkeypatch):
    assert "give --scales FILE" in refused(capfd, monkeypatch, tiny_model)
    assert "--check writes nothing" in refused(capfd, monkeypatch, tiny_model, "--check", "--out", tmp_path / "x")
    assert "vLLM would read no scales" in refused(capfd, monkeypatch, tiny_model, "--check")
    options = (tiny_model, "--scales", scales_file, "--out", tmp_path / "out")
    assert "--skip-layers must be numbers" in refused(capfd, monkeypatch, *options, "--skip-layers", "first")
    run("export", *options)
    index = tmp_path / "out" / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"] = {name: file for name, file in value["weight_map"].items() if not name.endswith("_scale")}
    index.write_text(json.dumps(value))
    assert "vLLM would not read it" in refused(capfd, monkeypatch, tmp_path / "out", "--check")
