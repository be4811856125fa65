"""`PagedTensor`, which passes an FP8 layer's pages from the cache to the attention function."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch.utils._pytree import tree_map

from ...formats.kv_format import KVFormat
from ...formats.page_layout import PAGE_SIZE
from ...pages import KVPages
from ...params import BackendName
from ..k_eq_v import key_of

ATTN_IMPLEMENTATION = "fp8_kv"  # transformers searches names for "flash", "sdpa", "flex_attention" and "/"
_TENSORS = {
    "_pool": "pool", "_page_table": "page_table", "_cache_seqlens": "cache_seqlens",
    "_stored_k_mean": "format.stored_k_mean", "_v_mean": "format.v_mean", "_factor": "format.factor",
}  # fmt: skip


class Reading(NamedTuple):
    """How attention reads an FP8 layer's pages: the options of an `FP8Cache`, and the layer's window."""

    backend: BackendName
    exact: bool
    batch_invariant: bool
    window: int | None


def dequantize(
    pages: KVPages,
    which: Literal["k", "v"],
    length: int,
    dtype: torch.dtype,
    last: bool = False,
    matrix: torch.Tensor | None = None,
) -> torch.Tensor:
    """Dequantize K (rotated back) or V of every sequence, as work of the device only.

    Args:
        dtype: the dtype of the result. The arithmetic is FP32.
        last: return the last tokens, of layers with a window, whose first pages were given back. False: the first ones.
        matrix: by which K follows from V (`k_eq_v`), if the pages hold V as latents.
    Returns:
        `[num_seqs, num_kv_heads, length, channels]`: the values of `KVPages.read`, and zeros past `cache_seqlens`.
    """
    ids = pages.page_table[:, : -(-length // PAGE_SIZE)].long()
    lengths = pages.cache_seqlens[:, None].long()
    first = torch.zeros_like(lengths)  # the first token of the result
    if last:
        first = (lengths - length).clamp_min(0)
        columns = first // PAGE_SIZE + lengths.new_ones(-(-length // PAGE_SIZE) + 1).cumsum(0) - 1
        ids = pages.page_table.long().gather(1, columns.clamp_max(pages.page_table.shape[1] - 1))
    if matrix is None:
        x = pages.dequantize(which, ids, torch.float32)
    else:
        x = pages.dequantize("k", ids, torch.float32)
        x = x if which == "v" else key_of(x, pages.dequantize("v", ids, torch.float32), matrix)
    token = first + lengths.new_ones(length).cumsum(0) - 1
    if last:
        place = (token - first // PAGE_SIZE * PAGE_SIZE)[:, None, :, None]
        x = x.gather(2, place.expand(-1, x.shape[1], -1, x.shape[3]))
    x = x[:, :, :length]
    # The table may have fewer columns than `length` needs.
    x = torch.nn.functional.pad(x, (0, 0, 0, length - x.shape[2]))
    # Bytes of K past the length are unspecified. An additive mask would not remove a NaN there.
    return torch.where((token < lengths)[:, None, :, None], x, 0.0).to(dtype)


def tokens_of(x: torch.Tensor) -> torch.Tensor:
    """`[B, heads, S, head_dim]` as `[B * S, heads, head_dim]`.
    In a decode step it makes one torch call instead of two.
    """
    return x.squeeze(2) if x.shape[2] == 1 else x.transpose(1, 2).flatten(0, 1)


class PagedTensor(torch.Tensor):
    """K or V of an FP8 layer: a tensor `[B, num_kv_heads, S, head_dim]` in the model's dtype that has no storage except
    the layer's pages.

    Of a layer whose keys follow from its values, both have the pages of its latents, and the matrix of its keys.

    The attention function reads the pages (`pages_of`). Every other operation dequantizes first. `data_ptr()` is 0, so
    a kernel that takes raw pointers must not get one. The cache returns it only if the model's attention implementation
    is `fp8_kv`.
    """

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, pages: KVPages, which: str, shape: Sequence[int], dtype: torch.dtype, *_: Any) -> PagedTensor:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=pages.pool.device)

    def __init__(
        self,
        pages: KVPages,
        which: Literal["k", "v"],
        shape: Sequence[int],
        dtype: torch.dtype,
        reading: Reading,
        matrix: torch.Tensor | None = None,
    ) -> None:
        self.pages, self.which, self.reading, self._key_matrix = pages, which, reading, matrix

    # One attribute for each tensor, because `__tensor_flatten__` returns names of attributes.
    _pool, _page_table, _cache_seqlens, _stored_k_mean, _v_mean, _factor = (
        property(attrgetter(f"pages.{name}")) for name in _TENSORS.values()
    )
    _spec, _rotate = (property(attrgetter(f"pages.format.{x}")) for x in ("name", "rotate"))

    def dequantize(self) -> torch.Tensor:
        """The values as a plain tensor."""
        last = self.reading.window is not None
        return dequantize(pages_of(self), self.which, self.shape[2], self.dtype, last, self._key_matrix)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's has no types
        return (
            f"PagedTensor({self.which!r}, shape={tuple(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"
        )

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        names = [name for name in (*_TENSORS, "_key_matrix") if getattr(self, name) is not None]
        return names, (self._spec, self._rotate, self.which, self.dtype, self.reading)

    @classmethod
    def __tensor_unflatten__(
        cls,
        inner: dict[str, torch.Tensor],
        context: tuple[Any, ...],
        outer_size: Sequence[int],
        outer_stride: Sequence[int],
    ) -> PagedTensor:
        spec, rotated, which, dtype, reading = context
        format = KVFormat(spec, rotated, *(inner.get(name) for name in ("_stored_k_mean", "_v_mean", "_factor")))
        pages = KVPages.trusted(inner["_pool"], inner["_page_table"], inner["_cache_seqlens"], format)
        return cls(pages, which, outer_size, dtype, reading, inner.get("_key_matrix"))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares the default, which is no class method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = tree_map(lambda x: x.dequantize() if isinstance(x, PagedTensor) else x, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def pages_of(x: PagedTensor) -> KVPages:
    """The pages of `x`. This is a function and reads tensors, because Dynamo does not trace methods of a tensor
    subclass, and of its attributes traces only tensors."""
    if torch.compiler.is_compiling():
        format = KVFormat(x._spec, x._rotate, x._stored_k_mean, x._v_mean, x._factor)
        return KVPages.trusted(x._pool, x._page_table, x._cache_seqlens, format)
    return x.pages
