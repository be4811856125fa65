"""`KVFormat`: what the bytes of a layer's pages mean."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from .codec import E4M3, INT8, Codec, codec_of
from .page_layout import LAYOUTS, PageLayout
from .rotation import rotate


@dataclass(frozen=True, eq=False)
class KVFormat:
    """What the bytes of a layer's pages mean, static for the life of a cache.

        rotate(k) ~ k_8bit * k_scale[page, head] + stored_k_mean[head]        v ~ v_8bit * v_scale[page, head] + v_mean[head]

    Attributes:
        head_dim: channels of a head.
        k, v: the codecs. V's is always `E4M3`.
        rotate: whether K is stored rotated (`rotation.rotate`). Then attention rotates queries, too.
        stored_k_mean, v_mean: `[num_kv_heads, head_dim]` float32, subtracted before quantization. None: zero. If K is rotated, so is its
            mean here, because it is subtracted from what is stored. Every function that takes a `k_mean` takes K's own mean.
    """

    head_dim: int
    k: Codec = field(default_factory=lambda: INT8)  # a factory, because Dynamo of PyTorch 2.11 cannot wrap the object itself as a default
    v: Codec = field(default_factory=lambda: E4M3)
    rotate: bool = True
    stored_k_mean: torch.Tensor | None = None
    v_mean: torch.Tensor | None = None

    @classmethod
    def of(
        cls, head_dim: int, key_dtype: str, rotate_keys: bool, k_mean: torch.Tensor | None = None, v_mean: torch.Tensor | None = None
    ) -> KVFormat:
        """The format that the keywords of public functions describe. `k_mean` is K's own mean.

        Raises:
            UsageError: there is no such key_dtype.
        """
        return cls(
            head_dim, codec_of(key_dtype), E4M3, rotate_keys, rotate(k_mean) if k_mean is not None and rotate_keys else k_mean, v_mean
        )

    def with_means(self, stored_k_mean: torch.Tensor | None, v_mean: torch.Tensor | None) -> KVFormat:
        """This format with other means, in the form in which it has them."""
        return replace(self, stored_k_mean=stored_k_mean, v_mean=v_mean)

    @property
    def layout(self) -> PageLayout:
        """Where the parts of a page are."""
        return LAYOUTS[self.head_dim]
