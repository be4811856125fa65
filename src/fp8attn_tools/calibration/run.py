"""Running a model while Q, K and V of its full-attention layers are observed.

K (after RoPE) and V are seen by a cache. Q is seen by an attention function that is registered in transformers as
`fp8_observed`. It calls the model's own attention function, so the model computes what it always computes. There are no
hooks or patches, and afterwards the model is as it was.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, Cache, DynamicLayer

from fp8attn.errors import UsageError
from fp8attn.integrations.transformers.config import (
    LayerSpec,
    cache_keyword,
    calls_attention_interface,
    decoder_config,
    layers_of,
)
from fp8attn.integrations.transformers.tensors import tokens_of
from fp8attn.scales import ranges

OBSERVED = "fp8_observed"  # transformers searches names for "flash", "sdpa", "flex_attention" and "/"
Batch = torch.Tensor | Mapping[str, torch.Tensor]
# Called with a layer's index, "q", "k" or "v", and tokens [T, num_heads, head_dim].
See = Callable[[int, str, torch.Tensor], None]
_watch: ContextVar[_Watch] = ContextVar("_watch")  # of the forward that runs in this thread


@dataclass
class _Watch:
    """Where Q, K and V of a forward go.

    Attributes:
        own: the model's own attention implementation.
        real: indices of the tokens in the flat batch that are not padding; None: all.
    """

    layers: frozenset[int]
    own: str
    see: See
    real: torch.Tensor | None = None

    def pass_on(self, layer: int | None, which: str, x: torch.Tensor) -> None:
        """Pass on `x [B, num_heads, S, head_dim]` of a layer, without padding."""
        if layer in self.layers:
            x = tokens_of(x) if self.real is None else tokens_of(x).index_select(0, self.real.to(x.device))
            if len(x):
                self.see(layer, which, x)


def observed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention by the model's own function, after Q has been observed."""
    watch = _watch.get()
    watch.pass_on(getattr(module, "layer_idx", None), "q", query)
    # A model's eager attention is a function beside its attention module. It is the default that the model itself
    # names.
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    attend = AttentionInterface().get_interface(watch.own, eager)
    return attend(module, query, key, value, attention_mask, *args, **kwargs)


def observed_mask(*args: Any, **kwargs: Any) -> Any:
    """The mask of the model's own attention function."""
    return AttentionMaskInterface()[_watch.get().own](*args, **kwargs)


AttentionInterface.register(OBSERVED, observed_attention)
AttentionMaskInterface.register(OBSERVED, observed_mask)


def check_observable(specs: Sequence[LayerSpec]) -> None:
    """Refuse layers that have the state of a linear layer beside attention: no cache here has both.

    Raises:
        UsageError: there are such layers.
    """
    if hybrid := [index for index, spec in enumerate(specs) if spec.kind == "hybrid"]:
        raise UsageError(
            f"layers {ranges(hybrid)} have attention and the state of a linear layer, which calibration does not run. "
            f"Leave out the scales: pages set their own"
        )


