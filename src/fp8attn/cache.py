"""A paged 8-bit KV cache for one attention layer: which page belongs to whom.

`PagedKVCache` keeps the books on the host (lengths, page tables, reference counts) and the bytes on the device (`KVPages`). Pages are
shared between sequences that were copied from each other and copied when one of them writes (copy-on-write).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate

import torch

from . import ops
from .layout import DEFAULT_KEY_DTYPE, HEAD_DIMS, PAGE_SIZE, KVPages, key_type
from .rotation import rotate
from .scales import LayerScales


class OutOfPagesError(RuntimeError):
    """A cache of fixed size has too few free pages; nothing was changed."""


def _num_pages(length: int) -> int:
    return -(-length // PAGE_SIZE)


class PagedKVCache:
    """K and V of `num_seqs` sequences in 8 bits, of any lengths, of one attention layer.

    Half the bytes of BF16: a page of 128 tokens costs `256 * head_dim + 128` bytes a KV head.

    Args:
        num_kv_heads, head_dim: the layer's shape; head_dim is one of `layout.HEAD_DIMS`.
        num_seqs: sequences held side by side (the batch).
        num_pages: pages of 128 tokens held from the start, for good. None: the pool grows as tokens come.
        key_dtype: what keys are stored in, `"int8"` or `"e4m3"`; values are E4M3.
        rotate_keys: rotate keys before quantization (`rotation.rotate`); attention does not change, and rounding errors shrink.
        k_mean, v_mean: `[num_kv_heads, head_dim]` float32, constants subtracted from K (after RoPE) and V before quantization. Attention
            does not change; rounding errors shrink where an offset is several deviations. None: zero.
        scales: calibrated scales and means to use instead of the pages' own scales and these means; `key_dtype` and `rotate_keys` must be
            those that were calibrated.
        device: where the bytes live.
        backend: `"auto"`, `"triton"` or `"reference"`, for writing.
    Raises:
        ValueError: shapes that no kernel takes.
    """

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        *,
        num_seqs: int = 1,
        num_pages: int | None = None,
        key_dtype: str = DEFAULT_KEY_DTYPE,
        rotate_keys: bool = True,
        k_mean: torch.Tensor | None = None,
        v_mean: torch.Tensor | None = None,
        scales: LayerScales | None = None,
        device: torch.device | str | None = None,
        backend: str = "auto",
    ) -> None:
        if head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim must be one of {HEAD_DIMS}; got {head_dim}")
        if num_seqs < 1 or num_kv_heads < 1 or (num_pages is not None and num_pages < 1):
            raise ValueError(f"num_seqs, num_kv_heads and num_pages must be positive; got {num_seqs}, {num_kv_heads}, {num_pages}")
        if scales is not None:
            if scales.k_mean.shape != (num_kv_heads, head_dim):
                raise ValueError(
                    f"the scales are for (num_kv_heads, head_dim) = {tuple(scales.k_mean.shape)}, and the cache has "
                    f"{(num_kv_heads, head_dim)}; pass the scales of this layer of this model"
                )
            if (scales.key_dtype, scales.rotate_keys) != (key_dtype, rotate_keys):
                raise ValueError(
                    f"the scales are for key_dtype={scales.key_dtype!r}, rotate_keys={scales.rotate_keys}, and the cache has "
                    f"{key_dtype!r}, {rotate_keys}; pass the scales' own to the cache, or calibrate again"
                )
            if k_mean is not None or v_mean is not None:
                raise ValueError("scales bring their own means; leave out k_mean and v_mean")
            k_mean, v_mean = scales.k_mean, scales.v_mean
        for name, mean in (("k_mean", k_mean), ("v_mean", v_mean)):
            if mean is not None and mean.shape != (num_kv_heads, head_dim):
                raise ValueError(f"{name} must be [{num_kv_heads}, {head_dim}]; got {list(mean.shape)}")
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.device = torch.empty(0, device=device).device  # with its index
        self.backend = backend
        self._fixed = num_pages is not None
        self._scales = scales
        self.key_dtype, self.rotate_keys = key_dtype, rotate_keys
        if k_mean is not None:
            k_mean = self._to_device(rotate(k_mean.float()) if rotate_keys else k_mean.float())
        self._static = k_mean, None if v_mean is None else self._to_device(v_mean.float()), key_type(key_dtype), rotate_keys
        self._lengths = [0] * num_seqs
        self._tables: list[list[int]] = [[] for _ in range(num_seqs)]
        self._references = [0] * (num_pages or 0)
        self._free = list(reversed(range(num_pages or 0)))  # taken from the end: lowest page first
        self._stale: set[int] = set()  # free pages that have held tokens
        self._room = 0  # tokens that every sequence can surely take as it is; `reserve` finds out, what moves sequences forgets it
        if self._fixed:
            _ = self.pages  # held from the start

    # What it holds

    @cached_property
    def pages(self) -> KVPages:
        """What is on the device. A pool that grows has nothing there until its first append, or until somebody looks."""
        return self._make_pages(len(self._references))

    @property
    def num_seqs(self) -> int:
        return len(self._lengths)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens held by each sequence."""
        return tuple(self._lengths)

    @property
    def num_free_pages(self) -> int:
        """Pages of the pool that no sequence holds."""
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes on the device, all of them: pages (free ones too), means, tables."""
        return self.pages.nbytes

    def read(self, seq: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one sequence, dequantized: each `[length, num_kv_heads, head_dim]` in `dtype`.

        Raises:
            ValueError: there is no such sequence.
        """
        (seq,) = self._sequences([seq])
        return self.pages.read(seq, self._lengths[seq], dtype)

    # Tokens in

    def append(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        q: torch.Tensor | None = None,
        lengths: Sequence[int] | None = None,
        rope_cos: torch.Tensor | None = None,
        rope_sin: torch.Tensor | None = None,
        rope_interleaved: bool = False,
    ) -> torch.Tensor | None:
        """Quantize new tokens onto the sequences' ends; either all of them or, when this raises, none.

        Args:
            k, v: `[T, num_kv_heads, head_dim]`, the sequences' new tokens one after another.
            q: `[T, num_q_heads, head_dim]`, the same tokens' queries, to be rotated as K is.
            lengths: how many of the T tokens each sequence gets. None: all the same.
            rope_cos, rope_sin, rope_interleaved: rotate K first (`ops.append`).
        Returns:
            The rotated queries; None without `q`.
        Raises:
            ValueError: shapes or lengths that do not fit.
            OutOfPagesError: the pool is of fixed size and too small.
        """
        if lengths is None:
            if k.shape[0] % self.num_seqs:
                raise ValueError(f"{k.shape[0]} tokens do not divide over {self.num_seqs} sequences; say how many each gets: lengths=[...]")
            new = [k.shape[0] // self.num_seqs] * self.num_seqs
        else:
            new = self._counts(lengths)
            if sum(new) != k.shape[0]:
                raise ValueError(f"lengths must be {self.num_seqs} counts that add up to {k.shape[0]} tokens; got {new}")
        longest = max(new)
        if longest > self._room:
            name = ops.check_append(self, k, v, q, rope_cos, rope_sin, self.backend)
            if not self._references and self._scales is None and lengths is None and q is None:
                self._begin(name, k, v, longest, rope_cos, rope_sin, rope_interleaved)
                return None
            self.reserve([old + n for old, n in zip(self._lengths, new, strict=True)])
        cu_seqlens = None if lengths is None else self._to_device([0, *accumulate(new)], torch.int32)
        turned = ops.append(
            self.pages,
            k,
            v,
            q=q,
            cu_seqlens=cu_seqlens,
            max_seqlen=longest,
            rope_cos=rope_cos,
            rope_sin=rope_sin,
            rope_interleaved=rope_interleaved,
            static_scales=self._scales is not None,
            backend=self.backend,
        )
        self._lengths = [old + n for old, n in zip(self._lengths, new, strict=True)]
        self._room = max(0, self._room - longest)
        return turned

    def _begin(self, name: str, k, v, length: int, rope_cos, rope_sin, rope_interleaved: bool) -> None:
        """The first append to a pool without pages, `length` tokens a sequence, by the backend `name`: `ops.run_from_dense` makes the pages
        along with what is in them, in the order in which `reserve` would hand them out."""
        columns = _num_pages(length)
        k, v = (x.view(-1, length, *x.shape[1:]).transpose(1, 2) for x in (k, v))
        if rope_cos is not None:
            rope_cos, rope_sin = (x.unflatten(0, (-1, length)) for x in (rope_cos, rope_sin))
        k_mean, v_mean, key_dtype, rotate_keys = self._static
        self.pages = ops.run_from_dense(
            name, k, v, rope_cos=rope_cos, rope_sin=rope_sin, rope_interleaved=rope_interleaved, k_mean=k_mean, v_mean=v_mean,
            key_dtype=key_dtype, rotate_keys=rotate_keys,
        )  # fmt: skip
        self._references = [1] * (self.num_seqs * columns)
        self._tables = [list(range(seq * columns, (seq + 1) * columns)) for seq in range(self.num_seqs)]
        self._lengths = [length] * self.num_seqs
        self._room = columns * PAGE_SIZE - length

    def reserve(self, lengths: int | Sequence[int]) -> None:
        """Give each sequence the pages to hold `lengths` tokens, so that appends up to there need nothing from the host.

        Pages that a coming append would write and that another sequence shares are copied here.

        Raises:
            ValueError: lengths that are no counts, or not one for each sequence.
            OutOfPagesError: the pool is of fixed size and too small; nothing was changed.
        """
        lengths = self._counts(lengths)
        added = [max(0, _num_pages(length) - len(table)) for table, length in zip(self._tables, lengths, strict=True)]
        copied: list[tuple[int, int]] = []  # (sequence, column of its table)
        leaving: dict[int, int] = {}  # how many of a page's sharers get copies; the last to write keeps the page
        for seq, (table, length) in enumerate(zip(self._tables, lengths, strict=True)):
            if length > self._lengths[seq]:
                for column in range(self._lengths[seq] // PAGE_SIZE, min(len(table), _num_pages(length))):
                    page = table[column]
                    if self._references[page] - leaving.get(page, 0) > 1:
                        leaving[page] = leaving.get(page, 0) + 1
                        copied.append((seq, column))
        if any(added) or copied:
            self._hand_out(added, copied)
        self._room = min(
            _num_pages(length) * PAGE_SIZE - old if length > old else 0 for old, length in zip(self._lengths, lengths, strict=True)
        )

    def _hand_out(self, added: list[int], copied: list[tuple[int, int]]) -> None:
        """So many more pages for each sequence, and one of its own for each (sequence, column) of `copied`."""
        sources = [self._tables[seq][column] for seq, column in copied]
        taken = self._take(sum(added) + len(copied))
        targets = taken[: len(copied)]
        for (seq, column), page in zip(copied, targets, strict=True):
            self._references[self._tables[seq][column]] -= 1
            self._tables[seq][column] = page
        written, given = [(seq, column, column + 1) for seq, column in copied], len(copied)
        for seq, (table, count) in enumerate(zip(self._tables, added, strict=True)):
            written.append((seq, len(table), len(table) + count))
            table += taken[given : given + count]
            given += count
        if copied:
            index = self._to_device([targets, sources])
            self.pages.pool[index[0]] = self.pages.pool[index[1]]
        self._write_table(written)

    # Tokens out, and sequences moved about

    def truncate(self, lengths: int | Sequence[int]) -> None:
        """Keep each sequence's first `lengths` tokens (at most what it has) and let go of the pages behind them.

        Raises:
            ValueError: lengths that are no counts, or not one for each sequence.
        """
        lengths = self._counts(lengths)
        self._room = 0
        self._lengths = [min(old, new) for old, new in zip(self._lengths, lengths, strict=True)]
        for table, length in zip(self._tables, self._lengths, strict=True):
            self._release(table[_num_pages(length) :])
            del table[_num_pages(length) :]
        self._write_lengths()

    def reset(self) -> None:
        """Forget every token; the pool stays allocated."""
        self.truncate(0)

    def select(self, indices: Iterable[int] | torch.Tensor) -> None:
        """Replace the sequences by `[sequences[i] for i in indices]`: reorder beams, repeat prompts, drop what has finished.

        Copies share pages until one of them writes. The number of sequences becomes `len(indices)`.

        Args:
            indices: numbers of sequences; or a mask, one bool for each sequence, as torch indexes: those where it is true are kept.
        Raises:
            ValueError: no sequence, one that does not exist, or a mask of another length.
        """
        chosen = indices.tolist() if hasattr(indices, "tolist") else list(indices)
        if chosen and all(isinstance(i, bool) for i in chosen):
            if len(chosen) != self.num_seqs:
                raise ValueError(f"a mask of sequences must have {self.num_seqs} entries, one for each; got {len(chosen)}")
            chosen = [i for i, kept in enumerate(chosen) if kept]
        if not chosen:
            raise ValueError(f"indices must name at least one of the sequences 0 to {self.num_seqs - 1}; got none")
        chosen = self._sequences(chosen)
        self._room = 0
        tables = [list(self._tables[i]) for i in chosen]
        for table in tables:
            for page in table:
                self._references[page] += 1
        for table in self._tables:
            self._release(table)
        self._tables = tables
        self._lengths = [self._lengths[i] for i in chosen]
        index = torch.tensor(chosen, device=self.pages.device)
        names = ("page_table", "cache_seqlens")
        moved = {name: getattr(self.pages, name)[index] for name in names}
        if len(chosen) == self.pages.num_seqs:  # in place: compiled code and CUDA graphs hold these tensors
            for name, tensor in moved.items():
                getattr(self.pages, name).copy_(tensor)
        else:
            self.pages = replace(self.pages, **moved)

    def copy(self, source: int, target: int, length: int | None = None) -> None:
        """Make sequence `target` a copy of the first `length` tokens of `source` (all of them by default), sharing its pages.

        Raises:
            ValueError: a sequence that does not exist, one and the same, or more tokens than `source` has; nothing was changed.
        """
        source, target = self._sequences([source, target])
        length = self._lengths[source] if length is None else length
        if not 0 <= length <= self._lengths[source]:
            raise ValueError(f"sequence {source} has {self._lengths[source]} tokens, so length must be 0 to that; cannot copy {length}")
        if source == target:
            raise ValueError(f"sequence {source} cannot be copied onto itself; use truncate to shorten it")
        self._room = 0
        table = self._tables[source][: _num_pages(length)]
        for page in table:
            self._references[page] += 1
        self._release(self._tables[target])
        self._tables[target] = list(table)
        self._lengths[target] = length
        self._write_table([(target, 0, len(table))])
        self._write_lengths()

    def sync(self) -> None:
        """Read the lengths back from the device, after compiled code appended to `pages` (up to what was reserved)."""
        self._lengths = self.pages.cache_seqlens.tolist()
        self._room = 0

    def _sequences(self, numbers: list) -> list[int]:
        """The numbers of sequences, checked; negative ones do not count from the end."""
        try:
            found = [operator.index(number) for number in numbers]
        except TypeError:  # no integer
            found = [-1]
        if not all(0 <= number < self.num_seqs for number in found):
            raise ValueError(f"the cache has the sequences 0 to {self.num_seqs - 1}; got {', '.join(map(repr, numbers))}")
        return found

    def _counts(self, lengths: int | Sequence[int]) -> list[int]:
        """One count of tokens for each sequence; a single one is for all."""
        given = lengths.tolist() if hasattr(lengths, "tolist") else lengths
        try:
            counts = [operator.index(count) for count in given] if isinstance(given, Iterable) else [operator.index(given)] * self.num_seqs
        except TypeError:  # no integer
            counts = [-1]
        if len(counts) != self.num_seqs or min(counts) < 0:
            raise ValueError(f"lengths must be one count of tokens >= 0, or {self.num_seqs} of them, one for each sequence; got {given!r}")
        return counts

    # Books

    def _take(self, count: int) -> list[int]:
        """`count` free pages, V zeroed where stale bytes could be NaN, growing the pool if that is allowed."""
        short = count - len(self._free)
        if short > 0:
            if self._fixed:
                raise OutOfPagesError(
                    f"the cache needs {count} more pages of {PAGE_SIZE} tokens and has {len(self._free)} of {len(self._references)} free; "
                    "truncate or drop sequences, or make it with a larger num_pages (None grows without limit)"
                )
            self._grow(max(short, len(self._references) // 64))  # 1/64: a long decode copies its pool rarely, and wastes little
        left = len(self._free) - count
        taken = self._free[left:][::-1]
        del self._free[left:]
        for page in taken:
            self._references[page] = 1
        stale = self._stale.intersection(taken)
        if stale:
            self._stale -= stale
            self.pages.pool[self._to_device(list(stale))] = 0
        return taken

    def _release(self, table: list[int]) -> None:
        for page in table:
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)
                self._stale.add(page)

    def _make_pages(self, count: int) -> KVPages:
        k_mean, v_mean, key_dtype, rotate_keys = self._static
        pages = KVPages.empty(
            count, self.num_kv_heads, self.head_dim, self.num_seqs, 1, self.device, key_dtype=key_dtype, rotate_keys=rotate_keys,
            k_mean=k_mean, v_mean=v_mean,
        )  # fmt: skip
        if self._scales is not None:
            self._use_static_scales(pages)
        return pages

    def _grow(self, count: int) -> None:
        size = len(self._references)
        if "pages" in vars(self):
            pool = self.pages.pool
            new = pool.new_zeros(size + count, *pool.shape[1:])
            new[:size] = pool
            self.pages = replace(self.pages, pool=new)
            if self._scales is not None:
                self._use_static_scales(self.pages)
        else:
            self.pages = self._make_pages(count)
        self._references += [0] * count
        self._free = list(reversed(range(size, size + count))) + self._free

    def _use_static_scales(self, pages: KVPages) -> None:
        for scale, calibrated in zip((pages.k_scale, pages.v_scale), self._scales.page_scales, strict=True):
            scale.copy_(self._to_device(calibrated))

    def _write_table(self, written: list[tuple[int, int, int]]) -> None:
        """Bring columns of the tables, given as (sequence, start, stop), to the device; the table grows wider where it must."""
        table, width = self.pages.page_table, max(map(len, self._tables))
        if width > table.shape[1]:
            # Entries past a sequence's length must name a valid page: zero does.
            if sum(stop - start for _, start, stop in written) == sum(map(len, self._tables)):  # all there are
                rows = [row + [0] * (width - len(row)) for row in self._tables]
                self.pages = replace(self.pages, page_table=self._to_device(rows, torch.int32))
                return
            table = torch.nn.functional.pad(table, (0, width - table.shape[1]))
            self.pages = replace(self.pages, page_table=table)
        places = [seq * table.shape[1] + column for seq, start, stop in written for column in range(start, stop)]
        if places:
            pages = [page for seq, start, stop in written for page in self._tables[seq][start:stop]]
            places, pages = self._to_device([places, pages])
            table.view(-1)[places] = pages.int()

    def _write_lengths(self) -> None:
        self.pages.cache_seqlens.copy_(self._to_device(self._lengths, torch.int32))

    def _to_device(self, values: list | torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """`values` on the device, without waiting for what the GPU has to do before."""
        return torch.as_tensor(values, dtype=dtype).to(self.device, non_blocking=True)
