"""What fp8attn reads from a transformers config. All knowledge of configs is in this file."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

from transformers import MODEL_MAPPING, PreTrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs

from ...errors import UsageError
from ...formats.spec import PageSpec

# Types of layers, as transformers names them. K and V of these grow with the tokens. "hybrid" ones have the state of a
# linear layer, too.
FULL_LAYER_TYPES = ("full_attention", "hybrid")
WINDOWED_LAYER_TYPES = ("sliding_attention", "chunked_attention")
STATE_LAYER_TYPES = ("linear_attention", "conv")  # a state of constant size, and no K and V
EMPTY_LAYER_TYPES = ("dummy", "moe", "mlp")  # no cache of their own
# Layers that `FP8Cache` leaves to transformers: what does not grow stays in 16 bits.
UNQUANTIZED_LAYER_TYPES = (*WINDOWED_LAYER_TYPES, *STATE_LAYER_TYPES, "hybrid_sliding", *EMPTY_LAYER_TYPES)
# Families that are refused for what their code does, which no config says.
REFUSED = {
    "doge": "makes attention masks of its own",
    "dory": "runs its layers in loops, and gives each loop copies of the cache's layers",
    "git": "computes with its attention masks",
    "minimax": "takes no cache but its own",
    "moshi": "gives layers with a sliding window masks without one",
    "recurrent_gemma": "keeps the states of its recurrent layers in its modules, and not in the cache",
    "inkling_text": "adds a bias of positions to its attention scores, which fp8_kv does not support",
    "inkling2_text": "adds a bias of positions to its attention scores, which fp8_kv does not support",
    "inkling2_loop_text": "adds a bias of positions to its attention scores, which fp8_kv does not support",
}
# Tokens of a window from which on a growing cache has it in pages, which are then smaller than the window in 16 bits.
SHORTEST_WINDOW = 384
_USE_DYNAMIC = "Use transformers' own cache (DynamicCache(config=model.config))"


@dataclass(frozen=True)
class LayerSpec:
    """One layer of a model, as its cache sees it.

    Attributes:
        kind: the layer's type in transformers: `full_attention`, `sliding_attention`, `linear_attention`, ...
        num_q_heads, num_kv_heads, head_dim: the shape of the layer's attention. Latents are one KV head, whose head_dim
            is that of absorbed queries.
        window: tokens that a sliding or chunked layer keeps; None: all.
        options: keyword arguments of transformers' own cache layer of this type.
        rank: channels of its latents; None: it caches K and V.
        turned: channels of K that RoPE turns, if all others are those of V times a weight (`k_eq_v`); 0: K has nothing
            in common with V.
    """

    kind: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    rank: int | None = None
    turned: int = 0

    @property
    def is_full(self) -> bool:
        """Whether its attention sees all tokens, so that its K and V grow."""
        return self.kind in FULL_LAYER_TYPES

    @property
    def is_windowed(self) -> bool:
        """Whether a growing `FP8Cache` has 8-bit pages of its window."""
        return self.kind == "sliding_attention" and (self.window or 0) >= SHORTEST_WINDOW and self.has_pages

    @property
    def pages(self) -> PageSpec:
        """What its pages hold, with the default format of keys."""
        if self.rank is None:
            return PageSpec.of(self.head_dim)
        return PageSpec.latent(self.rank, self.head_dim - self.rank)

    @property
    def latent_pages(self) -> PageSpec | None:
        """The pages of V and of K's turned channels alone; None: there are none."""
        pages = PageSpec.latent(self.head_dim, self.turned, rope_in_codes=True)
        return pages if self.turned and pages.refusal is None else None

    @property
    def has_pages(self) -> bool:
        """Whether there are 8-bit pages for K and V of its shape."""
        return self.pages.refusal is None

    @property
    def in_pages(self) -> bool:
        """Whether its K and V are in 8-bit pages of an `FP8Cache`, unless its `skip_layers` or its biases keep it in 16
        bits.
        """
        return self.is_full or self.is_windowed

    def in_pages_of(self, max_cache_len: int | None) -> bool:
        """`in_pages` of an `FP8Cache` with this `max_cache_len`. The static form keeps windows in 16 bits."""
        return self.in_pages if max_cache_len is None else self.is_full


