"""What 8-bit keys and values cost a public model and this repository's own: perplexity beside the model in BF16, and divergence from the
model in FP32 with exact attention, on identical tokens.

    python -m benchmarks.real_model [case substring ...] [--windows N] [--save]

`smollm2` is SmolLM2-135M-Instruct (`fp8attn[public]`), `stdlib` the committed model. An implementation is a cache and a way to read it:
`-prefill` puts all tokens through the kernel of many queries (on a CPU: through the reference, whose arithmetic is exact), and `-decode`
reads the same bytes with 16-bit arithmetic, as a decode step does.

- `fp8attn`: our pages, as they are by default; `-int8-keys`, `-e4m3-keys`: with keys in that format; `-e4m3-plain`: without rotation.
- `scale-1`: K and V cast to E4M3. In `-prefill` queries are cast too, as a kernel without scales has them. The rounding of its weights is
  not counted.
- `transformers-fp8`: E4M3, one scale for a layer's K and one for its V, those of the first forward. In `-prefill` that forward attends to K
  and V before they are rounded, as transformers does.
- `bf16`: what the model computes, through torch's attention.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

from fp8attn.evaluation import models
from fp8attn.evaluation.caches import BF16Cache, E4M3Cache, MakeCache
from fp8attn.evaluation.perplexity import by_token
from fp8attn.evaluation.public import PUBLIC, find
from fp8attn.integrations.transformers import ATTN_IMPLEMENTATION, FP8Cache, fp8_kv_attention, fp8_kv_mask
from fp8attn.numerics import quantize

from . import results

CODE, PROSE = None, results.ROOT / "models/prose/sherlock.txt.xz"  # None: the held-out modules of the committed model
OURS: dict[str, dict[str, Any]] = {
    "fp8attn": {},
    "fp8attn-int8-keys": {"key_dtype": "int8"},
    "fp8attn-e4m3-keys": {"key_dtype": "e4m3"},
    "fp8attn-e4m3-plain": {"key_dtype": "e4m3", "rotate_keys": False},
}
IMPLS = ("bf16", *(f"{name}-{how}" for name in (*OURS, "scale-1", "transformers-fp8") for how in ("prefill", "decode")))
E4M3_QUERIES = "fp8_kv_e4m3_queries"  # what transformers calls attention with queries cast to E4M3


@dataclass(frozen=True)
class Case:
    """A model (None: the committed one), a text (a path, or CODE), tokens of a window and how many windows."""

    model: str | None
    text: Path | None
    context: int
    windows: int


CASES = {
    "smollm2-S2048": Case("smollm2", CODE, 2048, 16),
    "smollm2-S8192": Case("smollm2", CODE, 8192, 8),
    "smollm2-prose-S8192": Case("smollm2", PROSE, 8192, 8),
    "stdlib-S4096": Case(None, CODE, 4096, 32),
    "stdlib-S131072": Case(None, CODE, 131072, 1),
}


class Through:
    """A model that attends in some way whenever it is called; another may share its weights.

    Args:
        model: a transformers model.
        attention: the name of its attention function.
        context: makes a context to call it in.
    """

    def __init__(self, model: Any, attention: str = ATTN_IMPLEMENTATION, context: Callable | None = None) -> None:
        self.model, self.attention, self.context = model, attention, context
        self.device = model.device

    def __call__(self, **given: Any) -> Any:
        self.model.set_attn_implementation(self.attention)
        if self.context is None:
            return self.model(**given)
        with self.context():
            return self.model(**given)


def with_e4m3_queries(module, query, *args, **kwargs) -> tuple[torch.Tensor, None]:
    """`fp8_kv_attention` whose queries are cast to E4M3 with scale 1, and saturate."""
    return fp8_kv_attention(module, quantize(query).to(query.dtype), *args, **kwargs)


AttentionInterface.register(E4M3_QUERIES, with_e4m3_queries)
AttentionMaskInterface.register(E4M3_QUERIES, fp8_kv_mask)


def our_cache(name: str, config: Any, backend: str) -> MakeCache:
    """What makes the cache of `OURS` by that name."""
    return lambda: FP8Cache(config, backend=backend, **OURS[name])


def run_of(impl: str, model: Any) -> tuple[Through, MakeCache]:
    """How an implementation runs `model`, and what makes its cache."""
    config, plain = model.config, Through(model)
    if impl == "bf16":
        return plain, lambda: BF16Cache(config)
    name, _, how = impl.rpartition("-")
    prefill = how == "prefill"
    if name == "scale-1":
        return Through(model, E4M3_QUERIES) if prefill else plain, lambda: E4M3Cache(config)
    if name == "transformers-fp8":
        return plain, lambda: E4M3Cache(config, scale=None, first_exact=prefill)
    exact = "triton" if model.device.type == "cuda" else "reference"  # 16-bit arithmetic for any number of queries
    return plain, our_cache(name, config, "auto" if prefill else exact)


def exact_run(model: Any) -> tuple[Through, MakeCache]:
    """A model in FP32 with exact attention: on a GPU, torch's own steps, because its fused kernels multiply FP32 in parts."""
    context = (lambda: sdpa_kernel(SDPBackend.MATH)) if model.device.type == "cuda" else None
    return Through(model, context=context), lambda: DynamicCache(config=model.config)


