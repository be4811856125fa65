"""Latent attention (MLA) in vLLM: a backend, the metadata of a step, and a layer.

vLLM's own layer multiplies queries of decodes by the matrix that expands latents to keys, and the result by the one
that expands them to values. In between, `forward_mqa` attends to the latents in the pages. Prompts are expanded, and
attend to their new tokens in 16 bits, by vLLM's code. So do they to the tokens before a chunk and to those that a hit
of the prefix cache has found, which come from the pages (`_compute_prefill_context`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.attention.mla_attention import (
    MLAAttention,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
    accumulate_mla_context_chunk,
    init_mla_context_partial,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType

from ...errors import UsageError
from ...formats.latent import dequantize
from ...formats.page_layout import PAGE_SIZE, latent_of
from ...formats.spec import PageSpec
from ..engine.layer import EngineLayer
from ..engine.static import StaticState
from ..engine.steps import Step
from ..engine.warm import warm_up
from . import LATENT_NAME
from .backend import FP8AttentionBackend
from .impl import LayerPages
from .metadata import FP8AttentionMetadataBuilder, parts_of, step_of_draft
from .options import config_options
from .specs import LATENT_PAGES, of_pages
from .supported import WHAT_TO_DO_WITH_LATENTS, unsupported_config, unsupported_latents, unsupported_layer

_SHAPE = (  # arguments of an impl that `MLACommonImpl` takes, too
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim", "kv_b_proj",
)  # fmt: skip
CONTEXT_BLOCK = 16384  # tokens of a prompt's context that are dequantized at a time


class FP8LatentBackend(FP8AttentionBackend):
    """vLLM's `AttentionBackend` describes the methods."""

    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return LATENT_NAME

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @staticmethod
    def get_impl_cls() -> type[FP8LatentImpl]:
        return FP8LatentImpl

    @staticmethod
    def get_builder_cls() -> type[FP8LatentMetadataBuilder]:
        return FP8LatentMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(LATENT_PAGES)

    @classmethod
    def validate_configuration(cls, **options: Any) -> list[str]:
        """The reasons why these options are not supported. vLLM prints them and does not start."""
        return [WHAT_TO_DO_WITH_LATENTS.get(reason, reason) for reason in super().validate_configuration(**options)]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return of_pages(spec, LATENT_PAGES[spec.head_size])


@dataclass
class FP8LatentMetadata(MLACommonMetadata):
    """vLLM's metadata of a step, and the step as appends and attention take it."""

    step: Step | None = None


class FP8LatentMetadataBuilder(MLACommonMetadataBuilder[FP8LatentMetadata]):
    """Makes the metadata of a step. A part of decodes has views of vLLM's buffers only, so CUDA graphs can replay
    it.
    """

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    query_len_support = QueryLenSupport.VARLEN
    supports_draft_decode_metadata_update = True
    get_varlen_cudagraph_max_query_len = FP8AttentionMetadataBuilder.get_varlen_cudagraph_max_query_len
    update_draft_decode_metadata = FP8AttentionMetadataBuilder.update_draft_decode_metadata

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, FP8LatentMetadata)
        if device.type != "cpu":
            layers = vllm_config.compilation_config.static_forward_context
            ours = [layers[name].impl.engine_layer for name in layer_names]
            warm_up(ours, vllm_config.model_config.dtype, device, self.reorder_batch_threshold)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> FP8LatentMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata.step = parts_of(
            common_attn_metadata, metadata.num_decodes, metadata.num_decode_tokens, self.reorder_batch_threshold
        )
        return metadata

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> FP8LatentMetadata:
        """The metadata of a draft, `draft_index` drafts after the first."""
        metadata = self.build(0, common_attn_metadata, fast_build=True)
        assert metadata.step is not None
        metadata.step = step_of_draft(metadata.step, draft_index)
        return metadata


