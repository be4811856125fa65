"""Measure the trained model: bits per byte against general compressors, and RULER's retrieval tasks by length and depth.

    PYTHONPATH=src python -m training.long_context.report --model models/stdlib-llama --out results/h100/model.json

Everything is measured through transformers with the BF16 weights that are committed; text on the held-out modules only. The retrieval
tasks are lm-eval's (`fp8attn[ruler]`), put through `fp8attn.evaluation` with its BF16 cache.
"""

import argparse
import datetime
import hashlib
import json
import platform
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fp8attn.evaluation.caches import cache_factory
from fp8attn.evaluation.needle import ask, cells
from fp8attn.evaluation.paired import wilson
from fp8attn.evaluation.ruler import NAMES, ruler_samples

from . import FOLDER  # and makes the folder above importable

from data import MODEL, ROOT, load_tokenizer, read_held_out  # isort: skip
from report import compression_rows, triton_version  # isort: skip

SHARED = ("data.py", "model.py", "report.py", "train.py", "config.json")  # of the folder above
LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
DEPTHS = [tenth / 10 + 0.05 for tenth in range(10)]
CHUNK = 8192


def retrieval_rows(model, tokenizer, samples, longest):
    """For each task and length, samples answered with Wilson's interval, and the share by tenth of the depth."""
    rows = []
    for task in NAMES:
        for length in (n for n in LENGTHS if n <= longest):
            made = ruler_samples(tokenizer, task, lengths=(length,), samples=samples)
            outcomes = ask(model, tokenizer, made, {"bf16": cache_factory("bf16", model.config)}, chunk=CHUNK)
            right = sum(outcome.right for outcome in outcomes)
            by_depth = {f"{cell.depth:.2f}": cell.score for cell in cells(outcomes, most_depths=0)}
            rows.append(
                {
                    "case": f"{task}-S{length}",
                    "samples": len(outcomes),
                    "accuracy": right / len(outcomes),
                    "interval": wilson(right, len(outcomes)),
                    "by_depth": by_depth,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def source_hashes(model_folder):
    """SHA-256 of each file that the numbers depend on, by its path in the repository."""
    files = [*(FOLDER.parent / name for name in SHARED), *sorted(FOLDER.glob("*.py")), FOLDER / "config.json"]
    hashes = {f.relative_to(ROOT).as_posix(): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
    weights = hashlib.sha256((model_folder / "model.safetensors").read_bytes()).hexdigest()
    return {**hashes, (MODEL / "model.safetensors").relative_to(ROOT).as_posix(): weights}


def print_tables(rows):
    """The rows as the Markdown tables of the model card."""
    print("| held-out set | bytes | model | xz -9e | gzip -9 |\n| --- | --- | --- | --- | --- |")
    for r in rows:
        if r["case"] == "bits_per_byte":
            print(f"| {r['set']} | {r['bytes']} | {r['model']:.3f} | {r['xz_9e']:.3f} | {r['gzip_9']:.3f} |")
    print("\n| case | right | " + " | ".join(f"{depth:.0%}" for depth in DEPTHS) + " |\n| --- |" + " --- |" * (len(DEPTHS) + 1))
    for r in rows:
        if "by_depth" in r:
            shares = [r["by_depth"].get(f"{depth:.2f}") for depth in DEPTHS]
            columns = ["" if share is None else f"{100 * share:.0f}" for share in shares]
            print(f"| {r['case']} | {100 * r['accuracy']:.1f} | " + " | ".join(columns) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder with config.json and model.safetensors")
    parser.add_argument("--out", type=Path, help="where the numbers go as JSON")
    parser.add_argument("--samples", type=int, default=100, help="of each task and length")
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="longest prompt")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16 if cuda else torch.float32, attn_implementation="fp8_kv")
    model = model.to("cuda" if cuda else "cpu").eval()
    tokenizer, documents = load_tokenizer(), read_held_out()
    assert AutoTokenizer.from_pretrained(MODEL).encode(documents[0][1]) == tokenizer.encode(documents[0][1]).ids

    rows = compression_rows(model, tokenizer, documents)
    rows += retrieval_rows(model, AutoTokenizer.from_pretrained(args.model), args.samples, args.longest)
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
