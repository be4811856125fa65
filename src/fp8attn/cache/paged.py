"""`PagedKVCache`: K and V of a model's layers in 8-bit pages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from .. import ops
from .._torch_ops import resolve
from ..checks import check_is_tensor, is_whole
from ..pages import KVPages
from ..params import Append, BackendName, options_of
from . import storage
from .ahead import Attention
from .page_table import lasting
from .sequences import DROP, Sequences
from .step import Step


class PagedKVCache(Sequences):
    """K and V of all layers of a model in 8 bits, for `num_seqs` sequences of any lengths.

    It needs half the bytes of BF16: a page of 128 tokens has `256 * head_dim + 128` bytes for each KV head (`+ 256` at
    512). One page table serves all layers. The layers append the same tokens one after another. The first layer's
    append reserves pages for all.

    A cache is not thread-safe.

    Args:
        num_kv_heads, head_dim: the shape of every layer; head_dim is one of `formats.spec.HEAD_DIMS`.
        num_layers: number of layers. `append` and `attention` take the number of a layer, from 0.
        num_seqs: number of sequences (the batch).
        num_pages: pages of 128 tokens that each layer allocates at the start. Its pool never grows. None: the pools
            grow with the tokens.
        max_seqlen: tokens of the longest sequence, for the static form. Each sequence has all its pages from the start,
            tensors keep their addresses, and a step needs nothing from the host, so it can be compiled or captured in a
            CUDA graph. None: not static.
        window: number of tokens that a query sees, its own included, in every attention. Before a step, each sequence
            gives back the pages that no later query sees, so that the memory after a prompt is that of the window. Not
            for the static form. None: all tokens are kept.
        key_dtype: the format of keys, `"int8"` or `"e4m3"`. Values are E4M3.
        rotate_keys: rotate keys before quantization (`rotation.rotate`). This makes rounding errors smaller and does
            not change attention.
            A bool, or a list with one for each layer.
        k_mean, v_mean: `[num_kv_heads, head_dim]` float32, subtracted from K (after RoPE) and V before quantization.
            This makes rounding errors smaller if a mean is several standard deviations, and does not change attention.
            None: zero. Or a list with one for each layer.
        scales: calibrated scales and means. They replace the pages' own scales, `k_mean` and `v_mean`. `key_dtype` and
            `rotate_keys` must be the calibrated ones. Or a list with one for each layer.
        device: the device of the pages.
        backend: `"auto"`, `"hopper"`, `"triton"` or `"reference"`.
    Attributes:
        layers: each layer's pool, static means and scales.
        table: the pages of each sequence, for all layers.
    Raises:
        ValueError: no kernel takes the shape, or the options contradict each other.
    """

    # Append and attention

    def append(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        lengths: Sequence[int] | None = None,
    ) -> None:
        """Quantize one layer's new tokens and write them at the ends of their sequences.

        All layers append the same tokens, one layer after another, before a layer appends the next tokens. If it
        raises, this layer has appended nothing. Call it again, or drop the tokens of the layers before it:
        `cache.truncate(cache.lengths)`.

        Args:
            layer: the layer's number.
            k, v: `[T, num_kv_heads, head_dim]`, all new tokens, sequence after sequence; K after RoPE.
            lengths: number of new tokens of each sequence, T in all, the same in all layers. None: T / num_seqs for
                each.
        Raises:
            ValueError: shapes or lengths do not fit, or the layer has appended these tokens already.
            OutOfPagesError: the pool has a fixed size and is too small.
            RuntimeError: a static cache is full. Nothing was changed. Only where the host does not know the lengths,
                after steps of compiled code or of a CUDA graph, a GPU finds it, and the error is raised later, when the
                host waits for the GPU.
        """
        static_scales = self._layer(layer).scales is not None
        if torch.compiler.is_compiling():
            self._trace_append(layer, k, v, lengths, static_scales=static_scales, backend=self.backend)
            return
        name = ops.check_append(self, k, v, self.backend)
        step = self._join(layer, k.shape[0], lengths)
        try:
            if not step.pages:
                self.ahead.begin(self, name, k.dtype, step)
            # In a step that begins the pages, the lengths count its tokens already.
            how = Append(step.cu_seqlens, step.longest, static_scales, advance=not step.begins)
            if step.begins and how.is_plain:
                self._begin(name, layer, k, v, step.longest)
                pages = self._layer_pages(layer)
            else:
                pages = self._pages[layer] or self._layer_pages(layer)
                if step.columns is not None:
                    pages = pages.with_tables(pages.page_table[:, : step.columns], pages.cache_seqlens)
                ops.run_append(name, pages, k, v, how)
        except BaseException:
            if not step.pages:  # no layer has the tokens
                self._abandon(step)
            raise
        step.pages[layer] = pages

    def appended(self, layer: int) -> KVPages:
        """The pages of one layer after its last append, which its attention reads."""
        if torch.compiler.is_compiling():
            return self._layer_pages(layer)
        pages = None if self._step is None else self._step.pages.get(layer)
        if pages is None:
            self._layer(layer)
            raise ValueError(
                f"layer {layer} has appended no tokens since the cache was made, its sequences were moved, or another "
                f"layer began a step: call append(layer, k, v) first. To attend without an append, call "
                f"fp8attn.attention(q, cache.pages(layer), cu_seqlens_q=..., max_seqlen_q=...) with the number of "
                f"queries of each sequence"
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
        return_lse: bool = False,
        exact: bool = False,
        batch_invariant: bool = False,
    ) -> torch.Tensor | Any:  # a pair with `return_lse`; a union with it would make every caller tell them apart
        """Attention of the queries of the last append over the layer's K and V.

            out = softmax(mask(softcap(softmax_scale * q k^T))) v

        Args:
            layer: the layer's number.
            q: `[T, num_q_heads, head_dim]`, the queries of the T tokens that the layer appended last, in the same
            order. causal, softmax_scale, window, softcap, sinks, leftpad_k, return_lse, exact, batch_invariant: as
                `fp8attn.attention` takes them. In a cache with a window, `window` is at most that one, and None means
                that one.
        Returns:
            `out [T, num_q_heads, head_dim]` in q's dtype, and with `return_lse` also the LSE `[T, num_q_heads]`
            float32.
        Raises:
            ValueError: q has another number of tokens than the last append, or the layer has appended nothing.
        """
        pages = self.appended(layer)
        if self.window is not None:
            if window is not None and is_whole(window) and window > self.window:
                raise ValueError(
                    f"window is {window}, and this cache has the pages of a window of {self.window}: make it with "
                    f"window={window}"
                )
            window = self.window if window is None else window
        options = causal, softmax_scale, window, softcap, sinks, leftpad_k, return_lse, exact, batch_invariant
        if torch.compiler.is_compiling():
            return ops.attention(
                q, pages, causal=causal, softmax_scale=softmax_scale, window=window, softcap=softcap, sinks=sinks,
                leftpad_k=leftpad_k,
                return_lse=return_lse, exact=exact, batch_invariant=batch_invariant, backend=self.backend,
            )  # fmt: skip
        step = self._step
        assert step is not None  # `appended` has raised
        if not isinstance(q, torch.Tensor):
            check_is_tensor(q, "q", "[T, num_q_heads, head_dim]")
        if q.shape[0] != step.num_tokens:
            raise ValueError(
                f"q must have a row for each of the {step.num_tokens} tokens of the last append (lengths "
                f"{step.lengths}); got {tuple(q.shape)}. For other queries call fp8attn.attention(q, "
                f"cache.pages(layer), cu_seqlens_q=..., max_seqlen_q=...)"
            )
        ops.check_queries(q, pages)
        call = q.dtype, q.shape[1], *options
        if call not in step.calls:
            step.calls[call] = (
                resolve(self.backend, q, self.spec.name),
                ops.params_of(q, pages, step.cu_seqlens, step.longest, *options),
            )
        name, params = step.calls[call]
        if layer not in self.ahead.attended:
            changing = options_of(
                window=window, softcap=softcap, sinks=sinks, exact=exact, batch_invariant=batch_invariant
            )
            self.ahead.attend(self, layer, q, step, Attention(q.shape[1], changing, causal, leftpad_k is not None))
        out, lse = ops.run_attention(name, q, pages, params)
        return (out, lse) if return_lse else out

    # Files

    def save(self, path: str | Path, seqs: Sequence[int] | None = None) -> None:
        """Write sequences to a safetensors file: the bytes of their pages, their lengths, and the format, means and
        scales.

        Args:
            path: the file. The folders above it are made.
            seqs: numbers of the sequences, in the order that `load` gives them. None: all.
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
        backend: BackendName = "auto",
    ) -> PagedKVCache:
        """Make a cache of the sequences that `save` wrote, with the same bytes, format, means and scales.

        Args:
            path: the file. Only tensors and strings are read; nothing in it is executed.
            max_seqlen, num_pages, device, backend: as `PagedKVCache` takes them.
        Raises:
            UsageError: the file does not exist, is damaged or is not from `save`; or its sequences are longer than
                max_seqlen.
            OutOfPagesError: its sequences need more than num_pages.
        """
        tensors, layers, _ = storage.read(path)
        return storage.unpack(
            cls, tensors, layers, path, max_seqlen=max_seqlen, num_pages=num_pages, device=device, backend=backend
        )

    # A step

    def _join(self, layer: int, num_tokens: int, lengths: Sequence[int] | None) -> Step:
        """The step of this append of `layer`: the one that other layers have begun, or a new one."""
        step = self._step
        if step is None or len(step.pages) == len(self.layers):
            step = self._step = self._new_step(num_tokens, lengths)
        elif layer in step.pages:
            raise ValueError(
                f"layer {layer} appends a second time before layers {step.missing(len(self.layers))} appended once: "
                f"all layers append the same tokens, one after another. To go on, {DROP}"
            )
        elif num_tokens != step.num_tokens or (
            (lengths is not None or step.cu_seqlens is not None) and self._divide(num_tokens, lengths) != step.lengths
        ):
            raise ValueError(
                f"layer {layer} appends {num_tokens} tokens{'' if lengths is None else f' (lengths {lengths})'}, and "
                f"the layers before it appended {step.num_tokens} (lengths {step.lengths}): a step has the same "
                f"lengths in all layers"
            )
        return step

    def _new_step(self, num_tokens: int, lengths: Sequence[int] | None) -> Step:
        """Begin a step: reserve pages for all layers, and update the lengths on the host."""
        table, new = self.table, self._divide(num_tokens, lengths)
        cu_seqlens = None if lengths is None else table.to_device([0, *accumulate(new)], torch.int32)
        longest, columns, begins = max(new), None, False
        before, counted = table.lengths, True
        if self._static is not None:
            counted = self._static.begin(table, new, cu_seqlens)
            columns = self._static.columns(before, longest) if counted else None
        elif longest <= table.headroom:
            table.advance(new, longest)
        elif not table.num_pages and lengths is None and self._begins_dense:
            begins = True
            table.begin(longest)
            self._pages = [None] * len(self.layers)
        else:
            self._reserve([old + n for old, n in zip(before, new, strict=True)])
            table.advance(new, longest)
        return Step(new, cu_seqlens, before if counted else None, begins, columns)

    def _abandon(self, step: Step) -> None:
        """End a step whose first layer has failed."""
        if step.before is not None:
            self.truncate(step.before)
        self._step = None

    @property
    def _begins_dense(self) -> bool:
        """Whether `ops.run_from_dense` may make the first pages: no layer has static scales."""
        return all(layer.scales is None for layer in self.layers)

    def _divide(self, num_tokens: int, lengths: Sequence[int] | None) -> list[int]:
        """The number of new tokens of each sequence."""
        num_seqs = self.num_seqs
        if lengths is None:
            if num_tokens % num_seqs:
                raise ValueError(
                    f"{num_tokens} tokens cannot be divided evenly among {num_seqs} sequences; give each sequence's "
                    f"number: lengths=[...]"
                )
            return [num_tokens // num_seqs] * num_seqs
        new = self.table.counts(lengths)
        if sum(new) != num_tokens:
            raise ValueError(f"lengths must be {num_seqs} counts that add up to {num_tokens} tokens; got {new}")
        return new

    @lasting
    def _begin(self, name: BackendName, layer: int, k: torch.Tensor, v: torch.Tensor, length: int) -> None:
        """The first append of a layer without pages, with the resolved backend `name`."""
        k, v = (x.view(-1, length, *x.shape[1:]).transpose(1, 2) for x in (k, v))
        self.layers[layer].pool = ops.run_from_dense(name, k, v, self.layers[layer].format).pool
        self._pages[layer] = None

    def _trace_append(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int] | None, **options: Any
    ) -> None:
        """`append` in compiled code. It is work of the device only, so it compiles once."""
        if self._static is None or lengths is not None:
            raise RuntimeError(
                "append in compiled code needs a cache with max_seqlen=..., which has all its memory from the start, "
                "and one number of tokens for all sequences (lengths=None)"
            )
        if layer == 0:  # all layers have the same lengths
            self._static.assert_fits(self.table.cache_seqlens[0], k.shape[0] // self.num_seqs)
        self._static.counted, self._step = False, None
        ops.append(self._layer_pages(layer), k, v, **options)
