"""The layers and sequences of a cache: everything except append and attention."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch

from ..checks import LARGEST, check_flags, is_whole
from ..errors import UsageError
from ..formats.codec import DEFAULT_KEY_DTYPE, KeyDtype
from ..formats.spec import PageSpec
from ..pages import KVPages
from ..params import BackendName, check_backend
from ..precompile.calls import Layer as KernelLayer
from ..scales import LayerScales
from .ahead import Ahead
from .layer import LayerPages
from .page_table import MOST_SEQUENCES, Change, PageTable, lasting, num_pages_of
from .step import StaticForm, Step, _is_capturing

MOST_LAYERS = 2**14  # each has tensors
MOST_LENGTHS = 2**26  # every layer has a length of each sequence
DROP = (
    "drop the tokens of this step: cache.truncate(cache.lengths); for an FP8Cache whose forward was interrupted, "
    "cache.reset()"
)


class Sequences:
    """The base class of `PagedKVCache`, which describes the arguments:
    its state, and operations that move sequences.
    """

    @lasting
    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
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
        scales: LayerScales | Sequence[LayerScales] | None = None,
        device: torch.device | str | None = None,
        backend: BackendName = "auto",
    ) -> None:
        self.spec = PageSpec.of(head_dim, key_dtype)
        if (refusal := self.spec.refusal) is not None:
            raise UsageError(refusal)
        sizes = {
            "num_kv_heads": num_kv_heads, "num_layers": num_layers, "num_seqs": num_seqs, "num_pages": num_pages,
            "max_seqlen": max_seqlen,
            "window": window,
        }  # fmt: skip
        if any(size is not None and (not is_whole(size) or not 1 <= size <= LARGEST) for size in sizes.values()):
            given = ", ".join(f"{name}={size}" for name, size in sizes.items() if size is not None)
            raise UsageError(f"{', '.join(sizes)} must be positive whole numbers; got {given} (the most: {LARGEST:,})")
        if num_seqs > MOST_SEQUENCES or num_layers > MOST_LAYERS or num_layers * num_seqs > MOST_LENGTHS:
            raise UsageError(
                f"num_seqs must be at most {MOST_SEQUENCES:,}, num_layers {MOST_LAYERS:,}, and their product "
                f"{MOST_LENGTHS:,}; got num_seqs={num_seqs:,} and num_layers={num_layers:,}"
            )
        check_backend(backend)
        if max_seqlen is not None:
            if window is not None:
                raise UsageError(
                    f"window={window} gives back pages while tokens are appended, which the static form "
                    f"(max_seqlen={max_seqlen}) cannot; leave out max_seqlen (num_pages= limits the memory), or keep "
                    f"all tokens and pass window to each attention"
                )
            if num_pages is not None:
                raise UsageError(f"max_seqlen decides how many pages there are; leave out num_pages={num_pages}")
            num_pages = num_seqs * num_pages_of(max_seqlen)
            if num_pages > LARGEST:
                raise UsageError(
                    f"num_seqs={num_seqs} and max_seqlen={max_seqlen} need {num_pages:,} pages, and there can be at "
                    f"most {LARGEST:,}"
                )
        self.num_kv_heads = num_kv_heads
        self.head_dim = self.spec.k_dim
        self.device = _device(device)
        self.key_dtype, self.backend, self.max_seqlen, self.window = key_dtype, backend, max_seqlen, window
        options = [
            _each(name, value, num_layers)
            for name, value in (
                ("rotate_keys", rotate_keys),
                ("k_mean", k_mean),
                ("v_mean", v_mean),
                ("scales", scales),
            )
        ]
        for rotated in options[0]:
            check_flags(rotate_keys=rotated)
        self.layers = [
            LayerPages(num_kv_heads, self.spec, rotated, k, v, own, self.device)
            for rotated, k, v, own in zip(*options, strict=True)
        ]
        if num_pages is not None:  # before the page table, whose lists on the host are as long
            for layer in self.layers:
                layer.fit(num_pages)
        self.table = PageTable(num_layers, num_seqs, num_pages, self.device, window)
        self._static = None if max_seqlen is None else StaticForm(max_seqlen)
        self._step: Step | None = None  # the last append
        self.ahead = Ahead()
        self._pages: list[KVPages | None] = [
            None
        ] * num_layers  # of each layer; valid until one of its tensors is replaced
        if max_seqlen is not None:
            self._reserve([max_seqlen] * num_seqs)
            self._mark_static()

    # State

    def pages(self, layer: int) -> KVPages:
        """The device state of one layer, for `fp8attn.attention` and `fp8attn.append`.

        It is valid until the next append or move of sequences, which may replace its tensors. The static form never
        replaces them.
        """
        pages, step = self._layer_pages(layer), None if torch.compiler.is_compiling() else self._step
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
        self._read_lengths()
        return tuple(self.table.lengths)

    def length_of(self, layer: int, seq: int = 0) -> int:
        """Number of tokens of a sequence that one layer holds. If the host does not know it, it waits for the GPU."""
        if self._static is not None and not self._static.counted:
            return int(self.table.cache_seqlens[layer][seq])
        if self._step is None or self._step.before is None or layer in self._step.pages:
            return self.table.lengths[seq]
        return self._step.before[seq]

    @property
    def is_complete(self) -> bool:
        """Whether all layers have appended the tokens of the last step."""
        return self._step is None or len(self._step.pages) == len(self.layers)

    @property
    def is_unseen(self) -> bool:
        """Whether compiled code or a CUDA graph appended the last tokens, of which the host knows nothing, or one is
        captured now.
        """
        static = self._static
        return static is not None and (not (static.counted or self._step) or _is_capturing(self.device))

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
        held = [
            x
            for layer in self.layers
            for x in (layer.pool, layer.format.stored_k_mean, layer.format.v_mean)
            if x is not None
        ]
        return sum(x.nbytes for x in (*held, self.table.page_table, *self.table.cache_seqlens))

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

    # Moving sequences

    def reserve(self, lengths: int | Sequence[int]) -> None:
        """Allocate pages for `lengths` tokens of each sequence, so that appends up to these lengths need nothing from
        the host.

        Shared pages that such an append would write to are copied, in every layer.

        Raises:
            ValueError: `lengths` is not one number of tokens for each sequence.
            OutOfPagesError: the pool has a fixed size and is too small. Nothing was changed.
        """
        counts = self.table.counts(lengths)
        self.check_complete("reserve")
        self._reserve(counts)

    def truncate(self, lengths: int | Sequence[int]) -> None:
        """Keep the first `lengths` tokens of each sequence, or all if it has fewer, and release the pages after them.

        Tokens that only some layers have appended are dropped. So `truncate` also ends a step that failed.

        Raises:
            ValueError: `lengths` is not one number of tokens for each sequence.
            RuntimeError: a page of the window before the last kept token was given back (`PageTable.check_held`).
                Nothing was changed.
        """
        counts, step = self.table.counts(lengths), self._step
        if step is not None and step.before is not None and step.missing(len(self.layers)):
            counts = list(map(min, counts, step.before))
        self._move(lambda table: table.truncate(counts))

    @lasting
    def reset(self) -> None:
        """Drop all tokens. The memory of growing pools is freed. Pools of fixed size stay allocated."""
        if self.table.grows:
            recording = self.table.recording
            self.table = PageTable(self.num_layers, self.num_seqs, None, self.device, self.window)
            self.table.recording = recording
            for layer in self.layers:
                layer.pool = None
            self._pages, self._step = [None] * len(self.layers), None
        else:
            self.truncate(0)

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
        self.check_complete("select")
        if self._static is not None and len(chosen) != self.num_seqs:
            raise ValueError(
                f"a cache with max_seqlen keeps its number of sequences, and select would change it from "
                f"{self.num_seqs} to {len(chosen)}; make the cache with the final number, or without max_seqlen"
            )
        self._move(lambda table: table.select(chosen))

    def copy(self, source: int, target: int, length: int | None = None) -> None:
        """Make sequence `target` a copy of the first `length` tokens of `source` (None: of all its tokens). The two
        share pages.

        Raises:
            ValueError: a sequence does not exist, `target` is `source`, or `source` has fewer tokens. Nothing was
                changed.
            RuntimeError: as `truncate`.
        """
        source, target = self.table.sequences([source, target])
        self.check_complete("copy")
        held = self.lengths[source]
        length = held if length is None else length
        if not is_whole(length) or not 0 <= length <= held:
            raise ValueError(f"sequence {source} has {held} tokens, so length must be 0 to {held}; got {length}")
        if source == target:
            raise ValueError(f"sequence {source} cannot be copied onto itself; use truncate to shorten it")
        self._move(lambda table: table.copy(source, target, length))

    def sync(self) -> None:
        """Read the lengths back from the device. Call it after other code appended to `pages` or changed its lengths.

        Raises:
            RuntimeError: as `truncate`.
        """
        if self._static is None:
            self.table.sync()
        else:
            self._static.read(self.table, complete=True)
        self._step = None

    @lasting
    def fill(self, lengths: list[int], tables: list[list[int]], pools: list[torch.Tensor]) -> None:
        """Fill an empty cache with tokens of other pools, one pool for each layer.

        Args:
            lengths: number of tokens of each sequence.
            tables: the pages of each sequence, as indices into `pools`, or -1 for pages left of the window.
            pools: `[num_pages, num_kv_heads, page_bytes]` uint8, for each layer.
        """
        self.table.truncate([0] * self.num_seqs)  # the static form has all pages already
        pages = self.table.fill(lengths, tables)
        for layer, pool in zip(self.layers, pools, strict=True):
            layer.write(pages, pool, self.table)
        self._move(lambda table: None)
        self._pages = [None] * len(self.layers)  # the means may also be new
        if self._static is not None:
            self._mark_static()

    def __copy__(self) -> Any:
        """Raise TypeError: a shallow copy would write to the pages of this cache."""
        raise TypeError("a shallow copy of a cache would share its pages and append to them: use copy.deepcopy(cache)")

    @lasting
    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = memo[id(self)] = type(self).__new__(type(self))
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return new

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_pages": [None] * len(self.layers)}  # tensors that share memory with others

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._static is not None:
            self._mark_static()

    def kernel_layers(self, backend: BackendName, dtype: str) -> set[KernelLayer]:
        """The different formats of the layers, for `precompile`. The number of query heads is not known here."""
        return {
            KernelLayer(
                self.num_kv_heads, self.num_kv_heads, self.head_dim, dtype=dtype, backend=backend,
                key_dtype=self.key_dtype,
                rotate_keys=layer.format.rotate, k_mean=layer.format.stored_k_mean is not None,
                v_mean=layer.format.v_mean is not None,
                static_scales=layer.scales is not None,
            )
            for layer in self.layers
        }  # fmt: skip

    # For all layers

    @lasting
    def _reserve(self, counts: list[int]) -> None:
        held = self._tensors()
        try:
            self.table.reserve(counts, self._apply)
            if self.table.window is not None:
                self.table.compact(self._take)
        finally:
            self._renew(held)  # also if some layers have a larger pool already and the next has no memory for it

    def _apply(self, change: Change) -> None:
        for layer in self.layers:
            layer.apply(change, self.table)

    def _take(self, pages: list[int]) -> None:
        """Replace the pool of every layer with copies of these pages of it."""
        index = self.table.to_device(pages, torch.long)
        taken = [None if layer.pool is None else layer.pool[index] for layer in self.layers]
        for layer, pool in zip(self.layers, taken, strict=True):
            layer.pool = pool

    @lasting
    def _move(self, move: Callable[[PageTable], None]) -> None:
        """Move sequences. The host does this, so the static form must know its lengths."""
        held = self._tensors()
        self._read_lengths()
        move(self.table)
        self._step = None
        self._renew(held)
        if self._static is None and self.table.tails:
            self._pages = [None] * len(self.layers)  # `pages` drops them first, if no append does
        if self._static is not None:
            self._reserve(
                [self._static.max_seqlen] * self.num_seqs
            )  # a step needs all pages again, and no shared page where it writes
            self._static.counted = not self._static.captured  # the host has written the lengths of every layer

    def _read_lengths(self) -> None:
        """Read the lengths back from the device if the host does not know them, which waits for the GPU."""
        if self._static is not None and not self._static.counted:
            self._static.read(self.table, complete=self._step is None or not self._step.missing(len(self.layers)))

    def _tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Tensors that are replaced when they are too small. Layers can replace their pools apart, if a step was
        interrupted.
        """
        return self.table.page_table, self.table.cache_seqlens[0], *(layer.pool for layer in self.layers)

    def _renew(self, held: tuple[torch.Tensor | None, ...]) -> None:
        """Make new `KVPages` if a tensor was replaced. Otherwise keep them, because compiled code and CUDA graphs refer
        to them.
        """
        if any(old is not new for old, new in zip(held, self._tensors(), strict=True)):
            self._pages = [
                None if layer.pool is None else layer.pages(self.table, self.table.cache_seqlens[index])
                for index, layer in enumerate(self.layers)
            ]

    def _mark_static(self) -> None:
        for layer in range(len(self.layers)):
            for x in self._layer_pages(layer).tensors:
                torch._dynamo.mark_static_address(x)  # CUDA graphs write into it in place

    def check_complete(self, what: str) -> None:
        """Raise ValueError if some layers have not appended the tokens of the step.
        The message names the call `what`.
        """
        if self._step is not None and (missing := self._step.missing(len(self.layers))):
            raise ValueError(
                f"{what} between the appends of a step: layers {missing} have not appended its tokens yet. Append them "
                f"first, or {DROP}"
            )

    def _layer_pages(self, layer: int) -> KVPages:
        held = self._layer(layer)
        pages = self._pages[layer]
        if pages is None:
            if self.table.tails:
                self._reserve(self.table.lengths)
            pages = self._pages[layer] = held.pages(self.table, self.table.cache_seqlens[layer])
        return pages

    def _layer(self, layer: int) -> LayerPages:
        if (type(layer) is not int and not is_whole(layer)) or not 0 <= layer < len(self.layers):
            raise ValueError(f"the cache has the layers 0 to {len(self.layers) - 1}; got {layer!r}")
        return self.layers[layer]


def _device(given: torch.device | str | None) -> torch.device:
    """The device of a cache, with its index."""
    kind = (torch.get_default_device() if given is None else torch.device(given)).type
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"pages are on a CPU or on a GPU that torch calls cuda; got device={str(given)!r}")
    return torch.empty(0, device=given).device


def _each(name: str, value: Any, num_layers: int) -> list[Any]:
    """The values of an option, one for each layer, from one value for all layers or a list."""
    if not isinstance(value, list | tuple):
        return [value] * num_layers
    if len(value) != num_layers:
        raise ValueError(f"{name} must be one value for all layers, or {num_layers} of them; got {len(value)}")
    return list(value)
