"""Measure the trained model: bits per byte against general compressors, and recall by length and depth.

    python training/report.py --model models/stdlib-llama --out results/h100/model.json

Everything is measured through transformers with the BF16 weights that are committed, on the held-out modules only.
"""

import argparse
import datetime
import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import lzma
import math
import platform
import sys
from pathlib import Path

import numpy as np
import torch
from data import (
    ANSWER_TOKENS,
    LEARNED_TOKENS,
    MODEL,
    ROOT,
    RecallTask,
    is_test,
    load_tokenizer,
    read_held_out,
    tokenise,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

WINDOW, STRIDE = 4096, 2048
LENGTHS = (256, 512, 1024, 2048, 3072, 4096, 6144, 8192)
DEPTHS = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
PAIRS = 8
TOKENS_PER_BATCH = 65536


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
        tokens = [tokenise(tokenizer, [text]) for text in texts]
        rows.append(
            {
                "case": "bits_per_byte",
                "set": name,
                "documents": len(texts),
                "bytes": len(raw),
                "tokens": sum(map(len, tokens)) - len(texts),
                "model": sum(document_bits(model, t) for t in tokens) / len(raw),
                "xz_9e": 8 * len(lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)) / len(raw),
                "gzip_9": 8 * len(gzip.compress(raw, 9)) / len(raw),
            }
        )
    return rows


@torch.inference_mode()
def recall_accuracy(model, contexts):
    """Shares of contexts whose whole answer is the likeliest at each of its tokens: greedy decoding gives just it.

    Returns:
        (exact, exact_from_word): asked with the word and the number for the value, and asked with the word alone for
        both.
    """
    right = []
    for part in contexts.split(max(1, TOKENS_PER_BATCH // contexts.shape[1])):
        part = part[:, :-1].to(model.device)  # the newline after the answer is not asked for
        logits = model(part[:, :-1], logits_to_keep=LEARNED_TOKENS).logits
        right.append(logits.argmax(-1) == part[:, -LEARNED_TOKENS:])
    right = torch.cat(right)
    return tuple(right[:, -n:].all(1).float().mean().item() for n in (ANSWER_TOKENS, LEARNED_TOKENS))


def recall_rows(model, tokenizer, documents, samples, longest):
    """Recall by prompt length and depth with PAIRS pairs, and by length with one and many at random depths."""
    task = RecallTask(tokenizer, tokenise(tokenizer, [text for _, text in documents]), seed=20, distinct=True)

    def measure(length, pairs, depth, count):
        made = [task.row(length + ANSWER_TOKENS + 1, pairs, 1, depth)[0] for _ in range(count)]
        exact, from_word = recall_accuracy(model, torch.from_numpy(np.stack(made)).long())
        return {
            "case": "recall",
            "prompt_tokens": length,
            "pairs": pairs,
            "samples": count,
            "depth": "random" if depth is None else depth,
            "exact": exact,
            "exact_from_word": from_word,
        }

    lengths = [n for n in LENGTHS if n <= longest]
    rows = [measure(n, PAIRS, depth, samples) for n in lengths for depth in DEPTHS]
    return rows + [measure(n, pairs, None, 2 * samples) for n in lengths for pairs in (1, 32) if n >= 32 * pairs]


def source_hashes(model_folder):
    """SHA-256 of each file that the numbers depend on, by its path in the repository."""
    files = [*sorted((ROOT / "training").glob("*.py")), ROOT / "training" / "config.json"]
    hashes = {f.relative_to(ROOT).as_posix(): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
    weights = hashlib.sha256((model_folder / "model.safetensors").read_bytes()).hexdigest()
    return {**hashes, (MODEL / "model.safetensors").relative_to(ROOT).as_posix(): weights}


def triton_version():
    """Triton's version, or None where it is not installed."""
    return importlib.metadata.version("triton") if importlib.util.find_spec("triton") else None


def print_tables(rows):
    """The rows as the Markdown tables of the model card."""
    print("| held-out set | bytes | model | xz -9e | gzip -9 |\n| --- | --- | --- | --- | --- |")
    for r in rows:
        if r["case"] == "bits_per_byte":
            print(f"| {r['set']} | {r['bytes']} | {r['model']:.3f} | {r['xz_9e']:.3f} | {r['gzip_9']:.3f} |")
    recall = [r for r in rows if r["case"] == "recall"]
    print("\n| prompt tokens | " + " | ".join(f"depth {d}" for d in DEPTHS) + " | 1 pair | 32 pairs |")
    print("| --- |" + " --- |" * (len(DEPTHS) + 2))
    for length in sorted({r["prompt_tokens"] for r in recall}):
        here = {
            (r["pairs"], r["depth"]): f"{100 * r['exact']:.1f} ({100 * r['exact_from_word']:.0f})"
            for r in recall
            if r["prompt_tokens"] == length
        }
        cells = [here[PAIRS, d] for d in DEPTHS] + [here.get((p, "random"), "") for p in (1, 32)]
        print(f"| {length} | " + " | ".join(cells) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder with config.json and model.safetensors")
    parser.add_argument("--out", type=Path, help="where the numbers go as JSON")
    parser.add_argument("--samples", type=int, default=100, help="contexts for each length and depth")
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="longest prompt")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16 if cuda else torch.float32)
    model = model.to("cuda" if cuda else "cpu").eval()
    tokenizer, documents = load_tokenizer(), read_held_out()
    assert AutoTokenizer.from_pretrained(MODEL).encode(documents[0][1]) == tokenizer.encode(documents[0][1]).ids

    rows = compression_rows(model, tokenizer, documents)
    rows += recall_rows(model, tokenizer, documents, args.samples, args.longest)
    print_tables(rows)
    if args.out:
        meta = {
            "device": torch.cuda.get_device_name() if cuda else platform.machine(),
            "torch": torch.__version__,
            "triton": triton_version(),
            "date": datetime.date.today().isoformat(),
            "command": "python " + " ".join(sys.argv),
            "sources": source_hashes(args.model),
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
