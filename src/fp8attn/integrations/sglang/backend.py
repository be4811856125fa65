"""`FP8AttentionBackend`: the sequences of a step, then append and attention in each layer."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from ...errors import UsageError
from ...formats.page_layout import PAGE_SIZE
from ..engine.steps import Step, step_of
from ..engine.warm import warm_up
from .graphs import GraphSteps
from .layers import engine_layers
from .options import options_of

logger = logging.getLogger(__name__)


class FP8AttentionBackend(AttentionBackend):
    """SGLang's `AttentionBackend` describes the methods.

    Raises:
        UsageError: a layer is not supported.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.req_to_token = (
            runner.req_to_token_pool.req_to_token
        )  # [max_requests, max_tokens], the slot of each token of a request
        self.layers = engine_layers(runner, options_of())
        self.forward_metadata: Step | None = None
        self.graphs: GraphSteps | None = None
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
        lengths = forward_batch.seq_lens.to(torch.int32)
        if mode.is_decode():
            bounds = torch.arange(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
            num_tokens, max_seqlen = len(lengths), 1
        elif mode.name in ("EXTEND", "MIXED"):
            counts = forward_batch.extend_seq_lens_cpu
            bounds = torch.nn.functional.pad(forward_batch.extend_seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
            num_tokens, max_seqlen = int(sum(counts)), int(max(counts))
        else:
            raise UsageError(f"fp8attn does not support SGLang's steps of the form {mode.name}")
        longest = int(forward_batch.seq_lens_cpu.max())
        columns = -(-longest // PAGE_SIZE)
        table = self._table(forward_batch.req_pool_indices, columns)
        self.forward_metadata = step_of(
            lengths, table, bounds, num_decodes=0, decode_tokens=0, max_decode=1, num_tokens=num_tokens,
            max_seqlen=max_seqlen,
            longest=longest,
        )  # fmt: skip

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
        found = self.layers[layer]
        if (
            k is None
            or v is None
            or not save_kv_cache
            or (others := {x: y for x, y in others.items() if y is not None})
        ):
            what = f"arguments {sorted(others)}" if others else "no new keys and values"
            raise UsageError(
                f"fp8attn cannot serve this model: layer {layer.layer_id} has {what}; use another --attention-backend"
            )
        assert self.forward_metadata is not None, "call init_forward_metadata first"
        found.sinks = sinks
        q = q.reshape(-1, found.num_q_heads, found.head_dim)
        k, v = (x.reshape(-1, found.num_kv_heads, found.head_dim) for x in (k, v))
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        found.run(q, k, v, out, self.forward_metadata)
        return out.flatten(1)

    forward_extend = forward_decode = _forward

    # CUDA graphs of decodes. SGLang's runner calls `init_cuda_graph_state` once, and `init_forward_metadata_out_graph`
    # before it records a graph and before each replay. Graphs of prompts are disabled (`supported_graphs`).

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.graphs = GraphSteps(max_bs, -(-self.req_to_token.shape[1] // PAGE_SIZE), self.req_to_token.device)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1  # of requests that pad a graph; `GraphSteps.write` gives them no tokens

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Write the sequences of a step where its graph reads them. `seq_lens` and `req_pool_indices` have the graph's
        padding.
        """
        if not (mode := forward_batch.forward_mode).is_decode():
            raise UsageError(f"fp8attn does not support CUDA graphs of SGLang's steps of the form {mode.name}")
        assert self.graphs is not None, "call init_cuda_graph_state first"
        padding = (
            len(forward_batch.seq_lens) if in_capture else forward_batch.num_padding
        )  # nothing is written while a graph is recorded
        table = self._table(forward_batch.req_pool_indices, self.graphs.page_table.shape[1])
        self.forward_metadata = self.graphs.write(forward_batch.seq_lens, table, padding)
