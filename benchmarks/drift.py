"""The difference of predictions from BF16's over 100,000 decoded tokens.

They are decoded behind a prompt, one at a time, while the cache's pages are copied, reordered, truncated and grown in scale. Two sequences
of held-out text run side by side; a step through our cache is a CUDA graph. BF16 reads the same tokens in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from fp8attn_tools.evaluation import models
from fp8attn_tools.evaluation.drift import drift

from . import texts

IMPL = "fp8attn"
CASES = ("decode",)  # its rows are `decode-S*`, of segments
PROMPT, DECODED, SEGMENT, CHUNK = 8192, 100_000, 500, 8192  # tokens
SEQUENCES = 2


def rows(model: Any, tokens: torch.Tensor) -> Iterator[dict]:
    """A row for each segment of `tokens [B, PROMPT + N + 1]`."""
    make = texts.make_cache(IMPL, model, max_cache_len=tokens.shape[1] - 1)
    for found in drift(model, tokens, make, texts.make_cache("bf16", model), prompt=PROMPT, segment=SEGMENT, chunk=CHUNK):
        yield {"case": f"decode-S{found.start}", "impl": IMPL, "sequences": len(tokens), **asdict(found)}


def measure(case: str) -> Iterator[dict]:
    model, tokenizer = texts.load()
    yield from rows(model, models.windows(texts.tokens(tokenizer), PROMPT + DECODED + 1, SEQUENCES))
