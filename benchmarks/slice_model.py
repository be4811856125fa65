"""A Llama-3.1-8B-shaped model with random weights: prefill and decode time, BF16 caches with SDPA beside FP8Cache.

Random weights cost what trained ones cost. Every cache is checked on the same tokens before it is timed: its logits must agree with the
BF16 DynamicCache's to within what 16-bit arithmetic and FP8 rounding explain. Rows go to results/h100/slice.json.
"""

from __future__ import annotations

import math
import statistics
import sys
import time

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from fp8attn.integrations.transformers import FP8Cache

from .results import write

SOURCES = ("src/fp8attn/kernels", "src/fp8attn/integrations/transformers", "benchmarks/slice_model.py")
LENGTHS = (2048, 8192, 32768)
STEPS = 24  # decode steps timed; the median is reported
CHUNK = 8192  # prompts are prefilled in chunks, so that logits and MLP activations stay small
SHAPE = dict(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    vocab_size=128256, max_position_embeddings=131072, rope_theta=500000.0, torch_dtype="bfloat16",
)  # fmt: skip


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM._from_config(LlamaConfig(**SHAPE), attn_implementation="sdpa")
        torch.set_default_dtype(torch.float32)
    # As trained models have it: a residual stream that layers add a little to. With the plain initialisation the layers outweigh what they
    # are added to, and any rounding grows fortyfold on its way to the logits, BF16's own too.
    torch.nn.init.normal_(model.model.embed_tokens.weight)
    for layer in model.model.layers:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.weight.data.div_(math.sqrt(2 * len(model.model.layers)))
    return model.eval()


CACHES = {
    "bf16-dynamic": ("sdpa", lambda config, size: DynamicCache(config=config)),
    "bf16-static": ("sdpa", lambda config, size: StaticCache(config=config, max_cache_len=size)),
    "fp8attn-dynamic": ("fp8_kv", lambda config, size: FP8Cache(config)),
    "fp8attn-static": ("fp8_kv", lambda config, size: FP8Cache(config, max_cache_len=size)),
}


def prefill(model, cache, ids: torch.Tensor) -> torch.Tensor:
    for chunk in ids.split(CHUNK, 1):
        out = model(chunk, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return out.logits[:, -1]


def graph(model, cache, token: torch.Tensor):
    """One decode step of a static cache as a CUDA graph; its GPU time alone, free of Python's."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            model(token, past_key_values=cache, use_cache=True)
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        model(token, past_key_values=cache, use_cache=True)
    return captured.replay


def timed(step) -> float:
    times = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


@torch.inference_mode()
def measure(model, name: str, length: int, expected: torch.Tensor | None) -> tuple[list[dict], torch.Tensor]:
    attention, make = CACHES[name]
    model.set_attn_implementation(attention)
    size = length + 128
    ids = torch.randint(0, SHAPE["vocab_size"], (1, length), device="cuda", generator=torch.Generator("cuda").manual_seed(length))
    prefill(model, make(model.config, size), ids)  # warm-up: compilation, workspaces
    cache = make(model.config, size)
    torch.cuda.synchronize()
    start = time.perf_counter()
    logits = prefill(model, cache, ids).float()
    torch.cuda.synchronize()
    elapsed = (time.perf_counter() - start) * 1e3
    error = 0.0 if expected is None else float((logits - expected).norm() / expected.norm())
    assert error < 0.1, f"{name} at {length} tokens: logits differ from BF16's by {error:.3f}"
    token = ids[:, :1]
    rows = [dict(case=f"model-prefill-S{length}", impl=name, ms=elapsed, rel_err=error)]
    step = lambda: model(token, past_key_values=cache, use_cache=True)  # noqa: E731
    for _ in range(3):
        step()
    rows.append(dict(case=f"model-decode-S{length}", impl=name, ms=timed(step)))
    if name.endswith("static"):
        rows.append(dict(case=f"model-decode-S{length}", impl=name + "-graph", ms=timed(graph(model, cache, token))))
    return rows, logits


def main() -> None:
    model = build()
    rows = []
    for length in LENGTHS:
        expected = None
        for name in CACHES:
            found, logits = measure(model, name, length, expected)
            expected = logits if expected is None else expected
            rows += found
            for row in found:
                print(row, flush=True)
    write("results/h100/slice.json", rows, SOURCES, replaces="model-")


if __name__ == "__main__":
    sys.exit(main())
