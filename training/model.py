"""The Llama architecture, and its twin with multi-head latent attention as DeepSeek V3 has it, arranged for fast
training on one GPU; `hf_weights` names their weights as transformers does.

Activations are [tokens, channels] whatever the context length, so that everything but attention has one shape and
is compiled once, although the length changes from step to step.
"""

import json

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

LATENT_EPS = 1e-6  # of the latent's norm in transformers' DeepseekV3Attention, whatever the config says


def rms_norm(x, weight, eps):
    """RMS norm as Llama computes it: in float32, then back to the type of `x`."""
    return F.rms_norm(x.float(), weight.shape, eps=eps).to(x.dtype) * weight.to(x.dtype)


def linear(x, weight):
    """A product with a float32 master weight in the type of `x`."""
    return F.linear(x, weight.to(x.dtype))


def rotate(x, cos, sin):
    """Rotary embedding of `x` [tokens, heads, head_dim], first half of the channels paired with the second."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def project(x, norm, wq, wk, wv, cos, sin, head_dim, eps):
    """Queries, keys and values of a layer, queries and keys rotated."""
    h = rms_norm(x, norm, eps)
    q, k, v = (linear(h, w).unflatten(1, (-1, head_dim)) for w in (wq, wk, wv))
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def project_latent(x, norm, wq, wa, latent_norm, wb, cos, sin, heads, eps):
    """Queries, keys and values of a layer with a latent: `wa` makes it and the keys' channels with RoPE, which all
    heads share; `wb` makes of it the other channels of keys, and values.
    """
    h = rms_norm(x, norm, eps)
    rank, turned = latent_norm.shape[0], 2 * cos.shape[-1]
    q = linear(h, wq).unflatten(1, (heads, -1))
    latent, k_turned = linear(h, wa).split((rank, turned), dim=1)
    plain = q.shape[2] - turned
    expanded = linear(rms_norm(latent, latent_norm, LATENT_EPS), wb).unflatten(1, (heads, -1))
    k_turned = rotate(k_turned[:, None], cos, sin).expand(-1, heads, -1)
    q = torch.cat((q[..., :plain], rotate(q[..., plain:], cos, sin)), dim=-1)
    k = torch.cat((expanded[..., :plain], k_turned), dim=-1)
    return q, k, expanded[..., plain:].contiguous()  # cuDNN's attention takes rows that lie side by side


def drop(x, dropout):
    """Dropout with a probability for each token: `dropout` is [tokens, 1], or None for no dropout at all."""
    if dropout is None:
        return x
    return x * ((torch.rand_like(x, dtype=torch.float32) >= dropout) / (1 - dropout)).to(x.dtype)


def finish(x, attended, wo, norm, gate, up, down, eps, dropout):
    """The rest of a layer: output projection and MLP, both added to the residual stream."""
    x = x + drop(linear(attended, wo), dropout)
    h = rms_norm(x, norm, eps)
    return x + drop(linear(F.silu(linear(h, gate)) * linear(h, up), down), dropout)


def token_losses(x, norm, embed, targets, eps):
    """Cross-entropy in nats and whether the likeliest token is the target, for each token."""
    logits = linear(rms_norm(x, norm, eps), embed).float()
    return F.cross_entropy(logits, targets, reduction="none"), logits.argmax(-1) == targets


class Layer(nn.Module):
    """The weights of one layer."""

    def __init__(self, c):
        super().__init__()
        d, mlp, heads = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"]
        self.norm1, self.norm2 = nn.Parameter(torch.ones(d)), nn.Parameter(torch.ones(d))
        if is_latent(c):
            plain, turned, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], heads * c["v_head_dim"]
            self.wq, self.wa = matrix(heads * (plain + turned), d), matrix(c["kv_lora_rank"] + turned, d)
            self.latent_norm = nn.Parameter(torch.ones(c["kv_lora_rank"]))
            self.wb = matrix(heads * plain + v, c["kv_lora_rank"])
        else:
            v, kv = heads * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
            self.wq, self.wk, self.wv = matrix(v, d), matrix(kv, d), matrix(kv, d)
        self.gate, self.up = matrix(mlp, d), matrix(mlp, d)
        self.wo, self.down = matrix(d, v, 0.0), matrix(d, mlp, 0.0)  # a layer starts as the identity


def is_latent(c):
    """Whether a model of these settings has multi-head latent attention."""
    return "kv_lora_rank" in c


def matrix(rows, columns, scale=1.0):
    """A weight that keeps the size of its input, times `scale`."""
    return nn.Parameter(torch.randn(rows, columns) * scale * columns**-0.5)


class Model(nn.Module):
    """A language model with tied embeddings.

    Args:
        c: the `llama` or the `latent` part of config.json.
        compiled: compile what is compiled while training; evaluation stays eager.
    """

    def __init__(self, c, compiled=False):
        super().__init__()
        self.c = c
        self.embed = nn.Parameter(torch.randn(c["vocab_size"], c["hidden_size"]) * 0.02)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = nn.Parameter(torch.ones(c["hidden_size"]))
        turned = c["qk_rope_head_dim" if is_latent(c) else "head_dim"]
        frequency = c["rope_theta"] ** -(torch.arange(0, turned, 2, dtype=torch.float64) / turned)
        angles = torch.outer(torch.arange(c["max_position_embeddings"]), frequency)
        self.register_buffer("cos", angles.cos().float()[:, None], persistent=False)
        self.register_buffer("sin", angles.sin().float()[:, None], persistent=False)
        wrap = torch.compile(dynamic=False) if compiled else lambda f: f
        self.plain = (project_latent if is_latent(c) else project, finish, token_losses)
        self.fast = [wrap(f) for f in self.plain]

    def forward(self, tokens, dtype=torch.float32, dropout=None):
        """Losses and hits [batch, length - 1] of each next token of `tokens` [batch, length].

        `dropout` [batch] is each row's probability on the embeddings and on what each block adds; None: none.
        """
        run_project, run_finish, run_losses = self.fast if self.training else self.plain
        c, eps = self.c, self.c["rms_norm_eps"]
        tokens, batch, length = tokens.long(), tokens.shape[0], tokens.shape[1] - 1
        cos, sin = self.cos[:length].repeat(batch, 1, 1), self.sin[:length].repeat(batch, 1, 1)
        dropout = None if dropout is None else dropout.repeat_interleave(length)[:, None]
        x = drop(F.embedding(tokens[:, :-1].flatten(), self.embed).to(dtype), dropout)
        for w in self.layers:
            if is_latent(c):
                heads = c["num_attention_heads"]
                qkv = run_project(x, w.norm1, w.wq, w.wa, w.latent_norm, w.wb, cos, sin, heads, eps)
            else:
                qkv = run_project(x, w.norm1, w.wq, w.wk, w.wv, cos, sin, c["head_dim"], eps)
            qkv = (t.unflatten(0, (batch, length)).transpose(1, 2) for t in qkv)
            attended = F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)
            attended = attended.transpose(1, 2).reshape(batch * length, -1)
            x = run_finish(x, attended, w.wo, w.norm2, w.gate, w.up, w.down, eps, dropout)
        losses, hits = run_losses(x, self.norm, self.embed, tokens[:, 1:].flatten(), eps)
        return losses.view(batch, length), hits.view(batch, length)


HF_NAMES = {  # of a layer's weights
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    **{f"w{p}": f"self_attn.{p}_proj" for p in "qkvo"},
    "wa": "self_attn.kv_a_proj_with_mqa",
    "latent_norm": "self_attn.kv_a_layernorm",
    "wb": "self_attn.kv_b_proj",
}


def hf_weights(model):
    """The weights in BF16 under the names that transformers gives them: `LlamaForCausalLM`, or `DeepseekV3ForCausalLM`,
    whose pairs of channels with RoPE lie beside each other, where ours are half of them apart.
    """
    weights = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.norm}
    for i, layer in enumerate(model.layers):
        own = dict(layer.named_parameters())
        if is_latent(model.c):
            own["wq"] = interleaved(own["wq"].unflatten(0, (model.c["num_attention_heads"], -1)), model.c).flatten(0, 1)
            own["wa"] = interleaved(own["wa"][None], model.c)[0]
        weights |= {f"model.layers.{i}.{HF_NAMES[name]}.weight": w for name, w in own.items()}
    return {name: w.detach().to("cpu", torch.bfloat16).contiguous() for name, w in weights.items()}


def interleaved(weight, c):
    """`weight` [heads, rows, columns] with its last rows, those of channels with RoPE, in DeepSeek's order."""
    plain = weight.shape[1] - c["qk_rope_head_dim"]
    pairs = weight[:, plain:].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat((weight[:, :plain], pairs), dim=1)


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "q_lora_rank": None,
    "rope_interleave": True,
}


def save_hf(model, folder):
    """Write config.json and model.safetensors for `AutoModelForCausalLM.from_pretrained(folder)`."""
    settings = {
        **(DEEPSEEK | {"first_k_dense_replace": model.c["num_hidden_layers"]} if is_latent(model.c) else LLAMA),
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
        **model.c,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    save_file(hf_weights(model), folder / "model.safetensors", metadata={"format": "pt"})
