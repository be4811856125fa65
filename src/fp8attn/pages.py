"""`KVPages`, the pages of one layer on the device."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from .checks import check_flags, check_mean, check_size, check_tensor
from .formats.codec import DEFAULT_KEY_DTYPE, FP8, KEY_TYPES, KeyDtype, key_name, key_type
from .formats.page_layout import (
    HEAD_DIMS,
    HEADER,
    PAGE_SIZE,
    PageLayout,
    head_dim_of,
    k_of,
    nan_in_k_of,
    scales_of,
    unpack_k,
    unpack_v,
    v_of,
)
from .formats.rotation import rotate, rotate_back


def stored_mean(k_mean: torch.Tensor | None, rotate_keys: bool) -> torch.Tensor | None:
    """`KVPages.stored_k_mean` of K's own mean."""
    return rotate(k_mean) if k_mean is not None and rotate_keys else k_mean


@dataclass(frozen=True, eq=False)
class KVPages:
    """The device state of one layer's cache: the tensors that kernels read and write.

    A page of one KV head is one run of bytes: K `[128, head_dim]`, V `[8, head_dim, 16]` with tokens in `V_ORDER`, and a header of 128
    bytes, which holds K's scale, V's scale (float32), `nan_in_k` and zeros. The bytes depend only on the page's tokens and on the static
    format and means. So a page is copied, shared, saved or moved by its bytes.

        rotate(k) ~ k_8bit * k_scale[page, head] + stored_k_mean[head]        v ~ v_fp8 * v_scale[page, head] + v_mean[head]

    Kernels take the addresses of these tensors. So each must have the shape and dtype below, be contiguous (the rows of the page table may
    have a stride), and be on the same device. Bytes past a sequence's length are unspecified in K and finite in V (0 * NaN would be NaN).

    Attributes:
        pool: `[num_pages, num_kv_heads, 256 * head_dim + 128]` uint8, with an address that is a multiple of 16 bytes.
        page_table: `[num_seqs, max_pages]` int32, the pages of each sequence in order. Entries past its length name any valid page.
        cache_seqlens: `[num_seqs]` int32, number of tokens of each sequence.
        stored_k_mean, v_mean: `[num_kv_heads, head_dim]` float32, static, subtracted before quantization. None: zero. With `rotate_keys`,
            K's is rotated, because it is subtracted from what is stored. Every function that takes a `k_mean` takes K's own mean.
        key_dtype: the dtype of K's bytes, `torch.int8` or `torch.float8_e4m3fn`: functions call these formats `"int8"` and `"e4m3"`.
            Values are always E4M3.
        rotate_keys: whether K is stored rotated (`rotation.rotate`). Then `attention` rotates queries, too.
    Raises:
        ValueError: a tensor has another shape, dtype, device or stride; the message says which one is required.
    """

    pool: torch.Tensor
    page_table: torch.Tensor
    cache_seqlens: torch.Tensor
    stored_k_mean: torch.Tensor | None = None
    v_mean: torch.Tensor | None = None
    key_dtype: torch.dtype = KEY_TYPES[DEFAULT_KEY_DTYPE]
    rotate_keys: bool = True

    # The lengths of the last append, if they differ and a `PagedKVCache` gave these pages: then no call may divide its tokens evenly.
    ragged: ClassVar[tuple[int, ...] | None] = None

    def __post_init__(self) -> None:
        # Dynamo traces this with checked tensors, or with proxies to write its graph.
        if torch.compiler.is_compiling() or isinstance(self.pool, torch.fx.Proxy):
            return
        if self.key_dtype not in KEY_TYPES.values():
            raise ValueError(
                f"key_dtype of KVPages(...) is the dtype of its bytes, torch.int8 or torch.float8_e4m3fn; got {self.key_dtype!r} "
                "(KVPages.empty and fp8attn.from_dense take the names 'int8' and 'e4m3')"
            )
        for name in FIELDS[:5]:
            x = getattr(self, name)
            if not isinstance(x, torch.Tensor) and not (x is None and name.endswith("mean")):
                raise ValueError(f"{name} must be a tensor; got {type(x).__name__}")
        sizes = [PageLayout.of(head_dim).nbytes for head_dim in HEAD_DIMS]
        if self.pool.dim() != 3 or self.pool.shape[2] not in sizes or self.page_table.dim() != 2:
            raise ValueError(
                f"pool must be [num_pages, num_kv_heads, 256 * head_dim + {HEADER}] with head_dim one of {HEAD_DIMS}, and page_table "
                f"[num_seqs, max_pages]; got {tuple(self.pool.shape)} and {tuple(self.page_table.shape)}"
            )
        mean = self.num_kv_heads, self.head_dim
        for name, shape, dtype in (
            ("pool", self.pool.shape, torch.uint8), ("page_table", self.page_table.shape, torch.int32),
            ("cache_seqlens", (self.num_seqs,), torch.int32), ("stored_k_mean", mean, torch.float32),
            ("v_mean", mean, torch.float32),
        ):  # fmt: skip
            if getattr(self, name) is not None:
                check_tensor(getattr(self, name), name, shape, dtype, self.device, contiguous=name != "page_table")
        if type(self.pool) is torch.Tensor and self.pool.data_ptr() % 16:  # the fake tensors of a compilation have no address
            raise ValueError("pool must begin at a multiple of 16 bytes; this one begins inside another tensor: clone it")
        if self.page_table.shape[1] > 1 and self.page_table.stride(1) != 1:
            raise ValueError(f"page_table must have its rows contiguous; got strides {self.page_table.stride()}: call .contiguous()")

    @classmethod
    def trusted(cls, *fields: Any) -> KVPages:
        """`KVPages` of fields that this package made or has checked, in their order. Without the checks this is 15 us faster."""
        if torch.compiler.is_compiling():  # Dynamo traces the constructor, which then checks nothing
            return cls(*fields)
        pages = object.__new__(cls)
        vars(pages).update(zip(FIELDS, fields, strict=True))
        return pages

    def after(self, lengths: list[int]) -> KVPages:
        """These pages after an append of `lengths` tokens, which differ."""
        pages = KVPages.trusted(*self.state)
        vars(pages)["ragged"] = tuple(lengths)
        return pages

    @classmethod
    def empty(
        cls,
        num_pages: int,
        num_kv_heads: int,
        head_dim: int,
        num_seqs: int,
        max_pages: int,
        device: torch.device | str | None = None,
        *,
        key_dtype: KeyDtype = DEFAULT_KEY_DTYPE,
        rotate_keys: bool = True,
        k_mean: torch.Tensor | None = None,
        v_mean: torch.Tensor | None = None,
    ) -> KVPages:
        """Pages without tokens: all bytes and lengths are zero.

        Sequence b has the pages `b * max_pages` to `(b + 1) * max_pages - 1` in order. If the pool has fewer pages, every entry of the page
        table is 0: write the pages of each sequence into `page_table` before the first append.

        Args:
            num_pages: pages in the pool.
            num_kv_heads, head_dim: the shape of K and V; head_dim is one of `page_layout.HEAD_DIMS`.
            num_seqs, max_pages: number of sequences, and of pages that each may have: the shape of the page table.
            device: the device of all tensors.
            key_dtype: the format of keys, `"int8"` or `"e4m3"`.
            rotate_keys: whether K is stored rotated.
            k_mean, v_mean: `[num_kv_heads, head_dim]` float32, means of K (after RoPE, not rotated) and of V. None: zero.
        Raises:
            ValueError: no kernel takes the head_dim or key_dtype, or a mean has another shape, dtype or device.
        """
        if head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim must be one of {HEAD_DIMS}; got {head_dim}")
        for size, name in ((num_pages, "num_pages"), (num_kv_heads, "num_kv_heads"), (num_seqs, "num_seqs"), (max_pages, "max_pages")):
            check_size(size, name, 0)
        check_flags(rotate_keys=rotate_keys)
        pool = torch.zeros(num_pages, num_kv_heads, PageLayout.of(head_dim).nbytes, dtype=torch.uint8, device=device)
        entries = torch.arange(num_seqs * max_pages, dtype=torch.int32, device=device).view(num_seqs, max_pages)
        for name, mean in (("k_mean", k_mean), ("v_mean", v_mean)):
            check_mean(mean, name, (num_kv_heads, head_dim), pool.device)
        return cls(
            pool,
            entries if entries.numel() <= num_pages else entries.zero_(),
            torch.zeros(num_seqs, dtype=torch.int32, device=device),
            stored_mean(k_mean, rotate_keys),
            v_mean,
            key_type(key_dtype),
            rotate_keys,
        )

    def __repr__(self) -> str:
        keys = key_name(self.key_dtype)
        return (
            f"KVPages({self.num_seqs} seqs, {self.num_pages} pages, {self.num_kv_heads} KV heads of {self.head_dim}, "
            f"{self.nbytes / 2**20:.1f} MiB, {keys} keys, {'rotated' if self.rotate_keys else 'not rotated'}, {self.device})"
        )

    def __deepcopy__(self, memo: dict) -> KVPages:
        """Copies of the tensors, with the attributes that `torch.compile` set on them."""
        return KVPages.trusted(*(copy.deepcopy(x, memo) for x in self.state))

    @property
    def num_pages(self) -> int:
        return self.pool.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.pool.shape[1]

    @property
    def head_dim(self) -> int:
        return head_dim_of(self.pool.shape[2])

    @property
    def num_seqs(self) -> int:
        return self.page_table.shape[0]

    @property
    def device(self) -> torch.device:
        return self.pool.device

    @property
    def k(self) -> torch.Tensor:
        """`[num_pages, num_kv_heads, 128, head_dim]` of `key_dtype`, a view of the pool."""
        return k_of(self.pool, self.key_dtype)

    @property
    def v(self) -> torch.Tensor:
        """`[num_pages, num_kv_heads, 8, head_dim, 16]` float8_e4m3fn, a view of the pool."""
        return v_of(self.pool, FP8)

    @property
    def k_scale(self) -> torch.Tensor:
        """`[num_pages, num_kv_heads]` float32, a view of the pool."""
        return scales_of(self.pool)[:, :, 0]

    @property
    def v_scale(self) -> torch.Tensor:
        """`[num_pages, num_kv_heads]` float32, powers of two, a view of the pool."""
        return scales_of(self.pool)[:, :, 1]

    @property
    def nan_in_k(self) -> torch.Tensor:
        """`[num_pages, num_kv_heads, 2]` float32, a view of the pool: of an INT8 page whose `k_scale` is NaN, the scale of its codes, and
        its first token with a NaN. Zeros in other pages."""
        return nan_in_k_of(self.pool)

    @property
    def state(self) -> tuple[Any, ...]:
        """The fields in the order in which the torch ops take them."""
        return (self.pool, self.page_table, self.cache_seqlens, self.stored_k_mean, self.v_mean, self.key_dtype, self.rotate_keys)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, whether their pages hold tokens or not."""
        return sum(x.nbytes for x in self.state if isinstance(x, torch.Tensor))

    def read(self, seq: int, length: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `length` tokens of sequence `seq`, dequantized.

        Returns:
            K (rotated back) and V, each `[length, num_kv_heads, head_dim]` in `dtype`. They are computed in float64 if `dtype` is float64,
            otherwise in float32.
        Raises:
            ValueError: there is no such sequence, or the page table has no pages for so many tokens.
        """
        if not 0 <= seq < self.num_seqs:
            raise ValueError(f"the pages are of sequences 0 to {self.num_seqs - 1}; got {seq}")
        if not 0 <= length <= PAGE_SIZE * self.page_table.shape[1]:
            raise ValueError(
                f"length is {length}, and page_table has pages for {PAGE_SIZE * self.page_table.shape[1]} tokens of a sequence"
            )
        wide = torch.promote_types(dtype, torch.float32)
        ids = self.page_table[seq, : -(-length // PAGE_SIZE)].long()
        taken = KVPages.trusted(self.pool[ids], *self.state[1:])
        k = unpack_k(taken.k.to(wide) * taken.k_scale.to(wide)[..., None, None])[:length]
        v = unpack_v(taken.v.to(wide) * taken.v_scale.to(wide)[..., None, None, None])[:length]
        k = k if self.stored_k_mean is None else k + self.stored_k_mean.to(wide)
        v = v if self.v_mean is None else v + self.v_mean.to(wide)
        return (rotate_back(k) if self.rotate_keys else k).to(dtype), v.to(dtype)


FIELDS = tuple(field.name for field in fields(KVPages))
