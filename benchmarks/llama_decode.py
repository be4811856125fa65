"""A decode step of a Llama-3.1-8B-shaped model (random weights) by context, with FP8Cache beside BF16 caches.

Each step is a CUDA graph; the systems' replays are interleaved; medians. Caches are filled with random values instead of a prompt's, which
costs a step nothing. In the case `agree-*` every system prefills and decodes the same tokens, and their logits must agree.

| system | cache | attention |
|---|---|---|
| `fp8attn` | `FP8Cache(max_cache_len=...)` | `fp8_kv` |
| `bf16-sdpa` | `StaticCache` | `sdpa` |
| `bf16-fa3` | `StaticCache` | FlashAttention-3's KV-cache path, over the same tensors |
| `vllm-fp8` | FP8 with scale one, written by torch | vLLM's FlashAttention-3 over pages of 64, queries rounded to FP8 |

Rows `step-*` are milliseconds a step (`evidence/lines.py` has what follows from them); `fits-*` how many sequences of 8192 tokens fit on
the GPU beside the weights: computed from bytes, then allocated and stepped.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer

from fp8attn.formats.codec import FP8
from fp8attn.integrations.transformers import FP8Cache
from fp8attn_tools.plan import plan
from fp8attn_tools.shape import shape_of

from . import models, peers
from .measure import graph_of, interleaved, left_out
from .peers import fa3
from .problem import DEVICE, Shape

BATCHES = (1, 8, 32)
LENGTHS = (1024, 2048, 8192, 32768, 131072)
MOST_TOKENS = 1 << 18  # in a batch: what both caches fit side by side with
STEPS = {f"step-B{b}-S{n}": (b, n) for b in BATCHES for n in LENGTHS if b * n <= MOST_TOKENS}
CHECKED = 512
FITTED = 8192  # tokens of the sequences that are counted by how many fit
CASES = (f"agree-S{CHECKED}", *STEPS, f"fits-S{FITTED}")
ROUNDS = 15
SPARE = 128  # tokens behind the context, which the steps fill: with them, all lengths here are whole pages
MARGIN = 1 << 30  # bytes left to activations, a step's workspaces and the allocator when that is computed
PAGED_BY = 64  # tokens in a page of vLLM's


# Attention over the peers' caches. A mask function tells attention how long the cache is: an int32 "mask", which transformers hands on.


def lengths_mask(batch_size: int, q_length: int, q_offset: int | torch.Tensor, device, **kwargs) -> torch.Tensor:
    """`[1, 1, 1, B]` int32: tokens in the cache, the new ones included."""
    return torch.zeros(1, 1, 1, batch_size, dtype=torch.int32, device=device) + (q_offset + q_length)


def fa3_attention(module, query, key, value, attention_mask, **kwargs) -> tuple[torch.Tensor, None]:
    return fa3.cached(*(x.transpose(1, 2) for x in (query, key, value)), attention_mask[0, 0, 0].int()), None


def vllm_attention(module, query, key, value, attention_mask, **kwargs) -> tuple[torch.Tensor, None]:
    """`key`, `value`: `[B, max_cache_len, num_kv_heads, head_dim]` FP8, from `VLLMLayer`."""
    (batch, q_heads, length, dim), (capacity, kv_heads) = query.shape, key.shape[1:3]
    shape = Shape((capacity,) * batch, (length,) * batch, q_heads, kv_heads, dim, True)
    pages = [x.view(-1, PAGED_BY, kv_heads, dim) for x in (key, value)]
    table, used = identity_table(batch, capacity // PAGED_BY), attention_mask[0, 0, 0].int()
    out = fa3.vllm_attention(shape, query.transpose(1, 2).flatten(0, 1).to(FP8), *pages, table, used)()
    return out.unflatten(0, (batch, length)), None


@lru_cache
def identity_table(batch: int, columns: int) -> torch.Tensor:
    return torch.arange(batch * columns, dtype=torch.int32, device=DEVICE).view(batch, columns)


class VLLMLayer(StaticLayer):
    """Keys and values `[B, max_cache_len, num_kv_heads, head_dim]` in FP8, as pages one after another."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch, heads, _, dim = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (
            torch.zeros(batch, self.max_cache_len, heads, dim, dtype=torch.uint8, device=self.device) for _ in range(2)
        )
        self.cumulative_length = self.cumulative_length.to(self.device)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        position = torch.arange(key_states.shape[2], device=self.device) + self.cumulative_length
        self.cumulative_length.add_(key_states.shape[2])
        for pool, new in ((self.keys, key_states), (self.values, value_states)):
            pool.index_copy_(1, position, new.transpose(1, 2).to(FP8).view(torch.uint8))
        return self.keys.view(FP8), self.values.view(FP8)


# The systems


@dataclass(frozen=True)
class System:
    attention: str  # transformers' name of it
    cache: Callable[[PreTrainedModel, int], Cache]  # of a model, for so many tokens; systems with one function share one cache
    needs: str | None = None  # of the peers


def static(model: PreTrainedModel, tokens: int) -> Cache:
    return StaticCache(config=model.config, max_cache_len=tokens)


def vllm(model: PreTrainedModel, tokens: int) -> Cache:
    return Cache(layers=[VLLMLayer(tokens) for _ in range(model.config.num_hidden_layers)])


SYSTEMS = {
    "bf16-sdpa": System("sdpa", static),
    "bf16-fa3": System("fa3_kv", static, "fa3"),
    "vllm-fp8": System("vllm_kv", vllm, "vllm-fa3"),
    "fp8attn": System("fp8_kv", lambda model, tokens: FP8Cache(model, max_cache_len=tokens)),
}


