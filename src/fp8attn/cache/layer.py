"""The pages of one layer: their bytes, and their static means and scales."""

from __future__ import annotations

import torch

from ..checks import check_finite, check_is_tensor
from ..formats.kv_format import KVFormat
from ..formats.page_layout import PAGE_SIZE, V_GROUP, V_ORDER, scales_of
from ..formats.rotation import rotate
from ..formats.spec import PageSpec
from ..pages import KVPages
from ..scales import LayerScales
from .page_table import Change, PageTable, lasting


class LayerPages:
    """One layer's pool of pages, and the format of its K and V.

    Args:
        num_kv_heads: heads of K and V.
        spec: what its pages hold.
        rotate_keys: whether keys are rotated before quantization.
        k_mean, v_mean: `[num_kv_heads, head_dim]` float32, subtracted before quantization. K's mean is not rotated.
            None: zero.
        scales: calibrated scales and means. They replace the pages' own scales, `k_mean` and `v_mean`.
        device: the device of the pool.
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
        scales: LayerScales | None,
        device: torch.device,
    ) -> None:
        head_dim, key_dtype = spec.k_dim, spec.k.name
        if scales is not None:
            if not isinstance(scales, LayerScales):
                raise TypeError(
                    f"scales must be LayerScales, one or a list; got {type(scales).__name__}. KVScales.layer(i) has a "
                    f"layer's"
                )
            if scales.k_mean.shape != (num_kv_heads, head_dim) or {scales.k_scale.shape, scales.v_scale.shape} != {
                (num_kv_heads,)
            }:
                raise ValueError(
                    f"the scales are for (num_kv_heads, head_dim) = {tuple(scales.k_mean.shape)}, with k_scale "
                    f"{tuple(scales.k_scale.shape)} and v_scale {tuple(scales.v_scale.shape)}, and the cache has "
                    f"{(num_kv_heads, head_dim)}; pass the scales of this layer of this model"
                )
            if (scales.key_dtype, scales.rotate_keys) != (key_dtype, rotate_keys):
                raise ValueError(
                    f"the scales are for key_dtype={scales.key_dtype!r}, rotate_keys={scales.rotate_keys}, and the "
                    f"cache has {key_dtype!r}, {rotate_keys}; pass the scales' own to the cache, or calibrate again"
                )
            if k_mean is not None or v_mean is not None:
                raise ValueError("calibrated scales include means; leave out k_mean and v_mean")
            k_mean, v_mean = scales.k_mean, scales.v_mean
        for name, mean in (("k_mean", k_mean), ("v_mean", v_mean)):
            if mean is not None:
                check_is_tensor(mean, name, f"[{num_kv_heads}, {head_dim}]")
                if mean.shape != (num_kv_heads, head_dim):
                    raise ValueError(f"{name} must be [{num_kv_heads}, {head_dim}]; got {list(mean.shape)}")
                check_finite(mean, name)
        self.scales, self.device, self.num_kv_heads = scales, device, num_kv_heads
        self.format = KVFormat(spec.name, rotate_keys)
        if k_mean is not None or v_mean is not None:
            k_mean = None if k_mean is None else k_mean.float()
            self.use_means(
                rotate(k_mean) if k_mean is not None and rotate_keys else k_mean,
                None if v_mean is None else v_mean.float(),
            )
        self.pool: torch.Tensor | None = None

    def use_means(self, stored_k_mean: torch.Tensor | None, v_mean: torch.Tensor | None) -> None:
        """Set the means to those of another cache's pages."""
        means = (None if mean is None else mean.to(self.device, non_blocking=True) for mean in (stored_k_mean, v_mean))
        self.format = self.format.with_means(*means)

    def pages(self, table: PageTable, cache_seqlens: torch.Tensor) -> KVPages:
        """The layer as `KVPages`, for kernels. Makes the pool if there is none."""
        pool = self.fit(table.num_pages) if self.pool is None else self.pool
        return KVPages.trusted(pool, table.page_table, cache_seqlens, self.format)

    @lasting
    def fit(self, num_pages: int) -> torch.Tensor:
        """Allocate the pool, or enlarge it. New pages are zero, except for static scales."""
        pool = torch.zeros(
            num_pages, self.num_kv_heads, self.format.layout.nbytes, dtype=torch.uint8, device=self.device
        )
        if self.pool is not None:
            pool[: len(self.pool)] = self.pool
        if self.scales is not None:
            scales_of(pool).copy_(self.scales.page_scales.to(self.device, non_blocking=True))
        self.pool = pool
        return pool

    def _fitted(self, num_pages: int) -> torch.Tensor:
        """The pool, with at least `num_pages`."""
        return self.fit(num_pages) if self.pool is None or len(self.pool) < num_pages else self.pool

    def write(self, pages: list[int], given: torch.Tensor, table: PageTable) -> None:
        """Copy the bytes of these pages from another pool, `given`."""
        self._fitted(table.num_pages)[table.to_device(pages, torch.long)] = given.to(self.device)

    def apply(self, change: Change, table: PageTable) -> None:
        """Grow the pool, copy its pages and drop tokens, as `PageTable.reserve` needs."""
        pool = self._fitted(change.num_pages)
        if change.targets:
            index = table.to_device([change.targets, change.sources])
            pool[index[0]] = pool[index[1]]
        if change.tails:
            self._drop_tails(*table.to_device(change.tails).unbind(1))

    def _drop_tails(self, pages: torch.Tensor, kept: torch.Tensor) -> None:
        """Drop the tokens of `pages [N]` after the first `kept [N]`: V becomes zero there."""
        dropped = torch.arange(PAGE_SIZE, device=pages.device) >= kept[:, None]
        dropped = dropped.unflatten(1, (-1, V_GROUP))[:, :, list(V_ORDER)]
        v = KVPages.trusted(self.pool, None, None, self.format).v.view(torch.uint8)
        v[pages] = v[pages].masked_fill(dropped[:, None, :, None], 0)
