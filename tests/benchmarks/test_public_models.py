"""Four public models, as far as they are there: cases, windows, and a model with sliding windows through
every cache.
"""

import pytest
import torch

pytest.importorskip("transformers")

from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from benchmarks import public_models, real_model
from evidence import rows as reading
from evidence.results import ROOT
from evidence.tables import BLOCKS


class Letters:
    """A tokenizer of letters, whose BOS is 99."""

    bos_token_id = 99

    def __call__(self, text, **options):
        return {"input_ids": [ord(letter) - 97 for letter in text]}


def test_windows_of_gemma_begin_with_bos(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("abcdefghij")
    plain = public_models.Text("qwen", path, 3, 2).windows(Letters())
    begun = public_models.Text("gemma", path, 3, 2).windows(Letters())
    assert plain.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]] and begun.tolist() == [[99, 0, 1, 2], [99, 3, 4, 5]]


def test_the_texts_of_the_repository_are_its_files_in_order():
    """Both have more characters than any tokenizer's 32,785 tokens: Qwen2.5's have 3.4 each in this code."""
    source, docs = (public_models.own_text(pattern) for pattern in public_models.OWN.values())
    assert source.startswith((ROOT / "src/fp8attn/__init__.py").read_text()) and docs.startswith(
        (ROOT / "docs/api.md").read_text()
    )
    assert min(len(source), len(docs)) > 300_000


def test_a_model_that_is_not_there_is_left_out(monkeypatch, capsys):
    for name in ("QWEN", "QWEN15B", "GEMMA"):
        monkeypatch.delenv(f"FP8ATTN_{name}", raising=False)
    assert [row for case in public_models.CASES if "smollm2" not in case for row in public_models.measure(case)] == []
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 14 and "qwen-code-S2048 is left out: FP8ATTN_QWEN does not name its folder" in said[0]


def test_a_folder_is_loaded_and_measured(tiny_model, monkeypatch):
    monkeypatch.setenv("FP8ATTN_QWEN", str(tiny_model))
    monkeypatch.setitem(public_models.CASES, "qwen-code-S2048", public_models.Text("qwen", None, 64, 1))
    public_models.load.cache_clear()
    found = {row["impl"]: row for row in public_models.measure("qwen-code-S2048")}
    public_models.load.cache_clear()
    assert tuple(found) == public_models.IMPLS and all(row["tokens"] == 64 for row in found.values())
    assert (
        found["vllm-int8-per-token-head"]["kl"]
        < found["vllm-fp8-per-token-head"]["kl"]
        < found["vllm-int4-per-token-head"]["kl"]
    )


@torch.no_grad()
def test_windows_are_rounded_too():
    """A model of windows of 512 alone: in BF16 and with a cast to E4M3 it differs from FP32, and through our pages for
    windows as well.
    """
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64,
        sliding_window=512, layer_types=["sliding_attention", "sliding_attention"],
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval()
    windows = torch.randint(97, (1, 641))
    impls = ("bf16", "fp8attn-int8-keys-decode", "scale-1-decode", "vllm-int8-per-token-head")
    found = {row["impl"]: row["kl"] for row in real_model.rows("tiny", model, model, windows, impls, 320)}
    assert (
        0
        < found["bf16"]
        < found["vllm-int8-per-token-head"]
        < found["fp8attn-int8-keys-decode"]
        < found["scale-1-decode"]
    )


def test_tables_have_what_was_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(reading, "RESULTS", tmp_path)
    assert (
        BLOCKS["public-models"]() == "(not measured yet: `public_models`)"
        and BLOCKS["tasks"]() == "(not measured yet: `tasks`)"
    )
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200/public_models.json").write_text(
        '{"rows": [{"case": "qwen-code-S2048", "impl": "scale-1-decode", "d_ppl_pct": 12.5, "d_ppl_se": 0.5, '
        '"kl_excess": 0.02},'
        '{"case": "qwen-code-S2048", "impl": "vllm-int8-per-token-head", "d_ppl_pct": 0.1, "d_ppl_se": 0.05, '
        '"kl_excess": 0.001}]}'
    )
    assert BLOCKS["public-models"]().splitlines() == [
        "| Qwen2.5-Coder-0.5B (H200) | code, 2k |", "| --- | --- |",
        "| a plain cast to E4M3, decode | +12.50 ± 0.50%, 20.0 |",
        "| vLLM's `int8_per_token_head` | +0.10 ± 0.05%, 1.0 |",
    ]  # fmt: skip
    (tmp_path / "h200/tasks.json").write_text(
        '{"rows": [{"case": "gsm8k", "impl": "bf16", "samples": 100, "right": 30},'
        '{"case": "gsm8k", "impl": "scale-1", "samples": 100, "right": 20, "difference": -0.1, '
        '"low": -0.15, "high": -0.02, "p": 0.01}]}'
    )
    assert BLOCKS["tasks"]().splitlines()[2:] == [
        "| BF16 | 30 of 100 | |", "| a plain cast to E4M3 | 20 of 100 | -10.0 (-15.0 to -2.0), p 0.01 |",
    ]  # fmt: skip