def available() -> dict[str, System]:
    for name, attention in (("fa3_kv", fa3_attention), ("vllm_kv", vllm_attention)):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, lengths_mask)
    return {name: system for name, system in SYSTEMS.items() if system.needs is None or system.needs in peers.available()}


@lru_cache
def noise(dtype: torch.dtype) -> torch.Tensor:
    """Normal random values. For a dtype of one byte, their FP8 codes."""
    x = torch.randn(1 << 26, device=DEVICE)
    return x.to(FP8).view(torch.uint8) if dtype == torch.uint8 else x.to(dtype)


def fill(cache: Cache, config: PreTrainedConfig, batch: int, length: int) -> None:
    """Allocate the cache for `batch` sequences, and make them `length` tokens long, of random values."""
    cache.early_initialization(batch, config.num_key_value_heads, config.head_dim, torch.bfloat16, DEVICE)
    for layer in cache.layers:
        if isinstance(layer, StaticLayer):
            pools, layer_length = (layer.keys, layer.values), layer.cumulative_length
        else:
            pages = cache.pages(layer.index)
            pools, layer_length = (pages.pool,), pages.cache_seqlens
        layer_length.fill_(length)
        for pool in pools:
            values = noise(pool.dtype)
            for part in pool.view(-1).split(len(values)):
                part.copy_(values[: len(part)])
        if not isinstance(layer, StaticLayer):
            pages.k_scale.fill_(1 / 64)  # the bytes of normal values in E4M3 are up to 70 in INT8
            pages.v_scale.fill_(1)
    if isinstance(cache, FP8Cache):
        cache.paged.sync()


def step_of(model, system: System, cache: Cache, token: torch.Tensor) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        model.set_attn_implementation(system.attention)
        return model(token, past_key_values=cache, use_cache=True).logits

    return step


# What is measured


def agree(model, systems: dict[str, System]) -> Iterator[dict]:
    """Prefill and decode the same prompts in every system, with steps as CUDA graphs. Compares the logits with those of BF16 with
    `sdpa`."""
    ids = torch.randint(0, model.config.vocab_size, (2, CHECKED), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
    found = {}
    for name, system in systems.items():
        cache = system.cache(model, CHECKED + SPARE)
        step_of(model, system, cache, ids)()
        replay, logits = graph_of(step_of(model, system, cache, ids[:, :1]))
        replay()
        found[name] = logits.float().clone()
    for name, error in models.errors(found, 0.05, 0.1).items():
        yield {"case": f"agree-S{CHECKED}", "impl": name, "rel_err": round(error, 5)}


def steps(model, systems: dict[str, System], case: str) -> Iterator[dict]:
    batch, length = STEPS[case]
    token = torch.randint(0, model.config.vocab_size, (batch, 1), device=DEVICE)
    caches: dict[Callable, Cache] = {}
    replays = {}
    for name, system in systems.items():
        if name == "vllm-fp8" and 2 * batch * length > MOST_TOKENS:
            left_out(f"{case} {name}", "it does not fit beside the others")
            continue
        if system.cache not in caches:
            caches[system.cache] = system.cache(model, length + SPARE)
            fill(caches[system.cache], model.config, batch, length)
        try:
            replays[name], logits = graph_of(step_of(model, system, caches[system.cache], token))
        except RuntimeError as problem:
            left_out(f"{case} {name}", problem)
            continue
        replays[name]()
        assert logits.isfinite().all(), f"{name}: logits are not finite"
    for name, ms in interleaved(replays, ROUNDS).items():
        yield {"case": case, "impl": name, "ms": round(ms, 4)}


def fits(model, systems: dict[str, System]) -> Iterator[dict]:
    """The largest number of sequences of 8192 tokens that fit beside the weights: computed, then allocated and run for one step."""
    free = torch.cuda.mem_get_info()[0] - MARGIN
    computed = {fit.cache: fit for fit in plan(shape_of(model.config), free, context=FITTED)}
    bf16 = None
    for name, kind in (("bf16-fa3", "bf16"), ("fp8attn", "fp8")):
        if name not in systems:
            continue
        fit = computed[kind]
        torch.cuda.reset_peak_memory_stats()
        cache = systems[name].cache(model, FITTED)
        fill(cache, model.config, fit.largest_batch, FITTED - 1)
        token = torch.zeros(fit.largest_batch, 1, dtype=torch.long, device=DEVICE)
        assert step_of(model, systems[name], cache, token)().isfinite().all(), f"{name}: logits are not finite"
        row = {
            "case": f"fits-S{FITTED}", "impl": name, "batch": fit.largest_batch, "tokens": fit.largest_batch * FITTED,
            "bytes_per_token": fit.bytes_per_token, "free_bytes": free, "peak_bytes": torch.cuda.max_memory_allocated(),
        }  # fmt: skip
        yield row if bf16 is None else row | {"over_bf16": round(row["tokens"] / bf16, 4)}
        bf16 = row["tokens"]
        del cache
        gc.collect()
        torch.cuda.empty_cache()


@torch.inference_mode()
def measure(case: str) -> Iterator[dict]:
    model, systems = models.llama(), available()
    gc.collect()
    torch.cuda.empty_cache()
    kind = case.partition("-")[0]
    yield from steps(model, systems, case) if kind == "step" else {"agree": agree, "fits": fits}[kind](model, systems)
