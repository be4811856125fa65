"""A model's folder of a GGUF file that is written here."""

import types

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import from_gguf
from fp8attn_tools.evaluation import models
from tests.tools.evaluation.test_public import write_gguf


def test_a_folder_has_the_weights_in_fp32(tmp_path):
    want = write_gguf(tmp_path / "tiny.gguf")
    from_gguf.convert(tmp_path / "tiny.gguf", tmp_path / "folder")
    model, tokenizer = models.load(tmp_path / "folder", device="cpu")
    assert {x.dtype for x in model.parameters()} == {torch.float32} and tokenizer.decode(
        tokenizer("abc")["input_ids"]
    ) == "abc"
    assert torch.equal(model.model.embed_tokens.weight, want["token_embd.weight"])


def test_a_unigram_tokenizer_is_refused(tmp_path, monkeypatch):
    """transformers 5.17 makes one of Gemma 3's pieces."""
    unigram = types.SimpleNamespace(backend_tokenizer=types.SimpleNamespace(model=type("Unigram", (), {})()))
    monkeypatch.setattr(from_gguf.AutoTokenizer, "from_pretrained", lambda *_, **__: unigram)
    with pytest.raises(ValueError, match=r"of the kind Unigram of .*: install transformers 5\.23 or newer"):
        from_gguf.convert(tmp_path / "gemma.gguf", tmp_path / "folder")
