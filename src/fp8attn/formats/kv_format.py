"""`KVFormat`: what the bytes of a layer's pages mean."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import UsageError
from .codec import Codec
from .page_layout import PageLayout
from .rotation import rotate
from .spec import SPECS, PageSpec, spec_of


@dataclass(frozen=True, eq=False)
class KVFormat:
    """What the bytes of a layer's pages mean, static for the life of a cache.

        rotate(k) ~ k_8bit * k_scale[page, head] + stored_k_mean[head]
        v ~ v_8bit * v_scale[page, head] + v_mean[head]

    `formats/latent.py` has the equation of latents, whose mean is `v_mean`.

    Attributes:
        name: that of the spec (`spec.PageSpec.name`). Compiled code takes a string as a constant, and would make the
            numbers of a spec symbolic.
        rotate: whether K is stored rotated (`rotation.rotate`). Then attention rotates queries, too.
        stored_k_mean, v_mean: `[num_kv_heads, k_dim]` and `[num_kv_heads, v_dim]` float32, subtracted before
            quantization. None: zero. If K is rotated, so is its mean here, because it is subtracted from what is
            stored. Every function that takes a `k_mean` takes K's own mean.
        factor: `[num_kv_heads, v_dim / 128]` float32, by which each block of 128 channels of a latent is divided before
            quantization. None: one. Only for latents.
    """

    name: str
    rotate: bool = True
    stored_k_mean: torch.Tensor | None = None
    v_mean: torch.Tensor | None = None
    factor: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        head_dim: int | PageSpec,
        key_dtype: str,
        rotate_keys: bool,
        k_mean: torch.Tensor | None = None,
        v_mean: torch.Tensor | None = None,
        factor: torch.Tensor | None = None,
    ) -> KVFormat:
        """The format that the keywords of public functions describe. `k_mean` is K's own mean.

        Raises:
            UsageError: there is no such key_dtype, or latents get what only K has, or K and V what only latents have.
        """
        spec = PageSpec.of(head_dim, key_dtype)
        if spec.v_in_k and (k_mean is not None or not rotate_keys):
            raise UsageError("latents are rotated, and their mean is v_mean: leave out k_mean and rotate_keys")
        if factor is not None and not spec.v_in_k:
            raise UsageError(f"factor is for latents (PageSpec.latent), not for pages {spec.name}: leave it out")
        stored_k_mean = rotate(k_mean) if k_mean is not None and rotate_keys else k_mean
        return cls(spec.name, rotate_keys, stored_k_mean, v_mean, factor)

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The static tensors, in the order of the fields."""
        return self.stored_k_mean, self.v_mean, self.factor

    @property
    def spec(self) -> PageSpec:
        """What a page holds.

        Raises:
            UsageError: there are no such pages.
        """
        return SPECS.get(self.name) or spec_of(self.name)  # which raises

    @property
    def k(self) -> Codec:
        """K's codec."""
        return self.spec.k

    @property
    def v(self) -> Codec:
        """V's codec."""
        return self.spec.v

    @property
    def layout(self) -> PageLayout:
        """Where the parts of a page are."""
        return self.spec.layout
