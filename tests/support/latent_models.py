"""Small models whose layers cache latents, and what tests run on them."""

import pytest
import torch
import transformers

from fp8attn.integrations.transformers.latent import latent_modules
from tests.support import transformers_models
from tests.support.transformers_models import VOCABULARY, using

SIZES = dict(
    vocab_size=97, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=256, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=48,
    max_position_embeddings=1024, first_k_dense_replace=9, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
    topk_group=1, moe_intermediate_size=32, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip


def make_latents(config=None, **changes):
    """A random model with latent attention (DeepSeek V3, or of another config), which is neither flat nor one-hot, and
    whose norms have unequal weights."""
    if not hasattr(transformers, "Mistral4Config"):
        pytest.skip("transformers caches latents from 5.24 on")
    torch.manual_seed(0)
    config = (config or transformers.DeepseekV3Config)(**SIZES | changes)
    model = transformers.Mistral4Model if config.model_type == "mistral4" else transformers.DeepseekV3ForCausalLM
    model = model._from_config(config, attn_implementation="sdpa").eval()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data.normal_(0, module.in_features**-0.5)
    for module in latent_modules(model):
        module.kv_a_layernorm.weight.data[:128] = 0.1  # and 1 in the other block
        module.kv_b_proj.weight.data[:, :128] *= 10
    return model


def make_k_eq_v(**changes):
    """Gemma 4 whose keys of full layers follow from their values. Windows of 32 tokens stay in 16 bits. The weights of
    the keys' norms differ by channel, as of trained models."""
    options = {"num_global_key_value_heads": 2, "num_kv_shared_layers": 0, "num_hidden_layers": 2} | changes
    options["layer_types"] = ["sliding_attention", "full_attention"] * (options["num_hidden_layers"] // 2)
    model = transformers_models.make("gemma4-512-k-is-v-shared-kv", **options)
    generator = torch.Generator().manual_seed(2)
    for module in model.modules():
        if hasattr(module, "k_norm") and module.head_dim == 512:
            size = torch.randn(512, generator=generator).mul(0.7).exp()
            module.k_norm.weight.data = 0.05 * size * torch.randn(512, generator=generator).sign()
    return model


def prompt(batch, length, vocabulary=VOCABULARY):
    """Ids `[batch, length]` and their mask; of several sequences, the first begins with padding."""
    ids = torch.randint(3, vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[0, :17] = ids[0, :17] = 0
    return ids, mask


def logits(out):
    return getattr(out, "logits", out[0])


@torch.no_grad()
def run(model, cache, ids, mask, cuts):
    """The logits of all tokens, which are given in pieces."""
    position, outs = (mask.cumsum(-1) - 1).clamp_min(0), []
    for a, b in zip((0, *cuts), (*cuts, ids.shape[1]), strict=True):
        given = {"attention_mask": mask[:, :b], "position_ids": position[:, a:b], "past_key_values": cache}
        outs.append(logits(model(ids[:, a:b], **given)))
    return torch.cat(outs, 1)


@torch.no_grad()
def without_cache(model, ids, mask):
    position = (mask.cumsum(-1) - 1).clamp_min(0)
    with using(model, "eager"):
        return logits(model(ids, attention_mask=mask, position_ids=position, use_cache=False))
