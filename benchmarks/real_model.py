"""What 8-bit keys and values cost a public model and this repository's own.

On identical tokens: perplexity beside the model in BF16, and divergence from the model in FP32 with exact attention.

`smollm2` is SmolLM2-135M-Instruct, `stdlib` the committed model. An implementation is a cache and a way to read it:
`-prefill` puts all tokens through the kernel of many queries (on a CPU: through the reference, whose arithmetic is
exact), and `-decode` reads the same bytes with 16-bit arithmetic, as a decode step does.

- `fp8attn-int8-keys` (the default), `fp8attn-e4m3-keys`: our pages, with keys in that format; `-e4m3-plain`: without
  rotation.
- `scale-1`: K and V cast to E4M3, in windows, too. In `-prefill` queries are cast as well, as a kernel without scales
  has them. The rounding of its weights is not counted.
- `transformers-fp8`: E4M3, one scale for a layer's K and one for its V, those of the first forward. In `-prefill` that
  forward attends to K and V before they are rounded, as transformers does.
- `bf16`: what the model computes, through torch's attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

from evidence.results import ROOT
from fp8attn.formats.codec import E4M3
from fp8attn.integrations.transformers import ATTN_IMPLEMENTATION, FP8Cache, fp8_kv_attention, fp8_kv_mask
from fp8attn_tools.evaluation import models
from fp8attn_tools.evaluation.caches import BF16Cache, E4M3Cache, MakeCache
from fp8attn_tools.evaluation.perplexity import by_token

from .rounded import ROUNDED_KV, ROUNDINGS, RoundedCache

CODE, PROSE = None, ROOT / "models/prose/sherlock.txt.xz"  # None: the held-out modules of the committed model
OURS: dict[str, dict[str, Any]] = {
    "fp8attn-int8-keys": {"key_dtype": "int8"},
    "fp8attn-e4m3-keys": {"key_dtype": "e4m3"},
    "fp8attn-e4m3-plain": {"key_dtype": "e4m3", "rotate_keys": False},
}
IMPLS = ("bf16", *(f"{name}-{how}" for name in (*OURS, "scale-1", "transformers-fp8") for how in ("prefill", "decode")))
OURS["fp8attn-exact"] = {"exact": True}  # of `public_models`
E4M3_QUERIES = "fp8_kv_e4m3_queries"  # what transformers calls attention with queries cast to E4M3
load = cache(models.load)  # of several cases
CHUNK = 8192  # tokens of a forward
LONG_CHUNK = 2048  # in longer contexts: exact attention makes all scores of a forward


@dataclass(frozen=True)
class Text:
    """Windows of a text, and the model that reads them."""

    model: str | None  # `smollm2` (SmolLM2-135M-Instruct, `fp8attn[public]`); None: the committed one
    path: Path | None
    context: int  # tokens of a window
    count: int

    def windows(self, tokenizer: Any) -> torch.Tensor:
        """Windows of ids, `[count, context + 1]`."""
        return models.windows(models.tokenize(tokenizer, models.read_text(self.path)), self.context + 1, self.count)


CASES = {
    "smollm2-S2048": Text("smollm2", CODE, 2048, 16),
    "smollm2-S8192": Text("smollm2", CODE, 8192, 8),
    "smollm2-prose-S8192": Text("smollm2", PROSE, 8192, 8),
    "stdlib-S4096": Text(None, CODE, 4096, 32),
    "stdlib-S131072": Text(None, CODE, 131072, 1),
}


class Through:
    """A model that attends in some way whenever it is called; another may share its weights.

    Args:
        model: a transformers model.
        attention: the name of its attention function.
        context: makes a context to call it in.
    """

    def __init__(self, model: Any, attention: str = ATTN_IMPLEMENTATION, context: Callable = nullcontext) -> None:
        self.model, self.attention, self.context = model, attention, context
        self.device = model.device

    def __call__(self, **given: Any) -> Any:
        self.model.set_attn_implementation(self.attention)
        with self.context():
            return self.model(**given)


def with_e4m3_queries(module, query, *args, **kwargs) -> tuple[torch.Tensor, None]:
    """`fp8_kv_attention` whose queries are cast to E4M3 with scale 1, and saturate."""
    return fp8_kv_attention(module, E4M3.quantize(query).to(query.dtype), *args, **kwargs)


AttentionInterface.register(E4M3_QUERIES, with_e4m3_queries)
AttentionMaskInterface.register(E4M3_QUERIES, fp8_kv_mask)


def run_of(impl: str, model: Any) -> tuple[Through, MakeCache]:
    """The run of `model` by an implementation, and a function that makes its cache."""
    config, plain = model.config, Through(model)
    name, _, how = impl.rpartition("-")
    if impl == "bf16":
        return plain, lambda: BF16Cache(config)
    if name == "scale-1":
        return Through(model, E4M3_QUERIES) if how == "prefill" else plain, lambda: E4M3Cache(config, windows=True)
    if impl in ROUNDINGS:
        return Through(model, ROUNDED_KV), lambda: RoundedCache(config, ROUNDINGS[impl])
    if name == "transformers-fp8":
        return plain, lambda: E4M3Cache(config, scale=None, first_exact=how == "prefill")
    exact = "triton" if model.device.type == "cuda" else "reference"  # 16-bit arithmetic for any number of queries
    return plain, lambda: FP8Cache(model, backend="auto" if how == "prefill" else exact, **OURS[name])


def exact_run(model: Any) -> tuple[Through, MakeCache]:
    """A model in FP32 with exact attention: on a GPU, torch's own steps, because its fused kernels multiply FP32 in
    parts.
    """
    context = (lambda: sdpa_kernel(SDPBackend.MATH)) if model.device.type == "cuda" else nullcontext
    return Through(model, context=context), lambda: DynamicCache(config=model.config)


def rows(
    case: str, model: Any, exact: Any, windows: torch.Tensor, impls: tuple[str, ...] = IMPLS, chunk: int = CHUNK
) -> Iterator[dict]:
    """A row for each implementation, over `windows [N, S + 1]`.

    Args:
        model: what the implementations run; `exact`: the same in FP32.
        impls: `bf16` first.
    """
    runs = {"fp32": exact_run(exact)} | {impl: run_of(impl, model) for impl in impls}
    found, _ = by_token(runs, windows, step=chunk)
    base_losses, base_kl = found["bf16"][0].flatten(), found["bf16"][1].mean().item()
    for impl in impls:
        losses, kl, same = found[impl].flatten(1)
        change = losses - base_losses
        mean = change.mean().item()
        row = {
            "ppl": math.exp(losses.mean()),
            "d_ppl_pct": 100 * math.expm1(mean),
            "d_ppl_se": 100 * math.exp(mean) * change.std().item() / math.sqrt(len(change)),
            "top1": same.mean().item(),
            "kl": kl.mean().item(),
            "kl_excess": kl.mean().item() - base_kl,
        }
        # Not a number: a cache whose scale its later values did not fit.
        numbers = {key: value if math.isfinite(value) else None for key, value in row.items()}
        yield {"case": case, "impl": impl, "windows": len(windows), "tokens": len(change), **numbers}


@torch.no_grad()
def measure(case: str) -> Iterator[dict]:
    text = CASES[case]
    model, tokenizer = load(text.model)
    exact = model if model.dtype == torch.float32 else load(text.model, dtype=torch.float32)[0]
    yield from rows(case, model, exact, text.windows(tokenizer), chunk=CHUNK if text.context <= CHUNK else LONG_CHUNK)
