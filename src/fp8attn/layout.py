"""The one page layout: everything writes it, every kernel reads it.

A page holds 128 tokens of one KV head. K lies `[128, D]`; V lies in groups of 16 tokens, each transposed: `[8, D, 16]`. An FP8 tensor-core
operand must be contiguous along the contracted axis, which V's tokens are, and 8 channels of a group are 128 bytes in a row: the unit that
those cores read (a core matrix), and no more than `D / 8` lines of memory for a token that is appended. Inside a group the tokens stand in
`V_ORDER`: then the registers of a softmax accumulator are the operand of P·V as they stand, with no shuffle.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields

import torch

from .numerics import MIN_SCALE

PAGE_SIZE = 128
V_GROUP = 16  # tokens of V that lie together
FP8 = torch.float8_e4m3fn
HEAD_DIMS = (64, 80, 96, 128, 192, 256)

# V_ORDER[position] is the token that lies there; V_POSITION is its inverse.
V_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
V_POSITION = tuple(V_ORDER.index(token) for token in range(V_GROUP))


def pack_k(x: torch.Tensor) -> torch.Tensor:
    """Tokens `[P * 128, H, D]` to K pages `[P, H, 128, D]`; any dtype."""
    return x.unflatten(0, (-1, PAGE_SIZE)).transpose(1, 2).contiguous()


def unpack_k(pages: torch.Tensor) -> torch.Tensor:
    """K pages `[P, H, 128, D]` to tokens `[P * 128, H, D]`."""
    return pages.transpose(1, 2).flatten(0, 1)


def pack_v(x: torch.Tensor) -> torch.Tensor:
    """Tokens `[P * 128, H, D]` to V pages `[P, H, 8, D, 16]`, transposed and in `V_ORDER`; any dtype."""
    groups = x.unflatten(0, (-1, PAGE_SIZE // V_GROUP, V_GROUP))
    return groups[:, :, list(V_ORDER)].permute(0, 3, 1, 4, 2).contiguous()


def unpack_v(pages: torch.Tensor) -> torch.Tensor:
    """V pages `[P, H, 8, D, 16]` to tokens `[P * 128, H, D]`."""
    return pages.permute(0, 2, 4, 1, 3)[:, :, list(V_POSITION)].flatten(0, 2)


def page_shapes(num_pages: int, num_kv_heads: int, head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of `KVPages.k` and of `KVPages.v`."""
    return (num_pages, num_kv_heads, PAGE_SIZE, head_dim), (num_pages, num_kv_heads, PAGE_SIZE // V_GROUP, head_dim, V_GROUP)


def check_tensor(
    x: torch.Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype | None, device: torch.device, *, contiguous: bool = True
) -> None:
    """Raise a ValueError, with what to do, for a tensor whose address a kernel cannot take; `dtype` None: any floating-point one."""
    right_dtype = x.is_floating_point() if dtype is None else x.dtype == dtype
    if x.shape != shape or not right_dtype or x.device != device:
        wanted, given = ("floating point" if x is None else str(x).removeprefix("torch.") for x in (dtype, x.dtype))
        raise ValueError(f"{name} must be {tuple(shape)} {wanted} on {device}; got {tuple(x.shape)} {given} on {x.device}")
    if contiguous and not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous; got strides {x.stride()} for shape {tuple(x.shape)}: call .contiguous()")


@dataclass(frozen=True, eq=False)
class KVPages:
    """The device state of one layer's cache: what the kernels read and write, and nothing else.

    Kernels take the addresses of these tensors, so each must be as described here, contiguous (the table may have a stride between its
    rows), and on one device. A slice of the heads or of the pages' halves of a larger pool is not: copy it.

    `k ~ k_fp8 * k_scale[page, head] + k_mean[seq, head]`, and likewise `v`. Bytes past a sequence's length are unspecified in K and
    finite in V (0 * NaN would be NaN).

    Attributes:
        k: `[num_pages, num_kv_heads, 128, head_dim]` float8_e4m3fn.
        v: `[num_pages, num_kv_heads, 8, head_dim, 16]` float8_e4m3fn, tokens in `V_ORDER`.
        k_scale, v_scale: `[num_pages, num_kv_heads]` float32, powers of two.
        k_mean, v_mean: `[num_seqs, num_kv_heads, head_dim]` float32, subtracted before quantisation.
        page_table: `[num_seqs, max_pages]` int32, the pages of each sequence in order; entries past its length are any valid page.
        cache_seqlens: `[num_seqs]` int32, tokens held.
    Raises:
        ValueError: a tensor that is not so, with what it should be.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    k_mean: torch.Tensor
    v_mean: torch.Tensor
    page_table: torch.Tensor
    cache_seqlens: torch.Tensor

    def __post_init__(self) -> None:
        # Dynamo traces this with tensors that are checked already, or makes pages of proxies to write its graph.
        if torch.compiler.is_compiling() or isinstance(self.k, torch.fx.Proxy):
            return
        for name, x in vars(self).items():
            if not isinstance(x, torch.Tensor):
                raise ValueError(f"{name} must be a tensor; got {type(x).__name__}")
        if self.k.dim() != 4 or self.k.shape[2] != PAGE_SIZE or self.page_table.dim() != 2:
            raise ValueError(
                f"k must be [num_pages, num_kv_heads, {PAGE_SIZE}, head_dim] and page_table [num_seqs, max_pages]; "
                f"got {tuple(self.k.shape)} and {tuple(self.page_table.shape)}"
            )
        k_shape, v_shape = page_shapes(self.num_pages, self.num_kv_heads, self.head_dim)
        scales, means = k_shape[:2], (self.num_seqs, self.num_kv_heads, self.head_dim)
        for name, shape, dtype in (
            ("k", k_shape, FP8), ("v", v_shape, FP8), ("k_scale", scales, torch.float32), ("v_scale", scales, torch.float32),
            ("k_mean", means, torch.float32), ("v_mean", means, torch.float32),
            ("page_table", self.page_table.shape, torch.int32), ("cache_seqlens", (self.num_seqs,), torch.int32),
        ):  # fmt: skip
            check_tensor(getattr(self, name), name, shape, dtype, self.device, contiguous=name != "page_table")
        if self.page_table.shape[1] > 1 and self.page_table.stride(1) != 1:
            raise ValueError(f"page_table must have its rows contiguous; got strides {self.page_table.stride()}: call .contiguous()")

    @classmethod
    def trusted(cls, *tensors: torch.Tensor) -> KVPages:
        """Pages of tensors that this package made or has checked, in the order of the fields: the checks would cost 15 us."""
        if torch.compiler.is_compiling():  # Dynamo traces the constructor, which checks nothing there
            return cls(*tensors)
        pages = object.__new__(cls)
        vars(pages).update(zip(FIELDS, tensors, strict=True))
        return pages

    @classmethod
    def empty(
        cls, num_pages: int, num_kv_heads: int, head_dim: int, num_seqs: int, max_pages: int, device: torch.device | str | None = None
    ) -> KVPages:
        """No tokens: bytes, means and lengths zero, scales the smallest there is."""
        return cls.trusted(
            *cls.empty_pool(num_pages, num_kv_heads, head_dim, device).values(),
            *(torch.zeros(num_seqs, num_kv_heads, head_dim, dtype=torch.float32, device=device) for _ in range(2)),
            torch.zeros(num_seqs, max_pages, dtype=torch.int32, device=device),
            torch.zeros(num_seqs, dtype=torch.int32, device=device),
        )

    @staticmethod
    def empty_pool(num_pages: int, num_kv_heads: int, head_dim: int, device: torch.device | str | None = None) -> dict[str, torch.Tensor]:
        """The fields that are pages, by name."""
        k, v = (torch.zeros(shape, dtype=torch.uint8, device=device).view(FP8) for shape in page_shapes(num_pages, num_kv_heads, head_dim))
        return {
            "k": k,
            "v": v,
            "k_scale": torch.full((num_pages, num_kv_heads), MIN_SCALE, dtype=torch.float32, device=device),
            "v_scale": torch.full((num_pages, num_kv_heads), MIN_SCALE, dtype=torch.float32, device=device),
        }

    def __reduce__(self) -> tuple:
        """FP8 tensors are pickled as bytes: torch (2.13) cannot load a pickled FP8 tensor."""
        return _from_bytes, tuple(x.view(torch.uint8) if x.dtype == FP8 else x for x in self.tensors)

    def __deepcopy__(self, memo: dict) -> KVPages:
        """The tensors' own copies, with what `torch.compile` noted on them."""
        return KVPages.trusted(*(copy.deepcopy(x, memo) for x in self.tensors))

    @property
    def num_pages(self) -> int:
        return self.k.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def head_dim(self) -> int:
        return self.k.shape[3]

    @property
    def num_seqs(self) -> int:
        return self.page_table.shape[0]

    @property
    def device(self) -> torch.device:
        return self.k.device

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The eight tensors in the order of the fields, as the kernels and torch ops take them."""
        return (
            self.k, self.v, self.k_scale, self.v_scale, self.k_mean, self.v_mean, self.page_table, self.cache_seqlens,
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes held: pages, scales, means, table and lengths, whether filled or not."""
        return sum(t.nbytes for t in self.tensors)

    def read(self, seq: int, length: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `length` tokens of sequence `seq`, dequantised: K and V, each `[length, num_kv_heads, head_dim]` in `dtype`."""
        ids = self.page_table[seq, : -(-length // PAGE_SIZE)].long()
        # FP8 tensors index through their bytes: a CPU has no gather for them.
        k, v = (x.view(torch.uint8)[ids].view(FP8).to(dtype) for x in (self.k, self.v))
        k = unpack_k(k * self.k_scale[ids].to(dtype)[..., None, None])[:length] + self.k_mean[seq].to(dtype)
        v = unpack_v(v * self.v_scale[ids].to(dtype)[..., None, None, None])[:length] + self.v_mean[seq].to(dtype)
        return k, v


FIELDS = tuple(field.name for field in fields(KVPages))


def _from_bytes(k: torch.Tensor, v: torch.Tensor, *others: torch.Tensor) -> KVPages:
    return KVPages(k.view(FP8), v.view(FP8), *others)
