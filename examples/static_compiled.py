"""Decoding with compiled steps. The cache has a fixed size, so that one graph serves every step.

On a GPU `model.generate` compiles a step of such a cache by itself. This example shows what it does. With the small
model of this repository (on a GPU or a CPU), and with a model of yours:

    python examples/static_compiled.py
    python examples/static_compiled.py --model meta-llama/Llama-3.1-8B-Instruct --length 8192
"""

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fp8attn.integrations.transformers import FP8Cache

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--model", default=Path(__file__).parent.parent / "models/stdlib-llama", help="a folder or a Hugging Face id"
)
parser.add_argument("--prompt", default='def parse_header(line):\n    """')
parser.add_argument("--tokens", type=int, default=100, help="new tokens")
parser.add_argument("--length", type=int, default=1024, help="tokens that the cache has memory for")
args = parser.parse_args()

gpu = torch.cuda.is_available()
device = "cuda" if gpu else "cpu"
tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16 if gpu else torch.float32).to(device)
ids = tokenizer(args.prompt, return_tensors="pt").input_ids.to(device)

cache = FP8Cache(model, max_cache_len=args.length)
# On a GPU: CUDA graphs. On a CPU there is nothing to gain, and "aot_eager" compiles without a C++ compiler.
options = {"mode": "reduce-overhead"} if gpu else {"backend": "aot_eager"}
step = torch.compile(model, fullgraph=True, **options)

with torch.inference_mode():
    logits = model(
        ids, cache=cache, logits_to_keep=1
    ).logits  # the prompt runs uncompiled: its length differs from call to call
    position = torch.tensor([[ids.shape[1]]], device=device)
    tokens, times = [ids], []
    for _ in range(args.tokens):
        token = logits[:, -1:].argmax(-1)
        tokens.append(token)
        start = time.perf_counter()
        logits = step(
            token, cache=cache, position_ids=position
        ).logits.clone()  # the next step overwrites a graph's output
        position += 1
        if gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)

print(tokenizer.decode(torch.cat(tokens, 1)[0]))
steady = sorted(times)[len(times) // 2]
print(f"\n{1e3 * steady:.1f} ms a step (median); {times[0]:.1f} s for the first step, which compiles")