def measure(case: str, model: Any, exact: Any, windows: torch.Tensor, *, impls: tuple[str, ...] = IMPLS, chunk: int = 8192) -> list[dict]:
    """A row for each implementation, over `windows [N, S + 1]`.

    Args:
        model: what the implementations run; `exact`: the same in FP32.
        impls: `bf16` among them.
        chunk: tokens of a forward.
    """
    runs = {"fp32": exact_run(exact)}
    runs |= {impl: run_of(impl, model) for impl in impls}
    found, _ = by_token(runs, windows, step=chunk)
    base_losses, base_kl = found["bf16"][0].flatten(), found["bf16"][1].mean().item()
    rows = []
    for impl in list(runs)[1:]:
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
        rows.append({"case": case, "impl": impl, "windows": len(windows), "tokens": len(change), **numbers})
        print(f"{case} {impl}: " + ", ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)
    return rows


def pair(name: str | None) -> tuple[Any, Any, Any]:
    """A model as it is measured, the same in FP32 (on a CPU one and the same), and the tokenizer."""
    model, tokenizer = models.load(name)
    return model, model if model.dtype == torch.float32 else models.load(name, dtype=torch.float32)[0], tokenizer


def installed(names: list[str]) -> list[str]:
    """The cases whose model is here; says which are not."""
    kept = []
    for name in names:
        try:
            if CASES[name].model in PUBLIC:
                find(CASES[name].model)
            kept.append(name)
        except ValueError as problem:
            print(f"{name} is left out: {problem}", flush=True)
    return kept


@torch.no_grad()
def main() -> None:
    parser = results.arguments(__doc__)
    parser.add_argument("--impl", default=",".join(IMPLS), help="some of " + ", ".join(IMPLS) + "; bf16 is always among them")
    parser.add_argument("--windows", type=int, help="at most so many of each case")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a forward")
    args = results.parse(parser)
    impls = tuple(impl for impl in IMPLS if impl == "bf16" or impl in args.impl.split(","))
    found, loaded = [], (None, None)
    for name in installed(results.chosen(CASES, args.cases)):
        case = CASES[name]
        if loaded[0] != (case.model,):
            loaded = (case.model,), pair(case.model)
        model, exact, tokenizer = loaded[1]
        text = models.tokenize(tokenizer, models.read_text(case.text))
        began = time.monotonic()
        windows = models.windows(text, case.context + 1, min(case.windows, args.windows or case.windows))
        rows = measure(name, model, exact, windows, impls=impls, chunk=args.chunk)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
        found += rows
    if args.save:
        results.save("real_model", found)


if __name__ == "__main__":
    main()
