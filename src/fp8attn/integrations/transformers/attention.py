"""The attention function that is registered in transformers as `fp8_kv`: over FP8 pages, and as `sdpa` in 16-bit
layers.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ... import ops
from ..._torch_ops import resolve
from ...checks import check_tensor
from ...dense.sdpa import autocast
from ...params import AttentionParams
from .. import k_eq_v
from .latent import absorb, expand
from .masks import QUERY_BLOCK, CompactMask, block_of
from .tensors import PagedTensor, pages_of, tokens_of

# Keywords of transformers' models that do not change what attention computes.
NEUTRAL = frozenset({  # `_attend_pages` looks at sliding_window
    "cache_position", "deterministic", "labels", "logits_to_keep", "mm_token_type_ids", "num_items_in_batch",
    "output_hidden_states", "output_router_logits", "position_embeddings", "position_ids", "return_dict",
    "sliding_window", "token_type_ids", "use_cache",
})  # fmt: skip
# Keywords that change what attention computes or returns, and words in the names of such keywords.
CHANGES_ATTENTION = frozenset({
    "block_indices", "block_table", "cache", "indices", "output_attentions", "position_bias", "s_aux", "seq_idx",
})  # fmt: skip
CHANGING_WORDS = (
    "alibi", "bias", "cap", "chunk", "cu_seq", "dropout", "mask", "max_length", "max_seq", "prefix", "scale", "scaling",
    "score", "sink", "slope", "sparse", "temperature", "window",
)  # fmt: skip
_warned: set[str] = set()  # unknown keywords


def fp8_kv_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a transformers layer: over FP8 pages if `key` carries them, else as `sdpa` computes it.

    Args:
        query: `[B, num_q_heads, S, head_dim]`.
        key, value: `[B, num_kv_heads, length, head_dim]`, `PagedTensor` or plain.
            Over pages of latents, `latent.absorb` takes the query.
        attention_mask: from `fp8_kv_mask`, or a caller's own four-dimensional one (16-bit layers only).
        dropout: must be 0 in FP8 layers, and in layers with sinks or a softcap.
        scaling, is_causal, softcap: as in transformers' attention functions. Unlike `sdpa`, 16-bit layers support a
            softcap, too.
        s_aux: `[num_q_heads]` attention sinks; 16-bit layers support them, too.
    Returns:
        `[B, S, num_q_heads, head_dim]` and None (attention weights are never formed).
    Raises:
        ValueError: an argument would change the result and is not supported; the message says what to do instead.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if isinstance(key, PagedTensor) and isinstance(value, PagedTensor) and (key.which, value.which) == ("k", "v"):
        latents = "expand_kv" in vars(module)  # `latent.install` has replaced it
        if latents and (softcap is not None or s_aux is not None):
            raise ValueError(f"{_in_fp8(module)} as latents, whose attention has no softcap and no sinks (s_aux)")
        if scaling is None:
            scaling = query.shape[3] ** -0.5
        if latents:
            query = absorb(module, query)
        elif key._key_matrix is not None:
            query = k_eq_v.absorb(query.transpose(1, 2), key._key_matrix).transpose(1, 2)  # no copy in `tokens_of`
        out = _attend_pages(module, query, key, attention_mask, dropout, scaling, causal, softcap, s_aux, kwargs)
        return (expand(module, out) if latents else out), None
    # A model that changes K or V after the cache (DiffLlama) has dequantized it by that. The other one is dequantized
    # here.
    key, value = (x.dequantize() if isinstance(x, PagedTensor) else x for x in (key, value))
    compact = isinstance(attention_mask, CompactMask)
    if attention_mask is not None and not compact and "expand_kv" in vars(module):  # a prompt beside a static cache
        attention_mask = attention_mask[..., : key.shape[2]]
    if (
        not compact
        and attention_mask is not None
        and attention_mask.dtype != torch.bool
        and not attention_mask.is_floating_point()
    ):
        raise ValueError(
            f"fp8_kv: a four-dimensional mask is bool (True: seen) or floating-point (added to scores); got "
            f"{attention_mask.dtype}. Pass mask.bool()"
        )
    exact = softcap is not None or s_aux is not None
    if not compact and not exact:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    if exact and (dropout or kwargs.get("position_bias") is not None):
        raise ValueError(
            "fp8_kv: a layer with sinks or a softcap takes no dropout and no position_bias; use "
            "attn_implementation='eager'"
        )
    outs = []
    length = query.shape[2]
    for begin in range(0, length, QUERY_BLOCK):
        stop = min(begin + QUERY_BLOCK, length)
        block = query[:, :, begin:stop]
        mask = block_of(attention_mask, causal, length, key.shape[2], begin, stop, query.device)
        if exact:
            outs.append(_attend_exactly(block, key, value, mask, scaling, softcap, s_aux))
        else:
            outs.append(
                sdpa_attention_forward(module, block, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)[0]
            )
    return torch.cat(outs, 1), None


def _attend_pages(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: PagedTensor,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float,
    causal: bool,
    softcap: float | None,
    sinks: torch.Tensor | None,
    keywords: Mapping[str, Any],
) -> torch.Tensor:
    if dropout:
        raise ValueError(f"{_in_fp8(module)}, which supports no dropout, and dropout is {dropout}; call model.eval()")
    _check_keywords(module, keywords)
    reading, start = key.reading, None
    window = reading.window
    if keywords.get("sliding_window") not in (None, window):
        raise ValueError(
            f"{_in_fp8(module)} and is called with sliding_window={keywords['sliding_window']}, and by the model's "
            f"config its window is {window}. Keep such layers in 16 bits (FP8Cache(model, skip_layers=[...]))"
        )
    if mask is not None:
        if not isinstance(mask, CompactMask) or mask.window != window:
            raise ValueError(
                f"{_in_fp8(module)}, which supports causal masks with padding on the left; this call has another mask "
                f"{tuple(mask.shape)} {mask.dtype}. "
                "It may be four-dimensional; two-dimensional with holes (tokens after padding on the right make one), "
                "or shorter than the cache and the new tokens together; or made by the model for packed sequences, "
                "image blocks or prefixes. Pad on the left (tokenizer.padding_side = 'left') and pass the whole "
                "two-dimensional mask, or read the same cache dequantized, with any mask: "
                "model.set_attn_implementation('sdpa')"
            )
        causal, start = True, mask.rows[0] if mask.shape[2] == 2 else None
    causal = causal or window is not None
    if query.dtype != key.dtype:  # keys are in autocast's dtype already
        (query,) = autocast(query)
    batch, heads, length, _ = query.shape
    q, pages = tokens_of(query), pages_of(key)
    if batch != pages.num_seqs:
        raise ValueError(
            f"{_in_fp8(module)} with {pages.num_seqs} sequences in its cache, and this call has queries of {batch}"
        )
    ops.check_queries(q, pages)
    if sinks is not None:
        check_tensor(sinks, "sinks, one logit per query head,", (heads,), None, q.device)
    params = AttentionParams(
        None, length, causal, scaling, window or 0, softcap or 0.0, sinks,
        start, False, reading.exact, reading.batch_invariant,
    )  # fmt: skip
    out, _ = ops.run_attention(resolve(reading.backend, q, pages.format.name), q, pages, params)
    return out.view(batch, length, heads, -1)


def _check_keywords(module: torch.nn.Module, keywords: Mapping[str, Any]) -> None:
    """Refuse keywords that change attention; warn once about an unknown one. None and False mean that a keyword is not
    in use.

    A newer transformers may pass a new keyword to every model, and most of those do not concern attention. So an
    unknown keyword is refused only if its name has a word that says that it does.
    """
    used = [
        name for name, value in keywords.items() if name not in NEUTRAL and value is not None and value is not False
    ]
    if not used:
        return
    refused = sorted(name for name in used if name in CHANGES_ATTENTION or any(word in name for word in CHANGING_WORDS))
    if refused:
        raise ValueError(
            f"{_in_fp8(module)} and is called with {', '.join(refused)}, which fp8_kv does not support. Keep such "
            f"layers in 16 bits (FP8Cache(model, skip_layers=[...])), or read the same cache dequantized: "
            f"model.set_attn_implementation('sdpa' or 'eager')"
        )
    if "expand_kv" in vars(module):  # new forms of latent attention come with new keywords
        raise ValueError(f"{_in_fp8(module)} as latents and is called with {', '.join(used)}, unknown to fp8attn")
    if not torch.compiler.is_compiling() and (new := sorted(set(used) - _warned)):
        _warned.update(new)
        warnings.warn(
            f"{_in_fp8(module)} and is called with {', '.join(new)}, which fp8attn does not know. It is ignored. If it "
            f"changes what attention computes, read the same cache dequantized: model.set_attn_implementation('sdpa' "
            f"or 'eager')",
            stacklevel=2,
        )


def _in_fp8(module: torch.nn.Module) -> str:
    return f"layer {getattr(module, 'layer_idx', '?')} of {type(module).__name__} is in FP8"


def _attend_exactly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with a softcap, and with sinks as one more column of the softmax that has no value. The softmax is in
    FP32.

    Returns `[B, S, heads, head_dim]`.
    """
    group = query.shape[1] // key.shape[1]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query.unflatten(1, (-1, group)).flatten(2, 3) @ key.transpose(2, 3)
    scores = scores.unflatten(2, (group, -1)).flatten(1, 2).float() * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, torch.finfo(torch.float32).min) if mask.dtype == torch.bool else scores + mask
        )
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(len(query), -1, query.shape[2], 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype)
    out = weights.unflatten(1, (-1, group)).flatten(2, 3) @ value
    return out.unflatten(2, (group, -1)).flatten(1, 2).transpose(1, 2)
