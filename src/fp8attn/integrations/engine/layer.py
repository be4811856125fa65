"""A layer in an engine: its pages in the engine's memory, what is static in them, and the append and attention of a
step.
"""

from __future__ import annotations

import torch

from ... import ops
from ..._torch_ops import resolve
from ...checks import check_tensor
from ...formats.kv_format import KVFormat
from ...formats.page_layout import engine_marks_of, scales_of
from ...formats.spec import PageSpec
from ...pages import KVPages
from ...params import Append, AttentionParams
from ..k_eq_v import KeysOfNorm, absorb, to_latent
from .marks import check_marks
from .options import Options
from .static import StaticState
from .steps import Step, StepPart


class EngineLayer:
    """A layer's attention in an engine.

    What is static keeps its address and its values as long as the layer exists: CUDA graphs read the tensors, and
    cached pages depend on the values. An engine that discards memory must save and restore `buffers`, or call
    `write_static` afterwards.

    Args:
        num_q_heads, num_kv_heads, head_dim: the layer's shape in this process. A layer of latents has
            `PageSpec.latent`, and needs `softmax_scale`.
        static: what is static in its pages.
        softmax_scale: None: 1 / sqrt(head_dim).
        window, softcap, sinks: as `fp8attn.attention` takes them.
        batch_invariant: as `fp8attn.attention` takes it.
        keys: how the layer's keys follow from its values, if its pages are of latents and it is called with K and V.
        mark: of its pages (`marks.mark_of`), if other engines may bring some.
        name: of the layer, for errors.
    """

    def __init__(
        self,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int | PageSpec,
        *,
        options: Options,
        static: StaticState,
        device: torch.device | str,
        softmax_scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        batch_invariant: bool = False,
        keys: KeysOfNorm | None = None,
        mark: int | None = None,
        name: str = "",
    ) -> None:
        spec = PageSpec.of(head_dim, options.key_dtype)
        self.num_q_heads, self.num_kv_heads, self.head_dim = num_q_heads, num_kv_heads, spec.k_dim
        self.options, self.static, self.mark, self.name = options, static, mark, name
        self.softmax_scale = spec.k_dim**-0.5 if softmax_scale is None else softmax_scale
        self.window, self.softcap, self.sinks = window, softcap, sinks
        self.batch_invariant, self.keys = batch_invariant, keys
        stored_k_mean, v_mean, self.page_scales = (
            None if x is None else torch.empty_like(x, device=device) for x in static
        )
        self.pool: torch.Tensor | None = None  # the pages in the engine's memory
        self.writes = True
        self.format = KVFormat(spec.name, True, stored_k_mean, v_mean)
        self.write_static()

    def write_static(self) -> None:
        """Write what is static, again after an engine has discarded it."""
        for tensor, value in zip(
            (self.format.stored_k_mean, self.format.v_mean, self.page_scales), self.static, strict=True
        ):
            if tensor is not None and value is not None:
                tensor.copy_(value)

    def read_from(self, other: EngineLayer) -> None:
        """Read the pages of another layer, and write none. Call it before `bind`."""
        self.writes, self.static = False, other.static
        self.format, self.page_scales, self.keys = other.format, other.page_scales, other.keys

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The tensors that must outlive new weights and sleep, by name."""
        tensors = {"k_mean": self.format.stored_k_mean, "v_mean": self.format.v_mean, "page_scales": self.page_scales}
        tensors |= {} if self.keys is None else self.keys.buffers
        return {f"fp8attn_{name}": tensor for name, tensor in tensors.items() if tensor is not None}

    @property
    def has_means(self) -> bool:
        """Whether the layer subtracts static means."""
        return self.format.stored_k_mean is not None or self.format.v_mean is not None

    @property
    def has_static_scales(self) -> bool:
        """Whether all pages of the layer have the same calibrated scales."""
        return self.page_scales is not None

    @property
    def writes_at_the_start(self) -> bool:
        """Whether `bind` writes into pages, which nothing else may write to or clear then: static scales, and marks."""
        return self.page_scales is not None or self.mark is not None

    def is_bound(self, allocation: torch.Tensor) -> bool:
        """Whether the layer's pages are in this memory."""
        return self.pool is not None and self.pool.data_ptr() == allocation.data_ptr()

    def bind(self, allocation: torch.Tensor) -> None:
        """Make the pool of pages from the engine's memory for the layer, and write what pages keep from the start.

        Args:
            allocation: `[num_blocks, ...]` of any dtype and shape, contiguous: `num_kv_heads` pages a block.
        Raises:
            RuntimeError: a block has another size, or there are gaps.
        """
        blocks, heads, size = allocation.shape[0], self.num_kv_heads, self.format.layout.nbytes
        if allocation.nbytes != blocks * heads * size or not allocation.is_contiguous():
            raise RuntimeError(
                f"the engine gave layer {self.name} blocks of {allocation.nbytes // max(blocks, 1)} bytes with strides "
                f"{allocation.stride()}, and fp8attn needs {heads * size} bytes each without gaps; please report the "
                f"model and the options"
            )
        self.pool = allocation.view(torch.uint8).view(blocks, heads, size)
        # Appends leave what is written here.
        if self.page_scales is not None:
            scales_of(self.pool).copy_(self.page_scales)
        if self.mark is not None:
            marks = engine_marks_of(self.pool)
            marks.copy_(torch.where(marks == 0, self.mark, marks))  # a connector may have brought pages before

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, step: Step) -> None:
        """Append the tokens of a step, and attend from them.

        Args:
            q, out: `[T, num_q_heads, head_dim]`.
            k, v: `[T, num_kv_heads, head_dim]`, after RoPE. Not read if the layer does not write.
        """
        assert self.pool is not None, "call bind first"
        if self.mark is not None and not step.checked:
            step.checked = True  # one layer is enough: one engine writes all of a block
            for part in step.parts:
                check_marks(self.pool, part.page_table, self.mark)
        if self.sinks is not None:  # an engine may set others at each call
            check_tensor(self.sinks, "sinks, one logit per query head,", (self.num_q_heads,), None, self.pool.device)
        if self.keys is not None:
            matrix = self.keys.matrix()
            q = absorb(q, matrix)
            if self.writes:
                k, v = to_latent(k, v, matrix)
        for part in step.parts:
            if self.writes:
                self.append(part, k[part.tokens], v[part.tokens])
            self.attend(part, q[part.tokens], out[part.tokens])

    def append(self, part: StepPart, k: torch.Tensor, v: torch.Tensor) -> None:
        """Append the tokens of a part of a step: keys and values, or latents and keys with RoPE."""
        options = Append(part.cu_seqlens, part.max_seqlen, self.has_static_scales, advance=False)
        ops.run_append(resolve("auto", k, self.format.name), self._pages_of(part), k, v, options)

    def attend(self, part: StepPart, q: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The attention of a part of a step, whose tokens were appended."""
        bounds = part.cu_seqlens
        if self.batch_invariant and part.max_seqlen == 1 and len(q) == len(part.cache_seqlens):
            bounds = None  # one query of each sequence, which is faster without bounds
        params = AttentionParams(
            bounds, part.max_seqlen, True, self.softmax_scale, self.window or 0, self.softcap or 0.0, self.sinks, None,
            False, self.options.exact, self.batch_invariant,
        )  # fmt: skip
        return ops.run_attention(resolve("auto", q, self.format.name), q, self._pages_of(part), params, out)[0]

    def _pages_of(self, part: StepPart) -> KVPages:
        assert self.pool is not None, "call bind first"
        return KVPages.trusted(self.pool, part.page_table, part.cache_seqlens, self.format)
