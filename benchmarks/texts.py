"""The models, texts and caches of the benchmarks that read text."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from evidence.results import ROOT
from fp8attn import KVScales, calibrate
from fp8attn.evaluation import models
from fp8attn.evaluation.caches import MakeCache, cache_factory
from fp8attn.evaluation.public import PUBLIC, find

from .problem import KEYS

CACHES = {impl: f"fp8-{key_dtype}-keys" for impl, key_dtype in KEYS.items()} | {"bf16": "bf16", "fp8attn-static": "fp8-static"}
CALIBRATION = (8192, 4)  # tokens of a window, windows
CODE, PROSE = None, ROOT / "models/prose/sherlock.txt.xz"  # None: the held-out modules of the committed model


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
    """`[N]` ids of a text."""
    return models.tokenize(tokenizer, models.read_text(path))


@cache
def static_scales() -> KVScales:
    """Of the committed model, calibrated on the end of its text."""
    model, tokenizer = load()
    return calibrate(model, models.windows(tokens(tokenizer), *CALIBRATION, from_end=True).split(1))


def make_cache(impl: str, model: Any, scales: KVScales | None = None, **options: Any) -> MakeCache:
    """What makes an implementation's cache, one of `CACHES`; `scales` are those of `fp8attn-static`."""
    scales = scales if impl == "fp8attn-static" else None
    return cache_factory(CACHES[impl], model.config, model=model, scales=scales, **options)
