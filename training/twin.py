"""The twin of the small model with multi-head latent attention, made of the small model's own weights.

K of two heads and V of two heads of 128 channels are what a latent of 512 channels can hold, so the twin begins as the
model that it is a twin of, and `train.py` only has to mend what changes:

- RoPE turns half of K's pairs of channels, those of the 32 highest frequencies. Both KV heads of the model have such
  pairs of their own, and the twin's heads share one key with RoPE: of the two, the combination that keeps most of what
  the queries read.
- The other pairs turn less than once in 19,000 tokens. They become channels without RoPE.
- A latent is divided by its root mean square, which differs by 6% between tokens.

At once, without training, the twin finds a sentence among those of 65,536 tokens, and its loss on text is 0.4 nats a
token above the model's.
"""

import torch
from data import CONFIG, MODEL
from model import HF_NAMES, Model, rms_norm
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel

FILL = 3.0  # root mean square of the channels of a latent that K and V leave free, beside theirs of 1


def small_model(folder=MODEL):
    """The committed model, of this repository's classes."""
    model, saved = Model(CONFIG["llama"]), load_file(folder / "model.safetensors")
    with torch.no_grad():
        model.embed.copy_(saved["model.embed_tokens.weight"])
        model.norm.copy_(saved["model.norm.weight"])
        for number, layer in enumerate(model.layers):
            for name, weight in layer.named_parameters():
                weight.copy_(saved[f"model.layers.{number}.{HF_NAMES[name]}.weight"])
    return model.eval()


@torch.no_grad()
def make_twin(llama, tokens, compiled=False):
    """The twin of `llama`, before training.

    Args:
        llama: a `Model` with two KV heads of 128 channels.
        tokens: `[batch, length]` ids. What the layers see of them decides what the shared key keeps.
        compiled: as `Model` takes it.
    """
    twin = Model(CONFIG["latent"], compiled)
    twin.embed.copy_(llama.embed)
    twin.norm.copy_(llama.norm)
    for old, new, seen in zip(llama.layers, twin.layers, moments(llama, tokens), strict=True):
        for name in ("norm1", "norm2", "gate", "up", "down", "wo"):
            getattr(new, name).copy_(getattr(old, name))
        fill_attention(llama.c, twin.c, old, new, seen)
    return twin


def moments(llama, tokens):
    """The second moments `[hidden, hidden]` of each layer's input of attention, float64."""
    second_moments, (project, *others) = [], llama.plain

    def note(x, norm, *rest):
        h = rms_norm(x, norm, llama.c["rms_norm_eps"]).double()
        second_moments.append(h.T @ h / len(h))
        return project(x, norm, *rest)

    llama.plain = (note, *others)
    with sdpa_kernel(SDPBackend.MATH):  # training has chosen kernels that take no float32
        llama(tokens)
    llama.plain = (project, *others)
    return second_moments


def fill_attention(c, latent, old, new, seen):
    """Set a twin's layer `new` to what `old` does over inputs whose second moments are `seen`."""
    heads, kv_heads, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    group, width = heads // kv_heads, c["hidden_size"]
    turned = latent["qk_rope_head_dim"] // 2  # pairs
    q, k, v = (w.double().unflatten(0, (-1, dim)) for w in (old.wq, old.wk, old.wv))
    first = torch.arange(turned, dim // 2)
    plain = torch.cat((first, first + dim // 2))

    # A pair of channels is a complex number: RoPE multiplies it by another.
    turned_q, turned_k = (torch.complex(w[:, :turned], w[:, dim // 2 : dim // 2 + turned]) for w in (q, k))
    moment = seen.to(turned_q.dtype)
    read = torch.einsum("hpd,de,hpe->ph", turned_q, moment, turned_q.conj()).real
    read = read.unflatten(1, (kv_heads, group)).sum(2).sqrt()  # of each KV head's pairs
    weighed = read.T[..., None] * turned_k
    _, vectors = torch.linalg.eigh(torch.einsum("hpd,de,gpe->phg", weighed, moment, weighed.conj()))
    best = vectors[..., -1]  # [pairs, kv_heads]
    shared = torch.einsum("ph,hpd->pd", best.conj(), weighed)
    size = (torch.einsum("pd,de,pe->p", shared, moment, shared.conj()).real / 2).sqrt()
    shared = shared / size[:, None]
    q_factor = (best / read * size[:, None]).conj().T.repeat_interleave(group, 0)[..., None]
    turned_q = turned_q * q_factor
    new.wq.copy_(torch.cat((q[:, plain], turned_q.real, turned_q.imag), 1).flatten(0, 1))

    # A latent: K's channels without RoPE, V, and random ones, whose share of the root mean square steadies it.
    stored = torch.cat((k[:, plain].flatten(0, 1), v.flatten(0, 1)))
    blocks = stored.unflatten(0, (-1, dim))
    size = torch.einsum("brd,de,bre->b", blocks, seen, blocks).div(dim).sqrt()
    free = latent["kv_lora_rank"] - len(stored)
    fill = torch.randn(free, width, dtype=torch.float64, device=stored.device) * seen.trace().rsqrt() * FILL
    new.wa.copy_(torch.cat(((blocks / size[:, None, None]).flatten(0, 1), fill, shared.real, shared.imag)))
    norm = ((len(stored) + free * FILL**2) / latent["kv_lora_rank"]) ** 0.5
    new.latent_norm.fill_(norm)
    new.latent_norm[len(stored) :] /= FILL

    keys, wb = len(plain), new.wb.view(heads, len(plain) + dim, -1)
    wb.zero_()
    for head in range(heads):
        at, value = head // group * keys, kv_heads * keys + head // group * dim
        wb[head, :keys, at : at + keys] = torch.eye(keys) * size[at // dim]
        wb[head, keys:, value : value + dim] = torch.eye(dim) * size[value // dim]
