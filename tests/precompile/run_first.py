"""Dry prompts and decode steps through caches, and prints as JSON the launches whose kernels were not prepared before
them.

A process of its own (`test_first.py` runs it), because plans for the device "meta" are kept for one machine.

    python -m tests.precompile.run_first TARGET
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fp8attn.integrations.transformers as fp8
from fp8attn import PagedKVCache, _torch_ops, backends, ops, scaled_dot_product_attention
from fp8attn.cache import paged
from fp8attn.dense import sdpa
from fp8attn.kernels.compile import specialization
from fp8attn.kernels.launch import recording
from fp8attn.kernels.machine import plan_for
from fp8attn.precompile import first
from fp8attn.scales import LayerScales
from tests.support.machines import TARGETS

PROMPTS = (1, 40, 300, 9000)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def scales(heads: int, dim: int) -> LayerScales:
    one, mean = torch.ones(heads), torch.zeros(heads, dim)
    return LayerScales(k_scale=one, v_scale=one, k_mean=mean, v_mean=mean)


def model(heads: int, kv_heads: int, dim: int, batch: int, tokens: int, **options: Any) -> None:
    """A prompt and two decode steps of a Llama of four layers; `means`: with each combination of static means."""
    config = LlamaConfig(
        hidden_size=heads * dim, intermediate_size=64, num_hidden_layers=4, num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim, vocab_size=64, max_position_embeddings=1 << 17,
    )  # fmt: skip
    with torch.device("meta"):
        built = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    means, static = options.pop("means", False), options.pop("static_scales", False)
    held = fp8.FP8Cache(built, **options)
    for i, layer in enumerate(held.layers):
        if means:
            layer.k_mean, layer.v_mean = (torch.zeros(kv_heads, dim) if i & bit else None for bit in (1, 2))
        if static:
            layer.scales = scales(kv_heads, dim)
    for count in (tokens, 1, 1):
        built(
            meta(batch, count, dtype=torch.int64),
            past_key_values=held,
            position_ids=meta(batch, count, dtype=torch.int64),
        )


def cached(heads: int, kv_heads: int, dim: int, lengths: list[int], **options: Any) -> None:
    """A prompt of these lengths and a decode step of two layers, through `PagedKVCache`."""
    held = PagedKVCache(kv_heads, dim, num_layers=2, num_seqs=len(lengths), device="meta")
    for new in (lengths, [1] * len(lengths)):
        ragged = new if len({*lengths}) > 1 and new is lengths else None
        for layer in range(2):
            x = meta(sum(new), kv_heads, dim)
            held.append(layer, x, x, lengths=ragged)
            held.attention(layer, meta(sum(new), heads, dim), **options)


def dense(q_len: int, kv_len: int, causal: bool) -> None:
    """A dense call, of a length between two of the kernels' own, and of a size that is padded."""
    q, k = meta(2, 8, q_len, 72), meta(2, 4, kv_len, 72)
    scaled_dot_product_attention(q, k, k, is_causal=causal, enable_gqa=True)


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    for tokens in PROMPTS:
        yield f"llama {tokens}", partial(model, 32, 8, 128, 1, tokens)
        yield f"batch {tokens}", partial(model, 12, 2, 128, 3, tokens)
        yield f"means {tokens}", partial(model, 14, 2, 64, 1, tokens, means=True)
        yield f"without {tokens}", partial(model, 14, 2, 64, 1, tokens)
        yield f"exact {tokens}", partial(model, 32, 8, 128, 1, tokens, exact=True)
        yield f"e4m3 {tokens}", partial(model, 32, 8, 128, 1, tokens, key_dtype="e4m3")
        yield f"calibrated {tokens}", partial(model, 32, 8, 128, 1, tokens, static_scales=True)
        yield f"static {tokens}", partial(model, 32, 8, 128, 2, tokens, max_cache_len=16384)
        for dim in (64, 80, 96, 128, 256):
            yield f"paged d{dim} {tokens}", partial(cached, 8, 4, dim, [tokens])
        yield f"softcap {tokens}", partial(cached, 16, 8, 256, [tokens], softcap=30.0)
        yield f"sinks {tokens}", partial(cached, 64, 8, 64, [tokens], sinks=meta(64))
        yield f"window {tokens}", partial(cached, 64, 8, 64, [tokens, tokens], window=128)
        yield f"padded {tokens}", partial(cached, 8, 2, 128, [tokens, tokens], leftpad_k=meta(2, dtype=torch.int32))
        yield f"dense {tokens}", partial(dense, tokens, tokens, True)
        yield f"crossed {tokens}", partial(dense, tokens, 700, False)
        yield f"ragged {tokens}", partial(cached, 8, 2, 128, [tokens, 3 * tokens, 5])


@torch.inference_mode()
def main() -> None:
    target = sys.argv[1]
    plan_for(TARGETS[target])
    loaded = backends.load("hopper" if target == "sm_90" else "triton")
    ops.find = _torch_ops.find = sdpa.find = lambda *_: loaded
    sdpa.unsupported_reason = lambda *_: None
    paged._device = torch.device  # "meta", which caches refuse
    torch._assert_async = lambda *_: None
    known: set[tuple] = set()

    def prepare(device: torch.device, calls: Iterable[Callable[[], None]]) -> None:
        known.update(first.record(calls))

    first.prepare = prepare
    found = {}
    for name, case in cases():
        known.clear()
        with recording(dry=True) as made:
            case()
            launched = {specialization(launch) for launch in made}
        found[name] = {
            "launched": len(made), "kernels": len(known),
            "missing": sorted(str(key[::2]) for key in launched - known),
            "unused": sorted(key[0] for key in known - launched),
        }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
