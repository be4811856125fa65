"""How an FP8 layer's K and V travel from the cache to the attention function: as tensors that carry their pages."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch.utils._pytree import tree_map

from ...layout import FIELDS, PAGE_SIZE, KVPages
from ...rotation import rotate_back

ATTN_IMPLEMENTATION = "fp8_kv"  # transformers looks into names: "flash", "sdpa", "flex_attention" and "/" would mean something
_TENSORS = FIELDS[:5]


def dequantize(pages: KVPages, which: str, length: int, dtype: torch.dtype) -> torch.Tensor:
    """K (rotated back) or V of every sequence as `[num_seqs, num_kv_heads, length, head_dim]`, zero past `cache_seqlens`; device work
    alone. Where a sequence has tokens the values are those of `KVPages.read`.

    Args:
        pages: the cache.
        which: `"k"` or `"v"`.
        length: tokens to return.
        dtype: of the result. The arithmetic is FP32.
    """
    ids = pages.page_table[:, : -(-length // PAGE_SIZE)].long()
    codes, scale, mean = getattr(pages, which), getattr(pages, f"{which}_scale"), getattr(pages, f"{which}_mean")
    # FP8 tensors index through their bytes: a CPU has no gather for them.
    x = codes.view(torch.uint8)[ids].view(codes.dtype).float()
    if which == "v":
        # `layout.V_ORDER` as axes: position 4a + 2b + c holds token 8b + 2a + c. Indices and aranges would be real tensors where this is
        # traced with fake ones.
        x = x.unflatten(-1, (4, 2, 2)).transpose(-2, -3).flatten(-3).transpose(-1, -2).flatten(-3, -2)
    x = x * scale[ids][..., None, None]
    x = x.transpose(1, 2).flatten(2, 3)[:, :, :length]
    x = x if mean is None else x + mean[:, None]
    x = rotate_back(x) if which == "k" and pages.rotate_keys else x
    x = torch.nn.functional.pad(x, (0, 0, 0, length - x.shape[2]))  # a table may name no more pages than there are tokens for
    # Bytes past the length are unspecified in K: a NaN there would survive a mask that is added.
    held = pages.cache_seqlens.new_ones(length).cumsum(0) <= pages.cache_seqlens[:, None]
    return torch.where(held[:, None, :, None], x, 0.0).to(dtype)


def tokens_of(x: torch.Tensor) -> torch.Tensor:
    """`[B, heads, S, head_dim]` as `[B * S, heads, head_dim]`; in a decode step by one call of torch, not two."""
    return x.squeeze(2) if x.shape[2] == 1 else x.transpose(1, 2).flatten(0, 1)


class PagedTensor(torch.Tensor):
    """K or V of an FP8 layer: shape `[B, num_kv_heads, S, head_dim]`, the model's dtype, and no storage but the layer's pages.

    The attention function takes the pages (`pages_of`); every other operation dequantizes first. `data_ptr()` is 0, so code that passes
    raw pointers (a foreign kernel) must not get one: the cache hands it out only when the model's attention implementation is `fp8_kv`.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, pages: KVPages, which: str, shape: Sequence[int], dtype: torch.dtype, backend: str = "auto") -> PagedTensor:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=pages.pool.device)

    def __init__(self, pages: KVPages, which: str, shape: Sequence[int], dtype: torch.dtype, backend: str = "auto") -> None:
        self.which, self.backend, self.pages = which, backend, pages

    # `__tensor_flatten__` names one attribute for each tensor.
    _pool, _page_table, _cache_seqlens, _k_mean, _v_mean, _key_dtype, _rotate_keys = (
        property(attrgetter(f"pages.{name}")) for name in FIELDS
    )

    def dequantize(self) -> torch.Tensor:
        """The plain tensor that this one represents."""
        return dequantize(pages_of(self), self.which, self.shape[2], self.dtype)

    def __repr__(self, **_) -> str:
        return f"PagedTensor({self.which!r}, shape={tuple(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"

    def __tensor_flatten__(self):
        given = [f"_{name}" for name in _TENSORS if getattr(self.pages, name) is not None]
        return given, (self._key_dtype, self._rotate_keys, self.which, self.dtype, self.backend)

    @classmethod
    def __tensor_unflatten__(cls, inner, context, outer_size, outer_stride):
        key_dtype, rotate_keys, which, dtype, backend = context
        pages = KVPages.trusted(*(inner.get(f"_{name}") for name in _TENSORS), key_dtype, rotate_keys)
        return cls(pages, which, outer_size, dtype, backend)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = tree_map(lambda x: x.dequantize() if isinstance(x, PagedTensor) else x, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def pages_of(x: PagedTensor) -> KVPages:
    """The pages that `x` stands for. A function, because Dynamo traces into no methods of a tensor; and by tensors, because it makes
    tensors alone out of a tensor's attributes."""
    if torch.compiler.is_compiling():
        return KVPages.trusted(x._pool, x._page_table, x._cache_seqlens, x._k_mean, x._v_mean, x._key_dtype, x._rotate_keys)
    return x.pages
