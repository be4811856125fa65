"""Tiny random models of the decoder families of transformers."""

from __future__ import annotations

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

VOCABULARY = 97
# Attributes of configs and small values for them. A config gets those that it has.
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 512, "intermediate_size": 96, "ffn_dim": 96, "ffn_hidden_size": 96, "n_inner": 96,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "shared_intermediate_size": 32, "intermediate_size_mlp": 96,
    "expert_ffn_hidden_size": 32, "moe_shared_expert_intermediate_size": 32, "prefix_dense_intermediate_size": 96,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_k": 2,
    "moe_topk": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "num_shared_experts": 1, "first_k_dense_replace": 1,
    "num_dense_layers": 1, "sliding_window": 32, "attention_chunk_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "attention_dropout": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "dropout": 0.0, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "activation_dropout": 0.0, "word_embed_proj_dim": 128, "embedding_size": 128,
    "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16, "laurel_rank": 8, "query_pre_attn_scalar": 64,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_num_heads": 4,
    "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1, "mamba_dt_rank": 8, "mamba_headdim": 32, "n_mamba_heads": 8,
    "mamba_ngroups": 1, "num_mem_blocks": 1, "lru_width": 128, "chunk_size": 16, "mamba_chunk_size": 16, "block_size": 32,
}  # fmt: skip
