"""What fp8attn cannot serve in vLLM, with the reason and what to do."""

from __future__ import annotations

from typing import Any

import torch
from vllm import envs
from vllm.v1.attention.backend import AttentionType

from ...formats.codec import DEFAULT_KEY_DTYPE
from ...formats.page_layout import PAGE_SIZE
from ...formats.spec import PageSpec
from ..engine.options import Options
from . import LATENT_NAME, NAME
from .connectors import exchanges_blocks, unsupported_connector
from .options import layer_number
from .specs import LATENT_PAGES

KV_CACHE_DTYPES = ("fp8", "fp8_e4m3")
DTYPES = (torch.bfloat16, torch.float16)
_DTYPE = "the model's dtype must be bfloat16 or float16: pass --dtype bfloat16"
_SPARSE = (
    "its attention is sparse (DeepSeek V3.2, GLM 5): the model chooses keys for each query, and fp8attn attends to "
    "all; leave out --attention-backend"
)
_DCP = "a sequence's pages are divided over GPUs (--decode-context-parallel-size); use --tensor-parallel-size"
_PCP = "a prompt is divided over GPUs (--prefill-context-parallel-size); use --tensor-parallel-size"
NOT_CAUSAL = (
    "its tokens also attend to later ones (models that generate by diffusion do), and fp8attn has causal attention "
    "only; leave out --attention-backend"
)
_CACHES_LATENTS = f"it caches latents (MLA): pass --attention-backend {LATENT_NAME}, which needs vLLM 0.32 or newer"
# That a layer has another dtype reaches only `validate_configuration`, which can refuse it, and cannot name another
# backend. The layer's `__init__` then takes all that the backend gives: impl, builder and spec.
_ONE_BACKEND = (
    "vLLM gives all layers of a kind one attention backend, and fp8attn has 8 bits only: it would have to choose the "
    "backend by the dtype of each layer's cache"
)
WHAT_TO_DO = {  # instead of vLLM's own words
    "dtype not supported": _DTYPE,
    "MLA not supported": _CACHES_LATENTS,
    "non-MLA not supported": f"a layer caches keys and values, and {LATENT_NAME} is for latents: pass "
    f"--attention-backend {NAME}, or for a draft model beside latents --attention-config "
    f"""'{{"backend_per_kind": {{"full_attention": "{NAME}"}}}}'""",
    "sparse not supported": _SPARSE,
    "DCP not supported": _DCP,
    "PCP not supported": _PCP,
    "partial multimodal token full attention not supported": (
        "its images attend in both directions, and fp8attn has causal attention only: serve text alone "
        """(--limit-mm-per-prompt '{"image": 0, "video": 0, "audio": 0}'), or leave out --attention-backend"""
    ),
    "block_size not supported": f"a block must have a multiple of {PAGE_SIZE} tokens: leave out --block-size, or pass "
    f"{PAGE_SIZE}",
}

_SHAPES = ", ".join(" + ".join(map(str, pages.widths)) for pages in LATENT_PAGES.values())
_BATCH = (
    "VLLM_BATCH_INVARIANT=1 asks for answers that do not depend on the batch, and attention over latents has none; "
    "leave it out"
)
WHAT_TO_DO_WITH_LATENTS = {
    "head_size not supported": f"its latents and their keys with RoPE must have {_SHAPES} channels; leave out "
    f"--attention-backend",
    "kv_cache_dtype not supported": "pass --kv-cache-dtype fp8",
    "batch invariance not supported": _BATCH,
}

# vLLM's runner for CPUs clears a new block of a model with Mamba layers. Of a block that it has split into pages, it
# clears the page that has the block's number, which may be in use (`CPUModelRunner._zero_block_ids`, in vLLM 0.28 to
# 0.33). Runners for GPUs clear the block.
CPU_CLEARS_OTHER_PAGES = True


