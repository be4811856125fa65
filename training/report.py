"""Measure the trained model as one of text: bits per byte against general compressors.

    python training/report.py [--model FOLDER]

Everything is measured through transformers with the BF16 weights that are committed, on the held-out modules only.
"""

import argparse
import gzip
import lzma
import math
from pathlib import Path

import numpy as np
import torch
from data import MODEL, is_test, load_tokenizer, read_held_out, tokenize
from transformers import AutoModelForCausalLM, AutoTokenizer

WINDOW, STRIDE = 4096, 2048


@torch.inference_mode()
def document_bits(model, tokens):
    """Bits the model needs for `tokens` (an end-of-text token first, which is free), at least STRIDE tokens of
    context for each but the first ones."""
    nats, scored, start = 0.0, 1, 0
    while scored < len(tokens):
        ids = torch.as_tensor(tokens[start : start + WINDOW].astype(np.int64), device=model.device)[None]
        logits = model(ids).logits[0, :-1].float()
        losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        nats += losses[scored - start - 1 :].double().sum().item()
        scored = start + ids.shape[1]
        start += STRIDE
    return nats / math.log(2)


def compression_rows(model, tokenizer, documents):
    """Bits per byte of the model, gzip -9 and xz -9e for each held-out set, the set as one stream for the latter."""
    rows = []
    for name, kind in (("modules", [False]), ("tests", [True]), ("all", [False, True])):
        texts = [text for path, text in documents if is_test(path) in kind]
        raw = "".join(texts).encode()
        tokens = [tokenize(tokenizer, [text]) for text in texts]
        rows.append(
            {
                "case": f"bits_per_byte-{name}",
                "impl": "stdlib-llama",
                "documents": len(texts),
                "bytes": len(raw),
                "tokens": sum(map(len, tokens)) - len(texts),
                "model": sum(document_bits(model, t) for t in tokens) / len(raw),
                "xz_9e": 8 * len(lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)) / len(raw),
                "gzip_9": 8 * len(gzip.compress(raw, 9)) / len(raw),
            }
        )
    return rows


def print_table(rows):
    """The rows as the Markdown table of the model card."""
    print("| held-out set | bytes | model | xz -9e | gzip -9 |\n| --- | --- | --- | --- | --- |")
    for r in rows:
        print(
            f"| {r['case'].partition('-')[2]} | {r['bytes']} | {r['model']:.3f} | {r['xz_9e']:.3f} | {r['gzip_9']:.3f} "
            f"|"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder with config.json and model.safetensors")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16 if cuda else torch.float32)
    model = model.to("cuda" if cuda else "cpu").eval()
    tokenizer, documents = load_tokenizer(), read_held_out()
    assert AutoTokenizer.from_pretrained(MODEL).encode(documents[0][1]) == tokenizer.encode(documents[0][1]).ids

    print_table(compression_rows(model, tokenizer, documents))


if __name__ == "__main__":
    main()
