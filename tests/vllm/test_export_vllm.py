"""Exported checkpoints in stock vLLM: its layers hold the calibrated scales, and planted offsets cost much less than
with scales of 1.0.

Needs vLLM, and starts engines for minutes. `make test` has no vLLM, and skips this file.
"""

import json
import math

import pytest
import torch
import transformers

pytest.importorskip("vllm")

from fp8attn_tools import calibrate
from fp8attn_tools.checkpoints import export
from fp8attn_tools.evaluation import models
from tests.vllm.engines import engine
from tests.vllm.planted import prepare


@pytest.fixture(scope="module")
def calibrated():
    model, tokenizer = models.load(models.committed_model(), device="cpu")
    tokens = models.tokenize(tokenizer, models.read_text(None, models.committed_model()))
    return calibrate(model, models.windows(tokens, 512, 2, from_end=True).split(1), key_dtype="e4m3", rotate_keys=False)


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_every_scale_arrives(calibrated, tmp_path, strategy):
    exported = export(models.committed_model(), calibrated, tmp_path / "out", strategy=strategy)
    (tmp_path / "none.json").write_text("[]")
    found = engine(exported.folder, tmp_path / "none.json", tmp_path / "found.json")["scales"]
    assert len(found) == len(exported.scales) == 6
    for index, layer in exported.scales.items():
        there = found[f"model.layers.{index}.self_attn.attn"]
        assert there["dtype"].startswith("fp8")  # "auto" becomes FP8, because the config says so
        assert (there["k"], there["v"]) == (layer["k"].tolist(), layer["v"].tolist())
        queries = (
            layer["q"].view(len(layer["k"]), -1).amax(1)
        )  # of heads: vLLM takes the largest of a KV head's query heads
        assert there["q"] == queries.tolist()


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_transformers_rounds_k_and_v(calibrated, tmp_path, strategy):
    """With the package compressed-tensors, which vLLM installs, transformers reads the scales too."""
    folder = export(models.committed_model(), calibrated, tmp_path / "out", strategy=strategy).folder
    ids = torch.arange(200)[None]
    loaded = (
        transformers.AutoModelForCausalLM.from_pretrained(x, dtype=torch.float32)
        for x in (models.committed_model(), folder)
    )
    with torch.no_grad():
        exact, rounded = (model(ids).logits for model in loaded)
    # 8 bits cost about 2% here. Scales that were not read are random numbers there, with an error near one.
    assert 0 < (rounded - exact).norm() / exact.norm() < 0.05


def test_calibrated_scales_and_moved_offsets_are_better_than_ones(tmp_path):
    """K's outliers saturate at a scale of 1.0, and V's offsets cost the codes of V their precision, unless they have
    moved into a bias.
    """
    folders = prepare(tmp_path)
    tokens = models.tokenize(transformers.AutoTokenizer.from_pretrained(folders["model"]), models.read_text())
    (tmp_path / "windows.json").write_text(json.dumps(models.windows(tokens, 512, 2).tolist()))
    runs = {
        "bf16": ("model", {}),
        "ones": ("model", {"kv_cache_dtype": "fp8"}),
        "covered": ("covered", {}),
        "folded": ("folded", {}),
    }
    perplexity = {}
    for name, (folder, options) in runs.items():
        logprobs = engine(folders[folder], tmp_path / "windows.json", tmp_path / f"{name}.json", **options)["logprobs"]
        every = [value for window in logprobs for value in window]
        perplexity[name] = math.exp(-sum(every) / len(every))
    print(perplexity)
    # Measured (docs/lab/2026-11-export.md): 22.0, 2707, 34.7, 21.7.
    assert perplexity["folded"] < 1.03 * perplexity["bf16"], perplexity
    assert perplexity["covered"] < 2 * perplexity["bf16"] < perplexity["ones"] / 10, perplexity