@contextmanager
def observing(model: Any, *, chunk: int) -> Iterator[Callable[[Batch, See], None]]:
    """Prepare a model for observation, and restore it afterwards.

    Args:
        chunk: tokens of a forward. A longer batch runs in several, through a cache that keeps its K and V.
    Returns:
        A function `run(batch, see)`: it runs a batch, and calls `see` with the Q, K and V of every full-attention
        layer. If the model computes its attention itself (`calls_attention_interface`), Q is not seen.
    """
    specs = layers_of(model.config)
    check_observable(specs)
    layers = frozenset(index for index, spec in enumerate(specs) if spec.is_full)
    own = decoder_config(model.config)._attn_implementation
    sees_queries = calls_attention_interface(decoder_config(model.config)) and own in {
        "eager",
        *AttentionInterface().valid_keys(),
    }
    accepted = inspect.signature(model.forward).parameters
    modes = [(module, module.training) for module in model.modules()]
    implementations = _implementations(model.config)

    @torch.no_grad()
    def run(batch: Batch, see: See) -> None:
        ids, mask = tensors_of(batch)
        ids, mask = ids.to(model.device), None if mask is None or mask.all() else mask.to(model.device)
        length = ids.shape[1]
        watch = _Watch(layers, own, see)
        cache = Cache(
            layers=[
                _ObservedLayer(index, watch, length > chunk)
                if spec.is_full
                else DYNAMIC_LAYER_TYPE_MAPPING[spec.kind](**spec.options)
                for index, spec in enumerate(specs)
            ]
        )
        given: dict[str, Any] = {cache_keyword(model): cache, "use_cache": True}
        if "logits_to_keep" in accepted:
            given["logits_to_keep"] = 1  # logits are not used, and with a large vocabulary they take gigabytes
        token = _watch.set(watch)
        try:
            for begin in range(0, length, chunk):
                part = slice(begin, begin + chunk)
                if mask is not None:
                    watch.real = mask[:, part].flatten().nonzero()[:, 0]
                    given["attention_mask"] = mask[:, : part.stop]
                    if "position_ids" in accepted:  # as in `generate`: padding has no position
                        given["position_ids"] = (mask.long().cumsum(-1) - 1).clamp_min(0)[:, part]
                model(input_ids=ids[:, part], **given)
        finally:
            _watch.reset(token)

    model.eval()
    try:
        if sees_queries:
            model.set_attn_implementation(OBSERVED)
        yield run
    finally:
        if sees_queries:
            model.set_attn_implementation(implementations)
        for module, training in modes:
            module.training = training


def tensors_of(batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`input_ids [B, S]` and `attention_mask [B, S]` of a batch; the latter may be None.

    Raises:
        TypeError, UsageError: it has no such tensors.
    """
    ids, mask = (batch.get("input_ids"), batch.get("attention_mask")) if isinstance(batch, Mapping) else (batch, None)
    if wrong := [x for x in (ids, mask) if x is not None and not isinstance(x, torch.Tensor)]:
        raise TypeError(
            f"a batch must be a tensor input_ids [B, S], or a mapping with such tensors; got "
            f"{type(wrong[0]).__name__}. "
            'Tokenize text first: tokenizer(text, return_tensors="pt")'
        )
    if ids is None or ids.dim() != 2 or (mask is not None and mask.shape != ids.shape):
        got = "none" if ids is None else f"{list(ids.shape)} and mask {None if mask is None else list(mask.shape)}"
        raise UsageError(
            f"a batch must have input_ids [B, S], and optionally an attention_mask of the same shape; got {got}"
        )
    return ids, mask


def count_tokens(batch: Batch) -> int:
    """Tokens of a batch that are not padding."""
    ids, mask = tensors_of(batch)
    return ids.numel() if mask is None else int(mask.bool().sum())


def _implementations(config: Any) -> Any:
    """The attention implementations of a config and of the configs in it, as `set_attn_implementation` takes them."""
    inner = {
        key: _implementations(found) for key in config.sub_configs if (found := getattr(config, key, None)) is not None
    }
    return {"": config._attn_implementation, **inner} if inner else config._attn_implementation


class _ObservedLayer(DynamicLayer):
    """A layer of transformers' cache that passes new K and V on.

    Args:
        keep: hold K and V for the next chunk. Without it nothing is held.
    """

    def __init__(self, index: int, watch: _Watch, keep: bool) -> None:
        super().__init__()
        self.index, self.watch, self.keep = index, watch, keep

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if key_states.shape != value_states.shape:
            raise UsageError(
                f"layer {self.index} caches a K {list(key_states.shape)} and a V {list(value_states.shape)}; fp8attn "
                f"needs K and V of one shape. Use transformers' own cache for this model "
                f"(DynamicCache(config=model.config))"
            )
        self.watch.pass_on(self.index, "k", key_states)
        self.watch.pass_on(self.index, "v", value_states)
        return super().update(key_states, value_states, *args, **kwargs) if self.keep else (key_states, value_states)
