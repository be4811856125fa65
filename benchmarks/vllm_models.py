"""The models: shapes and weights."""

import os
import zlib

TINY = os.environ.get("TINY") == "1"
VOCABULARY = 512 if TINY else 65536
SHAPE = {
    "vocab_size": VOCABULARY, "head_dim": 256, "num_attention_heads": 16, "rms_norm_eps": 1e-6, "bos_token_id": 0,
    "eos_token_id": 1,
    "max_position_embeddings": 65536, "dtype": "bfloat16", "attention_bias": False,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e6}
MODELS = {
    "llama": SHAPE | {  # Llama-3.1-8B's, but for the vocabulary
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "head_dim": 128,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu",
        "tie_word_embeddings": False,
        "max_position_embeddings": 1 << 18, "rope_parameters": ROPE,
    },
    "gemma3": SHAPE | {  # half of Gemma-3-12B's layers: of 6, one is full and 5 have a window
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 24, "num_key_value_heads": 8, "sliding_window": 1024, "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh", "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4,
        "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE | {"rope_theta": 1e4}},
    },
    "gemma4": SHAPE | {  # 12 of Gemma-4-31B's layers: of 6, one is full, with head_dim 512 and K as V
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "hidden_size": 5376,
        "intermediate_size": 21504, "num_hidden_layers": 12, "num_attention_heads": 32, "num_key_value_heads": 16,
        "global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": True, "sliding_window": 1024,
        "hidden_activation": "gelu_pytorch_tanh", "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
        "rope_parameters": {
            "sliding_attention": ROPE | {"rope_theta": 1e4},
            "full_attention": ROPE | {"rope_type": "proportional", "partial_rotary_factor": 0.25},
        },
    },
}  # fmt: skip
MODELS |= {  # four of DeepSeek-V3's layers, with dense feed-forward, in one of 8, of 2, and of 1 process
    f"mla{heads}": SHAPE | {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
        "intermediate_size": 18432 * heads // 128, "num_hidden_layers": 4, "first_k_dense_replace": 64, "head_dim": 64,
        "num_attention_heads": heads, "num_key_value_heads": heads, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "hidden_act": "silu",
        "tie_word_embeddings": False, "max_position_embeddings": 1 << 18, "rope_parameters": ROPE,
        "n_routed_experts": 8, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 64,
    }
    for heads in (16, 64, 128)
}  # fmt: skip
NAMES = {
    "llama": "Llama-3.1-8B",
    "gemma3": "Gemma 3 12B, half of its layers",
    "gemma4": "Gemma 4 31B, a fifth of its layers",
    **{f"mla{heads}": f"four dense layers of DeepSeek V3, {heads} heads" for heads in (16, 64, 128)},
}
SMALL = {
    "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 6, "num_global_key_value_heads": 1,
}  # fmt: skip


def fill(model):
    """Random weights, the same in each engine. vLLM's own are so small that logits are nearly equal.

    Embeddings of models that cache latents have a mean, so that latents have one, too, as those of trained models.
    """
    import torch

    caches_latents = any(path.endswith("kv_a_layernorm") for path, _ in model.named_modules())
    for path, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.dim() == 1:  # norms, of some 1 + weight; the last one makes logits of a deviation of 4
                plain = type(module).__name__ == "RMSNorm"
                weight.data.fill_(plain + 3 * path.endswith("model.norm"))
                if path.endswith("q_norm") and "Gemma4" in type(model).__name__:
                    weight.data.fill_(len(weight) ** -0.5)  # nothing else scales the scores
            elif weight.numel() > 1:
                draw = torch.Generator(weight.device).manual_seed(zlib.crc32(f"{path}.{name}".encode()))
                weight.data.normal_(std=weight.shape[-1] ** -0.5, generator=draw)
                if caches_latents and path.endswith("embed_tokens"):
                    mean = torch.empty_like(weight.data[0]).normal_(std=weight.shape[-1] ** -0.5, generator=draw)
                    weight.data += mean
    for module in model.modules():  # Gemma 4's full layers have one projection for K and V
        if getattr(getattr(module, "config", None), "attention_k_eq_v", False) and not getattr(
            module, "is_sliding", True
        ):
            of_k, of_v = module.qkv_proj.weight.data[module.q_size :].chunk(2)
            of_v.copy_(of_k)


def prepare(model, impl):
    """Give models weights that make answers. On a CPU, serve layers with latents (`run_engine`)."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
    from vllm.platforms import current_platform

    def load_weights(self, model, config):
        self.load_config.load_format = "auto"  # as weights that are loaded, for the plugin
        fill(model)

    DummyModelLoader.load_weights = load_weights
    if "kv_lora_rank" in MODELS[model] and impl == "fp8attn" and current_platform.is_cpu():
        from tests.vllm.run_engine import serve_latents

        serve_latents()
