"""A layer's attention in vLLM: quantize the new tokens into its pages, then attend."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from ... import ops
from ...errors import UsageError
from ...formats.codec import key_type
from ...formats.page_layout import PageLayout, engine_marks_of, scales_of
from ...formats.rotation import rotate
from ...overflow import OverflowCounts, OverflowReport
from ...pages import KVPages
from .biases import means_of
from .connectors import check_marks, exchanges_blocks, mark_of
from .metadata import FP8AttentionMetadata
from .options import Calibrated, Options, layer_number
from .specs import BACKEND_IS_ASKED, of_layer
from .supported import unsupported_config, unsupported_layer


class FP8AttentionImpl(AttentionImpl[FP8AttentionMetadata]):
    """`AttentionImpl` describes the arguments.

    Raises:
        UsageError: fp8attn does not support the layer or vLLM's configuration; the message has the reason and what to do.
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
        self.options = Options.of(config.additional_config)
        reason = unsupported_config(config, self.options)
        reason = reason or unsupported_layer(head_size, kv_cache_dtype, attn_type, alibi_slopes, others)
        if reason is not None:
            raise UsageError(f"fp8attn cannot serve this model: {reason}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.window, self.softcap, self.sinks = sliding_window, logits_soft_cap or None, sinks
        self._target = kv_sharing_target_layer_name  # the layer whose pages this one reads, if it writes none
        self._config = config
        self._pool: torch.Tensor | None = None  # the pages in vLLM's allocation
        self._state: tuple[Any, ...] = ()  # the last fields of `KVPages`
        self._page_scales: torch.Tensor | None = None  # `Calibrated.page_scales`, on the device
        self._calibrated: Calibrated | None = None  # what was put on the device
        self._mark: int | None = None  # of pages, if other engines may bring some
        self.overflows: OverflowCounts | None = None

    @property
    def writes(self) -> bool:
        """Whether the layer writes its pages. Otherwise another layer does."""
        return self._target is None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """vLLM calls this before it asks layers for the bytes of their blocks and records CUDA graphs, and whenever it reloads weights."""
        for layer in self._config.compilation_config.static_forward_context.values():
            if getattr(layer, "impl", None) is self:
                if self._calibrated is None:
                    self._prepare(layer)
                    if not BACKEND_IS_ASKED:
                        layer.get_kv_cache_spec = of_layer(layer.get_kv_cache_spec)
                self._fill(layer)

    def _prepare(self, layer: Any) -> None:
        """Allocate what is static in the layer's pages, and its counts, on its device."""
        device = layer._k_scale.device
        self._calibrated = self._static(self._target or layer.layer_name)
        stored_k_mean, v_mean, self._page_scales = (None if x is None else torch.empty_like(x, device=device) for x in self._calibrated)
        self._state = stored_k_mean, v_mean, key_type(self.options.key_dtype), True
        if self.options.count_overflows and self.writes:
            self.overflows = OverflowCounts([layer_number(layer.layer_name) or 0], self.num_kv_heads, self.head_size, device)
        if exchanges_blocks(self._config):
            drafts = self._config.speculative_config  # a draft model's layers have the mark of the model, whose blocks they may share
            model = self._config.model_config if drafts is None else drafts.target_model_config
            self._mark = mark_of(self.options, model.model, model.revision, model.max_model_len)

    def _fill(self, layer: Any) -> None:
        """Write what is static. New weights change neither tensors, which CUDA graphs read, nor values, which cached pages depend on."""
        names = "k_mean", "v_mean", "page_scales", "overflows"
        values = *(self._calibrated or Calibrated()), None
        counts = None if self.overflows is None else self.overflows.tensors[0]
        for name, tensor, value in zip(names, (*self._state[:2], self._page_scales, counts), values, strict=True):
            if tensor is None:
                continue
            if value is not None:
                tensor.copy_(value)
            layer.register_buffer(f"fp8attn_{name}", tensor, persistent=False)  # vLLM keeps buffers when its sleep mode discards weights

    def _static(self, layer_name: str) -> Calibrated:
        """From the file of the option `scales`, or means from the model's biases."""
        model, number = self._config.model_config, layer_number(layer_name)
        total, ranks = model.get_total_num_kv_heads(), get_tensor_model_parallel_world_size()
        first = get_tensor_model_parallel_rank() * total // ranks
        heads = slice(first, first + self.num_kv_heads)
        if self.options.scales is not None and not layer_name.startswith("draft_model."):  # the file is not of a draft model
            shape = {"num_kv_heads": total, "head_dim": self.head_size, "num_layers": model.hf_text_config.num_hidden_layers}
            return self.options.calibrated(layer_name, heads, **shape)
        found = None if number is None else means_of(model.model, model.revision, model.max_model_len).get(number)
        if found is None:
            return Calibrated()
        k_mean, v_mean = found.k_mean, found.v_mean
        return Calibrated(None if k_mean is None else rotate(k_mean[heads]), None if v_mean is None else v_mean[heads].contiguous())

    @property
    def has_means(self) -> bool:
        """Whether the layer subtracts static means."""
        return any(mean is not None for mean in self._state[:2])

    @property
    def has_static_scales(self) -> bool:
        """Whether all pages of the layer have the same calibrated scales."""
        return self._page_scales is not None

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FP8AttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of a step.

        Args:
            query, output: `[T, num_heads, head_size]`.
            key, value: `[T, num_kv_heads, head_size]`, after RoPE.
            kv_cache: the layer's blocks.
            attn_metadata: None while vLLM measures memory.
        """
        if attn_metadata is None:
            return output.zero_()
        if self._pool is None or self._pool.data_ptr() != kv_cache.data_ptr():
            self._bind(layer, kv_cache)
        assert self._pool is not None
        if self._mark is not None and not attn_metadata.checked:
            attn_metadata.checked = True  # one layer is enough: all of a block is of one engine
            for part in attn_metadata.parts:
                check_marks(self._pool, part.page_table, self._mark)
        for part in attn_metadata.parts:
            pages = KVPages.trusted(self._pool, part.page_table, part.cache_seqlens, *self._state)
            tokens = part.tokens
            if self.writes:
                ops.append(
                    pages, key[tokens], value[tokens], cu_seqlens=part.cu_seqlens, max_seqlen=part.max_seqlen, advance=False,
                    static_scales=self.has_static_scales, overflows=None if self.overflows is None else self.overflows.tensors[0],
                )  # fmt: skip
            ops.attention(
                query[tokens], pages, cu_seqlens_q=part.cu_seqlens, max_seqlen_q=part.max_seqlen, softmax_scale=self.scale,
                window=self.window, softcap=self.softcap, sinks=self.sinks, exact=self.options.exact,
                out=output[tokens],
            )  # fmt: skip
        return output

    def _bind(self, layer: Any, kv_cache: torch.Tensor) -> None:
        """Make the pool of pages from vLLM's allocation for the layer."""
        heads, size = self.num_kv_heads, PageLayout.of(self.head_size).nbytes
        blocks = kv_cache.shape[0]
        if kv_cache.nbytes != blocks * heads * size or not kv_cache.is_contiguous():
            raise RuntimeError(
                f"vLLM gave layer {layer.layer_name} blocks of {kv_cache.nbytes // max(blocks, 1)} bytes with strides {kv_cache.stride()}, "
                f"and fp8attn needs {heads * size} bytes each without gaps; please report the model and the options"
            )
        self._pool = kv_cache.view(torch.uint8).view(blocks, heads, size)
        # Appends leave what is written here: static scales, and marks.
        if self._page_scales is not None or self._mark is not None:
            self._check_own_blocks(layer, kv_cache)
        if self._page_scales is not None:
            scales_of(self._pool).copy_(self._page_scales)
        if self._mark is not None:
            marks = engine_marks_of(self._pool)
            marks.copy_(torch.where(marks == 0, self._mark, marks))  # a connector may have brought pages before

    def _check_own_blocks(self, layer: Any, kv_cache: torch.Tensor) -> None:
        """What is written once stays in blocks that nothing else writes to."""
        remedy = "leave out static_scales" if self._page_scales is not None else "leave out --kv-transfer-config"
        for other in self._config.compilation_config.static_forward_context.values():
            blocks = getattr(other, "kv_cache", None)
            if other is layer or not isinstance(blocks, torch.Tensor) or not blocks.numel():
                continue
            if not isinstance(other.impl, FP8AttentionImpl):  # vLLM would clear new blocks, which two precisions can share
                raise UsageError(
                    f"{other.layer_name} has another attention backend (as a draft model may have), and then vLLM clears blocks, with what "
                    f"fp8attn has written into them once: {remedy}"
                )
            if self._page_scales is not None and blocks.data_ptr() == kv_cache.data_ptr() and other.impl.writes:
                raise UsageError(
                    f"{layer.layer_name} shares its blocks with {other.layer_name}, as in models with and without windows: {remedy}"
                )


def overflows(model: torch.nn.Module) -> OverflowReport:
    """How often the scales of this process's pages grew, since the start. Needs the option `count_overflows`.

        llm = LLM(..., additional_config={"fp8attn": {"count_overflows": True}})
        for report in llm.apply_model(overflows):  # of each process
            print(report)

    vLLM's own steps at the start, while it records CUDA graphs, are counted, too.

    Raises:
        UsageError: nothing was counted.
    """
    impls = (getattr(module, "impl", None) for module in model.modules())
    counts = [impl.overflows for impl in impls if isinstance(impl, FP8AttentionImpl) and impl.overflows is not None]
    if not counts:
        raise UsageError("nothing was counted: pass additional_config={'fp8attn': {'count_overflows': True}} to vLLM")
    return OverflowReport(tuple(row for count in counts for row in count.read().rows))
