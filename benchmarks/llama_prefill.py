"""Prefill of a Llama-3.1-8B-shaped model (random weights): FP8 attention, quantisation included, beside BF16 attention.

    PYTHONPATH=src python -m benchmarks.llama_prefill [case substring ...] [--save]

One sequence through all layers without a cache, up to the last hidden states: the same model for all, only its attention swapped
(`swap`). Norms are torch's fused ones and RoPE is one kernel (`ops.rotate`), as where models are served. Up to 8192 tokens each system is a
CUDA graph, beyond that the GPU is the slower one anyway. From 16384 tokens on, fewer of the 32 layers run, `layers` in the rows: their time
is measured, and none is extrapolated. Before it is timed, each system's hidden states must be near those of the first.

`fp8attn` runs every length in FP8, to see from where on that pays; `fp8attn-default` leaves those below the policy's default to BF16.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama

from fp8attn import AttentionPolicy, ops
from fp8attn.numerics import relative_error

from . import peers, results
from .llama import build
from .measure import graph_of, interleaved
from .problem import DEVICE
from .swap import beside_best, bf16_systems, inside, within

CASES = {f"S{length}": length for length in (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)}
GRAPHED = 8192
LAYER_TOKENS = 32 * 8192  # the most layers times tokens that one call runs
ROUNDS = {1024: 15, 2048: 11, 4096: 7, 8192: 5}
FEW_ROUNDS = 3
CHECKED = 1024  # of the last tokens, whose hidden states are compared
POLICIES = {"fp8attn": AttentionPolicy(min_length=1), "fp8attn-default": AttentionPolicy()}


def prepare(model) -> None:
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
    modeling_llama.apply_rotary_pos_emb = lambda q, k, cos, sin, *rest: (ops.rotate(q, cos, sin), ops.rotate(k, cos, sin))


def calls_of(model, ids: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Each system's forward to the hidden states `[1, S, hidden]`."""

    def forward() -> torch.Tensor:
        return model.model(ids, use_cache=False).last_hidden_state

    bf16 = bf16_systems()
    ours = {name: inside(bf16, policy) for name, policy in POLICIES.items() if name == "fp8attn" or ids.shape[1] < policy.min_length}
    return {name: within(context, forward) for name, context in (bf16 | ours).items()}


def measure(model, length: int) -> list[dict]:
    most = len(model.model.layers)
    layers = min(most, max(1, LAYER_TOKENS // length))
    ids = torch.randint(0, model.config.vocab_size, (1, length), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(length))
    model.config.num_hidden_layers = layers
    calls, runs, errors, expected = calls_of(model, ids), {}, {}, None
    for name, call in calls.items():
        try:
            hidden = call()[:, -CHECKED:].float()
            expected = hidden if expected is None else expected
            errors[name] = relative_error(hidden, expected)
            runs[name] = graph_of(call)[0] if length <= GRAPHED else call
        except RuntimeError as problem:
            peers.left_out(f"S{length} {name}", problem)
            continue
        assert errors[name] < (0.1 if name in POLICIES else 0.05), f"{name} at {length} tokens: hidden states differ by {errors[name]:.3f}"
    times = interleaved(runs, ROUNDS.get(length, FEW_ROUNDS))
    model.config.num_hidden_layers = most
    rows = [
        {"case": f"S{length}", "impl": name, "ms": round(ms, 4), "layers": layers, "rel_err": round(errors[name], 5)}
        for name, ms in times.items()
    ]
    return beside_best(rows)


@torch.inference_mode()
def main() -> None:
    args = results.parse(results.arguments(__doc__))
    start = time.time()
    model = build()
    prepare(model)
    print(f"ready after {time.time() - start:.0f} s", flush=True)
    rows = []
    for name in results.chosen(CASES, args.cases):
        torch.cuda.empty_cache()
        rows += (found := measure(model, CASES[name]))
        print(*found, f"{time.time() - start:.0f} s", sep="\n", flush=True)
    if args.save:
        results.save("llama_prefill", rows)


if __name__ == "__main__":
    main()
