"""The Llama architecture, arranged for fast training on one GPU; `hf_weights` names its weights as transformers does.

Activations are [tokens, channels] whatever the context length, so that everything but attention has one shape and
is compiled once, although the length changes from step to step.
"""

import json

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

# In order of choice. cuDNN's is the faster on Hopper, where attention is most of a long step; none but these two is an option there, since
# the others hold scores of [length, length].
FAST_ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


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


def attend(q, k, v):
    """Causal attention of [batch, heads, length, head_dim], with fewer heads in `k` and `v`."""
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    with sdpa_kernel(FAST_ATTENTION, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Layer(nn.Module):
    """The weights of one layer."""

    def __init__(self, c):
        super().__init__()
        q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
        d, mlp = c["hidden_size"], c["intermediate_size"]
        self.norm1, self.norm2 = nn.Parameter(torch.ones(d)), nn.Parameter(torch.ones(d))
        self.wq, self.wk, self.wv = matrix(q, d), matrix(kv, d), matrix(kv, d)
        self.gate, self.up = matrix(mlp, d), matrix(mlp, d)
        self.wo, self.down = matrix(d, q, 0.0), matrix(d, mlp, 0.0)  # a layer starts as the identity


def matrix(rows, columns, scale=1.0):
    """A weight that keeps the size of its input, times `scale`."""
    return nn.Parameter(torch.randn(rows, columns) * scale * columns**-0.5)


class Llama(nn.Module):
    """A Llama language model with tied embeddings.

    Args:
        c: the `model` part of config.json.
        compiled: compile what is compiled while training; evaluation stays eager.
    """

    def __init__(self, c, compiled=False):
        super().__init__()
        self.c = c
        self.embed = nn.Parameter(torch.randn(c["vocab_size"], c["hidden_size"]) * 0.02)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = nn.Parameter(torch.ones(c["hidden_size"]))
        frequency = c["rope_theta"] ** -(torch.arange(0, c["head_dim"], 2, dtype=torch.float64) / c["head_dim"])
        angles = torch.outer(torch.arange(c["max_position_embeddings"]), frequency)
        self.register_buffer("cos", angles.cos().float()[:, None], persistent=False)
        self.register_buffer("sin", angles.sin().float()[:, None], persistent=False)
        wrap = torch.compile(dynamic=False) if compiled else lambda f: f
        self.fast = [wrap(f) for f in (project, finish, token_losses)]

    def forward(self, tokens, dtype=torch.float32, dropout=None):
        """Losses and hits [batch, length - 1] of each next token of `tokens` [batch, length].

        `dropout` [batch] is each row's probability on the embeddings and on what each block adds; None: none.
        """
        run_project, run_finish, run_losses = self.fast if self.training else (project, finish, token_losses)
        c, eps = self.c, self.c["rms_norm_eps"]
        tokens, batch, length = tokens.long(), tokens.shape[0], tokens.shape[1] - 1
        cos, sin = self.cos[:length].repeat(batch, 1, 1), self.sin[:length].repeat(batch, 1, 1)
        dropout = None if dropout is None else dropout.repeat_interleave(length)[:, None]
        x = drop(F.embedding(tokens[:, :-1].flatten(), self.embed).to(dtype), dropout)
        for w in self.layers:
            qkv = run_project(x, w.norm1, w.wq, w.wk, w.wv, cos, sin, c["head_dim"], eps)
            qkv = (t.unflatten(0, (batch, length)).transpose(1, 2) for t in qkv)
            attended = attend(*qkv).transpose(1, 2).reshape(batch * length, -1)
            x = run_finish(x, attended, w.wo, w.norm2, w.gate, w.up, w.down, eps, dropout)
        losses, hits = run_losses(x, self.norm, self.embed, tokens[:, 1:].flatten(), eps)
        return losses.view(batch, length), hits.view(batch, length)


def hf_weights(model):
    """The weights in BF16 under the names that transformers' LlamaForCausalLM gives them."""
    names = {
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
        **{f"w{p}": f"self_attn.{p}_proj" for p in "qkvo"},
    }
    weights = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.norm}
    for i, layer in enumerate(model.layers):
        weights |= {f"model.layers.{i}.{names[name]}.weight": w for name, w in layer.named_parameters()}
    return {name: w.detach().to("cpu", torch.bfloat16).contiguous() for name, w in weights.items()}


def save_hf(model, folder):
    """Write config.json and model.safetensors for `AutoModelForCausalLM.from_pretrained(folder)`."""
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
        **model.c,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    save_file(hf_weights(model), folder / "model.safetensors", metadata={"format": "pt"})
