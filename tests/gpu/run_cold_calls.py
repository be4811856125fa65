"""Makes prompts, steps and dense calls on a GPU, and prints as JSON how many kernels they loaded and the names of those
they compiled.

python -m tests.gpu.run_cold_calls SHAPE STEPS PROMPTS BATCHES  # each numbers with commas
"""

import json
import sys
from itertools import product

import torch
from triton import knobs

from fp8attn import KVPages, PagedKVCache, append, attention, scaled_dot_product_attention

(Q_HEADS, KV_HEADS, DIM), *GRID = (tuple(map(int, argument.split(","))) for argument in sys.argv[1:])
CUDA = torch.device("cuda", 0)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device=CUDA)


def prompt(tokens: int, batch: int) -> None:
    """A prompt, appended to a cache that grows, and as a dense call."""
    cache, x = PagedKVCache(KV_HEADS, DIM, num_seqs=batch, device=CUDA), random(batch * tokens, KV_HEADS, DIM)
    cache.append(0, x, x)
    cache.attention(0, random(batch * tokens, Q_HEADS, DIM))
    dense = random(batch, KV_HEADS, tokens, DIM)
    scaled_dot_product_attention(random(batch, Q_HEADS, tokens, DIM), dense, dense, is_causal=True, enable_gqa=True)


def step(tokens: int, batch: int, form: str) -> None:
    """New tokens after 1,000: the same number for each sequence, different numbers (`cu_seqlens`), or with padding on
    the left.
    """
    columns = -(-(1000 + tokens) // 128)
    pages = KVPages.empty(batch * columns, KV_HEADS, DIM, batch, columns, device=CUDA)
    pages.page_table.copy_(torch.arange(batch * columns, dtype=torch.int32, device=CUDA).view(batch, columns))
    pages.cache_seqlens.fill_(1000)
    x, bounds = (
        random(batch * tokens, KV_HEADS, DIM),
        torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=CUDA),
    )
    ragged = form == "ragged"
    append(pages, x, x, **({"cu_seqlens": bounds, "max_seqlen": tokens} if ragged else {}))
    padding = torch.full((batch,), 3, dtype=torch.int32, device=CUDA) if form == "padded" else None
    options = {"cu_seqlens_q": bounds, "max_seqlen_q": tokens} if ragged else {}
    attention(random(batch * tokens, Q_HEADS, DIM), pages, leftpad_k=padding, **options)


def main() -> None:
    steps, prompts, batches = GRID
    found: list[tuple[str, bool]] = []
    knobs.compilation.listener = lambda *, src, cache_hit, **_: found.append((src.name, cache_hit))
    with torch.inference_mode():
        for tokens, batch in product(prompts, batches):
            prompt(tokens, batch)
        for tokens, batch, form in product(steps, batches, ("even", "ragged", "padded")):
            step(tokens, batch, form)
    print(
        json.dumps({"loaded": sum(hit for _, hit in found), "compiled": sorted(name for name, hit in found if not hit)})
    )


if __name__ == "__main__":
    main()
