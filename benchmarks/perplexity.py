"""Perplexity of held-out text through each cache, and how far its predictions are from BF16's, by position.

Contexts are short and long, prefilled in chunks and decoded token by token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from fp8attn import KVScales
from fp8attn_tools.evaluation import models
from fp8attn_tools.evaluation.perplexity import perplexity

from . import texts
from .problem import KEYS

IMPLS = ("bf16", "fp8attn-static", *KEYS)
CASES = {  # tokens of a context, windows, tokens decoded (0: all of them in chunks)
    "chunks-S4096": (4096, 32, 0), "chunks-S131072": (131072, 1, 0), "decode-S4096": (4096, 2, 128), "decode-S131072": (131072, 1, 256)
}  # fmt: skip
CHUNK = 8192


def rows(case: str, model: Any, tokenizer: Any, text: torch.Tensor, scales: KVScales) -> Iterator[dict]:
    """A row for each implementation, over windows from the start of `text [N]`."""
    context, windows, decode = CASES[case]
    makers = {impl: texts.make_cache(impl, model, scales) for impl in IMPLS}
    found = perplexity(model, models.windows(text, context + 1, windows), makers, chunk=CHUNK, decode_tokens=decode, tokenizer=tokenizer)
    for row in found:
        about = {name: value for name, value in asdict(row).items() if name != "cache"}
        yield {"case": case, "impl": row.cache, "windows": windows, "change": row.ppl / found[0].ppl - 1, **about, "ppl": row.ppl}


def measure(case: str) -> Iterator[dict]:
    model, tokenizer = texts.load()
    yield from rows(case, model, tokenizer, texts.tokens(tokenizer), texts.static_scales())