class FP8LatentImpl(LayerPages, MLACommonImpl[FP8LatentMetadata]):
    """vLLM's `MLACommonImpl` describes the arguments, and expands prompts.

    Raises:
        UsageError: fp8attn does not support the layer or vLLM's configuration; the message has the reason and what to
            do.
    """

    can_return_lse_for_decode = False
    supports_pcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **latents: Any,
    ) -> None:
        config = get_current_vllm_config()
        self.options = config_options(config.additional_config)
        shape = {name: latents.pop(name) for name in _SHAPE}
        self.spec = PageSpec.latent(shape["kv_lora_rank"], shape["qk_rope_head_dim"])
        others = latents | {
            "sliding_window": sliding_window, "logits_soft_cap": logits_soft_cap,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
        }  # fmt: skip
        reason = unsupported_config(config, self.options, latents=True) or unsupported_latents(self.spec)
        reason = reason or unsupported_layer(self.spec, kv_cache_dtype, attn_type, alibi_slopes, others)
        if reason is not None:
            raise UsageError(f"fp8attn cannot serve this model: {reason}")
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, None, None, kv_cache_dtype, None, attn_type, None, **shape
        )
        self._config = config
        self.supports_quant_query_input = False  # absorbed queries arrive in 16 bits
        self.engine_layer: EngineLayer | None = None  # from when the weights are loaded

    def _engine_layer(self, layer: Any) -> EngineLayer:
        if type(layer) is not MLAAttention:  # some models write and read blocks themselves
            raise UsageError(
                f"fp8attn cannot serve this model: its attention is a {type(layer).__name__}, and fp8attn knows vLLM's "
                f"MLAAttention; leave out --attention-backend"
            )
        return EngineLayer(
            self.num_heads, 1, self.spec, options=self.options, device=layer._k_scale.device,
            static=StaticState(), softmax_scale=self.scale, name=layer.layer_name,
        )  # fmt: skip

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,  # from vLLM 0.33
    ) -> None:
        """Append the new tokens of a step.

        Args:
            kv_c_normed: `[T, rank]`, with rows that pad the step.
            k_pe: `[T, 1, rope]`.
            slot_mapping: not read. Appends take the lengths and the tables of the step, so that a step of decodes has
                the launches of one append.
        """
        layer = self.engine_layer
        assert layer is not None, "vLLM calls process_weights_after_loading before"
        metadata = get_attention_context(layer.name)[0]
        if metadata is None or not kv_cache.numel():  # while vLLM measures memory
            return
        if not layer.is_bound(kv_cache):
            layer.bind(kv_cache)
        for part in metadata.step.parts:
            layer.append(part, kv_c_normed[part.tokens, None], k_pe[part.tokens])

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: FP8LatentMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention of decodes, whose tokens `do_kv_cache_update` has appended.

        Args:
            q: absorbed queries `[T, num_heads, rank]` and those with RoPE `[T, num_heads, rope]`, or both in one.
        Returns:
            latents `[T, num_heads, rank]`, and no LSE.
        """
        assert attn_metadata.step is not None and self.engine_layer is not None
        part = attn_metadata.step.parts[0]
        return self.engine_layer.attend(part, torch.cat(q, -1) if isinstance(q, tuple) else q), None

    def _compute_prefill_context(
        self, q: torch.Tensor, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, k_scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of prompts to the tokens that were cached before this step: vLLM's code, with another gather.

        Args:
            q: `[T, num_heads, nope + rope]`, of all prompts.
        Returns:
            the output `[T, num_heads, v]`, and the LSE `[num_heads, T]`.
        """
        prompts = attn_metadata.prefill
        context, backend = prompts.chunked_context, prompts.prefill_backend
        output = lse = None
        for chunk in context.chunks:
            gathered = context.workspace[: chunk.num_context_tokens]
            self._gather(chunk, prompts.block_table[chunk.request_slice], gathered)
            latent, rope = gathered.split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
            expanded = self.kv_b_proj(latent)[0].view(-1, self.num_heads, self.qk_nope_head_dim + self.v_head_dim)
            nope, v = expanded.split([self.qk_nope_head_dim, self.v_head_dim], -1)
            k = self._concat_k_nope_k_pe(nope, rope.unsqueeze(1))
            attended = backend.run_prefill_context_chunk(chunk=chunk, q=q[chunk.token_slice], k=k, v=v)
            if output is None:
                if len(context.chunks) == 1 and not context.empty_token_slices:
                    return attended
                output, lse = init_mla_context_partial(context, *attended, num_tokens=len(q))
            accumulate_mla_context_chunk(chunk, *attended, output, lse)
        assert output is not None and lse is not None, "a step without context does not come here"
        return output, lse

    def _gather(self, chunk: Any, table: torch.Tensor, out: torch.Tensor) -> None:
        """Dequantize tokens of a chunk into `out [num_context_tokens, rank + rope]`, without waiting for the GPU.

        Args:
            chunk: `token_to_seq` has the sequence of each token, `starts` the positions at which the chunk begins in
                each sequence, and `cu_seq_lens` the index of its first token there.
            table: `[num_seqs, any number]`, the pages of these sequences.
        """
        layer = self.engine_layer
        assert layer is not None and layer.pool is not None, "tokens were appended before"
        codes, rope, scales = (x[:, 0] for x in latent_of(layer.pool, layer.format.layout))
        first = chunk.starts - chunk.cu_seq_lens[:-1]  # the position of a chunk's token 0, if it were of this sequence
        for begin in range(0, len(out), CONTEXT_BLOCK):
            seq = chunk.token_to_seq[begin : begin + CONTEXT_BLOCK].long()
            position = first[seq] + torch.arange(begin, begin + len(seq), device=seq.device)
            page, row = table[seq, position // PAGE_SIZE].long(), position % PAGE_SIZE
            part = out[begin : begin + len(seq)]
            dequantize(codes[page, row], scales[page, row], part[:, : self.kv_lora_rank])
            part[:, self.kv_lora_rank :] = rope[page, row]
