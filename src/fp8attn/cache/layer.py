"""The pages of one layer: their bytes, and their static means and scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from ..checks import check_finite, check_is_tensor
from ..errors import UsageError
from ..formats.kv_format import KVFormat
from ..formats.page_layout import PAGE_SIZE, V_GROUP, V_ORDER, scales_of
from ..formats.spec import PageSpec
from ..pages import KVPages
from ..scales import LayerScales

P = ParamSpec("P")
R = TypeVar("R")


def lasting(method: Callable[P, R]) -> Callable[P, R]:
    """A method whose tensors outlive the call. None becomes an inference tensor: those cannot be written to outside of
    `torch.inference_mode`. All others can be written to in both modes."""
    return torch.inference_mode(False)(torch.no_grad()(method))


class LayerPages:
    """One layer's pool of pages, and the format of its K and V.

    Args:
        k_mean, v_mean: `[num_kv_heads, head_dim]` float32, subtracted before quantization. K's mean is not rotated.
            None: zero.
        factor: `[num_kv_heads, rank / 128]` float32, of latents (`KVFormat.factor`). None: one.
        scales: calibrated scales and means. They replace the pages' own scales, `k_mean` and `v_mean`.
    Attributes:
        pool: `[num_pages, num_kv_heads, page_bytes]` uint8. None before the first pages.
        format: what the bytes of its pages mean.
    Raises:
        TypeError: `scales` are no `LayerScales`.
        ValueError: scales or means do not fit the layer.
    """

    def __init__(
        self,
        num_kv_heads: int,
        spec: PageSpec,
        rotate_keys: bool,
        k_mean: torch.Tensor | None,
        v_mean: torch.Tensor | None,
        factor: torch.Tensor | None,
        scales: LayerScales | None,
        device: torch.device,
    ) -> None:
        shape = num_kv_heads, spec.k_dim
        if scales is not None:
            if spec.v_in_k:
                raise UsageError("calibrated scales are for pages of K and V; leave out scales for latents")
            if not isinstance(scales, LayerScales):
                raise TypeError(
                    f"scales must be LayerScales, one or a list; got {type(scales).__name__}. KVScales.layer(i) has a "
                    f"layer's"
                )
            if scales.k_mean.shape != shape or {scales.k_scale.shape, scales.v_scale.shape} != {(num_kv_heads,)}:
                raise ValueError(
                    f"the scales are for (num_kv_heads, head_dim) = {tuple(scales.k_mean.shape)}, with k_scale "
                    f"{tuple(scales.k_scale.shape)} and v_scale {tuple(scales.v_scale.shape)}, and the cache has "
                    f"{shape}; pass the scales of this layer of this model"
                )
            if (scales.key_dtype, scales.rotate_keys) != (spec.k.name, rotate_keys):
                raise ValueError(
                    f"the scales are for key_dtype={scales.key_dtype!r}, rotate_keys={scales.rotate_keys}, and the "
                    f"cache has {spec.k.name!r}, {rotate_keys}; pass the scales' own to the cache, or calibrate again"
                )
            if k_mean is not None or v_mean is not None:
                raise ValueError("calibrated scales include means; leave out k_mean and v_mean")
            k_mean, v_mean = scales.k_mean, scales.v_mean
        static = k_mean, v_mean, factor
        for (name, width), x in zip(spec.static_widths.items(), static, strict=True):
            if x is not None:
                check_is_tensor(x, name, f"[{num_kv_heads}, {width}]")
                if x.shape != (num_kv_heads, width):
                    raise ValueError(f"{name} must be [{num_kv_heads}, {width}]; got {list(x.shape)}")
                check_finite(x, name)
        self.scales, self.device, self.num_kv_heads = scales, device, num_kv_heads
        self.pool: torch.Tensor | None = None
        self._pages: KVPages | None = None  # None after a tensor of this layer was replaced
        self.format = KVFormat.of(spec, spec.k.name, rotate_keys, *(None if x is None else x.float() for x in static))
        self.use_tensors(*self.format.tensors)

    def use_tensors(self, *tensors: torch.Tensor | None) -> None:
        """Set the static tensors of the format (`KVFormat.tensors`), as to those of another cache's pages."""
        moved = (None if x is None else x.to(self.device, non_blocking=True) for x in tensors)
        self.format, self._pages = KVFormat(self.format.name, self.format.rotate, *moved), None

    def replace(self, pool: torch.Tensor | None) -> None:
        """Set another pool, or none until the next use, and free the old one."""
        self.pool, self._pages = pool, None

    def pages(self, page_table: torch.Tensor, cache_seqlens: torch.Tensor, num_pages: int) -> KVPages:
        """The layer as `KVPages`, for kernels: the same object as long as its tensors are the same, because compiled
        code and CUDA graphs refer to them. Makes the pool if there is none of `num_pages`.
        """
        pages = self._pages
        if pages is None or pages.page_table is not page_table or pages.cache_seqlens is not cache_seqlens:
            pages = KVPages.trusted(self.fit(num_pages), page_table, cache_seqlens, self.format)
            self._pages = pages
        return pages

    @lasting
    def fit(self, num_pages: int) -> torch.Tensor:
        """The pool, with at least `num_pages`: it is allocated, or enlarged. New pages are zero, except for static
        scales.
        """
        old = self.pool
        if old is not None and len(old) >= num_pages:
            return old
        size = num_pages, self.num_kv_heads, self.format.layout.nbytes
        pool = torch.zeros(size, dtype=torch.uint8, device=self.device)
        if old is not None:
            pool[: len(old)] = old
        if self.scales is not None:
            scales_of(pool).copy_(self.scales.page_scales.to(self.device, non_blocking=True))
        self.replace(pool)
        return pool

    def drop_tails(self, pages: torch.Tensor, lengths: torch.Tensor) -> None:
        """Drop the tokens of `pages [N]` after the first `lengths [N]`: V becomes zero there. Of latents, no kernel
        reads what is past the end.
        """
        if self.format.spec.v_in_k:
            return
        dropped = torch.arange(PAGE_SIZE, device=pages.device) >= lengths[:, None]
        dropped = dropped.unflatten(1, (-1, V_GROUP))[:, :, list(V_ORDER)]
        v = KVPages.trusted(self.pool, None, None, self.format).v.view(torch.uint8)
        v[pages] = v[pages].masked_fill(dropped[:, None, :, None], 0)
