"""Tables and plots of results."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from fp8attn_tools.calibration import Coverage, ScalesReport
from fp8attn_tools.cli import plots, tables
from fp8attn_tools.evaluation import models
from fp8attn_tools.evaluation.caches import cache_factory
from fp8attn_tools.evaluation.outcomes import Outcome
from fp8attn_tools.evaluation.paired import discordant
from fp8attn_tools.evaluation.perplexity import perplexity
from fp8attn_tools.evaluation.sensitivity import LayerSensitivity, Sensitivity


def outcomes():
    made = []
    for length in (512, 1024, 2048, 4096):
        for index in range(10):
            depth = index // 2 / 4
            right = length < 4096 if index % 2 else depth > 0
            made.append(Outcome("bf16", "recall", length, index, depth, ("12",), "12", 1.0))
            made.append(Outcome("fp8", "recall", length, index, depth, ("12",), "12" if right else "<b>", float(right)))
    return made


def test_needle_plot(tmp_path):
    path = tmp_path / "folder" / "needle.png"
    plots.save(plots.needle_maps(outcomes(), heading="Needle"), path)
    with pytest.raises(ValueError, match=r"a plot must be a \.png, \.svg or \.pdf file; got .*needle\.txt"):
        plots.save(plots.needle_maps(outcomes(), heading="Needle"), tmp_path / "needle.txt")
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert 1000 < width < 3000
    assert 400 < height < 1500


def coverage_report():
    """Two layers of 2 KV heads and 4 query heads; K of layer 3 saturates in head 1, and Q of layer 0 is rounded to zero
    in head 2.
    """
    found = {}
    for layer in (0, 3):
        found[layer] = {
            tensor: Coverage(torch.zeros(heads, dtype=torch.float64), torch.zeros(heads, dtype=torch.float64))
            for tensor, heads in (("k", 2), ("v", 2), ("q", 4))
        }
    found[3]["k"].saturated[1] = 0.0123
    found[0]["q"].underflow[2] = 0.2
    return ScalesReport(found, 5000)


def test_coverage():
    lines = [line.split() for line in shown(tables.coverage_table(coverage_report())).splitlines()]
    assert ["K", "all", "all", "0.3075%", "0"] in lines
    assert ["Q", "all", "all", "0", "2.5000%"] in lines
    assert lines[-2:] == [["K", "3", "1", "1.2300%", "0"], ["Q", "0", "2", "0", "20.0000%"]]


def shown(table):
    from rich.console import Console

    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


def test_needle_table():
    rows = [line.split() for line in shown(tables.needle_table(outcomes())).splitlines()]
    assert ["4096", "BF16"] + 5 * ["100%"] in rows
    assert ["FP8", "0%", "50%", "50%", "50%", "50%"] in rows
    assert ["FP8", "50%", "100%", "100%", "100%", "100%"] in rows


def test_accuracy_table():
    (table,) = tables.accuracy_tables(outcomes())
    rows = [line.split() for line in shown(table).splitlines()]
    assert ["4096", "BF16", "10/10", "72.2-100.0%"] in rows
    assert ["4096", "FP8", "4/10", "16.8-68.7%", "-60.0", "(-83.2,", "-20.1)", "6", "0", "0.031"] in rows
    assert len(discordant(outcomes())) == 3 * 1 + 6


def test_positions_table(loaded, tokens):
    model, tokenizer = loaded
    caches = {name: cache_factory(name, model) for name in ("bf16", "fp8")}
    rows = perplexity(model, models.windows(tokens, 601, 1), caches, tokenizer=tokenizer)
    lines = shown(tables.positions_table(rows)).splitlines()
    assert any(line.startswith("256 to 512") and f"{rows[0].positions[1].nll:.4f}" in line for line in lines), lines


def test_what_models_say_is_text():
    text = shown(tables.discordant_table(outcomes()))
    assert "Discordant samples: 9" in text and "<b>" in text


def report():
    """Of four layers; the third costs most, and the second nothing."""
    rows = [LayerSensitivity(n, kl, kl / 9, 258.0, 512.0) for n, kl in enumerate([2e-4, 0.0, 3e-3, 1e-4])]
    return Sensitivity(tuple(rows), (4e-3, 5e-4, 1e-4, 0.0), 1e-9, 512, 512, 64, (), "folder/tiny", "float32", "fp8")


def test_layers_table():
    rows = [line.split() for line in shown(tables.layers_table(report())).splitlines()]
    assert ["none", "4.00e-03", "1,032"] in rows
    at = rows.index(["2", "3.00e-03", "±", "3e-04", "5.00e-04", "1,286"])
    assert rows[at + 1] == ["0", "2.00e-04", "±", "2e-05", "1.00e-04", "1,540"]
    assert rows[at + 3] == ["1", "0.00e+00", "±", "0e+00", "0.00e+00", "2,048"]  # all in 16 bits


def test_perplexity_table(loaded, tokens):
    model, _ = loaded
    rows = perplexity(model, models.windows(tokens, 33, 1), {"bf16": cache_factory("bf16", model)})
    text = shown(tables.perplexity_table(rows))
    assert f"{rows[0].ppl:.4f}" in text
    assert "±" not in text  # the baseline has no difference