def decoder_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of a model's decoder. For a multimodal model, it is the config of the text model.

    Raises:
        TypeError: `config` is not the config of a model.
    """
    return _checked(config).get_text_config(decoder=True)


def _checked(config: PreTrainedConfig) -> PreTrainedConfig:
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"expected a transformers config (model.config); got {type(config).__name__}")
    return config


def unsupported_reason(config: PreTrainedConfig) -> str | None:
    """Why `FP8Cache` cannot serve a model with this config, in one line; None if it can. Only the config is read, no
    weights.

    Raises:
        TypeError: `config` is not the config of a model.
    """
    try:
        layers = layers_of(config)
    except UsageError as error:
        return str(error)
    config = decoder_config(config)
    for index, layer in enumerate(layers):
        if layer.kind not in (*FULL_LAYER_TYPES, *UNQUANTIZED_LAYER_TYPES):
            return (
                f"layer {index} of {config.model_type!r} is of type {layer.kind!r}; FP8Cache holds full, sliding, "
                f"chunked and linear attention. {_USE_DYNAMIC}"
            )
    if config.model_type in REFUSED:
        return f"{config.model_type!r} {REFUSED[config.model_type]}. {_USE_DYNAMIC}"
    if not calls_attention_interface(config):
        return (
            f"{config.model_type!r} computes its attention itself: it never calls the attention function that reads "
            f"8-bit pages. {_USE_DYNAMIC}"
        )
    # Those of the full-attention layers, if there are any: other sliding layers stay in 16 bits.
    paged = [layer for layer in layers if layer.is_full] or [layer for layer in layers if layer.in_pages]
    if not any(layer.has_pages for layer in paged):
        return f"{config.model_type!r}: {paged[0].pages.refusal}. {_USE_DYNAMIC}"
    if any(layer.rank is not None for layer in paged):
        return None
    v_head_dim, head_dims = getattr(config, "v_head_dim", None), {layer.head_dim for layer in paged}
    if v_head_dim is not None and v_head_dim not in head_dims:
        return (
            f"{config.model_type!r} has K of head_dim {', '.join(map(str, sorted(head_dims)))} and V of {v_head_dim}; "
            f"FP8 pages hold one head_dim for both. {_USE_DYNAMIC}"
        )
    return None


def layers_of(config: PreTrainedConfig) -> list[LayerSpec]:
    """The layers of a model, in order.

    Raises:
        TypeError: `config` is not the config of a model.
        UsageError: the model is an encoder-decoder, has latent attention of a form that is not known, sparse latent
            attention or cross-attention, or has no layer that `FP8Cache` would have in 8 bits.
    """
    if _checked(config).is_encoder_decoder:
        raise UsageError(
            f"{config.model_type!r} is an encoder-decoder, and fp8attn has no cache for cross-attention; "
            "use transformers' own cache (EncoderDecoderCache)"
        )
    config = decoder_config(config)
    configs = (getattr(config, "per_layer_config", None) or [config]) if hasattr(config, "num_hidden_layers") else []
    if not configs or not hasattr(configs[0], "num_attention_heads"):
        raise UsageError(f"{config.model_type!r} is not a decoder with layers of attention. {_USE_DYNAMIC}")
    ranks = [rank for layer in configs if (rank := getattr(layer, "kv_lora_rank", None)) is not None]
    if ranks and hasattr(type(config), "index_topk"):  # of the class: an instance may have any attribute
        raise UsageError(
            f"{config.model_type!r} has sparse latent attention: it chooses the keys of each query (index_topk), and "
            f"fp8_kv attends to all. {_USE_DYNAMIC}"
        )
    if ranks and not caches_latents(config):
        raise UsageError(
            f"{config.model_type!r} has multi-head latent attention (kv_lora_rank={ranks[0]}) of a form that fp8attn "
            f"does not know: its layers do not cache latents, or have no expand_kv. {_USE_DYNAMIC}"
        )
    if cross := getattr(config, "cross_attention_layers", None):
        raise UsageError(
            f"{config.model_type!r} has cross-attention layers ({', '.join(map(str, cross))}), and fp8attn has no "
            f"cache for them. {_USE_DYNAMIC}"
        )
    kinds, options = get_layer_types_and_kwargs(config)
    if isinstance(options, dict):  # transformers < 5.20: one set of options for all layers
        options = [options] * len(kinds)
    configs = getattr(config, "per_layer_config", None) or [config] * len(kinds)
    configs = configs[: len(kinds)]  # transformers < 5.20: layers at the end that share K and V have no cache layer
    # Reading a config is slow, and layers of a kind mostly share theirs.
    unlike = {(id(layer), kind): layer for kind, layer in zip(kinds, configs, strict=True)}
    heads = {(number, kind): heads_of(layer, kind) for (number, kind), layer in unlike.items()}
    specs = [
        LayerSpec(
            kind,
            *heads[id(layer), kind],
            keywords["sliding_window"] if kind in WINDOWED_LAYER_TYPES else None,
            keywords,
            getattr(layer, "kv_lora_rank", None),
            turned_channels(config, kind, heads[id(layer), kind][2]),
        )
        for kind, keywords, layer in zip(kinds, options, configs, strict=True)
    ]
    if not any(spec.in_pages for spec in specs):
        raise UsageError(
            f"no layer would be in FP8: every layer of {config.model_type!r} is of a type whose cache does not grow "
            f"({', '.join(sorted(set(kinds)))}), and has no sliding window of {SHORTEST_WINDOW} tokens or more. "
            f"{_USE_DYNAMIC}"
        )
    return specs


def heads_of(config: PreTrainedConfig, kind: str = "") -> tuple[int, int, int]:
    """`(num_q_heads, num_kv_heads, head_dim)` of an attention layer of this kind with this config. Of latents, those of
    absorbed attention.
    """
    if (rank := getattr(config, "kv_lora_rank", None)) is not None:
        return config.num_attention_heads, 1, rank + config.qk_rope_head_dim
    heads, kv_heads, head_dim = (
        config.num_attention_heads,
        getattr(config, "num_key_value_heads", None),
        getattr(config, "head_dim", None),
    )
    if kind == "full_attention":  # of Gemma 4 before transformers 5.20, where its layers have no configs of their own
        head_dim = getattr(config, "global_head_dim", None) or head_dim
        if getattr(config, "attention_k_eq_v", False):
            kv_heads = getattr(config, "num_global_key_value_heads", None) or kv_heads
    return heads, kv_heads or heads, head_dim or config.hidden_size // heads


def turned_channels(config: PreTrainedConfig, kind: str, head_dim: int) -> int:
    """`LayerSpec.turned` of a layer of this kind in the model with this decoder's config."""
    rope = (getattr(config, "rope_parameters", None) or {}).get(kind)
    k_eq_v = getattr(config, "attention_k_eq_v", False) and kind == "full_attention"
    if not k_eq_v or not isinstance(rope, dict) or rope.get("rope_type") != "proportional":
        return 0
    return 2 * int(rope.get("partial_rotary_factor", 1.0) * head_dim // 2)


def has_softcap(config: PreTrainedConfig) -> bool:
    """Whether the model caps its attention scores."""
    return getattr(decoder_config(config), "attn_logit_softcapping", None) is not None


def has_sinks(config: PreTrainedConfig) -> bool:
    """Whether the model's attention has sinks. They are parameters, which a config does not list. But a model with
    sinks lists them in the plan that splits it over GPUs."""
    config = decoder_config(config)
    return config.model_type == "gpt_oss" or any(
        "sinks" in name for name in getattr(config, "base_model_tp_plan", None) or ()
    )


def calls_attention_interface(config: PreTrainedConfig) -> bool:
    """Whether the model with this decoder's config calls transformers' attention interface, or computes its attention
    itself.
    """
    return getattr(MODEL_MAPPING.get(type(config), None), "_can_set_attn_implementation", lambda: True)()


def caches_latents(config: PreTrainedConfig) -> bool:
    """Whether the attention of the model with this decoder's config caches latents in the form that all of
    transformers' models with `expand_kv` have: `cache.update(latent, key with RoPE)`, then `expand_kv` of both.
    """
    code = inspect.getmodule(MODEL_MAPPING.get(type(config), None))
    return any(hasattr(each, "expand_kv") for each in vars(code).values()) if code is not None else False


def cache_keyword(model: Any) -> str:
    """The keyword by which a model, or what is called as one, takes its cache. transformers 5.24 calls it `cache`, and
    warns of `past_key_values`, its name before."""
    return "cache" if "cache" in inspect.signature(getattr(model, "forward", model)).parameters else "past_key_values"
