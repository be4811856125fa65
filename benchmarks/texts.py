"""The models, texts and caches of the benchmarks that read text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from evidence.fingerprint import ROOT
from fp8attn import KVScales
from fp8attn_tools import calibrate
from fp8attn_tools.evaluation import models
from fp8attn_tools.evaluation.caches import MakeCache, cache_factory
from fp8attn_tools.evaluation.public import PUBLIC, find

from .problem import KEYS

CACHES = {impl: f"fp8-{key_dtype}-keys" for impl, key_dtype in KEYS.items()} | {"bf16": "bf16", "fp8attn-static": "fp8-static"}
CALIBRATION = (8192, 4)  # tokens of a window, windows
CODE, PROSE = None, ROOT / "models/prose/sherlock.txt.xz"  # None: the held-out modules of the committed model


@dataclass(frozen=True)
class Text:
    """Windows of a text, and the model that reads them."""

    model: str | None  # `smollm2` (SmolLM2-135M-Instruct, `fp8attn[public]`); None: the committed one
    path: Path | None
    context: int  # tokens of a window
    count: int

    def windows(self, tokenizer: Any) -> torch.Tensor:
        """Windows of ids, `[count, context + 1]`."""
        return models.windows(tokens(tokenizer, self.path), self.context + 1, self.count)


TEXTS = {
    "smollm2-S2048": Text("smollm2", CODE, 2048, 16),
    "smollm2-S8192": Text("smollm2", CODE, 8192, 8),
    "smollm2-prose-S8192": Text("smollm2", PROSE, 8192, 8),
    "stdlib-S4096": Text(None, CODE, 4096, 32),
    "stdlib-S131072": Text(None, CODE, 131072, 1),
}


@cache
def load(name: str | None = None, dtype: torch.dtype | None = None) -> tuple[Any, Any] | None:
    """A model (None: the committed one) and its tokenizer; None where a public model is not installed, which is printed."""
    if name in PUBLIC:
        try:
            find(name)
        except ValueError as problem:
            print(f"left out: {problem}", flush=True)
            return None
    return models.load(name, dtype=dtype)


def tokens(tokenizer: Any, path: Path | None = CODE) -> torch.Tensor:
    """The ids of a text, `[N]`."""
    return models.tokenize(tokenizer, models.read_text(path))


@cache
def static_scales() -> KVScales:
    """Static scales of the committed model, calibrated on the end of its text."""
    model, tokenizer = load()
    return calibrate(model, models.windows(tokens(tokenizer), *CALIBRATION, from_end=True).split(1))


def make_cache(impl: str, model: Any, scales: KVScales | None = None, **options: Any) -> MakeCache:
    """A function that makes the cache of an implementation, one of `CACHES`. `scales` are those of `fp8attn-static`."""
    scales = scales if impl == "fp8attn-static" else None
    return cache_factory(CACHES[impl], model, scales=scales, **options)
