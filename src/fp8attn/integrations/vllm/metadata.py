"""The sequences of a step, from vLLM's metadata: decodes, then prompts (`engine/steps.py`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from ...errors import UsageError
from ..engine.steps import Step, step_of
from ..engine.warm import warm_up
from .impl import fp8_layers
from .supported import NOT_CAUSAL, unsupported_on_cpu


def parts_of(step: Any, num_decodes: int, decode_tokens: int, most: int) -> Step:
    """The parts of a step, from vLLM's `CommonAttentionMetadata`.

    Args:
        num_decodes, decode_tokens: the sequences that vLLM takes for decodes, and their new tokens.
        most: new tokens that such a sequence may have.
    Raises:
        UsageError: sequences of the step are not causal.
    """
    if step.causal is not True:  # a tensor has a bool for each sequence
        raise UsageError(f"fp8attn cannot serve this model: {NOT_CAUSAL}")
    return step_of(
        step.seq_lens[: step.num_reqs],
        step.block_table_tensor[: step.num_reqs],
        step.query_start_loc,
        num_decodes=num_decodes,
        decode_tokens=decode_tokens,
        max_decode=most if num_decodes < step.num_reqs else step.max_query_len,
        num_tokens=step.num_actual_tokens,
        max_seqlen=step.max_query_len,
        longest=step.max_seq_len,
    )


def step_of_draft(step: Step, draft_index: int) -> Step:
    """The step of a draft, `draft_index` drafts after the first.

    vLLM's model runner V1 gives a draft past `max_model_len` the length 1, and the next drafts 2, 3, ..., less than any
    sequence has then. Here it has the length 0 and is not written, because the page at its position 0 may be another
    request's, too.
    """
    if draft_index == 0:
        return step
    return Step(
        tuple(
            replace(part, cache_seqlens=part.cache_seqlens.masked_fill(part.cache_seqlens <= draft_index, 0))
            for part in step.parts
        )
    )


class FP8AttentionMetadataBuilder(AttentionMetadataBuilder[Any]):
    """Makes the metadata of a step, a `Step`. A part of decodes has views of vLLM's buffers only, so CUDA graphs can
    replay it.
    """

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = True
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        if device.type == "cpu":
            if (reason := unsupported_on_cpu(vllm_config)) is not None:
                raise UsageError(f"fp8attn cannot serve this model: {reason}")
        else:
            ours = [layer for layer in fp8_layers(vllm_config) if layer.impl.engine_layer is not None]
            for layer in ours:
                layer.impl.share_pages(layer)
            warm_up([layer.impl.engine_layer for layer in ours], vllm_config.model_config.dtype, device)

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int:
        """The most new tokens of a sequence that graphs of decodes replay. Kernels read the bounds of sequences from
        the device.
        """
        from vllm.v1.attention.backend import max_decode_query_len  # from vLLM 0.32, which calls this

        return max_decode_query_len(vllm_config)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step:
        num_decodes, _, decode_tokens, _ = split_decodes_and_prefills(
            common_attn_metadata, decode_threshold=self.reorder_batch_threshold
        )
        return parts_of(common_attn_metadata, num_decodes, decode_tokens, self.reorder_batch_threshold)

    def update_block_table(self, metadata: Step, blk_table: torch.Tensor, slot_mapping: torch.Tensor) -> Step:
        """The metadata of layers whose blocks are others (another group of vLLM's)."""
        return metadata.with_table(blk_table)

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> Step:
        """The metadata of a draft, `draft_index` drafts after the first."""
        return step_of_draft(self.build(0, common_attn_metadata, fast_build=True), draft_index)

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        """Nothing to do: a part of decodes has views of vLLM's buffers only."""
