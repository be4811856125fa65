"""Folders of GGUF files: a model that transformers converts whole, and Gemma's tokenizer, which it does not."""

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import from_gguf
from fp8attn_tools.evaluation import models
from tests.tools.evaluation.test_public import write_gguf

PIECES = [
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "\n\n",
    "  ",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    "he",
    "▁t",
    "▁the",
    "▁",
    "\n",
    *"aeht",
]
TYPES = [3, 3, 3, 2, 4, 4, *[6] * 256, *[1] * 9]


def test_gemma_merges_pieces_by_their_ids():
    tokenizer = from_gguf.gemma_tokenizer(PIECES, TYPES)
    text = "the the  the\n\n\nhat é"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    # No piece joins "t" and "he". Two spaces are a user-defined piece, which GGUF files spell with spaces. It has a lower id than "▁t", so
    # nothing is left for "▁the" there. "é" is two bytes.
    assert tokenizer.convert_ids_to_tokens(ids) == [
        "t", "he", "▁the", "▁▁", "t", "he", "\n\n", "\n", "h", "a", "t", "▁", "<0xC3>", "<0xA9>",
    ]  # fmt: skip
    assert tokenizer.decode(ids) == text and tokenizer.bos_token_id == 2


def test_a_folder_has_the_weights_in_fp32(tmp_path):
    want = write_gguf(tmp_path / "tiny.gguf")
    from_gguf.convert(tmp_path / "tiny.gguf", tmp_path / "folder")
    model, tokenizer = models.load(tmp_path / "folder", device="cpu")
    assert {x.dtype for x in model.parameters()} == {torch.float32} and tokenizer.decode(tokenizer("abc")["input_ids"]) == "abc"
    assert torch.equal(model.model.embed_tokens.weight, want["token_embd.weight"])
