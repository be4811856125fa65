"""`KVPages`, the pages of one layer on the device."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from .checks import check_flags, check_mean, check_size, check_tensor
from .errors import UsageError
from .formats import latent
from .formats.codec import DEFAULT_KEY_DTYPE, KeyDtype
from .formats.kv_format import KVFormat
from .formats.page_layout import PAGE_SIZE, k_of, latent_of, scales_of, v_of, v_rows
from .formats.rotation import rotate_back
from .formats.spec import PageSpec


@dataclass(frozen=True, eq=False)
class KVPages:
    """The device state of one layer's cache: the tensors that kernels read and write.

    A page of one KV head is one run of bytes: K `[128, head_dim]`, V `[8, head_dim, 16]` with tokens in `V_ORDER`, and
    a header of 128 bytes, which holds K's scale, V's scale (float32), a mark of serving engines and zeros; or latents,
    as `formats/page_layout.py` says. The bytes depend only on the page's tokens and on the static format and means. So
    a page is copied, shared, saved or moved by its bytes.

    Kernels take the addresses of these tensors. So each must have the shape and dtype below, be contiguous (the rows of
    the page table may have a stride), and be on the same device. Bytes past a sequence's length are unspecified in K
    and finite in V (0 * NaN would be NaN).

    Attributes:
        pool: `[num_pages, num_kv_heads, format.layout.nbytes]` uint8, with an address that is a multiple of 16 bytes.
        page_table: `[num_seqs, max_pages]` int32, the pages of each sequence in order. Entries past its length name any
            valid page.
        cache_seqlens: `[num_seqs]` int32, number of tokens of each sequence.
        format: what the bytes mean: codecs, rotation, static means.
    Raises:
        ValueError: a tensor has another shape, dtype, device or stride; the message says which one is required.
    """

    pool: torch.Tensor
    page_table: torch.Tensor
    cache_seqlens: torch.Tensor
    format: KVFormat

    # The lengths of the last append. `PagedKVCache` sets them after a ragged append, so that attention refuses to split
    # queries evenly.
    ragged: ClassVar[tuple[int, ...] | None] = None

    def __post_init__(self) -> None:
        # Dynamo traces this with checked tensors, or with proxies to write its graph.
        if torch.compiler.is_compiling() or isinstance(self.pool, torch.fx.Proxy):
            return
        format = self.format
        if not isinstance(format, KVFormat):
            raise ValueError(
                f"format must be a KVFormat; got {type(format).__name__} (KVPages.empty and fp8attn.from_dense make "
                f"one)"
            )
        for name in ("pool", "page_table", "cache_seqlens"):
            if not isinstance(getattr(self, name), torch.Tensor):
                raise ValueError(f"{name} must be a tensor; got {type(getattr(self, name)).__name__}")
        spec, nbytes = format.spec, format.layout.nbytes
        if self.pool.dim() != 3 or self.pool.shape[2] != nbytes or self.page_table.dim() != 2:
            raise ValueError(
                f"pool must be [num_pages, num_kv_heads, {nbytes}] for head_dim {self.head_dim}, and page_table "
                f"[num_seqs, max_pages]; got {tuple(self.pool.shape)} and {tuple(self.page_table.shape)}"
            )
        check_tensor(self.pool, "pool", self.pool.shape, torch.uint8, self.device)
        check_tensor(self.page_table, "page_table", self.page_table.shape, torch.int32, self.device, contiguous=False)
        check_tensor(self.cache_seqlens, "cache_seqlens", (self.num_seqs,), torch.int32, self.device)
        names = "stored_k_mean", "v_mean", "factor"
        for name, x, width in zip(names, format.tensors, spec.static_widths.values(), strict=True):
            if x is not None:
                check_tensor(x, name, (self.num_kv_heads, width), torch.float32, self.device)
        # The fake tensors of a compilation have no address.
        if type(self.pool) is torch.Tensor and self.pool.data_ptr() % 16:
            raise ValueError(
                "pool must begin at a multiple of 16 bytes; this one begins inside another tensor: clone it"
            )
        if self.page_table.shape[1] > 1 and self.page_table.stride(1) != 1:
            raise ValueError(
                f"page_table must have its rows contiguous; got strides {self.page_table.stride()}: call .contiguous()"
            )

    @classmethod
    def trusted(cls, pool: Any, page_table: Any, cache_seqlens: Any, format: KVFormat) -> KVPages:
        """`KVPages` of fields that this package made or has checked. Without the checks this is 15 us faster."""
        if torch.compiler.is_compiling():  # Dynamo traces the constructor, which then checks nothing
            return cls(pool, page_table, cache_seqlens, format)
        pages = object.__new__(cls)
        vars(pages).update(pool=pool, page_table=page_table, cache_seqlens=cache_seqlens, format=format)
        return pages

    def with_tables(self, page_table: torch.Tensor, cache_seqlens: torch.Tensor) -> KVPages:
        """These pages with other tables, which are not checked, as those of other sequences. (`dataclasses.replace`
        checks them.)
        """
        return KVPages.trusted(self.pool, page_table, cache_seqlens, self.format)

    def with_pool(self, pool: torch.Tensor) -> KVPages:
        """Other pages of this format and these sequences."""
        return KVPages.trusted(pool, self.page_table, self.cache_seqlens, self.format)

    def after(self, lengths: list[int]) -> KVPages:
        """These pages after an append of `lengths` tokens, which differ."""
        pages = self.with_pool(self.pool)
        vars(pages)["ragged"] = tuple(lengths)
        return pages

    @classmethod
    def empty(
        cls,
        num_pages: int,
        num_kv_heads: int,
        head_dim: int | PageSpec,
        num_seqs: int,
        max_pages: int,
        device: torch.device | str | None = None,
        *,
        key_dtype: KeyDtype = DEFAULT_KEY_DTYPE,
        rotate_keys: bool = True,
        k_mean: torch.Tensor | None = None,
        v_mean: torch.Tensor | None = None,
        factor: torch.Tensor | None = None,
    ) -> KVPages:
        """Pages without tokens: all bytes and lengths are zero.

        Sequence b has the pages `b * max_pages` to `(b + 1) * max_pages - 1` in order. If the pool has fewer pages,
        every entry of the page table is 0: write the pages of each sequence into `page_table` before the first append.

        Args:
            num_pages: pages in the pool.
            num_kv_heads, head_dim: the shape of K and V; head_dim is one of `formats.spec.HEAD_DIMS`, or a `PageSpec`,
                as `PageSpec.latent(512, 64)` for latents (MLA), which have one KV head.
            num_seqs, max_pages: number of sequences, and of pages that each may have: the shape of the page table.
            device: the device of all tensors.
            key_dtype: the format of keys, as `PagedKVCache` takes it.
            rotate_keys: whether K is stored rotated.
            k_mean, v_mean: `[num_kv_heads, head_dim]` float32, means of K (after RoPE, not rotated) and of V. None:
                zero. Latents have only `v_mean [num_kv_heads, rank]`.
            factor: `[num_kv_heads, rank / 128]` float32, positive: how large each block of 128 channels of a latent is
                beside the others. None: one.
        Raises:
            ValueError: no kernel takes the head_dim or key_dtype, or a mean has another shape, dtype or device.
        """
        spec = PageSpec.of(head_dim, key_dtype)
        if (refusal := spec.refusal) is not None:
            raise UsageError(refusal)
        for size, name in (
            (num_pages, "num_pages"),
            (num_kv_heads, "num_kv_heads"),
            (num_seqs, "num_seqs"),
            (max_pages, "max_pages"),
        ):
            check_size(size, name, 0)
        check_flags(rotate_keys=rotate_keys)
        device = torch.empty(0, device=device).device  # with its index
        for (name, width), x in zip(spec.static_widths.items(), (k_mean, v_mean, factor), strict=True):
            check_mean(x, name, (num_kv_heads, width), device)
        format = KVFormat.of(spec, key_dtype, rotate_keys, k_mean, v_mean, factor)
        entries = torch.arange(num_seqs * max_pages, dtype=torch.int32, device=device).view(num_seqs, max_pages)
        return cls(
            torch.zeros(num_pages, num_kv_heads, format.layout.nbytes, dtype=torch.uint8, device=device),
            entries if entries.numel() <= num_pages else entries.zero_(),
            torch.zeros(num_seqs, dtype=torch.int32, device=device),
            format,
        )

    def __repr__(self) -> str:
        format = self.format
        return (
            f"KVPages({self.num_seqs} seqs, {self.num_pages} pages, {self.num_kv_heads} KV heads of {self.head_dim}, "
            f"{self.nbytes / 2**20:.1f} MiB, {format.k.name} keys, {'rotated' if format.rotate else 'not rotated'}, "
            f"{self.device})"
        )

    def __deepcopy__(self, memo: dict) -> KVPages:
        """Copies of the tensors, with the attributes that `torch.compile` set on them."""
        pool, table, lengths = (copy.deepcopy(x, memo) for x in (self.pool, self.page_table, self.cache_seqlens))
        return KVPages.trusted(pool, table, lengths, copy.deepcopy(self.format, memo))

    @property
    def num_pages(self) -> int:
        return self.pool.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.pool.shape[1]

    @property
    def head_dim(self) -> int:
        """Channels of queries and of K."""
        return self.format.spec.k_dim

    @property
    def spec(self) -> PageSpec:
        """What a page holds."""
        return self.format.spec

    @property
    def num_seqs(self) -> int:
        return self.page_table.shape[0]

    @property
    def device(self) -> torch.device:
        return self.pool.device

    @property
    def k(self) -> torch.Tensor:
        """`[num_pages, num_kv_heads, 128, head_dim]` of K's codes, a view of the pool."""
        return k_of(self.pool, self.format.layout, self.format.k.dtype)

    @property
    def v(self) -> torch.Tensor:
        """`[num_pages, num_kv_heads, 8, head_dim, 16]` float8_e4m3fn, a view of the pool."""
        return v_of(self.pool, self.format.layout, self.format.v.dtype)

    @property
    def k_scale(self) -> torch.Tensor:
        """`[num_pages, num_kv_heads]` float32, a view of the pool. NaN: an INT8 page got a NaN (docs/numerics.md)."""
        return scales_of(self.pool)[:, :, 0]

    @property
    def v_scale(self) -> torch.Tensor:
        """`[num_pages, num_kv_heads]` float32, powers of two, a view of the pool."""
        return scales_of(self.pool)[:, :, 1]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors, means included."""
        return [x for x in (self.pool, self.page_table, self.cache_seqlens, *self.format.tensors) if x is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, whether their pages hold tokens or not."""
        return sum(x.nbytes for x in self.tensors)

    def bounds(self, cu_seqlens: torch.Tensor | None, longest: int) -> list[int]:
        """The index of each sequence's first row in a batch, then the number of all rows. Without `cu_seqlens`, every
        sequence has `longest`. It waits for the GPU.
        """
        return [seq * longest for seq in range(self.num_seqs + 1)] if cu_seqlens is None else cu_seqlens.tolist()

    def read(
        self, seq: int, length: int, dtype: torch.dtype = torch.float32, first: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Tokens `first` to `length - 1` of sequence `seq`, dequantized.

        Returns:
            K (rotated back) and V, each `[length - first, num_kv_heads, head_dim]` in `dtype`; or the latents and their
            keys with RoPE, of `spec.widths` channels. They are computed in float64 if `dtype` is float64, otherwise in
            float32.
        Raises:
            ValueError: there is no such sequence, or the page table has no pages for so many tokens.
        """
        if not 0 <= seq < self.num_seqs:
            raise ValueError(f"the pages hold the sequences 0 to {self.num_seqs - 1}; got {seq}")
        if not 0 <= length <= PAGE_SIZE * self.page_table.shape[1]:
            raise ValueError(
                f"length is {length}, and page_table has pages for {PAGE_SIZE * self.page_table.shape[1]} tokens of a "
                f"sequence"
            )
        ids = self.page_table[seq, first // PAGE_SIZE : -(-length // PAGE_SIZE)].long()
        tokens = slice(first % PAGE_SIZE, length - first // PAGE_SIZE * PAGE_SIZE)
        k, v = (self.dequantize(which, ids[None], torch.promote_types(dtype, torch.float32))[0] for which in ("k", "v"))
        return k[:, tokens].transpose(0, 1).contiguous().to(dtype), v[:, tokens].transpose(0, 1).contiguous().to(dtype)

    def dequantize(self, which: Literal["k", "v"], ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """K (rotated back) or V of whole pages, as work of the device only.

        Args:
            which: `"k"` or `"v"`. Of latents: the latent itself, or the key with RoPE.
            ids: `[B, N]` int64, numbers of pages.
            dtype: of the arithmetic and of the result, float32 or float64.
        Returns:
            `[B, num_kv_heads, N * 128, head_dim]`. Tokens past the end of a sequence are unspecified.
        """
        format = self.format
        if format.spec.v_in_k:
            latents, rope, scales = latent_of(self.pool, format.layout)
            if which == "v" and not format.spec.rope_in_codes:
                return rope[ids].to(dtype).transpose(1, 2).flatten(2, 3)
            y = (latents if which == "k" else rope)[ids].to(dtype) * scales[ids].to(dtype)[..., None]
            y = y.transpose(1, 2).flatten(2, 3)
            if which == "v":
                return rotate_back(y)
            mean, factor = (x if x is None else x[:, None] for x in (format.v_mean, format.factor))
            return latent.restore(y, mean, factor)
        codes, scale, mean = (
            (self.k, self.k_scale, format.stored_k_mean) if which == "k" else (self.v, self.v_scale, format.v_mean)
        )
        # FP8 tensors are indexed as bytes, because a CPU has no gather for FP8.
        x = codes.view(torch.uint8)[ids].view(codes.dtype).to(dtype)
        x = (x if which == "k" else v_rows(x)) * scale[ids].to(dtype)[..., None, None]
        x = x.transpose(1, 2).flatten(2, 3)
        x = x if mean is None else x + mean.to(dtype)[:, None]
        return rotate_back(x) if which == "k" and format.rotate else x
