"""A decode step of a model with DeepSeek V3's attention in transformers, beside `DynamicCache`.

Four layers with the attention of DeepSeek V3 (128 heads, latents of 512 channels and 64 with RoPE) and narrow MLPs,
BF16, batch 1, uncompiled, random weights and latents. `DynamicCache` has the same latents in BF16, and the model
expands all of them at every step. `ms` is the median wall time of a step. `cache_mib` is what the cache holds after
the prompt, `peak_mib` the most that a step allocates beyond what was there.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache

from fp8attn.integrations.transformers import FP8Cache
from fp8attn.integrations.transformers.config import cache_keyword

from .overhead import waited
from .problem import DEVICE, K

SHAPE = dict(
    hidden_size=2048, intermediate_size=1024, num_hidden_layers=4, first_k_dense_replace=4, num_attention_heads=128,
    num_key_value_heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
    v_head_dim=128, vocab_size=1024, max_position_embeddings=256 * K, n_routed_experts=4, num_experts_per_tok=1,
    n_group=1, topk_group=1, moe_intermediate_size=64,
)  # fmt: skip
CASES = {f"S{n * K}": n * K for n in (4, 32, 128)}
STEPS, FIRST = 9, 2  # steps, and those that are not counted


@torch.inference_mode()
def measure(case: str) -> Iterator[dict]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(DEVICE):
            model = DeepseekV3ForCausalLM(DeepseekV3Config(**SHAPE)).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    latent = torch.randn(1, 1, CASES[case], 512, dtype=torch.bfloat16, device=DEVICE)
    rope = torch.randn(1, 1, CASES[case], 64, dtype=torch.bfloat16, device=DEVICE)
    token = torch.zeros(1, 1, dtype=torch.long, device=DEVICE)
    caches = {"dynamic-cache": lambda: DynamicCache(config=model.config), "fp8attn": lambda: FP8Cache(model)}
    for impl, make in caches.items():
        before = torch.cuda.memory_allocated()
        cache = make()
        for layer in range(SHAPE["num_hidden_layers"]):
            cache.update(latent.clone(), rope.clone(), layer)
        held = torch.cuda.memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        there = torch.cuda.memory_allocated()
        arguments = {cache_keyword(model): cache, "use_cache": True}
        times = [waited(lambda arguments=arguments: model(token, **arguments)) for _ in range(STEPS)][FIRST:]
        peak = torch.cuda.max_memory_allocated() - there
        row = {"case": case, "impl": impl, "ms": round(statistics.median(times) / 1e3, 3)}
        yield row | {"cache_mib": round(held / 2**20, 1), "peak_mib": round(peak / 2**20, 1)}
        del cache, arguments
        torch.cuda.empty_cache()
