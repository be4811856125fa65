"""Text generation with an 8-bit KV cache. The cache grows with the text.

With the small model of this repository (on a GPU or a CPU), and with a model of yours:

    python examples/generate.py
    python examples/generate.py --model meta-llama/Llama-3.1-8B-Instruct --prompt "The KV cache of a language model"
"""

import argparse
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
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(
    args.model, dtype=torch.bfloat16 if device == "cuda" else torch.float32
).to(device)
inputs = tokenizer(args.prompt, return_tensors="pt").to(device)

cache = FP8Cache(model)  # also sets the model's attention implementation to "fp8_kv"
out = model.generate(
    **inputs, cache=cache, max_new_tokens=args.tokens, do_sample=False
)  # transformers before 5.24: past_key_values=cache

print(tokenizer.decode(out[0]))
pages = cache.pages(cache.fp8_layers[0])
bf16 = 2 * 2 * len(cache.layers) * pages.num_kv_heads * pages.head_dim  # bytes of K and V, a token
print(
    f"\n{cache.get_seq_length()} tokens: {cache.nbytes:,} bytes in pages of 128 tokens; BF16 takes "
    f"{bf16 * cache.get_seq_length():,}"
)
