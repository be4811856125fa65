"""Latent attention (MLA) of transformers' models over pages of latents.

These models call `cache.update(latent, key with RoPE)` and `expand_kv` of both, which gives K and V of every head, and
then the attention function. `install` replaces `expand_kv` of the modules of one model: over pages it returns its
arguments. So the attention function gets the pages, and attends with absorbed queries (`absorb`); its output are
latents, which `expand` turns into those of heads. Both multiply by views of the weight of `kv_b_proj`.

A prompt into an empty cache comes as plain tensors (`FP8Layer.update`). The module's own class expands them, and torch
attends over K and V, which takes a third of the operations.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from ...formats.latent import BLOCK
from .config import cache_keyword, decoder_config
from .decoder import decoder_modules
from .tensors import PagedTensor

PROBE = 64  # tokens
Attention = Any  # an attention module: transformers has a class for each model, and none for all


def latent_modules(model: PreTrainedModel) -> list[Attention]:
    """The modules of a model's decoder that cache latents."""
    return [module for _, module in decoder_modules(model) if hasattr(type(module), "expand_kv")]


def install(model: PreTrainedModel) -> None:
    """Let the model's latent attention read pages."""
    for module in latent_modules(model):
        module.expand_kv = partial(_expand_kv, module)


def _expand_kv(
    module: Attention, latent: torch.Tensor, rope: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """What `expand_kv` of the module's class returns; or the arguments, if they are pages and the weight is at hand."""
    if isinstance(latent, PagedTensor):
        if _has_weight(module.kv_b_proj, latent.device):
            return latent, rope
        if not torch.compiler.is_compiling():
            warnings.warn(  # Python shows a warning of one text from one line once.
                f"kv_b_proj of {type(module).__name__} is a {type(module.kv_b_proj).__name__} whose weight fp8attn "
                f"cannot read. All latents are dequantized and expanded in every step, which is slow. Merge adapters "
                f"into the model, and keep kv_b_proj unquantized and on its GPU",
                stacklevel=2,
            )
    return type(module).expand_kv(module, latent, rope)


def _has_weight(projection: nn.Module, device: torch.device) -> bool:
    """Whether a projection computes `x @ weight.T` of a weight on `device`: adapters, quantized layers and those that
    are offloaded do not.
    """
    return type(projection) is nn.Linear and projection.bias is None and projection.weight.device == device


def _weights(module: Attention) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the weight of `kv_b_proj`: what expands a latent to keys without RoPE `[heads, nope, rank]`, and to
    values `[heads, v, rank]`.
    """
    sizes = [module.qk_nope_head_dim, module.v_head_dim]
    k, v = module.kv_b_proj.weight.unflatten(0, (-1, sum(sizes))).split(sizes, 1)
    return k, v


def absorb(module: Attention, query: torch.Tensor) -> torch.Tensor:
    """Queries `[B, heads, S, nope + rope]` for latents: `[B, heads, S, rank + rope]`."""
    nope, rope = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
    return torch.cat([torch.einsum("bhsn,hnr->bhsr", nope, _weights(module)[0]), rope], -1)


def expand(module: Attention, out: torch.Tensor) -> torch.Tensor:
    """Latents `[B, S, heads, rank]` that attention has summed, as values `[B, S, heads, v]`."""
    return torch.einsum("bshr,hvr->bshv", out, _weights(module)[1])


# What was read of a model's latents, by layer.
_READ: WeakKeyDictionary[nn.Module, dict[int, tuple[torch.Tensor, torch.Tensor]]] = WeakKeyDictionary()


def read_latents(model: PreTrainedModel) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """The mean of a model's latents `[1, rank]` and the deviation of each block from it `[1, rank / 128]`, float32, by
    layer. No data are needed: the model reads `PROBE` random tokens, once. Of a model whose weights are not loaded it
    is empty.

    The bytes of a token must depend on that token alone, so these are not the mean and deviation of a prompt. Others
    than the right ones cost digits, and make nothing wrong.
    """
    if model in _READ or model.device.type == "meta":
        return _READ.get(model, {})
    config, generator = decoder_config(model.config), torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (1, PROBE), generator=generator)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode(False), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        model(input_ids=ids.to(model.device), use_cache=True, **{cache_keyword(model): cache})
        latents = {module.layer_idx: cache.layers[module.layer_idx].keys for module in latent_modules(model)}
        _READ[model] = {index: _statics(x[0, 0].float()) for index, x in latents.items()}
    return _READ[model]


def _statics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of `x [tokens, rank]`, and the deviation of each block; zero and one where they are no numbers."""
    mean = x.mean(0)
    mean = torch.where(mean.isfinite(), mean, 0.0)
    factor = (x - mean).unflatten(1, (-1, BLOCK)).square().mean((0, 2)).sqrt()
    return mean[None], torch.where(factor.isfinite() & (factor > 0), factor, 1.0)[None]
