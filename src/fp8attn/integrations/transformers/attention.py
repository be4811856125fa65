"""The attention and mask functions that are registered in transformers as `fp8_kv`.

A model makes one mask for all its layers of a type. Some of them are in FP8 and some in 16 bits, so the mask must serve both. A mask that
is causal, with padding on the left at most, is one of two:

- None: causal without padding.
- compact: int32 `[1, 1, n, B]`. For each sequence its last row is `end`, the number of tokens up to the last query. If n is 2, the first
  row is `start`, the first token that is not padding.

FP8 layers take `start` as `leftpad_k`; 16-bit layers expand blocks of the mask. transformers passes a four-dimensional integer mask through
unchanged. Any other mask is what `sdpa` would get, and FP8 layers refuse it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from ... import ops
from ...dense.sdpa import autocast
from .tensors import PagedTensor, pages_of, tokens_of

QUERY_BLOCK = 1024  # queries whose mask or scores are expanded at a time

# Keywords of transformers' models that do not change what attention computes.
NEUTRAL = frozenset({
    "cache_position", "deterministic", "labels", "logits_to_keep", "mm_token_type_ids", "num_items_in_batch", "output_hidden_states",
    "output_router_logits", "position_embeddings", "position_ids", "return_dict", "token_type_ids", "use_cache",
})  # fmt: skip
# Keywords that change what attention computes or returns, and words in the names of such keywords.
CHANGES_ATTENTION = frozenset({
    "block_indices", "block_table", "cache", "indices", "output_attentions", "position_bias", "s_aux", "seq_idx", "sliding_window",
})  # fmt: skip
CHANGING_WORDS = (
    "alibi", "bias", "cap", "chunk", "cu_seq", "dropout", "mask", "max_length", "max_seq", "prefix", "scale", "scaling", "score", "sink",
    "slope", "sparse", "temperature", "window",
)  # fmt: skip
_warned: set[str] = set()  # unknown keywords


def fp8_kv_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask of one type of layers: None, compact, or what `sdpa` gets (see the module).

    Args:
        batch_size, q_length, kv_length, q_offset, kv_offset: the part of the scores that the mask is for. A tensor `q_offset` (static
            caches) is read back only to check an `attention_mask`, and not in compiled code.
        mask_function: which query sees which key.
        attention_mask: bool `[B, tokens]`, False where a token is padding.
        local_size: the window of sliding and chunked layers.
    """
    sdpa_arguments = dict(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, local_size=local_size, device=device, **kwargs,
    )  # fmt: skip
    if local_size is not None or kv_offset:
        return sdpa_mask(**sdpa_arguments)
    end = q_offset + q_length
    start, padded = None, False
    if attention_mask is not None:
        width = attention_mask.shape[1]
        real = attention_mask.bool() & (torch.arange(width, device=attention_mask.device) < end)
        start = (real.cumsum(-1) == 0).sum(-1).clamp_max(end)
        padded = True
        if not torch.compiler.is_compiling():  # the one wait for the device in a step, as in sdpa_mask
            last = (real * torch.arange(1, width + 1, device=real.device)).amax(-1)
            holes = (real.sum(-1) != (last - start).clamp_min(0)).any()
            padded, holes, end_now = torch.stack([start.amax(), holes.long(), torch.as_tensor(end, device=real.device)]).tolist()
            if holes or width < end_now:
                return sdpa_mask(**sdpa_arguments)
    if mask_function is not causal_mask_function and not _is_causal(sdpa_arguments):
        return sdpa_mask(**sdpa_arguments)
    if not padded and isinstance(q_offset, int) and (kv_length == end if q_length == 1 else q_offset == 0):
        return None
    ends = torch.full((batch_size,), end, dtype=torch.int32, device=device) if isinstance(end, int) else end.int().expand(batch_size)
    return torch.stack([ends] if start is None or not padded else [start.int(), ends])[None, None]


def _is_causal(sdpa_arguments: dict[str, Any]) -> bool:
    """Whether an unknown mask function has the values of the causal one, as in an image model that gets text only."""
    if torch.compiler.is_compiling() or sdpa_arguments["mask_function"] is bidirectional_mask_function:
        return False
    length = sdpa_arguments["q_length"]
    for begin in range(0, length, QUERY_BLOCK):
        block = {
            **sdpa_arguments,
            "q_length": min(QUERY_BLOCK, length - begin),
            "q_offset": sdpa_arguments["q_offset"] + begin,
            "allow_is_causal_skip": False,
            "allow_is_bidirectional_skip": False,
        }
        if not torch.equal(sdpa_mask(**block), sdpa_mask(**{**block, "mask_function": causal_mask_function})):
            return False
    return True


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
        attention_mask: from `fp8_kv_mask`, or a caller's own four-dimensional one (16-bit layers only).
        dropout: must be 0 in FP8 layers, and in layers with sinks or a softcap.
        scaling, is_causal, softcap: as in transformers' attention functions. Unlike `sdpa`, 16-bit layers support a softcap, too.
        s_aux: `[num_q_heads]` attention sinks; 16-bit layers support them, too.
    Returns:
        `[B, S, num_q_heads, head_dim]` and None (attention weights are never formed).
    Raises:
        ValueError: an argument would change the result and is not supported; the message says what to do instead.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if isinstance(key, PagedTensor) and isinstance(value, PagedTensor) and (key.which, value.which) == ("k", "v"):
        return _attend_pages(module, query, key, attention_mask, dropout, scaling, causal, softcap, s_aux, kwargs), None
    # A model that changes K or V after the cache (DiffLlama) has dequantized it by that. The other one is dequantized here.
    key, value = (x.dequantize() if isinstance(x, PagedTensor) else x for x in (key, value))
    compact = attention_mask is not None and attention_mask.dtype == torch.int32
    exact = softcap is not None or s_aux is not None
    if not compact and not exact:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    if exact and (dropout or kwargs.get("position_bias") is not None):
        raise ValueError("fp8_kv: a layer with sinks or a softcap takes no dropout and no position_bias; use attn_implementation='eager'")
    outs = []
    length = query.shape[2]
    for begin in range(0, length, QUERY_BLOCK):
        stop = min(begin + QUERY_BLOCK, length)
        block, mask = query[:, :, begin:stop], _mask_block(attention_mask, causal, length, key.shape[2], begin, stop, query.device)
        if exact:
            outs.append(_attend_exactly(block, key, value, mask, scaling, softcap, s_aux))
        else:
            outs.append(sdpa_attention_forward(module, block, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)[0])
    return torch.cat(outs, 1), None


