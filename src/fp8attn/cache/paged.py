"""`PagedKVCache`: K and V of a model's layers in 8-bit pages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from .. import ops
from ..layout import KVPages
from . import storage
from .sequences import Sequences
from .step import Step


class PagedKVCache(Sequences):
    """K and V of `num_seqs` sequences in 8 bits, of any lengths, of the layers of a model.

    Half the bytes of BF16: a page of 128 tokens costs `256 * head_dim + 128` bytes a KV head. One page table serves all layers. The layers
    append the same tokens one after another: the first one reserves pages for all.

    Not for several threads at once.

    Args:
        num_kv_heads, head_dim: the shape of every layer; head_dim is one of `layout.HEAD_DIMS`.
        num_layers: the layers; `append` and `attention` take their numbers.
        num_seqs: sequences held side by side (the batch).
        num_pages: pages of 128 tokens that each layer allocates at once and for good. None: the pools grow as tokens come.
        max_seqlen: the static form, for steps that are compiled or captured in CUDA graphs: each sequence has the pages of so many tokens
            from the start, tensors stay where they are, and a step uses nothing from the host.
        key_dtype: what keys are stored in, `"int8"` or `"e4m3"`; values are E4M3.
        rotate_keys: rotate keys before quantization (`rotation.rotate`); attention does not change, and rounding errors shrink. A bool, or
            one for each layer.
        k_mean, v_mean: `[num_kv_heads, head_dim]` float32, constants subtracted from K (after RoPE) and V before quantization. Attention
            does not change; rounding errors shrink where an offset is several deviations. None: zero. Or a list of these, one a layer.
        scales: calibrated scales and means to use instead of the pages' own scales and these means; `key_dtype` and `rotate_keys` must be
            those that were calibrated. Or a list, one for each layer.
        device: where the pages are.
        backend: `"auto"`, `"hopper"`, `"triton"` or `"reference"`.
    Attributes:
        layers: each layer's pool and what is static about it.
        table: which sequence has which page, for all layers.
    Raises:
        ValueError: shapes that no kernel takes, or options that do not fit each other.
    """

    # Tokens in, and attention over them

    def append(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        q: torch.Tensor | None = None,
        lengths: Sequence[int] | None = None,
        rope_cos: torch.Tensor | None = None,
        rope_sin: torch.Tensor | None = None,
        rope_interleaved: bool = False,
    ) -> torch.Tensor | None:
        """Quantize one layer's new tokens onto the sequences' ends; all of them or, when this raises, none.

        Every layer appends the same number of tokens before any layer appends the next ones.

        Args:
            layer: the layer's number.
            k, v: `[T, num_kv_heads, head_dim]`, the sequences' new tokens one after another.
            q: `[T, num_q_heads, head_dim]`, the same tokens' queries, to be rotated as K is.
            lengths: how many of the T tokens each sequence gets, the same for all layers. None: all sequences get as many.
            rope_cos, rope_sin, rope_interleaved: apply RoPE to K first (`ops.append`).
        Returns:
            The rotated queries; None without `q`.
        Raises:
            ValueError: shapes or lengths that do not fit, or a layer that has appended these tokens already.
            OutOfPagesError: the pool is of fixed size and too small.
            RuntimeError: a static cache is full. A GPU raises it some time later.
        """
        static_scales = self._layer(layer).scales is not None
        if torch.compiler.is_compiling():
            self._trace_append(layer, k, lengths)
            return ops.append(
                self.pages(layer), k, v, q=q, rope_cos=rope_cos, rope_sin=rope_sin, rope_interleaved=rope_interleaved,
                static_scales=static_scales, backend=self.backend,
            )  # fmt: skip
        name = ops.check_append(self, k, v, q, rope_cos, rope_sin, self.backend)
        step = self._join(layer, k.shape[0], lengths)
        rope = {"rope_cos": rope_cos, "rope_sin": rope_sin, "rope_interleaved": rope_interleaved}
        if step.begins:
            rotated = self._begin(name, layer, k, v, q, step.longest, rope)
            pages = self.pages(layer)
        else:
            pages = self._pages[layer] or self.pages(layer)
            if step.columns is not None:
                pages = KVPages.trusted(pages.pool, pages.page_table[:, : step.columns], *pages.state[2:])
            rotated = ops.run_append(
                name, pages, k, v, q=q, cu_seqlens=step.cu_seqlens, max_seqlen=step.longest, static_scales=static_scales, **rope
            )  # fmt: skip
        step.pages[layer] = pages
        return rotated

    def appended(self, layer: int) -> KVPages:
        """One layer as its last append left it: what its attention reads."""
        if torch.compiler.is_compiling():
            return self.pages(layer)
        pages = None if self._step is None else self._step.pages.get(layer)
        if pages is None:
            self._layer(layer)
            raise ValueError(
                f"layer {layer} has appended no tokens since the cache was made, its sequences were moved, or another layer began a step: "
                "append(layer, k, v) comes first. fp8attn.attention(q, cache.pages(layer)) attends without an append"
            )
        return pages

    def attention(
        self,
        layer: int,
        q: torch.Tensor,
        *,
        causal: bool = True,
        softmax_scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        leftpad_k: torch.Tensor | None = None,
        rope_cos: torch.Tensor | None = None,
        rope_sin: torch.Tensor | None = None,
        rope_interleaved: bool = False,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the queries of the last append over the layer's K and V: `softmax(mask(softcap(softmax_scale * q k^T))) v`.

        Args:
            layer: the layer's number.
            q: `[T, num_q_heads, head_dim]`, the queries of the T tokens that the layer appended last, in the same order.
            causal, softmax_scale, window, softcap, sinks, leftpad_k, rope_cos, rope_sin, rope_interleaved, return_lse: as
                `fp8attn.attention` takes them.
        Returns:
            As `fp8attn.attention`: `[T, num_q_heads, head_dim]`, and with `return_lse` also the log-sum-exp `[T, num_q_heads]`.
        Raises:
            ValueError: q has another number of tokens than the append, or the layer has appended nothing.
        """
        pages, cu_seqlens, longest = self.appended(layer), None, None
        if not torch.compiler.is_compiling():
            step = self._step
            if q.shape[0] != step.num_tokens:
                raise ValueError(
                    f"q must have a row for each of the {step.num_tokens} tokens of the last append (lengths {step.lengths}); got "
                    f"{tuple(q.shape)}. For other queries call fp8attn.attention(q, cache.pages(layer), cu_seqlens_q=..., max_seqlen_q=...)"
                )
            cu_seqlens, longest = step.cu_seqlens, None if step.cu_seqlens is None else step.longest
        return ops.attention(
            q, pages, cu_seqlens_q=cu_seqlens, max_seqlen_q=longest, causal=causal, softmax_scale=softmax_scale, window=window,
            softcap=softcap, sinks=sinks, leftpad_k=leftpad_k, rope_cos=rope_cos, rope_sin=rope_sin, rope_interleaved=rope_interleaved,
            return_lse=return_lse, backend=self.backend,
        )  # fmt: skip

    # Files

    def save(self, path: str | Path, seqs: Sequence[int] | None = None) -> None:
        """Write sequences to a safetensors file: their pages as they are, lengths, and how the pages are to be read.

        Args:
            path: the file; folders above it are made.
            seqs: numbers of sequences, in the order in which `load` gives them. None: all.
        Raises:
            ValueError: there is no such sequence.
        """
        storage.write(path, *storage.pack(self, seqs))

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        max_seqlen: int | None = None,
        num_pages: int | None = None,
        device: torch.device | str | None = None,
        backend: str = "auto",
    ) -> PagedKVCache:
        """A cache of the sequences that `save` wrote, in the same format, means and scales included.

        Args:
            path: the file. Only tensors and strings are read: nothing in it is executed.
            max_seqlen, num_pages, device, backend: as `PagedKVCache` takes them.
        Raises:
            ValueError: there is no such file, it is damaged or not from `save`, or its sequences do not fit into max_seqlen.
            OutOfPagesError: they do not fit into num_pages.
        """
        return storage.unpack(*storage.read(path), path, max_seqlen=max_seqlen, num_pages=num_pages, device=device, backend=backend)

    # A step

    def _join(self, layer: int, num_tokens: int, lengths: Sequence[int] | None) -> Step:
        """The step in which `layer` appends: the one that other layers have begun, or a new one."""
        step = self._step
        if step is None or len(step.pages) == len(self.layers):
            step = self._step = self._new_step(num_tokens, lengths)
        elif layer in step.pages:
            raise ValueError(
                f"layer {layer} appends a second time before layers {step.missing(len(self.layers))} appended once: all layers append the "
                "same tokens, one after another. To drop the tokens of this step: cache.truncate(cache.lengths)"
            )
        elif num_tokens != step.num_tokens or (
            (lengths is not None or step.cu_seqlens is not None) and self._divide(num_tokens, lengths) != step.lengths
        ):
            raise ValueError(
                f"layer {layer} appends {num_tokens} tokens{'' if lengths is None else f' (lengths {list(lengths)})'}, and the layers "
                f"before it appended {step.num_tokens} (lengths {step.lengths}): a step has the same lengths in all layers"
            )
        return step

    def _new_step(self, num_tokens: int, lengths: Sequence[int] | None) -> Step:
        """Bookkeeping for all layers: reserve pages, and count the tokens."""
        table, new = self.table, self._divide(num_tokens, lengths)
        longest, columns, begins, before = max(new), None, False, table.lengths
        if self._static is not None:
            self._static.assert_fits(table.cache_seqlens[0], longest)
            columns = self._static.columns(longest, self.device)
        elif longest <= table.headroom:
            table.advance(new, longest)
        elif not table.num_pages and lengths is None and all(layer.scales is None for layer in self.layers):
            begins = True
            table.begin(longest)
            self._pages = [None] * len(self.layers)
        else:
            self._reserve([old + n for old, n in zip(before, new, strict=True)])
            table.advance(new, longest)
        cu_seqlens = None if lengths is None else table.to_device([0, *accumulate(new)], torch.int32)
        return Step(new, cu_seqlens, before, begins, columns)

    def _divide(self, num_tokens: int, lengths: Sequence[int] | None) -> list[int]:
        """How many of the tokens each sequence gets."""
        num_seqs = self.num_seqs
        if lengths is None:
            if num_tokens % num_seqs:
                raise ValueError(f"{num_tokens} tokens do not divide over {num_seqs} sequences; say how many each gets: lengths=[...]")
            return [num_tokens // num_seqs] * num_seqs
        new = self.table.counts(lengths)
        if sum(new) != num_tokens:
            raise ValueError(f"lengths must be {num_seqs} counts that add up to {num_tokens} tokens; got {new}")
        return new

    def _begin(self, name: str, layer: int, k, v, q, length: int, rope: dict[str, Any]) -> torch.Tensor | None:
        """The first append to a pool without pages, by the backend `name`."""
        k, v = (x.view(-1, length, *x.shape[1:]).transpose(1, 2) for x in (k, v))
        dense = rope
        if rope["rope_cos"] is not None:
            dense = rope | {part: rope[part].unflatten(0, (-1, length)) for part in ("rope_cos", "rope_sin")}
        self.layers[layer].pool = ops.run_from_dense(name, k, v, **dense, **self.layers[layer].format).pool
        self._pages[layer] = None
        if q is None:
            return None
        q = ops.apply_rope(q.unflatten(0, (-1, length)).transpose(1, 2), **dense, backend=self.backend)
        return q.transpose(1, 2).flatten(0, 1)

    def _trace_append(self, layer: int, k: torch.Tensor, lengths: Sequence[int] | None) -> None:
        """What `append` does first in compiled code: device work alone, so that this compiles once."""
        if self._static is None or lengths is not None:
            raise RuntimeError(
                "append in compiled code needs a cache with max_seqlen=..., which has all its memory from the start, and as many tokens in "
                "every sequence (lengths=None)"
            )
        if layer == 0:  # all layers have the same lengths
            self._static.assert_fits(self.table.cache_seqlens[0], k.shape[0] // self.num_seqs)
        self._static.known_empty, self._step = False, None
