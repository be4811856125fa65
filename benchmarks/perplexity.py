"""Perplexity, KL divergence and agreement with BF16 of the same held-out text through each cache, by position: short and long contexts,
prefilled in chunks and decoded token by token.

    python -m benchmarks.perplexity [--save]
"""

from __future__ import annotations

import time
from dataclasses import asdict

import torch

from fp8attn import calibrate
from fp8attn.evaluation import models
from fp8attn.evaluation.caches import cache_factory
from fp8attn.evaluation.perplexity import perplexity

from . import results
from .problem import KEYS

IMPLS = {"bf16": "bf16", "fp8attn-static": "fp8-static", **{impl: f"fp8-{name}-keys" for impl, name in KEYS.items()}}
CASES = ((4096, 32, 0), (131072, 1, 0), (4096, 2, 128), (131072, 1, 256))  # tokens of a context, windows, tokens decoded (0: in chunks)


def rows(model, tokenizer, text: torch.Tensor, cases, chunk: int, calibration: torch.Tensor) -> list[dict]:
    """A row for each case and implementation, over windows from the start of `text [N]`; `calibration [N, S]` gives static scales."""
    scales = calibrate(model, calibration.split(1))
    makers = {
        name: cache_factory(cache, model.config, model=model, scales=scales if cache == "fp8-static" else None)
        for name, cache in IMPLS.items()
    }
    found = []
    for context, windows, decode in cases:
        began = time.monotonic()
        tokens = models.windows(text, context + 1, windows)
        measured = perplexity(model, tokens, makers, chunk=chunk, decode_tokens=decode, tokenizer=tokenizer)
        for row in measured:
            case = {"case": f"{row.mode}-S{context}", "impl": row.cache, "windows": windows, "change": row.ppl / measured[0].ppl - 1}
            found.append(case | {name: value for name, value in asdict(row).items() if name != "cache"} | {"ppl": row.ppl})
        changes = ", ".join(f"{row.cache} {row.ppl / measured[0].ppl - 1:+.3%}" for row in measured[1:])
        print(f"{found[-1]['case']}: {measured[0].ppl:.4f}; {changes}; {time.monotonic() - began:.0f} s", flush=True)
    return found


def main() -> None:
    parser = results.arguments(__doc__, cases=False)
    parser.add_argument("--model", help="a folder or Hugging Face id; default: the committed model")
    parser.add_argument("--chunk", type=int, default=8192)
    args = results.parse(parser)
    model, tokenizer = models.load(args.model)
    text = models.tokenize(tokenizer, models.read_text(None, args.model))
    found = rows(model, tokenizer, text, CASES, args.chunk, models.windows(text, 8192, 4, from_end=True))
    if args.save:
        results.save("perplexity", found)


if __name__ == "__main__":
    main()
