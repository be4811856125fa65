"""`FP8AttentionBackend`: the sequences of a step, then append and attention in each layer."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from fp8attn import UsageError
from fp8attn.formats.page_layout import PAGE_SIZE
from fp8attn.integrations.engine.steps import Step, StepPart
from fp8attn.integrations.engine.warm import warm_up

from .layers import engine_layers
from .options import environment_options

logger = logging.getLogger(__name__)


class FP8AttentionBackend(AttentionBackend):
    """SGLang's `AttentionBackend` describes the methods.

    Raises:
        UsageError: a layer is not supported.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        # [max_requests, max_tokens], the slot of each token of a request
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.layers = engine_layers(runner, environment_options())
        self.forward_metadata: Step | None = None
        device = torch.device(runner.device)
        if device.type == "cpu":
            logger.warning(
                "fp8attn: on a CPU attention runs in fp8attn's backend reference, which is slow and made for tests"
            )
        else:
            warm_up(self.layers.values(), runner.model_config.dtype, device)

    def support_triton(self) -> bool:
        return False  # what SGLang's Triton kernels would read is not there

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Make the step of a batch, for all layers. Prompts and decodes of a mixed batch are one part, because SGLang
        puts decodes last.
        """
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self.forward_metadata = None
            return
        bounds = None
        if mode.is_decode():
            num_tokens, max_seqlen = len(forward_batch.seq_lens), 1
        elif mode.name in ("EXTEND", "MIXED"):
            counts = forward_batch.extend_seq_lens_cpu
            num_tokens, max_seqlen = int(sum(counts)), int(max(counts))
            if len(counts) * max_seqlen != num_tokens:
                bounds = torch.nn.functional.pad(forward_batch.extend_seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        else:
            raise UsageError(f"fp8attn does not support SGLang's steps of the form {mode.name}")
        columns = -(-int(forward_batch.seq_lens_cpu.max()) // PAGE_SIZE)
        table = self._table(forward_batch.req_pool_indices, columns)
        lengths = forward_batch.seq_lens.to(torch.int32)
        self.forward_metadata = Step((StepPart(slice(0, num_tokens), bounds, max_seqlen, lengths, table),))

    def _table(self, requests: torch.Tensor, columns: int) -> torch.Tensor:
        """The first pages of requests, `[num_seqs, columns]` int32."""
        slots = self.req_to_token[:, : columns * PAGE_SIZE : PAGE_SIZE].index_select(0, requests)
        return (slots // PAGE_SIZE).to(torch.int32)

    def _forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None, **others: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Append and attend.

        Args:
            q: `[T, num_q_heads * head_dim]`, or with a dimension of heads.
            k, v: `[T, num_kv_heads, head_dim]`, after RoPE.
        """
        engine_layer = self.layers[layer]
        if (
            k is None
            or v is None
            or not save_kv_cache
            or (others := {x: y for x, y in others.items() if y is not None})
        ):
            reason = f"arguments {sorted(others)}" if others else "no new keys and values"
            raise UsageError(
                f"fp8attn cannot serve this model: layer {layer.layer_id} has {reason}; use another --attention-backend"
            )
        assert self.forward_metadata is not None, "call init_forward_metadata first"
        engine_layer.sinks = sinks
        q = q.reshape(-1, engine_layer.num_q_heads, engine_layer.head_dim)
        k, v = (x.reshape(-1, engine_layer.num_kv_heads, engine_layer.head_dim) for x in (k, v))
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        engine_layer.run(q, k, v, out, self.forward_metadata)
        return out.flatten(1)

    forward_extend = forward_decode = _forward

    # CUDA graphs of decodes. SGLang's runner calls `init_cuda_graph_state` once, and `init_forward_metadata_out_graph`
    # before it records a graph and before each replay. Graphs of prompts are disabled (`supported_graphs`).

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make the tensors that graphs read, at the same addresses whatever the step, for `max_bs` sequences of the
        longest request that may come, and a step for each number of sequences.
        """
        device, columns = self.req_to_token.device, -(-self.req_to_token.shape[1] // PAGE_SIZE)
        lengths, table = (torch.zeros(shape, dtype=torch.int32, device=device) for shape in (max_bs, (max_bs, columns)))
        bounds = torch.arange(max_bs + 1, dtype=torch.int32, device=device)
        self.graph_steps = [
            Step((StepPart(slice(0, num_seqs), bounds[: num_seqs + 1], 1, lengths[:num_seqs], table[:num_seqs]),))
            for num_seqs in range(max_bs + 1)
        ]

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1  # of requests that pad a graph

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Write the sequences of a step where its graph reads them. `seq_lens` and `req_pool_indices` have the graph's
        padding. The length of a sequence that pads it is 0, less than its new token: so nothing is written for it, and
        its attention is zero. While a graph is recorded, all do.
        """
        if not (mode := forward_batch.forward_mode).is_decode():
            raise UsageError(f"fp8attn does not support CUDA graphs of SGLang's steps of the form {mode.name}")
        num_seqs = len(forward_batch.seq_lens)
        padding = num_seqs if in_capture else forward_batch.num_padding
        self.forward_metadata = self.graph_steps[num_seqs]
        (part,) = self.forward_metadata.parts
        part.cache_seqlens.copy_(forward_batch.seq_lens)
        part.cache_seqlens[num_seqs - padding :].zero_()
        part.page_table.copy_(self._table(forward_batch.req_pool_indices, part.page_table.shape[1]))
