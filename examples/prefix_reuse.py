"""One long prompt, several continuations: the prompt is computed once, and its 8-bit pages are reused.

With the small model of this repository (on a GPU or a CPU), and with a model and a prompt of yours. With --pages the
first run writes the prompt's pages to a file, and later runs read them:

    python examples/prefix_reuse.py --pages out/prefix.safetensors
    python examples/prefix_reuse.py --model meta-llama/Llama-3.1-8B-Instruct --prefix paper.txt "What is new?" "What is
    missing?"
"""

import argparse
import copy
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fp8attn.integrations.transformers import FP8Cache

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("continuations", nargs="*", default=["\ndef load(path):", "\nclass Reader:"])
parser.add_argument(
    "--model", default=Path(__file__).parent.parent / "models/stdlib-llama", help="a folder or a Hugging Face id"
)
parser.add_argument("--prefix", type=Path, default=Path(__file__), help="a text file: the shared prompt")
parser.add_argument("--pages", type=Path, help="a file for the prompt's pages")
parser.add_argument("--tokens", type=int, default=12, help="new tokens")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(
    args.model, dtype=torch.bfloat16 if device == "cuda" else torch.float32
).to(device)

prefix = tokenizer(args.prefix.read_text(), return_tensors="pt").input_ids.to(device)
start = time.perf_counter()
if args.pages and args.pages.exists():
    cache = FP8Cache.load(args.pages, model, tokens=prefix)  # refuses the pages of another prompt
else:
    cache = FP8Cache(model)
    with torch.inference_mode():
        model(prefix, cache=cache, logits_to_keep=1)
    if args.pages:
        cache.save(args.pages, tokens=prefix)
print(f"prompt of {prefix.shape[1]} tokens: {time.perf_counter() - start:.2f} s, {cache.nbytes:,} bytes")

for text in args.continuations:
    ids = torch.cat([prefix, tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids.to(device)], 1)
    start = time.perf_counter()
    branch = copy.deepcopy(cache)  # `cache` itself stays at the end of the prompt
    out = model.generate(ids, cache=branch, max_new_tokens=args.tokens, do_sample=False)  # computes the new tokens only
    print(f"\n{time.perf_counter() - start:.2f} s: {tokenizer.decode(out[0, prefix.shape[1] :])!r}")
