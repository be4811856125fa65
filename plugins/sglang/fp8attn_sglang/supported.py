"""What fp8attn cannot serve in SGLang, with the reason and what to do. It imports nothing of SGLang.

A refusal that says "was not run" means untested, not impossible: pages are bytes that SGLang could move.
"""

from __future__ import annotations

from typing import Any

import torch

from fp8attn.backends import hopper
from fp8attn.formats.codec import INT8
from fp8attn.formats.page_layout import PAGE_SIZE
from fp8attn.formats.spec import PageSpec

NAME = "fp8attn"  # of the attention backend

_OTHER = "use another --attention-backend"
_NOT_RUN = "fp8attn was not run with it in SGLang: leave it out"
_TOKENS = "it moves tokens of K and V, and a page is one run of bytes for 128 tokens and their scales: leave it out"
_SHARDED = "it divides a sequence's pages, or the layers, over GPUs, which was not run: use --tp-size"
# Options of SGLang, the values that are supported, and the reason against others.
_OPTIONS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("speculative_algorithm", (None,), "a verified draft moves tokens inside pages: leave it out"),
    ("enable_two_batch_overlap", (False,), _NOT_RUN),
    ("enable_single_batch_overlap", (False,), _NOT_RUN),
    ("enable_pdmux", (False,), _NOT_RUN),
    (
        "enable_mis",
        (False,),
        "several items of a prompt do not see each other, which fp8attn does not support: leave it out",
    ),
    ("enable_streaming_session", (False,), _NOT_RUN),
    ("enable_session_radix_cache", (False,), _NOT_RUN),
    ("enable_nvidia_megakernel", (False,), _NOT_RUN),
    ("disaggregation_mode", ("null", None), _TOKENS),
    ("enable_hierarchical_cache", (False,), _TOKENS),
    ("enable_lmcache", (False,), _TOKENS),
    ("enable_flexkv", (False,), _TOKENS),
    ("enable_hisparse", (False,), _TOKENS),
    ("enable_unified_cache_external_linker", (False,), _TOKENS),
    ("enable_page_major_kv_layout", (False,), "it is another layout of K and V: leave it out"),
    ("enable_unified_memory", (False,), "it is another layout of K and V: leave it out"),
    ("enable_kv_cache_sharding", (False,), _SHARDED),
    ("dcp_size", (1, None), _SHARDED),
    ("attn_cp_size", (1, None), _SHARDED),
    ("pp_size", (1, None), _SHARDED),
    ("enable_dp_attention", (False,), "it pads steps with tokens of no sequence: leave it out"),
    ("dllm_algorithm", (None,), "its attention is not causal: " + _OTHER),
    ("enable_torch_compile", (False,), _NOT_RUN),
    ("prefill_only_disable_kv_cache", (False,), "it keeps no pages: " + _OTHER),
    ("enable_memory_saver", (False,), _NOT_RUN),
)


def is_chosen(options: Any) -> bool:
    """Whether SGLang's options name this backend, for prompts, decodes or both."""
    return NAME in (options.attention_backend, options.prefill_attention_backend, options.decode_attention_backend)


def unsupported_options(options: Any) -> str | None:
    """Why these options of SGLang cannot be served, or None.

    Args:
        options: SGLang's resolved options, as attributes.
    """
    others = {options.prefill_attention_backend, options.decode_attention_backend} - {None}
    if options.attention_backend != NAME or others - {NAME}:
        return (
            f"prompts and decodes read the same pages: pass --attention-backend {NAME}, and none for prefill or decode "
            f"alone"
        )
    if options.page_size != PAGE_SIZE:
        return (
            f"a page has {PAGE_SIZE} tokens, and SGLang's would have {options.page_size}: leave out --page-size, or "
            f"pass {PAGE_SIZE}"
        )
    if options.kv_cache_dtype != "auto":
        return f"--kv-cache-dtype {options.kv_cache_dtype} is not used: pages have a format of their own; leave it out"
    for name, supported, reason in _OPTIONS:
        if (value := getattr(options, name)) not in supported:
            return f"--{name.replace('_', '-')} is {value!r}; {reason}"
    return None


def unsupported_model(model: Any, has_states: bool) -> str | None:
    """Why a model cannot be served, or None.

    Args:
        model: SGLang's `ModelConfig`.
        has_states: whether it has Mamba or linear attention layers.
    """
    if model.attention_arch.name == "MLA":
        return f"it has multi-head latent attention, which caches latents instead of K and V; {_OTHER}"
    if has_states:
        return f"it has Mamba or linear attention layers, with which fp8attn was not run in SGLang; {_OTHER}"
    if model.is_encoder_decoder:
        return f"it has an encoder, and fp8attn has causal attention of decoders only; {_OTHER}"
    if model.dtype not in (torch.bfloat16, torch.float16):
        return "the model's dtype must be bfloat16 or float16: pass --dtype bfloat16"
    if (
        reason := hopper.refusal(PageSpec(model.head_dim, model.v_head_dim, INT8))
    ) is not None:  # SGLang was run with nothing wider
        return f"{reason}; {_OTHER}"
    if model.is_hybrid_swa:
        return (
            "SGLang keeps layers with a window in a pool of their own: pass --disable-hybrid-swa-memory, which keeps "
            "all tokens"
        )
    if model.attention_chunk_size is not None:
        return (
            f"its attention is in chunks of {model.attention_chunk_size} tokens, which fp8attn does not support; "
            f"{_OTHER}"
        )
    return None


def unsupported_layer(layer: Any) -> str | None:
    """Why an attention layer (SGLang's `RadixAttention`) cannot be served, or None."""
    if layer.attn_type.value != "decoder" or layer.is_cross_attention:
        return f"the attention of layer {layer.layer_id} is not that of a decoder; {_OTHER}"
    if (reason := hopper.refusal(PageSpec(layer.head_dim, layer.v_head_dim, INT8))) is not None:
        return f"layer {layer.layer_id}: {reason}; {_OTHER}"
    unsupported = {
        "a logit cap of another form than tanh": layer.logit_cap > 0 and layer.logit_capping_method != "tanh",
        "a position encoding of its own": layer.pos_encoding_mode != "NONE",
        "a temperature by length": layer.xai_temperature_len > 0,
        "attention in chunks": layer.use_irope,
    }
    if names := [name for name, is_used in unsupported.items() if is_used]:
        return f"layer {layer.layer_id} has {names[0]}, which fp8attn does not support; {_OTHER}"
    return None
