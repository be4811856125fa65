"""Whole models with random weights, which take the same time as trained ones, and the systems that compute their attention.

| name | is |
|---|---|
| `fa3-bf16` | FlashAttention-3 |
| `cudnn-bf16` | torch's attention by cuDNN |
| `fp8attn` | `fp8attn.fp8_attention`, quantization included; what its policy leaves out goes to FlashAttention-3, where that is here |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig, LlamaForCausalLM

from fp8attn import AttentionPolicy, fp8_attention
from fp8attn.numerics import relative_error

from . import peers
from .measure import graph_of, interleaved
from .peers import fa3
from .problem import DEVICE, Shape

SDPA = torch.nn.functional.scaled_dot_product_attention
LLAMA = dict(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    vocab_size=128256, max_position_embeddings=131072, rope_theta=500000.0, torch_dtype="bfloat16",
)  # fmt: skip
Context = Callable[[], AbstractContextManager]


def build(make: Callable[[], torch.nn.Module], dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """Call `make()` so that its parameters are created on the device, in `dtype`."""
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(DEVICE):
            return make().eval()
    finally:
        torch.set_default_dtype(torch.float32)


@cache
def llama() -> LlamaForCausalLM:
    """A model of Llama-3.1-8B's shape that attends by SDPA."""
    model = build(lambda: LlamaForCausalLM._from_config(LlamaConfig(**LLAMA), attn_implementation="sdpa"))
    # As trained models have it: a residual stream that layers add a little to. With the plain initialization the layers outweigh what they
    # are added to, and any rounding grows fortyfold on its way to the logits, BF16's own too.
    torch.nn.init.normal_(model.model.embed_tokens.weight)
    for layer in model.model.layers:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.weight.data.div_(math.sqrt(2 * len(model.model.layers)))
    return model


# What `scaled_dot_product_attention` is while a context lasts


class ThroughFA3(TorchFunctionMode):
    """`scaled_dot_product_attention` by FlashAttention-3 in 16 bits."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return (fa3_sdpa if func is SDPA else func)(*args, **(kwargs or {}))


def fa3_sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False) -> torch.Tensor:
    """`scaled_dot_product_attention` of `[B, H, S, D]`, with the arguments that these models use."""
    batch, q_heads, q_len, dim = query.shape
    kv_heads, kv_len = key.shape[1:3]
    shape = Shape((kv_len,) * batch, (q_len,) * batch, q_heads, kv_heads, dim, is_causal)
    assert attn_mask is None and not dropout_p and scale in (None, shape.softmax_scale) and not (is_causal and q_len != kv_len)
    out = fa3.attention(shape, *(x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)))()
    return out.unflatten(0, (batch, q_len)).transpose(1, 2)


def bf16_systems() -> dict[str, Context]:
    """The BF16 systems that are installed, by name."""
    systems: dict[str, Context] = {"cudnn-bf16": lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)}
    return systems | ({"fa3-bf16": ThroughFA3} if "fa3" in peers.available() else {})


@contextmanager
def ours(policy: AttentionPolicy) -> Iterator[None]:
    """`fp8_attention` around the last of the BF16 systems."""
    with list(bf16_systems().values())[-1](), fp8_attention(policy):
        yield


def within(context: Context, call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """A function that runs `call` in a new `context()` each time."""

    def inside() -> torch.Tensor:
        with context():
            return call()

    return inside


# Errors and times


def errors(outputs: dict[str, torch.Tensor], most: float, most_fp8: float) -> dict[str, float]:
    """The relative distance of each output from the first one.

    Raises:
        AssertionError: farther than `most`, or than `most_fp8` where the name has `fp8` in it.
    """
    found = {name: relative_error(out, next(iter(outputs.values()))) for name, out in outputs.items()}
    for name, error in found.items():
        assert error < (most_fp8 if "fp8" in name else most), f"{name} differs from {next(iter(found))} by {error:.3f}"
    return found


def timed(
    case: str, calls: dict[str, Callable], rounds: int, errors: dict[str, float] | None = None, *, graphs: bool = False, **about
) -> list[dict]:
    """The row of each call, with the fields of `about`; calls run as CUDA graphs if `graphs`. Rows of FP8 systems also have the name of the
    fastest BF16 system, and its time over theirs."""
    runs = {name: graph_of(call)[0] for name, call in calls.items()} if graphs else calls
    rows = [{"case": case, "impl": name, "ms": round(ms, 4), **about} for name, ms in interleaved(runs, rounds).items()]
    best = min((row for row in rows if "bf16" in row["impl"]), key=lambda row: row["ms"], default=None)
    for row in rows:
        if best and "bf16" not in row["impl"]:
            row |= {"beside": best["impl"], "speedup": round(best["ms"] / row["ms"], 4)}
        if errors:
            row["rel_err"] = round(errors[row["impl"]], 5)
    return rows
