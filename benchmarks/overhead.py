"""The CPU time of calls: an op, a launch, and a decode step of a transformers model whose GPU is never the bottleneck.

Microseconds of the host's time. The GPU has so little to do that its queue stays empty. Hosts differ by half, even of
one type. So calls alternate, the least mean of many short runs counts, and `torch.relu` shows how fast the host was.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import fp8attn
from fp8attn import PagedKVCache
from fp8attn.integrations.transformers import FP8Cache
from fp8attn.integrations.transformers.config import cache_keyword
from fp8attn.kernels.launch import Counters, Tiles, launch, recording

from .problem import DEVICE, randn

CASES = ("calls", "model")
CALLS, TURNS = 100, 30  # of a turn; turns
WARM_TURNS, MODEL_TURNS, STEPS = 2, 8, 8
PROMPT = 2048
# Llama-3.1-8B's layers, but for narrow MLPs and a small vocabulary: as many calls, and less for the GPU to do.
SHAPE = dict(
    hidden_size=4096, intermediate_size=1024, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    head_dim=128,
    vocab_size=1024, max_position_embeddings=131072,
)  # fmt: skip


def microseconds(calls: dict[tuple[str, str], Callable]) -> dict[tuple[str, str], float]:
    """The host's time of calls that do not wait for the GPU, in microseconds: for each call, the smallest mean of
    several repetitions.
    """
    for call in calls.values():
        for _ in range(10):
            call()
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(TURNS):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            least[name] = min(least[name], (time.perf_counter() - start) / CALLS * 1e6)
    torch.cuda.synchronize()
    return least


def waited(call: Callable) -> float:
    """The time in microseconds of a call and of the GPU work that it starts."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6


def ops() -> dict[tuple[str, str], Callable]:
    """The public ops, including their checks, on four sequences of 300 tokens, and on one that is so long that prefill
    splits its keys.
    """
    cache, long, growing = (PagedKVCache(8, 128, num_seqs=num_seqs, device=DEVICE) for num_seqs in (4, 1, 4))
    cache.append(0, randn(1200, 8, 128), randn(1200, 8, 128))
    long.append(0, randn(4096, 8, 128), randn(4096, 8, 128))
    growing.reserve(2 * CALLS * TURNS)  # enough for every append below
    pages, q, prompt, k, v = cache.pages(0), randn(4, 32, 128), randn(256, 32, 128), randn(4, 8, 128), randn(4, 8, 128)
    chunk = prompt[:64]
    with recording(dry=True) as launches:
        fp8attn.attention(chunk, long.pages(0))
    assert len(launches) == 2, "64 queries over 4,096 tokens are not cut into parts, which a second launch combines"
    with recording(dry=True) as launches:
        fp8attn.attention(q, pages)
    [made] = launches
    given = [x.descriptor() if isinstance(x, Tiles) else x for x in made.args]
    given = [torch.zeros(x.count, dtype=torch.int32, device=DEVICE) if isinstance(x, Counters) else x for x in given]
    dense = [randn(1, 4, 256, 128) for _ in "qkv"]
    table = torch.randn(256, 64, device=DEVICE)
    query, key = q[:1, :, None], randn(1, 8, 300, 128).repeat_interleave(4, 1)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    tokens_256 = "scaled_dot_product_attention of 256 tokens"
    return {
        ("attention of 1 query", "fp8attn"): lambda: fp8attn.attention(q, pages),
        ("attention of 64 queries", "fp8attn"): lambda: fp8attn.attention(prompt, pages),
        ("attention of 64 queries over 4,096 tokens, in parts", "fp8attn"): lambda: fp8attn.attention(
            chunk, long.pages(0)
        ),
        ("append of 1 token", "fp8attn"): lambda: fp8attn.append(growing.pages(0), k, v),
        (tokens_256, "fp8attn"): lambda: fp8attn.scaled_dot_product_attention(*dense),
        (f"rope_{tokens_256}", "fp8attn"): lambda: fp8attn.rope_scaled_dot_product_attention(*dense, table, table),
        (tokens_256, "torch"): lambda: sdpa(*dense),
        ("launch", "fp8attn"): lambda: launch(made.kernel, made.grid, made.args, made.constants),
        ("launch", "triton"): lambda: made.kernel[made.grid](*given, **made.constants),
        ("attention of 1 query", "torch-sdpa"): lambda: sdpa(query, key, key),
        ("relu", "torch"): lambda: torch.relu(k),
    }


def calls_alone() -> Iterator[dict]:
    for (name, impl), us in microseconds(ops()).items():
        yield {"case": name, "impl": impl, "us": us}


def model_steps() -> Iterator[dict]:
    """A prompt of 2,048 tokens and decode steps after it, batch 1, uncompiled: medians of the wall time. Caches take
    turns, a prompt and some steps each, because the host is now and then half as fast. The first turns compile kernels,
    also in threads beside the steps.
    """
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(DEVICE):
            model = LlamaForCausalLM._from_config(LlamaConfig(**SHAPE), attn_implementation="sdpa").eval()
    finally:
        torch.set_default_dtype(torch.float32)
    ids = torch.randint(0, SHAPE["vocab_size"], (1, PROMPT), device=DEVICE)
    caches = {
        "bf16-dynamic": ("sdpa", lambda: DynamicCache(config=model.config)),
        "bf16-static": ("sdpa", lambda: StaticCache(config=model.config, max_cache_len=2 * PROMPT)),
        "fp8attn-dynamic": ("fp8_kv", lambda: FP8Cache(model)),
        "fp8attn-static": ("fp8_kv", lambda: FP8Cache(model, max_cache_len=2 * PROMPT)),
    }
    keyword = cache_keyword(model)
    prompts, steps = ({impl: [] for impl in caches} for _ in range(2))
    for turn in range(-WARM_TURNS, MODEL_TURNS):
        for impl, (attention, make) in caches.items():
            model.set_attn_implementation(attention)
            held = {}

            def prefill(make=make, held=held):
                held[keyword] = make()
                model(ids, **held, use_cache=True, logits_to_keep=1)

            first = waited(prefill)
            later = [waited(lambda held=held: model(ids[:, :1], **held, use_cache=True)) for _ in range(STEPS)]
            if turn >= 0:
                prompts[impl].append(first)
                steps[impl] += later[1:]
    for impl in caches:
        yield {"case": f"prefill of {PROMPT}", "impl": impl, "us": statistics.median(prompts[impl])}
        yield {"case": "decode step", "impl": impl, "us": statistics.median(steps[impl])}


@torch.inference_mode()
def measure(case: str) -> Iterator[dict]:
    """Rows whose cases begin with this one: `calls: relu`."""
    made = model_steps() if case == "model" else calls_alone()
    for row in made:
        yield row | {"case": f"{case}: {row['case']}"}