def unsupported_layer(
    head_dim: int | PageSpec, kv_cache_dtype: str, attn_type: str, alibi_slopes: Any, others: dict[str, Any]
) -> str | None:
    """Why a layer cannot be served, or None.

    Args:
        head_dim: as `PageSpec.of` takes it.
        others: arguments that only other attention backends have.
    """
    if attn_type != AttentionType.DECODER:
        return (
            f"its attention is of type {attn_type!r}, and fp8attn has causal attention of decoders only; leave out "
            f"--attention-backend"
        )
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        return (
            f"the KV cache of a layer is {kv_cache_dtype!r}. Pass --kv-cache-dtype fp8, and no "
            f"--kv-cache-dtype-skip-layers: a layer in 16 bits needs another backend"
        )
    if (refusal := PageSpec.of(head_dim).refusal) is not None:
        return f"{refusal}; leave out --attention-backend"
    if alibi_slopes is not None:
        return "it has ALiBi, which fp8attn does not support; leave out --attention-backend"
    if names := sorted(name for name, value in others.items() if value not in (None, False, -1)):
        return f"its attention has {', '.join(names)}, which fp8attn does not support; leave out --attention-backend"
    return None


def unsupported_config(config: Any, options: Options, latents: bool = False) -> str | None:
    """Why this configuration of vLLM cannot be served with these options of fp8attn, or None.

    Args:
        latents: whether this is asked of a layer that caches latents.
    """
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    if latents and (reason := _unsupported_beside_latents(config, options)) is not None:
        return reason
    if model.use_mla and not latents and config.speculative_config is None:  # a draft model may have keys and values
        return _CACHES_LATENTS
    if model.dtype not in DTYPES:
        return _DTYPE
    if config.diffusion_config is not None:
        # `use_non_causal` of vLLM's attention_config does not tell: it is set only where no backend is named.
        return NOT_CAUSAL
    if model.is_hybrid and (reason := _unsupported_hybrid(config, options)) is not None:
        return reason
    if (unit := cache.prefix_match_unit) is not None and unit % PAGE_SIZE:
        return (
            f"--prefix-match-unit {unit} would share parts of pages, whose scales are of other requests' tokens, too; "
            f"leave it out, or pass a multiple of {PAGE_SIZE}"
        )
    if cache.kv_cache_dtype_skip_layers:
        return (
            f"--kv-cache-dtype-skip-layers {' '.join(cache.kv_cache_dtype_skip_layers)} keeps layers in 16 bits. "
            f"{_ONE_BACKEND}; leave it out, or leave out --attention-backend"
        )
    if parallel.decode_context_parallel_size > 1:
        return _DCP
    if config.scheduler_config.disable_hybrid_kv_cache_manager and model.get_sliding_window():
        return "--disable-hybrid-kv-cache-manager makes other blocks for layers with a window; leave it out"
    if model.enable_sleep_mode and (option := _option_that_writes_once(config, options)):
        return (
            f"--enable-sleep-mode discards blocks, with what is written into each of them once at the start: leave out "
            f"it or {option}"
        )
    return unsupported_connector(config)


def unsupported_recipe(model: Any, layer_name: str) -> str | None:
    """Why a layer cannot be served beside what the checkpoint says of its layers' caches, or None.

    ModelOpt and `fp8attn sensitivity --write` name the layers that have 8 bits. vLLM up to 0.33 does not read it.
    """
    given = getattr(model.hf_config, "quantization_config", None) or {}
    recipe = given.get("quantization", given).get("kv_cache_quantized_layers")
    if recipe is None:
        return None
    in_8_bits = {layer_number(name) for name, how in recipe.items() if how.get("quant_algo") == "FP8"}
    if layer_number(layer_name) in in_8_bits:
        return None
    return (
        f"kv_cache_quantized_layers in its checkpoint does not have {layer_name} in FP8. {_ONE_BACKEND}; remove "
        f"kv_cache_quantized_layers to have all layers in 8 bits, or leave out --attention-backend"
    )


def unsupported_latents(pages: PageSpec) -> str | None:
    """Why latents of this shape cannot be served, or None."""
    if pages in LATENT_PAGES.values():
        return None
    return (
        f"its latents and their keys with RoPE have {' + '.join(map(str, pages.widths))} channels, and must have "
        f"{_SHAPES}; leave out --attention-backend"
    )