def _attend_pages(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: PagedTensor,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    causal: bool,
    softcap: float | None,
    sinks: torch.Tensor | None,
    keywords: Mapping[str, Any],
) -> torch.Tensor:
    if dropout:
        raise ValueError(f"{_in_fp8(module)}, which supports no dropout, and dropout is {dropout}; call model.eval()")
    _check_keywords(module, keywords)
    start = None
    if mask is not None:
        if mask.dtype != torch.int32:
            raise ValueError(
                f"{_in_fp8(module)}, which supports causal masks with padding on the left; this call has another mask {tuple(mask.shape)}. "
                "It may be four-dimensional; two-dimensional with holes (tokens after padding on the right make one), or shorter than the "
                "cache and the new tokens together; or made by the model for packed sequences, image blocks or prefixes. Pad on the left "
                "(tokenizer.padding_side = 'left') and pass the whole two-dimensional mask, or read the same cache dequantized, with any "
                "mask: model.set_attn_implementation('sdpa')"
            )
        causal, start = True, mask[0, 0, 0] if mask.shape[2] == 2 else None
    if query.dtype != key.dtype:  # keys are in autocast's dtype already
        (query,) = autocast(query)
    batch, heads, length, head_dim = query.shape
    out = ops.attention(
        tokens_of(query), pages_of(key), causal=causal, softmax_scale=scaling, softcap=softcap, sinks=sinks,
        leftpad_k=start, exact=key.exact, backend=key.backend,
    )  # fmt: skip
    return out.view(batch, length, heads, head_dim)


def _check_keywords(module: torch.nn.Module, keywords: Mapping[str, Any]) -> None:
    """Refuse keywords that change attention; warn once about an unknown one. None and False mean that a keyword is not in use.

    A newer transformers may pass a new keyword to every model, and most of those do not concern attention. So an unknown keyword is refused
    only if its name has a word that says that it does.
    """
    given = [name for name, value in keywords.items() if name not in NEUTRAL and value is not None and value is not False]
    if not given:
        return
    refused = sorted(name for name in given if name in CHANGES_ATTENTION or any(word in name for word in CHANGING_WORDS))
    if refused:
        raise ValueError(
            f"{_in_fp8(module)} and is called with {', '.join(refused)}, which fp8_kv does not support. Keep such layers in 16 bits "
            "(FP8Cache(model, skip_layers=[...])), or read the same cache dequantized: model.set_attn_implementation('sdpa' or 'eager')"
        )
    if not torch.compiler.is_compiling() and (new := sorted(set(given) - _warned)):
        _warned.update(new)
        warnings.warn(
            f"{_in_fp8(module)} and is called with {', '.join(new)}, which fp8attn does not know. It is ignored. If it changes "
            "what attention computes, read the same cache dequantized: model.set_attn_implementation('sdpa' or 'eager')",
            stacklevel=2,
        )


def _in_fp8(module: torch.nn.Module) -> str:
    return f"layer {getattr(module, 'layer_idx', '?')} of {type(module).__name__} is in FP8"


def _mask_block(
    mask: torch.Tensor | None, causal: bool, q_length: int, kv_length: int, begin: int, stop: int, device: torch.device
) -> torch.Tensor | None:
    """Queries `begin` to `stop` of a mask, expanded to `[B or 1, 1, stop - begin, kv_length]`; None if they see every key."""
    if mask is not None and mask.dtype != torch.int32:
        return mask[:, :, begin:stop] if mask.shape[2] > 1 else mask
    queries, keys = torch.arange(begin, stop, device=device), torch.arange(kv_length, device=device)
    if mask is None:
        # Keys after the queries' own are memory that a static cache has not filled yet.
        return (keys <= queries[:, None])[None, None] if causal and q_length > 1 else None
    queries = queries + mask[0, 0, -1][:, None] - q_length
    seen = keys <= queries[..., None]
    if mask.shape[2] == 2:
        seen = seen & (keys >= mask[0, 0, 0][:, None, None])
    return seen[:, None]


def _attend_exactly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with a softcap, and with sinks as one more column of the softmax that has no value. The softmax is in FP32.

    Returns `[B, S, heads, head_dim]`.
    """
    group = query.shape[1] // key.shape[1]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query.unflatten(1, (-1, group)).flatten(2, 3) @ key.transpose(2, 3)
    scores = scores.unflatten(2, (group, -1)).flatten(1, 2).float() * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(torch.float32).min) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(len(query), -1, query.shape[2], 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype)
    out = weights.unflatten(1, (-1, group)).flatten(2, 3) @ value
    return out.unflatten(2, (group, -1)).flatten(1, 2).transpose(1, 2)
