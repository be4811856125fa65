"""`PagedKVCache`: K and V of a model's layers in 8-bit pages."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

import torch

from .. import ops
from .._torch_ops import resolve
from ..checks import LARGEST, check_flags, is_whole
from ..errors import UsageError
from ..formats.codec import DEFAULT_KEY_DTYPE, KeyDtype
from ..formats.spec import PageSpec
from ..pages import KVPages
from ..params import BackendName, check_backend, options_of
from ..scales import LayerScales
from . import storage
from .ahead import Ahead, Attention
from .layer import LayerPages, lasting
from .page_table import LARGER, MOST_SEQUENCES, PageTable, is_capturing, num_pages_of
from .step import Steps

MOST_LAYERS = 2**14  # each has tensors
MOST_LENGTHS = 2**26  # every layer has a length of each sequence


class PagedKVCache:
    """K and V of all layers of a model in 8 bits, for `num_seqs` sequences of any lengths.

    It needs half the bytes of BF16: a page of 128 tokens has `256 * head_dim + 128` bytes for each KV head (`+ 256` at
    512). One page table serves all layers. The layers append the same tokens one after another. The first layer's
    append reserves pages for all.

    A cache is not thread-safe.

    Args:
        num_kv_heads, head_dim: the shape of every layer; head_dim is one of `formats.spec.HEAD_DIMS`, or a `PageSpec`:
            `PagedKVCache(1, PageSpec.latent(512, 64))` caches latents (MLA).
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
            not change attention. A bool, or a list with one for each layer.
        k_mean, v_mean: `[num_kv_heads, head_dim]` float32, subtracted from K (after RoPE) and V before quantization.
            This makes rounding errors smaller if a mean is several standard deviations, and does not change attention.
            None: zero. Or a list with one for each layer.
        factor: `[num_kv_heads, rank / 128]` float32, how large each block of 128 channels of a latent is beside the
            others. None: one. Or a list with one for each layer.
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

    @lasting
    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int | PageSpec,
        *,
        num_layers: int = 1,
        num_seqs: int = 1,
        num_pages: int | None = None,
        max_seqlen: int | None = None,
        window: int | None = None,
        key_dtype: KeyDtype = DEFAULT_KEY_DTYPE,
        rotate_keys: bool | Sequence[bool] = True,
        k_mean: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
        v_mean: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
        factor: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
        scales: LayerScales | Sequence[LayerScales] | None = None,
        device: torch.device | str | None = None,
        backend: BackendName = "auto",
    ) -> None:
        self.spec = PageSpec.of(head_dim, key_dtype)
        if (refusal := self.spec.refusal) is not None:
            raise UsageError(refusal)
        num_pages = _check_sizes(num_kv_heads, num_layers, num_seqs, num_pages, max_seqlen, window)
        check_backend(backend)
        self.num_kv_heads, self.head_dim, self.device = num_kv_heads, self.spec.k_dim, _device(device)
        self.key_dtype: KeyDtype = self.spec.k.name
        self.backend, self.max_seqlen, self.window = backend, max_seqlen, window
        options = {
            "rotate_keys": rotate_keys, "k_mean": k_mean, "v_mean": v_mean, "factor": factor, "scales": scales,
        }  # fmt: skip
        of_layers = [_each(name, value, num_layers) for name, value in options.items()]
        for rotated in of_layers[0]:
            check_flags(rotate_keys=rotated)
        self.layers = [
            LayerPages(num_kv_heads, self.spec, rotated, k, v, blocks, of_layer, self.device)
            for rotated, k, v, blocks, of_layer in zip(*of_layers, strict=True)
        ]
        if num_pages is not None:  # before the page table, whose lists on the host are as long
            for layer in self.layers:
                layer.fit(num_pages)
        self.table = PageTable(self.layers, num_seqs, num_pages, self.device, window, max_seqlen)
        self.ahead = Ahead(self.table)
        self.steps = Steps(self.table)
        self._mark_static()

    # State

    def pages(self, layer: int) -> KVPages:
        """The device state of one layer, for `fp8attn.attention` and `fp8attn.append`.

        It is valid until the next append, `reserve` or move of sequences, which may replace its tensors. The static
        form never replaces them.
        """
        pages, step = self._pages(layer), None if torch.compiler.is_compiling() else self.steps.last
        return pages if step is None or not step.ragged else pages.after(step.lengths)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_seqs(self) -> int:
        return self.table.num_seqs

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each sequence. After steps of compiled code or of a CUDA graph, the static form reads
        them back from the device, which waits for the GPU."""
        self.table.know_lengths(self.steps.is_complete)
        return tuple(self.table.lengths)

    def length_of(self, layer: int, seq: int = 0) -> int:
        """Number of tokens of a sequence that one layer holds. If the host does not know it, it waits for the GPU."""
        if not self.table.counted:
            return int(self.table.cache_seqlens[layer][seq])
        step = self.steps.last
        lengths = self.table.lengths if step is None or step.before is None or layer in step.pages else step.before
        return lengths[seq]

    @property
    def is_unseen(self) -> bool:
        """Whether compiled code or a CUDA graph appended the last tokens, of which the host knows nothing, or one is
        captured now.
        """
        unseen = not self.table.counted and self.steps.last is None
        return self.max_seqlen is not None and (unseen or is_capturing(self.device))

    @property
    def num_pages(self) -> int:
        """Number of pages in each layer's pool."""
        return self.table.num_pages

    @property
    def num_free_pages(self) -> int:
        """Number of pages in each layer's pool that no sequence has."""
        return len(self.table.free)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors on the device: pages (also free ones), means, page table and lengths."""
        tensors = [x for layer in self.layers for x in (layer.pool, *layer.format.tensors) if x is not None]
        return sum(x.nbytes for x in (*tensors, self.table.page_table, *self.table.cache_seqlens))

    def __repr__(self) -> str:
        lengths = "" if self.max_seqlen is not None else f"lengths=({', '.join(map(str, self.table.lengths))}), "
        static = "" if self.max_seqlen is None else f"max_seqlen={self.max_seqlen}, "
        return (
            f"PagedKVCache({self.num_layers} layers, {self.num_seqs} seqs, {static}{lengths}{self.num_pages} pages, "
            f"{self.nbytes / 2**20:.1f} MiB, {self.key_dtype} keys, {self.device})"
        )

    def read(self, layer: int, seq: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantize one sequence, with the tokens that this layer has appended. With a window: its last tokens, as
        many as the window has, or one less after others were dropped. (The next query sees one less.)

        Returns:
            K and V, each `[length, num_kv_heads, head_dim]` in `dtype`.
        Raises:
            ValueError: there is no such layer or sequence.
        """
        pages = self.pages(layer)
        (seq,) = self.table.sequences([seq])
        length = self.length_of(layer, seq)
        return pages.read(seq, length, dtype, self.table.first_held(seq, length))

    # Append and attention

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor, *, lengths: Sequence[int] | None = None) -> KVPages:
        """Quantize one layer's new tokens and write them at the ends of their sequences.

        All layers append the same tokens, one layer after another, before a layer appends the next tokens. If it
        raises, this layer has appended nothing. Call it again, or drop the tokens of the layers before it:
        `cache.truncate(cache.lengths)`.

        Args:
            layer: the layer's number.
            k, v: `[T, num_kv_heads, head_dim]`, all new tokens, sequence after sequence; K after RoPE. Or latents and
                their keys with RoPE, as `fp8attn.append` takes them.
            lengths: number of new tokens of each sequence, T in all, the same in all layers. None: T / num_seqs for
                each.
        Returns:
            The pages that attention of these tokens reads, until the next append, `reserve` or move of sequences.
        Raises:
            ValueError: shapes or lengths do not fit, or the layer has appended these tokens already.
            OutOfPagesError: the pool has a fixed size and is too small.
            RuntimeError: a static cache is full. Nothing was changed. Only where the host does not know the lengths,
                after steps of compiled code or of a CUDA graph, a GPU finds it, and the error is raised later, when the
                host waits for the GPU.
        """
        of_layer = self._layer(layer)
        static_scales = of_layer.scales is not None
        if torch.compiler.is_compiling():
            return self._trace_append(layer, k, v, lengths, static_scales=static_scales)
        target = ops.check_append(self.spec, self.num_kv_heads, self.device, k, v, self.backend)
        step = self.steps.join(layer, k.shape[0], lengths)
        try:
            if not step.pages:
                name = target if isinstance(target, str) else target.name
                self.ahead.begin(name, k.dtype, step)
            table = self.table
            pages = of_layer.pages(table.page_table, table.cache_seqlens[layer], len(table.references))
            if step.columns is not None:
                pages = pages.with_tables(pages.page_table[:, : step.columns], pages.cache_seqlens)
            options = step.options._replace(static_scales=True) if static_scales else step.options
            ops.run_append(target, pages, k, v, options)
        except BaseException:
            if not step.pages:  # no layer has the tokens
                if step.before is not None:
                    self.table.truncate(step.before)
                self.steps.last = None
            raise
        step.pages[layer] = pages
        return pages

    def _appended(self, layer: int) -> KVPages:
        """The pages of one layer after its last append, which its attention reads."""
        if torch.compiler.is_compiling():
            return self._pages(layer)
        step = self.steps.last
        pages = None if step is None else step.pages.get(layer)
        if pages is None:
            self._layer(layer)
            raise ValueError(
                f"layer {layer} has appended no tokens since the cache was made, reserve was called, its sequences "
                f"were moved, or another layer began a step: call append(layer, k, v) first. To attend without an "
                f"append, call fp8attn.attention(q, cache.pages(layer), cu_seqlens_q=..., max_seqlen_q=...) with the "
                f"number of queries of each sequence"
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
                order.
            causal, softmax_scale, window, softcap, sinks, leftpad_k, return_lse, exact, batch_invariant: as
                `fp8attn.attention` takes them. In a cache with a window, `window` is at most that one, and None means
                that one.
        Returns:
            `out [T, num_q_heads, head_dim]` (of latents `[T, num_q_heads, rank]`) in q's dtype, and with `return_lse`
            also the LSE `[T, num_q_heads]` float32.
        Raises:
            ValueError: q has another number of tokens than the last append, or the layer has appended nothing.
        """
        pages = self._appended(layer)
        if self.window is not None:
            if window is not None and is_whole(window) and window > self.window:
                raise ValueError(
                    f"window is {window}, and this cache has the pages of a window of {self.window}: make it with "
                    f"window={window}"
                )
            window = self.window if window is None else window
        if torch.compiler.is_compiling():  # it appends equal numbers of tokens
            return ops.attention(
                q, pages, causal=causal, softmax_scale=softmax_scale, window=window, softcap=softcap, sinks=sinks,
                leftpad_k=leftpad_k, return_lse=return_lse, exact=exact, batch_invariant=batch_invariant,
                backend=self.backend,
            )  # fmt: skip
        step = self.steps.last
        assert step is not None  # `_appended` has raised
        if isinstance(q, torch.Tensor) and q.shape[0] != step.num_tokens:
            raise ValueError(
                f"q must have a row for each of the {step.num_tokens} tokens of the last append (lengths "
                f"{step.lengths}); got {tuple(q.shape)}. For other queries call fp8attn.attention(q, "
                f"cache.pages(layer), cu_seqlens_q=..., max_seqlen_q=...)"
            )
        ops.check_queries(q, pages)
        options = causal, softmax_scale, window, softcap, sinks, leftpad_k, return_lse, exact, batch_invariant
        key = q.dtype, q.shape[1], options
        params = step.params.get(key)
        if params is None:
            params = step.params[key] = ops.params_of(q, pages, step.cu_seqlens, step.longest, options)
        if layer not in self.ahead.attended:
            changing = options_of(
                window=window, softcap=softcap, sinks=sinks, exact=exact, batch_invariant=batch_invariant
            )
            self.ahead.attend(layer, step, Attention(q.shape[1], changing, causal, leftpad_k is not None))
        out, lse = ops.run_attention(resolve(self.backend, q, self.spec.name), q, pages, params)
        return (out, lse) if return_lse else out

    # Moving sequences

    def reserve(self, lengths: int | Sequence[int]) -> None:
        """Allocate pages for `lengths` tokens of each sequence, so that appends up to these lengths need nothing from
        the host.

        Shared pages that such an append would write to are copied, in every layer. Attend to the last tokens before: it
        gives back what only their queries see.

        Raises:
            ValueError: `lengths` is not one number of tokens for each sequence, or more than max_seqlen.
            OutOfPagesError: the pool has a fixed size and is too small. Nothing was changed.
        """
        counts = self.table.counts(lengths)
        if self.max_seqlen is not None and max(counts) > self.max_seqlen:  # other tensors than compiled code has
            raise ValueError(f"lengths must be at most max_seqlen={self.max_seqlen}; got {max(counts)}; {LARGER}")
        self.steps.check_complete("reserve")
        self.table.reserve(counts)
        self.steps.last = None

    def truncate(self, lengths: int | Sequence[int]) -> None:
        """Keep the first `lengths` tokens of each sequence, or all if it has fewer, and release the pages after them.

        Tokens that only some layers have appended are dropped. So `truncate` also ends a step that failed.

        Raises:
            ValueError: `lengths` is not one number of tokens for each sequence.
            RuntimeError: a page of the window before the last kept token was given back (`PageTable.check_held`).
                Nothing was changed.
        """
        counts, step = self.table.counts(lengths), self.steps.last
        if step is not None and step.before is not None and step.missing:
            counts = list(map(min, counts, step.before))
        self.table.truncate(counts)
        self.steps.last = None

    def reset(self) -> None:
        """Drop all tokens. The memory of growing pools is freed. Pools of fixed size stay allocated."""
        self.truncate(0)
        self.table.compact()

    def select(self, indices: Iterable[int] | torch.Tensor) -> None:
        """Replace the sequences with `[sequences[i] for i in indices]`, to reorder beams, repeat prompts or drop
        finished sequences.

        Copies share pages until one of them writes. The number of sequences becomes `len(indices)`. The static form
        must keep its number.

        Args:
            indices: numbers of sequences; or a mask with one bool for each sequence, True for those to keep. A tensor
                on a GPU is read back, which waits for the GPU.
        Raises:
            ValueError: `indices` is empty, names a sequence that does not exist, or is a mask of another length.
        """
        chosen = self.table.indices(indices)
        self.steps.check_complete("select")
        if self.max_seqlen is not None and len(chosen) != self.num_seqs:
            raise ValueError(
                f"a static cache keeps its number of sequences, and this would change it from {self.num_seqs} to "
                f"{len(chosen)}: make it with the final number, or without max_seqlen (FP8Cache: max_cache_len)"
            )
        self.table.select(chosen)
        self.steps.last = None

    def copy(self, source: int, target: int, length: int | None = None) -> None:
        """Make sequence `target` a copy of the first `length` tokens of `source` (None: of all its tokens). The two
        share pages.

        Raises:
            ValueError: a sequence does not exist, `target` is `source`, or `source` has fewer tokens. Nothing was
                changed.
            RuntimeError: as `truncate`.
        """
        source, target = self.table.sequences([source, target])
        self.steps.check_complete("copy")
        most = self.lengths[source]
        length = most if length is None else length
        if not is_whole(length) or not 0 <= length <= most:
            raise ValueError(f"sequence {source} has {most} tokens, so length must be 0 to {most}; got {length}")
        if source == target:
            raise ValueError(f"sequence {source} cannot be copied onto itself; use truncate to shorten it")
        self.table.copy(source, target, length)
        self.steps.last = None

    def sync(self) -> None:
        """Read the lengths back from the device, and drop tokens that only some layers have. Call it after other code
        appended to `pages` or changed its lengths.

        Raises:
            RuntimeError: as `truncate`.
        """
        self.table.sync()
        self.steps.last = None

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
        storage.write(path, *self.contents(seqs))

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
        return cls.from_contents(
            tensors, layers, path, max_seqlen=max_seqlen, num_pages=num_pages, device=device, backend=backend
        )

    def contents(
        self, seqs: Sequence[int] | None = None, numbers: Iterable[int] | None = None
    ) -> tuple[dict[str, torch.Tensor], storage.Layers]:
        """The tensors and the layers of a file with these sequences (None: all). The layers get these numbers (None: 0,
        1, ...).
        """
        self.steps.check_complete("save")
        self.table.know_lengths()
        seqs = range(self.num_seqs) if seqs is None else self.table.indices(seqs)
        return storage.pack(self.table, seqs, range(self.num_layers) if numbers is None else numbers)

    @classmethod
    def from_contents(
        cls,
        tensors: dict[str, torch.Tensor],
        layers: storage.Layers,
        path: str | Path,
        *,
        max_seqlen: int | None,
        device: torch.device | str | None,
        backend: BackendName,
        num_pages: int | None = None,
    ) -> PagedKVCache:
        """A cache of these layers of a file; see `load`."""
        saved = storage.unpack(tensors, layers, path, max_seqlen)
        cache = cls(**saved.options, max_seqlen=max_seqlen, num_pages=num_pages, device=device, backend=backend)
        for layer, static in zip(cache.layers, saved.static, strict=True):
            layer.use_tensors(*static)  # the same bits, because K's mean is not rotated again
        cache.table.fill(saved.lengths, saved.tables, saved.pools)
        cache._mark_static()  # the means are new
        return cache

    def __copy__(self) -> NoReturn:
        """Raise TypeError: a shallow copy would write to the pages of this cache."""
        raise TypeError("a shallow copy of a cache would share its pages and append to them: use copy.deepcopy(cache)")

    @lasting
    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = memo[id(self)] = object.__new__(type(self))
        vars(new).update(copy.deepcopy(vars(self), memo))
        return new

    # A step

    def _trace_append(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int] | None, static_scales: bool
    ) -> KVPages:
        """`append` in compiled code. It is work of the device only, so it compiles once."""
        if self.max_seqlen is None or lengths is not None:
            raise RuntimeError(
                "append in compiled code needs a cache with max_seqlen=..., which has all its memory from the start, "
                "and one number of tokens for all sequences (lengths=None)"
            )
        if layer == 0:
            self.table.assert_room(k.shape[0] // self.num_seqs)
        self.table.counted, self.steps.last = False, None
        pages = self._pages(layer)
        ops.append(pages, k, v, static_scales=static_scales, backend=self.backend)
        return pages

    # Layers

    def _layer(self, layer: int) -> LayerPages:
        if (type(layer) is not int and not is_whole(layer)) or not 0 <= layer < len(self.layers):
            raise ValueError(f"the cache has the layers 0 to {len(self.layers) - 1}; got {layer!r}")
        return self.layers[layer]

    def _pages(self, layer: int) -> KVPages:
        table, pages = self.table, self._layer(layer)
        if table.tails:  # tokens past the end of a sequence
            table.reserve(table.lengths)
        lengths = table.cache_seqlens[layer]
        if torch.compiler.is_compiling() and pages.pool is not None:  # it would guard on an object that is kept
            return KVPages.trusted(pages.pool, table.page_table, lengths, pages.format)
        return pages.pages(table.page_table, lengths, table.num_pages)

    def _mark_static(self) -> None:
        """Dynamo may keep the addresses of the static form's tensors: CUDA graphs write into them in place."""
        for layer in range(self.num_layers) if self.max_seqlen is not None else ():
            for x in self._pages(layer).tensors:
                torch._dynamo.mark_static_address(x)


def _check_sizes(
    num_kv_heads: int, num_layers: int, num_seqs: int, num_pages: int | None, max_seqlen: int | None,
    window: int | None,
) -> int | None:  # fmt: skip
    """The number of pages of each pool; None: it grows.

    Raises:
        UsageError: a size is no positive whole number or too large, or two contradict each other.
    """
    sizes = {
        "num_kv_heads": num_kv_heads, "num_layers": num_layers, "num_seqs": num_seqs, "num_pages": num_pages,
        "max_seqlen": max_seqlen, "window": window,
    }  # fmt: skip
    if any(size is not None and (not is_whole(size) or not 1 <= size <= LARGEST) for size in sizes.values()):
        values = ", ".join(f"{name}={size}" for name, size in sizes.items() if size is not None)
        raise UsageError(f"{', '.join(sizes)} must be positive whole numbers; got {values} (the most: {LARGEST:,})")
    if num_seqs > MOST_SEQUENCES or num_layers > MOST_LAYERS or num_layers * num_seqs > MOST_LENGTHS:
        raise UsageError(
            f"num_seqs must be at most {MOST_SEQUENCES:,}, num_layers {MOST_LAYERS:,}, and their product "
            f"{MOST_LENGTHS:,}; got num_seqs={num_seqs:,} and num_layers={num_layers:,}"
        )
    if max_seqlen is None:
        return num_pages
    if window is not None:
        raise UsageError(
            f"window={window} gives back pages while tokens are appended, which the static form "
            f"(max_seqlen={max_seqlen}) cannot; leave out max_seqlen (num_pages= limits the memory), or keep all "
            f"tokens and pass window to each attention"
        )
    if num_pages is not None:
        raise UsageError(f"max_seqlen decides how many pages there are; leave out num_pages={num_pages}")
    if (num_pages := num_seqs * num_pages_of(max_seqlen)) > LARGEST:
        raise UsageError(
            f"num_seqs={num_seqs} and max_seqlen={max_seqlen} need {num_pages:,} pages, and there can be at most "
            f"{LARGEST:,}"
        )
    return num_pages


def _device(device: torch.device | str | None) -> torch.device:
    """The device of a cache, with its index."""
    kind = (torch.get_default_device() if device is None else torch.device(device)).type
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"pages are on a CPU or on a GPU that torch calls cuda; got device={str(device)!r}")
    return torch.empty(0, device=device).device


def _each(name: str, value: Any, num_layers: int) -> list[Any]:
    """The values of an option, one for each layer, from one value for all layers or a list."""
    if not isinstance(value, list | tuple):
        return [value] * num_layers
    if len(value) != num_layers:
        raise ValueError(f"{name} must be one value for all layers, or {num_layers} of them; got {len(value)}")
    return list(value)
