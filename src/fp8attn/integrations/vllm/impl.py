"""A layer's attention in vLLM: quantize the new tokens into its pages, then attend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from ...errors import UsageError
from ...formats.spec import PageSpec
from ..engine.layer import EngineLayer
from ..engine.marks import mark_of
from ..engine.static import ServedModel, StaticState, static_state
from ..engine.steps import Step
from .connectors import exchanges_blocks
from .k_eq_v import keys_of
from .options import config_options, layer_number
from .specs import KEYS_PAGES, of_keys
from .supported import unsupported_config, unsupported_invariance, unsupported_layer, unsupported_recipe


class LayerPages:
    """What impls have in common, of keys and values and of latents: their layers get pages when weights are loaded."""

    _config: Any  # vLLM's
    engine_layer: EngineLayer | None

    def _engine_layer(self, layer: Any) -> EngineLayer:
        """The pages of vLLM's layer."""
        raise NotImplementedError

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """vLLM calls this before it asks layers for the bytes of their blocks and records CUDA graphs, and whenever it
        reloads weights.
        """
        for layer in self._config.compilation_config.static_forward_context.values():
            if getattr(layer, "impl", None) is not self:
                continue
            if self.engine_layer is None:
                writer = getattr(layer, "kv_sharing_target_layer_name", None) or layer.layer_name
                if reason := unsupported_recipe(self._config.model_config, writer):
                    raise UsageError(f"fp8attn cannot serve this model: {reason}")
                self.engine_layer = self._engine_layer(layer)
            else:
                self.engine_layer.write_static()
            for name, tensor in self.engine_layer.buffers.items():
                # vLLM keeps buffers when its sleep mode discards weights.
                layer.register_buffer(name, tensor, persistent=False)


class FP8AttentionImpl(LayerPages, AttentionImpl[Any]):
    """`AttentionImpl` describes the arguments.

    Raises:
        UsageError: fp8attn does not support the layer or vLLM's configuration; the message has the reason and what to
            do.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        config = get_current_vllm_config()
        self.options = config_options(config.additional_config)
        reason = unsupported_config(config, self.options) or unsupported_invariance(self.options, sliding_window)
        reason = reason or unsupported_layer(head_size, kv_cache_dtype, attn_type, alibi_slopes, others)
        if reason is not None:
            raise UsageError(f"fp8attn cannot serve this model: {reason}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.window, self.softcap, self.sinks = sliding_window, logits_soft_cap or None, sinks
        self._config = config
        self.engine_layer: EngineLayer | None = None  # from when the weights are loaded

    def _engine_layer(self, layer: Any) -> EngineLayer:
        model, name = self._config.model_config, layer.layer_name
        total, ranks = model.get_total_num_kv_heads(), get_tensor_model_parallel_world_size()
        first = get_tensor_model_parallel_rank() * total // ranks
        served = ServedModel(
            model.model, model.revision, model.max_model_len, model.hf_text_config.num_hidden_layers, total
        )
        options = self.options
        if name.startswith("draft_model."):  # the file is not of a draft model
            options = replace(options, scales=None)
        head_dims = sorted({layer.impl.head_size for layer in fp8_layers(self._config)})
        if options.scales is not None and len(head_dims) > 1:
            raise UsageError(
                f"fp8attn cannot serve this model with the option scales: its layers have head_dim "
                f"{' and '.join(map(str, head_dims))}, and a file of scales has layers of one shape; leave it out"
            )
        mark = None
        if exchanges_blocks(self._config):
            # A draft model's layers have the mark of the model, whose blocks they may share.
            drafts = self._config.speculative_config
            whole = model if drafts is None else drafts.target_model_config
            mark = mark_of(
                self.options, replace(served, name=whole.model, revision=whole.revision, context=whole.max_model_len)
            )
        heads = slice(first, first + self.num_kv_heads)
        pages: int | PageSpec = self.head_size
        static = static_state(options, served, layer_number(name), heads, self.head_size)
        if (keys := keys_of(layer, self.options, self._config)) is not None:
            pages, static, layer.get_kv_cache_spec = KEYS_PAGES, StaticState(), of_keys(layer.get_kv_cache_spec)
        return EngineLayer(
            self.num_heads, self.num_kv_heads, pages, options=self.options, device=layer._k_scale.device,
            static=static, keys=keys,
            softmax_scale=self.scale, window=self.window, softcap=self.softcap, sinks=self.sinks,
            batch_invariant=envs.VLLM_BATCH_INVARIANT, mark=mark, name=name,
        )  # fmt: skip

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Step | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of a step.

        Args:
            query, output: `[T, num_heads, head_size]`.
            key, value: `[T, num_kv_heads, head_size]`, after RoPE.
            attn_metadata: None while vLLM measures memory.
        """
        if attn_metadata is None:
            return output.zero_()
        engine_layer = self.engine_layer
        assert engine_layer is not None, "vLLM calls process_weights_after_loading before"
        if not engine_layer.is_bound(kv_cache):
            self.share_pages(layer)
            if engine_layer.writes_at_the_start:
                self._check_blocks(layer, kv_cache, engine_layer.has_static_scales)
            engine_layer.bind(kv_cache)
        engine_layer.run(query, key, value, output, attn_metadata)
        return output

    def share_pages(self, layer: Any) -> None:
        """Let the layer read another one's pages, if vLLM has said so. Of draft layers (Gemma 4's) it says it after the
        weights are loaded.
        """
        if (target := layer.kv_sharing_target_layer_name) is not None:
            other = self._config.compilation_config.static_forward_context[target].impl.engine_layer
            assert self.engine_layer is not None and other is not None
            self.engine_layer.read_from(other)

    def _check_blocks(self, layer: Any, kv_cache: torch.Tensor, static_scales: bool) -> None:
        """Raise UsageError if something else writes to this layer's blocks, into which values are written once."""
        remedy = "leave out static_scales" if static_scales else "leave out --kv-transfer-config"
        for other in self._config.compilation_config.static_forward_context.values():
            blocks = getattr(other, "kv_cache", None)
            if other is layer or not isinstance(blocks, torch.Tensor) or not blocks.numel():
                continue
            # vLLM would clear new blocks, which two precisions can share.
            if not isinstance(other.impl, FP8AttentionImpl):
                raise UsageError(
                    f"{other.layer_name} has another attention backend (as a draft model may have), and then vLLM "
                    f"clears blocks, with what fp8attn has written into them once: {remedy}"
                )
            if blocks.data_ptr() != kv_cache.data_ptr() or other.kv_sharing_target_layer_name is not None:
                continue
            if static_scales:
                reason = "as in models with and without windows"
            elif other.impl.head_size != self.head_size:  # a page of one has K and V where the other has its header
                reason = "which has another head_dim"
            else:
                continue
            raise UsageError(f"{layer.layer_name} shares its blocks with {other.layer_name}, {reason}: {remedy}")


def fp8_layers(config: Any) -> list[Any]:
    """vLLM's layers with this backend, of all groups of blocks."""
    layers = config.compilation_config.static_forward_context.values()
    return [layer for layer in layers if isinstance(getattr(layer, "impl", None), FP8AttentionImpl)]
