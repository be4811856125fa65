"""How far predictions are from BF16's over a hundred thousand decoded tokens.

They are decoded behind a prompt, one at a time, while the cache's pages are copied, reordered, truncated and grown in scale. Two sequences
of held-out text run side by side; a step through our cache is a CUDA graph. BF16 reads the same tokens in chunks.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from fp8attn import KVScales
from fp8attn.evaluation import models
from fp8attn.evaluation.drift import drift

from . import texts
from .problem import KEYS

IMPLS = (*KEYS, "fp8attn-static")
CASES = ("decode",)  # its rows are `decode-S*`, of segments
PROMPT, SEGMENT, CHUNK, SEQUENCES = 8192, 500, 8192, 2  # tokens, but for the last


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--impl", default="fp8attn", help="some of " + ", ".join(IMPLS))
    parser.add_argument("--decode", type=int, default=100_000, help="tokens")


def rows(impl: str, model: Any, tokens: torch.Tensor, scales: KVScales | None) -> Iterator[dict]:
    """A row for each segment of `tokens [B, PROMPT + N + 1]`."""
    make = texts.make_cache(impl, model, scales, max_cache_len=tokens.shape[1] - 1)
    for found in drift(model, tokens, make, texts.make_cache("bf16", model), prompt=PROMPT, segment=SEGMENT, chunk=CHUNK):
        yield {"case": f"decode-S{found.start}", "impl": impl, "sequences": len(tokens), **asdict(found)}


def measure(case: str, impl: str, decode: int) -> Iterator[dict]:
    model, tokenizer = texts.load()
    tokens = models.windows(texts.tokens(tokenizer), PROMPT + decode + 1, SEQUENCES)
    for name in impl.split(","):
        yield from rows(name, model, tokens, texts.static_scales() if name == "fp8attn-static" else None)
