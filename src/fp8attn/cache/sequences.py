"""The layers of a cache and the sequences they hold: everything but appending and attending."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..layout import DEFAULT_KEY_DTYPE, HEAD_DIMS, KVPages
from ..scales import LayerScales
from .layer import LayerPages
from .page_table import PageTable, num_pages_of
from .step import StaticForm, Step


class Sequences:
    """What `PagedKVCache` holds, and how its sequences are moved; see there for the arguments."""

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        *,
        num_layers: int = 1,
        num_seqs: int = 1,
        num_pages: int | None = None,
        max_seqlen: int | None = None,
        key_dtype: str = DEFAULT_KEY_DTYPE,
        rotate_keys: bool | Sequence[bool] = True,
        k_mean: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
        v_mean: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
        scales: LayerScales | Sequence[LayerScales] | None = None,
        device: torch.device | str | None = None,
        backend: str = "auto",
    ) -> None:
        if head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim must be one of {HEAD_DIMS}; got {head_dim}")
        sizes = {"num_kv_heads": num_kv_heads, "num_layers": num_layers, "num_seqs": num_seqs, "num_pages": num_pages}
        sizes["max_seqlen"] = max_seqlen
        if any(size is not None and size < 1 for size in sizes.values()):
            given = ", ".join(f"{name}={size}" for name, size in sizes.items() if size is not None)
            raise ValueError(f"{', '.join(sizes)} must be positive; got {given}")
        if max_seqlen is not None:
            if num_pages is not None:
                raise ValueError(f"max_seqlen decides how many pages there are; leave out num_pages={num_pages}")
            num_pages = num_seqs * num_pages_of(max_seqlen)
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.device = torch.empty(0, device=device).device  # with its index
        self.key_dtype, self.backend, self.max_seqlen = key_dtype, backend, max_seqlen
        options = [
            _each(name, value, num_layers)
            for name, value in (("rotate_keys", rotate_keys), ("k_mean", k_mean), ("v_mean", v_mean), ("scales", scales))
        ]
        self.layers = [LayerPages(num_kv_heads, head_dim, key_dtype, *given, self.device) for given in zip(*options, strict=True)]
        self.table = PageTable(num_layers, num_seqs, num_pages, self.device)
        self._static = None if max_seqlen is None else StaticForm(max_seqlen)
        self._step: Step | None = None  # the last append
        self._pages: list[KVPages | None] = [None] * num_layers  # of each layer, as long as its tensors stay the same
        if num_pages is not None:
            for layer in self.layers:
                layer.fit(num_pages)
        if max_seqlen is not None:
            self._reserve([max_seqlen] * num_seqs)
            self._mark_static()

    # What it holds

    def pages(self, layer: int) -> KVPages:
        """The device state of one layer, for `fp8attn.attention` and `fp8attn.append`. It is valid until the cache changes: appends and
        moves may replace its tensors, but for the static form, whose tensors stay."""
        pages = self._pages[layer] if 0 <= layer < len(self.layers) else None
        if pages is None:
            pages = self._pages[layer] = self._layer(layer).pages(self.table, self.table.cache_seqlens[layer])
        return pages

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_seqs(self) -> int:
        return self.table.num_seqs

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence. The static form reads them from the device, and waits for it."""
        if self.max_seqlen is not None:
            self.table.sync()
        return tuple(self.table.lengths)

    @property
    def num_pages(self) -> int:
        """Pages of each layer's pool."""
        return self.table.num_pages

    @property
    def num_free_pages(self) -> int:
        """Pages of the pool that no sequence holds."""
        return len(self.table.free)

    @property
    def nbytes(self) -> int:
        """Bytes on the device, all of them: pages (free ones too), means, the table, lengths."""
        held = [x for layer in self.layers for x in (layer.pool, layer.k_mean, layer.v_mean) if x is not None]
        return sum(x.nbytes for x in (*held, self.table.page_table, *self.table.cache_seqlens))

    def __repr__(self) -> str:
        lengths = "" if self.max_seqlen is not None else f"lengths=({', '.join(map(str, self.table.lengths))}), "
        static = "" if self.max_seqlen is None else f"max_seqlen={self.max_seqlen}, "
        return (
            f"PagedKVCache({self.num_layers} layers, {self.num_seqs} seqs, {static}{lengths}{self.num_pages} pages, "
            f"{self.nbytes / 2**20:.1f} MiB, {self.key_dtype} keys, {self.device})"
        )

    def read(self, layer: int, seq: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one sequence, dequantized: each `[length, num_kv_heads, head_dim]` in `dtype`.

        Raises:
            ValueError: there is no such layer or sequence.
        """
        pages = self.pages(layer)
        (seq,) = self.table.sequences([seq])
        return pages.read(seq, self.lengths[seq], dtype)

    # Sequences moved

    def reserve(self, lengths: int | Sequence[int]) -> None:
        """Give each sequence the pages to hold `lengths` tokens, so that appends up to there need nothing from the host.

        Pages that a coming append would write and that another sequence shares are copied here, in every layer.

        Raises:
            ValueError: lengths that are no counts, or not one for each sequence.
            OutOfPagesError: the pool is of fixed size and too small; nothing was changed.
        """
        counts = self.table.counts(lengths)
        self.check_complete("reserve")
        self._reserve(counts)

    def truncate(self, lengths: int | Sequence[int]) -> None:
        """Keep each sequence's first `lengths` tokens (at most what it has) and release the pages after them.

        Tokens that only some of the layers have appended are dropped: so it also ends a step that failed.

        Raises:
            ValueError: lengths that are no counts, or not one for each sequence.
        """
        counts, step = self.table.counts(lengths), self._step
        if step is not None and self._static is None and step.missing(len(self.layers)):
            self.table.lengths = list(step.before)
        self._move(lambda table: table.truncate(counts))

    def reset(self) -> None:
        """Forget every token. Pools that grow are freed; those of fixed size stay allocated."""
        if self.table.grows:
            self.table = PageTable(len(self.layers), self.num_seqs, None, self.device)
            for layer in self.layers:
                layer.pool = None
            self._pages, self._step = [None] * len(self.layers), None
        else:
            self.truncate(0)

    def select(self, indices: Iterable[int] | torch.Tensor) -> None:
        """Replace the sequences by `[sequences[i] for i in indices]`: reorder beams, repeat prompts, drop what has finished.

        Copies share pages until one of them writes. The number of sequences becomes `len(indices)`; the static form's must stay.

        Args:
            indices: numbers of sequences; or a mask, one bool for each sequence, as torch indexes: those where it is true are kept. A
                tensor on a GPU is read back, which waits for it.
        Raises:
            ValueError: no sequence, one that does not exist, or a mask of another length.
        """
        chosen = self.table.indices(indices)
        self.check_complete("select")
        if self._static is not None and len(chosen) != self.num_seqs:
            raise ValueError(
                f"a cache with max_seqlen keeps its number of sequences, and select would change it from {self.num_seqs} to "
                f"{len(chosen)}; make the cache with the final number, or without max_seqlen"
            )
        self._move(lambda table: table.select(chosen))

    def copy(self, source: int, target: int, length: int | None = None) -> None:
        """Make sequence `target` a copy of the first `length` tokens of `source` (all of them by default), sharing its pages.

        Raises:
            ValueError: a sequence that does not exist, one and the same, or more tokens than `source` has; nothing was changed.
        """
        source, target = self.table.sequences([source, target])
        self.check_complete("copy")
        held = self.lengths[source]
        length = held if length is None else length
        if not 0 <= length <= held:
            raise ValueError(f"sequence {source} has {held} tokens, so length must be 0 to that; cannot copy {length}")
        if source == target:
            raise ValueError(f"sequence {source} cannot be copied onto itself; use truncate to shorten it")
        self._move(lambda table: table.copy(source, target, length))

    def sync(self) -> None:
        """Read the lengths back from the device, after other code appended to `pages` or wrote to them."""
        self.table.sync()
        self._step = None
        if self._static is not None:
            self._static.moved(self.table.lengths)

    def fill(self, lengths: list[int], tables: list[list[int]], pools: list[torch.Tensor]) -> None:
        """Replace all tokens by those of other pools, one a layer.

        Args:
            lengths: tokens of each sequence.
            tables: the pages of each sequence, as numbers in `pools`.
            pools: `[num_pages, num_kv_heads, page_bytes]` uint8, for each layer.
        """
        self.table.truncate([0] * self.num_seqs)
        pages = self.table.fill(lengths, tables)
        for layer, pool in zip(self.layers, pools, strict=True):
            layer.write(pages, pool, self.table)
        self._move(lambda table: None)
        self._pages = [None] * len(self.layers)  # means may be new, too
        if self._static is not None:
            self._mark_static()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_pages": [None] * len(self.layers)}  # tensors that share memory with others

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._static is not None:
            self._mark_static()

    # For all layers

    def _reserve(self, counts: list[int]) -> None:
        held = self._tensors()
        change = self.table.reserve(counts)
        if change is not None:
            for layer in self.layers:
                layer.apply(change, self.table)
            self._renew(held)

    def _move(self, move: Callable[[PageTable], None]) -> None:
        """Move sequences. This is work of the host, so the static form reads its lengths back first."""
        held = self._tensors()
        if self._static is not None:
            self.table.sync()
        move(self.table)
        self._step = None
        self._renew(held)
        if self._static is not None:
            self._reserve([self._static.max_seqlen] * self.num_seqs)  # steps find every page again, and none shared that they write
            self._static.moved(self.table.lengths)

    def _tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Tensors that are replaced when they are too small; those of the layers are replaced together."""
        return self.table.page_table, self.table.cache_seqlens[0], self.layers[0].pool

    def _renew(self, held: tuple[torch.Tensor | None, ...]) -> None:
        """Make `pages` anew if a tensor was replaced: otherwise they stay, because compiled code and CUDA graphs hold them."""
        if any(old is not new for old, new in zip(held, self._tensors(), strict=True)):
            self._pages = [
                None if layer.pool is None else layer.pages(self.table, self.table.cache_seqlens[index])
                for index, layer in enumerate(self.layers)
            ]

    def _mark_static(self) -> None:
        for layer in range(len(self.layers)):
            for x in self.pages(layer).state:
                if isinstance(x, torch.Tensor):
                    torch._dynamo.mark_static_address(x)  # CUDA graphs write into it in place

    def check_complete(self, what: str) -> None:
        """Raise ValueError, which names the call `what`, between the appends of a step."""
        if self._step is not None and (missing := self._step.missing(len(self.layers))):
            raise ValueError(
                f"{what} between the appends of a step: layers {missing} have not appended its tokens yet. Append them first, or drop the "
                "tokens of this step: cache.truncate(cache.lengths)"
            )

    def _layer(self, layer: int) -> LayerPages:
        if not 0 <= layer < len(self.layers):
            raise ValueError(f"the cache has the layers 0 to {len(self.layers) - 1}; got {layer}")
        return self.layers[layer]


def _each(name: str, value: Any, num_layers: int) -> list[Any]:
    """An option of every layer: one for all of them, or a list of one for each."""
    if not isinstance(value, list | tuple):
        return [value] * num_layers
    if len(value) != num_layers:
        raise ValueError(f"{name} must be one value for all layers, or {num_layers} of them; got {len(value)}")
    return list(value)
