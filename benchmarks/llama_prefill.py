"""Prefill of a Llama-3.1-8B-shaped model (random weights) with FP8 attention, quantization included, beside BF16 attention.

One sequence through all layers without a cache, up to the last hidden states: the same model for all, only its attention swapped
(`models`). Norms are torch's fused ones and RoPE is one kernel (`dense.rope.apply_rope`), as in serving. Up to 8192 tokens each system is
a CUDA graph; beyond that the GPU is slower than the host anyway. From 16384 tokens on, fewer of the 32 layers run, `layers` in the rows:
their time is measured, and none is extrapolated. Before it is timed, each system's hidden states must be near those of the first.

`fp8attn` runs every length in FP8, to see from where on that pays; `fp8attn-default` leaves those below the policy's default to BF16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama

from fp8attn import AttentionPolicy
from fp8attn.dense.rope import apply_rope

from . import models
from .measure import left_out
from .problem import DEVICE

CASES = {f"S{1 << n}": 1 << n for n in range(10, 18)}  # 1,024 to 131,072 tokens
GRAPHED = 8192
LAYER_TOKENS = 32 * 8192  # the most layers times tokens that one call runs
ROUNDS = {1024: 15, 2048: 11, 4096: 7, 8192: 5}  # and 3 beyond
CHECKED = 1024  # of the last tokens, whose hidden states are compared
POLICIES = {"fp8attn": AttentionPolicy(min_length=1), "fp8attn-default": AttentionPolicy()}


def prepare(model: torch.nn.Module) -> torch.nn.Module:
    """Let the model call SDPA with `is_causal` and no mask, as it does by itself unless something is traced or captured; fused norms and
    rotation."""
    AttentionInterface.register("unmasked", sdpa_attention_forward)
    AttentionMaskInterface.register("unmasked", lambda *args, **kwargs: None)
    model.set_attn_implementation("unmasked")
    for module in list(model.modules()):
        for name, norm in list(module.named_children()):
            if isinstance(norm, modeling_llama.LlamaRMSNorm):
                fused = torch.nn.RMSNorm(norm.weight.shape, norm.variance_epsilon, device="meta")
                fused.weight = norm.weight
                setattr(module, name, fused)
    modeling_llama.apply_rotary_pos_emb = lambda q, k, cos, sin, *rest: (apply_rope(q, cos, sin), apply_rope(k, cos, sin))
    return model


@cache
def prepared() -> torch.nn.Module:
    return prepare(models.llama())


def forwards(model: torch.nn.Module, length: int) -> dict[str, Callable[[], torch.Tensor]]:
    """Each system's forward to the hidden states `[1, S, hidden]`."""
    ids = torch.randint(0, model.config.vocab_size, (1, length), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(length))
    ours = {name: partial(models.ours, policy) for name, policy in POLICIES.items() if name == "fp8attn" or length < policy.min_length}
    contexts = models.bf16_systems() | ours
    return {name: models.within(context, lambda: model.model(ids, use_cache=False).last_hidden_state) for name, context in contexts.items()}


@torch.inference_mode()
def measure(case: str) -> Iterator[dict]:
    model, length = prepared(), CASES[case]
    most = len(model.model.layers)
    model.config.num_hidden_layers = layers = min(most, max(1, LAYER_TOKENS // length))
    try:
        calls, outputs = forwards(model, length), {}
        for name in list(calls):
            try:
                outputs[name] = calls[name]()[:, -CHECKED:].float()
            except RuntimeError as problem:
                left_out(f"{case} {name}", problem)
                del calls[name]
        errors = models.errors(outputs, 0.05, 0.1)
        yield from models.timed(case, calls, ROUNDS.get(length, 3), errors, graphs=length <= GRAPHED, layers=layers)
    finally:
        model.config.num_hidden_layers = most