def _unsupported_beside_latents(config: Any, options: Options) -> str | None:
    """Why a model that caches latents cannot be served with this configuration, or None."""
    model, compilation = config.model_config, config.compilation_config
    if hasattr(model.hf_text_config, "index_topk"):
        return _SPARSE
    if names := [name for name in ("scales", "static_scales") if getattr(options, name)]:
        return f"it caches latents, and the option {names[0]} is for keys and values: leave it out"
    if options.key_dtype != DEFAULT_KEY_DTYPE:
        return f"it caches latents, which are in INT8: leave out the option key_dtype {options.key_dtype!r}"
    if envs.VLLM_BATCH_INVARIANT:
        return _BATCH
    if model.is_hybrid:
        return (
            "it has linear attention layers beside latents, with which fp8attn was not tried; leave out "
            "--attention-backend"
        )
    if config.parallel_config.prefill_context_parallel_size > 1:
        return _PCP
    if exchanges_blocks(config):
        return (
            "it caches latents, whose pages have no mark to tell blocks of another engine's format: leave out "
            "--kv-transfer-config"
        )
    if config.attention_config.use_prefill_query_quantization:
        return "prompts attend in 16 bits to what pages hold: leave out use_prefill_query_quantization"
    if compilation.pass_config.fuse_rope_kvcache_cat_mla:
        return (
            "vLLM would write latents into the cache together with RoPE, in its own format: pass --compilation-config "
            """'{"pass_config": {"fuse_rope_kvcache_cat_mla": false}}'"""
        )
    if (
        compilation.cudagraph_mode.has_piecewise_cudagraphs()
        and not compilation.splitting_ops_contain_kv_cache_update()
    ):
        return (
            "vLLM would record the write of latents in graphs of parts of the model, and replay it with an old step's "
            """tables: pass --compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY"}', or leave out """
            "splitting_ops and use_inductor_graph_partition"
        )
    return None


def unsupported_invariance(options: Options, window: int | None) -> str | None:
    """Why the answers of a layer could depend on the batch although vLLM was asked for others, or None."""
    if not envs.VLLM_BATCH_INVARIANT:
        return None
    asked = "VLLM_BATCH_INVARIANT=1 asks for answers that do not depend on the batch"
    if not options.static_scales:
        scales = '--additional-config \'{"fp8attn": {"scales": "FILE", "static_scales": true}}\''
        return (
            f"{asked}, and the scale of a page that is being filled can grow after a step has attended over it. Other "
            f"requests change where the chunks of a prompt end, so pass calibrated scales: {scales}"
        )
    if window is not None:
        return f"{asked}, and layers with a window have no static scales here; leave out VLLM_BATCH_INVARIANT"
    return None


def _unsupported_hybrid(config: Any, options: Options) -> str | None:
    """Why a model with Mamba or linear attention layers cannot be served with this configuration, or None."""
    has = "it has Mamba or linear attention layers"
    if option := _option_that_writes_once(config, options):
        return f"{has}, so vLLM clears new blocks, with what fp8attn has written into them once: leave out {option}"
    # vLLM's build for CPUs gives other answers with it than without, with its own attention, too.
    if config.speculative_config is not None:
        return f"{has}, with which fp8attn was not tried under speculation: leave out --speculative-config"
    return None


def _option_that_writes_once(config: Any, options: Options) -> str | None:
    """The option because of which something is written into each block once at the start, or None."""
    if options.static_scales:
        return "the option static_scales"
    return "--kv-transfer-config" if exchanges_blocks(config) else None


def unsupported_on_cpu(config: Any) -> str | None:
    """Why a CPU cannot serve blocks of the size that vLLM has chosen, or None."""
    if CPU_CLEARS_OTHER_PAGES and config.model_config.is_hybrid and config.cache_config.block_size > PAGE_SIZE:
        return (
            f"it has Mamba or linear attention layers, for which vLLM makes blocks of {config.cache_config.block_size} "
            f"tokens, and on a CPU vLLM clears pages of such blocks that are in use; use a GPU, or leave out "
            f"--kv-cache-dtype fp8"
        )
    return None
