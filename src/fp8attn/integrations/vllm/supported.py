"""What fp8attn cannot serve in vLLM, with the reason and what to do."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import AttentionType

from ...layout import HEAD_DIMS

KV_CACHE_DTYPES = ("fp8", "fp8_e4m3")


def unsupported_layer(head_dim: int, kv_cache_dtype: str, attn_type: str, alibi_slopes: Any, others: dict[str, Any]) -> str | None:
    """Why a layer cannot be served, or None. `others` are arguments that only other attention backends have."""
    if attn_type != AttentionType.DECODER:
        return f"its attention is of type {attn_type!r}, and fp8attn has causal attention of decoders only; leave out --attention-backend"
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        return (
            f"the KV cache of a layer is {kv_cache_dtype!r}. Pass --kv-cache-dtype fp8, and no --kv-cache-dtype-skip-layers: a layer in 16 "
            "bits needs another backend"
        )
    if head_dim not in HEAD_DIMS:
        return f"its head_dim is {head_dim}, and fp8attn has {', '.join(map(str, HEAD_DIMS))}; leave out --attention-backend"
    if alibi_slopes is not None:
        return "it has ALiBi, which fp8attn has not; leave out --attention-backend"
    if given := sorted(name for name, value in others.items() if value not in (None, False, -1)):
        return f"its attention has {', '.join(given)}, which fp8attn has not; leave out --attention-backend"
    return None


def unsupported_config(config: Any) -> str | None:
    """Why this configuration of vLLM cannot be served, or None."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    if model.use_mla:
        return "it has multi-head latent attention, which caches latents instead of K and V; leave out --attention-backend"
    if model.is_hybrid:
        return "it has Mamba or linear attention layers, whose blocks have other sizes than pages; leave out --attention-backend"
    if cache.kv_cache_dtype_skip_layers:
        return (
            f"--kv-cache-dtype-skip-layers {' '.join(cache.kv_cache_dtype_skip_layers)} keeps layers in 16 bits, and fp8attn serves all "
            "layers or none; leave it out"
        )
    if parallel.decode_context_parallel_size > 1:
        return "a sequence's pages are divided over GPUs (--decode-context-parallel-size); use --tensor-parallel-size"
    if config.scheduler_config.disable_hybrid_kv_cache_manager and model.get_sliding_window():
        return "--disable-hybrid-kv-cache-manager makes other blocks for layers with a window; leave it out"
    return None
