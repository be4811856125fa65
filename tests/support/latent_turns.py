"""A conversation under the conditions of vllm#38652: 20 heads over latents, a system prompt that is cached once, and
several turns of several users on it.

There (GLM-4.7-Flash, an FP8 cache) one turn was coherent and several were not.
"""

from __future__ import annotations

import torch
import transformers

from benchmarks.latent_needle import plant_mean
from fp8attn.integrations.transformers.latent import latent_modules
from fp8attn.numerics import relative_error
from fp8attn_tools.evaluation.caches import forward, prefill

USERS, TURNS, QUESTION, ANSWER = 2, 4, 33, 4  # tokens of a question, and of its answer
VOCABULARY = 211


def make(mean: float, most: int) -> transformers.PreTrainedModel:
    """A random model with GLM-4.7-Flash's attention and two layers, whose latents have a mean of so many deviations.

    Args:
        mean: of latents.
        most: tokens.
    """
    torch.manual_seed(0)
    config = transformers.Glm4MoeLiteConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=20,
        num_key_value_heads=20, q_lora_rank=128, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64,
        v_head_dim=256, max_position_embeddings=most, mlp_layer_types=["dense", "dense"], n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    model = transformers.Glm4MoeLiteForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data.normal_(0, module.in_features**-0.5)
    for module in latent_modules(model):
        module.o_proj.weight.data *= 4  # attention averages over many tokens
    plant_mean(model, mean)
    return model


def said(system: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The system prompt `[1, system]`, and the tokens of each turn `[USERS, QUESTION + ANSWER]`."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (USERS, TURNS * (QUESTION + ANSWER)), generator=generator)
    return torch.randint(3, VOCABULARY, (1, system), generator=generator), list(ids.split(QUESTION + ANSWER, 1))


@torch.no_grad()
def exact(model, prompt: torch.Tensor, turns: list[torch.Tensor]) -> list[torch.Tensor]:
    """Logits of each turn's answers `[USERS, ANSWER, VOCABULARY]`, without a cache."""
    ids = torch.cat([prompt.expand(USERS, -1), *turns], 1)
    logits = torch.cat([model(row[None], use_cache=False).logits.float().cpu() for row in ids])
    each = QUESTION + ANSWER
    return [logits[:, prompt.shape[1] + each * n + QUESTION :][:, :ANSWER] for n in range(TURNS)]


@torch.no_grad()
def through(model, cache, prompt: torch.Tensor, turns: list[torch.Tensor]) -> list[torch.Tensor]:
    """As `exact`: the prompt is cached once for all, questions come whole, and answers one token a step."""
    prefill(model, prompt, cache, chunk=prompt.shape[1])
    cache.batch_repeat_interleave(USERS)
    answers = []
    for turn in turns:
        forward(model, turn[:, :QUESTION], cache, logits=1)
        steps = [forward(model, ids[:, None], cache, logits=1) for ids in turn[:, QUESTION:].unbind(1)]
        answers.append(torch.cat(steps, 1).float().cpu())
    return answers


def errors(got: list[torch.Tensor], want: list[torch.Tensor]) -> list[float]:
    """Relative, of the logits of each turn."""
    return [relative_error(g, w.double()) for g, w in zip(got, want, strict=True)]
