"""Random models with biases, and their checkpoints."""

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen2Config, Qwen2ForCausalLM

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def qwen2(**sizes):
    """A random Qwen2 whose K has an offset of 60 in the channels that RoPE rotates least, as trained ones have."""
    torch.manual_seed(0)
    rest = {"vocab_size": 512, "max_position_embeddings": 4096, "rope_theta": 1e6, "initializer_range": 0.1}
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES | sizes | rest, bos_token_id=0, eos_token_id=1))
    for layer in model.model.layers:
        bias = layer.self_attn.k_proj.bias.data.view(-1, 2, 32)
        bias.normal_()[:, :, 24:] += 60
    return model


def deepseek_v3(**sizes):
    """A random DeepSeek V3 with dense layers."""
    torch.manual_seed(0)
    layers = {"num_hidden_layers": 2, "first_k_dense_replace": 8, "num_attention_heads": 4, "num_key_value_heads": 4}
    heads = {"q_lora_rank": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32}
    rest = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512, "max_position_embeddings": 4096}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    config = DeepseekV3Config(
        **rest | layers | heads | experts | sizes, initializer_range=0.1, bos_token_id=0, eos_token_id=1
    )
    return DeepseekV3ForCausalLM(config)


def quantized(model, folder, how):
    """The model's checkpoint with the names and types that quantized weights have. Biases stay."""
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    names = {"AWQ": "qweight", "FP8": "weight", "compressed-tensors": "weight_packed"}
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        x = weights.pop(name)
        weights[name.removesuffix("weight") + names[how]] = (
            x.to(torch.float8_e4m3fn) if how == "FP8" else x[:, ::8].int()
        )
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
