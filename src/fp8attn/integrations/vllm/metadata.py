"""The sequences of a step, in one or two parts: decodes (and verified drafts), then prompts.

Attention of few queries and of many have different kernels. A batch of both is two calls, so that a long prompt does not take the decodes
through the kernel for many.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from ...formats.page_layout import PAGE_SIZE
from .metrics import OverflowMetrics
from .warm import warm_up


@dataclass(frozen=True)
class Part:
    """Neighboring sequences of a step, for one `append` and one `attention`.

    Attributes:
        tokens: their tokens among those of the step.
        cu_seqlens: `[num_seqs + 1]` int32, the index in `tokens` of each sequence's first token, then their number; None if the sequences
            have equal numbers of tokens.
        max_seqlen: the largest number of new tokens of a sequence.
        cache_seqlens: `[num_seqs]` int32, with the new tokens.
        page_table: `[num_seqs, max_pages]` int32; of prompts as wide as the longest sequence of the step.
    """

    tokens: slice
    cu_seqlens: torch.Tensor | None
    max_seqlen: int
    cache_seqlens: torch.Tensor
    page_table: torch.Tensor


@dataclass
class FP8AttentionMetadata(AttentionMetadata):
    """The step, which all layers share.

    Attributes:
        parts: of the step.
        checked: whether a layer has checked the marks of the pages (`connectors.check_marks`).
    """

    parts: tuple[Part, ...]
    checked: bool = False


class FP8AttentionMetadataBuilder(AttentionMetadataBuilder[FP8AttentionMetadata]):
    """Makes the metadata of a step. A part of decodes has views of vLLM's buffers only, so CUDA graphs can replay it."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = True
    supports_draft_decode_metadata_update = True
    metrics: OverflowMetrics | None = None  # with the option `count_overflows`

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        layers = vllm_config.compilation_config.static_forward_context
        counts = {name: found for name, layer in layers.items() if (found := getattr(getattr(layer, "impl", None), "overflows", None))}
        if next(iter(counts), None) in layer_names:  # of all layers: the builder of drafts does not build steps that CUDA graphs replay
            self.metrics = OverflowMetrics(list(counts.values()))
        if device.type != "cpu":
            warm_up(vllm_config, layer_names, device)

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int:
        """The most new tokens of a sequence that graphs of decodes replay. Kernels read the bounds of sequences from the device."""
        from vllm.v1.attention.backend import max_decode_query_len  # from vLLM 0.32, which calls this

        return max_decode_query_len(vllm_config)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> FP8AttentionMetadata:
        if self.metrics is not None:
            self.metrics.update()
        step = common_attn_metadata
        num_decodes, num_prompts, num_tokens, _ = split_decodes_and_prefills(step, decode_threshold=self.reorder_batch_threshold)
        lengths, table, bounds = step.seq_lens[: step.num_reqs], step.block_table_tensor[: step.num_reqs], step.query_start_loc
        parts = []
        if num_decodes:
            longest = step.max_query_len if not num_prompts else self.reorder_batch_threshold
            parts.append(Part(slice(0, num_tokens), bounds[: num_decodes + 1], longest, lengths[:num_decodes], table[:num_decodes]))
        if num_prompts:
            cu_seqlens, lengths, table = bounds[num_decodes : step.num_reqs + 1], lengths[num_decodes:], table[num_decodes:]
            if num_decodes:  # at new addresses: those inside vLLM's tensors are no multiples of 16 bytes, which need other kernels
                cu_seqlens, lengths = cu_seqlens - num_tokens, lengths.clone()
            columns = -(-step.max_seq_len // PAGE_SIZE)  # vLLM's table is as wide as its longest request may be; plans follow the width
            prompts = slice(num_tokens, step.num_actual_tokens)
            if not num_decodes and num_prompts * step.max_query_len == step.num_actual_tokens:
                cu_seqlens = None
            parts.append(Part(prompts, cu_seqlens, step.max_query_len, lengths, _of_prompts(table, num_decodes, columns)))
        return FP8AttentionMetadata(tuple(parts))

    def update_block_table(
        self, metadata: FP8AttentionMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> FP8AttentionMetadata:
        """The metadata of layers whose blocks are others (another group of vLLM's)."""
        done, parts = 0, []
        for part in metadata.parts:
            num_seqs, columns = part.page_table.shape
            table = blk_table[done : done + num_seqs]
            parts.append(replace(part, page_table=_of_prompts(table, done, columns)))
            done += num_seqs
        return FP8AttentionMetadata(tuple(parts))

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> FP8AttentionMetadata:
        """The metadata of a draft, `draft_index` drafts after the first.

        vLLM's model runner V1 gives a draft past `max_model_len` the length 1, and the next drafts 2, 3, ..., less than any sequence has
        then. Here it has the length 0 and is not written, because the page at its position 0 may be another request's, too.
        """
        found = self.build(0, common_attn_metadata, fast_build=True)
        if draft_index == 0:
            return found
        return FP8AttentionMetadata(
            tuple(replace(part, cache_seqlens=part.cache_seqlens.masked_fill(part.cache_seqlens <= draft_index, 0)) for part in found.parts)
        )

    def update_draft_decode_metadata(self, metadata: FP8AttentionMetadata) -> None:
        """Nothing to do: a part of decodes has views of vLLM's buffers only."""


def _of_prompts(table: torch.Tensor, num_decodes: int, columns: int) -> torch.Tensor:
    """The first columns of a table, at a new address if decodes are before it: see `build`."""
    return (table.clone() if num_decodes else table)[:, :columns]
