"""Rewrites a model so that its keys and values are harder to quantize, and its answers in exact arithmetic are the
same.

Two rewritings of a Llama-like layer are exact for any input:

- An offset `c` is added to V of every token. The weights of attention sum to one, so the offset is undone after
  attention: v_proj's bias gains `c`, and o_proj's bias loses `W_o c`.
- Channels are multiplied by `s`, and by `1 / s` where they are read: in W_q for channels of K (two channels that RoPE
  rotates into each other have the same `s`), in W_o for channels of V. `s` is a power of two, so this is exact in every
  floating-point format.

K gets no offset. An offset after RoPE would cancel in the softmax, but a bias of k_proj is before RoPE, which rotates
it with every token. So K gets outlier channels only.

In 16 bits, an offset of many deviations costs V some bits when it is rounded. Therefore the 16-bit cache is measured on
the rewritten model, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fp8attn.errors import UsageError
from fp8attn.integrations.transformers.config import decoder_config

EVERY = 16  # one in 16 channels (of K: pairs of channels) is an outlier


@dataclass(frozen=True)
class Strength:
    """How much harder K and V become.

    Attributes:
        offset: of V, in standard deviations of each channel.
        outlier: the factor of the outlier channels of K and V, a power of two.
    """

    offset: float
    outlier: float


STRENGTHS = (Strength(0.0, 1.0), Strength(1.0, 4.0), Strength(3.0, 16.0), Strength(10.0, 64.0))


@torch.no_grad()
def plant(model: Any, strength: Strength, *, seed: int = 0) -> None:
    """Rewrite every attention layer of a Llama-like model (Llama, Mistral, Qwen2, ...) in place.

    Args:
        model: a transformers causal language model whose layers have `input_layernorm` and `self_attn` with q_proj,
            k_proj, v_proj, o_proj.
        strength: one of `STRENGTHS`, or your own.
        seed: of the offsets' signs and the choice of channels.
    Raises:
        UsageError: a model that cannot be rewritten exactly.
    """
    config = decoder_config(model.config)
    layers = [layer for layer in model.modules() if hasattr(layer, "self_attn") and hasattr(layer, "input_layernorm")]
    for layer in layers:
        wanted = ("q_proj", "k_proj", "v_proj", "o_proj")
        if not all(isinstance(getattr(layer.self_attn, name, None), torch.nn.Linear) for name in wanted):
            raise UsageError(
                f"a stress needs a Llama-like model, with {', '.join(wanted)}, and {config.model_type!r} is another; "
                f"leave the stress out"
            )
        if any(hasattr(layer.self_attn, name) for name in ("q_norm", "k_norm", "sinks")):
            raise UsageError(
                f"a stress would change what {config.model_type!r} computes, because it has norms after its "
                f"projections, or sinks; leave the stress out"
            )
    partial = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor") or 1
    if not layers or partial != 1:
        raise UsageError(
            f"a stress needs a Llama-like model with RoPE in all channels, and {config.model_type!r} is another; leave "
            f"the stress out"
        )
    generator = torch.Generator().manual_seed(seed)
    for layer in layers:
        _plant_layer(layer, config, strength, generator)


def _plant_layer(layer: Any, config: Any, strength: Strength, generator: torch.Generator) -> None:
    attention = layer.self_attn
    q, k, v, o = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
    heads, head_dim = config.num_attention_heads, attention.head_dim
    kv_heads = v.out_features // head_dim
    device = v.weight.device

    def outliers(count: int) -> torch.Tensor:
        """`[kv_heads, count]`: the factor at some places of each head, 1 elsewhere."""
        chosen = torch.rand(kv_heads, count, generator=generator).argsort(1) < max(1, count // EVERY)
        return torch.where(chosen, strength.outlier, 1.0).to(device)

    def by_query_head(x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(heads // kv_heads, 0).flatten()

    k_factor, v_factor = outliers(head_dim // 2).repeat(1, 2), outliers(head_dim)
    for linear, factor in ((k, k_factor.flatten()), (v, v_factor.flatten()), (q, 1 / by_query_head(k_factor))):
        linear.weight *= factor[:, None].to(linear.weight.dtype)
        if linear.bias is not None:
            linear.bias *= factor.to(linear.bias.dtype)
    o.weight /= by_query_head(v_factor).to(o.weight.dtype)

    if not strength.offset:
        return
    # The output of a norm, before its weight, has a mean square of one, so the weights determine V's deviation.
    gain = getattr(layer.input_layernorm, "weight", torch.ones_like(v.weight[0]))
    deviation = (v.weight.float() * gain.float()).norm(dim=1)
    signs = torch.randint(2, deviation.shape, generator=generator).to(device) * 2 - 1
    offset = (strength.offset * deviation * signs).to(v.weight.dtype)
    _add_to_bias(v, offset)
    _add_to_bias(o, -(o.weight.double() @ by_query_head(offset.view(kv_heads, head_dim)).double()))


def _add_to_bias(linear: torch.nn.Linear, value: torch.Tensor) -> None:
    old = 0 if linear.bias is None else linear.bias.double()
    linear.bias = torch.nn.Parameter((old + value.double()).to(linear.weight.dtype), requires_grad=False)
