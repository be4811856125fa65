"""A model of Llama-3.1-8B's shape with random weights, which cost what trained ones cost."""

from __future__ import annotations

import math

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = dict(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    vocab_size=128256, max_position_embeddings=131072, rope_theta=500000.0, torch_dtype="bfloat16",
)  # fmt: skip


def build() -> LlamaForCausalLM:
    """On the GPU, in bfloat16, attending by SDPA."""
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
