"""Calibrated scales and means, per layer and head."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class LayerScales:
    """Static scales and means of one layer, as a cache takes them in place of its own.

    Attributes:
        k_scale, v_scale: `[num_kv_heads]` float32; a cache rounds them up to powers of two.
        k_mean, v_mean: `[num_kv_heads, head_dim]` float32, subtracted before quantisation.
    """

    k_scale: torch.Tensor
    v_scale: torch.Tensor
    k_mean: torch.Tensor
    v_mean: torch.Tensor
